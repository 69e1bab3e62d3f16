"""Stored results for a reader: which runs there are, samples as frames, and errors of routing by any filter."""
from __future__ import annotations

import json

import pandas as pd
import pytest
import repair_artifacts
from nexus import artifact as stored_form
from nexus import results, tables
from nexus.config import ROOT

SYSTEMS = ("slb", "bm25", "concat_all")
QUERIES = [
    {"id": "first", "query": "File a bug about umlauts\u2028in exports.", "server": "github", "tool": "create_issue"},
    {"query": "Close the milestone.", "tool": "close"},
]


def choice(case, system, n_tools, chosen, right, **more):
    return {"n_tools": n_tools, "system": system, "case": case, "chosen": chosen, "right": right, "status": "ok",
            "rank": 1, "margin": 0.1, "wording": "own"} | more


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two runs, of which one was measured, with envelopes that are not checked."""
    made = tmp_path / "results" / "measured"
    made.mkdir(parents=True)
    (tmp_path / "results" / "published.json").write_text("{}")
    (tmp_path / "results" / "empty").mkdir()
    (tmp_path / "queries.jsonl").write_text("\n\n".join(json.dumps(query, ensure_ascii=False) for query in QUERIES))
    content = repair_artifacts.artifact("routing_accuracy_n250", []) | {
        "samples": "routing_accuracy_n250.samples.jsonl",
        "config": {"workload": {"path": str(tmp_path / "queries.jsonl"), "routing": {"evaluation": "elsewhere"}}}}
    (made / "routing_accuracy_n250.json").write_text(json.dumps(content))
    samples = [choice("first", "slb", 10, "github/create_issue", True),
               choice("first", "bm25", 10, "jira/create", False),
               choice("first", "slb", 50, "jira/create", False, rank=2),
               choice("first", "bm25", 50, "jira/create", False),
               choice("first", "concat_all", 50, None, None, status="overflow"),
               choice("line-3", "slb", 50, "github/close", False, wording="paraphrase"),
               choice("line-3", "bm25", 50, "close", True, wording="paraphrase")]
    (made / "routing_accuracy_n250.samples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in samples))
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(stored_form, "read", lambda path: json.loads(path.read_text()))
    return tmp_path


def test_runs_are_those_that_have_the_artifact(folder):
    assert results.runs("routing_accuracy_n250") == {"measured": folder / "results" / "measured"}


def test_what_no_run_has_is_told_with_the_command_that_makes_it(folder):
    with pytest.raises(tables.MissingArtifact, match=r"no run in .* has sidecar/accuracy\.json; make one with: make "):
        results.runs("sidecar_accuracy")
    with pytest.raises(tables.MissingArtifact, match="run 'empty' has no routing_accuracy_n250.json; there is one of "
                                                     "measured"):
        results.samples("routing_accuracy_n250", "empty")


def test_samples_come_in_their_order(folder):
    frame = results.samples("routing_accuracy_n250", "measured")
    assert len(frame) == 7 and frame["system"].tolist()[:3] == ["slb", "bm25", "slb"]


def test_choices_carry_the_text_and_the_tool_of_their_query(folder):
    choices = results.routing_choices("measured")
    assert len(choices) == 7
    assert choices.loc[0, "query"] == QUERIES[0]["query"] and choices.loc[0, "wanted"] == "github/create_issue"
    # The second query has no id, so that it is known by its line.
    assert choices.loc[5, "query"] == "Close the milestone." and choices.loc[5, "wanted"] == "close"


def test_queries_that_are_gone_are_told(folder):
    (folder / "queries.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"queries\.jsonl is missing, the queries that this run asked"):
        results.routing_choices("measured")


def test_errors_are_wrong_choices_only_the_most_missed_first(folder):
    errors = results.routing_errors(results.routing_choices("measured"))
    told = list(errors[["case", "n_tools", "system", "missed_by"]].itertuples(index=False, name=None))
    assert told == [("first", 50, "bm25", 2), ("first", 50, "slb", 2), ("first", 10, "bm25", 1),
                    ("line-3", 50, "slb", 1)]
    assert "concat_all" not in set(errors["system"]), "what overflows chose nothing"


@pytest.mark.parametrize(("filters", "cases"), [
    ({"system": "slb"}, ["first", "line-3"]), ({"n_tools": 10}, ["first"]), ({"wording": "paraphrase"}, ["line-3"]),
    ({"text": "UMLAUTS", "n_tools": 50, "system": "slb"}, ["first"]), ({"text": "github/close"}, ["line-3"]),
    ({"text": "a.b"}, []),
])
def test_errors_are_filtered(folder, filters, cases):
    errors = results.routing_errors(results.routing_choices("measured"), **filters)
    assert errors["case"].tolist() == cases and set(errors.columns) >= {"query", "wanted", "chosen", "missed_by"}


@pytest.mark.parametrize(("filters", "told"), [
    ({"system": "slp"}, "system 'slp' is not in this run; it has slb, bm25, concat_all"),
    ({"n_tools": 11}, "n_tools 11 is not in this run; it has 10, 50"),
])
def test_a_filter_that_nothing_can_meet_is_an_error(folder, filters, told):
    with pytest.raises(ValueError, match=told):
        results.routing_errors(results.routing_choices("measured"), **filters)


def test_every_query_of_a_committed_run_is_found():
    run = next(path.parent.name for path in sorted(ROOT.glob("results/*/routing_accuracy_n250.json")))
    choices = results.routing_choices(run)
    assert not choices["query"].isna().any() and not choices["wanted"].isna().any()
    kept = choices[(choices["status"] == "ok") & (choices["right"] == True)]  # noqa: E712
    # A query may have a second right tool; nearly always the wanted one is what was right.
    assert (kept["wanted"] == kept["chosen"]).mean() > 0.95
    errors = results.routing_errors(choices, n_tools=250, system="slb")
    rate = next(row["accuracy"]["value"] for row in results.artifact("routing_accuracy_n250", run)["rows"]
                if (row["system"], row["n_tools"]) == ("slb", 250))
    assert len(errors) == round(100 * (1 - rate)) and isinstance(errors, pd.DataFrame)

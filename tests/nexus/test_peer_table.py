"""Table I and its sources: every figure has a source, every rule finds one row, and what is measured is read."""
from __future__ import annotations

import copy
import json
from functools import cache

import argument_artifacts
import pytest
import repair_artifacts
import routing_artifacts
from jsonschema import Draft202012Validator
from nexus import artifact, peer_table, tables
from nexus.config import ROOT
from test_tables import parsed

RUNS = [path.parent for path in sorted(ROOT.glob("results/*/routing_accuracy_n250.json"))
        if not path.parent.name.endswith(".quick")]
FAMILIES = list(peer_table.FAMILIES)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder that holds synthetic artifacts, which are read without their envelope."""
    made = {"routing_accuracy_n250": routing_artifacts.accuracy(), "deep_splice_ttft": repair_artifacts.ttft(),
            "constrain_cost": argument_artifacts.constraint(), "l0_radix": argument_artifacts.radix()}
    for name, content in made.items():
        path = artifact.path_of(name, tmp_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    monkeypatch.setattr(artifact, "read", lambda path: json.loads(path.read_text()))
    return tmp_path


def lines(text, section):
    """The rows of the section's table by system."""
    return {line["system"]: line for line in parsed(text)[FAMILIES.index(section)]}


def test_the_committed_sources_are_what_the_code_writes():
    written = peer_table.SOURCES.read_text(encoding="utf-8")
    assert written == peer_table.comparison_sources(), "write it anew: .venv/bin/python -m nexus.peer_table"


def test_peers_are_named_once_and_those_of_the_paper_are_there_in_its_order():
    names = [peer["system"] for peer in peer_table.peers()["peers"]]
    assert len(names) == len(set(names))
    serving = [peer["system"] for peer in peer_table.peers()["peers"] if peer["family"] == "serving"]
    assert serving == [said["system"] for said in tables.published()["peers"]]


def rules() -> list[dict]:
    stored = peer_table.peers()
    return [*(rule for peer in stored["peers"] for rule in peer["measured"]),
            *(rule for family in stored["this_work"].values() for rule in family)]


def test_every_rule_names_columns_and_a_metric_of_its_artifact():
    blocks = json.loads(artifact.SCHEMA_PATH.read_text(encoding="utf-8"))["$defs"]
    for rule in rules():
        columns = blocks[rule["artifact"]]["properties"]["rows"]["items"]["properties"]
        assert rule["row"].keys() | {rule["metric"]} <= columns.keys(), rule["label"]


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_every_rule_finds_one_measured_row_in_a_committed_run(folder):
    missing = []
    read = cache(lambda name: artifact.read(artifact.path_of(name, folder)))
    for rule in rules():
        if rule["artifact"] == "spliced_choice" and not artifact.path_of(rule["artifact"], folder).is_file():
            # Measured after the others, and not for every committed run.
            continue
        row = peer_table.row_of(read(rule["artifact"])["rows"], rule["row"])
        if row is None or tables.value_of(row.get(rule["metric"])) is None:
            missing.append((rule["label"], rule["artifact"], rule["row"], rule["metric"]))
    # Peers of an environment of its own (`make peers`) may be missing where this run was measured.
    assert [one for one in missing if one[2].get("impl") != "xgrammar"] == []


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_table1_of_a_committed_run_is_well_formed(folder):
    text = peer_table.table1(folder)
    assert text.endswith("\n") and "None" not in text
    assert len(parsed(text)) == len(FAMILIES) and f"Measured: {folder.name}, with 95 % intervals." in text
    rag = next(row for row in artifact.read(folder / "routing_accuracy_n250.json")["rows"]
               if row["system"] == "rag_mcp" and row["n_tools"] == 250)
    assert tables.cell(rag["accuracy"], 100) in lines(text, "serving")["RAG-MCP"]["measured here"]


def test_measured_stands_beside_reported_and_is_read_from_the_run(run):
    text = peer_table.table1(run)
    assert peer_table.table1(run) == text, "the same bytes twice"
    table = lines(text, "serving")
    assert "43.13 against 13.62 %" in table["RAG-MCP"]["reported elsewhere†"]
    accuracy = tables.at(routing_artifacts.accuracy()["rows"], system="rag_mcp", n_tools=250)[0]["accuracy"]
    assert f"right: {tables.cell(accuracy, 100)} %, n = 100" in table["RAG-MCP"]["measured here"]
    assert table["RAG-MCP"]["KV strategy"] == "in place (prompt level)" and table["RAG-MCP"]["here"] == "same idea"
    assert table["vLLM / PagedAttention"]["here"] == "contextual"
    assert table["vLLM / PagedAttention"]["measured here"] == tables.MISSING
    assert table["vLLM / PagedAttention"]["routing"] == tables.MISSING
    assert "89.0 % of 250 tools" in table["**Nexus**"]["reported elsewhere†"]
    assert "0.98 to 1.73" in table["**Nexus**"]["reported elsewhere†"]


def test_another_value_in_the_artifact_is_another_value_in_the_table(run):
    before = lines(peer_table.table1(run), "constraints")["**Nexus**"]["measured here"]
    argument = argument_artifacts.constraint(ours_us=50.0)
    artifact.path_of("constrain_cost", run).write_text(json.dumps(argument))
    after = lines(peer_table.table1(run), "constraints")["**Nexus**"]["measured here"]
    assert "median: 40.0 [" in before and "median: 50.0 [" in after


def test_what_a_run_has_not_measured_is_shown_as_missing(run):
    table = lines(peer_table.table1(run), "scan")
    assert table["faiss"]["measured here"].endswith(f"10000 × 384: {tables.MISSING}")
    assert "n =" not in table["faiss"]["measured here"]
    constraints = lines(peer_table.table1(run), "constraints")
    assert "n =" not in constraints["xgrammar"]["measured here"], "null metrics are missing, too"


def test_without_a_run_nothing_is_measured():
    text = peer_table.table1(None)
    assert "Nothing is measured in this run." in text and "with no intervals" not in text
    assert all("n =" not in line["measured here"] for table in parsed(text) for line in table)
    assert "up to 6.4 times" in text


def test_a_broken_artifact_is_an_error_and_not_a_gap(tmp_path):
    artifact.path_of("l0_radix", tmp_path).write_text("{")
    with pytest.raises(artifact.ArtifactError, match="l0_radix.json: not valid JSON"):
        peer_table.table1(tmp_path)


def test_conditions_that_figures_share_are_told_once():
    reported = lines(peer_table.table1(None), "constraints")["llguidance"]["reported elsewhere†"]
    assert reported.count("128k vocabulary") == 1 and reported.endswith("without a model)")


def test_a_rule_that_fits_several_rows_is_refused():
    rows = [{"arm": "none", "n_past": 256}, {"arm": "none", "n_past": 512}, {"arm": "head", "curve_k": None}]
    assert peer_table.row_of(rows, {"arm": "none", "n_past": 512}) is rows[1]
    assert peer_table.row_of(rows, {"curve_k": None}) is rows[2], "an absent column is not a null one"
    assert peer_table.row_of(rows, {"arm": "full"}) is None
    with pytest.raises(peer_table.PeersError, match='2 rows have arm = "none"; name more columns'):
        peer_table.row_of(rows, {"arm": "none"})


def test_the_sources_tell_what_is_quoted_only_and_what_is_contextual():
    text = peer_table.comparison_sources()
    quoted = next(line for line in text.splitlines() if line.startswith("| vAttention |"))
    assert peer_table.SEEN["quoted"] in quoted and quoted.endswith("| contextual |")
    assert "No figure is quoted of llama.cpp `--cache-reuse`." in text
    assert all(line["source"] for table in parsed(text) for line in table if "source" in line)
    figures = sum(len(peer["figures"]) for peer in peer_table.peers()["peers"])
    assert sum(len(table) for table in parsed(text) if "source" in table[0]) == figures


CHANGES = {
    "a figure without a source": lambda peer: peer["figures"][0].pop("source"),
    "a blank source": lambda peer: peer["figures"][0].update(source=" "),
    "an unknown way of reading": lambda peer: peer["figures"][0].update(seen="heard"),
    "a number instead of a text": lambda peer: peer["figures"][0].update(value=43.13),
    "an unknown family": lambda peer: peer.update(family="others"),
    "measured, but not said how": lambda peer: peer.update(here=None),
    "said to be measured, but no rule": lambda peer: peer.update(measured=[]),
    "a rule for every row": lambda peer: peer["measured"][0].update(row={}),
    "a rule with a typed value": lambda peer: peer["measured"][0].update(value=47.0),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_schema_refuses(what, tmp_path, monkeypatch):
    validator = Draft202012Validator(json.loads(peer_table.SCHEMA.read_text()))
    Draft202012Validator.check_schema(validator.schema)
    stored = peer_table.peers()
    assert validator.is_valid(stored)
    changed = copy.deepcopy(stored)
    CHANGES[what](changed["peers"][0])
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(changed))
    monkeypatch.setattr(peer_table, "PEERS", path)
    with pytest.raises(peer_table.PeersError, match=r"^peers\.json: peers\.0"):
        peer_table.peers()

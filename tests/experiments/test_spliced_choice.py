"""Choosing from spliced tools: a tiny real run on SmolLM2, what is measured where, and the rows made of samples."""
from __future__ import annotations

import json

import numpy as np
import pytest

from experiments import rows, spliced_choice
from experiments.choice_bench import MOST_CASES, ChoiceBench, Variant, points
from nexus import artifact, choice_tables, stats
from nexus.config import ConfigError, compose, validate

EXPERIMENT = spliced_choice
TOOLS = ("create_file", "delete_file", "list_files", "rename_file")
CASES = [("Make a file that is called notes", "create_file"), ("Which files are there?", "list_files"),
         ("Throw the file notes away", "delete_file")]
LEVEL = 0.95


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "tools.json").write_text(json.dumps(
        [{"server": "files", "name": name, "description": f"Will {name.replace('_', ' ')}.",
          "inputSchema": {"type": "object", "properties": {"path": {"type": "string"}}}} for name in TOOLS]))
    (folder / "queries.jsonl").write_text("".join(
        json.dumps({"id": f"q{i}", "query": query, "tool": tool}) + "\n" for i, (query, tool) in enumerate(CASES)))
    return validate(compose([
        "model=smollm2-135m", "profile=quick", "registry=file", f"registry.path={folder / 'tools.json'}",
        f"workload.routing.evaluation={folder / 'queries.jsonl'}", "spliced_choice.n_queries=3",
        "spliced_choice.n_tools=[1,2]", "spliced_choice.arms=[bare,bare-no-reanchor,head-4,'suffix-R(n)']",
        "spliced_choice.averaged_arms=[]", "spliced_choice.compiled_behind=[start,system]",
        "spliced_choice.max_tokens=4", "runtime.n_threads=1", "runtime.n_ctx=2048", "dkl_sweep.offsets=[0]"]))


@pytest.fixture(scope="module")
def written(folder, cfg):
    return spliced_choice.run(cfg, folder)


@pytest.mark.integration
def test_every_arm_is_read_and_timed(cfg, written):
    found = artifact.read(written)["rows"]
    main = {(row["arm"], row["compiled_behind"], row["reading"]) for row in found
            if (row["n_tools"], row["depth"]) == (2, 64)}
    spliced = {(arm, behind) for arm in cfg.spliced_choice.arms for behind in ("start", "system")}
    prefilled = {(arm, None) for arm in ("full", "noise_floor", "group")}
    assert main == {(*pair, reading) for pair in spliced | prefilled for reading in ("automaton", "free")}
    for row in found:
        assert row["accuracy"]["n"] == 3
        assert row["ttft_ms"] is None if row["arm"] == "identity" else row["ttft_ms"]["value"] > 0
        assert (row["no_call_rate"] is None) == (row["reading"] == "automaton")
        assert (row["p_value"] is None) == (row["arm"] == "full")
    # One tool is no choice.
    assert {row["reading"] for row in found if row["n_tools"] == 1} == {"free"}
    shares = {row["arm"]: row["recompute_pct"] for row in found if row["compiled_behind"] in (None, "system")}
    assert (shares["full"], shares["noise_floor"], shares["bare"], shares["group"]) == (100, 100, 0, 0)
    assert 0 < shares["suffix-R(n)"] < shares["head-4"]


@pytest.mark.integration
def test_the_first_tool_at_its_own_anchor_is_exact_and_moved_tools_are_not(written):
    found = {(row["arm"], row["depth"], row["compiled_behind"]): row for row in artifact.read(written)["rows"]
             if row["n_tools"] == 2 and row["reading"] == "free"}
    identity = found["identity", 0, "system"]
    assert (identity["bit_identical"]["value"], identity["dkl_nats"]["value"]) == (1, 0)
    drift = {arm: found[arm, 64, "system"]["dkl_nats"]["value"] for arm in ("bare", "bare-no-reanchor", "head-4")}
    floor = found["noise_floor", 64, None]["dkl_nats"]["value"]
    assert floor < drift["head-4"] < drift["bare"] < drift["bare-no-reanchor"]


@pytest.mark.integration
def test_nothing_is_measured_twice_and_no_words_of_the_model_are_kept(folder, cfg, written, monkeypatch):
    for sample in artifact.read_samples(written):
        assert sample.get("chosen") in (None, *TOOLS)
    before = written.read_bytes()
    for name in ("choose", "time"):
        monkeypatch.setattr(spliced_choice.Bench, name, lambda *_: pytest.fail("a stored cell was measured again"))
    assert spliced_choice.run(cfg, folder / "again").read_bytes() == before


@pytest.mark.integration
def test_the_table_is_made_from_the_artifact(written):
    text = choice_tables.spliced_choice(artifact.read(written))
    assert "## 2 tools behind 64 tokens" in text and "| `head-4` | `system` |" in text
    assert "Identity control" in text and "100 [" in text


@pytest.mark.integration
def test_what_does_not_fit_the_context_is_refused_before_anything_is_measured(folder, cfg):
    section = cfg.spliced_choice.model_copy(update={"depths": [4000]})
    with pytest.raises(ConfigError, match="spliced_choice: 2 tools behind 4000 tokens need .* runtime.n_ctx is 2048"):
        ChoiceBench(cfg.model_copy(update={"spliced_choice": section}), folder, ["system"])


# --- what is measured where


@pytest.fixture(scope="module")
def full():
    return validate(compose([]))


def test_all_arms_are_measured_at_one_point_and_some_along_both_axes(full):
    places = points(full.spliced_choice)
    assert places == [(5, 256), (1, 256), (3, 256), (10, 256), (5, 0), (5, 1024)]
    assert len(spliced_choice.variants(full, 5, 256)) == 3 + 8 * 3 + 3
    along = [Variant("full", None), Variant("group", None), Variant("bare", "system"), Variant("head-16", "system"),
             Variant("calibrated", "ensemble-4x256")]
    assert spliced_choice.variants(full, 3, 256) == along
    assert spliced_choice.variants(full, 5, 0) == [*along, Variant("identity", "system")]


def test_sets_share_out_the_tools_and_hold_the_tool_of_their_queries():
    from nexus.registry import Tool
    from nexus.routing_workload import RoutingCase

    bench = ChoiceBench.__new__(ChoiceBench)
    bench.cfg = validate(compose(["seed=7"]))
    bench.pool = [Tool("s", f"t{i}", "", {}) for i in range(7)]
    bench.cases = [RoutingCase(f"q{i}", f"do {i}", ("s", f"t{i % 3}")) for i in range(3 * (MOST_CASES + 1))]
    for n_tools, size in ((1, 1), (3, 3), (7, 7), (20, 7)):
        sets = bench.sets(n_tools)
        assert sorted(case.id for set_ in sets for case in set_.cases) == sorted(case.id for case in bench.cases)
        for set_ in sets:
            assert len({tool.identity for tool in set_.tools}) == len(set_.tools) == size
            assert {case.tool for case in set_.cases} <= {tool.identity for tool in set_.tools}
            assert len(set_.cases) <= MOST_CASES
        assert bench.sets(n_tools) == sets
    orders = {tuple(tool.name for tool in bench.sets(7)[0].tools) for bench.cfg in
              (validate(compose([f"seed={seed}"])) for seed in range(3))}
    assert len(orders) == 3


# --- rows


def choice(case, correct, arm="bare", reading="free", **changes):
    return {"part": "choice", "arm": arm, "n_tools": 5, "depth": 256, "reading": reading, "case": f"c{case}",
            "compiled_behind": None if arm == "full" else "system", "correct": correct, "no_call": not correct,
            "unknown_tool": False, "recomputed": 8, "tools_tokens": 80, "dkl_nats": 0.1 * (case + 1), "top1": correct,
            "bit_identical": False} | changes


def timed(trial, ttft_ms, arm="bare", place_ms=1.0):
    return {"part": "time", "arm": arm, "n_tools": 5, "depth": 256, "trial": trial, "ttft_ms": ttft_ms,
            "compiled_behind": None if arm == "full" else "system", "place_ms": place_ms}


def test_rows_are_shares_paired_with_full_and_ratios_of_interleaved_times():
    right = {"full": [True, True, True, False], "bare": [True, False, False, True]}
    samples = [choice(case, ok, arm) for arm, answers in right.items() for case, ok in enumerate(answers)]
    samples += [timed(i, ms, "full", None) for i, ms in enumerate((100.0, 200.0, 300.0))]
    samples += [timed(i, ms) for i, ms in enumerate((10.0, 20.0, 30.0))]
    full_row, row = rows.spliced_choice(samples, 0, LEVEL)
    assert full_row["accuracy"] == stats.wilson(3, 4, LEVEL) and full_row["p_value"] is None
    assert row["accuracy"] == row["top1"] == stats.wilson(2, 4, LEVEL)
    assert row["no_call_rate"] == stats.wilson(2, 4, LEVEL)
    assert (row["only_here"], row["only_full"], row["p_value"]) == (1, 2, stats.mcnemar(1, 2))
    assert row["recompute_pct"] == pytest.approx(10)
    assert row["dkl_nats"] == stats.mean(np.array([0.1, 0.2, 0.3, 0.4]), 0, LEVEL)
    assert row["speedup"].value == pytest.approx(10) and row["ttft_ms"].value == 20
    assert full_row["place_ms"] is None and row["place_ms"].value == 1


def test_readings_are_not_mixed_and_the_automaton_has_no_missing_call():
    samples = [choice(0, ok, arm, reading) for arm in ("full", "bare") for reading, ok in
               (("free", False), ("automaton", True))]
    found = {(row["arm"], row["reading"]): row for row in rows.spliced_choice(samples, 0, LEVEL)}
    assert found["bare", "automaton"]["accuracy"].value == 1 and found["bare", "free"]["accuracy"].value == 0
    assert found["bare", "automaton"]["no_call_rate"] is None
    assert found["bare", "automaton"]["ttft_ms"] is None

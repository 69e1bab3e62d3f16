"""The calibrated policy: what it is calibrated on, and a tiny real test of it on SmolLM2."""
from __future__ import annotations

import json

import pytest

from experiments import calibrated_repair, compiled, repair_frontier
from experiments.calibrated_repair import HeldOut, candidates_of, chosen_samples, name_of, usable
from nexus import artifact, cells, config, stats
from nexus.repair_policy import Calibrated, Choice

QUICK = ["model=smollm2-135m", "profile=quick", "runtime.n_threads=1", "runtime.n_ctx=1024",
         "repair_frontier.n_past=[64]", "repair_frontier.n_cases=2", "repair_frontier.families=[head,oracle]",
         "repair_frontier.arms=[head-10]", "repair_frontier.compiled_behind=[system,preamble-64]",
         "repair.compiled_behind=[preamble-64]", "calibrated_repair.n_cases=2"]
# Any arm keeps to the first, none but a prefill to the second.
LOOSE, STRICT = "repair.epsilon_nats=100.0", "repair.epsilon_nats=1.0e-12"


def sample(arm="head", pct=10.0, behind="preamble-64", probe="query", case=0, n_past=256, nats=0.01, recomputed=8):
    return {"n_past": n_past, "compiled_behind": behind, "arm": arm, "recompute_pct": pct, "probe": probe,
            "case": f"c{case}", "block_tokens": 80, "query_tokens": 20, "recomputed": recomputed, "probe_tokens": 0.0,
            "dkl_nats": nats}


# --- what calibration reads


def test_calibration_reads_methods_behind_the_query_in_allowed_blocks_only():
    good = [sample(), sample("none", 0.0), sample("head-10", None)]
    bad = [sample("oracle"), sample("full", 100.0), sample("noise_floor", 100.0, "nothing"), sample(behind="system"),
           sample(probe="block_end")]
    assert usable([*bad, *good], ["preamble-64", "nothing"]) == good


@pytest.mark.parametrize(("arm", "pct", "name"), [
    ("head", 10.0, "head-10%"), ("head+suffix", 5.0, "head-2.5%+suffix-2.5"), ("suffix", 25.0, "suffix-25"),
    ("none", 0.0, "none"), ("head-10", None, "head-10"), ("full", 100.0, "full")])
def test_a_samples_arm_is_named_as_in_the_repair(arm, pct, name):
    assert name_of(sample(arm, pct)) == name


def test_candidates_are_arms_with_their_mean_cost_and_divergences_by_depth():
    samples = [sample(case=0, nats=0.1), sample(case=1, nats=0.3, recomputed=28), sample(behind="system", nats=0.5),
               sample(n_past=512, nats=0.7), sample("none", 0.0, recomputed=0, nats=0.9)]
    found = candidates_of(samples)
    assert {n_past: [(c.arm, c.compiled_behind, c.dkl_nats) for c in each] for n_past, each in found.items()} == {
        256: [("head-10%", "preamble-64", (0.1, 0.3)), ("head-10%", "system", (0.5,)), ("none", "preamble-64", (0.9,))],
        512: [("head-10%", "preamble-64", (0.7,))]}
    assert [c.cost for c in found[256]] == pytest.approx([0.38, 0.28, 0.2])


def test_the_calibration_row_is_of_the_chosen_arm_behind_the_chosen_text():
    floor, full = sample("noise_floor", 100.0, "nothing"), sample("full", 100.0, "system")
    samples = [sample(nats=0.1), sample(nats=0.2, behind="system"), sample(nats=0.3, n_past=512), sample("head", 25.0),
               sample(probe="block_end"), floor, full]
    keys = {"policy_arm": "head-10%", "compiled_behind": "system"}
    assert chosen_samples(samples, Choice(256, "head-10%", "system", 0.01)) == [
        samples[1] | keys | {"arm": "policy"}, floor | keys]
    # `full` is measured behind one text only, and is the same behind any.
    keys = {"policy_arm": "full", "compiled_behind": "preamble-64"}
    assert chosen_samples(samples, Choice(256, "full", "preamble-64", None)) == [
        full | keys | {"arm": "policy"}, floor | keys]


def test_a_missing_frontier_is_named_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrated_repair, "open_model", None)
    with pytest.raises(FileNotFoundError, match="repair_frontier.json"):
        calibrated_repair.run(config.validate(config.compose(QUICK)), tmp_path)
    assert not list(tmp_path.iterdir())


# --- on the model


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A results folder with the frontier's artifact; cells and blocks are kept beside it."""
    folder = tmp_path_factory.mktemp("calibrated_repair")
    with pytest.MonkeyPatch.context() as patch:
        for module in (repair_frontier, calibrated_repair):
            patch.setattr(module, "CellStore", lambda: cells.CellStore(folder / "cells"))
        patch.setattr(compiled, "BLOCK_FOLDER", folder / "blocks")
        repair_frontier.run(config.validate(config.compose(QUICK)), folder / "out")
        yield folder / "out"


@pytest.mark.integration
def test_what_the_frontier_allows_is_tested_on_held_out_cases_and_resumes_to_the_same_bytes(out, monkeypatch):
    cfg = config.validate(config.compose([*QUICK, LOOSE]))
    path = calibrated_repair.run(cfg, out)
    calibration, test = artifact.read(path)["rows"]
    assert [(row["n_past"], row["set"], row["arm"], row["compiled_behind"]) for row in (calibration, test)] == [
        (64, which, "none", "preamble-64") for which in ("calibration", "test")]
    frontier = artifact.read_samples(out / "repair_frontier.json")
    known = [s["dkl_nats"] for s in frontier if s["arm"] == "none" and s["probe"] == "query"
             and s["compiled_behind"] == "preamble-64"]
    assert calibration["dkl_nats"] == stats.mean(known, cfg.seed).row()
    assert calibration["dkl_upper_nats"] == pytest.approx(stats.mean(known, cfg.seed, 0.9).ci_high)
    assert test["violation_rate"]["value"] == 0 and test["recompute_pct"] == 0 and test["speedup"]["value"] > 1
    assert Calibrated.read(path).arm(64).name == "none"

    samples = artifact.read_samples(path)
    assert [(s["arm"], s["probe"]) for s in samples] == [
        (arm, probe) for arm in ("policy", "noise_floor") for probe in ("query", "block_end")] * 2
    assert not {s["tool"] for s in samples} & {s["tool"] for s in frontier}, "held out"
    assert set(json.loads((out / "metrics" / "calibrated_repair.json").read_text())) == {"64"}

    monkeypatch.setattr(HeldOut, "measure", None)    # A cell that is measured again needs it.
    monkeypatch.setattr(compiled, "compile_blocks", None)    # So does a block that is compiled again.
    before = {file: file.read_bytes() for file in out.glob("calibrated_repair*")}
    calibrated_repair.run(cfg, out)
    assert len(before) == 2 and all(file.read_bytes() == content for file, content in before.items())


@pytest.mark.integration
def test_where_no_arm_keeps_to_epsilon_the_policy_prefills(out):
    path = calibrated_repair.run(config.validate(config.compose([*QUICK, STRICT])), out)
    calibration, test = artifact.read(path)["rows"]
    for row in (calibration, test):
        assert row["arm"] == "full" and row["recompute_pct"] == 100
        # Both are one-batch prefills, in the test to the bit.
        assert row["dkl_nats"] == row["noise_floor_nats"] and row["dkl_nats"]["value"] < 0.01
    policy = [s["dkl_nats"] for s in artifact.read_samples(path) if s["arm"] == "policy"]
    assert policy == [s["dkl_nats"] for s in artifact.read_samples(path) if s["arm"] == "noise_floor"]
    assert Calibrated.read(path).choice(64) == Choice(64, "full", "preamble-64", calibration["dkl_upper_nats"])

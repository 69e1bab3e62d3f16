"""The calibrated policy: what it is chosen from, and a tiny real test of it on SmolLM2."""
from __future__ import annotations

import json

import pytest

from experiments import calibrated_repair, compiled
from experiments.calibrated_repair import Ladder, choices_of, workload_of
from nexus import artifact, config, stats
from nexus.repair_policy import Calibrated, Choice
from nexus.workload import WorkloadError

EXPERIMENT = calibrated_repair
QUICK = ["model=smollm2-135m", "profile=quick", "runtime.n_threads=1", "runtime.n_ctx=1024",
         "repair.compiled_behind=preamble-48", "calibrated_repair.n_past=[64]",
         "calibrated_repair.ladder=[none,head-10]", "calibrated_repair.n_calibration=2", "calibrated_repair.n_test=2"]
# Any arm keeps to the first, none but a prefill to the second.
LOOSE, STRICT = "repair.epsilon_nats=100.0", "repair.epsilon_nats=1.0e-12"


def sample(arm="head-16", probe="query", nats=0.01, n_past=256):
    return {"n_past": n_past, "arm": arm, "probe": probe, "dkl_nats": nats}


def strict_or_loose(*overrides):
    return config.validate(config.compose([*QUICK, *overrides]))


def test_the_ladder_is_read_by_depth_and_behind_the_query_only(cfg):
    cheap = [sample("none", nats=nats) for nats in (0.5, 0.6)] + [sample("none", "block_end", 0.0)]
    dear = [sample(nats=nats) for nats in (0.001, 0.002)] + [sample("head-16", "block_end", 9.0)]
    deep = [sample(nats=nats, n_past=512) for nats in (0.4, 0.5)]
    first, second = choices_of([*cheap, *dear, *deep], cfg)
    upper = stats.mean([0.001, 0.002], cfg.seed, 0.9).ci_high
    assert first == Choice(256, "head-16", "preamble-48", pytest.approx(upper))
    assert second == Choice(512, "full", "preamble-48", None)


def test_a_prefill_is_no_rung_so_that_one_without_a_bound_hides_no_other(cfg):
    """Where batches split alike a prefill's divergence is 0 in every case, which has no bound."""
    ladder = [sample(arm, nats=nats) for arm, around in (("head-16", 0.001), ("full", 0.0))
              for nats in (around, 1.1 * around)]
    assert choices_of(ladder, cfg)[0].arm == "head-16"


def test_a_set_that_has_too_few_cases_is_found_before_the_model_is_opened(monkeypatch, tmp_path):
    monkeypatch.setattr(calibrated_repair, "open_model", None)
    with pytest.raises(WorkloadError, match="900 cases are asked for"):
        calibrated_repair.run(strict_or_loose("calibrated_repair.n_test=900"), tmp_path)


def test_the_sets_share_no_tool_no_query_and_no_turn(cfg):
    calibration, test = (workload_of(cfg, which) for which in calibrated_repair.SETS)
    assert not {tool.name for tool in calibration.tools} & {tool.name for tool in test.tools}
    assert not {case.query for case in calibration.cases} & {case.query for case in test.cases}
    assert not {turn["content"] for turn in calibration.conversation} & {turn["content"] for turn in test.conversation}


@pytest.mark.integration
def test_a_loose_policy_takes_the_cheapest_rung_and_resumes_to_the_same_bytes(folder, monkeypatch):
    out, cfg = folder / "loose", strict_or_loose(LOOSE)
    path = calibrated_repair.run(cfg, out)
    rows = artifact.read(path)["rows"]
    assert [(row["set"], row["arm"], row["chosen"]) for row in rows] == [
        ("calibration", "none", True), ("calibration", "head-10", False), ("calibration", "full", False),
        ("test", "none", True), ("test", "full", False)]
    samples = artifact.read_samples(path)
    for row in rows:
        nats = [s["dkl_nats"] for s in samples if (s["set"], s["arm"], s["probe"]) == (row["set"], row["arm"], "query")]
        assert row["dkl_nats"] == stats.mean(nats, cfg.seed).row() and row["dkl_nats"]["n"] == 2
        assert row["dkl_upper_nats"] == pytest.approx(stats.mean(nats, cfg.seed, 0.9).ci_high)
        assert row["compiled_behind"] == "preamble-48"
    assert rows[3]["violation_rate"]["value"] == 0 and rows[3]["recompute_pct"] == 0
    assert rows[3]["speedup"]["value"] > 1 == rows[4]["speedup"]["value"]
    assert Calibrated.read(path).arm(64).name == "none"
    assert set(json.loads((out / "metrics" / "calibrated_repair.json").read_text())) == {"64"}

    monkeypatch.setattr(Ladder, "measure", None)    # A cell that is measured again needs it.
    monkeypatch.setattr(compiled, "compile_blocks", None)    # So does a block that is compiled again.
    before = {file: file.read_bytes() for file in out.glob("calibrated_repair*")}
    calibrated_repair.run(cfg, out)
    assert len(before) == 2 and all(file.read_bytes() == content for file, content in before.items())


@pytest.mark.integration
def test_where_no_rung_keeps_to_epsilon_the_policy_prefills(folder):
    path = calibrated_repair.run(strict_or_loose(STRICT), folder / "strict")
    chosen = [row for row in artifact.read(path)["rows"] if row["chosen"]]
    assert [(row["set"], row["arm"], row["recompute_pct"]) for row in chosen] == [
        ("calibration", "full", 100), ("test", "full", 100)]
    assert all(row["dkl_nats"] == row["noise_floor_nats"] and row["dkl_nats"]["value"] < 0.01 for row in chosen)
    assert Calibrated.read(path).arm(64).name == "full"

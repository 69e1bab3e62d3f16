"""The frontier: which arms it lists, and a tiny real one on SmolLM2."""
from __future__ import annotations

import numpy as np
import pytest

from experiments import compiled, repair_frontier
from experiments.repair_bench import CONTEXT
from experiments.repair_frontier import Frontier, arm_name, arms
from nexus import artifact, config
from nexus.cells import Cell
from nexus.repair import Place, arm_of

EXPERIMENT = repair_frontier
QUICK = ["model=smollm2-135m", "profile=quick", "runtime.n_threads=1", "runtime.n_ctx=1024",
         "repair_frontier.n_past=[64]", "repair_frontier.n_cases=1", "repair_frontier.shares_pct=[10.0]",
         "repair_frontier.families=[head,head+suffix,blend,oracle]", "repair_frontier.arms=[head-10]",
         "repair_frontier.compiled_behind=[system,ensemble-2x64]"]


@pytest.fixture(scope="module")
def frontier(folder, cfg):
    frontier = Frontier(cfg)
    yield frontier
    frontier.bench.runtime.close()


@pytest.fixture(scope="module")
def samples(frontier):
    return frontier.measure(Cell({"n_past": 64, "case": frontier.bench.cases[0].id}, 1.0, "one"))


# --- without a model


@pytest.mark.parametrize(("family", "share", "name"), [
    ("head", 10.0, "head-10%"), ("suffix", 2.5, "suffix-2.5"), ("head+suffix", 5.0, "head-2.5%+suffix-2.5"),
    ("head+blend", 50.0, "head-25%+blend-25")])
def test_a_familys_arm_recomputes_its_share(family, share, name):
    assert arm_name(family, share) == name
    if "blend" not in family:
        assert len(arm_of(name).select(Place(None, None, np.arange(200), 0, 0))) == 2 * share


def test_every_family_stands_behind_the_first_and_the_leaders_behind_the_others(cfg):
    assert arms(cfg) == [
        ("system", "none", 0.0, "none"), ("system", "head", 10.0, "head-10%"),
        ("system", "head+suffix", 10.0, "head-5%+suffix-5"), ("system", "blend", 10.0, "blend-10"),
        ("system", "oracle", 10.0, "oracle-10"), ("system", "head-10", None, "head-10"),
        ("ensemble-2x64", "none", 0.0, "none"), ("ensemble-2x64", "head", 10.0, "head-10%"),
        ("ensemble-2x64", "head-10", None, "head-10"), ("system", "full", 100.0, "full")]
    assert len({name for *_, name in arms(config.validate(config.compose(["model=smollm2-135m"])))}) > 10


# --- on the model


@pytest.mark.integration
def test_full_and_the_noise_floor_are_the_same_prefill(samples):
    by = {(s["arm"], s["probe"]): s for s in samples}
    for probe in ("query", "block_end"):
        full, floor = by["full", probe], by["noise_floor", probe]
        assert full["dkl_nats"] == floor["dkl_nats"] < 0.01
        assert (full["recomputed"], full["top1"]) == (floor["recomputed"], floor["top1"])


@pytest.mark.integration
def test_a_measurement_leaves_only_the_context(frontier, samples):
    runtime = frontier.bench.runtime
    assert [seq for seq in range(runtime.options.n_seq_max) if runtime.pos_max(seq) >= 0] == [CONTEXT]
    assert runtime.pos_max(CONTEXT) == frontier.bench.position - 1


@pytest.mark.integration
def test_samples_hold_what_each_arm_decoded(frontier, samples):
    n = len(frontier.bench.blocks[frontier.bench.cases[0].id])
    tenth = -(-n // 10)
    expected = {"none": 0, "head": tenth, "head+suffix": 2 * -(-n // 20), "blend": tenth, "oracle": tenth, "head-10": 10,
                "full": n, "noise_floor": n}
    assert {s["arm"] for s in samples} == set(expected)
    for s in samples:
        assert s["recomputed"] == expected[s["arm"]] and s["block_tokens"] == n and s["ttft_ms"] > 0
        assert s["probe_tokens"] == (n / frontier.model.n_layer if s["arm"] == "blend" else 0)


@pytest.mark.integration
def test_recomputing_the_head_comes_nearer_than_nothing(samples):
    query = {s["arm"]: s["dkl_nats"] for s in samples if s["probe"] == "query" and s["compiled_behind"] == "system"}
    assert query["head"] < query["none"] and query["full"] < query["none"]


@pytest.mark.integration
def test_measured_again_divergences_are_the_same_bits(frontier, samples):
    again = frontier.measure(Cell({"n_past": 64, "case": frontier.bench.cases[0].id}, 1.0, "one"))
    bits = [[{key: value for key, value in s.items() if key != "ttft_ms"} for s in each] for each in (samples, again)]
    assert bits[0] == bits[1]


@pytest.mark.integration
def test_a_real_run_has_all_rows_and_resumes_to_the_same_bytes(folder, cfg, monkeypatch):
    path = repair_frontier.run(cfg, folder / "first")
    read = artifact.read(path)
    listed = [(arm, share, behind) for behind, arm, share, _ in arms(cfg)] + [("noise_floor", 100.0, "nothing")]
    assert [(row["arm"], row["probe"], row["compiled_behind"]) for row in read["rows"]] == [
        (arm, probe, behind) for arm, _, behind in listed for probe in ("query", "block_end")]
    samples = artifact.read_samples(path)
    tokens = samples[0]["block_tokens"]
    for row, (_, share, _) in zip(read["rows"][::2], listed):
        assert row["recompute_pct"] == (pytest.approx(1000 / tokens) if share is None else share)
        assert row["dkl_nats"]["n"] == row["speedup"]["n"] == 1
    assert len(samples) == len(read["rows"])
    assert (folder / "first" / "metrics" / "repair_frontier.json").is_file()

    monkeypatch.setattr(Frontier, "measure", None)    # A cell that is measured again needs it.
    monkeypatch.setattr(compiled, "compile_blocks", None)    # So does a block that is compiled again.
    again = repair_frontier.run(cfg, folder / "second")
    assert again.read_bytes() == path.read_bytes()
    name = "repair_frontier.samples.jsonl"
    assert again.with_name(name).read_bytes() == path.with_name(name).read_bytes()

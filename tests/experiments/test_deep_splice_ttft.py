"""Time to first token on SmolLM2, tiny: which arms and peers are timed, cold and warm, and what is compared."""
from __future__ import annotations

import json

import numpy as np
import pytest

from experiments import compiled, deep_splice_ttft
from experiments.deep_splice_ttft import Ttft
from experiments.repair_bench import CONTEXT
from experiments.rows import OTHER_WORK
from nexus import artifact, config
from nexus.cells import Cell
from nexus.fidelity import divergence
from nexus.repair import arm_of

pytestmark = pytest.mark.integration
# P below the depth, so that the curves differ: R(64) is 36.7 % with K = 4 and 11.3 % with K = 16.
EXPERIMENT = deep_splice_ttft
QUICK = ["model=smollm2-135m", "profile=quick", "runtime.n_threads=1", "runtime.n_ctx=2048",
         "deep_splice_ttft.n_past=[64]", "deep_splice_ttft.trials_warm=2", "deep_splice_ttft.trials_cold=1",
         "deep_splice_ttft.curves=[4.0,16.0]", "deep_splice_ttft.arms=[head-10,none]", "repair.max_splice_pos=32",
         "repair.compiled_behind=ensemble-2x48"]
CURVES = {("suffix-R(n)", 4.0), ("suffix-R(n)", 16.0)}
WARM = CURVES | {("none", None), ("head-10", None), ("engine-shift", None)}
COLD = CURVES | {(arm, None) for arm in ("head-10", "prefix-reuse", "group-cache", "group-cache-rebuilt")}


@pytest.fixture(scope="module")
def ttft(folder, cfg):
    ttft = Ttft(cfg)
    yield ttft
    ttft.bench.runtime.close()


@pytest.fixture(scope="module")
def run(folder, cfg):
    return deep_splice_ttft.run(cfg, folder / "first")


@pytest.fixture(scope="module")
def rows(run):
    return {(row["protocol"], row["arm"], row["curve_k"]): row for row in artifact.read(run)["rows"]}


def test_warm_and_cold_have_their_arms_and_peers(rows):
    assert {key[1:] for key in rows if key[0] == "warm"} == WARM
    assert {key[1:] for key in rows if key[0] == "cold"} == COLD


def test_a_cache_too_small_for_the_group_is_refused_before_anything_is_measured(folder):
    small = config.validate(config.compose([*QUICK, "runtime.n_ctx=1024"]))
    with pytest.raises(config.ConfigError, match="runtime.n_ctx: 1024 cells do not hold 5 tools and 64 tokens"):
        Ttft(small)


def test_only_arms_that_decode_block_and_query_have_an_ideal(rows):
    for (_, arm, _), row in rows.items():
        assert (row["ideal_speedup"] is None) == (row["latency_per_ideal"] is None) == (arm in OTHER_WORK)
        assert row["speedup"]["value"] == pytest.approx(row["prefill_ms"]["value"] / row["splice_ms"]["value"])


def test_the_curves_recompute_their_share_behind_the_system_prompt(rows):
    for protocol in ("warm", "cold"):
        for k, pct in ((4.0, 36.67), (16.0, 11.33)):
            row = rows[protocol, "suffix-R(n)", k]
            assert row["r_pct"] == pytest.approx(pct, abs=0.01) and row["compiled_behind"] == "system"
        assert rows[protocol, "head-10", None]["recomputed_tokens"]["value"] == 10
        assert rows[protocol, "head-10", None]["compiled_behind"] == "ensemble-2x48"
    assert rows["warm", "none", None]["r_pct"] == rows["warm", "none", None]["recomputed_tokens"]["value"] == 0


def test_trials_are_counted(rows):
    for (protocol, _, _), row in rows.items():
        assert row["speedup"]["n"] == (1 if protocol == "cold" else 2)


def test_a_reused_prefix_is_a_prefill(rows):
    cold = rows["cold", "prefix-reuse", None]
    assert cold["dkl_nats"]["value"] < 0.01 and cold["dkl_block_end_nats"]["value"] < 0.01
    assert cold["top1"]["value"] == 1


def test_the_engines_own_shift_is_as_far_as_a_splice_without_repair(ttft, rows):
    theirs = rows["warm", "engine-shift", None]
    assert theirs["compiled_behind"] == "system"
    assert theirs["dkl_nats"]["value"] > rows["warm", "head-10", None]["dkl_nats"]["value"]
    bench, case_id = ttft.bench, ttft.bench.cases[0].id
    bench.enter(64)
    reference, _ = bench.reference(case_id)
    shifted, spliced = (divergence(reference.logits["query"], reading.logits["query"]).kl_nats for reading in (
        ttft.engine_shift(case_id), bench.repaired(case_id, "system", arm_of("none"))))
    # Keys agree within one ulp; that alone moves this model's divergence by its noise floor.
    assert shifted == pytest.approx(spliced, abs=0.01)


def test_without_its_shift_the_engines_block_is_another(ttft, monkeypatch):
    bench, case_id = ttft.bench, ttft.bench.cases[0].id
    bench.enter(64)
    shifted = ttft.engine_shift(case_id).logits["query"]
    assert bench.resident["system", case_id].anchor != bench.position
    monkeypatch.setattr(bench.runtime, "seq_add", lambda *_: bench.splicer.load(
        bench.resident["system", case_id], bench.position, reanchor=False))
    assert not np.array_equal(ttft.engine_shift(case_id).logits["query"], shifted)


def test_peers_of_another_prompt_have_no_divergence(rows):
    for arm in ("group-cache", "group-cache-rebuilt"):
        row = rows["cold", arm, None]
        assert row["dkl_nats"] is row["top1"] is row["dkl_block_end_nats"] is row["top1_block_end"] is None
    slow, fast = (rows["cold", arm, None]["splice_ms"]["value"] for arm in ("group-cache-rebuilt", "group-cache"))
    assert fast < slow
    assert all(row["dkl_nats"] for (_, arm, _), row in rows.items() if not arm.startswith("group-cache"))


def test_samples_count_the_context_only_where_it_is_decoded(run, ttft):
    samples = artifact.read_samples(run)
    system = len(ttft.bench.system)
    assert {(s["protocol"], s["context_tokens"]) for s in samples} == {("warm", 0), ("cold", system + 64)}
    assert len({s["case"] for s in samples}) == 2, "every trial has a case of its own"
    for s in samples:
        assert s["block_tokens"] == len(ttft.bench.blocks[s["case"]]) and s["ttft_ms"] > 0
        if s["arm"] == "prefill":
            assert s["recomputed"] == s["block_tokens"] and s["r_pct"] == 100
            # Cold, it is what the others are compared with.
            assert s["dkl_nats"] == 0 if s["protocol"] == "cold" else s["dkl_nats"] < 0.01


@pytest.mark.parametrize(("protocol", "left"), [("warm", [CONTEXT]), ("cold", [])])
def test_a_trial_leaves_only_what_it_found(ttft, protocol, left):
    ttft.measure(Cell({"protocol": protocol, "n_past": 64, "trial": 1}, 1.0, "one"))
    runtime = ttft.bench.runtime
    assert [seq for seq in range(runtime.options.n_seq_max) if runtime.pos_max(seq) >= 0] == left
    ttft.bench.enter(64)
    assert runtime.pos_max(CONTEXT) == ttft.bench.position - 1


def test_a_resumed_run_gives_the_same_bytes(run, folder, cfg, monkeypatch):
    numbers = json.loads((run.parent / "metrics" / "deep_splice_ttft.json").read_text())
    assert set(numbers) == {f"{protocol}.K{k}.64" for protocol in ("warm", "cold") for k in (4, 16)}
    monkeypatch.setattr(Ttft, "measure", None)    # A cell that is measured again needs it.
    monkeypatch.setattr(compiled, "compile_blocks", None)    # So does a block that is compiled again.
    again = deep_splice_ttft.run(cfg, folder / "second")
    assert again.read_bytes() == run.read_bytes()
    name = "deep_splice_ttft.samples.jsonl"
    assert again.with_name(name).read_bytes() == run.with_name(name).read_bytes()

"""The prefix cache's experiment: a tiny real run on SmolLM2, its rates against whole prompts, and its peers."""
from __future__ import annotations

import numpy as np
import pytest

from experiments import l0_radix
from experiments.toy_models import TOKENS, write_toy_qwen2vl
from nexus import artifact, cells, config, pipeline
from nexus.agent_trace import Traffic, agent_trace
from nexus.runtime import ContextOptions, Model, Runtime

TINY = ["model=smollm2-135m", "profile=quick", "runtime.n_threads=1", "l0_radix.max_tokens=620", "l0_radix.n_seeds=2",
        "l0_radix.n_sessions=2", "l0_radix.n_turns=3", "l0_radix.n_requests=4", "l0_radix.copy_repetitions=5",
        "l0_radix.n_slots=4"]
SHORTER = {"n_sessions": 2, "system_tokens": 60, "subagent_tokens": 30, "context_tokens": 150}


@pytest.mark.integration
def test_every_part_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "CellStore", lambda: cells.CellStore(tmp_path / "cells"))
    monkeypatch.setattr(l0_radix, "SHORT", l0_radix.SHORT | SHORTER)
    for name, value in (("IDENTITY_TOKENS", 100), ("IDENTITY_SPLIT", 61), ("IDENTITY_TEXTS", 1)):
        monkeypatch.setattr(l0_radix, name, value)
    cfg = config.validate(config.compose(TINY))
    path = l0_radix.run(cfg, tmp_path)
    rows = {(row["part"], row["arm"], row["n_tokens"]): row for row in artifact.read(path)["rows"]}
    assert set(rows) == {
        *(("trace", arm, None) for arm in ("nexus", "llama.cpp", "unlimited")),
        *(("copy", "nexus", n) for n in (None, 64, 256)),
        *(("ttft", arm, None) for arm in ("nexus", "llama.cpp", "none")),
        *(("identity", case, None) for case in ("extended", "resident", "branched"))}
    samples = artifact.read_samples(path)

    traces = {arm: rows["trace", arm, None] for arm in ("nexus", "llama.cpp", "unlimited")}
    for name in ("hit_rate", "token_reuse"):
        assert 0 <= traces["llama.cpp"][name]["value"] <= traces["unlimited"][name]["value"] < 1
        assert 0 < traces["nexus"][name]["value"] <= traces["unlimited"][name]["value"]
        assert traces["nexus"][name]["n"] == 2
    assert traces["nexus"]["peak_cells"]["value"] <= 620 < traces["unlimited"]["peak_cells"]["value"]
    assert traces["nexus"]["evictions"]["value"] > 0 == traces["unlimited"]["evictions"]["value"]

    needed = [s for s in samples if s["part"] == "copy" and s["n_tokens"] is None and s["copy_us"] is not None]
    assert rows["copy", "nexus", None]["copy_us"]["n"] == len(needed) > 0
    assert len(needed) == sum(s["copied"] for s in samples if s["part"] == "trace" and s["arm"] == "nexus")
    for n_tokens in (64, 256):
        row = rows["copy", "nexus", n_tokens]
        assert row["copy_us"]["n"] == 5 and row["lookup_us"]["value"] > 0
        assert 0 < row["copy_us"]["value"] <= row["copy_p99_us"]["value"]

    answered = {arm: [s for s in samples if s["part"] == "ttft" and s["arm"] == arm] for arm in l0_radix.ARMS}
    for arm, of_arm in answered.items():
        row = rows["ttft", arm, None]
        assert len(of_arm) == row["ttft_ms"]["n"] == 4 and row["ttft_ms"]["value"] > 0
        # All caches see the same prompts, and none changes what comes out by more than another split does.
        assert [s["n_prompt"] for s in of_arm] == [s["n_prompt"] for s in answered["none"]]
        assert all(s["dkl_nats"] < 0.02 for s in of_arm)
    assert all(s["n_reused"] == 0 and s["dkl_nats"] == 0 for s in answered["none"])
    assert sum(s["n_reused"] for s in answered["nexus"]) >= sum(s["n_reused"] for s in answered["llama.cpp"]) > 0
    assert rows["ttft", "nexus", None]["speedup_vs_none"]["value"] > 0

    for case in ("extended", "resident"):
        row = rows["identity", case, None]
        assert row["bit_identical"]["value"] == 1 and row["dkl_nats"]["value"] == 0, case
    assert rows["identity", "branched", None]["dkl_nats"]["value"] < 0.01

    with monkeypatch.context() as patch:
        patch.setattr(l0_radix.Bench, "measure", lambda *_: pytest.fail("a stored cell was measured again"))
        assert l0_radix.run(cfg, tmp_path / "again").read_bytes() == path.read_bytes()


def common(a, b):
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def test_a_slot_alone_reuses_the_previous_prompt_and_an_unlimited_cache_all_of_them():
    source = np.random.default_rng(0).integers(0, 1000, 3000).astype(np.int32)
    requests = agent_trace(Traffic(n_sessions=3, n_turns=4, context_tokens=1500), source, 1)
    prompts = [request.tokens for request in requests]
    alone = l0_radix.simulate(requests, 1, 1500)
    unlimited = l0_radix.simulate(requests, len(requests), 1500 * len(requests))
    for i, prompt in enumerate(prompts):
        most = len(prompt) - 1
        assert alone[i]["n_reused"] == min(most, common(prompt, prompts[i - 1]) if i else 0)
        assert unlimited[i]["n_reused"] == min(most, max((common(prompt, old) for old in prompts[:i]), default=0))
    assert unlimited[-1]["n_cells"] == len({tuple(p[:n].tolist()) for p in prompts for n in range(1, len(p) + 1)})
    assert sum(answer["copied"] for answer in alone) == 0 < sum(answer["copied"] for answer in unlimited)


@pytest.mark.integration
def test_the_peer_keeps_what_the_previous_prompt_has_in_common(tmp_path):
    model = Model(write_toy_qwen2vl(tmp_path / "toy.gguf"))
    rng = np.random.default_rng(0)
    first = rng.integers(3, len(TOKENS), 60).astype(np.int32)
    branch = np.concatenate([first[:30], rng.integers(3, len(TOKENS), 10).astype(np.int32)])
    with Runtime(model, ContextOptions(n_ctx=256, n_seq_max=2, n_threads=1)) as runtime, \
            Runtime(model, ContextOptions(n_ctx=256, n_seq_max=2, n_threads=1)) as other:
        peer, none = l0_radix.Plain(runtime, True), l0_radix.Plain(other, False)
        reused = []
        for prompt in (first, branch, branch, branch[:20], first):
            logits, n_reused = peer.prefill(prompt)
            expected, nothing = none.prefill(prompt)
            np.testing.assert_allclose(logits, expected, atol=5e-3)
            assert nothing == 0 and runtime.pos_max(0) == len(prompt) - 1
            reused.append(n_reused)
    assert reused == [0, 30, 39, 19, 20]
    model.close()


def answers(arm, times, reused):
    return [{"part": "ttft", "arm": arm, "request": i, "n_prompt": 100, "n_common": 10, "n_reused": n, "ttft_ms": ms,
             "dkl_nats": 0.5, "top1": i > 0, "lookup_us": 2.0, "copy_us": 4.0 if i and arm == "nexus" else None}
            for i, (ms, n) in enumerate(zip(times, reused))]


def test_the_summary_takes_medians_ratios_and_shares():
    cfg = config.validate(config.compose(TINY))
    samples = [{"part": "trace", "arm": arm, "trace": trace, "n_prompt": 100, "n_common": 10, "n_reused": n,
                "n_evicted": 1, "n_cells": 50 * n}
               for arm in ("nexus", "llama.cpp", "unlimited") for trace in (0, 1) for n in (0, 10, 40 + 10 * trace)]
    samples += [{"part": "copy", "arm": "nexus", "n_tokens": n, "copy_us": us, "lookup_us": 1.0}
                for n, times in ((64, (2.0, 3.0, 9.0)), (None, (5.0, None, 7.0))) for us in times]
    samples += answers("nexus", (40.0, 10.0, 20.0), (0, 20, 90)) + answers("llama.cpp", (40.0, 40.0, 20.0), (0, 10, 10))
    samples += answers("none", (40.0, 50.0, 60.0), (0, 0, 0))
    samples += [{"part": "identity", "arm": case, "bit_identical": case != "branched", "dkl_nats": 0.25, "top1": True,
                 "floor_nats": 0.5} for case in ("extended", "resident", "branched") for _ in range(2)]
    rows = {(row["part"], row["arm"], row["n_tokens"]): row for row in l0_radix.summarise(cfg, samples)}

    trace = rows["trace", "nexus", None]
    # Warm is what reuses more than the common prompt: one of three requests.
    assert trace["hit_rate"].value == pytest.approx(1 / 3) and trace["hit_rate"].n == 2
    assert trace["token_reuse"].value == pytest.approx((50 / 300 + 60 / 300) / 2)
    assert (trace["evictions"].value, trace["peak_cells"].value) == (3, 2250)
    assert rows["copy", "nexus", 64]["copy_us"].value == 3 and rows["copy", "nexus", None]["copy_us"].value == 6
    ours, peer, none = (rows["ttft", arm, None] for arm in ("nexus", "llama.cpp", "none"))
    assert (ours["ttft_ms"].value, peer["ttft_ms"].value, none["ttft_ms"].value) == (20, 40, 50)
    assert ours["speedup_vs_none"].value == 2.5 and ours["speedup_vs_llama_cpp"].value == 2
    assert ours["saved_ms"].value == pytest.approx(80 / 3) and ours["saved_vs_llama_cpp_ms"].value == pytest.approx(10)
    assert ours["hit_rate"].value == pytest.approx(2 / 3) and peer["hit_rate"].value == 0
    assert ours["token_reuse"].value == pytest.approx(110 / 300) and ours["token_reuse"].ci_low is None
    assert (ours["copy_us"].value, ours["copy_us"].n, ours["top1"].value) == (4, 2, pytest.approx(2 / 3))
    assert none["speedup_vs_none"] is None and peer["speedup_vs_llama_cpp"] is None and peer["copy_us"] is None
    assert [rows["identity", case, None]["bit_identical"].value for case in ("extended", "branched")] == [1, 0]
    assert l0_radix.headline(list(rows.values()))["ttft.nexus"]["speedup_vs_none"] == 2.5

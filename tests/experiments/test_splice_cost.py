"""Splice cost: a tiny real run on SmolLM2."""
from __future__ import annotations

import pytest

from experiments import splice_cost
from nexus import artifact, cells, config, pipeline

TINY = ["model=smollm2-135m", "profile=quick", "splice_cost.n_tokens=[50]", "splice_cost.n_ctx=[512]",
        "splice_cost.repetitions=10", "splice_cost.shift_pairs=3", "splice_cost.prefill_repetitions=1"]


@pytest.mark.integration
def test_every_cell_is_timed_and_parts_do_not_exceed_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "CellStore", lambda: cells.CellStore(tmp_path / "cells"))
    cfg = config.validate(config.compose(TINY))
    path = splice_cost.run(cfg, tmp_path)
    rows = artifact.read(path)["rows"]
    assert {(row["v_layout"], row["cells"]) for row in rows} == {
        (layout, free) for layout in ("row", "transposed") for free in ("contiguous", "fragmented")}
    for row in rows:
        assert (row["n_tokens"], row["n_ctx"]) == (50, 512)
        for metric in (*splice_cost.PARTS, "total_per_memcpy"):
            assert row[metric]["value"] > 0 and row[metric]["n"] == 10, metric
        fragmented = row["cells"] == "fragmented"
        for metric in ("engine_shift_us", "engine_shift_per_total", "prefill_us"):
            assert (row[metric] is None) == fragmented
        if not fragmented:
            assert (row["engine_shift_us"]["n"], row["prefill_us"]["n"]) == (3, 1)
            # An order of magnitude is asserted, not a bar: CI machines are noisy.
            assert row["engine_shift_us"]["value"] > row["total_us"]["value"]
            assert row["prefill_us"]["value"] > 10 * row["total_us"]["value"]
    everything = artifact.read_samples(path)
    kinds = [sample["kind"] for sample in everything]
    assert {kind: kinds.count(kind) for kind in kinds} == {"splice": 40, "engine_shift": 2 * 3, "prefill": 2}
    samples = [sample for sample in everything if sample["kind"] == "splice"]
    for sample in samples:
        parts = sample["reanchor_us"] + sample["set_state_us"] + sample["graft_us"]
        # Each of the three is rounded to a nanosecond.
        assert 0 < parts <= sample["total_us"] + 0.01

    # Timings are measured once: a second run takes them from the store.
    with monkeypatch.context() as patch:
        patch.setattr(splice_cost.Bench, "measure", lambda *_: pytest.fail("a stored cell was measured again"))
        assert splice_cost.run(cfg, tmp_path / "again").read_bytes() == path.read_bytes()


def timed(total: float, memcpy: float, shift: float | None = None) -> list[dict]:
    """Synthetic samples of one cell: three splices, and three engine shifts if there are any."""
    keys = {"n_tokens": 50, "n_ctx": 512, "v_layout": "row", "cells": "fragmented" if shift is None else "contiguous"}
    samples = [{**keys, "kind": "splice", "reanchor_us": 1.0, "set_state_us": 2.0, "graft_us": 3.0,
                "total_us": total * factor, "memcpy_us": memcpy * factor} for factor in (1, 2, 6)]
    if shift is not None:
        samples += [{**keys, "kind": "engine_shift", "engine_shift_us": shift * factor} for factor in (1, 3, 4)]
    return samples


def test_the_summary_takes_medians_and_their_ratios():
    cfg = config.validate(config.compose(TINY))
    contiguous, fragmented = splice_cost.summarise(cfg, timed(10.0, 5.0, 1000.0) + timed(8.0, 2.0))
    assert (contiguous["cells"], fragmented["cells"]) == ("contiguous", "fragmented")
    assert contiguous["total_us"].value == 20 and contiguous["memcpy_us"].value == 10
    assert contiguous["total_per_memcpy"].value == 2 and fragmented["total_per_memcpy"].value == 4
    assert contiguous["engine_shift_us"].value == 3000 and contiguous["engine_shift_per_total"].value == 150
    assert contiguous["prefill_us"] is None
    for metric in ("engine_shift_us", "engine_shift_per_total", "prefill_us"):
        assert fragmented[metric] is None


@pytest.mark.integration
def test_fragmenting_leaves_every_other_cell_taken(tmp_path, monkeypatch):
    cfg = config.validate(config.compose(TINY))
    bench = splice_cost.Bench(cfg)
    bench.enter(512, "row")
    runtime = bench.runtime
    runtime.decode(bench.context, 0, splice_cost.LIVE)
    resident = bench.splicer.hold(bench.block(50))
    bench.fragment(resident)
    assert runtime.pos_max(splice_cost.FILLER) == -1
    assert (runtime.pos_min(splice_cost.FENCE), runtime.pos_max(splice_cost.FENCE)) == (1, 99)
    bench.splicer.place(resident, splice_cost.CONTEXT_TOKENS, splice_cost.LIVE)
    assert runtime.pos_max(splice_cost.LIVE) == splice_cost.CONTEXT_TOKENS + 49
    runtime.close()

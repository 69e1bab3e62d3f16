"""Splice cost: a tiny real run on SmolLM2."""
from __future__ import annotations

import pytest

from experiments import splice_cost
from nexus import artifact, cells, config

TINY = ["model=smollm2-135m", "profile=quick", "splice_cost.n_tokens=[50]", "splice_cost.n_ctx=[512]",
        "splice_cost.repetitions=10", "splice_cost.shift_pairs=3", "splice_cost.prefill_repetitions=1"]


@pytest.mark.integration
def test_every_cell_is_timed_and_parts_do_not_exceed_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(splice_cost, "CellStore", lambda: cells.CellStore(tmp_path / "cells"))
    cfg = config.validate(config.compose(TINY))
    path = splice_cost.run(cfg, tmp_path)
    rows = artifact.read(path)["rows"]
    assert {(row["v_layout"], row["cells"]) for row in rows} == {
        (layout, free) for layout in ("row", "transposed") for free in ("contiguous", "fragmented")}
    for row in rows:
        assert row["total_us"]["value"] > 0 and row["total_us"]["n"] == 10
        fragmented = row["cells"] == "fragmented"
        for metric in ("engine_shift_us", "engine_shift_per_total", "prefill_us"):
            assert (row[metric] is None) == fragmented
        if not fragmented:
            # An order of magnitude is asserted, not a bar: CI machines are noisy.
            assert row["engine_shift_us"]["value"] > row["total_us"]["value"]
            assert row["prefill_us"]["value"] > 10 * row["total_us"]["value"]
    samples = [sample for sample in artifact.read_samples(path) if sample["kind"] == "splice"]
    assert len(samples) == 40
    for sample in samples:
        parts = sample["reanchor_us"] + sample["set_state_us"] + sample["graft_us"]
        assert 0 < parts <= sample["total_us"] + 0.01


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

"""What a splice costs, beside a plain copy of the same bytes, the engine's own position shift, and a prefill.

All on one thread. Per repetition one splice and one memcpy are timed in turn, so that both see the same machine.
`total_us` is the whole call as Python sees it; its parts are timed inside. The engine's shift is a one-token decode
with a pending shift less the same decode without one, in interleaved pairs. Free cells are contiguous, or every other
cell is taken ("fragmented"), the worst case for a restore.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import numpy as np

from nexus import native, stats
from nexus.blocks import Block, compile_blocks
from nexus.cells import Cell
from nexus.config import ROOT, Config
from nexus.model_tuple import context_options, open_model, tuple_of
from nexus.pipeline import experiment_main, measure_cells, timed_cell_inputs, write_results
from nexus.prompt import conversation_tokens
from nexus.runtime import Runtime
from nexus.splice import Resident, Splicer, choose_isa
from nexus.workload import load_workload

NAME = "splice_cost"
LIVE, FILLER, FENCE = 0, 1, 2
# Tokens that stand before the block; enough to make every splice a real re-anchoring.
CONTEXT_TOKENS = 64
KEYS = ("n_tokens", "n_ctx", "v_layout", "cells")
PARTS = ("reanchor_us", "set_state_us", "graft_us", "total_us", "memcpy_us")


def microseconds(call: Callable[[], object]) -> float:
    """Wall time of one call, µs."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


class Bench:
    """Blocks of each length, and one runtime at a time."""

    def __init__(self, cfg: Config):
        self.cfg, self.sizes = cfg, cfg.splice_cost
        self.model = open_model(cfg.model)
        conversation = load_workload(ROOT / cfg.workload.tools, ROOT / cfg.workload.queries,
                                     ROOT / cfg.workload.conversation).conversation
        text = conversation_tokens(self.model, conversation, CONTEXT_TOKENS + max(self.sizes.n_tokens))
        self.context, self.text = text[:CONTEXT_TOKENS], text[CONTEXT_TOKENS:]
        self.blocks: dict[int, Block] = {}
        self.runtime: Runtime | None = None
        self.made_for = None

    def block(self, n_tokens: int) -> Block:
        """A block of real text compiled at position 0; compiled once, whatever layout it is placed in later."""
        if n_tokens not in self.blocks:
            with Runtime(self.model, context_options(self.cfg.runtime)) as runtime:
                self.blocks[n_tokens] = next(iter(compile_blocks(runtime, self.context[:0], [self.text[:n_tokens]])))
        return self.blocks[n_tokens]

    def enter(self, n_ctx: int, v_layout: str) -> None:
        """A fresh runtime of this size and layout, with its splicer."""
        if self.made_for == (n_ctx, v_layout):
            return
        if self.runtime is not None:
            self.runtime.close()
        self.runtime = Runtime(self.model, context_options(
            self.cfg.runtime, n_ctx=n_ctx, n_threads=self.sizes.n_threads, flash_attention=v_layout == "row"))
        self.splicer = Splicer(self.runtime)
        self.made_for = (n_ctx, v_layout)

    def measure(self, cell: Cell) -> list[dict]:
        """Samples of one cell: a row per repetition, pair or prefill, told apart by `kind`."""
        keys = {name: cell.inputs[name] for name in KEYS}
        block = self.block(keys["n_tokens"])
        self.enter(keys["n_ctx"], keys["v_layout"])
        runtime = self.runtime
        runtime.clear()
        runtime.decode(self.context, 0, LIVE)
        resident = self.splicer.hold(block)
        if keys["cells"] == "fragmented":
            self.fragment(resident)
        samples = [{**keys, "kind": "splice", **sample} for sample in self.splices(resident)]
        if keys["cells"] == "contiguous":
            samples += [{**keys, "kind": "engine_shift", "engine_shift_us": us} for us in self.shifts(resident)]
            samples += [{**keys, "kind": "prefill", "prefill_us": us} for us in self.prefills(block)]
        return samples

    def fragment(self, resident: Resident) -> None:
        """Leave every other cell behind the context taken, with free cells for one block between them."""
        runtime, n = self.runtime, resident.n_tokens
        for begin in (0, n):
            self.splicer.place(resident, begin, FILLER)
        for position in range(1, 2 * n, 2):
            runtime.seq_cp(FILLER, FENCE, position, position + 1)
        runtime.seq_rm(FILLER)

    def splices(self, resident: Resident) -> list[dict]:
        runtime, n_bytes = self.runtime, resident.n_bytes
        copy = native.llama().nexus.timed_copy_us
        source, target = np.ones(n_bytes, np.uint8), np.ones(n_bytes, np.uint8)
        samples = []
        # The first two are warm-up: pages are touched and caches filled.
        for repetition in range(-2, self.sizes.repetitions):
            start = time.perf_counter_ns()
            times = self.splicer.place(resident, CONTEXT_TOKENS, LIVE)
            total = (time.perf_counter_ns() - start) / 1e3
            runtime.seq_rm(LIVE, CONTEXT_TOKENS, -1)
            memcpy = copy(target.ctypes.data, source.ctypes.data, n_bytes)
            if repetition >= 0:
                measured = (times.reanchor_us, times.set_state_us, times.graft_us, total, memcpy)
                samples.append({part: round(us, 3) for part, us in zip(PARTS, measured)})
        return samples

    def shifts(self, resident: Resident) -> list[float]:
        """Cost of llama.cpp's own shift of the block by one position: differences of interleaved decodes, µs."""
        runtime, token = self.runtime, self.text[:1]
        self.splicer.place(resident, CONTEXT_TOKENS, LIVE)
        differences = []
        for repetition in range(-1, self.sizes.shift_pairs):
            plain = self.one_token(token)
            runtime.seq_add(LIVE, CONTEXT_TOKENS, -1, 1)
            shifted = self.one_token(token)
            if repetition >= 0:
                differences.append(round(shifted - plain, 3))
        runtime.seq_rm(LIVE, CONTEXT_TOKENS, -1)
        return differences

    def one_token(self, token: np.ndarray) -> float:
        position = self.runtime.pos_max(LIVE) + 1
        us = microseconds(lambda: self.runtime.decode(token, position, LIVE))
        self.runtime.seq_rm(LIVE, position, -1)
        return us

    def prefills(self, block: Block) -> list[float]:
        samples = []
        for repetition in range(self.sizes.prefill_repetitions):
            samples.append(round(microseconds(lambda: self.runtime.decode(block.tokens, CONTEXT_TOKENS, LIVE)), 3))
            self.runtime.seq_rm(LIVE, CONTEXT_TOKENS, -1)
        return samples


def summarise(cfg: Config, samples: list[dict]) -> list[dict]:
    """Artifact rows: medians with bootstrap intervals, and the two ratios that the bars are about.

    Samples of one cell stand together.
    """
    rows = []
    for keys, group in groupby(samples, lambda sample: {key: sample[key] for key in KEYS}):
        of_cell = list(group)

        def column(name: str, of_cell=of_cell) -> list[float]:
            return [sample[name] for sample in of_cell if name in sample]

        def median(name: str) -> stats.Estimate | None:
            values = column(name)
            return stats.median(values, cfg.seed, cfg.statistics.level) if values else None

        shift = column("engine_shift_us")
        rows.append({
            **keys,
            **{part: median(part) for part in PARTS},
            "total_per_memcpy": stats.ratio_of_medians(column("total_us"), column("memcpy_us"), cfg.seed,
                                                       cfg.statistics.level, paired=True),
            "engine_shift_us": median("engine_shift_us"),
            "engine_shift_per_total": stats.ratio_of_medians(shift, column("total_us"), cfg.seed,
                                                             cfg.statistics.level) if shift else None,
            "prefill_us": median("prefill_us"),
        })
    return rows


def run(cfg: Config, out: Path) -> Path:
    """Path of the written artifact, `<out>/splice_cost.json`; cells measured earlier are not measured again."""
    bench, sizes = Bench(cfg), cfg.splice_cost
    inputs = timed_cell_inputs(NAME, cfg, bench.model.sha256)
    cells = [
        Cell({**inputs, "n_tokens": n_tokens, "n_ctx": n_ctx, "v_layout": v_layout, "cells": free},
             # Prefills and shifts dominate; both are left out where cells are fragmented.
             weight=n_tokens * sizes.prefill_repetitions + sizes.shift_pairs * n_ctx / 50 if free == "contiguous" else 100,
             label=f"{n_tokens} tokens, n_ctx {n_ctx}, V {v_layout}, {free}")
        for n_ctx in sizes.n_ctx for v_layout in sizes.v_layouts for free in sizes.cells for n_tokens in sizes.n_tokens
    ]
    samples = measure_cells(cfg, cells, bench.measure, "splice cost")
    rows = summarise(cfg, samples)
    return write_results(
        NAME, cfg, out, tuple_=tuple_of(bench.model, cfg.model), rows=rows, samples=samples, isa=choose_isa()[0],
        threads=sizes.n_threads,
        metrics={f"{row['v_layout']}.{row['cells']}.{row['n_ctx']}.{row['n_tokens']}": {
            name: row[name].value for name in ("total_us", "total_per_memcpy", "engine_shift_per_total") if row[name]
        } for row in rows if row["cells"] == "contiguous"})


if __name__ == "__main__":
    experiment_main(NAME, run)

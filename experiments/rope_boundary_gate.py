"""Scattered recompute, done right and done wrong.

The published 5.7 nats were read as "scattered recompute corrupts". Here the same tokens are recomputed faithfully, one
run after the other or in one batch, and in the ways that break a cache, each a named control:

duplicates        the compiled cells of recomputed tokens stay beside the fresh ones: two cells for one position
blind             recomputed tokens see neither the context nor the rest of the block
misplaced         recomputed tokens are packed right behind the context, beside the compiled cells of these positions
not-reanchored    the compiled part keeps the rotation of its compile position
descending        runs are recomputed from the last to the first, each behind compiled predecessors only

The sample always has the block's first tokens: `one-batch` recomputes these before the rest and `descending` after it,
and without them the two would compute the same. It is larger than the share in its name by what these add.

Every scattered arm reports how many cells the block has per position; a faithful one has exactly 1.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from experiments import rows
from experiments.repair_bench import CONTEXT, WORK, Reading, RepairBench
from nexus import native
from nexus.cells import Cell
from nexus.config import ROOT, Config
from nexus.model_tuple import open_model, tuple_of
from nexus.pipeline import experiment_main, measure_cells, timed_cell_inputs, write_results
from nexus.repair import Place, arm_of, place_repaired, runs_of
from nexus.workload import load_workload

NAME = "rope_boundary_gate"
BEHIND = "system"
FRESH = 2


def sequential(place: Place, chosen: np.ndarray) -> None:
    """Run after run, ascending, each behind all earlier ones."""
    place_repaired(place, chosen, sequential=True)


def one_batch(place: Place, chosen: np.ndarray) -> None:
    """The runs behind the head share a batch."""
    place_repaired(place, chosen)


def duplicates(place: Place, chosen: np.ndarray) -> None:
    place_repaired(place, chosen, sequential=True)
    splicer, runtime = place.splicer, place.splicer.runtime
    splicer.load(place.resident, place.position)
    for begin, end in runs_of(chosen):
        runtime.seq_cp(runtime.scratch_seq, place.seq, place.position + begin, place.position + end)
    runtime.seq_rm(runtime.scratch_seq)


def blind(place: Place, chosen: np.ndarray) -> None:
    _graft_around(place, chosen, reanchor=True)
    runtime = place.splicer.runtime
    for begin, end in runs_of(chosen):
        runtime.decode(place.tokens[begin:end], place.position + begin, FRESH)
        runtime.seq_cp(FRESH, place.seq)
        runtime.seq_rm(FRESH)


def misplaced(place: Place, chosen: np.ndarray) -> None:
    runtime = place.splicer.runtime
    runtime.seq_cp(place.seq, FRESH)
    runtime.decode(place.tokens[chosen], place.position, FRESH)
    _graft_around(place, chosen[:0], reanchor=True)
    runtime.seq_cp(FRESH, place.seq, place.position, place.position + len(chosen))
    runtime.seq_rm(FRESH)


def not_reanchored(place: Place, chosen: np.ndarray) -> None:
    place_repaired(place, chosen, sequential=True)
    runtime = place.splicer.runtime
    for begin, end in runs_of(np.setdiff1d(np.arange(len(place.tokens)), chosen)):
        runtime.seq_rm(place.seq, place.position + begin, place.position + end)
    _graft_around(place, chosen, reanchor=False)


def descending(place: Place, chosen: np.ndarray) -> None:
    runtime, splicer = place.splicer.runtime, place.splicer
    splicer.load(place.resident, place.position)
    for begin, end in reversed(runs_of(chosen)):
        runtime.seq_cp(CONTEXT, FRESH)
        runtime.seq_cp(runtime.scratch_seq, FRESH, place.position, place.position + begin)
        runtime.decode(place.tokens[begin:end], place.position + begin, FRESH)
        runtime.seq_cp(FRESH, place.seq, place.position + begin, place.position + end)
        runtime.seq_rm(FRESH)
    runtime.seq_rm(runtime.scratch_seq)
    _graft_around(place, chosen, reanchor=True)


def _graft_around(place: Place, chosen: np.ndarray, reanchor: bool) -> None:
    """Copy the compiled cells of all tokens but `chosen` into the live sequence."""
    runtime = place.splicer.runtime
    place.splicer.load(place.resident, place.position, reanchor)
    for begin, end in runs_of(np.setdiff1d(np.arange(len(place.tokens)), chosen)):
        runtime.seq_cp(runtime.scratch_seq, place.seq, place.position + begin, place.position + end)
    runtime.seq_rm(runtime.scratch_seq)


FAITHFUL: dict[str, Callable[[Place, np.ndarray], None]] = {"sequential": sequential, "one-batch": one_batch}
WRONG: dict[str, Callable[[Place, np.ndarray], None]] = {
    "duplicates": duplicates, "blind": blind, "misplaced": misplaced, "not-reanchored": not_reanchored,
    "descending": descending,
}


def scattered_name(pct: float) -> str:
    """Name of the arm that chooses the tokens: a head, for which the order matters, and a sample of `pct` percent."""
    return f"head-8+random-{pct:g}"


class Gate:
    """Measures one (depth, case) at a time."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.model = open_model(cfg.model)
        workload = load_workload(ROOT / cfg.workload.tools, ROOT / cfg.workload.queries,
                                 ROOT / cfg.workload.conversation)
        self.bench = RepairBench(cfg, self.model, workload, cfg.rope_boundary_gate.n_cases, [BEHIND])

    def measure(self, cell: Cell) -> list[dict]:
        """Samples of one (depth, case): every way of recomputing the same tokens, and other arms, in a shuffled order."""
        bench, pct = self.bench, self.cfg.rope_boundary_gate.recompute_pct
        case_id = cell.inputs["case"]
        bench.enter(cell.inputs["n_past"])
        reference, _ = bench.reference(case_id)
        plain = {"none": 0.0, f"suffix-{pct:g}": pct, f"head-{pct:g}%": pct}
        calls: list[tuple[dict, Callable[[], tuple[Reading, float]]]] = [
            ({"arm": "noise_floor", "recompute_pct": 100.0, "faithful": True}, lambda: (bench.prefilled(case_id), 1.0))]
        calls += [({"arm": arm, "recompute_pct": share, "faithful": True},
                   lambda arm=arm: (bench.repaired(case_id, BEHIND, arm_of(arm)), 1.0)) for arm, share in plain.items()]
        calls += [({"arm": f"{scattered_name(pct)} {way}", "recompute_pct": pct, "faithful": way in FAITHFUL},
                   lambda fill=fill: self.scattered(case_id, fill)) for way, fill in (FAITHFUL | WRONG).items()]
        samples = {}
        for i in np.random.default_rng([self.cfg.seed, bench.n_past, bench.index[case_id]]).permutation(len(calls)):
            keys, call = calls[i]
            measured, cells = call()
            samples[i] = bench.samples(case_id, reference, measured, **keys, cells_per_position=cells)
        return [sample for i in sorted(samples) for sample in samples[i]]

    def scattered(self, case_id: str, fill: Callable[[Place, np.ndarray], None]) -> tuple[Reading, float]:
        """The reading after `fill` recomputed this case's sample of tokens, and the block's cells per position."""
        bench = self.bench
        runtime, block, position = bench.runtime, bench.blocks[case_id], bench.position
        place, arm = bench.place(case_id, BEHIND), arm_of(scattered_name(self.cfg.rope_boundary_gate.recompute_pct))
        end = position + len(block)
        runtime.seq_cp(CONTEXT, WORK)
        try:
            start = time.perf_counter()
            chosen = arm.select(place)
            fill(place, chosen)
            query = runtime.decode(bench.queries[case_id], end, WORK, logits=True)
            ttft_ms = (time.perf_counter() - start) * 1e3
            runtime.seq_cp(WORK, runtime.scratch_seq, position, end)
            blob = runtime.state_get(runtime.scratch_seq)
            state = native.kernels().parse_kv_state(blob.ctypes.data, blob.nbytes)
            cells = int(state.caches[0].n_cells) / len(block)
            runtime.seq_rm(runtime.scratch_seq)
            return Reading({"query": query, "block_end": bench.block_end(block)}, ttft_ms, len(chosen)), cells
        finally:
            for seq in (WORK, FRESH, runtime.scratch_seq):
                runtime.seq_rm(seq)


def run(cfg: Config, out: Path) -> Path:
    """Path of the written artifact, `<out>/rope_boundary_gate.json`."""
    gate = Gate(cfg)
    inputs = timed_cell_inputs(NAME, cfg, gate.model.sha256)
    cells = [Cell({**inputs, "n_past": n_past, "case": case.id}, weight=len(gate.bench.blocks[case.id]),
                  label=f"depth {n_past}, {case.tool}")
             for n_past in cfg.rope_boundary_gate.n_past for case in gate.bench.cases]
    samples = measure_cells(cfg, cells, gate.measure, "scattered recompute")
    table = rows.rope_boundary_gate(samples, cfg.seed, cfg.statistics.level)
    return write_results(
        NAME, cfg, out, tuple_=tuple_of(gate.model, cfg.model), rows=table, samples=samples,
        isa=gate.bench.splicer.isa,
        metrics={f"{row['arm']}.{row['n_past']}": row["dkl_nats"].value for row in table if row["probe"] == "query"})


if __name__ == "__main__":
    experiment_main(NAME, run)

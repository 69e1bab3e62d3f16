"""Table III and Figure 4: time to first token of a spliced and repaired block against prefill, cold and warm.

cold   the cache is empty on both sides: context, block and query are decoded (the published protocol)
warm   the context is resident, as in an agent: block and query only

Per trial, prefill and every arm run once, in an order shuffled by a seed; the first trial of a depth is preceded by one
that is thrown away. Arms: `suffix-R(n)` for each curve (compiled behind the system prompt, as published), the arms of
the configuration (compiled behind the first of `repair.compiled_behind`), and what a server could do instead:

prefix-reuse          the context is found in a prefix cache, block and query are prefilled (cold only: warm, it is
                      what every arm is compared with)
engine-shift          llama.cpp moves the compiled block by its own position shift; nothing is recomputed
group-cache           system prompt and tool are one cached prefix, the conversation stands behind it and is resident
group-cache-rebuilt   the same after the set of tools changed: the conversation is decoded again

Divergence is read against a full prefill: warm, of the same batch split; cold, against the one timed in the trial.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from experiments import rows
from experiments.repair_bench import CONTEXT, WORK, Reading, RepairBench
from nexus import artifact, provenance
from nexus.cells import Cell, CellStore, run_cells
from nexus.config import ROOT, Config
from nexus.model_tuple import open_model, tuple_of
from nexus.pipeline import experiment_main, timed_cell_inputs, write_metrics
from nexus.progress import progress
from nexus.prompt import conversation_tokens
from nexus.repair import Arm, arm_of
from nexus.repair_policy import Schedule
from nexus.workload import load_workload

NAME = "deep_splice_ttft"
CURVE_ARM = "suffix-R(n)"
CURVE_BEHIND = "system"
PREFILL = "prefill"


class Ttft:
    """Measures one (protocol, depth, trial) at a time."""

    def __init__(self, cfg: Config):
        self.cfg, self.section = cfg, cfg.deep_splice_ttft
        self.model = open_model(cfg.model)
        workload = load_workload(ROOT / cfg.workload.tools, ROOT / cfg.workload.queries,
                                 ROOT / cfg.workload.conversation)
        trials = max(self.section.trials_warm, self.section.trials_cold)
        self.behind = cfg.repair.compiled_behind[0]
        # Room for two contexts: a group cache holds the conversation a second time.
        self.bench = RepairBench(cfg, self.model, workload, min(trials, len(workload.cases)),
                                 dict.fromkeys([CURVE_BEHIND, self.behind]), n_ctx=2 * cfg.runtime.n_ctx)
        self.warmed: tuple[str, int] | None = None

    def schedule(self, curve: float) -> Schedule:
        repair = self.cfg.repair
        return Schedule(repair.max_splice_pos, repair.recompute_pct, curve, repair.enable_deep_splice)

    def measure(self, cell: Cell) -> list[dict]:
        """Samples of one trial: two probes of prefill and of every arm."""
        protocol, n_past, trial = (cell.inputs[name] for name in ("protocol", "n_past", "trial"))
        bench = self.bench
        case_id = bench.cases[trial % len(bench.cases)].id
        if protocol == "warm":
            bench.enter(n_past)
            reference, _ = bench.reference(case_id)
            calls = self.warm(case_id)
        else:
            bench.forget()
            bench.n_past = n_past
            calls = self.cold(case_id)
        if self.warmed != (protocol, n_past):
            calls[PREFILL, None][2]()
            self.warmed = (protocol, n_past)
        names = list(calls)
        order = np.random.default_rng([self.cfg.seed, n_past, trial]).permutation(len(names))
        readings = {names[i]: calls[names[i]][2]() for i in order}
        if protocol == "warm" and trial < self.section.trials_cold:
            # These decode the whole conversation, hence as often as cold trials do.
            for name, reading in zip(("group-cache-rebuilt", "group-cache"), self.group_cache(case_id)):
                calls[name, None] = ("nothing", None, None)
                readings[name, None] = reading
        if protocol == "cold":
            reference = readings[PREFILL, None]
        samples = []
        bench.n_past = n_past
        for (name, curve), reading in readings.items():
            behind, arm, _ = calls[name, curve]
            keys = {"protocol": protocol, "arm": name, "curve_k": curve, "compiled_behind": behind, "trial": trial,
                    "r_pct": self._share(arm, len(bench.blocks[case_id])),
                    "context_tokens": bench.position if protocol == "cold" else 0,
                    "probe_tokens": arm.probe_tokens(len(bench.blocks[case_id]), self.model.n_layer) if arm else 0.0}
            if reading.logits:
                samples += bench.samples(case_id, reference, reading, **keys)
            else:
                samples.append({**keys, "n_past": n_past, "case": case_id, "recomputed": reading.recomputed,
                                "block_tokens": len(bench.blocks[case_id]), "probe": "query",
                                "query_tokens": len(bench.queries[case_id]), "ttft_ms": reading.ttft_ms})
        if protocol == "cold":
            bench.forget()
        return samples

    def warm(self, case_id: str) -> dict[tuple, tuple]:
        """(arm's name, curve) → (compiled behind, arm, measurement) of one warm trial."""
        bench = self.bench
        calls = {(PREFILL, None): ("nothing", None, lambda: bench.prefilled(case_id))}
        calls |= self._arms(case_id, cold=False)
        calls["engine-shift", None] = (self.behind, arm_of("none"), lambda: self.engine_shift(case_id))
        return calls

    def cold(self, case_id: str) -> dict[tuple, tuple]:
        """The same of one cold trial."""
        bench = self.bench
        calls = {(PREFILL, None): ("nothing", None, lambda: bench.prefilled(case_id, cold=True))}
        calls |= self._arms(case_id, cold=True)
        calls["prefix-reuse", None] = ("nothing", None, lambda: self.prefix_reuse(case_id))
        return calls

    def _arms(self, case_id: str, cold: bool) -> dict[tuple, tuple]:
        listed: list[tuple[tuple, str, Arm]] = [
            ((CURVE_ARM, curve), CURVE_BEHIND, self.schedule(curve).arm(self.bench.n_past))
            for curve in self.section.curves
        ]
        # A cold trial decodes the whole context for every arm, so that one of the others has to do.
        others = self.section.arms[-1:] if cold else self.section.arms
        listed += [((name, None), self.behind, arm_of(name)) for name in others]
        return {key: (behind, arm, lambda behind=behind, arm=arm: self.bench.repaired(case_id, behind, arm, cold=cold))
                for key, behind, arm in listed}

    def _share(self, arm: Arm | None, n_tokens: int) -> float:
        """Share of the block that the arm recomputes as configured, percent."""
        if arm is None:
            return 100.0
        return sum(amount if is_share else 100.0 * min(n_tokens, amount) / n_tokens for _, amount, is_share in arm.parts)

    def engine_shift(self, case_id: str) -> Reading:
        """The compiled block moved by llama.cpp's own shift, which the query's decode applies."""
        bench, runtime = self.bench, self.bench.runtime
        resident, end = bench.resident[self.behind, case_id], bench.position + len(bench.blocks[case_id])
        runtime.seq_cp(CONTEXT, WORK)
        try:
            start = time.perf_counter()
            bench.splicer.load(resident, resident.anchor)
            runtime.seq_add(runtime.scratch_seq, -1, -1, bench.position - resident.anchor)
            runtime.seq_cp(runtime.scratch_seq, WORK)
            runtime.seq_rm(runtime.scratch_seq)
            logits = runtime.decode(bench.queries[case_id], end, WORK, logits=True)
            ttft_ms = (time.perf_counter() - start) * 1e3
            return Reading({"query": logits, "block_end": bench.block_end(bench.blocks[case_id])}, ttft_ms)
        finally:
            runtime.seq_rm(WORK)
            runtime.seq_rm(runtime.scratch_seq)

    def group_cache(self, case_id: str) -> tuple[Reading, Reading]:
        """System prompt and tool first, the conversation behind them: (rebuilt behind the prefix, all of it resident).

        Another prompt, so that only its time is compared.
        """
        bench, runtime = self.bench, self.bench.runtime
        prefix, query = np.concatenate([bench.system, bench.blocks[case_id]]), bench.queries[case_id]
        conversation = conversation_tokens(self.model, bench.conversation, bench.n_past)
        end = len(prefix) + bench.n_past
        try:
            runtime.decode(prefix, 0, WORK)
            start = time.perf_counter()
            runtime.decode(np.concatenate([conversation, query]), len(prefix), WORK, logits=True)
            rebuilt = Reading({}, (time.perf_counter() - start) * 1e3, bench.n_past)
            runtime.seq_rm(WORK, end, -1)
            start = time.perf_counter()
            runtime.decode(query, end, WORK, logits=True)
            return rebuilt, Reading({}, (time.perf_counter() - start) * 1e3)
        finally:
            runtime.seq_rm(WORK)

    def prefix_reuse(self, case_id: str) -> Reading:
        """Block and query decoded behind a context that is resident from before."""
        bench = self.bench
        bench.runtime.clear()
        bench.runtime.decode(bench.context(bench.n_past), 0, CONTEXT)
        return bench.prefilled(case_id)


def run(cfg: Config, out: Path) -> Path:
    """Path of the written artifact, `<out>/deep_splice_ttft.json`; trials measured earlier are not measured again."""
    ttft = Ttft(cfg)
    section, inputs = cfg.deep_splice_ttft, timed_cell_inputs(NAME, cfg, ttft.model.sha256)
    cells = [Cell({**inputs, "protocol": protocol, "n_past": n_past, "trial": trial},
                  weight=(n_past + 250) * (len(section.curves) + 3) if protocol == "cold" else 1500 + 2 * n_past,
                  label=f"{protocol}, depth {n_past}, trial {trial}")
             for protocol, trials in (("warm", section.trials_warm), ("cold", section.trials_cold))
             for n_past in section.n_past for trial in range(trials)]
    per_cell = run_cells(cells, ttft.measure, store=CellStore(), progress=progress, anew=cfg.force,
                         description="time to first token")
    samples = [sample for cell in per_cell for sample in cell]
    table = rows.deep_splice_ttft(samples, cfg.seed, cfg.statistics.level)
    path = out / f"{NAME}.json"
    artifact.write(path, experiment=NAME, tuple_=tuple_of(ttft.model, cfg.model), config=cfg.resolved(NAME),
                   rows=table, samples=samples,
                   provenance=provenance.collect(isa=ttft.bench.splicer.isa, threads=cfg.runtime.n_threads))
    write_metrics(out, NAME, {f"{row['protocol']}.K{row['curve_k']:g}.{row['n_past']}": {"speedup": row["speedup"].value}
                              for row in table if row["curve_k"] is not None})
    return path


if __name__ == "__main__":
    experiment_main(NAME, run)

"""Table III and Figure 4: time to first token of a spliced and repaired block against prefill, cold and warm.

cold   the cache is empty on both sides: context, block and query are decoded (the published protocol)
warm   the context is resident, as in an agent: block and query only

Per trial, prefill, every arm and every peer run once, in an order shuffled by a seed; before the first trial of a depth
each warm one, and the cold prefill, runs once and is thrown away. Arms: `suffix-R(n)` for each curve (compiled behind
the system prompt, as published), and the arms of the configuration (compiled behind `repair.compiled_behind`). Peers,
what a server could do instead:

engine-shift          warm: llama.cpp moves a block compiled behind the system prompt by its own position shift; nothing
                      is recomputed
prefix-reuse          cold: the context is found in a prefix cache, block and query are prefilled
group-cache           cold: system prompt and GROUP_TOOLS tools are one cached prefix, the conversation behind it is
                      cached, too; only the query is decoded
group-cache-rebuilt   cold: the same after the set of tools changed: tools, conversation and query are decoded again

Cold peers find what they cache resident, have the rest of the cache to themselves, and stand beside a cold prefill. Divergence is read against a full prefill: warm, of the same
batch split; cold, against the one timed in the trial.
"""
from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments import rows
from experiments.repair_bench import CONTEXT, WORK, Reading, RepairBench
from nexus.cells import Cell
from nexus.config import ROOT, Config, ConfigError
from nexus.model_tuple import open_model, tuple_of
from nexus.pipeline import experiment_main, measure_cells, timed_cell_inputs, write_results
from nexus.prompt import conversation_tokens
from nexus.repair import Arm, arm_of
from nexus.repair_policy import Schedule
from nexus.workload import load_workload

NAME = "deep_splice_ttft"
CURVE_ARM = "suffix-R(n)"
CURVE_BEHIND = "system"
PREFILL = "prefill"
GROUP_TOOLS = 5

Key = tuple[str, float | None]
"""Name of an arm or peer, and K of its curve where it has one."""


@dataclass(frozen=True)
class Timed:
    """One way to the first token. `run` takes the time; a peer may take two on its way, by name."""

    behind: str
    arm: Arm | None
    run: Callable[[], dict[Key, Reading]]


class Ttft:
    """Measures one (protocol, depth, trial) at a time."""

    def __init__(self, cfg: Config):
        self.cfg, self.section = cfg, cfg.deep_splice_ttft
        self.model = open_model(cfg.model)
        workload = load_workload(ROOT / cfg.workload.tools, ROOT / cfg.workload.queries,
                                 ROOT / cfg.workload.conversation)
        trials = max(self.section.trials_warm, self.section.trials_cold)
        self.behind = cfg.repair.compiled_behind
        self.bench = RepairBench(cfg, self.model, workload, min(trials, len(workload.cases)),
                                 dict.fromkeys([CURVE_BEHIND, self.behind]))
        self.warmed: tuple[str, int] | None = None
        longest = max(len(self.bench.system) + sum(map(len, self.group(case.id))) + len(self.bench.queries[case.id])
                      for case in self.bench.cases) + self.section.n_past[-1]
        if longest > cfg.runtime.n_ctx:
            raise ConfigError(f"runtime.n_ctx: {cfg.runtime.n_ctx} cells do not hold {GROUP_TOOLS} tools and "
                              f"{self.section.n_past[-1]} tokens of deep_splice_ttft.n_past; give {longest} or more")

    def schedule(self, curve: float) -> Schedule:
        repair = self.cfg.repair
        return Schedule(repair.max_splice_pos, repair.recompute_pct, curve, repair.enable_deep_splice)

    def measure(self, cell: Cell) -> list[dict]:
        """Samples of one trial: two probes of prefill, of every arm and of every peer that sees the same tokens."""
        protocol, n_past, trial = (cell.inputs[name] for name in ("protocol", "n_past", "trial"))
        bench, cold = self.bench, protocol == "cold"
        case_id = bench.cases[trial % len(bench.cases)].id
        if cold:
            bench.forget()
            bench.n_past = n_past
        else:
            bench.enter(n_past)
            reference, _ = bench.reference(case_id)
        listed = self.listed(case_id, cold)
        if self.warmed != (protocol, n_past):
            # A cold trial is mostly its context, whoever decodes it.
            for timed in listed[:1] if cold else listed:
                timed.run()
            self.warmed = (protocol, n_past)
        readings: dict[Key, tuple[Timed, Reading]] = {}
        for i in np.random.default_rng([self.cfg.seed, n_past, trial]).permutation(len(listed)):
            readings |= {key: (listed[i], reading) for key, reading in listed[i].run().items()}
        if cold:
            reference = readings[PREFILL, None][1]
        samples = []
        for (name, curve), (timed, reading) in readings.items():
            arm, block = timed.arm, bench.blocks[case_id]
            keys = {"protocol": protocol, "arm": name, "curve_k": curve, "compiled_behind": timed.behind,
                    "trial": trial, "r_pct": self._share(arm, len(block)),
                    "context_tokens": bench.position if cold else 0,
                    "probe_tokens": arm.probe_tokens(len(block), self.model.n_layer) if arm else 0.0}
            if reading.logits:
                samples += bench.samples(case_id, reference, reading, **keys)
            else:
                samples.append({**keys, "n_past": n_past, "case": case_id, "recomputed": reading.recomputed,
                                "block_tokens": len(block), "probe": "query",
                                "query_tokens": len(bench.queries[case_id]), "ttft_ms": reading.ttft_ms})
        if cold:
            bench.forget()
        return samples

    def listed(self, case_id: str, cold: bool) -> list[Timed]:
        """What one trial times; prefill comes first."""
        bench = self.bench
        arms: list[tuple[Key, str, Arm]] = [
            ((CURVE_ARM, curve), CURVE_BEHIND, self.schedule(curve).arm(bench.n_past)) for curve in self.section.curves
        ]
        # A cold trial decodes the whole context for every arm, so that one of the others has to do.
        others = self.section.arms[:1] if cold else self.section.arms
        arms += [((name, None), self.behind, arm_of(name)) for name in others]

        def run(key: Key, behind: str, arm: Arm) -> dict[Key, Reading]:
            return {key: bench.repaired(case_id, behind, arm, cold=cold)}

        listed = [Timed(behind, arm, functools.partial(run, key, behind, arm)) for key, behind, arm in arms]
        if cold:
            return [Timed("nothing", None, lambda: self.prefill_and_reuse(case_id)), *listed,
                    Timed("nothing", None, lambda: self.group_cache(case_id))]
        return [Timed("nothing", None, lambda: {(PREFILL, None): bench.prefilled(case_id)}), *listed,
                Timed(CURVE_BEHIND, arm_of("none"), lambda: {("engine-shift", None): self.engine_shift(case_id)})]

    def _share(self, arm: Arm | None, n_tokens: int) -> float:
        """Share of the block that the arm recomputes as configured, percent."""
        if arm is None:
            return 100.0
        return sum(amount if is_share else 100.0 * min(n_tokens, amount) / n_tokens for _, amount, is_share in arm.parts)

    def engine_shift(self, case_id: str) -> Reading:
        """The compiled block moved by llama.cpp's own shift, which the query's decode applies."""
        bench, runtime = self.bench, self.bench.runtime
        resident, end = bench.resident[CURVE_BEHIND, case_id], bench.position + len(bench.blocks[case_id])
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

    def prefill_and_reuse(self, case_id: str) -> dict[Key, Reading]:
        """A cold prefill; then block and query again, behind the context that it left, as in a prefix cache."""
        bench, runtime, block = self.bench, self.bench.runtime, self.bench.blocks[case_id]
        tokens = np.concatenate([bench.context(bench.n_past), block, bench.queries[case_id]])
        readings = {}
        runtime.clear()
        for name, begin in ((PREFILL, 0), ("prefix-reuse", bench.position)):
            start = time.perf_counter()
            logits = runtime.decode(tokens[begin:], begin, WORK, logits=True)
            ttft_ms = (time.perf_counter() - start) * 1e3
            readings[name, None] = Reading({"query": logits, "block_end": bench.block_end(block)}, ttft_ms, len(block))
            runtime.seq_rm(WORK, bench.position, -1)
        runtime.clear()
        return readings

    def group(self, case_id: str) -> list[np.ndarray]:
        """Token ids of this case's block and of those that follow it, GROUP_TOOLS in all."""
        cases, first = self.bench.cases, self.bench.index[case_id]
        return [self.bench.blocks[cases[(first + i) % len(cases)].id] for i in range(GROUP_TOOLS)]

    def group_cache(self, case_id: str) -> dict[Key, Reading]:
        """System prompt and tools first, the conversation behind them: tools changed, and all of it resident.

        Another prompt, so that only its time is compared.
        """
        bench, runtime = self.bench, self.bench.runtime
        tools = self.group(case_id)
        conversation = conversation_tokens(self.model, bench.conversation, bench.n_past)
        behind, query = np.concatenate([*tools, conversation]), bench.queries[case_id]
        end = len(bench.system) + len(behind)
        runtime.clear()
        runtime.decode(bench.system, 0, WORK)
        start = time.perf_counter()
        runtime.decode(np.concatenate([behind, query]), len(bench.system), WORK, logits=True)
        rebuilt = Reading({}, (time.perf_counter() - start) * 1e3, len(tools[0]))
        runtime.seq_rm(WORK, end, -1)
        start = time.perf_counter()
        runtime.decode(query, end, WORK, logits=True)
        resident = Reading({}, (time.perf_counter() - start) * 1e3)
        runtime.clear()
        return {("group-cache-rebuilt", None): rebuilt, ("group-cache", None): resident}


def run(cfg: Config, out: Path) -> Path:
    """Path of the written artifact, `<out>/deep_splice_ttft.json`; trials measured earlier are not measured again."""
    ttft = Ttft(cfg)
    section, inputs = cfg.deep_splice_ttft, timed_cell_inputs(NAME, cfg, ttft.model.sha256)
    cells = [Cell({**inputs, "protocol": protocol, "n_past": n_past, "trial": trial},
                  weight=(n_past + 250) * (len(section.curves) + 3) if protocol == "cold" else 1500 + 2 * n_past,
                  label=f"{protocol}, depth {n_past}, trial {trial}")
             for protocol, trials in (("warm", section.trials_warm), ("cold", section.trials_cold))
             for n_past in section.n_past for trial in range(trials)]
    samples = measure_cells(cfg, cells, ttft.measure, "time to first token")
    table = rows.deep_splice_ttft(samples, cfg.seed, cfg.statistics.level)
    metrics = {f"{row['protocol']}.K{row['curve_k']:g}.{row['n_past']}": {"speedup": row["speedup"].value}
               for row in table if row["curve_k"] is not None}
    return write_results(NAME, cfg, out, tuple_=tuple_of(ttft.model, cfg.model), rows=table, samples=samples,
                         metrics=metrics, isa=ttft.bench.splicer.isa)


if __name__ == "__main__":
    experiment_main(NAME, run)

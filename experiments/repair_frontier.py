"""Which tokens to recompute, and how many: divergence and speed of every repair arm against the share recomputed.

The context is resident ("warm"): a latency is the time from there to the logits behind the query, and prefill decodes
block and query in one batch. Prefill and all arms of a case run interleaved, in an order shuffled per case.
Controls: `full` recomputes everything, `noise_floor` is the one-batch prefill against the reference's split, and the
`oracle` arm knows the answer.
"""
from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments import rows
from experiments.repair_bench import RepairBench
from nexus.cells import Cell
from nexus.config import ROOT, Config
from nexus.model_tuple import open_model, tuple_of
from nexus.pipeline import experiment_main, measure_cells, timed_cell_inputs, write_results
from nexus.repair import arm_of
from nexus.workload import load_workload

NAME = "repair_frontier"


def arm_name(family: str, share_pct: float) -> str:
    """The name in nexus/repair.py of a family's arm that recomputes this share; two families take half each."""
    parts = family.split("+")
    return "+".join(f"{part}-{share_pct / len(parts):g}{'%' if part == 'head' else ''}" for part in parts)


def arms(cfg: Config) -> list[tuple[str, str, float | None, str]]:
    """(compiled behind, family or arm, share in percent, name in nexus/repair.py) of every arm.

    The share is None for an arm that counts tokens: it differs between blocks.
    """
    section = cfg.repair_frontier
    listed: list[tuple[str, str, float | None, str]] = []
    for i, behind in enumerate(section.compiled_behind):
        families, shares = (section.families, section.shares_pct) if i == 0 else (
            section.lead_families, section.lead_shares_pct)
        listed.append((behind, "none", 0.0, "none"))
        listed += [(behind, family, share, arm_name(family, share)) for family in families for share in shares]
        listed += [(behind, name, None, name) for name in section.arms]
    listed.append((section.compiled_behind[0], "full", 100.0, "full"))
    return listed


class Frontier:
    """Measures one (depth, case) at a time: every arm of it."""

    def __init__(self, cfg: Config):
        self.cfg, self.arms = cfg, arms(cfg)
        self.model = open_model(cfg.model)
        workload = load_workload(ROOT / cfg.workload.tools, ROOT / cfg.workload.queries,
                                 ROOT / cfg.workload.conversation)
        self.bench = RepairBench(cfg, self.model, workload, cfg.repair_frontier.n_cases,
                                 cfg.repair_frontier.compiled_behind)

    def measure(self, cell: Cell) -> list[dict]:
        """Samples of one (depth, case): two probes of every arm."""
        n_past, case_id = cell.inputs["n_past"], cell.inputs["case"]
        bench = self.bench
        bench.enter(n_past)
        reference, values = bench.reference(case_id)
        order = np.random.default_rng([self.cfg.seed, n_past, bench.index[case_id]]).permutation(len(self.arms) + 1)
        samples = {}
        for i in order:
            if i == len(self.arms):
                measured, arm = bench.prefilled(case_id), None
                keys = {"compiled_behind": "nothing", "arm": "noise_floor", "recompute_pct": 100.0}
            else:
                behind, family, share, name = self.arms[i]
                arm = arm_of(name)
                measured = bench.repaired(case_id, behind, arm, values)
                keys = {"compiled_behind": behind, "arm": family, "recompute_pct": share}
            probe_tokens = arm.probe_tokens(len(bench.blocks[case_id]), self.model.n_layer) if arm else 0.0
            samples[i] = bench.samples(case_id, reference, measured, **keys, probe_tokens=probe_tokens)
        return [sample for i in sorted(samples) for sample in samples[i]]


def run(cfg: Config, out: Path) -> Path:
    """Path of the written artifact, `<out>/repair_frontier.json`; cells measured earlier are not measured again."""
    frontier = Frontier(cfg)
    inputs = timed_cell_inputs(NAME, cfg, frontier.model.sha256)
    blocks = frontier.bench.blocks
    cells = [Cell({**inputs, "n_past": n_past, "case": case.id}, weight=len(blocks[case.id]) * (1 + n_past / 4000),
                  label=f"depth {n_past}, {case.tool}")
             for n_past in cfg.repair_frontier.n_past for case in frontier.bench.cases]
    samples = measure_cells(cfg, cells, frontier.measure, "repair frontier")
    table = rows.repair_frontier(samples, cfg.seed, cfg.statistics.level)
    return write_results(NAME, cfg, out, tuple_=tuple_of(frontier.model, cfg.model), rows=table, samples=samples,
                         metrics=rows.best_within(table, most_pct=10.0), isa=frontier.bench.splicer.isa)


if __name__ == "__main__":
    experiment_main(NAME, run)

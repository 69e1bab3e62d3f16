"""The calibrated policy: chosen on one set of tools, queries and context, tested on others.

Calibration measures a ladder of arms, from cheap to dear, on the workload's cases and takes per depth the cheapest that
`nexus.repair_policy.calibrate` allows; a one-batch prefill ends the ladder as `full`. The test measures the chosen arm
on the held-out workload, behind the off-topic conversation. A violation is a held-out case above ε. Blocks are compiled
behind `repair.compiled_behind`.
"""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments import rows
from experiments.repair_bench import RepairBench
from nexus.cells import Cell
from nexus.config import ROOT, Config
from nexus.model_tuple import open_model, tuple_of
from nexus.pipeline import experiment_main, measure_cells, timed_cell_inputs, write_results
from nexus.repair import arm_of
from nexus.repair_policy import Choice, Rung, calibrate
from nexus.runtime import Model
from nexus.workload import Workload, load_workload, select

NAME = "calibrated_repair"
SETS = ("calibration", "test")


def workload_of(cfg: Config, which: str) -> Workload:
    """Tools, conversation and as many cases as configured of one of SETS; the sets share none of them."""
    texts, section = cfg.workload, cfg.calibrated_repair
    paths, n_cases = (((texts.tools, texts.queries, texts.conversation), section.n_calibration)
                      if which == "calibration" else
                      ((texts.held_out_tools, texts.held_out_queries, texts.off_topic), section.n_test))
    workload = load_workload(*(ROOT / path for path in paths))
    return replace(workload, cases=select(workload.cases, n_cases))


class Ladder:
    """Measures one (set, depth, case) at a time: some arms, and a prefill in one batch as `full`."""

    def __init__(self, cfg: Config, model: Model, which: str, workload: Workload):
        self.cfg, self.which = cfg, which
        self.n_layer, self.behind = model.n_layer, cfg.repair.compiled_behind
        self.bench = RepairBench(cfg, model, workload, len(workload.cases), [self.behind])

    def cells(self, arms: dict[int, list[str]]) -> list[Cell]:
        """One cell for each depth, whose arms these are, and case."""
        inputs = timed_cell_inputs(NAME, self.cfg, self.bench.model.sha256)
        return [Cell({**inputs, "set": self.which, "n_past": n_past, "case": case.id, "arms": names},
                     weight=len(self.bench.blocks[case.id]) * (1 + n_past / 4000) * (2 + 0.4 * len(names)),
                     label=f"{self.which}, depth {n_past}, {case.tool}")
                for n_past, names in arms.items() for case in self.bench.cases]

    def measure(self, cell: Cell) -> list[dict]:
        """Samples of one cell: two probes of every arm, run in an order shuffled per case."""
        bench, case_id, n_past = self.bench, cell.inputs["case"], cell.inputs["n_past"]
        bench.enter(n_past)
        reference, _ = bench.reference(case_id)
        names = [*cell.inputs["arms"], "full"]
        samples = {}
        for i in np.random.default_rng([self.cfg.seed, n_past, bench.index[case_id]]).permutation(len(names)):
            arm = arm_of(names[i])
            measured = bench.prefilled(case_id) if names[i] == "full" else bench.repaired(case_id, self.behind, arm)
            samples[i] = bench.samples(case_id, reference, measured, set=self.which, arm=names[i],
                                       compiled_behind=self.behind,
                                       probe_tokens=arm.probe_tokens(len(bench.blocks[case_id]), self.n_layer))
        return [sample for i in sorted(samples) for sample in samples[i]]


def measured(ladder: Ladder, arms: dict[int, list[str]]) -> list[dict]:
    """All samples of one set. Closes the ladder's runtime."""
    try:
        return measure_cells(ladder.cfg, ladder.cells(arms), ladder.measure, f"calibrated repair, {ladder.which}")
    finally:
        ladder.bench.runtime.close()


def choices_of(samples: list[dict], cfg: Config) -> list[Choice]:
    """What the policy takes at each depth of the calibration samples."""
    choices = []
    for (n_past,), members in rows.grouped(samples, "n_past").items():
        rungs = [Rung(arm, tuple(s["dkl_nats"] for s in found))
                 for (arm,), found in rows.grouped((s for s in members if s["probe"] == "query"), "arm").items()
                 if arm != "full"]
        arm, upper = calibrate(rungs, cfg.repair.epsilon_nats, cfg.seed, cfg.statistics.level)
        choices.append(Choice(n_past, arm, cfg.repair.compiled_behind, upper))
    return choices


def run(cfg: Config, out: Path) -> Path:
    """Path of the written artifact, `<out>/calibrated_repair.json`; cells measured earlier are not measured again."""
    section, level, epsilon = cfg.calibrated_repair, cfg.statistics.level, cfg.repair.epsilon_nats
    # Both, so that a text that cannot be used is found before anything is measured.
    workloads = {which: workload_of(cfg, which) for which in SETS}
    model = open_model(cfg.model)
    ladder = Ladder(cfg, model, "calibration", workloads["calibration"])
    isa = ladder.bench.splicer.isa
    known = measured(ladder, dict.fromkeys(section.n_past, [arm for arm in section.ladder if arm != "full"]))
    choices = choices_of(known, cfg)
    test = measured(Ladder(cfg, model, "test", workloads["test"]),
                    {choice.n_past: [choice.arm] if choice.arm != "full" else [] for choice in choices})
    taken = {choice.n_past: choice.arm for choice in choices}
    table = rows.calibrated_repair(known, test, taken, cfg.seed, level, epsilon)
    metrics = {str(row["n_past"]): {
        "recompute_pct": row["recompute_pct"],
        **{name: row[name].value for name in ("dkl_nats", "violation_rate", "speedup")}
    } for row in table if row["set"] == "test" and row["chosen"]}
    return write_results(NAME, cfg, out, tuple_=tuple_of(model, cfg.model), rows=table, samples=known + test,
                         metrics=metrics, isa=isa)


if __name__ == "__main__":
    experiment_main(NAME, run)

"""The calibrated policy, tested on other tools, another conversation and other queries than it was calibrated on.

Calibration reads the samples of `repair_frontier` (probe `query`, blocks compiled behind any of
`repair.compiled_behind`, the oracle left out): per depth the cheapest arm whose one-sided upper bound on the mean
divergence is at most ε, else `full`. The test measures that arm on the held-out workload, behind the off-topic conversation. A violation is a
held-out case above ε.
"""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments import rows
from experiments.repair_bench import RepairBench
from experiments.repair_frontier import arm_name
from nexus import artifact, provenance
from nexus.cells import Cell, CellStore, run_cells
from nexus.config import ROOT, Config
from nexus.model_tuple import open_model, tuple_of
from nexus.pipeline import experiment_main, timed_cell_inputs, write_metrics
from nexus.progress import progress
from nexus.repair import arm_of
from nexus.repair_policy import Candidate, Choice, calibrate
from nexus.workload import load_workload

NAME = "calibrated_repair"
FRONTIER = "repair_frontier.json"
NOT_A_METHOD = ("oracle", "noise_floor", "full")


def usable(samples: list[dict], behind: Sequence[str]) -> list[dict]:
    """The frontier's samples that calibration may use."""
    return [sample for sample in samples if sample["probe"] == "query" and sample["compiled_behind"] in behind
            and sample["arm"] not in NOT_A_METHOD]


def name_of(sample: dict) -> str:
    """The name in nexus/repair.py of the arm of a frontier sample."""
    if not sample["recompute_pct"] or sample["arm"] == "full":
        return sample["arm"]
    return arm_name(sample["arm"], sample["recompute_pct"])


def candidates_of(samples: list[dict]) -> dict[int, list[Candidate]]:
    """What was measured of each arm, by depth."""
    candidates: dict[int, list[Candidate]] = {}
    keys = ("n_past", "compiled_behind", "arm", "recompute_pct")
    for (n_past, behind, _, _), members in rows.grouped(samples, *keys).items():
        cost = sum(map(rows.decoded_share, members)) / len(members)
        found = Candidate(name_of(members[0]), behind, cost, tuple(sample["dkl_nats"] for sample in members))
        candidates.setdefault(n_past, []).append(found)
    return candidates


def chosen_samples(samples: list[dict], choice: Choice) -> list[dict]:
    """The calibration samples of the chosen arm and of the prefill beside it, in the form of the test's samples."""
    found = [sample for sample in samples if sample["n_past"] == choice.n_past and sample["probe"] == "query"]
    picked = [{**sample, "arm": "policy"} for sample in found if name_of(sample) == choice.arm
              and (sample["compiled_behind"] == choice.compiled_behind or choice.arm == "full")]
    floors = [sample for sample in found if sample["arm"] == "noise_floor"]
    return [{**sample, "policy_arm": choice.arm, "compiled_behind": choice.compiled_behind}
            for sample in picked + floors]


class HeldOut:
    """Measures one held-out (depth, case) at a time with the arm that the policy chose for that depth."""

    def __init__(self, cfg: Config, choices: dict[int, Choice]):
        self.cfg, self.choices = cfg, choices
        self.model = open_model(cfg.model)
        workload = load_workload(ROOT / cfg.workload.held_out_tools, ROOT / cfg.workload.held_out_queries,
                                 ROOT / cfg.workload.off_topic)
        behind = sorted({choice.compiled_behind for choice in choices.values()})
        self.bench = RepairBench(cfg, self.model, workload, cfg.calibrated_repair.n_cases, behind)

    def measure(self, cell: Cell) -> list[dict]:
        """Samples of one (depth, case): the policy's arm and the noise floor, two probes each."""
        bench, case_id = self.bench, cell.inputs["case"]
        bench.enter(cell.inputs["n_past"])
        arm, behind = arm_of(cell.inputs["arm"]), cell.inputs["behind"]
        reference, _ = bench.reference(case_id)
        keys = {"policy_arm": arm.name, "compiled_behind": behind,
                "probe_tokens": arm.probe_tokens(len(bench.blocks[case_id]), self.model.n_layer)}
        floor = bench.prefilled(case_id)
        policy = bench.repaired(case_id, behind, arm)
        return [*bench.samples(case_id, reference, policy, arm="policy", **keys),
                *bench.samples(case_id, reference, floor, arm="noise_floor", **keys)]


def run(cfg: Config, out: Path) -> Path:
    """Path of the written artifact, `<out>/calibrated_repair.json`. Reads `<out>/repair_frontier.json`."""
    level, behind, epsilon = cfg.statistics.level, cfg.repair.compiled_behind, cfg.repair.epsilon_nats
    calibration = artifact.read_samples(out / FRONTIER)
    choices = {choice.n_past: choice
               for choice in calibrate(candidates_of(usable(calibration, behind)), epsilon, cfg.seed, level)}
    held_out = HeldOut(cfg, choices)
    inputs = timed_cell_inputs(NAME, cfg, held_out.model.sha256)
    cells = [Cell({**inputs, "n_past": n_past, "case": case.id, "arm": choice.arm,
                   "behind": choice.compiled_behind},
                  weight=len(held_out.bench.blocks[case.id]) * (1 + n_past / 4000), label=f"depth {n_past}, {case.tool}")
             for n_past, choice in choices.items() for case in held_out.bench.cases]
    per_cell = run_cells(cells, held_out.measure, store=CellStore(), progress=progress, anew=cfg.force,
                         description="calibrated repair, held-out cases")
    test = [sample for cell in per_cell for sample in cell]
    known = [sample for choice in choices.values() for sample in chosen_samples(calibration, choice)]
    table = rows.calibrated_repair(known, test, cfg.seed, level, epsilon)
    path = out / f"{NAME}.json"
    artifact.write(path, experiment=NAME, tuple_=tuple_of(held_out.model, cfg.model), config=cfg.resolved(NAME),
                   rows=table, samples=test,
                   provenance=provenance.collect(isa=held_out.bench.splicer.isa, threads=cfg.runtime.n_threads))
    write_metrics(out, NAME, {str(row["n_past"]): {
        "recompute_pct": row["recompute_pct"],
        **{name: row[name].value for name in ("dkl_nats", "violation_rate", "speedup")}
    } for row in table if row["set"] == "test"})
    return path


if __name__ == "__main__":
    experiment_main(NAME, run)

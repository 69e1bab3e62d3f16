"""The gate's threshold from queries written to be confusable, and what it and other thresholds cost (spec M10).

τ of each gated system is a low quantile of its retriever's margins on the adversarial queries, over the whole registry.
The fire rate is reported on those and on the development queries, which τ has not seen. Two curves belong to it: risk
against coverage of the margin, and abstention by the cosine of the nearest tool ("no tool fits"), on the development
queries, with its threshold chosen on the training queries.
"""
from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.routing_bench import RoutingBench
from experiments.rows import grouped
from nexus import stats
from nexus.cells import Cell
from nexus.config import Config
from nexus.gate import risk_coverage, tau_of
from nexus.pipeline import experiment_main, measure_cells, write_results
from nexus.route import GATED

NAME = "calibration"
ADVERSARIAL, DEVELOPMENT, TRAINING = "adversarial", "development", "training"


class Bench(RoutingBench):
    """Asks the retriever of each gated system, without its gate."""

    def cells(self) -> list[Cell]:
        inputs = self.inputs(NAME)
        return [Cell({**inputs, "system": system, "set": which}, weight=1, label=f"{system}, {which}")
                for system in GATED for which in (ADVERSARIAL, DEVELOPMENT, TRAINING)]

    def measure(self, cell: Cell) -> list[dict]:
        """One sample per query: margin, cosine of the nearest tool, and whether the first candidate is right."""
        system, which = cell.inputs["system"], cell.inputs["set"]
        router = self.router(system.removesuffix("+gate"), self.tools)
        samples = []
        for case in self.cases_of(getattr(self.cfg.workload.routing, which), known_only=True):
            route = router.route(case.query, 2)
            samples.append({"system": system, "set": which, "case": case.id, "answerable": case.tool is not None,
                            "margin": route.margin or 0.0, "best_cosine": route.best_cosine,
                            "right": case.accepts(route.tool)})
        return samples


def summarise(cfg: Config, samples: list[dict]) -> list[dict]:
    """Per system: τ and fire rates, a curve of risk against coverage, and one of abstention."""
    level, quantile = cfg.statistics.level, cfg.routing.gate_quantile
    groups = grouped(samples, "system", "set")
    rows: list[dict] = []
    for system in GATED:
        margins = [s["margin"] for s in groups[system, ADVERSARIAL]]
        tau = tau_of(margins, quantile)
        for which in (ADVERSARIAL, DEVELOPMENT):
            group = [s for s in groups[system, which] if s["answerable"]]
            fired = [s["margin"] <= tau for s in group]
            rows.append({
                "system": system, "set": which, "kind": "gate", "threshold": tau,
                "tau": stats.quantile(margins, quantile, cfg.seed, level),
                "fire_rate": stats.wilson(sum(fired), len(group), level),
                "risk_accepted": _wrong(group, [not f for f in fired], level),
                "risk_fired": _wrong(group, fired, level)})
        answerable = [s for s in groups[system, DEVELOPMENT] if s["answerable"]]
        for point in risk_coverage([s["margin"] for s in answerable], [s["right"] for s in answerable]):
            rows.append({"system": system, "set": DEVELOPMENT, "kind": "risk_coverage", "threshold": point.threshold,
                         "coverage": stats.wilson(point.n_covered, len(answerable), level),
                         "risk": stats.wilson(point.n_wrong, point.n_covered, level)})
        rows += _abstention(system, groups[system, TRAINING], groups[system, DEVELOPMENT], level)
    return rows


def abstention_threshold(samples: list[dict]) -> float:
    """The cosine below which a query is refused: it best separates answerable queries from others (Youden's J)."""
    cosines = np.array([s["best_cosine"] for s in samples])
    answerable = np.array([s["answerable"] for s in samples])
    thresholds = np.unique(cosines)
    kept = (cosines[answerable][None] >= thresholds[:, None]).mean(axis=1)
    refused = (cosines[~answerable][None] < thresholds[:, None]).mean(axis=1)
    return float(thresholds[np.argmax(kept + refused)])


def _abstention(system: str, training: list[dict], development: list[dict], level: float) -> list[dict]:
    chosen = abstention_threshold(training)
    answerable = [s for s in development if s["answerable"]]
    others = [s for s in development if not s["answerable"]]
    thresholds = sorted({chosen, *np.round(np.linspace(0.1, 0.7, 25), 4).tolist()})
    return [{"system": system, "set": DEVELOPMENT, "kind": "abstention", "threshold": threshold,
             "chosen": threshold == chosen,
             "refused_unanswerable": stats.wilson(sum(s["best_cosine"] < threshold for s in others), len(others), level),
             "refused_answerable": stats.wilson(sum(s["best_cosine"] < threshold for s in answerable),
                                                len(answerable), level)} for threshold in thresholds]


def _wrong(group: list[dict], taken: list[bool], level: float) -> stats.Estimate:
    some = [s for s, take in zip(group, taken, strict=True) if take]
    return stats.wilson(sum(not s["right"] for s in some), len(some), level)


def run(cfg: Config, out: Path) -> Path:
    """Path of the artifact."""
    bench = Bench(cfg, out)
    samples = measure_cells(cfg, bench.cells(), bench.measure, "calibration of the gate")
    rows = summarise(cfg, samples)
    metrics = {f"{row['system']}.{row['set']}": {"tau": row["threshold"], "fire_rate": row["fire_rate"].value}
               for row in rows if row["kind"] == "gate"}
    return write_results(NAME, cfg, out, tuple_=bench.tuple(), rows=rows, samples=samples, metrics=metrics,
                         isa=bench.isa)


if __name__ == "__main__":
    experiment_main(NAME, run)

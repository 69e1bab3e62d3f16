"""The gate's threshold from queries written to be confusable, and what it and other thresholds cost (spec M10).

τ of each gated system is a low quantile of its retriever's margins on the adversarial queries, over the whole registry.
The fire rate is reported on those and on the development queries, which τ has not seen. Two curves belong to it: risk
against coverage of the margin, and abstention by the cosine of the nearest tool ("no tool fits"), on the development
queries, with its threshold chosen on the training queries (which the tuned embedder was trained on, so that its
threshold is too strict).

The accuracy of every system, gate included, on development and adversarial queries is what the default was chosen by,
together with public queries (routing_generalisation.json); the evaluation queries take no part here. What INT8 codes
lose of the tools' embeddings stands beside it.
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
from nexus.route import GATED, SYSTEMS, TUNED
from nexus.routing_workload import RoutingCase
from nexus.slb import quantisation_error, quantise
from nexus.tool_document import document_text
from nexus.workload import WorkloadError

NAME = "calibration"
ADVERSARIAL, DEVELOPMENT, TRAINING = "adversarial", "development", "training"


class Bench(RoutingBench):
    """Asks the retriever of each gated system without its gate, and then every system as it is."""

    def cells(self) -> list[Cell]:
        inputs = self.inputs(NAME)
        return [Cell({**inputs, "system": system, "set": which}, weight=1, label=f"{system}, {which}")
                for system in GATED for which in (ADVERSARIAL, DEVELOPMENT, TRAINING)]

    def selection_cells(self, taus: dict[str, float]) -> list[Cell]:
        inputs = self.inputs(NAME, taus=taus)
        return [Cell({**inputs, "system": system, "set": which, "selection": True}, weight=1,
                     label=f"{system}, {which}, as it is")
                for system in SYSTEMS for which in (ADVERSARIAL, DEVELOPMENT)]

    def measure(self, cell: Cell) -> list[dict]:
        """One sample per query: margin, cosine of the nearest tool, and whether the first candidate is right."""
        system, which = cell.inputs["system"], cell.inputs["set"]
        selection = "selection" in cell.inputs
        tau = cell.inputs["taus"].get(system) if selection else None
        router = self.router(system if selection else system.removesuffix("+gate"), self.tools, tau)
        samples = []
        for case in self.known(which):
            route = router.route(case.query, 2)
            samples.append({"system": system, "set": which, "case": case.id,
                            "kind": "selection" if selection else "gate", "answerable": case.tool is not None,
                            "margin": route.margin or 0.0, "best_cosine": route.best_cosine,
                            "right": case.accepts(route.tool)})
        return samples

    def known(self, which: str) -> list[RoutingCase]:
        """The queries of a set whose tools are in the registry. Raises WorkloadError for none with a right tool."""
        path = getattr(self.cfg.workload.routing, which)
        cases = self.cases_of(path, known_only=True)
        if not any(case.tool for case in cases):
            raise WorkloadError(f"{path}: no query's tool is in registry {self.cfg.registry.name}; give queries for "
                                f"your tools with workload.routing.{which}=")
        return cases

    def quantisation_rows(self) -> list[dict]:
        """What the codes lose of the embeddings of all tools, relative to their length."""
        rows = []
        for system in ("slb", "slb-tuned"):
            embedder = self._embedders(TUNED in system)
            vectors = embedder.embed_documents([document_text(tool) for tool in self.tools])
            error = quantisation_error(vectors, *quantise(vectors))
            rows.append({"system": system, "set": "registry", "kind": "quantisation", "threshold": 0.0,
                         "relative_error": error.relative, "largest_error": error.largest})
        return rows


def summarise(cfg: Config, samples: list[dict]) -> list[dict]:
    """Per system: τ and fire rates, a curve of risk against coverage, and one of abstention."""
    level, quantile = cfg.statistics.level, cfg.routing.gate_quantile
    groups = grouped([s for s in samples if s["kind"] == "gate"], "system", "set")
    rows: list[dict] = []
    for system in GATED:
        margins = [s["margin"] for s in groups[system, ADVERSARIAL] if s["answerable"]]
        tau = taus_of(cfg, samples)[system]
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
    selected = grouped([s for s in samples if s["kind"] == "selection" and s["answerable"]], "system")
    for (system,), group in selected.items():
        rows.append({"system": system, "set": f"{ADVERSARIAL}+{DEVELOPMENT}", "kind": "selection", "threshold": 0.0,
                     "accuracy": stats.wilson(sum(s["right"] for s in group), len(group), level)})
    return rows


def taus_of(cfg: Config, samples: list[dict]) -> dict[str, float]:
    """τ by gated system, from the margins on the adversarial queries."""
    groups = grouped([s for s in samples if s["kind"] == "gate"], "system", "set")
    return {system: tau_of([s["margin"] for s in groups[system, ADVERSARIAL] if s["answerable"]],
                           cfg.routing.gate_quantile) for system in GATED}


def abstention_threshold(samples: list[dict]) -> float:
    """The cosine below which a query is refused: it best separates answerable queries from others (Youden's J)."""
    if len({s["answerable"] for s in samples}) < 2:
        raise WorkloadError("workload.routing.training: abstention needs queries with and without a right tool; "
                            "give some with \"tool\": null")
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
             "refused_unanswerable": stats.wilson(sum(s["best_cosine"] < threshold for s in others), len(others),
                                                  level),
             "refused_answerable": stats.wilson(sum(s["best_cosine"] < threshold for s in answerable),
                                                len(answerable), level)} for threshold in thresholds]


def _wrong(group: list[dict], taken: list[bool], level: float) -> stats.Estimate:
    some = [s for s, take in zip(group, taken, strict=True) if take]
    return stats.wilson(sum(not s["right"] for s in some), len(some), level)


def run(cfg: Config, out: Path) -> Path:
    """Path of the artifact."""
    bench = Bench(cfg, out)
    samples = measure_cells(cfg, bench.cells(), bench.measure, "calibration of the gate")
    cells = bench.selection_cells(taus_of(cfg, samples))
    samples += measure_cells(cfg, cells, bench.measure, "systems on other queries than the evaluation's")
    rows = summarise(cfg, samples) + bench.quantisation_rows()
    metrics = {f"{row['system']}.{row['set']}": {"tau": row["threshold"], "fire_rate": row["fire_rate"].value}
               for row in rows if row["kind"] == "gate"}
    metrics |= {f"selection.{row['system']}": {"accuracy": row["accuracy"].value}
                for row in rows if row["kind"] == "selection"}
    return write_results(NAME, cfg, out, tuple_=bench.tuple(), rows=rows, samples=samples, metrics=metrics,
                         isa=bench.isa, threads=cfg.routing.n_threads)


if __name__ == "__main__":
    experiment_main(NAME, run)

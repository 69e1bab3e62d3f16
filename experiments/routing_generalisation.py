"""Whether the router does as well on tools and queries that it was not trained on: public function-calling sets.

The strength of the embedder's tuning was chosen with a look at recall on parts of these sets (train_embedder.py);
nothing was trained on them. Recall is of the final order, behind the gate where there is one. One registry of all
functions, over a thousand of many domains; `hybrid`, plain rank fusion, is what every other system is compared with on
the same queries. τ and the cross-encoder come from the project's own queries and are not adapted.

Sets that end in "-selection" hold other queries of the same sources. The default system and its weight were chosen with
a look at these, together with the project's development and adversarial queries (calibration.json); none is in the
measured part.
"""
from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.routing_bench import RoutingBench
from experiments.rows import grouped
from nexus import stats
from nexus.cells import Cell
from nexus.config import ROOT, Config
from nexus.pipeline import experiment_main, measure_cells, write_results
from nexus.public_queries import public_queries
from nexus.routing_setup import thresholds_of

NAME = "routing_generalisation"
FOLDER = ROOT / ".nexus" / "public"
PLAIN = "hybrid"
TOP = 5
SELECTION = "-selection"


class Bench(RoutingBench):
    """Asks a seeded part of each set's queries of every system, over the registry of all sets."""

    def __init__(self, cfg: Config, out: Path):
        super().__init__(cfg, out)
        self.section = cfg.routing_generalisation
        public = public_queries(FOLDER)
        self.tools = public.tools
        self.sets = {name: self._some(cases, 0, self.section.n_queries) for name, cases in public.cases.items()}
        end = self.section.n_queries + self.section.n_selection
        self.sets |= {name + SELECTION: self._some(cases, self.section.n_queries, end)
                      for name, cases in public.cases.items() if len(cases) > self.section.n_queries}
        self.taus = {system: found.tau for system, found in thresholds_of(cfg, out).items() if found.tau is not None}

    def _some(self, cases: list, begin: int, end: int) -> list:
        chosen = np.random.default_rng(self.cfg.seed).permutation(len(cases))[begin:end]
        return [cases[i] for i in sorted(chosen)]

    def cells(self) -> list[Cell]:
        inputs = self.inputs(NAME, taus=self.taus)
        return [Cell({**inputs, "system": system, "set": name}, weight=len(cases), label=f"{system}, {name}")
                for name, cases in self.sets.items() for system in self.section.systems]

    def measure(self, cell: Cell) -> list[dict]:
        system, name = cell.inputs["system"], cell.inputs["set"]
        router, samples = self.router(system, self.tools, self.taus.get(system)), []
        for case in self.sets[name]:
            route = router.route(case.query, TOP)
            rank = next((i for i, c in enumerate(route.candidates, start=1) if case.accepts(c.tool)), None)
            samples.append({"set": name, "system": system, "case": case.id, "rank": rank,
                            "gate_fired": route.gate_fired, "choice_ms": route.total_ms})
        return samples


def summarise(cfg: Config, samples: list[dict], n_tools: int) -> list[dict]:
    """One row per set and system; differences from plain rank fusion are on the same queries."""
    seed, level = cfg.seed, cfg.statistics.level
    # In the order of the queries: pairs are made by place.
    groups = grouped(sorted(samples, key=lambda sample: sample["case"]), "set", "system")
    rows = []
    for name, system in grouped(samples, "set", "system"):
        group = groups[name, system]
        first = [s["rank"] == 1 for s in group]
        row = {"set": name, "system": system, "n_tools": n_tools,
               "choice_ms": stats.median([s["choice_ms"] for s in group], seed, level)}
        for k in (1, 3, 5):
            row[f"top{k}_recall"] = stats.wilson(sum(1 <= (s["rank"] or 0) <= k for s in group), len(group), level)
        row["fire_rate"] = (stats.wilson(sum(s["gate_fired"] for s in group), len(group), level)
                            if system.endswith("+gate") else None)
        row |= {f"top1_minus_{PLAIN}": None, f"mcnemar_p_{PLAIN}": None}
        if system != PLAIN and (name, PLAIN) in groups:
            plain = [s["rank"] == 1 for s in groups[name, PLAIN]]
            pairs = list(zip(first, plain, strict=True))
            row[f"top1_minus_{PLAIN}"] = stats.mean_difference_paired(first, plain, seed, level)
            row[f"mcnemar_p_{PLAIN}"] = stats.mcnemar(sum(a and not b for a, b in pairs),
                                                      sum(b and not a for a, b in pairs))
        rows.append(row)
    return rows


def run(cfg: Config, out: Path) -> Path:
    """Path of the artifact. Raises MissingArtifact without `calibration.json`, WeightsError without the sets."""
    bench = Bench(cfg, out)
    samples = measure_cells(cfg, bench.cells(), bench.measure, "routing of public sets")
    rows = summarise(cfg, samples, len(bench.tools))
    metrics = {f"{row['system']}.{row['set']}": {"top1_recall": row["top1_recall"].value,
                                                 "top3_recall": row["top3_recall"].value} for row in rows}
    return write_results(NAME, cfg, out, tuple_=bench.tuple(), rows=rows, samples=samples, metrics=metrics,
                         isa=bench.isa, threads=cfg.routing.n_threads)


if __name__ == "__main__":
    experiment_main(NAME, run)

"""How often the right tool is chosen from N tools, by routing and by models that read schemas (Figure 5, Table IV).

Every query is asked at every N, among its right tool and N − 1 others (`registry_around`), so that N adds distractors
and systems are compared on the same queries. Systems of `nexus.route` read no schema: their prompt has no tokens.
`slb-no-name` embeds descriptions alone. The baselines really run the model (`nexus.in_context`): `concat_all` reads
every schema, `rag_mcp` the first few of the dense retriever; both name a tool under the automaton. Where the schemas do
not fit the context the row says "overflow", with the tokens that were needed.
"""
from __future__ import annotations

from pathlib import Path

from experiments.routing_bench import RoutingBench
from experiments.rows import grouped
from nexus import stats
from nexus.cells import Cell
from nexus.config import Config
from nexus.in_context import Choice, InContextChooser
from nexus.listing import ordered
from nexus.model_tuple import context_options, open_model
from nexus.pipeline import experiment_main, measure_cells, write_results
from nexus.registry import Tool
from nexus.routing_setup import thresholds_of
from nexus.routing_workload import RoutingCase, registry_around
from nexus.runtime import Runtime

NAME = "routing_accuracy_n250"
CONCAT_ALL, RAG_MCP = "concat_all", "rag_mcp"
BASELINES = (CONCAT_ALL, RAG_MCP)
# What the default system is compared with on the same queries.
RIVALS = ("slb", RAG_MCP)
TOP = 5


class Bench(RoutingBench):
    """Asks every query of every system at every N."""

    def __init__(self, cfg: Config, out: Path):
        super().__init__(cfg, out)
        self.section = cfg.routing_accuracy_n250
        # A registry is built around the right tool, so that a query needs one.
        answerable = [case for case in self.cases_of(cfg.workload.routing.evaluation) if case.tool is not None]
        self.cases = answerable[:self.section.n_queries]
        self.order = ordered(self.tools, cfg.seed)
        self.sizes = sorted({min(n, len(self.tools)) for n in self.section.n_tools}
                            | ({len(self.tools)} if self.section.all_tools else set()))
        self.taus = {system: found.tau for system, found in thresholds_of(cfg, out).items() if found.tau is not None}
        self.model = open_model(cfg.model)
        self._chooser: InContextChooser | None = None
        self._choices: dict[tuple, Choice] = {}

    def cells(self) -> list[Cell]:
        """One cell per system and N; for the baselines one per query, those that share schemas side by side."""
        inputs = self.inputs(NAME, taus=self.taus)
        cells = [Cell({**inputs, "system": system, "n_tools": n}, weight=0.05 * len(self.cases),
                      label=f"{system}, {n} tools") for n in self.sizes for system in self.section.systems]
        for baseline in self.section.baselines:
            for n in self.sizes:
                for case in sorted(self.cases, key=lambda case: self._block(case, n)):
                    cells.append(Cell({**inputs, "system": baseline, "n_tools": n, "case": case.id}, weight=5,
                                      label=f"{baseline}, {n} tools, {case.id}"))
        return cells

    def measure(self, cell: Cell) -> list[dict]:
        """One sample per query."""
        system, n_tools = cell.inputs["system"], cell.inputs["n_tools"]
        if system not in BASELINES:
            return [self._routed(system, case, n_tools) for case in self.cases]
        case = next(case for case in self.cases if case.id == cell.inputs["case"])
        return [self._chosen(system, case, n_tools)]

    def close(self) -> None:
        if self._chooser is not None:
            self._chooser.runtime.close()

    def _routed(self, system: str, case: RoutingCase, n_tools: int) -> dict:
        router = self.router(system, self._registry(case, n_tools), self.taus.get(system))
        route = router.route(case.query, TOP)
        rank = next((i for i, tool in enumerate(route.retrieved, start=1) if case.accepts(tool)), None)
        return self._sample(system, case, n_tools, route.tool) | {
            "status": "ok", "rank": rank, "margin": route.margin, "gate_fired": route.gate_fired,
            "prompt_tokens": 0, "resident_tokens": 0, "scan_us": route.scan_us, "choice_ms": route.total_ms}

    def _chosen(self, system: str, case: RoutingCase, n_tools: int) -> dict:
        tools, rank = self._registry(case, n_tools), None
        if system == RAG_MCP:
            route = self.router("slb", tools).route(case.query, self.section.rag_k)
            tools = route.retrieved
            rank = next((i for i, tool in enumerate(tools, start=1) if case.accepts(tool)), None)
        # The same schemas in the same order give the same choice: a larger registry often changes nothing.
        key = case.id, tuple(tool.identity for tool in tools)
        if key not in self._choices:
            self._choices[key] = self._in_context().choose(tools, case.query)
        choice = self._choices[key]
        return self._sample(system, case, n_tools, choice.tool) | {
            "status": choice.status, "rank": rank, "margin": None, "gate_fired": None,
            "prompt_tokens": choice.prompt_tokens, "resident_tokens": choice.resident_tokens, "scan_us": None,
            "choice_ms": choice.ttft_ms}

    def _sample(self, system: str, case: RoutingCase, n_tools: int, tool: Tool | None) -> dict:
        return {"n_tools": n_tools, "system": system, "case": case.id, "wording": case.wording,
                "chosen": None if tool is None else f"{tool.server}/{tool.name}", "right": case.accepts(tool)}

    def _registry(self, case: RoutingCase, n_tools: int) -> list[Tool]:
        return registry_around(self.order, case.tool, n_tools)

    def _block(self, case: RoutingCase, n_tools: int) -> int:
        return self.order.index(self._registry(case, n_tools)[0])

    def _in_context(self) -> InContextChooser:
        if self._chooser is None:
            options = context_options(self.cfg.runtime, n_ctx=min(self.section.n_ctx, self.model.n_ctx_train))
            self._chooser = InContextChooser(Runtime(self.model, options), self.cfg.workload.system_prompt)
            # The first choice of a process also compiles what it calls.
            self._chooser.choose(self.order[:2], "warm up")
        return self._chooser


def summarise(cfg: Config, samples: list[dict]) -> list[dict]:
    """One row per N and system; the default system's rows also have what it differs by, on the same queries."""
    seed, level = cfg.seed, cfg.statistics.level
    groups = grouped(samples, "n_tools", "system")
    smallest = min(n for n, _ in groups)
    rows = []
    for (n_tools, system), group in groups.items():
        group = sorted(group, key=lambda sample: sample["case"])
        fits = all(sample["status"] == "ok" for sample in group)
        row = {"n_tools": n_tools, "system": system, "status": "ok" if fits else "overflow",
               "prompt_tokens": stats.median([s["prompt_tokens"] for s in group], seed, level)}
        row |= dict.fromkeys(("accuracy", "accuracy_own", "accuracy_paraphrase", "top1_recall", "top3_recall",
                              "fire_rate", "scan_us", "choice_ms"))
        rows.append(row)
        if not fits:
            continue
        row["accuracy"] = _share(group, "right", level)
        for wording in ("own", "paraphrase"):
            if some := [s for s in group if s["wording"] == wording]:
                row[f"accuracy_{wording}"] = _share(some, "right", level)
        row["choice_ms"] = stats.median([s["choice_ms"] for s in group], seed, level)
        if system != CONCAT_ALL:
            for k in (1, 3):
                row[f"top{k}_recall"] = stats.wilson(sum(1 <= (s["rank"] or 0) <= k for s in group), len(group), level)
        if scans := [s["scan_us"] for s in group if s["scan_us"] is not None]:
            row["scan_us"] = stats.median(scans, seed, level)
        if system.endswith("+gate"):
            row["fire_rate"] = _share(group, "gate_fired", level)
        if system == cfg.routing.system:
            row |= _against(group, {rival: groups.get((n_tools, rival)) for rival in RIVALS}, seed, level)
            row |= _against(group, {"fewest": groups[smallest, system]}, seed, level)
    return rows


def _share(samples: list[dict], key: str, level: float) -> stats.Estimate:
    return stats.wilson(sum(sample[key] for sample in samples), len(samples), level)


def _against(group: list[dict], rivals: dict[str, list[dict] | None], seed: int, level: float) -> dict:
    """Per rival the difference of accuracy (share) on the same queries, and McNemar's p of no difference."""
    told = {}
    for name, other in rivals.items():
        if other is None or any(sample["status"] != "ok" for sample in other):
            told |= {f"accuracy_minus_{name}": None, f"mcnemar_p_{name}": None}
            continue
        other = sorted(other, key=lambda sample: sample["case"])
        pairs = [(mine["right"], theirs["right"]) for mine, theirs in zip(group, other, strict=True)]
        told[f"accuracy_minus_{name}"] = stats.mean_difference_paired(*map(list, zip(*pairs)), seed, level)
        told[f"mcnemar_p_{name}"] = stats.mcnemar(sum(a and not b for a, b in pairs),
                                                  sum(b and not a for a, b in pairs))
    return told


def metrics(rows: list[dict]) -> dict:
    """The headline numbers by `<system>.<N>`."""
    names = ("accuracy", "top1_recall", "top3_recall", "prompt_tokens", "scan_us", "choice_ms", "fire_rate")
    return {f"{row['system']}.{row['n_tools']}": {name: row[name] and row[name].value for name in names}
            for row in rows}


def run(cfg: Config, out: Path) -> Path:
    """Path of the artifact. Raises MissingArtifact without `calibration.json`, and whatever loading raises."""
    bench = Bench(cfg, out)
    try:
        samples = measure_cells(cfg, bench.cells(), bench.measure, "routing accuracy")
    finally:
        bench.close()
    rows = summarise(cfg, samples)
    return write_results(NAME, cfg, out, tuple_=bench.tuple(), rows=rows, samples=samples,
                         metrics=metrics(rows), isa=bench.isa)


if __name__ == "__main__":
    experiment_main(NAME, run)

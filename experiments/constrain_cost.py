"""What a constraint costs per token, right after the model decoded: ours, and the same schemas under other engines.

For each development query the arguments of its tool are decoded under the tool's schema. At every token and for every
engine in turn, in shuffled order, the last token is decoded anew, so that each finds the caches as a decode leaves
them; then the engine is given the logits and the likeliest token (`argmax`, timed apart) and its choice is timed. All
follow the same tokens, ours; an engine whose grammar refuses one of them (another order of members, another length)
leaves the case, and `n_steps` says how many it took part in. `agrees` compares choices on the same logits, where no
budget decided: `nexus-full-mask` makes the mask at every step, and shows that trying the favourite first changes none.

Engines that make a mask are followed by our own search under it, the quickest here. xgrammar runs in a process of its
own, whose caches the decode has taken as well.
"""
from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from experiments.constraint_engines import (
    ARGMAX, CHECKED, LLAMA_CPP, LLGUIDANCE, OUR_MASK, OURS, XGRAMMAR, EngineError, EngineText, OurText, Text, XGrammar,
    XGrammarText, gbnf, llguidance_text, our_mask_text, timed)
from experiments.rows import grouped
from nexus import stats
from nexus.canonical import sha256_of
from nexus.cells import Cell
from nexus.config import ROOT, Config
from nexus.constrain import ConstrainError, Grammars
from nexus.in_context import call_instruction, call_opening
from nexus.listing import load_listing
from nexus.model_tuple import context_options, open_model, tuple_of
from nexus.pipeline import experiment_main, measure_cells, timed_cell_inputs, write_results
from nexus.prompt import block_tokens, query_tokens, system_tokens
from nexus.registry import Tool
from nexus.routing_workload import load_cases
from nexus.runtime import Runtime
from nexus.schema_grammar import Bounds
from nexus.splice import choose_isa

NAME = "constrain_cost"
SEQ = 0
# xgrammar takes about a second per schema: it compiles those of the cases only.
SLOW_COMPILERS = (XGRAMMAR,)


class Bench:
    """Model, registry, cases and engines of one run; `out` is the run's folder, which holds the collected listing."""

    def __init__(self, cfg: Config, out: Path):
        self.cfg, self.section = cfg, cfg.constrain_cost
        self.model = open_model(cfg.model)
        self.tools = load_listing(cfg.registry, out / "registry.json").tools
        self.by_identity = {tool.identity: tool for tool in self.tools}
        self.cases = {}
        for case in load_cases(ROOT / cfg.workload.routing.development, self.tools, known_only=True):
            if case.tool is not None and len(self.cases) < self.section.n_cases and \
                    case.tool not in [other.tool for other in self.cases.values()]:
                self.cases[case.id] = case
        bounds = Bounds(max_string_chars=cfg.arguments.max_string_chars, max_items=cfg.arguments.max_items)
        self.grammars = Grammars(self.model, bounds=bounds)
        self.runtime = Runtime(self.model, context_options(cfg.runtime))
        self.xgrammar: XGrammar | None = None
        self.xgrammar_python = xgrammar_python(cfg)
        self.impls = [OURS, OUR_MASK]
        for peer in self.section.peers:
            if peer == XGRAMMAR and self.xgrammar_python is None:
                continue
            self.impls += [peer, CHECKED] if peer == LLAMA_CPP else [peer]

    def cells(self) -> list[Cell]:
        """One cell per case, and one per engine for compiling."""
        inputs = {**timed_cell_inputs(NAME, self.cfg, self.model.sha256), "registry": sha256_of(
            [[tool.server, tool.name, tool.description, tool.input_schema] for tool in self.tools])}
        compiled = [impl for impl in self.impls if impl not in (OUR_MASK, CHECKED)]
        return [*(Cell({**inputs, "compile": impl}, weight=5, label=f"compile, {impl}") for impl in compiled),
                *(Cell({**inputs, "case": case, "impls": self.impls}, weight=20 * self.section.repetitions, label=f"decode, {case}")
                  for case in self.cases)]

    def measure(self, cell: Cell) -> list[dict]:
        if "compile" in cell.inputs:
            return self.compiled(cell.inputs["compile"])
        return [sample for repetition in range(self.section.repetitions)
                for sample in self.decoded(cell.inputs["case"], repetition)]

    def close(self) -> None:
        self.runtime.close()
        if self.xgrammar is not None:
            self.xgrammar.close()

    def compiled(self, impl: str) -> list[dict]:
        """One sample per schema: how long it took, by how much the process grew, what the engine said against it."""
        tools = self.tools
        if impl in SLOW_COMPILERS:
            tools = [self.by_identity[case.tool] for case in self.cases.values()]
        # The first compiles what is called, too.
        self._compile(impl, {"type": "object"})
        samples = []
        for tool in tools:
            before = resident_kib()
            start, problem = time.perf_counter_ns(), None
            try:
                compile_ms = self._compile(impl, tool.input_schema)
            except (EngineError, ConstrainError) as error:
                compile_ms, problem = (time.perf_counter_ns() - start) / 1e6, str(error)
            samples.append({"kind": "compile", "impl": impl, "tool": f"{tool.server}/{tool.name}",
                            "compile_ms": round(compile_ms, 4), "grown_kib": max(0, resident_kib() - before),
                            "problem": problem})
        return samples

    def _compile(self, impl: str, schema: dict) -> float:
        """Time to compile a schema anew, ms."""
        if impl == OURS:
            anew = self.grammars.emptied()
            return timed(lambda: anew.compile(schema))[1] / 1e3
        if impl == XGRAMMAR:
            return self._xgrammar().ask(schema=json.dumps(schema))["us"] / 1e3
        if impl == LLGUIDANCE:
            return timed(lambda: llguidance_text(self.grammars, schema))[1] / 1e3
        # Its module is loaded by the first call.
        gbnf({"type": "object"})
        return timed(lambda: EngineText(self.grammars, schema, False))[1] / 1e3

    def decoded(self, case_id: str, repetition: int) -> Iterator[dict]:
        """One sample per token and engine, and one for each search of the likeliest token."""
        case = self.cases[case_id]
        tool = self.by_identity[case.tool]
        texts = self._texts(tool)
        ours: OurText = texts[OURS]
        runtime, prompt = self.runtime, self._prompt(tool, case.query)
        rng = np.random.default_rng([self.cfg.seed, repetition, len(prompt)])
        keys = {"case": case_id, "repetition": repetition}
        runtime.seq_rm(SEQ)
        runtime.decode(prompt[:-1], 0, SEQ)
        token, pos, step = int(prompt[-1]), len(prompt) - 1, 0
        with without_collection():
            while not ours.walk.finished:
                n_rejected, n_steered, chosen, argmax_us = ours.walk.n_rejected, ours.walk.n_steered, {}, []
                for impl in rng.permutation(list(texts)).tolist():
                    runtime.seq_rm(SEQ, pos, -1)
                    logits = runtime.decode(np.array([token]), pos, SEQ, logits=True)
                    favourite, us = timed(lambda: int(logits.argmax()))
                    argmax_us.append(us)
                    chosen[impl] = texts[impl].choose(logits, favourite)
                token, steered = chosen[OURS][0], ours.walk.n_steered > n_steered
                for us in argmax_us:
                    yield {"kind": "argmax", "impl": ARGMAX, **keys, "step": step, "us": round(us, 3)}
                for impl, (found, us) in chosen.items():
                    accepted, accept_us = texts[impl].accept(token)
                    if not accepted:
                        del texts[impl]
                        continue
                    sample = {"kind": "step", "impl": impl, **keys, "step": step, "us": round(us + accept_us, 3),
                              "agrees": None if steered else found == token}
                    yield sample | ({"rejected": ours.walk.n_rejected > n_rejected} if impl == OURS else {})
                pos, step = pos + 1, step + 1
        runtime.seq_rm(SEQ)

    def _texts(self, tool: Tool) -> dict[str, Text]:
        """A text of each engine that takes the tool's schema."""
        schema, grammars, max_tokens = tool.input_schema, self.grammars, self.cfg.arguments.max_tokens
        makers: dict[str, Callable[[], Text]] = {
            OURS: partial(OurText, grammars, schema, max_tokens), OUR_MASK: partial(our_mask_text, grammars, schema),
            LLGUIDANCE: partial(llguidance_text, grammars, schema),
            LLAMA_CPP: partial(EngineText, grammars, schema, False),
            CHECKED: partial(EngineText, grammars, schema, True),
            XGRAMMAR: lambda: XGrammarText(self._xgrammar(), schema)}
        texts = {}
        for impl in self.impls:
            try:
                texts[impl] = makers[impl]()
            except EngineError:
                # Told by the sample of its compilation.
                continue
        return texts

    def _xgrammar(self) -> XGrammar:
        if self.xgrammar is None:
            self.xgrammar = XGrammar(str(self.xgrammar_python), self.grammars)
        return self.xgrammar

    def _prompt(self, tool: Tool, query: str) -> np.ndarray:
        """System prompt, the tool, the query and the call up to its arguments, int32[n]."""
        model = self.model
        system = f"{self.cfg.workload.system_prompt}\n\n{call_instruction(model)}"
        opening = f'{call_opening(model)}{tool.name}", "arguments": '
        return np.concatenate([system_tokens(model, system), block_tokens(model, tool), query_tokens(model, query),
                               model.tokenize(opening)])


def xgrammar_python(cfg: Config) -> Path | None:
    """The Python that has xgrammar; None where there is none."""
    path = cfg.constrain_cost.xgrammar_python
    return ROOT / path if path is not None and (ROOT / path).is_file() else None


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection within: it would be counted to whoever runs just then."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def resident_kib() -> int:
    """Memory of this process, KiB; 0 where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(status.partition("VmRSS:")[2].split()[0])


def summarise(cfg: Config, samples: list[dict]) -> list[dict]:
    """One row per engine: what a token costs, what a schema costs, and how often it chose as ours did."""
    seed, level = cfg.seed, cfg.statistics.level
    steps = grouped((s for s in samples if s["kind"] in ("step", "argmax")), "impl")
    compiled = grouped((s for s in samples if s["kind"] == "compile"), "impl")
    reference = [s["us"] for s in steps[(OURS,)]]
    rows = []
    for (impl,), group in sorted(steps.items()):
        us = [s["us"] for s in group]
        row = {"impl": impl, "status": "ok", "p50_us": stats.median(us, seed, level),
               "p99_us": stats.quantile(us, 0.99, seed, level),
               "per_nexus": stats.ratio_of_medians(us, reference, seed, level), "n_steps": len(us),
               "rejection_rate": None, "agrees": None}
        if impl == OURS:
            row["rejection_rate"] = stats.wilson(sum(s["rejected"] for s in group), len(group), level)
        elif impl != ARGMAX:
            compared = [s["agrees"] for s in group if s["agrees"] is not None]
            row["agrees"] = stats.wilson(sum(compared), len(compared), level)
        rows.append(row | _compile_columns(compiled.get((impl,), []), seed, level))
    known = {row["impl"] for row in rows}
    for peer in cfg.constrain_cost.peers:
        if peer not in known:
            missing = peer == XGRAMMAR and xgrammar_python(cfg) is None
            rows.append({"impl": peer, "status": "not installed" if missing else "no schema taken", **dict.fromkeys(
                ("p50_us", "p99_us", "per_nexus"), None), "n_steps": 0, "rejection_rate": None, "agrees": None,
                **_compile_columns(compiled.get((peer,), []), seed, level)})
    return rows


def _compile_columns(samples: list[dict], seed: int, level: float) -> dict:
    taken = [s for s in samples if s["problem"] is None]
    columns = dict.fromkeys(("compile_ms", "compile_ms_max", "compile_grown_kib_max", "n_compiled", "n_failed"))
    if samples:
        columns |= {"n_compiled": len(taken), "n_failed": len(samples) - len(taken)}
    if taken:
        columns |= {"compile_ms": stats.median([s["compile_ms"] for s in taken], seed, level),
                    "compile_ms_max": max(s["compile_ms"] for s in taken),
                    "compile_grown_kib_max": max(s["grown_kib"] for s in taken)}
    return columns


def run(cfg: Config, out: Path) -> Path:
    """Path of the written artifact, `<out>/constrain_cost.json`; cells measured earlier are not measured again."""
    bench = Bench(cfg, out)
    try:
        samples = measure_cells(cfg, bench.cells(), bench.measure, "constraints")
    finally:
        bench.close()
    rows = summarise(cfg, samples)
    return write_results(
        NAME, cfg, out, tuple_=tuple_of(bench.model, cfg.model), rows=rows, samples=samples, isa=choose_isa()[0],
        metrics={row["impl"]: {name: row[name].value for name in ("p50_us", "p99_us", "per_nexus") if row[name]}
                 for row in rows})


if __name__ == "__main__":
    experiment_main(NAME, run)

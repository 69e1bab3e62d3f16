"""How well an agent's turn calls tools: routing, arguments, and what the compressed signature saves (Table IV).

Cases are queries over the whole registry with the arguments that they specify (nexus/argument_cases.py says what
counts as right). Arms: `routed` is the agent's turn; `signature` and `full` are told the right tool and read its
signature or its whole schema; `window`, `no_window` and `full_history` are told the tool of a two-turn case and read
the pruned conversation, none of it, or all of it. One row per `metric`:

    routing_accuracy                 turns that chose the right tool, over all cases
    specified_argument_accuracy      specified arguments filled right, over those of the turns that chose the right tool
    end_to_end_argument_accuracy     the same over all cases; a turn with another tool has none right
    *_oracle_routing, *_full_schema  the same where the right tool is given, with the signature and with the schema
    json_valid_rate                  calls whose arguments are finished and valid under the tool's own schema
    placeholder_leak_rate            calls in which any argument, specified or not, is a placeholder
    unspecified_optional_rate        of the arguments that were written, optional ones that nothing specifies
    ir_tokens_*, schema_tokens_*     the model's tokens of signature and whole schema text, over every registry tool
    ir_token_saving                  1 - signature / schema, median over these tools
    ir_information_kept              specified arguments whose name, type and legal values the signature still tells
    first_argument_speedup           full-schema over signature, ratio of medians of the time from the query's text to
                                     the first token of the arguments. Only the signature's side routes, the other is
                                     told the tool. What all calls begin with (system prompt and instruction) is kept,
                                     and the tool's text and the query are prefilled anew, on both sides
    *_cold, *_tool_given             the same where nothing is kept, and where neither side routes
    main_context_token_saving        1 - signature / schema over the tokens that describe the tool in the main context,
                                     median over the cases' tools; `prompt_token_saving` counts all that is prefilled,
                                     with the system prompt, the instruction and the query that both have
    coreference_accuracy             arguments that only the conversation specifies filled right; tool given

The paper's numbers are of the same kinds: its routing and argument shares are counts over 30 cases and 50 specified
arguments, its first argument is timed against "an oracle that re-prefills the full schema every turn". It measured no
coreference. Grammars and signatures of tools are made before anything is timed, as they are when a registry is loaded.
"""
from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.routing_bench import RoutingBench
from experiments.rows import grouped
from nexus import stats
from nexus.agent import Agent
from nexus.argument_cases import ArgumentCase, load_argument_cases
from nexus.arguments import Filled
from nexus.cells import Cell
from nexus.config import ROOT, Arguments, Config
from nexus.constrain import Bounds, Grammars
from nexus.model_tuple import context_options, open_model
from nexus.pipeline import experiment_main, measure_cells, write_results
from nexus.registry import Tool
from nexus.route import Router
from nexus.routing_setup import thresholds_of
from nexus.runtime import Runtime
from nexus.sidecar import Schema, Sidecar
from nexus.signature import Signature, information_missing, signature_statistics
from nexus.stats import Estimate
from nexus.workload import WorkloadError

NAME = "sidecar_accuracy"
SEQ, HEAD_SEQ = 0, 1
ROUTED, SIGNATURE, FULL = "routed", "signature", "full"
WINDOW, NO_WINDOW, FULL_HISTORY = "window", "no_window", "full_history"
CASE_ARMS, COREFERENCE_ARMS = (ROUTED, SIGNATURE, FULL), (WINDOW, NO_WINDOW, FULL_HISTORY)
TOKENS, TIMED = "tokens", "timed"
# Whether what all prompts begin with is in the cache when a time begins.
KEPT, COLD = "kept", "cold"
# Expected seconds per cell on 2 cores with the default model: only their proportions matter.
WEIGHTS = {ROUTED: 2.5, SIGNATURE: 0.5, FULL: 5, WINDOW: 4, NO_WINDOW: 2.5, FULL_HISTORY: 5, TOKENS: 5, TIMED: 5}
# More of a conversation than there is.
ALL = 10**9

Samples = Sequence[Mapping[str, Any]]


class Remembering:
    """A sidecar that decodes a prompt once: decoding is greedy, so equal prompts of a tool have one answer."""

    def __init__(self, sidecar: Sidecar):
        self.sidecar, self.lock = sidecar, sidecar.lock
        self._filled: dict[tuple[Tool, bytes], Filled] = {}

    def signature(self, tool: Tool) -> Signature:
        return self.sidecar.signature(tool)

    def fill(self, tool: Tool, query: str, history: Sequence[Mapping[str, Any]] = (),
             schema: Schema = "signature") -> Filled:
        key = tool, self.sidecar.prompt(tool, query, history, schema).tobytes()
        if key not in self._filled:
            self._filled[key] = self.sidecar.fill(tool, query, history, schema)
        return self._filled[key]


class Bench(RoutingBench):
    """Asks every case in every arm, and times the two ways to describe a tool in turn."""

    def __init__(self, cfg: Config, out: Path):
        super().__init__(cfg, out)
        self.section = cfg.sidecar_accuracy
        self.by_identity = {tool.identity: tool for tool in self.tools}
        self.cases = self._first("cases", self.section.n_cases)
        self.coreference = self._first("coreference", self.section.n_coreference)
        self.threshold = thresholds_of(cfg, out).get(cfg.routing.system)
        model, options = open_model(cfg.model), cfg.arguments
        self.runtime = Runtime(model, context_options(cfg.runtime, n_ctx=min(self.section.n_ctx, model.n_ctx_train)))
        self.grammars = Grammars(model, bounds=Bounds(max_string_chars=options.max_string_chars,
                                                      max_items=options.max_items))
        self.sidecar, self.cold = self._sidecar(options, HEAD_SEQ), self._sidecar(options, None)
        self.filler = Remembering(self.sidecar)
        unpruned = options.model_copy(update={"window_tokens": ALL, "recent_turns": ALL, "surrogate_chars": ALL})
        self.unpruned = Remembering(self._sidecar(unpruned, HEAD_SEQ))
        self._warm = False

    def cells(self) -> list[Cell]:
        """One cell per case and arm, one per timed pair, and one for the registry's token counts."""
        threshold = self.threshold and vars(self.threshold)
        inputs = self.inputs(NAME, threshold=threshold)
        asked = [(case, arm) for case in self.cases for arm in CASE_ARMS]
        asked += [(case, arm) for case in self.coreference for arm in COREFERENCE_ARMS]
        cells = [Cell({**inputs, "arm": TOKENS}, WEIGHTS[TOKENS], f"tokens of {len(self.tools)} tools")]
        cells += [Cell({**inputs, "arm": arm, "case": case.id}, WEIGHTS[arm], f"{arm}, {case.id}")
                  for case, arm in asked]
        # Cold pairs prefill twice as much and are there to show what keeping takes away: once per case is enough.
        rounds = [(KEPT, repetition) for repetition in range(self.section.repetitions)] + [(COLD, 0)]
        return cells + [Cell({**inputs, "arm": TIMED, "head": head, "case": case.id, "repetition": repetition},
                             WEIGHTS[TIMED], f"timed pair, {head}, {case.id}")
                        for head, repetition in rounds for case in self.cases[:self.section.n_timed]]

    def measure(self, cell: Cell) -> list[dict]:
        """One sample per tool for the token counts, one per side of a timed pair, else one."""
        arm = cell.inputs["arm"]
        if arm == TOKENS:
            return self._token_counts()
        self._warm_up()
        cases = self.coreference if arm in COREFERENCE_ARMS else self.cases
        case = next(case for case in cases if case.id == cell.inputs["case"])
        if arm == TIMED:
            return self._timed(case, cell.inputs["head"], cell.inputs["repetition"])
        return [self._routed(case) if arm == ROUTED else self._told(case, arm)]

    def close(self) -> None:
        self.runtime.close()

    def _routed(self, case: ArgumentCase) -> dict:
        turn = Agent(self._router(), self.filler).turn(case.query)
        return self._sample(case, ROUTED, turn.tool, turn.filled) | {"route_ms": turn.route.total_ms}

    def _told(self, case: ArgumentCase, arm: str) -> dict:
        tool = self.by_identity[case.tool]
        filler = self.unpruned if arm == FULL_HISTORY else self.filler
        history = case.history if arm in (WINDOW, FULL_HISTORY) else ()
        filled = filler.fill(tool, case.query, history, "full" if arm == FULL else "signature")
        sample = self._sample(case, arm, tool, filled)
        if arm in COREFERENCE_ARMS:
            # Routing reads the query alone, whatever the window.
            route = self._router().route(case.query)
            return sample | {"from_history": list(case.from_history), "routed_right": case.accepts(route.tool)}
        signature = self.filler.signature(tool)
        untold = [name for name, accepted in case.arguments.items()
                  if information_missing(tool, signature, {name: accepted[0]})]
        return sample | {"untold": untold}

    def _sample(self, case: ArgumentCase, arm: str, tool: Tool | None, filled: Filled | None) -> dict:
        right = case.right(filled.arguments) if case.accepts(tool) else dict.fromkeys(case.arguments, False)
        sample = {"arm": arm, "case": case.id, "tool": _label(*case.tool),
                  "chosen": None if tool is None else _label(*tool.identity), "tool_right": case.accepts(tool),
                  "right": [name for name, is_right in right.items() if is_right],
                  "wrong": [name for name, is_right in right.items() if not is_right]}
        if filled is None:
            return sample | {"filled": False}
        return sample | {
            "filled": True, "arguments_text": filled.text, "valid": filled.valid, "problems": list(filled.problems),
            "placeholders": case.leaks(filled.arguments, tool), "n_arguments": len(filled.arguments),
            "unspecified_optional": case.unspecified(filled.arguments, tool) if case.accepts(tool) else None,
            "n_relaxed": len(filled.relaxed), "n_prompt_tokens": filled.n_prompt_tokens, "n_tokens": filled.n_tokens,
            "n_rejected": filled.n_rejected, "first_token_ms": filled.first_token_ms, "total_ms": filled.total_ms}

    def _timed(self, case: ArgumentCase, head: str, repetition: int) -> list[dict]:
        """The pair in alternating order, so that neither side is always the one that runs on a warm machine."""
        tool, router = self.by_identity[case.tool], self._router()
        sidecar = self.sidecar if head == KEPT else self.cold
        # Made once per tool, and not while a user waits.
        sidecar.signature(tool)
        sidecar.grammar(tool)
        sides = (SIGNATURE, FULL) if (self.cases.index(case) + repetition) % 2 == 0 else (FULL, SIGNATURE)
        samples = []
        for side in sides:
            route_ms = router.route(case.query).total_ms if side == SIGNATURE else 0.0
            n_decoded, first_token_ms = self._first_token(sidecar, case, tool, side)
            samples.append({"arm": TIMED, "head": head, "case": case.id, "repetition": repetition, "side": side,
                            "n_decoded": n_decoded, "route_ms": route_ms, "first_token_ms": first_token_ms})
        return samples

    def _first_token(self, sidecar: Sidecar, case: ArgumentCase, tool: Tool, side: Schema) -> tuple[int, float]:
        """Tokens decoded, and ms from the query's text to the first token of the arguments: `Sidecar.fill`, stopped
        there.
        """
        with sidecar.lock:
            start = time.perf_counter()
            prompt = sidecar.prompt(tool, case.query, (), side)
            try:
                rest, pos = sidecar.begin(prompt)
                logits = self.runtime.decode(rest, pos, SEQ, logits=True)
                sidecar.grammar(tool).start(self.cfg.arguments.max_tokens).choose(logits)
                first_token_ms = (time.perf_counter() - start) * 1e3
            finally:
                self.runtime.seq_rm(SEQ)
        return len(rest) if sidecar.head_seq is not None else len(prompt), first_token_ms

    def _token_counts(self) -> list[dict]:
        model = self.runtime.model
        counts = signature_statistics(self.tools, lambda text: len(model.tokenize(text)),
                                      self.cfg.arguments.signature_tokens,
                                      described_tokens=self.cfg.arguments.described_tokens)
        return [{"arm": TOKENS, "tool": _label(count["server"], count["name"]),
                 "n_signature_tokens": count["n_signature_tokens"], "n_schema_tokens": count["n_schema_tokens"],
                 "n_cut": len(count["cut"])} for count in counts]

    def _warm_up(self) -> None:
        """The first call of a process also compiles what it calls."""
        if not self._warm:
            self._router().route("warm up")
            self.sidecar.fill(self.by_identity[self.cases[0].tool], "warm up")
            self._warm = True

    def _router(self) -> Router:
        threshold = self.threshold
        return self.router(self.cfg.routing.system, self.tools, threshold and threshold.tau,
                           threshold and threshold.abstain_below)

    def _sidecar(self, options: Arguments, head_seq: int | None) -> Sidecar:
        return Sidecar(self.runtime, self.grammars, seq=SEQ, options=options, head_seq=head_seq,
                       system_prompt=self.cfg.workload.system_prompt)

    def _first(self, field: str, n: int) -> list[ArgumentCase]:
        path = ROOT / getattr(self.section, field)
        cases = load_argument_cases(path, self.tools)
        if n > len(cases):
            raise WorkloadError(f"{path}: sidecar_accuracy.n_{field} is {n} and there are {len(cases)}; lower it")
        if field == "coreference" and (plain := [case.id for case in cases if not case.from_history]):
            raise WorkloadError(f"{path}: case {plain[0]!r} has no \"from_history\"; name what the conversation tells")
        return cases[:n]


class Table:
    """Rows, one per metric, with the run's seed and level."""

    def __init__(self, seed: int, level: float):
        self.seed, self.level, self.rows = seed, level, []

    def add(self, metric: str, value: Estimate, **others: Any) -> None:
        self.rows.append({"metric": metric, "value": value, **others})

    def share(self, metric: str, flags: Sequence[bool]) -> None:
        self.add(metric, stats.wilson(sum(flags), len(flags), self.level))

    def median(self, metric: str, values: Sequence[float]) -> None:
        self.add(metric, stats.median(values, self.seed, self.level))

    def speedup(self, metric: str, slow_ms: Sequence[float], fast_ms: Sequence[float]) -> None:
        self.add(metric, stats.ratio_of_medians(slow_ms, fast_ms, self.seed, self.level, paired=True))

    def difference(self, metric: str, one: Sequence[bool], other: Sequence[bool]) -> None:
        pairs = list(zip(one, other, strict=True))
        self.add(metric, stats.mean_difference_paired(one, other, self.seed, self.level),
                 mcnemar_p=stats.mcnemar(sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)))


def summarise(cfg: Config, samples: Samples) -> list[dict]:
    """One row per metric; differences between arms also have McNemar's p of no difference."""
    table = Table(cfg.seed, cfg.statistics.level)
    arms = {arm: sorted(members, key=lambda s: (s.get("case", ""), s.get("repetition", 0)))
            for (arm,), members in grouped(samples, "arm").items()}
    _add_calls(table, arms[ROUTED], arms[SIGNATURE], arms[FULL])
    _add_tokens(table, arms[TOKENS], arms[SIGNATURE], arms[FULL])
    _add_times(table, arms[TIMED], arms[ROUTED])
    _add_coreference(table, {arm: arms[arm] for arm in COREFERENCE_ARMS})
    return table.rows


def _add_calls(table: Table, routed: Samples, signature: Samples, full: Samples) -> None:
    table.share("routing_accuracy", [s["tool_right"] for s in routed])
    table.share("specified_argument_accuracy", _specified(s for s in routed if s["tool_right"]))
    table.share("end_to_end_argument_accuracy", _specified(routed))
    table.share("specified_argument_accuracy_oracle_routing", _specified(signature))
    table.share("specified_argument_accuracy_full_schema", _specified(full))
    table.difference("specified_argument_signature_minus_full_schema", _specified(signature), _specified(full))
    for suffix, samples in (("", routed), ("_oracle_routing", signature), ("_full_schema", full)):
        calls = [s for s in samples if s["filled"]]
        table.share(f"json_valid_rate{suffix}", [s["valid"] for s in calls])
        table.share(f"placeholder_leak_rate{suffix}", [bool(s["placeholders"]) for s in calls])
        # Of another tool's arguments it is not known what the query says.
        known = [s for s in calls if s["tool_right"]]
        table.share(f"unspecified_optional_rate{suffix}", [
            i < len(s["unspecified_optional"]) for s in known for i in range(s["n_arguments"])])
    table.share("rejection_rate", [i < s["n_rejected"] for s in routed if s["filled"] for i in range(s["n_tokens"])])


def _add_tokens(table: Table, counts: Samples, signature: Samples, full: Samples) -> None:
    ir_tokens = [s["n_signature_tokens"] for s in counts]
    table.median("ir_tokens_median", ir_tokens)
    table.add("ir_tokens_p99", stats.quantile(ir_tokens, 0.99, table.seed, table.level))
    table.median("schema_tokens_median", [s["n_schema_tokens"] for s in counts])
    saved = {s["tool"]: 1 - s["n_signature_tokens"] / s["n_schema_tokens"] for s in counts}
    table.median("ir_token_saving", list(saved.values()))
    table.share("ir_information_kept", [name not in s["untold"] for s in signature for name in s["right"] + s["wrong"]])
    table.median("main_context_token_saving", [saved[s["tool"]] for s in signature])
    table.median("prompt_token_saving", [1 - short["n_prompt_tokens"] / whole["n_prompt_tokens"]
                                         for short, whole in zip(signature, full, strict=True)])
    table.median("prompt_tokens_signature", [s["n_prompt_tokens"] for s in signature])
    table.median("prompt_tokens_full_schema", [s["n_prompt_tokens"] for s in full])


def _add_times(table: Table, timed: Samples, routed: Samples) -> None:
    for head, suffix in ((KEPT, ""), (COLD, "_cold")):
        sides = {side: members for (side,), members in
                 grouped([s for s in timed if s["head"] == head], "side").items()}
        full_ms = [s["first_token_ms"] for s in sides[FULL]]
        prefill_ms = [s["first_token_ms"] for s in sides[SIGNATURE]]
        routed_ms = [s["route_ms"] + s["first_token_ms"] for s in sides[SIGNATURE]]
        table.speedup(f"first_argument_speedup{suffix}", full_ms, routed_ms)
        table.speedup(f"first_argument_speedup_tool_given{suffix}", full_ms, prefill_ms)
        table.median(f"first_argument_full_schema{suffix}_ms", full_ms)
        table.median(f"first_argument_signature{suffix}_ms", routed_ms)
        table.median(f"prefill{suffix}_ms", prefill_ms)
    table.median("route_ms", [s["route_ms"] for s in timed if s["side"] == SIGNATURE])
    filled = [s for s in routed if s["filled"]]
    table.median("arguments_ms", [s["total_ms"] - s["first_token_ms"] for s in filled])
    table.median("turn_ms", [s["route_ms"] + s["total_ms"] for s in filled])


def _add_coreference(table: Table, arms: Mapping[str, Samples]) -> None:
    for arm, suffix in ((WINDOW, ""), (NO_WINDOW, "_no_window"), (FULL_HISTORY, "_full_history")):
        table.share(f"coreference_accuracy{suffix}", _referred(arms[arm]))
        table.median(f"coreference_prompt_tokens{suffix}", [s["n_prompt_tokens"] for s in arms[arm]])
    for arm in (NO_WINDOW, FULL_HISTORY):
        table.difference(f"coreference_window_minus_{arm}", _referred(arms[WINDOW]), _referred(arms[arm]))
    window = arms[WINDOW]
    table.share("coreference_all_arguments_accuracy", _specified(window))
    table.share("coreference_json_valid_rate", [s["valid"] for s in window])
    table.share("coreference_placeholder_leak_rate", [bool(s["placeholders"]) for s in window])
    table.share("coreference_routing_accuracy", [s["routed_right"] for s in window])


def metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The value of every metric by name."""
    return {row["metric"]: row["value"].value for row in rows}


def _specified(samples: Iterable[Mapping[str, Any]]) -> list[bool]:
    """Whether each specified argument is right, sample by sample; the arguments of one by name."""
    return [name in s["right"] for s in samples for name in sorted(s["right"] + s["wrong"])]


def _referred(samples: Iterable[Mapping[str, Any]]) -> list[bool]:
    """The same of those arguments that only the conversation specifies."""
    return [name in s["right"] for s in samples for name in sorted(s["from_history"])]


def _label(server: str | None, name: str) -> str:
    return name if server is None else f"{server}/{name}"


def run(cfg: Config, out: Path) -> Path:
    """Path of the artifact. Raises MissingArtifact without `calibration.json`, and whatever loading raises."""
    bench = Bench(cfg, out)
    try:
        samples = measure_cells(cfg, bench.cells(), bench.measure, "sidecar accuracy")
    finally:
        bench.close()
    rows = summarise(cfg, samples)
    return write_results(NAME, cfg, out, tuple_=bench.tuple(), rows=rows, samples=samples, metrics=metrics(rows),
                         isa=bench.isa)


if __name__ == "__main__":
    experiment_main(NAME, run)

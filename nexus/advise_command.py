"""`nexus advise`: prefix caching, splicing or routing for so many tools behind so long a conversation."""
from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from nexus import artifact as stored_form
from nexus.advise import Advice, AdviceError, Cost, Option, Tokens, advise
from nexus.config import ROOT, Config
from nexus.measured_options import FIDELITY, KINDS, READERS, Measured, block_lengths
from nexus.provenance import cpu_model
from nexus.registry import Tool, load_registry
from nexus.stats import Estimate
from nexus.tables import MissingArtifact
from nexus.weights import ModelSpec, ensure, verified_file

if TYPE_CHECKING:
    from rich.table import Table

# Those that options are read from, and those that only costs are.
ARTIFACTS = (*READERS, "splice_cost", "l0_radix", "sidecar_accuracy")
MISSING = "–"
WIDTH = 120


def run(args: argparse.Namespace, cfg: Config) -> int:
    """0, after the advice is printed. Raises AdviceError, MissingArtifact, and what loading raises."""
    if args.registry is None and args.tools is None:
        raise AdviceError("give --registry FILE, or --tools N for tools as long as those that were measured")
    tools = _tools(args.registry) if args.registry is not None else []
    out = ROOT / cfg.results_folder / cfg.run_name
    found, left_out = measured(cfg.model, out)
    tokens = counted(cfg.model, tools, found)
    advice = advise(found, args.tools if args.tools is not None else len(tools), args.depth, tokens, cpu_model(),
                    args.reading)
    for reason in left_out:
        print(f"nexus: {reason}", file=sys.stderr)
    print(as_json(advice, cfg.run_name) if args.json else as_text(advice, cfg.run_name, args.all))
    return 0


def measured(spec: ModelSpec, out: Path) -> tuple[dict[str, Measured], list[str]]:
    """The artifacts in the folder `out` that this model's weights made, by experiment, and why others are left out.

    Raises MissingArtifact where none is left from which an option is read, and ArtifactError for a broken one.
    """
    # A user's own file is hashed; nothing is fetched.
    sha256 = spec.sha256 if spec.path is None else ensure(spec).sha256
    found, left_out = {}, []
    for experiment in ARTIFACTS:
        path = stored_form.path_of(experiment, out)
        if not path.is_file():
            left_out.append(f"not measured: {path} is missing")
            continue
        artifact = stored_form.read(path)
        if artifact["tuple"]["model_sha256"] != sha256:
            left_out.append(f"left out: {path} is of other weights than {spec.name}'s ({str(sha256)[:12]}…)")
            continue
        # Costs need no samples, and theirs are many.
        found[experiment] = Measured(artifact, stored_form.read_samples(path) if experiment in READERS else [])
    if not found.keys() & READERS.keys():
        told = "\n".join([f"nothing was measured for {spec.name}; measure it with:  make repro "
                          f"MODEL={spec.path or spec.name}", *left_out])
        raise MissingArtifact(told)
    return found, left_out


def counted(spec: ModelSpec, tools: list[Tool], found: Mapping[str, Measured]) -> Tokens:
    """Lengths of the tools' messages: counted where the weights are here, else those of the measured tools."""
    if tools and verified_file(spec) is not None:
        from nexus.model_tuple import open_model
        from nexus.prompt import block_tokens

        model = open_model(spec)
        return Tokens(tuple(len(block_tokens(model, tool)) for tool in tools),
                      f"{_tools_told(len(tools))} of the registry, counted by the model's tokenizer")
    lengths = block_lengths(found)
    if not lengths:
        raise AdviceError("no artifact tells how long a tool is; give --registry, with the model's weights on this "
                          "machine")
    reason = "the model's weights are not on this machine" if tools else "no registry was given"
    return Tokens(tuple(lengths), f"{_tools_told(len(lengths), 'measured ')}, since {reason}")


def as_json(advice: Advice, run_name: str) -> str:
    """The advice as JSON, with all options."""
    told = asdict(advice)
    told["tokens"] = {"total": advice.tokens.total(advice.n_tools), "per_tool_median": advice.tokens.middle,
                      "source": advice.tokens.source}
    return json.dumps({"run": run_name} | told, ensure_ascii=False, indent=1)


def as_text(advice: Advice, run_name: str, every: bool = False) -> str:
    """The advice, the table of options, what single steps cost, and the rule; `every` shows all options."""
    from rich.console import Console

    shown = advice.options if every else told_options(advice)
    # Where nobody's window bounds the lines, a table that does not fold its columns away is easier to read.
    console = Console(width=None if sys.stdout is not None and sys.stdout.isatty() else WIDTH)
    with console.capture() as captured:
        console.print(_table(shown, advice.advised))
        if advice.costs:
            console.print(_cost_table(advice.costs))
    total = advice.tokens.total(advice.n_tools)
    head = [f"{run_name}: {_tools_told(advice.n_tools)} ({total} tokens; {advice.tokens.source}), "
            f"a conversation of {advice.depth} tokens.",
            f"{'Advice' if advice.advised else 'No advice'}: {advice.because}."]
    hidden = len(advice.options) - len(shown)
    more = [f"{hidden} more options were measured; --all shows them"] if hidden else []
    notes = [*advice.remarks, *more, advice.rule]

    def folded(line: str, mark: str = "") -> str:
        return textwrap.fill(line, console.width, initial_indent=mark, subsequent_indent=" " * len(mark),
                             break_on_hyphens=False)

    return "\n".join([*map(folded, head), "", captured.get().rstrip(), "", *(folded(note, "* ") for note in notes)])


def told_options(advice: Advice) -> list[Option]:
    """Per kind and artifact the option that comes first: of equal accuracy where one is, and of those the fastest."""
    first: dict[tuple[str, str], Option] = {}
    for option in advice.options:
        first.setdefault((option.kind, option.experiment), option)
    return [option for option in advice.options if option in first.values()]


def _table(options: Sequence[Option], advised: Option | None) -> Table:
    from rich.table import Column, Table

    # Only a model that generates freely can make no call.
    free = any(option.no_call is not None for option in options)
    table = Table(Column("option", overflow="fold"), Column("TTFT, ms", justify="right", no_wrap=True),
                  Column("accuracy, %", justify="right", no_wrap=True), Column("n", no_wrap=True),
                  *([Column("no call, %", justify="right", no_wrap=True)] if free else []),
                  Column("equal?", overflow="fold"), Column("known", overflow="fold"), show_lines=True)
    for option in options:
        name = option.name if option.name.startswith(KINDS) else f"{option.kind}: {option.name}"
        accuracy = _cell(option.accuracy, 100)
        if option.measures == FIDELITY and option.accuracy is not None:
            # Of the next token, not of a tool: no number to compare with the others.
            accuracy = f"({accuracy})"
        known = f"{option.basis} {_points(option)}; {option.experiment}"
        table.add_row(*map(_text, (
            ("→ " if option is advised else "") + name, _cell(option.ttft_ms), accuracy,
            MISSING if option.accuracy is None else str(option.accuracy.n),
            *([_cell(option.no_call, 100)] if free else []), _equal(option),
            "; ".join([known, *option.remarks]))))
    return table


def _equal(option: Option) -> str:
    word = {True: "yes", False: "no", None: "?"}[option.verdict.equal]
    told = f"{word}: {option.verdict.why}"
    # Elsewhere than asked it decides nothing.
    return told if option.within else f"({told})"


def _cost_table(costs: tuple[Cost, ...]) -> Table:
    from rich.table import Column, Table

    table = Table(Column("for these tools", overflow="fold"), Column("value", justify="right"), "known", "artifact")
    for cost in costs:
        known = cost.at if cost.at == "as measured" else f"{cost.basis}: {cost.at}"
        table.add_row(*map(_text, (cost.what, f"{_cell(cost.value)} {cost.unit}", known, cost.experiment)))
    return table


def _points(option: Option) -> str:
    told = [f"{_tools_told(n_tools)}, " + ("any depth" if depth is None else f"depth {depth}")
            for n_tools, depth in option.at]
    return f"({' and '.join(told)})"


def _tools_told(n_tools: int, which: str = "") -> str:
    return f"{n_tools} {which}tool{'s' if n_tools != 1 else ''}"


def _cell(value: Estimate | None, scale: float = 1) -> str:
    if value is None or value.value is None:
        return MISSING
    interval = "" if value.ci_low is None else f" [{_number(scale * value.ci_low)}, {_number(scale * value.ci_high)}]"
    return _number(scale * value.value) + interval


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"


def _text(text: str):
    from rich.text import Text

    # A model's or system's name may hold what rich reads as markup.
    return Text(text)


def _tools(path: Path) -> list[Tool]:
    registry = load_registry(path)
    if registry.problems:
        print(f"nexus: left out {len(registry.problems)} entries of {path} that are no tools; `nexus route` names them",
              file=sys.stderr)
    if not registry.tools:
        raise AdviceError(f"--registry {path} holds no tool; give a JSON file of tools, such as a tools/list result")
    return registry.tools

"""`nexus call`: a query becomes a call of one tool, printed as JSON and, if wanted, run on the server that owns it."""
from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nexus.agent import Agent, Turn
from nexus.config import ROOT, Config
from nexus.constrain import Bounds, Grammars
from nexus.model_tuple import context_options, open_model
from nexus.registry import Tool, file_text, strict_json
from nexus.route_command import configured_router, configured_tools
from nexus.runtime import Runtime
from nexus.sidecar import Sidecar
from nexus.tool_call import CallRefused, run_call, server_of
from nexus.weights import ModelSpec
from nexus.window import checked

# The sequence of the sidecar; the command has no other.
SEQ = 0
HISTORY_FORM = 'give a JSON list of {"role", "content", "name"?}, or one such object per line'


class HistoryError(ValueError):
    """A history file cannot be used; the message names the file, the line, the field and the remedy."""


def run(args: argparse.Namespace, cfg: Config, model_spec: ModelSpec) -> int:
    """The exit status, after the call is printed, and run if asked: 1 without a tool, or where the tool says it failed.

    Everything but the model's weights is taken from `cfg`: routing does not depend on the model. Raises HistoryError,
    CallRefused, ServerError, and what loading raises.
    """
    turn = turn_of(args, cfg, model_spec)
    print(json.dumps(_as_json(turn), ensure_ascii=False, indent=1), flush=True)
    if turn.tool is None:
        return 1
    return _executed(turn, args.yes, cfg) if args.execute else 0


def turn_of(args: argparse.Namespace, cfg: Config, model_spec: ModelSpec) -> Turn:
    """The agent's turn for the command's query, on a context of its own that is closed again."""
    history = load_history(args.history) if args.history else []
    out = ROOT / cfg.results_folder / cfg.run_name
    tools = configured_tools(args.registry, cfg, out)
    tool = named_tool(args.tool, tools) if args.tool else None
    router = configured_router(cfg.routing.system, tools, cfg, out) if tool is None else None
    options = cfg.arguments
    with Runtime(open_model(model_spec), context_options(cfg.runtime)) as runtime:
        bounds = Bounds(max_string_chars=options.max_string_chars, max_items=options.max_items)
        sidecar = Sidecar(runtime, Grammars(runtime.model, bounds=bounds), seq=SEQ, options=options,
                          system_prompt=cfg.workload.system_prompt)
        return Agent(router, sidecar).turn(args.query, history, tool)


def load_history(path: Path | str) -> list[dict[str, Any]]:
    """The messages of a JSON list, or of a file with one JSON object per line. Raises HistoryError."""
    path = Path(path)
    text = file_text(path, HistoryError, HISTORY_FORM)
    if text.lstrip().startswith("["):
        numbered = list(enumerate(_json(text, f"{path}"), start=1))
        kind = "item"
    else:
        numbered = [(number, _json(line, f"{path}, line {number}"))
                    for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        kind = "line"
    try:
        return checked([item for _, item in numbered], lambda i: f"{path}, {kind} {numbered[i][0]}")
    except ValueError as error:
        raise HistoryError(str(error)) from None


def named_tool(name: str, tools: Sequence[Tool]) -> Tool:
    """The tool called SERVER/NAME, or NAME where only one server has it. Raises CallRefused with what comes near."""
    full = {f"{tool.server}/{tool.name}" if tool.server is not None else tool.name: tool for tool in tools}
    if name in full:
        return full[name]
    bare = [label for label, tool in full.items() if tool.name == name]
    if len(bare) == 1:
        return full[bare[0]]
    near = bare or difflib.get_close_matches(name, full, n=3)
    raise CallRefused(f"--tool {name}: {'several servers have it' if bare else 'no such tool'}; "
                      + (f"there is {', '.join(near)}" if near else "see `nexus route` for names"))


def _executed(turn: Turn, yes: bool, cfg: Config) -> int:
    server = server_of(turn.tool, cfg.registry.servers)
    if not turn.filled.valid:
        raise CallRefused(f"{turn.tool.name} was not run: its arguments do not match its schema "
                          f"({'; '.join(turn.filled.problems)}); say more in the query")
    result = run_call(server, turn.tool.name, turn.filled.arguments, (lambda question: True) if yes else _asked)
    print(_shown(result.text))
    return 1 if result.is_error else 0


def _asked(question: str) -> bool:
    """Whether a person at the terminal says yes; False where there is none."""
    if not sys.stdin.isatty():
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _shown(text: str) -> str:
    """The text; for a terminal without control characters, which are other people's."""
    if not sys.stdout.isatty():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _as_json(turn: Turn) -> dict[str, Any]:
    if turn.tool is None:
        return {"server": None, "tool": None, "reason": turn.reason}
    filled = turn.filled
    return turn.call | {
        "relaxed": [vars(each) for each in filled.relaxed], "signature": turn.signature.text,
        "n_prompt_tokens": filled.n_prompt_tokens, "n_tokens": filled.n_tokens,
        "route_ms": turn.route.total_ms if turn.route else None, "first_token_ms": filled.first_token_ms,
        "total_ms": filled.total_ms}


def _json(text: str, where: str) -> Any:
    try:
        return strict_json(text)
    except ValueError as error:
        raise HistoryError(f"{where}: not JSON: {error}; {HISTORY_FORM}") from None

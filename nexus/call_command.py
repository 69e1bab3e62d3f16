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
from nexus.route_command import check_query, configured_router, configured_tools
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
    print(_shown(json.dumps(_as_json(turn), ensure_ascii=False, indent=1)), flush=True)
    if turn.tool is None:
        return 1
    return _executed(turn, args.yes, cfg) if args.execute else 0


def turn_of(args: argparse.Namespace, cfg: Config, model_spec: ModelSpec) -> Turn:
    """The agent's turn for the command's query, on a context of its own that is closed again."""
    check_query(args.query)
    history = load_history(args.history) if args.history else []
    out = ROOT / cfg.results_folder / cfg.run_name
    tools = configured_tools(args.registry, cfg, out)
    tool = named_tool(args.tool, tools) if args.tool is not None else None
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

    def where(i: int) -> str:
        return f"{path}, {kind} {numbered[i][0]}"

    try:
        messages = checked([item for _, item in numbered], where)
    except ValueError as error:
        raise HistoryError(str(error)) from None
    for i, message in enumerate(messages):
        for field, value in message.items():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                # JSON can spell half of a surrogate pair; no tokenizer takes it.
                raise HistoryError(f"{where(i)}: {field} holds the lone surrogate {value[error.start]!r}; "
                                   "remove it") from None
    return messages


def named_tool(name: str, tools: Sequence[Tool]) -> Tool:
    """The tool called SERVER/NAME, or NAME where only one server has it. Raises CallRefused with what comes near."""
    if not name.strip():
        raise CallRefused("--tool is blank; give SERVER/NAME, or leave it out to look for a tool")
    labels = [f"{tool.server}/{tool.name}" if tool.server is not None else tool.name for tool in tools]
    named = [tool for label, tool in zip(labels, tools) if label == name]
    if len(named) > 1:
        # A name may hold a slash of its own.
        raise CallRefused(f"--tool {name}: {len(named)} tools of the registry are called so; rename one there")
    bare = [label for label, tool in zip(labels, tools) if tool.name == name]
    if named or len(bare) == 1:
        return named[0] if named else tools[labels.index(bare[0])]
    near = bare or difflib.get_close_matches(name, labels, n=3)
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
    if sys.stdin is None or not sys.stdin.isatty():
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _shown(text: str) -> str:
    """The text; for a terminal without control characters, which are other people's.

    Elsewhere only half a surrogate pair is replaced, by its escape, which JSON reads: no encoding takes it.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        return text.encode("utf-8", "backslashreplace").decode()
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

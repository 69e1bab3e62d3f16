"""The text of an experiment: tools, one user query per case, and the conversation that fills the context."""
from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nexus.registry import Registry, Tool, file_text, found, load_registry, strict_json

ROLES = ("user", "assistant")
CASE_KEYS = ("id", "tool", "query", "args")
CASE_FORM = 'one JSON object per line: {"id", "tool", "query"} and, if known, "args"'
CONVERSATION_FORM = 'a JSON list of {"role": "user" or "assistant", "content": text}'


class WorkloadError(ValueError):
    """A workload file or a selection cannot be used; the message names the place, what was found and the remedy."""


@dataclass(frozen=True)
class Case:
    """One query with the tool that answers it."""

    id: str
    tool: str
    """Name of the tool; only one tool of the registry bears it."""
    query: str
    args: dict[str, Any] | None = field(default=None, hash=False)
    """The arguments that the query specifies, where they are known."""


@dataclass(frozen=True)
class Workload:
    tools: list[Tool]
    cases: list[Case]
    conversation: list[dict[str, str]]
    """Turns {"role", "content"}, oldest first."""


def load_workload(tools_path: str | Path, queries_path: str | Path, conversation_path: str | Path) -> Workload:
    """Tools, cases and conversation, each in file order.

    Raises RegistryError for the tools file, WorkloadError for the others: lines that are not cases, tools that the
    registry does not have or has twice, repeated ids, files without content.
    """
    registry = load_registry(tools_path)
    cases = _cases(Path(queries_path), registry)
    return Workload(registry.tools, cases, load_conversation(conversation_path))


def select(cases: Sequence[Case], n: int) -> list[Case]:
    """The first `n` cases in file order. Raises WorkloadError when there are fewer, or when `n` is not positive."""
    if not 1 <= n <= len(cases):
        raise WorkloadError(f"{n} cases are asked for and the workload has {len(cases)}; "
                            f"ask for 1 to {len(cases)} or add queries")
    return list(cases[:n])


def load_conversation(path: str | Path) -> list[dict[str, str]]:
    """The turns {"role", "content"} of a conversation file, oldest first. Raises WorkloadError naming the turn."""
    path = Path(path)
    text = file_text(path, WorkloadError, f"give {CONVERSATION_FORM}")
    try:
        turns = strict_json(text)
    except ValueError as cause:
        raise WorkloadError(f"{path}: not JSON: {cause}; give {CONVERSATION_FORM}") from cause
    if not isinstance(turns, list) or not turns:
        raise WorkloadError(f"{path}: found {found(turns)}; give {CONVERSATION_FORM}")
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict) or set(turn) != {"role", "content"}:
            raise WorkloadError(f"{path}: turn {index} is {found(turn)}; give {CONVERSATION_FORM}")
        if turn["role"] not in ROLES:
            raise WorkloadError(f"{path}: turn {index} has the role {turn['role']!r}; use one of {', '.join(ROLES)}")
        if not _is_text(turn["content"]):
            raise WorkloadError(f"{path}: turn {index} has no text as its \"content\"; write some or remove the turn")
    return turns


def _cases(path: Path, registry: Registry) -> list[Case]:
    cases: list[Case] = []
    lines_of_ids: dict[str, int] = {}
    # Not str.splitlines: it would also split at U+2028, which JSON allows inside a string.
    for number, line in enumerate(file_text(path, WorkloadError, f"give {CASE_FORM}").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        case = _case(where, line)
        _check_tool(where, case.tool, registry)
        if case.id in lines_of_ids:
            raise WorkloadError(f"{where}: id {case.id!r} is already used in line {lines_of_ids[case.id]}; "
                                "give each case an id of its own")
        lines_of_ids[case.id] = number
        cases.append(case)
    return cases


def _case(where: str, line: str) -> Case:
    try:
        content = strict_json(line)
    except ValueError as cause:
        raise WorkloadError(f"{where}: not JSON: {cause}; give {CASE_FORM}") from cause
    if not isinstance(content, dict):
        raise WorkloadError(f"{where}: found {found(content)}; give {CASE_FORM}")
    for key in content:
        if key not in CASE_KEYS:
            raise WorkloadError(f"{where}: unknown key {key!r}{_did_you_mean(key, CASE_KEYS)}; give {CASE_FORM}")
    for key in ("id", "tool", "query"):
        if not _is_text(content.get(key)):
            finding = f"{key!r} is {found(content[key])}" if key in content else f"{key!r} is missing"
            raise WorkloadError(f"{where}: {finding}; it must be a string that is not blank")
    args = content.get("args")
    if args is not None and not isinstance(args, dict):
        raise WorkloadError(f"{where}: 'args' is {found(args)}; it must be an object or absent")
    return Case(content["id"], content["tool"], content["query"], args)


def _check_tool(where: str, name: str, registry: Registry) -> None:
    bearers = [tool for tool in registry.tools if tool.name == name]
    if len(bearers) == 1:
        return
    if bearers:
        servers = ", ".join(repr(tool.server) for tool in bearers)
        raise WorkloadError(f"{where}: tool {name!r} is ambiguous, the servers {servers} all have one; "
                            "keep one of them in the tools file of this workload")
    for problem in registry.problems:
        if problem.name == name:
            raise WorkloadError(f"{where}: tool {name!r} was left out of the registry: {problem.reason}")
    names = sorted({tool.name for tool in registry.tools})
    raise WorkloadError(f"{where}: unknown tool {name!r}{_did_you_mean(name, names)}; "
                        "name a tool of the tools file or add this one to it")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""

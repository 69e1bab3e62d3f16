"""Queries with the tool that answers them, and registries of every size around that tool."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nexus.registry import Tool, file_text, found, strict_json
from nexus.workload import WorkloadError

Identity = tuple[str | None, str]
FORM = ('one JSON object per line: {"query", "tool"} and, if known, "server", "id", "args", "wording", '
        '"also": [{"server", "tool"}], "confusable": {"server", "tool"}; "tool": null where no tool fits')
KEYS = ("id", "query", "server", "tool", "args", "wording", "also", "confusable")
WORDINGS = ("own", "paraphrase")


class UnknownTool(WorkloadError):
    """A case names a tool that the registry does not have."""


@dataclass(frozen=True)
class RoutingCase:
    """One query and what answers it."""

    id: str
    query: str
    tool: Identity | None
    """(server, name) of the right tool; None where no tool of the registry fits."""
    also: tuple[Identity, ...] = ()
    """Tools that are as right."""
    wording: str | None = None
    """"own" uses the tool's words, "paraphrase" avoids those of its name."""
    confusable: Identity | None = None
    """The near neighbour that an adversarial query is written against."""
    args: dict[str, Any] | None = field(default=None, hash=False)
    """The arguments that the query specifies, where they are known."""

    def accepts(self, tool: Tool | None) -> bool:
        """Whether choosing `tool` is right; None is right exactly where no tool fits."""
        if tool is None or self.tool is None:
            return tool is None and self.tool is None
        return tool.identity in (self.tool, *self.also)


def load_cases(path: str | Path, tools: Sequence[Tool], known_only: bool = False) -> list[RoutingCase]:
    """The cases of a JSON-lines file in file order; an absent id becomes "line-<number>".

    `known_only` passes over cases that name a tool which is not among `tools`. A tool without "server" must be the only
    one of its name. Raises WorkloadError naming the line for anything else than FORM, unknown and ambiguous tools,
    repeated ids and repeated queries.
    """
    path = Path(path)
    known = {tool.identity: tool for tool in tools}
    bearers: dict[str, list[Identity]] = {}
    for identity in known:
        bearers.setdefault(identity[1], []).append(identity)
    cases: list[RoutingCase] = []
    lines: dict[tuple[str, str], int] = {}
    # Not str.splitlines: it would also split at U+2028, which JSON allows inside a string.
    for number, line in enumerate(file_text(path, WorkloadError, f"give {FORM}").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            case = _case(where, number, line, known, bearers)
        except UnknownTool:
            if known_only:
                continue
            raise
        for kind, value in (("id", case.id), ("query", " ".join(case.query.lower().split()))):
            if (kind, value) in lines:
                raise WorkloadError(f"{where}: {kind} {value!r} is already used in line {lines[kind, value]}; "
                                    "change or remove one")
            lines[kind, value] = number
        cases.append(case)
    return cases


def registry_around(order: Sequence[Tool], identity: Identity, n: int) -> list[Tool]:
    """The `n` tools among which a query for `identity` is asked: the block of `n` of `order` that holds its tool.

    Every query can so be asked at every size, and queries share registries. Blocks of n are nested in those of a
    multiple of n. At the end of `order` the last n tools are taken, so that n is always met. Raises WorkloadError if
    `order` has fewer tools than n or not this one.
    """
    if not 1 <= n <= len(order):
        raise WorkloadError(f"a registry of {n} tools is asked for and there are {len(order)}; ask for 1 to "
                            f"{len(order)}")
    at = next((i for i, tool in enumerate(order) if tool.identity == identity), None)
    if at is None:
        raise WorkloadError(f"tool {identity[1]!r} of server {identity[0]!r} is not in the registry")
    begin = min(at // n * n, len(order) - n)
    return list(order[begin:begin + n])


def _case(where: str, number: int, line: str, known: dict[Identity, Tool],
          bearers: dict[str, list[Identity]]) -> RoutingCase:
    try:
        content = strict_json(line)
    except ValueError as cause:
        raise WorkloadError(f"{where}: not JSON: {cause}; give {FORM}") from cause
    if not isinstance(content, dict):
        raise WorkloadError(f"{where}: found {found(content)}; give {FORM}")
    if unknown := [key for key in content if key not in KEYS]:
        raise WorkloadError(f"{where}: unknown key {unknown[0]!r}; give {FORM}")
    if not isinstance(content.get("query"), str) or not content["query"].strip():
        raise WorkloadError(f"{where}: 'query' is {found(content.get('query'))}; it must be a string that is not blank")
    if "tool" not in content:
        raise WorkloadError(f"{where}: 'tool' is missing; name the right tool, or null where none fits")
    id_, args, wording = content.get("id", f"line-{number}"), content.get("args"), content.get("wording")
    if not isinstance(id_, str) or not id_.strip():
        raise WorkloadError(f"{where}: 'id' is {found(id_)}; it must be a string that is not blank")
    if args is not None and not isinstance(args, dict):
        raise WorkloadError(f"{where}: 'args' is {found(args)}; it must be an object or absent")
    if wording not in (None, *WORDINGS):
        raise WorkloadError(f"{where}: 'wording' is {wording!r}; use one of {', '.join(WORDINGS)}")
    also = content.get("also", [])
    if not isinstance(also, list):
        raise WorkloadError(f"{where}: 'also' is {found(also)}; it must be a list of {{\"server\", \"tool\"}}")
    confusable = content.get("confusable")

    def identity(entry: Any, key: str) -> Identity:
        if not isinstance(entry, dict) or not isinstance(entry.get("tool"), str):
            raise WorkloadError(f"{where}: {key!r} is {found(entry)}; it must be {{\"server\", \"tool\"}}")
        return _identity(where, entry.get("server"), entry["tool"], known, bearers)

    if content["tool"] is not None and not isinstance(content["tool"], str):
        raise WorkloadError(f"{where}: 'tool' is {found(content['tool'])}; it must be a string or null")
    return RoutingCase(
        id_, content["query"],
        None if content["tool"] is None else identity(content, "tool"),
        tuple(identity(entry, "also") for entry in also),
        wording,
        None if confusable is None else identity(confusable, "confusable"),
        args,
    )


def _identity(where: str, server: Any, name: str, known: dict[Identity, Tool],
              bearers: dict[str, list[Identity]]) -> Identity:
    if server is not None and not isinstance(server, str):
        raise WorkloadError(f"{where}: 'server' is {found(server)}; it must be a string or absent")
    if (server, name) in known:
        return server, name
    same = bearers.get(name, [])
    if server is None and len(same) == 1:
        return same[0]
    if server is None and same:
        raise WorkloadError(f"{where}: tool {name!r} is ambiguous, the servers {', '.join(repr(s) for s, _ in same)} "
                            "all have one; give its \"server\"")
    elsewhere = f"; server {same[0][0]!r} has one of this name" if same else ""
    of = f" of server {server!r}" if server is not None else ""
    raise UnknownTool(f"{where}: unknown tool {name!r}{of}{elsewhere}; name a tool of the registry")

"""The tool registry, collected from real MCP servers: what each of them lists.

Each server runs in an environment of its own, installed from a hash lock, and only ever lists its tools. A listing is
other people's text: it is an output of the pipeline and never committed.
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nexus.canonical import canonical_json, write_atomically
from nexus.listing import in_order
from nexus.locks import exclusive
from nexus.mcp_server import SERVERS, ServerError, end_marked, linked, quiet_sdk
from nexus.progress import Meter, progress
from nexus.registry import RegistryError, Tool, load_registry
from nexus.registry_spec import RegistrySpec, ServerSpec

AT_ONCE = 2


@dataclass(frozen=True)
class Failure:
    """A server, or one tool of it, that is not in the registry."""

    server: str
    tool: str | None
    """Null where the whole server failed."""
    reason: str
    remedy: str

    def __str__(self) -> str:
        what = self.server if self.tool is None else f"{self.server}, tool {self.tool!r}"
        return f"{what}: {self.reason}; {self.remedy}"


@dataclass(frozen=True)
class Collected:
    tools: list[Tool]
    """In the order of the servers in the configuration, then of names; keys of schemas in canonical order."""
    failures: list[Failure]
    """In the same order."""


Outcome = tuple[list[Tool], list[Failure]]


def collect(spec: RegistrySpec, folder: Path | str = SERVERS) -> Collected:
    """The tools that all servers of `spec` list, and what failed. One failure does not lose the others.

    folder   keeps environments (`<name>-<hash of lock>`), what servers wrote to standard error (`<name>.log`) and
             scratch files; a second collection finds its environments there
    No process of the collection is left when this returns or raises, also at Ctrl-C. Raises LockedError when another
    process is collecting into the folder, ValueError for a registry that is a file.
    """
    import anyio

    if spec.path is not None:
        raise ValueError(f"registry {spec.name}: {spec.path} is a file, there is nothing to collect; load it")
    folder = Path(folder).resolve()
    with exclusive(folder, "collect"), quiet_sdk():
        # A collection that was killed outright could not clean up; nobody else collects into this folder now.
        end_marked(str(folder))
        try:
            with progress("listing tools", total=len(spec.servers), unit="servers") as bar:
                outcomes = anyio.run(_collect_all, spec.servers, folder, bar)
        finally:
            end_marked(str(folder))
    return Collected([tool for tools, _ in outcomes for tool in tools],
                     [failure for _, failures in outcomes for failure in failures])


async def _collect_all(servers: Sequence[ServerSpec], folder: Path, bar: Meter) -> list[Outcome]:
    import anyio

    outcomes: list[Outcome] = [([], []) for _ in servers]
    limiter = anyio.CapacityLimiter(AT_ONCE)

    async def one(index: int, server: ServerSpec) -> None:
        async with limiter:
            bar.note(f"{server.name} ...")
            start = anyio.current_time()
            try:
                entries = await _entries(server, folder)
                outcomes[index] = _tools(server, entries, folder)
            except ServerError as error:
                outcomes[index] = [], [Failure(server.name, None, error.reason, error.remedy)]
            tools, failures = outcomes[index]
            bar.note(f"{server.name}: {len(tools)} tools in {anyio.current_time() - start:.1f} s")
            for failure in failures:
                bar.note(f"left out: {failure}")
            bar.advance(1)

    async with anyio.create_task_group() as group:
        for index, server in enumerate(servers):
            group.start_soon(one, index, server)
    return outcomes


def _tools(server: ServerSpec, entries: list[Any], folder: Path) -> Outcome:
    """The tools among a server's entries by name, and the entries that are none; read as a user's own file is read."""
    kept: dict[Any, Any] = {}
    failures: list[Failure] = []
    report = "report it to the server's maintainers"
    legible = []
    for index, entry in enumerate(entries):
        if isinstance(entry, dict):
            # Titles, annotations and output schemas are not what a model chooses by.
            entry = {"server": server.name} | {key: entry[key] for key in ("name", "description", "inputSchema")
                                               if key in entry}
        try:
            legible.append((canonical_json(entry, "entry"), entry))
        except (ValueError, RecursionError) as error:
            name = entry.get("name") if isinstance(entry, dict) else None
            label = name if isinstance(name, str) else f"entry {index}"
            failures.append(Failure(server.name, label, str(error), report))
    # Sorted by text, so that of two tools of one name the same one stays whatever order the server lists them in.
    for text, entry in sorted(legible, key=lambda pair: pair[0]):
        name = entry.get("name") if isinstance(entry, dict) else None
        key = name if isinstance(name, str) else (text,)
        if key in kept:
            failures.append(Failure(server.name, name, "listed more than once; one of them is kept", report))
        else:
            kept[key] = entry
    raw = folder / f"{server.name}.json"
    write_atomically(raw, json.dumps(list(kept.values()), ensure_ascii=True))
    try:
        registry = load_registry(raw)
    except RegistryError as error:
        raise ServerError(server.name, str(error).removeprefix(f"{raw}: "), report) from None
    failures += [Failure(server.name, problem.name or f"entry {problem.index}", problem.reason, report)
                 for problem in registry.problems]
    tools = [replace(tool, input_schema=in_order(tool.input_schema)) for tool in registry.tools]
    return sorted(tools, key=lambda tool: tool.name), sorted(failures, key=str)


async def _entries(server: ServerSpec, folder: Path) -> list[Any]:
    """What the server lists, all pages, as it sent it. Raises ServerError."""
    async with linked(server, folder, folder / f"{server.name}.log", str(folder), "listed its tools") as link:
        return await link.entries()

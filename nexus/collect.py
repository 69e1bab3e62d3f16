"""The tool registry, collected from real MCP servers: what each of them lists.

Each server runs in an environment of its own, installed from a hash lock, and only ever lists its tools. A listing is
other people's text: it is an output of the pipeline and never committed.
"""
from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from nexus.canonical import canonical_json, write_atomically
from nexus.listing import in_order
from nexus.locks import exclusive
from nexus.progress import Meter, progress
from nexus.registry import RegistryError, Tool, load_registry
from nexus.registry_spec import RegistrySpec, ServerSpec

ROOT = Path(__file__).resolve().parents[1]
SERVERS = ROOT / ".nexus" / "servers"
AT_ONCE = 2
INSTALL_SECONDS = 900.0
# Every process of a collection carries this variable: that is how one is found that has left its process group.
MARK = "NEXUS_COLLECTION"
# Set order, languages, time zones and update checks must not reach a listing.
STEADY = {"PYTHONHASHSEED": "0", "DO_NOT_TRACK": "1", "NO_COLOR": "1", "LC_ALL": "C.UTF-8", "TZ": "UTC"}


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


class _Broken(RuntimeError):
    """One server cannot be listed."""

    def __init__(self, reason: str, remedy: str):
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


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
    with exclusive(folder, "collect"), _quiet_sdk():
        # A collection that was killed outright could not clean up; nobody else collects into this folder now.
        _end_marked(folder)
        try:
            with progress("listing tools", total=len(spec.servers), unit="servers") as bar:
                outcomes = anyio.run(_collect_all, spec.servers, folder, bar)
        finally:
            _end_marked(folder)
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
            except _Broken as error:
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
        raise _Broken(str(error).removeprefix(f"{raw}: "), report) from None
    failures += [Failure(server.name, problem.name or f"entry {problem.index}", problem.reason, report)
                 for problem in registry.problems]
    tools = [replace(tool, input_schema=in_order(tool.input_schema)) for tool in registry.tools]
    return sorted(tools, key=lambda tool: tool.name), sorted(failures, key=str)


async def _entries(server: ServerSpec, folder: Path) -> list[Any]:
    """What the server lists, all pages, as it sent it. Raises _Broken."""
    import anyio
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED

    log = folder / f"{server.name}.log"
    log.write_bytes(b"")
    again = f"its messages are in {log}"
    heard: list[Exception] = []
    try:
        with anyio.fail_after(INSTALL_SECONDS):
            venv = None
            if server.requirements is not None:
                venv = await _environment(server, ROOT / server.requirements, folder)
        values = await _placeholders(server, venv, folder)
    except TimeoutError:
        raise _Broken(f"its environment was not installed within {INSTALL_SECONDS:.0f} s", "try again") from None
    try:
        with anyio.fail_after(server.timeout_seconds):
            async with _streams(server, values, venv, folder, log) as streams:
                return await _pages(streams, heard)
    except TimeoutError:
        raise _Broken(f"no complete listing within timeout_seconds ({server.timeout_seconds:g}){_said(log, heard)}",
                      f"raise timeout_seconds if it is only slow; {again}") from None
    except Exception as error:
        cause = _first(error)
        if isinstance(cause, _Broken):
            raise cause from None
        where = "command" if server.url is None else server.url
        reason = " ".join(str(cause).split()) or type(cause).__name__
        if isinstance(cause, MCPError) and cause.code == CONNECTION_CLOSED:
            reason = "it ended before it had listed its tools"
        raise _Broken(f"{where}: {reason}{_said(log, heard)}",
                      f"start it by hand; {again}" if server.url is None else "check that it runs and speaks "
                      "streamable HTTP at this address") from None


async def _pages(streams: tuple[Any, Any], heard: list[Exception]) -> list[Any]:
    """All entries of tools/list, untouched. What was no message on the stream goes to `heard`."""
    from mcp import ClientSession
    from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher

    async def hear(error: Exception) -> None:
        heard.append(error)

    # `ClientSession.list_tools` refuses the whole page for one tool that breaks the protocol, such as a schema of {}:
    # the handshake is the session's, the listing is read below it.
    dispatcher = JSONRPCDispatcher(*streams, on_stream_exception=hear)
    async with ClientSession(dispatcher=dispatcher) as session:
        await session.initialize()
        entries: list[Any] = []
        cursor, seen = None, set()
        while True:
            page = await dispatcher.send_raw_request("tools/list", None if cursor is None else {"cursor": cursor})
            if not isinstance(page.get("tools"), list):
                raise ValueError("its reply to tools/list holds no list of tools")
            entries += page["tools"]
            cursor = page.get("nextCursor")
            if cursor is None or cursor == "":
                return entries
            if not isinstance(cursor, str) or cursor in seen:
                raise ValueError(f"nextCursor {cursor!r} is no text or came before, so its listing never ends")
            seen.add(cursor)


@asynccontextmanager
async def _streams(
    server: ServerSpec, values: dict[str, str], venv: Path | None, folder: Path, log: Path
) -> AsyncIterator[tuple[Any, Any]]:
    """The message streams of a server that is running as long as the block does."""
    from mcp import StdioServerParameters
    from mcp.client.stdio import get_default_environment, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if server.url is not None:
        async with streamable_http_client(_filled(server.url, values)) as streams:
            yield streams
        return
    program, *arguments = (_filled(word, values) for word in server.command)
    environment = get_default_environment() | STEADY | {MARK: str(folder)}
    home = ROOT
    if venv is not None:
        # A user's own settings must not reach the listing of a locked server.
        home = folder / "home"
        home.mkdir(exist_ok=True)
        environment |= {"HOME": str(home), "VIRTUAL_ENV": str(venv),
                        "PATH": os.pathsep.join([str(venv / "bin"), environment.get("PATH", os.defpath)])}
    environment |= {key: _filled(value, values) for key, value in server.env.items()}
    found = shutil.which(program, path=environment.get("PATH")) if os.sep not in program else str(home / program)
    if found is None or not Path(found).is_file():
        raise _Broken(f"command: there is no program {program!r}",
                      "install it, or name a lock in requirements that holds it")
    parameters = StdioServerParameters(command=found, args=arguments, env=environment, cwd=home)
    with log.open("a", encoding="utf-8") as messages:
        async with stdio_client(parameters, errlog=messages) as streams:
            yield streams


async def _environment(server: ServerSpec, lock: Path, folder: Path) -> Path:
    """The server's environment, installed from its lock unless it is there already. Raises _Broken."""
    from uv import find_uv_bin

    try:
        digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    except OSError as error:
        raise _Broken(f"requirements: {lock}: {error.strerror}", "give the path of its hash lock, or null") from None
    venv = folder / f"{server.name}-{digest[:16]}"
    python, done = venv / "bin" / "python", venv / "installed"
    # Written last: without it an installation was interrupted, or was made for another Python.
    stamp = f"{digest} {sys.version_info.major}.{sys.version_info.minor}\n"
    if python.exists() and done.is_file() and done.read_text() == stamp:
        return venv
    shutil.rmtree(venv, ignore_errors=True)
    remedy = f"check the network and {lock.name}: every line needs its hashes and a wheel for this machine"
    uv = find_uv_bin()
    await _run([uv, "venv", "--quiet", "--python", sys.executable, str(venv)], folder, remedy)
    # Wheels only: what building a source needs is not in the lock.
    await _run([uv, "pip", "install", "--quiet", "--python", str(python), "--require-hashes", "--no-build",
                "--requirements", str(lock)], folder, remedy)
    write_atomically(done, stamp)
    return venv


async def _placeholders(server: ServerSpec, venv: Path | None, folder: Path) -> dict[str, str]:
    """What each placeholder of the server's texts stands for. Raises _Broken."""
    texts = [*(server.command or ()), *server.env.values(), server.url or ""]
    values = {} if venv is None else {"{venv}": str(venv)}
    for variable in re.findall(r"\{env:(\w+)\}", "\n".join(texts)):
        if variable not in os.environ:
            raise _Broken(f"the environment variable {variable} is not set", f"set {variable}")
        values[f"{{env:{variable}}}"] = os.environ[variable]
    if any("{repository}" in text for text in texts):
        repository = folder / "repositories" / server.name
        repository.mkdir(parents=True, exist_ok=True)
        git = shutil.which("git")
        if git is None:
            raise _Broken("{repository} needs git, which is not installed", "install git")
        await _run([git, "init", "--quiet", str(repository)], folder, "make `git init` work in this folder")
        values["{repository}"] = str(repository)
    return values


async def _run(command: list[str], folder: Path, remedy: str) -> None:
    import anyio

    finished = await anyio.run_process(command, check=False, env=os.environ | {MARK: str(folder)})
    if finished.returncode != 0:
        words = " ".join((finished.stderr or finished.stdout).decode(errors="replace").split())
        raise _Broken(f"{Path(command[0]).name} {command[1]} failed: {words[:600] or finished.returncode}", remedy)


def _filled(text: str, values: dict[str, str]) -> str:
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text


def _first(error: BaseException) -> BaseException:
    """The first cause within the groups that concurrent tasks raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _said(log: Path, heard: list[Exception]) -> str:
    """What the server said last, for the end of a reason."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    said = f" (it wrote: {lines[-1][:200]})" if lines else ""
    return said + (f" ({len(heard)} lines on its standard output were no messages)" if heard else "")


def _end_marked(folder: Path) -> None:
    """None, after no process of a collection into `folder` runs: the SDK ends a server, not what outlives it."""
    spared = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    for _ in range(5):  # a process may start another while it is being ended
        marked = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.pid not in spared and process.environ().get(MARK) == str(folder):
                    process.kill()
                    marked.append(process)
        if not marked:
            return
        psutil.wait_procs(marked, timeout=2)


@contextmanager
def _quiet_sdk() -> Iterator[None]:
    """The SDK logs a traceback for each line that is no message; servers print greetings, and `_said` counts them."""
    logger, silent = logging.getLogger("mcp"), logging.NullHandler()
    propagate = logger.propagate
    logger.addHandler(silent)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(silent)
        logger.propagate = propagate

"""One MCP server: installed from a lock, started or addressed, spoken to, and ended with all that it started.

Imports the SDK only inside its functions: every command that has a configuration would pay for it.
"""
from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from nexus.canonical import write_atomically
from nexus.registry_spec import ServerSpec

ROOT = Path(__file__).resolve().parents[1]
SERVERS = ROOT / ".nexus" / "servers"
INSTALL_SECONDS = 900.0
# Every process that a server starts carries this variable: that is how one is found that has left its process group.
MARK = "NEXUS_COLLECTION"
# Set order, languages, time zones and update checks must not reach a listing.
STEADY = {"PYTHONHASHSEED": "0", "DO_NOT_TRACK": "1", "NO_COLOR": "1", "LC_ALL": "C.UTF-8", "TZ": "UTC"}


class ServerError(RuntimeError):
    """One server cannot be installed, started or asked; the message names the server, the reason and the remedy."""

    def __init__(self, server: str, reason: str, remedy: str):
        super().__init__(f"{server}: {reason}; {remedy}")
        self.reason, self.remedy = reason, remedy


@dataclass
class Link:
    """A running server after the handshake."""

    dispatcher: Any
    """Sends raw requests: the SDK's session refuses a whole listing for one tool that breaks the protocol."""
    scope: Any
    """Its `deadline` (the event loop's seconds) ends everything that is done with the server."""
    task: str
    """What the server is to have done by then, for messages."""

    async def request(self, method: str, params: dict[str, Any] | None) -> dict[str, Any]:
        """The result of one request, as the server sent it. Raises what the SDK raises."""
        return await self.dispatcher.send_raw_request(method, params)

    async def entries(self) -> list[Any]:
        """All entries of tools/list, all pages, untouched. Raises ValueError for a reply that is no listing."""
        entries: list[Any] = []
        cursor, seen = None, set()
        while True:
            page = await self.request("tools/list", None if cursor is None else {"cursor": cursor})
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
async def linked(server: ServerSpec, folder: Path, log: Path, mark: str, task: str) -> AsyncIterator[Link]:
    """A server that runs as long as the block does, which has `timeout_seconds`, installation not counted.

    folder   keeps environments (`<name>-<hash of lock>`) and scratch files
    log      gets what the server writes to standard error
    mark     what its processes carry, for `end_marked`
    Whatever goes wrong, in the block too, is raised as ServerError.
    """
    import anyio
    from mcp import ClientSession, MCPError
    from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
    from mcp_types import CONNECTION_CLOSED

    log.write_bytes(b"")
    again = f"its messages are in {log}"
    heard: list[Exception] = []

    async def hear(error: Exception) -> None:
        heard.append(error)

    try:
        with anyio.fail_after(INSTALL_SECONDS):
            venv = None if server.requirements is None else await _environment(server, folder, mark)
        values = await _placeholders(server, venv, folder, mark)
    except TimeoutError:
        raise ServerError(server.name, f"its environment was not installed within {INSTALL_SECONDS:.0f} s",
                          "try again") from None
    link = Link(None, None, task)
    try:
        with anyio.fail_after(server.timeout_seconds) as link.scope:
            async with _streams(server, values, venv, folder, log, mark) as streams:
                link.dispatcher = JSONRPCDispatcher(*streams, on_stream_exception=hear)
                async with ClientSession(dispatcher=link.dispatcher) as session:
                    await session.initialize()
                    yield link
    except TimeoutError:
        raise ServerError(server.name, f"it has not {link.task} within timeout_seconds ({server.timeout_seconds:g})"
                          f"{_said(log, heard)}", f"raise timeout_seconds if it is only slow; {again}") from None
    except Exception as error:
        cause = _first(error)
        if isinstance(cause, ServerError):
            raise cause from None
        where = "command" if server.url is None else server.url
        reason = " ".join(str(cause).split()) or type(cause).__name__
        if isinstance(cause, MCPError) and cause.code == CONNECTION_CLOSED:
            reason = f"it ended before it had {link.task}"
        raise ServerError(server.name, f"{where}: {reason}{_said(log, heard)}",
                          f"start it by hand; {again}" if server.url is None else
                          "check that it runs and speaks streamable HTTP at this address") from None


def is_installed(server: ServerSpec, folder: Path) -> bool:
    """Whether the server needs no environment, or has one of its present lock. Raises ServerError without a lock."""
    if server.requirements is None:
        return True
    venv, stamp = _stamped(server, folder)
    # Written last: without it an installation was interrupted, or was made for another Python.
    done = venv / "installed"
    return (venv / "bin" / "python").exists() and done.is_file() and done.read_text() == stamp


def end_marked(mark: str) -> None:
    """None, after no process with this mark runs: the SDK ends a server, not what outlives it."""
    spared = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    for _ in range(5):  # a process may start another while it is being ended
        marked = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.pid not in spared and process.environ().get(MARK) == mark:
                    process.kill()
                    marked.append(process)
        if not marked:
            return
        psutil.wait_procs(marked, timeout=2)


@contextmanager
def quiet_sdk() -> Iterator[None]:
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


@asynccontextmanager
async def _streams(server: ServerSpec, values: dict[str, str], venv: Path | None, folder: Path, log: Path,
                   mark: str) -> AsyncIterator[tuple[Any, Any]]:
    """The message streams of a server that is running as long as the block does."""
    from mcp import StdioServerParameters
    from mcp.client.stdio import get_default_environment, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if server.url is not None:
        async with streamable_http_client(_filled(server.url, values)) as streams:
            yield streams
        return
    program, *arguments = (_filled(word, values) for word in server.command)
    environment = get_default_environment() | STEADY | {MARK: mark}
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
        raise ServerError(server.name, f"command: there is no program {program!r}",
                          "install it, or name a lock in requirements that holds it")
    parameters = StdioServerParameters(command=found, args=arguments, env=environment, cwd=home)
    with log.open("a", encoding="utf-8") as messages:
        async with stdio_client(parameters, errlog=messages) as streams:
            yield streams


def _stamped(server: ServerSpec, folder: Path) -> tuple[Path, str]:
    """Where the server's environment belongs, and what a complete one is stamped with. Raises ServerError."""
    lock = ROOT / server.requirements
    try:
        digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    except OSError as error:
        raise ServerError(server.name, f"requirements: {lock}: {error.strerror}",
                          "give the path of its hash lock, or null") from None
    return folder / f"{server.name}-{digest[:16]}", f"{digest} {sys.version_info.major}.{sys.version_info.minor}\n"


async def _environment(server: ServerSpec, folder: Path, mark: str) -> Path:
    """The server's environment, installed from its lock unless it is there already. Raises ServerError."""
    from uv import find_uv_bin

    venv, stamp = _stamped(server, folder)
    if is_installed(server, folder):
        return venv
    python, lock = venv / "bin" / "python", ROOT / server.requirements
    shutil.rmtree(venv, ignore_errors=True)
    remedy = f"check the network and {lock.name}: every line needs its hashes and a wheel for this machine"
    uv = find_uv_bin()
    await _run(server, [uv, "venv", "--quiet", "--python", sys.executable, str(venv)], mark, remedy)
    # Wheels only: what building a source needs is not in the lock.
    await _run(server, [uv, "pip", "install", "--quiet", "--python", str(python), "--require-hashes", "--no-build",
                        "--requirements", str(lock)], mark, remedy)
    write_atomically(venv / "installed", stamp)
    return venv


async def _placeholders(server: ServerSpec, venv: Path | None, folder: Path, mark: str) -> dict[str, str]:
    """What each placeholder of the server's texts stands for. Raises ServerError."""
    texts = [*(server.command or ()), *server.env.values(), server.url or ""]
    values = {} if venv is None else {"{venv}": str(venv)}
    for variable in re.findall(r"\{env:(\w+)\}", "\n".join(texts)):
        if variable not in os.environ:
            raise ServerError(server.name, f"the environment variable {variable} is not set", f"set {variable}")
        values[f"{{env:{variable}}}"] = os.environ[variable]
    if any("{repository}" in text for text in texts):
        repository = folder / "repositories" / server.name
        repository.mkdir(parents=True, exist_ok=True)
        git = shutil.which("git")
        if git is None:
            raise ServerError(server.name, "{repository} needs git, which is not installed", "install git")
        await _run(server, [git, "init", "--quiet", str(repository)], mark, "make `git init` work in this folder")
        values["{repository}"] = str(repository)
    return values


async def _run(server: ServerSpec, command: list[str], mark: str, remedy: str) -> None:
    import anyio

    finished = await anyio.run_process(command, check=False, env=os.environ | {MARK: mark})
    if finished.returncode != 0:
        words = " ".join((finished.stderr or finished.stdout).decode(errors="replace").split())
        raise ServerError(server.name, f"{Path(command[0]).name} {command[1]} failed: "
                          f"{words[:600] or finished.returncode}", remedy)


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

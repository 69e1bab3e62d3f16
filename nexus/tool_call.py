"""Runs one call on the MCP server that owns the tool. A tool that is not annotated read-only needs permission."""
from __future__ import annotations

import json
import math
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexus.locks import exclusive
from nexus.mcp_server import SERVERS, Link, ServerError, end_marked, is_installed, linked, quiet_sdk
from nexus.registry import Tool
from nexus.registry_spec import ServerSpec

# Of kinds of content that are no text, the key that says which kind.
SAID_BY = {"image": "mimeType", "audio": "mimeType", "resource_link": "uri"}


class CallRefused(RuntimeError):
    """The tool was not run; the message says why and the remedy."""


@dataclass(frozen=True)
class Result:
    """What a server answered to one call."""

    text: str
    """Its content as text; what is none, such as an image, is named in brackets."""
    is_error: bool
    """Whether the tool itself says that it failed."""
    read_only: bool
    """Whether the live listing annotates the tool as read-only."""


def server_of(tool: Tool, servers: Sequence[ServerSpec]) -> ServerSpec:
    """The configured server that owns the tool. Raises CallRefused where there is none."""
    for server in servers:
        if server.name == tool.server:
            return server
    known = ", ".join(server.name for server in servers) or "none"
    raise CallRefused(f"server {tool.server!r} of tool {tool.name!r} is not configured (there are: {known}); "
                      "add it to conf/registry/servers.yaml")


def run_call(server: ServerSpec, name: str, arguments: Mapping[str, Any], allow: Callable[[str], bool],
             folder: Path | str = SERVERS) -> Result:
    """What the server answers to one call of its tool `name`, the arguments passed as they are.

    The tool is looked up in the listing of the running server. Where that does not annotate it with readOnlyHint true,
    `allow(question)` decides; it may take its time. The server then has `timeout_seconds` once more. No process of the
    call is left when this returns or raises, also at Ctrl-C. Raises CallRefused where permission is not given, and
    ServerError.
    """
    import anyio

    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # Of this call alone: a collection into the same folder ends its own processes, and no other's.
    mark = f"{folder}#{os.getpid()}-{uuid.uuid4().hex[:8]}"
    held = nullcontext() if is_installed(server, folder) else exclusive(folder, "collect")
    with held, quiet_sdk():
        try:
            outcome = anyio.run(_called, server, name, dict(arguments), allow, folder, mark)
        finally:
            end_marked(mark)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


async def _called(server: ServerSpec, name: str, arguments: dict[str, Any], allow: Callable[[str], bool],
                  folder: Path, mark: str) -> Result | BaseException:
    """The result, or what the permission ended in: raised here, it would look like the server's fault."""
    import anyio

    async with linked(server, folder, folder / f"{server.name}.call.log", mark, "listed its tools") as link:
        entry = await _listed(link, server, name)
        annotations = entry.get("annotations")
        read_only = isinstance(annotations, dict) and annotations.get("readOnlyHint") is True
        if not read_only:
            # Who thinks it over is not the server.
            link.scope.deadline = math.inf
            try:
                with _own_interrupts():
                    allowed = allow(_question(server, name, arguments))
            except BaseException as error:
                return error
            if not allowed:
                return CallRefused(f"{server.name}/{name} was not run: it is not annotated read-only; "
                                   "say yes when asked, or give --yes")
        link.scope.deadline, link.task = anyio.current_time() + server.timeout_seconds, "answered the call"
        answer = await link.request("tools/call", {"name": name, "arguments": arguments})
        return Result(_text(answer), answer.get("isError") is True, read_only)


async def _listed(link: Link, server: ServerSpec, name: str) -> dict[str, Any]:
    entries = [entry for entry in await link.entries() if isinstance(entry, dict)]
    for entry in entries:
        if entry.get("name") == name:
            return entry
    raise ServerError(server.name, f"it lists no tool {name!r}, but {len(entries)} others",
                      "collect the registry again")


def _question(server: ServerSpec, name: str, arguments: dict[str, Any]) -> str:
    """Shows what would be run; as ASCII JSON, since neither a model's nor a server's text may move the cursor."""
    return (f"{server.name}/{json.dumps(name)[1:-1]} is not annotated read-only. "
            f"Run it with {json.dumps(arguments)}?")


@contextmanager
def _own_interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt at once: the event loop's handler would wait for the answer first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _text(answer: Mapping[str, Any]) -> str:
    """The content of a reply, one block below the other; structured content where there is no other."""
    content = answer.get("content")
    blocks = [_block(block) for block in content] if isinstance(content, list) else []
    if not blocks and answer.get("structuredContent") is not None:
        return json.dumps(answer["structuredContent"], ensure_ascii=False, indent=1)
    return "\n".join(blocks)


def _block(block: Any) -> str:
    if not isinstance(block, dict):
        return f"[{json.dumps(block)}]"
    kind, resource = block.get("type"), block.get("resource")
    text = resource.get("text") if kind == "resource" and isinstance(resource, dict) else block.get("text")
    if isinstance(text, str):
        return text
    said = block.get(SAID_BY.get(kind, "")) or (resource or {}).get("uri", "")
    return f"[{kind} {said}]".replace(" ]", "]")

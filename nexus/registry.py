"""A tool registry: what an MCP server lists, read from a JSON file, and the text of one tool for a prompt."""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMS = ('a tools/list result {"tools": [...]}, the JSON-RPC reply around it, '
         'or a list of {"server", "name", "description", "inputSchema"}')


class RegistryError(ValueError):
    """A registry file cannot be used; the message names the file, what was found and the remedy."""


class EntryError(ValueError):
    """One entry of a listing is not a tool; the message is the reason."""


@dataclass(frozen=True)
class Tool:
    """One tool as its server lists it. A tool is identified by (server, name): two servers may use one name."""

    server: str | None
    name: str
    description: str
    """Empty where the server gives none."""
    input_schema: dict[str, Any] = field(hash=False)
    """JSON schema of the arguments, untouched, keys in the server's order. Empty: any arguments."""

    @property
    def identity(self) -> tuple[str | None, str]:
        return self.server, self.name


@dataclass(frozen=True)
class Problem:
    """One entry that was left out of the registry."""

    index: int
    """Position in the listing, from 0."""
    name: str | None
    """The entry's name where it has one."""
    reason: str


@dataclass(frozen=True)
class Registry:
    tools: list[Tool]
    problems: list[Problem]


def load_registry(path: str | Path) -> Registry:
    """The tools of a listing in file order, and the entries that are not tools, each with the reason.

    Accepts a tools/list result, the JSON-RPC reply around one, or a list of entries that may each name their server.
    Raises RegistryError when the file as a whole is unusable, when no entry is a tool, and when two entries have the
    same (server, name), because then a query's right answer is not defined.
    """
    path = Path(path)
    entries = _entries(path, _parsed(path))
    tools: list[Tool] = []
    problems: list[Problem] = []
    first_seen: dict[tuple[str | None, str], int] = {}
    for index, entry in enumerate(entries):
        try:
            tool = _tool(entry)
        except EntryError as error:
            name = entry.get("name") if isinstance(entry, dict) else None
            problems.append(Problem(index, _printable(name) if isinstance(name, str) and name else None, str(error)))
            continue
        if tool.identity in first_seen:
            where = f" of server {tool.server!r}" if tool.server is not None else ""
            raise RegistryError(f"{path}: entries {first_seen[tool.identity]} and {index} are both tool {tool.name!r}"
                                f"{where}; remove one, or give each entry its \"server\"")
        first_seen[tool.identity] = index
        tools.append(tool)
    if not tools:
        reasons = "; ".join(f"entry {problem.index}: {problem.reason}" for problem in problems[:3])
        raise RegistryError(f"{path}: none of the {len(problems)} entries is a tool ({reasons}); "
                            f"mend the entries or list the server again")
    return Registry(tools, problems)


def tool_text(tool: Tool) -> str:
    """The canonical text of one tool for a prompt: compact JSON in the function-calling form, not ASCII-escaped.

    Keys come as name, description, parameters; the schema keeps its own order. Equal tools give equal text, and the
    server is not part of it: the model sees what the tool does, not where it lives.
    """
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False, separators=(",", ":"))


def file_text(path: Path, error: type[ValueError], remedy: str) -> str:
    """The whole text of a UTF-8 file, a byte-order mark removed. Raises `error` with path, finding and remedy."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as cause:
        raise error(f"{path}: byte {cause.start} is not UTF-8; {remedy}") from cause
    except OSError as cause:
        raise error(f"{path}: {cause.strerror or cause}; {remedy}") from cause
    if not text.strip():
        raise error(f"{path}: the file is empty; {remedy}")
    return text


def strict_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError also for NaN and infinities, and for nesting beyond the stack."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as cause:
        raise ValueError("nested too deeply") from cause


def found(value: Any) -> str:
    """What a JSON value is, in words, for an error message."""
    match value:
        case dict():
            return f"an object with the keys {', '.join(map(repr, list(value)[:6]))}" if value else "an empty object"
        case list():
            return f"a list of {len(value)}"
        case None:
            return "null"
        case bool():
            return "a boolean"
        case str():
            return "a string"
    return "a number"


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _parsed(path: Path) -> Any:
    text = file_text(path, RegistryError, f"give {FORMS}")
    try:
        return strict_json(text)
    except ValueError as cause:
        raise RegistryError(f"{path}: not JSON: {cause}; give {FORMS}") from cause


def _entries(path: Path, content: Any) -> list[Any]:
    listing = content
    if isinstance(listing, dict) and "tools" not in listing:
        listing = listing.get("result")
    if isinstance(listing, dict):
        listing = listing.get("tools")
    if not isinstance(listing, list):
        raise RegistryError(f"{path}: found {found(content)}, which holds no list of tools; give {FORMS}")
    if not listing:
        raise RegistryError(f"{path}: the list of tools is empty; give at least one tool")
    return listing


def _tool(entry: Any) -> Tool:
    if not isinstance(entry, dict):
        raise EntryError(f"the entry is {found(entry)}; it must be an object")
    name = entry.get("name")
    if not isinstance(name, str) or not name.strip():
        raise EntryError(f"\"name\" is {found(name) if name != '' else 'empty'}; it must be a string that is not blank"
                         if "name" in entry else "\"name\" is missing; give the tool a name")
    server, description = entry.get("server"), entry.get("description")
    for key, value in (("server", server), ("description", description)):
        if value is not None and not isinstance(value, str):
            raise EntryError(f"\"{key}\" is {found(value)}; it must be a string or absent")
    if "inputSchema" not in entry:
        raise EntryError("\"inputSchema\" is missing; write {} for a tool with free arguments")
    schema = entry["inputSchema"]
    if not isinstance(schema, dict):
        raise EntryError(f"\"inputSchema\" is {found(schema)}; it must be an object")
    tool = Tool(server, name, description or "", schema)
    try:
        (tool_text(tool) + (server or "")).encode()
    except UnicodeEncodeError as cause:
        # JSON can spell half of a surrogate pair; no tokenizer takes it.
        raise EntryError(f"the text holds the lone surrogate {cause.object[cause.start]!r}; remove it") from cause
    return tool

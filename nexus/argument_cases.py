"""Queries with the arguments that they specify, and whether a filled call is right.

A case lists every argument that its query, or the conversation before it, specifies: what a person would fill in, with
alternatives where people would differ. An argument is right when it equals one of them. Strings are equal after their
outer white space is cut, letter case included unless the case says `any_case`; numbers by value, so that 7 is 7.0 but
neither "7" nor true; lists item by item, in any order where the case says `as_set`. Nothing else is forgiven.
"""
from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from nexus.registry import Tool, file_text, found, strict_json
from nexus.routing_workload import Identity
from nexus.workload import WorkloadError

FORM = ('one JSON object per line: {"server", "tool", "query", "arguments": {name: value or [alternatives]}} and, if '
        'needed, "id", "also": [{"server", "tool"}], "any_case": [names], "as_set": [names], '
        '"history": [{"role", "content", "name"}], "from_history": [names]; a list as a value is an alternative')
KEYS = ("id", "server", "tool", "also", "query", "arguments", "any_case", "as_set", "history", "from_history")
ROLES = ("user", "assistant", "tool")

# What stands where a value should: names of types, of nothing, of examples, and work that was left over.
PLACEHOLDERS = frozenset((
    "string", "str", "text", "integer", "int", "number", "float", "boolean", "bool", "array", "object", "value",
    "null", "none", "nil", "undefined", "unknown", "n/a", "na", "not specified", "not provided", "unspecified",
    "example", "sample", "placeholder", "dummy", "default", "foo", "bar", "baz", "foobar", "xxx", "xxxx", "abc",
    "abc123", "todo", "tbd", "fixme", "...", "…", "?", "john doe", "jane doe", "johndoe", "owner/repo",
    "org/repo", "user/repo",
))
# <owner>, {owner}, {{owner}}, ${owner}, [owner], %owner%, __owner__: a slot that nobody filled, and nothing around it.
SLOT = re.compile(r"<[\w .:-]+>|\$?\{{1,2}[\w .-]+\}{1,2}|\[[a-z][a-z _-]*\]|%\w+%|__\w+__")
# your-repo, your page title, insert your token; example-branch, sample_repo, example issue, some text
THINGS = ("name|title|text|description|value|content|issue|repo|repository|owner|user|username|branch|file|page|comment"
          "|message|body|project|id|key|url|path|query|label|tag")
YOURS = re.compile(r"(?:(?:insert|enter|put|add)[-_ ])?your[-_ ]\S+(?:[-_ ]\S+){0,3}"
                   r"|(?:example|sample|dummy|placeholder)[-_]\S+"
                   rf"|(?:example|sample|dummy|placeholder|some) (?:{THINGS})s?(?: here)?")
WITHIN = ("lorem ipsum", "example.com", "example.org", "example.net", "/path/to/")
# What is written around a parameter's name when it stands for its value: the owner, owner name, owner here.
BEFORE = frozenset(("the", "a", "an", "my", "your", "some", "example", "sample"))
AFTER = frozenset(("name", "id", "key", "value", "here"))


@dataclass(frozen=True)
class ArgumentCase:
    """One query, the tool that answers it, and the arguments that are specified."""

    id: str
    query: str
    tool: Identity
    """(server, name) of the right tool."""
    arguments: Mapping[str, tuple[Any, ...]] = field(hash=False)
    """Accepted values by the argument's name."""
    also: tuple[Identity, ...] = ()
    """Tools that are as right and take the same arguments."""
    any_case: frozenset[str] = frozenset()
    """Arguments in which upper and lower case are the same."""
    as_set: frozenset[str] = frozenset()
    """Arguments in which the order of a list does not matter."""
    history: tuple[Mapping[str, str], ...] = field(default=(), hash=False)
    """Turns {"role", "content"} before the query, oldest first; those of tools have a "name"."""
    from_history: tuple[str, ...] = ()
    """Arguments that only the history specifies."""

    def accepts(self, tool: Tool | None) -> bool:
        """Whether choosing `tool` is right."""
        return tool is not None and tool.identity in (self.tool, *self.also)

    def right(self, arguments: Mapping[str, Any]) -> dict[str, bool]:
        """By name of each specified argument, whether the filled `arguments` have an accepted value for it."""
        return {name: name in arguments and self._accepted(name, arguments[name]) for name in self.arguments}

    def unspecified(self, arguments: Mapping[str, Any], tool: Tool) -> list[str]:
        """Names of optional arguments of `tool` that were filled though nothing specifies them.

        One that was set to null, or to what the schema gives as its default, changes nothing and is not counted.
        """
        required, properties = tool.input_schema.get("required", []), _properties(tool)
        extra = [name for name in arguments if name not in self.arguments and name not in required]
        # null where the schema has no default: null is never counted.
        unset = {name: (None, _schema(properties.get(name)).get("default")) for name in extra}
        return [name for name in extra if not any(same(arguments[name], value) for value in unset[name])]

    def leaks(self, arguments: Mapping[str, Any], tool: Tool) -> list[str]:
        """Names of arguments of `tool`, specified or not, that hold a placeholder somewhere (`is_placeholder`).

        An accepted value is none, and neither is one that the schema itself lists or gives as the default.
        """
        properties = _properties(tool)
        return [name for name, value in arguments.items()
                if not (name in self.arguments and self._accepted(name, value))
                and any(is_placeholder(text, key) for text, key in _texts(value, name, properties.get(name)))]

    def _accepted(self, name: str, value: Any) -> bool:
        return any(same(value, accepted, any_case=name in self.any_case, as_set=name in self.as_set)
                   for accepted in self.arguments[name])


def same(value: Any, other: Any, *, any_case: bool = False, as_set: bool = False) -> bool:
    """Whether two JSON values count as one (the module's text says when)."""
    match value, other:
        case bool(), bool():
            return value is other
        case (bool(), _) | (_, bool()):
            return False
        case (int() | float()), (int() | float()):
            return value == other
        case str(), str():
            one, two = value.strip(), other.strip()
            return one.casefold() == two.casefold() if any_case else one == two
        case list(), list():
            if as_set:
                return all(any(same(a, b, any_case=any_case) for b in theirs)
                           for mine, theirs in ((value, other), (other, value)) for a in mine)
            return len(value) == len(other) and all(same(a, b, any_case=any_case) for a, b in zip(value, other))
        case dict(), dict():
            return value.keys() == other.keys() and all(same(value[k], other[k], any_case=any_case) for k in value)
    return value is None and other is None


def is_placeholder(text: str, name: str) -> bool:
    """Whether `text` only stands for a value of the parameter `name`.

    It does if, in lower case and without outer quotes and white space, it is one of PLACEHOLDERS; is an unfilled slot
    such as <owner>; is the parameter's own name, also with words of BEFORE and AFTER around it; is of the form
    your-repo, example-repo or example issue; or has one of WITHIN in it. An empty string is no placeholder.
    """
    plain = text.strip().strip("'\"`").strip().casefold()
    if not plain:
        return False
    return (plain in PLACEHOLDERS or bool(SLOT.fullmatch(plain) or YOURS.fullmatch(plain))
            or any(part in plain for part in WITHIN) or bool(_stems(text) & _stems(name)))


def load_argument_cases(path: str | Path, tools: Sequence[Tool]) -> list[ArgumentCase]:
    """The cases of a JSON-lines file in file order; an absent id becomes "line-<number>".

    Raises WorkloadError naming the line for anything else than FORM, for tools and arguments that `tools` do not have,
    values that the tool's schema refuses, and repeated ids.
    """
    path = Path(path)
    known = {tool.identity: tool for tool in tools}
    cases: list[ArgumentCase] = []
    lines: dict[str, int] = {}
    # Not str.splitlines: it would also split at U+2028, which JSON allows inside a string.
    for number, line in enumerate(file_text(path, WorkloadError, f"give {FORM}").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        case = _case(where, number, _content(where, line), known)
        if case.id in lines:
            raise WorkloadError(f"{where}: id {case.id!r} is already used in line {lines[case.id]}; change one")
        lines[case.id] = number
        cases.append(case)
    return cases


def _stems(text: str) -> set[str]:
    """The text's words in one, with and without those of BEFORE and AFTER; repo_id, repoId and "the repo" share one."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text.strip().strip("'\"`"))
    words = [word for word in re.split(r"[-_ .]+", spaced.casefold()) if word]
    inner = words
    while len(inner) > 1 and inner[0] in BEFORE:
        inner = inner[1:]
    while len(inner) > 1 and inner[-1] in AFTER:
        inner = inner[:-1]
    return {"".join(words), "".join(inner)} - {""}


def _properties(tool: Tool) -> Mapping[str, Any]:
    properties = tool.input_schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _schema(schema: Any) -> Mapping[str, Any]:
    """A schema may also be true or false."""
    return schema if isinstance(schema, dict) else {}


def _legal(schema: Any) -> set[str]:
    """Every text that the schema lists as a value or gives as a default, at any depth."""
    legal: set[str] = set()
    if isinstance(schema, list):
        return legal.union(*map(_legal, schema))
    for key, item in _schema(schema).items():
        if key in ("enum", "const", "default"):
            legal |= {text for text in (item if isinstance(item, list) else [item]) if isinstance(text, str)}
        else:
            legal |= _legal(item)
    return legal


def _texts(value: Any, name: str, schema: Any) -> Iterator[tuple[str, str]]:
    """Every string in `value` that is not the schema's own, with the nearest name above it."""
    legal = _legal(schema)

    def walk(value: Any, name: str) -> Iterator[tuple[str, str]]:
        match value:
            case str() if value not in legal:
                yield value, name
            case list():
                for item in value:
                    yield from walk(item, name)
            case dict():
                for key, item in value.items():
                    yield from walk(item, key)

    return walk(value, name)


def _content(where: str, line: str) -> dict[str, Any]:
    """The object of one line, its keys and the kinds of its values checked."""
    try:
        content = strict_json(line)
    except ValueError as cause:
        raise WorkloadError(f"{where}: not JSON: {cause}; give {FORM}") from cause
    if not isinstance(content, dict):
        raise WorkloadError(f"{where}: found {found(content)}; give {FORM}")
    if unknown := [key for key in content if key not in KEYS]:
        raise WorkloadError(f"{where}: unknown key {unknown[0]!r}; give {FORM}")
    for key in ("server", "tool", "query"):
        if not isinstance(content.get(key), str) or not content[key].strip():
            raise WorkloadError(f"{where}: {key!r} is {found(content.get(key))}; it must be a string that is not blank")
    if not isinstance(content.get("arguments"), dict) or not content["arguments"]:
        raise WorkloadError(f"{where}: 'arguments' is {found(content.get('arguments'))}; "
                            "it must be an object with at least one argument")
    for key in ("also", "any_case", "as_set", "history", "from_history"):
        if not isinstance(content.get(key, []), list):
            raise WorkloadError(f"{where}: {key!r} is {found(content[key])}; it must be a list")
    return content


def _case(where: str, number: int, content: dict[str, Any], known: Mapping[Identity, Tool]) -> ArgumentCase:
    id_ = content.get("id", f"line-{number}")
    if not isinstance(id_, str) or not id_.strip():
        raise WorkloadError(f"{where}: 'id' is {found(id_)}; it must be a string that is not blank")
    right = content["server"], content["tool"]
    also = tuple(_identity(where, entry) for entry in content.get("also", []))
    arguments = {name: tuple(value) if isinstance(value, list) else (value,)
                 for name, value in content["arguments"].items()}
    for identity in (right, *also):
        if identity not in known:
            raise WorkloadError(f"{where}: unknown tool {identity[1]!r} of server {identity[0]!r}; "
                                "name a tool of the registry")
        for name, accepted in arguments.items():
            _check_argument(where, known[identity], name, accepted)
    named = {key: _names(where, key, content.get(key, []), arguments)
             for key in ("any_case", "as_set", "from_history")}
    history = tuple(_turn(where, turn) for turn in content.get("history", []))
    if named["from_history"] and not history:
        raise WorkloadError(f"{where}: 'from_history' names arguments of no history; give the \"history\"")
    return ArgumentCase(id_, content["query"], right, arguments, also, frozenset(named["any_case"]),
                        frozenset(named["as_set"]), history, tuple(named["from_history"]))


def _identity(where: str, entry: Any) -> Identity:
    if not isinstance(entry, dict) or set(entry) != {"server", "tool"}:
        raise WorkloadError(f"{where}: 'also' holds {found(entry)}; it must hold {{\"server\", \"tool\"}}")
    return entry["server"], entry["tool"]


def _check_argument(where: str, tool: Tool, name: str, accepted: Collection[Any]) -> None:
    properties = _properties(tool)
    if name not in properties:
        raise WorkloadError(f"{where}: {tool.name!r} has no argument {name!r}; "
                            f"it has {', '.join(properties) or 'none'}")
    if not accepted:
        raise WorkloadError(f"{where}: argument {name!r} has no accepted value; a list is one of alternatives")
    definitions = {key: tool.input_schema[key] for key in ("$defs", "definitions") if key in tool.input_schema}
    validator = Draft202012Validator({**definitions, "allOf": [properties[name]]})
    for value in accepted:
        if error := next(validator.iter_errors(value), None):
            raise WorkloadError(f"{where}: argument {name!r}: {value!r} does not fit the schema of {tool.name!r}: "
                                f"{error.message}; a list is one of alternatives")


def _names(where: str, key: str, names: list[Any], arguments: Mapping[str, Any]) -> list[str]:
    for name in names:
        if not isinstance(name, str) or name not in arguments:
            raise WorkloadError(f"{where}: {key!r} names {name!r}; it must name arguments: {', '.join(arguments)}")
    return names


def _turn(where: str, turn: Any) -> dict[str, str]:
    if (not isinstance(turn, dict) or not {"role", "content"} <= set(turn) <= {"role", "content", "name"}
            or turn["role"] not in ROLES or not all(isinstance(text, str) for text in turn.values())):
        raise WorkloadError(f"{where}: 'history' holds {found(turn)}; a turn is {{\"role\": {' or '.join(ROLES)}, "
                            "\"content\": text} and may have a \"name\"")
    return turn

"""The parameters of a tool: any JSON schema (Draft 4 to 2020-12) read as names, types and what is said of them.

References are followed, allOf is merged, alternatives become unions. What has no place in a typed parameter, such as
a pattern, is named in `untold`. The result may be wider than the schema, never narrower in names or required names.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

# Objects and arrays in each other that are read; deeper ones, and a definition within itself, are their type alone.
MOST_DEPTH = 6
# Schemas read for one parameter: references can spell exponentially many in a short text.
MOST_VISITS = 600
# References, allOf and alternatives in each other, without a member between them.
MOST_CHAIN = 32
# Longer numbers say the range of a machine type, not of the parameter.
LONGEST_BOUND = 6
LONGEST_DEFAULT = 24
# No schema has such a keyword: marks a definition within itself.
FOLDED = "\0folded"
# Stands among `untold` for what is deeper or longer than is read.
UNREAD = "inner parts"
UNTOLD = ("pattern", "minLength", "maxLength", "minItems", "maxItems", "uniqueItems", "multipleOf", "contains",
          "minContains", "maxContains", "propertyNames", "minProperties", "maxProperties", "not", "if", "then", "else",
          "dependencies", "dependentRequired", "dependentSchemas", "contentEncoding", "contentMediaType")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# A schema without a type is meant for the type that its keywords speak of.
IMPLIED = {"object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties",
                      "maxProperties", "propertyNames", "dependentRequired"),
           "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
           "string": ("pattern", "minLength", "maxLength", "format", "contentEncoding"),
           "number": ("multipleOf", *BOUNDS)}
TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")


@dataclass(frozen=True)
class Plain:
    """A value known by its JSON type alone."""

    name: str
    hint: str = ""
    """Format of a string, bounds of a number; empty where the schema gives none."""


@dataclass(frozen=True)
class Literal:
    """One legal value: a string, number or boolean. Null is a type."""

    value: str | int | float | bool

    @property
    def text(self) -> str:
        return quoted(self.value)


@dataclass(frozen=True)
class Array:
    item: Type
    first: tuple[Type, ...] = ()
    """Types of the leading items, where they have their own."""


@dataclass(frozen=True)
class Object:
    members: tuple[Parameter, ...]
    rest: Type | None = None
    """Type of members of any other name; None where the schema speaks of none."""
    folded: bool = False
    """Members exist, and were not read."""
    either: tuple[tuple[str, ...], ...] = ()
    """Sets of names of which one must be given."""
    untold: tuple[str, ...] = ()
    """Of the arguments as a whole, as in `Parameter`."""


# Alternatives in the schema's order; an empty tuple is any value.
Type = tuple[Plain | Literal | Array | Object, ...]
NULL = Plain("null")


@dataclass(frozen=True)
class Parameter:
    name: str
    required: bool
    kind: Type
    description: str = ""
    default: str | None = None
    """JSON of a scalar that is short and not null, "" or such; None otherwise."""
    untold: tuple[str, ...] = ()
    """Keywords of its schema that neither type, hint nor default tells."""
    null_by_omission: bool = False
    """Null is legal and the default: leaving the parameter out says it, and the type does not name it."""


def parameters_of(schema: Mapping[str, Any]) -> Object:
    """The named parameters of an arguments schema, in its order, behind them names that are only required.

    No schema raises an error: a part that is malformed or refers to nothing allows any value.
    """
    reader = _Reader(schema)
    flat, seen = reader.flat(schema, frozenset({"#"}))
    untold = tuple(key for key in UNTOLD if key in (flat or {}))
    return replace(reader.object(flat or {}, seen, 0), untold=untold)


def quoted(value: Any) -> str:
    """The value's compact JSON, without any control character, line break or lone surrogate."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return re.sub("[\x7f-\x9f\u2028\u2029\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def unique(alternatives: Iterator | list | tuple) -> tuple:
    # By spelling too: 1 == True in Python, and in JSON they differ.
    return tuple({(repr(item)): item for item in alternatives}.values())


class _Reader:
    """Reads one schema; `visits` is what is left to read for the present parameter."""

    def __init__(self, root: Any):
        self.root = root
        self.visits = MOST_VISITS
        self.untold: list[str] = []
        self._anchors: dict[str, Any] | None = None

    def flat(self, schema: Any, seen: frozenset[str], chain: int = 0) -> tuple[dict[str, Any] | None, frozenset[str]]:
        """The schema with references followed and allOf merged, and the references passed. None: nothing is legal."""
        self.visits -= 1
        if schema is False:
            return None, seen
        if self.visits < 0 or chain > MOST_CHAIN:
            self.untold.append(UNREAD)
            return {}, seen
        if not isinstance(schema, Mapping):
            return {}, seen
        if schema.get("not") is True or schema.get("not") == {}:
            return None, seen
        flat = {key: value for key, value in schema.items() if key not in ("$ref", "$dynamicRef", "allOf")}
        parts = [(part, seen) for part in _branches(schema, "allOf")]
        passed = seen
        for ref in (schema.get("$ref"), schema.get("$dynamicRef")):
            if not isinstance(ref, str):
                continue
            target = self._target(ref)
            if target is True:
                self.untold.append("$ref")
            if ref in seen:
                folded = {"type": target["type"]} if isinstance(target, Mapping) and "type" in target else {}
                flat = _merged(flat, folded | {FOLDED: True})
            else:
                parts.insert(0, (target, seen | {ref}))
        for part, before in parts:
            part, behind = self.flat(part, before, chain + 1)
            passed |= behind
            if part is None:
                return None, passed
            flat = _merged(flat, part)
        return flat, passed

    def kind(self, flat: dict[str, Any] | None, seen: frozenset[str], depth: int, chain: int = 0) -> Type | None:
        """The type that a flat schema allows; None: nothing is legal."""
        if flat is None:
            return None
        if self.visits < 0 or chain > MOST_CHAIN:
            self.untold.append(UNREAD)
            return ()
        types = _types(flat)
        if "const" in flat or isinstance(flat.get("enum"), list):
            values = [flat["const"]] if "const" in flat else list(flat["enum"])
            if flat.get("nullable") is True:
                values.append(None)
            nullable = ["null"] if flat.get("nullable") is True else []
            fitting = [value for value in values if not types or _is_of(value, types + nullable)]
            return unique([_literal(value) for value in fitting]) or None
        key = next((key for key in ("anyOf", "oneOf") if _branches(flat, key)), None)
        if key is not None and not (types == ["object"] and isinstance(flat.get("properties"), Mapping)):
            return self._union(flat, key, seen, depth, chain)
        self.untold += [key for key in UNTOLD if key in flat]
        found: list = []
        for name in types or self._implied(flat):
            match name:
                case "object":
                    found.append(self.object(flat, seen, depth))
                case "array":
                    found.append(self._array(flat, seen, depth))
                case "string":
                    found.append(Plain(name, _format(flat)))
                case "number" | "integer":
                    found.append(Plain(name, _bounds(flat)))
                    if not found[-1].hint:
                        self.untold += [key for key in BOUNDS if key in flat]
                case _:
                    found.append(Plain(name))
        if found and flat.get("nullable") is True:
            found.append(NULL)
        return unique(found)

    def object(self, flat: dict[str, Any], seen: frozenset[str], depth: int) -> Object:
        """The members of a flat schema, those of its alternatives and conditions among them."""
        if depth > MOST_DEPTH or FOLDED in flat:
            return Object((), folded=True)
        found: dict[str, list[tuple[Any, frozenset[str]]]] = {}
        for name, schema in _mapping(flat, "properties").items():
            found[str(name)] = [(schema, seen)]
        required, base, either = set(_names(flat)), set(found), ()
        for key in ("anyOf", "oneOf"):
            branches = [self.flat(branch, seen, 1) for branch in _branches(flat, key)]
            branches = [(branch, passed) for branch, passed in branches if branch is not None]
            if not branches:
                continue
            needs = [tuple(name for name in _names(branch) if name not in required) for branch, _ in branches]
            if all(needs):
                always = set(needs[0]).intersection(*needs[1:])
                required |= always
                rest = unique([tuple(name for name in need if name not in always) for need in needs])
                either = either or (rest if len(rest) > 1 and all(rest) else ())
            self._gather(found, base, branches)
        conditional = [flat.get("then"), flat.get("else"), *_mapping(flat, "dependentSchemas").values()]
        self._gather(found, base, [self.flat(part, seen, 1) for part in conditional if isinstance(part, Mapping)])
        rest = self._rest(flat, seen, depth)
        members = [member for name, schemas in found.items()
                   if (member := self._parameter(name, schemas, name in required, depth)) is not None]
        only_required = [name for name in dict.fromkeys((*_names(flat), *sorted(required))) if name not in found]
        members += [Parameter(name, True, rest or ()) for name in only_required]
        return Object(tuple(members), rest, either=either)

    @staticmethod
    def _gather(found: dict[str, list], base: set[str], branches: list) -> None:
        """Add the branches' members; a name that the schema itself types keeps that type."""
        for branch, passed in branches:
            for name, schema in _mapping(branch or {}, "properties").items():
                if name not in base:
                    found.setdefault(str(name), []).append((schema, passed))

    def _parameter(self, name: str, schemas: list[tuple[Any, frozenset[str]]], required: bool,
                   depth: int) -> Parameter | None:
        """None where no value is legal: the name must not be given."""
        if depth == 0:
            self.visits = MOST_VISITS
        outer, self.untold = self.untold, []
        kinds, description, default, omitted = [], "", None, False
        for schema, seen in schemas:
            flat, passed = self.flat(schema, seen)
            kinds.append(self.kind(flat, passed, depth + 1))
            description = description or self._description(flat or {})
            default = (flat or {}).get("default") if default is None else default
            omitted |= flat is not None and "default" in flat and flat["default"] is None
        if default not in (None, "", [], {}) and _default(default) is None:
            self.untold.append("default")
        untold, self.untold = tuple(dict.fromkeys(self.untold)), outer
        kinds = [kind for kind in kinds if kind is not None]
        if not kinds:
            return None
        kind = () if () in kinds else unique([alternative for kind in kinds for alternative in kind])
        omitted = omitted and not required and NULL in kind and len(kind) > 1
        if omitted:
            kind = tuple(alternative for alternative in kind if alternative != NULL)
        return Parameter(name, required, kind, description, _default(default), untold, omitted)

    def _description(self, flat: Mapping) -> str:
        items = flat.get("items") if isinstance(flat.get("items"), Mapping) else {}
        said = (flat.get("description"), items.get("description"), flat.get("title"))
        return next((text for text in said if isinstance(text, str) and text.strip()), "")

    def _union(self, flat: dict, key: str, seen: frozenset[str], depth: int, chain: int) -> Type | None:
        base = {name: value for name, value in flat.items() if name != key}
        found: list = []
        legal = False
        for branch in _branches(flat, key):
            part, passed = self.flat(branch, seen, chain + 1)
            kind = None if part is None else self.kind(_merged(base, part), passed, depth, chain + 1)
            if kind == ():
                return ()
            legal = legal or kind is not None
            found += kind or ()
        return unique(found) if legal else None

    def _array(self, flat: dict, seen: frozenset[str], depth: int) -> Array:
        if depth > MOST_DEPTH:
            self.untold.append(UNREAD)
            return Array(())
        items, prefix = flat.get("items"), flat.get("prefixItems")
        if isinstance(items, list):
            items, prefix = flat.get("additionalItems"), items
        first = tuple(self._item(schema, seen, depth) or () for schema in prefix) if isinstance(prefix, list) else ()
        return Array(self._item(items, seen, depth) or (), first)

    def _item(self, schema: Any, seen: frozenset[str], depth: int) -> Type | None:
        return self.kind(*self.flat(schema, seen), depth + 1)

    def _rest(self, flat: dict, seen: frozenset[str], depth: int) -> Type | None:
        others = list(_mapping(flat, "patternProperties").values())
        additional = flat.get("additionalProperties")
        if isinstance(additional, Mapping) and additional or additional is True and not flat.get("properties"):
            others.append(additional)
        kinds = [kind for kind in (self._item(other, seen, depth) for other in others) if kind is not None]
        if not kinds:
            return None
        return () if () in kinds else unique([alternative for kind in kinds for alternative in kind])

    def _implied(self, flat: dict) -> list[str]:
        return [name for name, keys in IMPLIED.items() if any(key in flat for key in keys)][:1]

    def _target(self, ref: str) -> Any:
        """What a reference within the schema points at; True (any value) where that is nothing, or elsewhere."""
        base, _, fragment = ref.partition("#")
        found = self.root if not base else self._anchored(base)
        if not fragment:
            return found
        if not fragment.startswith("/"):
            return self._anchored("#" + fragment)
        for part in unquote(fragment).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            else:
                return True
        return found

    def _anchored(self, name: str) -> Any:
        if self._anchors is None:
            self._anchors, left = {}, [self.root]
            while left:
                part = left.pop()
                if isinstance(part, Mapping):
                    for key, prefix in (("$anchor", "#"), ("$dynamicAnchor", "#"), ("$id", ""), ("id", "")):
                        if isinstance(part.get(key), str):
                            self._anchors.setdefault(prefix + part[key], part)
                    left += part.values()
                elif isinstance(part, list):
                    left += part
        return self._anchors.get(name, True)


def json_type(value: Any) -> str:
    """The JSON schema type of a value; a whole float is a "number"."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case Mapping():
            return "object"
    return "array"


def _is_of(value: Any, types: list[str]) -> bool:
    name = json_type(value)
    whole = name == "integer" or isinstance(value, float) and value.is_integer()
    return name in types or whole and ("integer" in types or "number" in types)


def _merged(flat: dict[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Both at once. What only one can say is the first's: a description beside a reference is the nearer one."""
    merged = {**part, **flat}
    if isinstance(flat.get("properties"), Mapping) and isinstance(part.get("properties"), Mapping):
        mine, theirs = flat["properties"], part["properties"]
        both = {name: {"allOf": [mine[name], theirs[name]]} for name in mine if name in theirs}
        merged["properties"] = {**mine, **theirs, **both}
    if "required" in flat and "required" in part:
        merged["required"] = list(dict.fromkeys((*_names(flat), *_names(part))))
    if isinstance(flat.get("enum"), list) and isinstance(part.get("enum"), list):
        theirs = [quoted(value) for value in part["enum"]]
        merged["enum"] = [value for value in flat["enum"] if quoted(value) in theirs]
    mine, theirs = _types(flat), _types(part)
    if mine and theirs:
        narrow = [name for name in mine if name in theirs or name == "integer" and "number" in theirs]
        narrow += [name for name in theirs if name == "integer" and "number" in mine and name not in narrow]
        merged["type"] = narrow or mine
    return merged


def _types(flat: Mapping) -> list[str]:
    types = flat.get("type")
    types = types if isinstance(types, list) else [types]
    return list(dict.fromkeys(name for name in types if name in TYPES))


def _mapping(flat: Mapping, key: str) -> Mapping:
    value = flat.get(key)
    return value if isinstance(value, Mapping) else {}


def _branches(flat: Mapping, key: str) -> list:
    value = flat.get(key)
    return value if isinstance(value, list) else []


def _names(flat: Mapping) -> list[str]:
    required = flat.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def _literal(value: Any, depth: int = 0) -> Literal | Array | Object:
    """A structured value is spelled as a type of literals."""
    if isinstance(value, Mapping):
        items = value.items() if depth < MOST_DEPTH else ()
        return Object(tuple(Parameter(str(name), True, (_literal(item, depth + 1),)) for name, item in items),
                      folded=depth == MOST_DEPTH)
    if isinstance(value, list):
        return Array((), tuple((_literal(item, depth + 1),) for item in value if depth < MOST_DEPTH))
    return NULL if value is None else Literal(value)


def _format(flat: Mapping) -> str:
    form = flat.get("format")
    return form if isinstance(form, str) and re.fullmatch(r"[\w.+-]{1,24}", form) else ""


def _bounds(flat: Mapping) -> str:
    low, above, high, below = (_bound(flat, key) for key in ("minimum", "exclusiveMinimum", "maximum",
                                                             "exclusiveMaximum"))
    # Draft 4 has a boolean beside the bound.
    if flat.get("exclusiveMinimum") is True:
        low, above = "", low
    if flat.get("exclusiveMaximum") is True:
        high, below = "", high
    if low and high:
        return f"{low}..{high}"
    parts = (above and f">{above}" or low and f">={low}", below and f"<{below}" or high and f"<={high}")
    return " ".join(filter(None, parts))


def _bound(flat: Mapping, key: str) -> str:
    value = flat.get(key)
    text = quoted(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else ""
    return text if len(text) <= LONGEST_BOUND else ""


def _default(value: Any) -> str | None:
    if value is None or value == "" or not isinstance(value, (str, int, float, bool)):
        return None
    text = quoted(value)
    return text if len(text) <= LONGEST_DEFAULT else None

"""One schema out of several that hold at once: references followed, `allOf` and siblings merged into plain keywords."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

Schema = bool | dict[str, Any]
Note = Callable[[str, str], None]
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
# Keywords that apply to values of one type only: a schema that has them and no `type` is meant for that type.
OF_TYPE = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
               "maxProperties"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
# What says nothing about which values are legal.
ANNOTATIONS = frozenset((
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
    "id", "$comment", "$defs", "definitions", "$anchor", "$vocabulary", "contentEncoding", "contentMediaType",
    "contentSchema", "nullable"))
LARGEST_PRODUCT = 64


class UnresolvedReference(LookupError):
    """A reference leads nowhere in the schema; the message says where it points."""


def plain(schema: Any) -> Schema:
    """The schema with booleans for what allows everything or nothing, and the drafts' spellings made one."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        return True
    found = {key: item for key, item in schema.items()
             if key not in ANNOTATIONS and not (key.startswith("x-") or item is None and key != "const")}
    if plain_not(found.get("not")):
        return False
    if found.get("not") is False:
        del found["not"]
    for end, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(found.get(end), bool):
            # Draft 4.
            if found.pop(end) and bound in found:
                found[end] = found.pop(bound)
    if isinstance(found.get("items"), list):
        found["prefixItems"] = found.pop("items")
        if "additionalItems" in found:
            found["items"] = found.pop("additionalItems")
    found.pop("additionalItems", None)
    if "const" in found:
        value = found.pop("const")
        found["enum"] = [item for item in found["enum"] if same(item, value)] if "enum" in found else [value]
    return found or True


def plain_not(schema: Any) -> bool:
    """Whether a `not` of this schema forbids everything."""
    return schema is True or isinstance(schema, Mapping) and not set(schema) - ANNOTATIONS


def types_of(schema: dict[str, Any]) -> list[str]:
    """The types that a schema allows, in its order; those its keywords speak of where it names none."""
    named = schema.get("type")
    if named is None:
        implied = [name for name, keywords in OF_TYPE.items() if any(keyword in schema for keyword in keywords)]
        return implied or list(TYPES[:4] + TYPES[5:])
    return [name for name in ([named] if isinstance(named, str) else named) if name in TYPES]


def resolved(root: Schema, reference: str) -> Any:
    """What a reference within the schema points at. Raises UnresolvedReference."""
    if not reference.startswith("#"):
        raise UnresolvedReference(f"{reference!r} points out of the schema")
    found: Any = root
    if not reference.startswith("#/") and reference != "#":
        return _anchored(root, reference)
    for part in reference[1:].split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        else:
            raise UnresolvedReference(f"{reference!r} leads nowhere, there is no {key!r}")
    return found


def _anchored(root: Any, reference: str) -> Any:
    """The subschema whose `$anchor` (or, before 2019, `$id`) this reference names."""
    waiting = [root]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Mapping):
            if found.get("$anchor") == reference[1:] or reference in (found.get("$id"), found.get("id")):
                return found
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found
    raise UnresolvedReference(f"{reference!r} names an anchor that the schema does not have")


def merged(a: Schema, b: Schema, note: Note) -> Schema:
    """A schema for what both allow. What cannot be merged keeps the first one's keyword, and is told to `note`."""
    a, b = plain(a), plain(b)
    if a is False or b is False:
        return False
    if a is True or b is True:
        return b if a is True else a
    both = dict(a)
    for keyword, item in b.items():
        if keyword not in both or same(both[keyword], item):
            both[keyword] = item
            continue
        mine = both[keyword]
        if keyword == "type":
            both[keyword] = _common_types(types_of(a), types_of(b))
            if not both[keyword]:
                return False
        elif keyword == "enum":
            both[keyword] = [value for value in mine if any(same(value, other) for other in item)]
            if not both[keyword]:
                return False
        elif keyword == "required":
            both[keyword] = list(dict.fromkeys([*mine, *item]))
        elif keyword in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
            both[keyword] = max(mine, item)
        elif keyword in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
            both[keyword] = min(mine, item)
        elif keyword == "uniqueItems":
            both[keyword] = mine or item
        elif keyword == "multipleOf" and isinstance(mine, int) and isinstance(item, int):
            both[keyword] = math.lcm(mine, item)
        elif keyword in ("items", "propertyNames"):
            both[keyword] = {"allOf": [mine, item]}
        elif keyword == "allOf":
            both[keyword] = [*mine, *item]
        elif keyword == "$ref":
            both["allOf"] = [*both.get("allOf", ()), {"$ref": item}]
        elif keyword in ("anyOf", "oneOf") and len(mine) * len(item) <= LARGEST_PRODUCT:
            both[keyword] = [{"allOf": [x, y]} for x in mine for y in item]
        elif keyword not in ("properties", "additionalProperties", "patternProperties"):
            note(keyword, f"two of them hold at once; the first, {str(mine)[:60]}, was kept")
    both |= _members(a, b)
    return both


def _members(a: dict, b: dict) -> dict[str, Any]:
    """`properties`, `patternProperties` and `additionalProperties` that both allow."""
    found: dict[str, Any] = {}
    if "properties" in a or "properties" in b:
        found["properties"] = {}
        for key in dict.fromkeys([*a.get("properties", ()), *b.get("properties", ())]):
            parts = [_member(side, key) for side in (a, b)]
            parts = [part for part in parts if part is not True]
            found["properties"][key] = parts[0] if len(parts) == 1 else {"allOf": parts} if parts else True
    if "patternProperties" in a or "patternProperties" in b:
        found["patternProperties"] = {**a.get("patternProperties", {}), **b.get("patternProperties", {})}
    limits = [side["additionalProperties"] for side in (a, b) if "additionalProperties" in side]
    if limits:
        found["additionalProperties"] = limits[0] if len(limits) == 1 else {"allOf": limits}
        if False in limits:
            found["additionalProperties"] = False
    return found


def _member(side: dict, key: str) -> Schema:
    if key in side.get("properties", ()):
        return side["properties"][key]
    return True if "patternProperties" in side else side.get("additionalProperties", True)


def _common_types(mine: list[str], others: list[str]) -> list[str]:
    common = [name for name in mine if name in others or name == "integer" and "number" in others]
    if "number" in mine and "integer" in others and "integer" not in common:
        common.append("integer")
    return common


def disjoint(schemas: list[Schema]) -> bool:
    """Whether no value can be allowed by two of these schemas, as far as types and listed values tell."""
    return all(_apart(a, b) for i, a in enumerate(schemas) for b in schemas[:i])


def _apart(a: Schema, b: Schema) -> bool:
    a, b = plain(a), plain(b)
    if a is False or b is False:
        return True
    if a is True or b is True:
        return False
    if "enum" in a and "enum" in b:
        return not any(same(x, y) for x in a["enum"] for y in b["enum"])
    if "type" in a and "type" in b:
        if not _common_types(types_of(a), types_of(b)):
            return True
        if types_of(a) == types_of(b) == ["object"]:
            shared = set(a.get("required", ())) & set(b.get("required", ()))
            return any(_apart(_member(a, key), _member(b, key)) for key in shared)
    return False


def same(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b

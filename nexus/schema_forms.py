"""Whether what a schema says under a keyword has that keyword's form: schemas in the wild are not always schemas."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nexus.schema_merge import TYPES


def _is_number(item: Any) -> bool:
    return isinstance(item, int | float) and not isinstance(item, bool)


def _is_count(item: Any) -> bool:
    return _is_number(item) and item >= 0 and item == int(item)


def _is_list(item: Any) -> bool:
    return isinstance(item, list) and len(item) > 0


def _is_schema(item: Any) -> bool:
    return isinstance(item, bool | Mapping)


# By keyword, whether a value can be used.
FORMS: dict[str, Callable[[Any], bool]] = {
    "type": lambda item: set([item] if isinstance(item, str) else item if _is_list(item) else ["?"]) <= set(TYPES),
    "$ref": lambda item: isinstance(item, str),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    "multipleOf": lambda item: _is_number(item) and item > 0,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _is_count),
    **dict.fromkeys(("pattern", "format"), lambda item: isinstance(item, str)),
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), _is_list),
    "enum": lambda item: isinstance(item, list),
    "required": lambda item: isinstance(item, list) and all(isinstance(key, str) for key in item),
    "prefixItems": lambda item: isinstance(item, list),
    **dict.fromkeys(("items", "additionalProperties", "propertyNames"), _is_schema),
    **dict.fromkeys(("properties", "patternProperties"), lambda item: isinstance(item, Mapping)),
}

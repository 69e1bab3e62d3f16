"""A JSON schema as a grammar in which every text ends: members in any order, lengths bounded, compact.

The grammar is llguidance's dialect of Lark. Objects are written here, because llguidance's own conversion keeps
properties in the schema's order; strings and bounded numbers are left to it (`%json`). What cannot be expressed is
relaxed keyword by keyword and reported. Properties not in the schema are written only where `additionalProperties`
asks for them: an object that lists its properties is closed otherwise.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema.validators import Draft202012Validator

from nexus.schema_merge import OF_TYPE, TYPES, Schema, UnresolvedReference, disjoint, merged, plain, resolved, types_of

# Integers that every JSON reader keeps exactly.
LARGEST_INTEGER = 2**53 - 1
MOST_RULES = 50_000
# Bits of a rule's parameter that tell which members were written; the rest of its 64 count the others.
MEMBER_BITS = 56
COUNT_BITS = 6
JSON_OPTIONS = {"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'}
# Control characters without a letter cannot be written: no argument needs them, and \u could spell half a pair.
NUMBER = r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,9})?([eE][+-]?[0-9]{1,2})?/"
NUMBER_BYTES = 30
# Else a mask has only one of the tokens with which forced bytes can be written.
ALL_SPELLINGS = '%llguidance {"no_forcing": true}'
# What a pattern may ask for that needs more than our bound.
UNBOUNDED_CHARS = 4096
UNSUPPORTED = ("not", "if", "dependentRequired", "dependentSchemas", "dependencies", "contains", "$dynamicRef",
               "$recursiveRef")


def _is_number(item: Any) -> bool:
    return isinstance(item, int | float) and not isinstance(item, bool)


def _is_count(item: Any) -> bool:
    return _is_number(item) and item >= 0 and item == int(item)


def _is_list(item: Any) -> bool:
    return isinstance(item, list) and len(item) > 0


def _is_schema(item: Any) -> bool:
    return isinstance(item, bool | Mapping)


# What makes a value of a keyword usable; schemas in the wild are not always schemas.
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


class SchemaGrammarError(ValueError):
    """No grammar can be made of a schema; the message says what it forbids or where it is too large."""


@dataclass(frozen=True)
class Bounds:
    """Limits of what is written where the schema sets none; its own smaller ones and larger minima win."""

    max_string_chars: int = 256
    max_code_chars: int = 64
    """Of strings whose pattern lists the characters of a whole code, such as a key or a number."""
    max_key_chars: int = 64
    """Of keys that the schema does not name."""
    max_items: int = 16
    """Elements of an array, and keys of a free-form map."""
    depth: int = 3
    """How often a reference may contain itself, and how deep a free value may be nested."""

    def __post_init__(self):
        for field in ("max_string_chars", "max_code_chars", "max_key_chars", "max_items", "depth"):
            if getattr(self, field) < 1:
                raise SchemaGrammarError(f"{field} is {getattr(self, field)}; give at least 1")


@dataclass(frozen=True)
class Relaxation:
    """One keyword of one field that the grammar does not enforce; the finished value is checked against it."""

    path: str
    """Where the field is in the schema, as a JSON pointer."""
    keyword: str
    reason: str


@dataclass(frozen=True)
class SchemaGrammar:
    """The grammar of a schema, what it does not enforce, and how far an unfinished text can be from its end."""

    lark: str
    relaxed: tuple[Relaxation, ...]
    closing_bytes: int
    """Bytes with which any unfinished text can be completed."""
    required_keys: tuple[str, ...]
    """Keys that some object requires, as they are written, with the colon."""


@dataclass(frozen=True)
class _Rule:
    name: str
    whole: int
    """Bytes, at most, that a completion writes for all of it."""
    closing: int
    """Bytes that the worst unfinished text of it lacks."""


def schema_grammar(schema: Mapping[str, Any] | bool, bounds: Bounds,
                   problem_of: Callable[[str], str]) -> SchemaGrammar:
    """The grammar of JSON objects that the schema allows.

    `problem_of` is the engine's complaint about a grammar, "" for none; it is asked about patterns, formats and steps.
    Raises SchemaGrammarError for a schema that no object satisfies, and one that is too large.
    """
    return _Writer(schema, bounds, problem_of).written()


class _Writer:
    def __init__(self, schema: Mapping[str, Any] | bool, bounds: Bounds, problem_of: Callable[[str], str]):
        self.root, self.bounds, self.problem_of = schema, bounds, problem_of
        self.rules: list[str] = []
        self.n_names = 0
        self.relaxed: dict[tuple[str, str], Relaxation] = {}
        self.required_keys: dict[str, None] = {}
        self.leaves: dict[str, _Rule] = {}
        self.references: dict[tuple[str, int], _Rule | None] = {}
        self.free: dict[int, _Rule] = {}

    def written(self) -> SchemaGrammar:
        rule = self.value({"allOf": [self.root, {"type": "object"}]}, "", 0, frozenset())
        if rule is None:
            raise SchemaGrammarError("the schema allows no object of bounded depth; check its required fields")
        lark = "\n".join([ALL_SPELLINGS, f"start: {rule.name}", *self.rules]) + "\n"
        return SchemaGrammar(lark, tuple(self.relaxed.values()), rule.closing, tuple(self.required_keys))

    # A value of any kind. None stands for a schema that nothing satisfies.

    def value(self, schema: Any, path: str, depth: int, open_: frozenset[str]) -> _Rule | None:
        schema = self.well_formed(schema, path)
        if isinstance(schema, dict) and schema.keys() == {"$ref"}:
            return self.reference(schema["$ref"], path, depth, open_)
        schema, depth, open_ = self.flat(schema, path, depth, open_)
        if schema is False:
            return None
        if schema is True:
            return self.anything(0)
        schema = self.supported(schema, path)
        if "enum" in schema:
            return self.listed(schema, path)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self.alternative_schemas(keyword, schema, path, depth, open_)
        names = types_of(schema)
        return self.alternatives([self.typed(name, schema, path, depth, open_) for name in names])

    def well_formed(self, schema: Any, path: str) -> Schema:
        """The schema, plain, without keywords whose values are not of their form; each is reported."""
        schema = plain(schema)
        if isinstance(schema, bool):
            return schema
        found = dict(schema)
        for keyword, item in schema.items():
            if (allowed := FORMS.get(keyword)) and not allowed(item):
                self.relax(path, keyword, f"{str(item)[:60]!r} is no value for this keyword")
                del found[keyword]
        return found or True

    def reference(self, reference: str, path: str, depth: int, open_: frozenset[str]) -> _Rule | None:
        depth += reference in open_
        if depth > self.bounds.depth:
            return None
        key = reference, depth
        if key not in self.references:
            target = self.target(reference, path)
            self.references[key] = self.value(target, reference if target is not True else path, depth,
                                              open_ | {reference})
        return self.references[key]

    def target(self, reference: Any, path: str) -> Any:
        try:
            return resolved(self.root, str(reference))
        except UnresolvedReference as error:
            self.relax(path, "$ref", str(error))
            return True

    def flat(self, schema: Schema, path: str, depth: int, open_: frozenset[str]) -> tuple[Schema, int, frozenset[str]]:
        """The schema with references and `allOf` at its top merged into it."""
        while isinstance(schema, dict) and ("$ref" in schema or "allOf" in schema):
            rest = {key: item for key, item in schema.items() if key not in ("$ref", "allOf")}
            parts = [rest] if rest else []
            if "$ref" in schema:
                parts.append({"$ref": schema["$ref"]})
            parts += schema.get("allOf", ())
            whole: Schema = True
            for part in parts:
                part = self.well_formed(part, path)
                if isinstance(part, dict) and "$ref" in part:
                    reference = part["$ref"]
                    depth += reference in open_
                    if depth > self.bounds.depth:
                        return False, depth, open_
                    open_ |= {reference}
                    beside = {key: item for key, item in part.items() if key != "$ref"}
                    target = self.well_formed(self.target(reference, path), path)
                    part = merged(target, beside or True, self.noting(path))
                whole = merged(whole, part, self.noting(path))
            schema = whole
        return schema, depth, open_

    def supported(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """The schema without keywords for which there is no grammar, each reported. They still filter listed values."""
        if "enum" in schema:
            return schema
        found = dict(schema)
        for keyword in UNSUPPORTED:
            if keyword in found:
                self.relax(path, keyword, "there is no grammar for this keyword")
                del found[keyword]
        for keyword, closed in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if keyword in found:
                found.setdefault(closed, found.pop(keyword))
        return found

    def relax(self, path: str, keyword: str, reason: str) -> None:
        self.relaxed.setdefault((path, keyword), Relaxation(path, keyword, reason))

    def noting(self, path: str) -> Callable[[str, str], None]:
        return lambda keyword, reason: self.relax(path, keyword, reason)

    def alternative_schemas(self, keyword: str, schema: dict, path: str, depth: int,
                            open_: frozenset[str]) -> _Rule | None:
        rest = {key: item for key, item in schema.items() if key != keyword}
        branches = [merged(rest or True, part, self.noting(path)) for part in schema[keyword]]
        if keyword == "oneOf":
            heads = [self.flat(branch, path, depth, open_)[0] for branch in branches]
            if not disjoint(heads):
                self.relax(path, keyword, "its alternatives may overlap; any of them is written")
        return self.alternatives([self.value(branch, f"{path}/{keyword}/{i}", depth, open_)
                                  for i, branch in enumerate(branches)])

    def alternatives(self, rules: Sequence[_Rule | None]) -> _Rule | None:
        found = list(dict.fromkeys(rule for rule in rules if rule is not None))
        if len(found) < 2:
            return found[0] if found else None
        return self.rule(" | ".join(rule.name for rule in found), max(rule.whole for rule in found),
                         max(rule.closing for rule in found))

    def listed(self, schema: dict[str, Any], path: str) -> _Rule | None:
        """The values of an `enum` that the other keywords allow."""
        others = {key: item for key, item in schema.items() if key != "enum"}
        definitions = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root} \
            if isinstance(self.root, Mapping) else {}
        validator = Draft202012Validator({**definitions, **others})

        def allowed(value: Any) -> bool:
            try:
                return validator.is_valid(value)
            except Exception as error:
                # A broken pattern, or a reference that leads nowhere.
                self.relax(path, "enum", f"values could not be checked ({type(error).__name__})")
                return True

        texts = list(dict.fromkeys(compact(value) for value in schema["enum"] if allowed(value)))
        return self.literals(texts) if texts else None

    def literals(self, texts: Sequence[str]) -> _Rule:
        sizes = [len(text.encode()) for text in texts]
        return self.leaf(" | ".join(map(quoted, texts)), max(sizes), max(sizes))

    # One type.

    def typed(self, name: str, schema: dict, path: str, depth: int, open_: frozenset[str]) -> _Rule | None:
        if name == "null":
            return self.literals(["null"])
        if name == "boolean":
            return self.literals(["true", "false"])
        if name == "string":
            return self.string(schema, path)
        if name in ("number", "integer"):
            return self.number(name, schema, path)
        if name == "array":
            return self.array(schema, path, depth, open_)
        return self.object(schema, path, depth, open_)

    def string(self, schema: dict, path: str) -> _Rule | None:
        least = int(schema.get("minLength", 0))
        bounds = self.bounds
        most = max(least, bounds.max_code_chars if is_code(schema.get("pattern")) else bounds.max_string_chars)
        if schema.get("maxLength", most) < least:
            return None
        most = min(most, int(schema.get("maxLength", most)))
        found = {"type": "string", "minLength": least, "maxLength": most}
        special = {key: schema[key] for key in ("format", "pattern") if key in schema}
        if not special:
            return self.json_leaf(found, 2 + least, least + 6)
        # A text that must match cannot be closed anywhere; at worst all of it is still to come.
        closing = most + 2
        if not (problem := self.leaf_problem(found | special)):
            return self.json_leaf(found | special, closing, closing)
        # The schema's own text may need more than our bound gives.
        own = {"type": "string", **{key: schema[key] for key in ("minLength", "maxLength") if key in schema}, **special}
        if not self.leaf_problem(own):
            closing = int(schema.get("maxLength", UNBOUNDED_CHARS)) + 2
            return self.json_leaf(own, closing, closing)
        for kept in [key for key in reversed(special) if len(special) > 1]:
            if not self.leaf_problem(found | {kept: special[kept]}):
                for keyword in special.keys() - {kept}:
                    self.relax(path, keyword, problem)
                return self.json_leaf(found | {kept: special[kept]}, closing, closing)
        for keyword in special:
            self.relax(path, keyword, self.leaf_problem(found | {keyword: special[keyword]}) or problem)
        return self.json_leaf(found, 2 + least, least + 6)

    def number(self, name: str, schema: dict, path: str) -> _Rule | None:
        found = {key: schema[key] for key in OF_TYPE["number"] if key in schema}
        if name == "number" and not found:
            return self.leaf(NUMBER, 1, NUMBER_BYTES)
        bounded = dict(found)
        if name == "integer":
            if not {"minimum", "exclusiveMinimum"} & bounded.keys():
                bounded["minimum"] = min(-LARGEST_INTEGER, schema.get("maximum", 0), schema.get("exclusiveMaximum", 0))
            if not {"maximum", "exclusiveMaximum"} & bounded.keys():
                bounded["maximum"] = max(LARGEST_INTEGER, schema.get("minimum", 0), schema.get("exclusiveMinimum", 0))
        elif "multipleOf" not in bounded:
            # Without a step a fraction would have no last digit.
            bounded["multipleOf"] = 1e-6
        for rest in (bounded, found):
            # Between narrow limits there may be no multiple of our own step.
            if not (problem := self.leaf_problem({"type": name, **rest})):
                return self.json_leaf({"type": name, **rest}, NUMBER_BYTES, NUMBER_BYTES)
        if "nsatisfiable" in problem:
            return None
        # One keyword less, the last first; else none of them.
        for dropped in [*([keyword] for keyword in reversed(found)), list(found)]:
            rest = {keyword: item for keyword, item in bounded.items() if keyword not in dropped}
            if not self.leaf_problem({"type": name, **rest}):
                for keyword in dropped:
                    self.relax(path, keyword, problem)
                return self.json_leaf({"type": name, **rest}, NUMBER_BYTES, NUMBER_BYTES)
        raise SchemaGrammarError(f"{path}: {problem}")

    def array(self, schema: dict, path: str, depth: int, open_: frozenset[str]) -> _Rule | None:
        least = int(schema.get("minItems", 0))
        most = min(max(least, self.bounds.max_items), int(schema.get("maxItems", LARGEST_INTEGER)))
        first = [self.value(item, f"{path}/prefixItems/{i}", depth, open_)
                 for i, item in enumerate(schema.get("prefixItems", ())[:most])]
        if None in first:
            first = first[:first.index(None)]
            most = min(most, len(first))
        rest = None
        if most > len(first):
            if schema.get("uniqueItems") and most > 1 and not first:
                if (unique := self.unique_items(schema, path, least, most, depth, open_)) is not None:
                    return unique
            rest = self.value(schema.get("items", True), f"{path}/items", depth, open_)
            most = most if rest is not None else len(first)
        if schema.get("uniqueItems") and most > 1:
            self.relax(path, "uniqueItems", "elements are not compared with each other")
        if most < least:
            return None
        if most == 0:
            return self.literals(["[]"])
        tail = ""
        if rest is not None:
            low, high = max(0, least - len(first)), most - len(first)
            if first:
                tail = f'("," {rest.name}){{{low},{high}}}'
            elif low:
                tail = f'{rest.name} ("," {rest.name}){{{low - 1},{high - 1}}}'
            else:
                tail = f'({rest.name} ("," {rest.name}){{0,{high - 1}}})?'
        for i in range(len(first) - 1, -1, -1):
            tail = f'{"" if i == 0 else chr(34) + "," + chr(34)} {first[i].name} {tail}'
            tail = tail if i < least else f"({tail})?"
        parts = [*first, *([rest] if rest else [])]
        needed = sum(rule.whole + 1 for rule in first[:least])
        needed += max(0, least - len(first)) * (rest.whole + 1) if rest else 0
        return self.rule(f'"[" {tail} "]"', 2 + needed, 2 + needed + max(rule.closing for rule in parts))

    def unique_items(self, schema: dict, path: str, least: int, most: int, depth: int,
                     open_: frozenset[str]) -> _Rule | None:
        """An array of different listed values; None where the items are not listed, or too many."""
        items, *_ = self.flat(plain(schema.get("items", True)), path, depth, open_)
        if not isinstance(items, dict) or items.keys() - {"enum", "type"} or len(items.get("enum", ())) > MEMBER_BITS \
                or "enum" not in items:
            return None
        values = [self.value({**items, "enum": [value]}, f"{path}/items", depth, open_) for value in items["enum"]]
        values = [value for value in values if value is not None]
        if len(values) < least:
            return None
        members = [(value, False) for value in values]
        end = f"bit_count_ge([0:{len(values)}], {least})"
        body = self.members(members, end, f"bit_count_lt([0:{len(values)}], {min(most, len(values))})", least == 0)
        sizes = sorted((value.whole + 1 for value in values), reverse=True)
        needed = 2 + sum(sizes[:least])
        return self.rule(f'"[" {body} "]"', needed, needed + max((value.closing for value in values), default=0))

    def object(self, schema: dict, path: str, depth: int, open_: frozenset[str]) -> _Rule | None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        patterns = schema.get("patternProperties", {})
        members: dict[str, _Rule] = {}
        for key in dict.fromkeys([*properties, *required]):
            parts = [item for pattern, item in patterns.items() if matches(pattern, key)]
            parts += [properties[key]] if key in properties else []
            part = {"allOf": parts} if parts else schema.get("additionalProperties", True)
            names = schema.get("propertyNames", True)
            value = None if plain(names) is False else self.value(part, f"{path}/properties/{key}", depth, open_)
            if value is None and key in required:
                return None
            if value is not None:
                name = quoted(compact(key) + ":")
                size = len((compact(key) + ":").encode())
                members[key] = self.rule(f"{name} {value.name}", size + value.whole, size + value.closing)
                if key in required:
                    self.required_keys[compact(key) + ":"] = None
        n, least = len(members), int(schema.get("minProperties", 0))
        most = int(schema.get("maxProperties", LARGEST_INTEGER))
        extra = self.extra_member(schema, path, depth, open_, members) if most > n else None
        if most < max(len(set(required)), least) or least > n and extra is None:
            return None
        if most == 0:
            return self.literals(["{}"])
        extra_most = min(max(self.bounds.max_items, least - n), most - n, 2**COUNT_BITS - 1) if extra else 0
        extra_least = max(0, least - n)
        if extra_least > extra_most:
            raise SchemaGrammarError(f"{path}: minProperties is {least}; at most {n + extra_most} can be written")
        many = n > MEMBER_BITS
        if many and (0 < least or most < n):
            self.relax(path, "minProperties" if 0 < least else "maxProperties", f"{n} properties are too many to count")
        end = "" if many or least <= len(set(required)) else f"bit_count_ge([0:{n}], {min(least, n)})"
        going_on = "" if many or most >= n else f"bit_count_lt([0:{n}], {most})"
        body = self.members([(rule, key in required) for key, rule in members.items()], end, going_on,
                            least == 0, extra, extra_least, extra_most)
        needed = 2 + sum(rule.whole + 1 for key, rule in members.items() if key in required)
        needed += sum(sorted((rule.whole + 1 for key, rule in members.items() if key not in required), reverse=True)
                      [:max(0, least - len(set(required)))])
        needed += extra_least * (extra.whole + 1) if extra else 0
        # The member that is being written may be one of those that are needed.
        inner = [rule.closing - (rule.whole + 1 if key in required else 0) for key, rule in members.items()]
        inner += [extra.closing] if extra else []
        return self.rule(f'"{{" {body} "}}"', needed, needed + max([0, *inner]))

    def extra_member(self, schema: dict, path: str, depth: int, open_: frozenset[str],
                     members: Mapping[str, _Rule]) -> _Rule | None:
        """A member whose key the schema does not name, None where there may be none."""
        patterns = schema.get("patternProperties", {})
        pairs = []
        for i, (pattern, item) in enumerate(patterns.items()):
            if i or any(matches(pattern, key) for key in members):
                self.relax(path, "patternProperties", "a key may match several of the patterns and names")
            key = self.string({"pattern": pattern, "maxLength": self.bounds.max_key_chars}, path)
            pairs.append((key, self.value(item, f"{path}/patternProperties/{pattern}", depth, open_)))
        more = schema.get("additionalProperties", not members and not patterns)
        if plain(more) is not False and not patterns:
            names = plain(schema.get("propertyNames", True))
            if names is True:
                key = self.other_key(list(members))
            else:
                names = merged(names, {"type": "string"}, self.noting(path))
                names = merged(names, {"maxLength": self.bounds.max_key_chars}, self.noting(path))
                key = self.value(names, f"{path}/propertyNames", depth, open_)
            pairs.append((key, self.value(more, f"{path}/additionalProperties", depth, open_)))
        return self.alternatives([
            self.rule(f'{key.name} ":" {value.name}', key.whole + 1 + value.whole,
                      key.closing + 1 + max(value.closing, value.whole))
            for key, value in pairs if key is not None and value is not None])

    def other_key(self, names: Sequence[str]) -> _Rule:
        text = rf'/"[^"\\\x00-\x1f\x7f]{{1,{self.bounds.max_key_chars}}}"/'
        if names:
            text += f" & ~({' | '.join(quoted(compact(name)) for name in names)})"
        return self.leaf(text, 3, 7)

    def members(self, members: Sequence[tuple[_Rule, bool]], end: str, going_on: str, may_be_empty: bool,
                extra: _Rule | None = None, extra_least: int = 0, extra_most: int = 0) -> str:
        """Body of a list of different members in any order, those marked True in each, and of further ones behind.

        Bit i of the rules' parameter says that member i was written. More members than bits come in groups, one group
        after the other. `end` and `going_on` are conditions for the end and for another member.
        """
        groups = [members[i:i + MEMBER_BITS] for i in range(0, len(members), MEMBER_BITS)]
        # What follows the last group: `rest` behind a member, `first` where there was none.
        rest = first = '""'
        if extra:
            more = self.name()
            self.rules.append(f'{more}::_: ""{condition(f"ge(_, {extra_least})" if extra_least else "")} | "," '
                              f'{extra.name} {more}::incr([0:{COUNT_BITS}]) %if lt(_, {extra_most})')
            rest, first = f"{more}::0x0", f"{extra.name} {more}::0x1"
            first = first if extra_least else f'"" | {first}'
        elif not may_be_empty:
            first = ""
        for group in reversed(groups):
            behind, before = self.name(), self.name()
            needed = [f"bit_set({i})" for i, (_, required) in enumerate(group) if required]
            steps = [f'{{comma}} {rule.name} {behind}::set_bit({i})' for i, (rule, _) in enumerate(group)]
            free = [condition(both([f"bit_clear({i})", going_on])) for i in range(len(group))]
            self.rules.append(f"{behind}::_: {rest}{condition(both([*needed, end]))}" + "".join(
                f" | {step.format(comma=chr(34) + ',' + chr(34))}{test}" for step, test in zip(steps, free)))
            started = [step.format(comma="").strip() for step in steps]
            if not needed and first:
                started.insert(0, first)
            self.rules.append(f"{before}::_: " + " | ".join(started))
            rest, first = f'{behind}::0x0', f"{before}::0x0"
        return f"({first})"

    # Free values.

    def anything(self, level: int) -> _Rule:
        """Any JSON value, nested as deep as the bounds allow."""
        if level not in self.free:
            scalars = [self.string({}, ""), self.number("number", {}, ""), self.literals(["true", "false", "null"])]
            if level < self.bounds.depth:
                inner, key, most = self.anything(level + 1), self.other_key(()), self.bounds.max_items - 1
                pair = self.rule(f'{key.name} ":" {inner.name}', 6, key.closing + 1 + inner.closing)
                for opening, item, closing in ("[", inner, "]"), ("{", pair, "}"):
                    scalars.append(self.rule(f'"{opening}" ({item.name} ("," {item.name}){{0,{most}}})? "{closing}"',
                                             2, 2 + item.closing))
            self.free[level] = self.alternatives(scalars)
        return self.free[level]

    # Rules.

    def name(self) -> str:
        if len(self.rules) > MOST_RULES:
            raise SchemaGrammarError(f"the schema needs more than {MOST_RULES} rules; make it smaller")
        self.n_names += 1
        return f"r{self.n_names}"

    def rule(self, body: str, whole: int, closing: int) -> _Rule:
        name = self.name()
        self.rules.append(f"{name}: {body}")
        return _Rule(name, whole, closing)

    def leaf(self, body: str, whole: int, closing: int) -> _Rule:
        """A terminal, written once however often it is used."""
        if body not in self.leaves:
            name = self.name().upper()
            self.rules.append(f"{name}: {body}")
            self.leaves[body] = _Rule(name, whole, closing)
        return self.leaves[body]

    def leaf_problem(self, schema: dict[str, Any]) -> str:
        """The engine's complaint about one value of this schema, "" for none."""
        return self.problem_of(f"start: {json_rule(schema)}\n")

    def json_leaf(self, schema: dict[str, Any], whole: int, closing: int) -> _Rule:
        body = json_rule(schema)
        if body not in self.leaves:
            self.leaves[body] = self.rule(body, whole, closing)
        return self.leaves[body]


def compact(value: Any) -> str:
    """JSON text of a value without white space, as it is written."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def quoted(text: str) -> str:
    """A literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Mapping[str, Any]) -> str:
    """The body of a rule that llguidance converts itself."""
    return "%json " + json.dumps({"x-guidance": JSON_OPTIONS, **schema})


def condition(test: str) -> str:
    return f" %if {test}" if test else ""


def both(tests: Sequence[str]) -> str:
    """The tests joined, "" for none. Conditions take two at a time."""
    tests = [test for test in tests if test]
    if len(tests) < 2:
        return tests[0] if tests else ""
    half = len(tests) // 2
    return f"and({both(tests[:half])}, {both(tests[half:])})"


def is_code(pattern: Any) -> bool:
    """Whether a pattern is of a whole string and names all its characters: no text is written into such a field."""
    if not isinstance(pattern, str) or not (pattern.startswith("^") and pattern.endswith("$")):
        return False
    return not re.search(r"\\[SWDpP]|\[\^|\.", re.sub(r"\\[^SWDpP]", "", pattern))


def matches(pattern: str, key: str) -> bool:
    """Whether a key matches a pattern of `patternProperties`; one that is no regular expression matches nothing."""
    try:
        return re.search(pattern, key) is not None
    except re.error:
        return False

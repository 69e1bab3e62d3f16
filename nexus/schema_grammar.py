"""A JSON schema as a grammar in which every text ends: members in any order, lengths bounded, compact.

The grammar is llguidance's dialect of Lark. Objects are written here, because llguidance's own conversion keeps
properties in the schema's order; strings and bounded numbers are left to it (`%json`). What cannot be expressed is
relaxed keyword by keyword and reported. Properties not in the schema are written only where `additionalProperties`
asks for them: an object that lists its properties is closed otherwise.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema.validators import Draft202012Validator

from nexus.grammar_rules import COUNT_BITS, MEMBER_BITS, Rule, Rules, SchemaGrammarError, compact, json_rule, quoted
from nexus.schema_forms import FORMS
from nexus.schema_merge import OF_TYPE, Schema, UnresolvedReference, disjoint, merged, plain, resolved, types_of

# Integers that every JSON reader keeps exactly.
LARGEST_INTEGER = 2**53 - 1
NUMBER = r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,9})?([eE][+-]?[0-9]{1,2})?/"
NUMBER_BYTES = 30
# What a pattern may ask for that needs more than our bound.
UNBOUNDED_CHARS = 4096
UNSUPPORTED = ("not", "if", "dependentRequired", "dependentSchemas", "dependencies", "contains", "$dynamicRef",
               "$recursiveRef")


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


def schema_grammar(schema: Mapping[str, Any] | bool, bounds: Bounds,
                   problem_of: Callable[[str], str]) -> SchemaGrammar:
    """The grammar of JSON objects that the schema allows.

    `problem_of` is the engine's complaint about a grammar, "" for none; it is asked about patterns, formats and steps.
    Raises SchemaGrammarError for a schema that no object satisfies, and one that is too large.
    """
    return _Writer(schema, bounds, problem_of).written()


class _Writer(Rules):
    def __init__(self, schema: Mapping[str, Any] | bool, bounds: Bounds, problem_of: Callable[[str], str]):
        super().__init__()
        self.root, self.bounds, self.problem_of = schema, bounds, problem_of
        self.relaxed: dict[tuple[str, str], Relaxation] = {}
        self.required_keys: dict[str, None] = {}
        self.references: dict[tuple[str, int], Rule | None] = {}
        self.free: dict[int, Rule] = {}

    def written(self) -> SchemaGrammar:
        rule = self.value({"allOf": [self.root, {"type": "object"}]}, "", 0, frozenset())
        if rule is None:
            raise SchemaGrammarError("the schema allows no object of bounded depth; check its required fields")
        return SchemaGrammar(self.text(rule), tuple(self.relaxed.values()), rule.closing, tuple(self.required_keys))

    # A value of any kind. None stands for a schema that nothing satisfies.

    def value(self, schema: Any, path: str, depth: int, open_: frozenset[str]) -> Rule | None:
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

    def reference(self, reference: str, path: str, depth: int, open_: frozenset[str]) -> Rule | None:
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
                            open_: frozenset[str]) -> Rule | None:
        rest = {key: item for key, item in schema.items() if key != keyword}
        branches = [merged(rest or True, part, self.noting(path)) for part in schema[keyword]]
        if keyword == "oneOf":
            heads = [self.flat(branch, path, depth, open_)[0] for branch in branches]
            if not disjoint(heads):
                self.relax(path, keyword, "its alternatives may overlap; any of them is written")
        return self.alternatives([self.value(branch, f"{path}/{keyword}/{i}", depth, open_)
                                  for i, branch in enumerate(branches)])

    def listed(self, schema: dict[str, Any], path: str) -> Rule | None:
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

    # One type.

    def typed(self, name: str, schema: dict, path: str, depth: int, open_: frozenset[str]) -> Rule | None:
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

    def string(self, schema: dict, path: str) -> Rule | None:
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

    def number(self, name: str, schema: dict, path: str) -> Rule | None:
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

    def array(self, schema: dict, path: str, depth: int, open_: frozenset[str]) -> Rule | None:
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
                     open_: frozenset[str]) -> Rule | None:
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

    def object(self, schema: dict, path: str, depth: int, open_: frozenset[str]) -> Rule | None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        patterns = schema.get("patternProperties", {})
        members: dict[str, Rule] = {}
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
                     members: Mapping[str, Rule]) -> Rule | None:
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

    def other_key(self, names: Sequence[str]) -> Rule:
        text = rf'/"[^"\\\x00-\x1f\x7f]{{1,{self.bounds.max_key_chars}}}"/'
        if names:
            text += f" & ~({' | '.join(quoted(compact(name)) for name in names)})"
        return self.leaf(text, 3, 7)

    def leaf_problem(self, schema: dict[str, Any]) -> str:
        """The engine's complaint about one value of this schema, "" for none."""
        return self.problem_of(f"start: {json_rule(schema)}\n")

    # Free values.

    def anything(self, level: int) -> Rule:
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

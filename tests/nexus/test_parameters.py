"""Any JSON schema as named, typed parameters."""
from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from nexus.parameters import (
    MOST_DEPTH, NULL, UNREAD, Array, Literal, Object, Parameter, Plain, json_type, parameters_of, quoted)

STRING, INTEGER = Plain("string"), Plain("integer")


def only(schema) -> Parameter:
    """The one parameter `p` of this schema."""
    far = {"type": "string", "description": "far"}
    members = parameters_of({"properties": {"p": schema}, "$defs": {"A": far}}).members
    assert [member.name for member in members] == ["p"]
    return members[0]


def test_order_is_the_schemas_with_names_that_are_only_required_behind():
    found = parameters_of({"properties": {"b": {}, "a": {}}, "required": ["z", "a", "y"]})
    assert found == Object((Parameter("b", False, ()), Parameter("a", True, ()), Parameter("z", True, ()),
                            Parameter("y", True, ())))


@pytest.mark.parametrize("schema, description", [
    ({"description": "near"}, "near"), ({"$ref": "#/$defs/A"}, "far"),
    ({"$ref": "#/$defs/A", "description": "near"}, "near"), ({"title": "Title"}, "Title"),
    ({"description": " ", "title": "Title"}, "Title"), ({"type": "array", "items": {"description": "each"}}, "each"),
    ({"description": 3}, ""), ({}, "")])
def test_description(schema, description):
    assert only(schema).description == description


@pytest.mark.parametrize("default, text, untold", [
    (30, "30", ()), ("a\n", r'"a\n"', ()), (False, "false", ()), (0, "0", ()), (None, None, ()), ("", None, ()),
    ([], None, ()), ([1], None, ("default",)), ({"a": 1}, None, ("default",)), ("x" * 40, None, ("default",))])
def test_default(default, text, untold):
    parameter = only({"default": default})
    assert (parameter.default, parameter.untold) == (text, untold)


@pytest.mark.parametrize("schema, hint, untold", [
    ({"minimum": 1, "maximum": 9}, "1..9", ()), ({"minimum": 1}, ">=1", ()), ({"exclusiveMinimum": 1}, ">1", ()),
    ({"minimum": 1, "exclusiveMinimum": True, "maximum": 9}, ">1 <=9", ()), ({"maximum": 9.5}, "<=9.5", ()),
    ({"minimum": -2**53}, "", ("minimum",)), ({"minimum": "1", "multipleOf": 2}, "", ("multipleOf", "minimum"))])
def test_bounds(schema, hint, untold):
    parameter = only({"type": "number", **schema})
    assert (parameter.kind, parameter.untold) == ((Plain("number", hint),), untold)


@pytest.mark.parametrize("form, hint", [("date-time", "date-time"), ("a b", ""), ("x)\n", ""), (5, ""), ("y" * 30, "")])
def test_format(form, hint):
    assert only({"type": "string", "format": form}).kind == (Plain("string", hint),)


@pytest.mark.parametrize("schema, kind", [
    ({"type": "integer", "enum": [1, "a", 2.0, True, None]}, (Literal(1), Literal(2.0))),
    ({"type": "string", "nullable": True, "enum": ["a"]}, (Literal("a"), NULL)),
    ({"type": ["string", "null"], "enum": ["a", None, 1]}, (Literal("a"), NULL)),
    ({"enum": [1, True, 1.0, "1"]}, (Literal(1), Literal(True), Literal(1.0), Literal("1"))),
    ({"allOf": [{"enum": ["a", "b", "c"]}, {"enum": ["c", "b"]}]}, (Literal("b"), Literal("c"))),
    ({"allOf": [{"type": "number"}, {"type": ["integer", "string"]}]}, (INTEGER,)),
    ({"type": "string", "anyOf": [{"minLength": 1}, {"maxLength": 3}]}, (STRING,)),
    ({"anyOf": [{"type": "string"}, {}]}, ()),
    ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/A"}]}]}, (STRING, INTEGER)),
    ({"type": "array", "items": {"type": ["integer", "string"]}}, (Array((INTEGER, STRING)),)),
    ({"allOf": [{"properties": {"a": {"type": "number"}}}, {"properties": {"a": {"type": "integer"}}}]},
     (Object((Parameter("a", False, (INTEGER,)),)),))])
def test_kind(schema, kind):
    found = only(schema).kind
    # 1, 1.0 and True are equal in Python.
    assert found == kind and repr(found) == repr(kind)


def test_shared_definition_is_no_recursion():
    base = {"type": "object", "properties": {"id": {"type": "integer"}}}
    schema = {"allOf": [{"$ref": "#/$defs/B"}, {"$ref": "#/$defs/C"}], "$defs": {
        "A": base, "B": {"allOf": [{"$ref": "#/$defs/A"}]}, "C": {"$ref": "#/$defs/A"}}}
    assert parameters_of(schema) == Object((Parameter("id", False, (INTEGER,)),))


def test_deep_objects_are_folded():
    schema = {"type": "object", "properties": {"end": {"type": "string"}}}
    for _ in range(50):
        schema = {"type": "object", "properties": {"a": schema}}
    found, depth = parameters_of(schema), 0
    while not found.folded:
        found, depth = found.members[0].kind[0], depth + 1
    assert depth == MOST_DEPTH + 1


@pytest.mark.parametrize("key", ["allOf", "anyOf", "not", "items"])
def test_long_chains_end(key):
    schema = {"type": "string"}
    for _ in range(400):
        schema = {key: schema if key in ("not", "items") else [schema, schema]}
    a, b = parameters_of({"properties": {"a": schema, "b": {"type": "integer"}}}).members
    assert b == Parameter("b", False, (INTEGER,)) and (UNREAD in a.untold or key == "not")


@pytest.mark.parametrize("ref", ["#/nowhere", "other.json", "#name", "https://example.org/schema#/x"])
def test_reference_to_nothing_is_told(ref):
    assert only({"$ref": ref}) == Parameter("p", False, (), untold=("$ref",))


def test_quoted_has_no_line_break_and_reads_back():
    text = "a\n\x00\x7f\x85\u2028\u2029\ud800\"\\名"
    assert len(quoted(text).splitlines()) == 1 and json.loads(quoted(text)) == text
    assert quoted(text).encode()


@pytest.mark.parametrize("value, name", [(None, "null"), (True, "boolean"), (1, "integer"), (1.0, "number"),
                                         ("", "string"), ({}, "object"), ([], "array")])
def test_json_type(value, name):
    assert json_type(value) == name


class Instances:
    """Small schemas without a mistake, and values that often fit them, from a seed."""

    SCALARS = (None, True, 0, 1, 1.0, 2.5, "", "a", "b")

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def value(self, depth: int = 3):
        if depth == 0 or self.random.random() < 0.4:
            return self.random.choice(self.SCALARS)
        n = self.random.randrange(3)
        if self.random.random() < 0.3:
            return [self.value(depth - 1) for _ in range(n)]
        return {self.random.choice("abc"): self.value(depth - 1) for _ in range(n)}

    def schema(self, depth: int = 3) -> dict:
        some = lambda: [self.schema(depth - 1) for _ in range(self.random.randrange(1, 3))]
        makers = {"type": lambda: self.random.sample(["string", "integer", "number", "boolean", "object", "array",
                                                      "null"], self.random.randrange(1, 4)),
                  "enum": lambda: [self.value(1) for _ in range(4)], "$ref": lambda: self.random.choice(
                      ["#/$defs/A", "#/$defs/B", "#"])}
        if depth:
            makers |= {"anyOf": some, "oneOf": some, "allOf": some, "items": lambda: self.schema(depth - 1),
                       "prefixItems": some, "additionalProperties": lambda: self.schema(depth - 1),
                       "properties": lambda: {name: self.schema(depth - 1)
                                              for name in "abc"[:self.random.randrange(4)]},
                       "required": lambda: [self.random.choice("abc")]}
        # Of an untyped schema, the type is guessed from its keywords: that may be narrower.
        return {key: makers[key]() for key in {"type", *self.random.sample(sorted(makers), 1)}}


def allows(kind: tuple, value) -> bool:
    if kind == ():
        return True
    return any(_allows(alternative, value) for alternative in kind)


def _allows(alternative, value) -> bool:
    match alternative:
        case Plain(name):
            whole = isinstance(value, float) and value.is_integer()
            return json_type(value) == name or name == "number" and json_type(value) == "integer" or (
                name == "integer" and whole)
        case Literal(legal):
            return legal == value and isinstance(legal, bool) == isinstance(value, bool)
        case Array(item, first):
            return isinstance(value, list) and all(
                allows(first[index] if index < len(first) else item, each) for index, each in enumerate(value))
        case Object(members, rest):
            named = {member.name: member for member in members}
            return isinstance(value, dict) and all(
                allows(named[name].kind, each) if name in named else rest is None or allows(rest, each)
                for name, each in value.items()) and all(member.name in value for member in members if member.required)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**63))
def test_never_narrower_than_the_schema(seed):
    """Whatever jsonschema accepts, the types allow: members that must be given, legal values, alternatives."""
    made = Instances(seed)
    schema = {"type": "object", "properties": {"a": made.schema(), "b": made.schema()}, "required": ["a"],
              "$defs": {"A": made.schema(), "B": made.schema(1)}}
    found = parameters_of(schema)
    validator = Draft202012Validator(schema)
    for _ in range(30):
        value = {"a": made.value(), "b": made.value()}
        try:
            accepted = validator.is_valid(value)
        except RecursionError:
            # A definition of nothing but itself.
            return
        assert not accepted or _allows(found, value), value

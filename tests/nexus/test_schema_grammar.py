"""Schemas as grammars: what they take, what they leave out and report, and that lengths are bounded."""
from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import pytest

from nexus.arguments import problems_of
from nexus.constrain import ConstrainError
from nexus.schema_grammar import Bounds, SchemaGrammarError, is_code
from constraint_vocabulary import accepts, grammars

CASES = [json.loads(line)
         for line in Path(__file__).with_name("constraint_cases.jsonl").read_text("utf-8").splitlines()]
TREE = {"type": "object", "properties": {"name": {"type": "string"}, "children": {
    "type": "array", "items": {"$ref": "#"}}}, "required": ["name"], "additionalProperties": False}


@pytest.fixture(scope="module")
def compiler():
    return grammars()


def field(schema: object) -> dict:
    """An object whose only and required member `x` has this schema."""
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}


def relaxed(grammar) -> list[tuple[str, str]]:
    return [(item.path, item.keyword) for item in grammar.relaxed]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_shared_cases(compiler, case):
    grammar = compiler.compile(case["schema"])
    assert not grammar.relaxed
    for value in case["accept"]:
        assert accepts(grammar, value) and not problems_of(value, case["schema"]), value
    for value in case["reject"]:
        assert not accepts(grammar, value), value


def test_members_come_in_any_order_each_once(compiler):
    schema = {"type": "object", "properties": {key: {"type": "integer"} for key in "abc"}, "required": ["b"]}
    grammar = compiler.compile(schema)
    for n in (1, 2, 3):
        for keys in permutations("abc", n):
            assert accepts(grammar, dict.fromkeys(keys, 1)) == ("b" in keys), keys
    assert not accepts(grammar, '{"b":1,"b":2}') and not accepts(grammar, {})
    # An object that lists its members is closed.
    assert not accepts(grammar, {"b": 1, "d": 2})


def test_more_members_than_a_parameter_has_bits(compiler):
    keys = [f"k{i}" for i in range(130)]
    schema = {"type": "object", "properties": dict.fromkeys(keys, {"type": "null"}), "required": ["k3", "k70", "k129"]}
    grammar = compiler.compile(schema)
    assert not grammar.relaxed
    assert accepts(grammar, dict.fromkeys(keys)) and accepts(grammar, dict.fromkeys(["k3", "k70", "k129"]))
    assert accepts(grammar, dict.fromkeys(["k9", "k3", "k70", "k60", "k129", "k128"]))
    assert not accepts(grammar, dict.fromkeys(["k3", "k129"])) and not accepts(grammar, {})


@pytest.mark.parametrize("key", ["from", "filter-query", "$and", 'a"b', "a\\b", "new\nline", "漢字", "a/b#c", "x" * 45,
                                 ""])
def test_any_name_can_be_a_key(compiler, key):
    grammar = compiler.compile({"type": "object", "properties": {key: {"type": "boolean"}}, "required": [key]})
    assert accepts(grammar, {key: True}) and not accepts(grammar, {})


@pytest.mark.parametrize(("schema", "taken", "refused"), [
    ({"type": "integer", "exclusiveMinimum": 2, "maximum": 5}, [3, 5], [2, 6, 3.5]),
    ({"type": "integer", "minimum": 10**16}, [10**16], [5]),
    ({"type": "number", "minimum": 0, "maximum": 1}, [0, 0.25, 1], [-0.1, 1.5]),
    ({"type": "integer", "multipleOf": 5, "minimum": 1}, [5, 10], [0, 7]),
    ({"type": ["string", "null"]}, ["a", None], [1]),
    ({"enum": ["a", 1, None, {"k": [True]}]}, ["a", 1, None, {"k": [True]}], ["b", 2]),
    ({"enum": ["a", 1], "type": "string"}, ["a"], [1]),
    ({"const": 'say "hi"\n'}, ['say "hi"\n'], ["hi"]),
    ({"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False, "minItems": 1},
     [[None], [None, True]], [[], [True], [None, True, 1]]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, [[1, 2], [1, 2, 3]],
     [[1], [1] * 4]),
    ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}, [[], ["c", "a"]], [["a", "a"]]),
    ({"type": "object"}, [{}, {"k": [1, {"z": None}]}], [[], {"": 1}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
     [{}, {"a": 1, "b": 2}], [{"a": "x"}, {"a": 1, "b": 2, "c": 3}]),
    ({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
     [{"a": None, "b": 2}, {"b": 2}], [{"a": 2}, {"b": None}]),
    ({"type": "object", "properties": {"a": True, "b": True, "c": True}, "minProperties": 2},
     [{"a": 1, "c": 2}], [{}, {"a": 1}]),
    ({"type": "object", "patternProperties": {"^n_": {"type": "integer"}}}, [{"n_a": 1}, {}], [{"a": 1}, {"n_a": "x"}]),
    ({"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}, [{"a": 1}], [{"A": 1}, {"ab": 1}]),
    ({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}},
                {"required": ["a"], "properties": {"b": {"type": "null"}}}]}, [{"b": None, "a": 1}, {"a": 1}], [{}]),
    ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object",
      "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}, [{"a": None}, {"b": None, "a": None}], [{}]),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [None]),
    ({"$ref": "#/$defs/missing", "type": "string"}, ["a"], [1]),
    (True, [1, "a", None, [[]], {"k": {}}], []),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é漢b"], ["a", "abcd"]),
])
def test_keywords(compiler, schema, taken, refused):
    grammar = compiler.compile(field(schema))
    for value in taken:
        assert accepts(grammar, {"x": value}), value
    for value in refused:
        assert not accepts(grammar, {"x": value}), value


def test_only_compact_text_without_control_characters_is_written(compiler):
    grammar = compiler.compile(field({"type": "string"}))
    assert accepts(grammar, '{"x":"a\\nb\\"\\\\"}')
    for text in '{"x": "a"}', '{"x":"a\nb"}', '{"x":"\\ud800"}', ' {"x":"a"}', '{"x":"a"} ':
        assert not accepts(grammar, text), text


def test_recursion_ends(compiler):
    grammar = compiler.compile(TREE)
    value = {"name": "d"}
    for _ in range(Bounds().depth):
        assert accepts(grammar, value)
        value = {"name": "c", "children": [value]}
    deeper = {"name": "a", "children": [{"name": "b", "children": [value]}]}
    assert not accepts(grammar, deeper) and accepts(grammar, {"name": "leaf", "children": []})


def test_lengths_are_bounded_and_the_schemas_own_limits_win():
    compiler = grammars(max_string_chars=8, max_items=2)
    text = compiler.compile(field({"type": "string"}))
    assert accepts(text, {"x": "a" * 8}) and not accepts(text, {"x": "a" * 9})
    assert accepts(compiler.compile(field({"type": "string", "minLength": 12})), {"x": "a" * 12})
    assert not accepts(compiler.compile(field({"type": "string", "maxLength": 4})), {"x": "a" * 5})
    items = compiler.compile(field({"type": "array", "items": {"type": "null"}}))
    assert accepts(items, {"x": [None] * 2}) and not accepts(items, {"x": [None] * 3})
    assert accepts(compiler.compile(field({"type": "array", "minItems": 4})), {"x": [1] * 4})
    free = compiler.compile({"type": "object"})
    assert accepts(free, {"a": 1, "b": 2}) and not accepts(free, {"a": 1, "b": 2, "c": 3})
    numbers = compiler.compile(field({"type": "number"}))
    assert accepts(numbers, {"x": -12.5e3}) and not accepts(numbers, '{"x":' + "1" * 40 + "}")
    assert not accepts(numbers, '{"x":0.' + "1" * 40 + "}")
    assert not accepts(compiler.compile(field({"type": "number", "minimum": 0})), '{"x":0.' + "1" * 40 + "}")


@pytest.mark.parametrize(("schema", "keyword"), [
    ({"type": "string", "not": {"const": "a"}}, "not"),
    ({"type": "string", "pattern": "^(?!a)b"}, "pattern"),
    ({"type": "string", "pattern": "("}, "pattern"),
    ({"type": "string", "format": "made-up"}, "format"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"const": 1}}, "contains"),
    ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
    ({"$ref": "https://example.org/schema.json"}, "$ref"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
])
def test_what_has_no_grammar_is_relaxed_in_its_field_alone(compiler, schema, keyword):
    strict = {"type": "integer", "minimum": 1, "maximum": 3}
    whole = {"type": "object", "properties": {"x": schema, "y": strict}, "required": ["x", "y"]}
    grammar = compiler.compile(whole)
    assert relaxed(grammar) == [("/properties/x", keyword)] and grammar.relaxed[0].reason
    assert not any(accepts(grammar, {"x": value, "y": 4}) for value in ("b", [1], {}, 1))
    assert any(accepts(grammar, {"x": value, "y": 2}) for value in ("b", [1], {}, 1))


def test_of_pattern_and_format_only_the_broken_one_is_dropped(compiler):
    grammar = compiler.compile(field({"type": "string", "format": "made-up", "pattern": "^b+$"}))
    assert relaxed(grammar) == [("/properties/x", "format")]
    assert accepts(grammar, {"x": "bb"}) and not accepts(grammar, {"x": "a"})


@pytest.mark.parametrize("schema", [False, {"type": "string"}, field(False), field({"enum": []}),
                                    {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
                                    field({"type": "string", "minLength": 3, "maxLength": 2})])
def test_a_schema_without_objects_is_refused(compiler, schema):
    with pytest.raises(ConstrainError, match="allows no object"):
        compiler.compile(schema)


def test_patterns_of_codes_and_of_texts():
    assert all(map(is_code, [r"^[A-Z][A-Z0-9_]+-\d+$", r"^\d{2,4}$", r"^\w+\.\w+$"]))
    assert not any(map(is_code, [r"\S", r"^https?://.*$", r"^[^/]+$", r"^\S+$", r"^[a-z]+", None]))


def test_bounds_must_leave_something():
    with pytest.raises(SchemaGrammarError, match="max_items is 0"):
        Bounds(max_items=0)

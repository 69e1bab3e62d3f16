"""Several schemas that hold at once, made one."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from nexus.schema_merge import UnresolvedReference, disjoint, merged, plain, resolved, same, types_of


def test_what_allows_everything_or_nothing_is_a_boolean():
    assert plain({}) is True and plain({"description": "any", "$schema": "x", "x-order": 1}) is True
    assert plain({"not": {}}) is False and plain({"not": True, "type": "string"}) is False
    assert plain({"not": False, "type": "string"}) == {"type": "string"}
    assert plain(False) is False


def test_older_drafts_are_read_as_the_newest():
    assert plain({"minimum": 3, "exclusiveMinimum": True}) == {"exclusiveMinimum": 3}
    assert plain({"maximum": 3, "exclusiveMaximum": False}) == {"maximum": 3}
    assert plain({"items": [{"type": "null"}], "additionalItems": False}) == {
        "prefixItems": [{"type": "null"}], "items": False}
    assert plain({"const": 1, "enum": [1, True]}) == {"enum": [1]}


def test_a_keyword_of_one_type_names_the_type():
    assert types_of({"properties": {}}) == ["object"] and types_of({"format": "ipv4"}) == ["string"]
    assert types_of({"type": ["null", "integer"]}) == ["null", "integer"]
    assert set(types_of({"$ref": "#"})) == {"object", "array", "string", "number", "boolean", "null"}


def test_references_are_found_by_pointer_and_anchor():
    root = {"$defs": {"a/b": {"type": "null"}, "c": {"$anchor": "here", "type": "string"}},
            "anyOf": [{"id": "#old", "type": "array"}]}
    assert resolved(root, "#/$defs/a~1b") == {"type": "null"} and resolved(root, "#/anyOf/0")["type"] == "array"
    assert resolved(root, "#here")["type"] == "string" and resolved(root, "#old")["type"] == "array"
    assert resolved(root, "#") is root
    for reference, what in ("#/$defs/z", "no 'z'"), ("#gone", "anchor"), ("other.json#/x", "out of the schema"):
        with pytest.raises(UnresolvedReference, match=what):
            resolved(root, reference)


def test_true_is_not_one():
    assert not same(True, 1) and not same([0], [False]) and same({"a": [1.0]}, {"a": [1]})


def test_alternatives_are_told_apart_by_type_and_by_listed_values():
    assert disjoint([{"type": "string"}, {"type": "null"}, {"type": "integer"}])
    assert not disjoint([{"type": "integer"}, {"type": "number"}])
    tagged = [{"type": "object", "required": ["kind"], "properties": {"kind": {"const": name}}} for name in "ab"]
    assert disjoint(tagged) and not disjoint([*tagged, {"type": "object"}])


def test_what_cannot_be_merged_is_told():
    told = []
    both = merged({"pattern": "a"}, {"pattern": "b"}, lambda *note: told.append(note))
    assert both == {"pattern": "a"} and told[0][0] == "pattern"


def test_a_closed_object_takes_no_members_of_the_other():
    both = merged({"type": "object", "properties": {"a": {}}, "additionalProperties": False},
                  {"type": "object", "properties": {"b": {"type": "null"}}}, pytest.fail)
    assert both["additionalProperties"] is False
    assert plain(both["properties"]["b"])["allOf"] == [{"type": "null"}, False] or False in \
        both["properties"]["b"]["allOf"]


values = st.one_of(st.none(), st.booleans(), st.integers(-3, 6), st.sampled_from(["", "a", "ab", "abc"]),
                   st.lists(st.integers(0, 2), max_size=3),
                   st.dictionaries(st.sampled_from("ab"), st.integers(0, 3), max_size=2))
small = st.fixed_dictionaries({}, optional={
    "type": st.sampled_from(["string", "integer", "number", "object", "array", ["integer", "null"]]),
    "minimum": st.integers(-2, 3), "maximum": st.integers(0, 5), "minLength": st.integers(0, 2),
    "maxLength": st.integers(1, 3), "minItems": st.integers(0, 2),
    "required": st.lists(st.sampled_from("ab"), unique=True),
    "enum": st.lists(values, min_size=1, max_size=4), "items": st.sampled_from([True, {"maximum": 1}]),
    "properties": st.dictionaries(st.sampled_from("ab"), st.sampled_from([True, False, {"maximum": 2}])),
    "additionalProperties": st.sampled_from([True, False, {"minimum": 1}])})


@given(small, small, values)
def test_a_merged_schema_allows_what_both_allow(a, b, value):
    told = []
    both = merged(a, b, lambda *note: told.append(note))
    expected = Draft202012Validator(a).is_valid(value) and Draft202012Validator(b).is_valid(value)
    assert not told and Draft202012Validator(both).is_valid(value) == expected

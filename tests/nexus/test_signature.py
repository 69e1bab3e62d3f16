"""The compressed signature of any schema."""
from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexus.parameters import Array, Literal, Object, parameters_of
from nexus.registry import Tool, tool_text
from nexus.signature import (
    information_missing, rough_tokens, shortened, signature_of, signature_statistics, spelled)
from nexus.signature_reading import read_signature

TREE = {"type": "object", "properties": {"value": {"type": "string"}, "kids": {"type": "array", "items": {
    "$ref": "#/$defs/Tree"}}}, "required": ["value"]}


def tool(schema: dict, description: str = "", name: str = "f") -> Tool:
    return Tool(None, name, description, schema)


def properties(required: list[str] | None = None, **schemas) -> dict:
    return {"type": "object", "properties": schemas, "required": required or []}


@pytest.mark.parametrize("schema, line", [
    # No arguments, or any.
    ({}, "f()"),
    ({"$schema": "http://json-schema.org/draft-07/schema#"}, "f()"),
    ({"type": "object"}, "f()"),
    ({"type": "object", "properties": {}, "additionalProperties": False}, "f()"),
    ({"type": "object", "additionalProperties": True}, "f([key: string])"),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, "f([key: string]: integer)"),
    ({"patternProperties": {"^x-": {"type": "string"}}}, "f([key: string]: string)"),
    # What may be left out; types.
    (properties(["name"], name={"type": "string"}, private={"type": "boolean"}), "f(name: string, private?: boolean)"),
    (properties(["z"], a=True, b=False, c={}), "f(a?, c?, z)"),
    (properties(n={"type": ["integer", "null"]}, m={"type": "number", "nullable": True}),
     "f(n?: integer|null, m?: number|null)"),
    (properties(n={"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}), "f(n?: integer)"),
    (properties(["n"], n={"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}), "f(n: integer|null)"),
    (properties(p={"anyOf": [{"not": {}}, {"type": "string"}]}, q={"not": {}}), "f(p?: string)"),
    (properties(p={"pattern": "^a"}, q={"minItems": 1}, r={"maximum": 2**53}), "f(p?: string, q?: array, r?: number)"),
    # Legal values.
    (properties(["s"], s={"type": "string", "enum": ["open", "6\"", "a\\b"]}), r'f(s: "open"|"6\""|"a\\b")'),
    (properties(s={"enum": [1, True, None, "x", 1.5]}, t={"const": "on"}), 'f(s?: 1|true|null|"x"|1.5, t?: "on")'),
    (properties(s={"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}]}), 'f(s?: "a"|"b")'),
    (properties(s={"enum": [{"k": [1, "x"]}, []]}), 'f(s?: {k: [1, "x"]}|array)'),
    (properties(s={"type": "array", "items": {"enum": ["a", "b"]}}), 'f(s?: ("a"|"b")[])'),
    # Formats, bounds, defaults.
    (properties(d={"type": "string", "format": "date-time"}, n={"type": "integer", "minimum": 1, "maximum": 100,
                                                               "default": 30}),
     "f(d?: string(date-time), n?: integer(1..100) = 30)"),
    (properties(a={"type": "number", "exclusiveMinimum": 0}, b={"type": "number", "maximum": 5,
                                                                "exclusiveMaximum": True}),
     "f(a?: number(>0), b?: number(<5))"),
    (properties(ip={"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}), "f(ip?: string(ipv4)|string(ipv6))"),
    (properties(a={"type": "string", "default": ""}, b={"type": "boolean", "default": False}),
     "f(a?: string, b?: boolean = false)"),
    # Objects and arrays.
    (properties(["o"], o=properties(["a"], a={"type": "string"}, b={"type": "integer"})),
     "f(o: {a: string, b?: integer})"),
    (properties(o={"type": "object"}, m={"additionalProperties": {"type": "string"}}),
     "f(o?: object, m?: {[key: string]: string})"),
    (properties(a={"type": "array"}, b={"type": "array", "items": {"type": "array", "items": {"type": "string"}}}),
     "f(a?: array, b?: string[][])"),
    (properties(t={"type": "array", "items": [{"type": "string"}, {}], "additionalItems": {"type": "integer"}}),
     "f(t?: [string, any, ...integer[]])"),
    (properties(t={"type": "array", "prefixItems": [{"type": "string"}, {"type": "null"}], "items": False}),
     "f(t?: [string, null])"),
    (properties(u={"items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}), "f(u?: (string|integer)[])"),
    # References, also ones that lead nowhere, in circles, or out of the schema.
    ({"properties": {"who": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"enum": ["Ann", "Bob"]}}}, 'f(who?: "Ann"|"Bob")'),
    ({"properties": {"a": {"type": "string"}, "b": {"$ref": "#/properties/a"}}}, "f(a?: string, b?: string)"),
    ({"properties": {"a": {"$ref": "#/definitions/x~1y%20z"}}, "definitions": {"x/y z": {"type": "integer"}}},
     "f(a?: integer)"),
    ({"properties": {"a": {"$ref": "#thing"}}, "$defs": {"T": {"$anchor": "thing", "type": "integer"}}},
     "f(a?: integer)"),
    ({"properties": {"root": {"$ref": "#/$defs/Tree"}}, "$defs": {"Tree": TREE}},
     "f(root?: {value: string, kids?: object[]})"),
    ({"type": "object", "properties": {"again": {"$ref": "#"}}}, "f(again?: object)"),
    ({"properties": {"a": {"$ref": "#/properties/a"}, "b": {"$ref": "#/nowhere"}, "c": {"$ref": "https://e.org/x"}}},
     "f(a?, b?, c?)"),
    ({"$ref": "#/$defs/All", "$defs": {"All": properties(["x"], x={"type": "string"})}}, "f(x: string)"),
    ({"$ref": "#"}, "f()"),
    # Both, either, one of.
    ({"allOf": [properties(["a"], a={"type": "string"}), properties(["b"], b={"type": "integer"})]},
     "f(a: string, b: integer)"),
    (properties(d={"allOf": [{"type": ["string", "integer"]}, {"type": "string", "format": "date"}]}),
     "f(d?: string(date))"),
    (properties(n={"allOf": [{"type": "number"}, {"type": "integer"}]}), "f(n?: integer)"),
    ({"anyOf": [properties(["a"], a={"type": "string"}), properties(["b"], b={"type": "integer"})]},
     "f(a?: string, b?: integer) // needs a or b"),
    ({"type": "object", "properties": {"id": {"type": "integer"}, "url": {"type": "string"}},
      "oneOf": [{"required": ["id"]}, {"required": ["url"]}]}, "f(id?: integer, url?: string) // needs id or url"),
    ({"oneOf": [properties(["k", "a"], k={"const": 1}, a={}), properties(["k", "b"], k={"const": 2}, b={})]},
     "f(k: 1|2, a?, b?) // needs a or b"),
    ({"properties": {"a": {"type": "string"}}, "if": {"required": ["a"]}, "then": properties(b={"type": "integer"})},
     "f(a?: string, b?: integer)"),
    (properties(s={"anyOf": [{"type": "string"}, properties(["a"], a={"type": "string"}), {"type": "string"}]}),
     "f(s?: string|{a: string})"),
    # Names.
    (properties(["from"], **{"from": {}, "filter-query": {}, "$and": {}, "名称": {}, "a b?": {}, "": {}, "2nd": {}}),
     'f(from, "filter-query"?, "$and"?, 名称?, "a b?"?, ""?, "2nd"?)'),
    (properties(**{"a\nb\u2028\x85": {"enum": ["\u2029"]}}), r'f("a\nb\u2028\u0085"?: "\u2029")'),
    # What is no schema.
    ({"properties": 5, "required": "x", "anyOf": 7, "type": "string"}, "f()"),
    ({"properties": {"a": 3, "b": {"type": 7, "enum": "x", "items": 1, "$ref": 4, "description": 9}}},
     "f(a?, b?: array)"),
])
def test_line(schema, line):
    assert signature_of(tool(schema)).text == line


@pytest.mark.parametrize("description, line", [
    ("Open an issue.", "f() // Open an issue"),
    ("", "f()"),
    (" \n\t", "f()"),
    ("Opens\nan\r\nissue */ now. Then more.", "f() // Opens an issue * / now"),
    ("Uses e.g. a hub.\n\nArgs:\n  none", "f() // Uses e.g. a hub"),
    ("イシューを作る。詳しくは別紙。", "f() // イシューを作る"),
    ("F", "f()"),
])
def test_tool_description(description, line):
    assert signature_of(tool({}, description)).text == line


@pytest.mark.parametrize("name, start", [("a" * 45, "a" * 45 + "("), ("hub/list-issues", "hub/list-issues("),
                                         ("検索", "検索("), ("two words", '"two words"('), ("a\nb", r'"a\nb"(')])
def test_tool_name(name, start):
    assert signature_of(tool({}, name=name)).text.startswith(start)


@pytest.mark.parametrize("text, limit, short, whole", [
    ("Repository owner", 80, "Repository owner", True),
    ("(Optional) The name of the branch.", 80, "name of the branch", True),
    ("Optionally, a title", 80, "title", True),
    ("Issue keys, comma-separated (e.g., 'AB-1')", 80, "Issue keys, comma-separated (e.g., 'AB-1')", True),
    ("Name of the branch. Defaults to the main branch of the repository", 40, "Name of the branch", False),
    ("Number of the build, if not given, the last one is used", 30, "Number of the build", False),
    ("What to do with it: keep, drop, move, copy", 30, "What to do with it", False),
    ("State to look for: 'open', 'closed', 'all'", 36, "State to look for: 'open', 'closed'", False),
    ("A number of the page (which begins at zero)", 30, "number of the page", False),
    ("Which of all the branches that the repository has", 30, "Which of all the branches", False),
    ("Gets an old version of a specific page of a wiki", 36, "Gets an old version", False),
    ("名" * 20, 30, "名" * 10, False),
    ("x" * 50, 30, "x" * 30, False),
    ("a\u202e\x00b\u200bc", 80, "abc", True),
])
def test_shortened(text, limit, short, whole):
    assert shortened(text, limit) == (short, whole)


WIDE = properties(
    ["owner", "state"],
    owner={"type": "string", "description": "Who the repository belongs to"},
    state={"enum": [f"state {n}" for n in range(9)], "description": "Where the work is"},
    since={"type": "string", "format": "date-time", "description": "Only later ones, such as '2020-01-01'"},
    page={"type": "integer", "minimum": 1, "default": 7, "description": "Which part of them"},
    scope={"type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "deep": {"type": "boolean"}},
           "required": ["kind"]})
WIDE_NOTE = "Lists what has to be done"
ORDER = [
    'f(owner: string /* Who the repository belongs to */, state: {states} /* Where the work is */, since?: '
    "string(date-time) /* Only later ones, such as '2020-01-01' */, page?: integer(>=1) = 7 /* Which part of them */, "
    'scope?: {kind: "a"|"b", deep?: boolean}) // Lists what has to be done',
    # Defaults and bounds.
    'f(owner: string /* Who the repository belongs to */, state: {states} /* Where the work is */, since?: '
    "string(date-time) /* Only later ones, such as '2020-01-01' */, page?: integer /* Which part of them */, "
    'scope?: {kind: "a"|"b", deep?: boolean}) // Lists what has to be done',
    # Descriptions of what is optional, an example last.
    'f(owner: string /* Who the repository belongs to */, state: {states} /* Where the work is */, since?: '
    "string(date-time) /* Only later ones */, page?: integer, "
    'scope?: {kind: "a"|"b", deep?: boolean}) // Lists what has to be done',
    'f(owner: string /* Who the repository belongs to */, state: {states} /* Where the work is */, since?: '
    'string(date-time), page?: integer, scope?: {kind: "a"|"b", deep?: boolean}) // Lists what has to be done',
    # The tool's description, descriptions of what is required.
    'f(owner: string /* Who the repository belongs to */, state: {states} /* Where the work is */, since?: '
    'string(date-time), page?: integer, scope?: {kind: "a"|"b", deep?: boolean})',
    'f(owner: string, state: {states}, since?: string(date-time), page?: integer, scope?: {kind: "a"|"b", '
    'deep?: boolean})',
    # Optional members.
    'f(owner: string, state: {states}, since?: string(date-time), page?: integer, scope?: {kind: "a"|"b", ...})',
    # Formats, lists of values, members, optional parameters.
    'f(owner: string, state: {states}, since?: string, page?: integer, scope?: {kind: "a"|"b", ...})',
    'f(owner: string, state: {few}, since?: string, page?: integer, scope?: {kind: "a"|"b", ...})',
    'f(owner: string, state: {few}, since?: string, page?: integer, scope?: {kind: string, ...})',
    'f(owner: string, state: {few}, since?: string, page?: integer, scope?: object)',
    'f(owner: string, state: {few}, since?: string, page?: integer, ...)',
    'f(owner: string, state: {few}, since?: string, ...)',
    'f(owner: string, state: {few}, ...)',
    # Values of what is required.
    'f(owner: string, state: string, ...)',
]
STATES = [f'"state {n}"' for n in range(9)]
LINES = [line.replace("{states}", "|".join(STATES)).replace("{few}", "|".join(STATES[:4]) + "|...") for line in ORDER]


@pytest.mark.parametrize("line", LINES)
def test_cuts_in_the_stated_order(line):
    """A budget of exactly its length makes each line: no earlier cut is enough, and no later one is made."""
    assert signature_of(tool(WIDE, WIDE_NOTE), len(line), len).text == line


def test_budget_of_one_makes_the_shortest_line_and_none_the_longest():
    wide = tool(WIDE, WIDE_NOTE)
    assert (signature_of(wide, None, len).text, signature_of(wide, 1, len).text) == (LINES[0], LINES[-1])


@pytest.mark.parametrize("described_tokens, line", [
    (1, LINES[5]), (len(LINES[5]), LINES[5]), (len(LINES[4]), LINES[4]), (len(LINES[0]), LINES[0]), (None, LINES[0])])
def test_descriptions_have_a_budget_of_their_own(described_tokens, line):
    wide = tool(WIDE, WIDE_NOTE)
    assert signature_of(wide, None, len, described_tokens=described_tokens).text == line
    assert signature_of(wide, 1, len, described_tokens=described_tokens).text == LINES[-1]


def test_cut_says_what_is_gone():
    wide = tool(WIDE, WIDE_NOTE)
    assert signature_of(wide, None, len).cut == ()
    assert signature_of(wide, 1, len).cut == (
        "owner: description", "state: 0 of 9 values", "state: description", "since: parameter", "page: parameter",
        "scope: parameter", "(): description")
    long = tool({**properties(name={"type": "string", "pattern": "^a", "description": "word " * 40, "maxLength": 3,
                                    "default": "x" * 40}), "dependentRequired": {"a": ["b"]}})
    assert signature_of(long).cut == ("name: description shortened", "name: pattern", "name: maxLength",
                                      "name: default", "(): dependentRequired")


def test_description_that_only_repeats_names_counts_as_told():
    schema = properties(issueNumber={"type": "integer", "description": "The number of the issue"},
                        op={"enum": ["lock", "unlock"], "description": "Lock or unlock"})
    assert signature_of(tool(schema, "Locks issues", "lock_issue")) == signature_of(tool({**schema, "properties": {
        name: {key: value for key, value in item.items() if key != "description"}
        for name, item in schema["properties"].items()}}, "", "lock_issue"))


def test_exponential_references_are_bounded():
    levels = {f"L{n}": properties(**{side: {"$ref": f"#/$defs/L{n + 1}"} for side in "abcdefgh"}) for n in range(12)}
    schema = {**properties(["x", "y"], x={"$ref": "#/$defs/L0"}, y={"type": "string"}), "$defs": levels}
    text = signature_of(tool(schema), None, len).text
    assert len(text) <= len(tool_text(tool(schema))) and text.endswith("y: string)")


@pytest.mark.parametrize("budget", [0, -3])
def test_budget_below_one(budget):
    with pytest.raises(ValueError, match=f"max_tokens is {budget}"):
        signature_of(tool({}), budget)
    with pytest.raises(ValueError, match=f"described_tokens is {budget}"):
        signature_of(tool({}), described_tokens=budget)


class Schemas:
    """Schemas at random, well-formed or not, from a seed: faster than strategies in each other by two orders."""

    NAMES = ("from", "filter-query", "$and", "名称", "a", "b", "state", "[key: string]", "", "x y", "a\n", "*", "null")
    LETTERS = "ab Z_-.,;:!?(){}[]|/*\"\\\n\t\x00\x7f\u0085\u2028\u200b名🔥0'1'"
    TYPES = ("string", "integer", "number", "boolean", "object", "array", "null", "odd", ["string", "null"],
             ["object", "integer"], [], 5)
    REFS = ("#", "#/$defs/A", "#/$defs/B", "#/properties/a", "#/nowhere", "#a", "other.json", "#/required/0")

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def text(self, n: int = 60) -> str:
        return "".join(self.random.choices(self.LETTERS, k=self.random.randrange(n)))

    def name(self) -> str:
        return self.random.choice(self.NAMES) if self.random.random() < 0.8 else self.text(8)

    def value(self, depth: int = 2):
        pick = self.random.randrange(8 if depth else 6)
        return (None, self.random.random() < 0.5, self.random.randrange(-10**9, 10**9), self.random.uniform(-5, 5),
                self.text(6), self.name(), [], {})[pick] if pick < 6 else (
            [self.value(depth - 1) for _ in range(self.random.randrange(3))] if pick == 6 else
            {self.name(): self.value(depth - 1) for _ in range(self.random.randrange(3))})

    def schema(self, depth: int = 4):
        if depth == 0 or self.random.random() < 0.1:
            return self.random.choice([True, False, {}, 3, {"type": "string"}])
        mapping = lambda: {self.name(): self.schema(depth - 1) for _ in range(self.random.randrange(5))}
        several = lambda: [self.schema(depth - 1) for _ in range(self.random.randrange(4))]
        one = lambda: self.schema(depth - 1)
        makers = {
            "type": lambda: self.random.choice(self.TYPES), "properties": mapping,
            "required": lambda: [self.name() for _ in range(self.random.randrange(4))], "items": one,
            "prefixItems": several, "additionalProperties": one, "patternProperties": mapping, "anyOf": several,
            "oneOf": several, "allOf": several, "$ref": lambda: self.random.choice(self.REFS),
            "enum": lambda: [self.value() for _ in range(self.random.randrange(7))], "const": self.value,
            "default": self.value, "minimum": self.value, "exclusiveMaximum": self.value, "nullable": self.value,
            "format": self.text, "pattern": self.text, "description": self.text, "title": self.text, "not": one,
            "then": one, "$anchor": self.name}
        keys = self.random.sample(sorted(makers), self.random.randrange(1, 6))
        if self.random.random() < 0.5:
            keys += ["properties"]
        made = {key: makers[key]() for key in keys}
        return {key: self.value() if self.random.random() < 0.03 else value for key, value in made.items()}

    def tool(self) -> Tool:
        root = self.schema()
        root = root if isinstance(root, dict) else {}
        return Tool(None, self.name().strip() or "f", self.text(200), {
            **root, "$defs": {name: self.schema(3) for name in "AB"[:self.random.randrange(3)]}})


SEEDS = st.integers(0, 2**63)


def value_of(kind: tuple):
    """A value with all members that a type has, and two of each list."""
    match kind[-1] if kind else None:
        case Object(members, rest):
            more = {"a name of its own": value_of(rest)} if rest is not None else {}
            return {member.name: value_of(member.kind) for member in members} | more
        case Array(item, first):
            return [value_of(each) for each in (*first, item, item)]
        case Literal(value):
            return value
    return 5


def chunks(text: str) -> int:
    """Counts as a tokeniser might: runs of word characters by four, other characters one by one."""
    count, run = 0, 0
    for letter in text:
        run = run + 1 if letter.isalnum() else 0
        count += run % 4 == 1 or run == 0
    return count


@settings(max_examples=200, deadline=None)
@given(SEEDS, st.none() | st.integers(1, 80), st.sampled_from([None, len, chunks]))
def test_any_schema(seed, budget, count_tokens):
    tool = Schemas(seed).tool()
    signature = signature_of(tool, budget, count_tokens)
    text, count = signature.text, count_tokens or rough_tokens
    # One line without control characters, the same again.
    assert len(text.splitlines()) == 1 and not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in text)
    assert text.encode()
    assert signature_of(tool, budget, count_tokens) == signature
    # Never longer than the schema; within the budget, or nothing is left to cut.
    assert count(text) <= count(tool_text(tool))
    assert budget is None or count(text) <= budget or signature == signature_of(tool, 1, count_tokens)
    # Names that are required are told, and no others are made up; nothing is lost in silence.
    given, told = parameters_of(tool.input_schema), read_signature(text)
    told_names = [(parameter.name, parameter.required) for parameter in told.members]
    given_names = [(parameter.name, parameter.required) for parameter in given.members]
    assert [name for name in given_names if name in told_names] == told_names
    assert {name for name in given_names if name[1]} <= set(told_names)
    for parameter in given.members:
        if (parameter.name, parameter.required) not in told_names:
            assert f"{spelled(parameter.name)}: parameter" in signature.cut


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_uncut_signature_tells_everything(seed):
    """With a schema that is longer than any signature, all that a reader misses is what was folded."""
    tool = Schemas(seed).tool()
    arguments = {member.name: value_of(member.kind) for member in parameters_of(tool.input_schema).members}
    roomy = Tool(tool.server, tool.name, tool.description, {**tool.input_schema, "$comment": "x" * 100_000})
    missing = information_missing(roomy, signature_of(roomy), arguments)
    assert [line for line in missing if not line.endswith(": members")] == []


@pytest.mark.parametrize("budget, arguments, missing", [
    (None, {"owner": "a", "state": "state 8", "since": "x", "scope": {"kind": "a", "deep": True}}, []),
    (1, {"owner": "a"}, []),
    (1, {"state": "state 8", "page": 2}, ["state: values", "page: name"]),
    (1, {"scope": {"kind": "a"}}, ["scope: name"]),
    (len('f(owner: string, state: "state 0"|"state 1"|"state 2"|"state 3"|..., since?: string, page?: integer, '
         'scope?: {kind: string, ...})'),
     {"state": "state 1", "scope": {"kind": "a", "deep": True}},
     ["state: values", "scope.kind: values", "scope.deep: name"]),
])
def test_information(budget, arguments, missing):
    wide = tool(WIDE, WIDE_NOTE)
    assert information_missing(wide, signature_of(wide, budget, len), arguments) == missing


def test_information_is_read_from_the_text_alone():
    wide = tool(WIDE)
    text = "f(owner: integer, since?: any, page?: integer|..., scope?: object)"
    signature = type(signature_of(wide))(text, ())
    assert information_missing(wide, signature, {"owner": "a", "since": "b", "page": 1, "scope": {"kind": "b"}}) == [
        "owner: type", "since: type", "scope.kind: name"]


def test_information_in_lists_maps_and_definitions_within_themselves():
    schema = {"properties": {
        "rows": {"type": "array", "items": properties(n={"type": "integer"}, m={"type": "string"})},
        "map": {"additionalProperties": {"enum": ["x", "y"]}}, "tree": {"$ref": "#/$defs/Tree"},
        "gone": {"type": ["string", "null"], "default": None}}, "$defs": {"Tree": TREE}}
    signature = signature_of(tool(schema))
    assert information_missing(tool(schema), signature, {
        "rows": [{"n": 1}, {"m": "a"}], "map": {"k": "x"}, "tree": {"value": "a", "kids": [{"value": "b"}]},
        "gone": None, "unknown": 1}) == ["tree.kids: members"]
    shorter = type(signature)("f(rows?: {n?: integer, ...}[], map?: {[key: string]: \"x\"|...}, tree?: object)", ())
    assert information_missing(tool(schema), shorter, {
        "rows": [{"n": 1}, {"m": "a"}], "map": {"k": "x"}, "tree": {"value": "a"}, "gone": None}) == [
        "rows.m: name", "map.*: values", "tree.value: name"]


def test_statistics():
    tools = [Tool("hub", "f", WIDE_NOTE, WIDE), Tool(None, "g", "", {})]
    rows = signature_statistics(tools, len, 80)
    assert [(row["server"], row["name"]) for row in rows] == [("hub", "f"), (None, "g")]
    assert rows[0]["n_signature_tokens"] <= 80 < rows[0]["n_schema_tokens"] == len(tool_text(tools[0]))
    assert rows[0]["cut"] == list(signature_of(tools[0], 80, len).cut)
    assert rows[1] == {"server": None, "name": "g", "n_signature_tokens": 3,
                       "n_schema_tokens": len(tool_text(tools[1])), "cut": []}
    assert json.dumps(rows)

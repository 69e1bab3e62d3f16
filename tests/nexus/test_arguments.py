"""Arguments decoded by a real model, and the check of a value against the schema as it stands."""
from __future__ import annotations

import json

import numpy as np
import pytest

from nexus.arguments import fill, problems_of
from nexus.constrain import ConstrainError, Grammars
from nexus.runtime import ContextOptions, Runtime, RuntimeFailure
from nexus.schema_grammar import Bounds

SCHEMAS = {
    "plain": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1,
                                                                                   "maximum": 14}},
              "required": ["city", "days"], "additionalProperties": False},
    "nested": {"type": "object", "properties": {"trip": {"$ref": "#/$defs/trip"}}, "required": ["trip"], "$defs": {
        "trip": {"type": "object", "properties": {"to": {"type": "string", "minLength": 1}, "stops": {
            "type": "array", "items": {"type": "string"}, "minItems": 2}}, "required": ["to", "stops"]}}},
    "alternatives": {"type": "object", "properties": {"when": {"anyOf": [{"type": "string", "format": "date"},
                                                                        {"enum": ["today", "tomorrow"]}]}},
                     "required": ["when"]},
    "code": {"type": "object", "properties": {"flight": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3,4}$"}},
             "required": ["flight"]},
    "free": {"$schema": "http://json-schema.org/draft-07/schema#"},
}
PROMPT = "Book a trip to Lisbon for five days, flight TP1234. The arguments as a JSON object: "


@pytest.fixture(scope="module")
def runtime(smollm2):
    with Runtime(smollm2, ContextOptions(n_ctx=512, n_seq_max=3, n_threads=1)) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def compiler(smollm2):
    return Grammars(smollm2, bounds=Bounds(max_string_chars=24, max_items=3))


@pytest.mark.integration
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_small_models_arguments_are_finished_and_valid(runtime, compiler, smollm2, name):
    prompt = smollm2.tokenize(PROMPT)
    try:
        filled = fill(runtime, 1, prompt, compiler.compile(SCHEMAS[name]), 48)
    finally:
        held = runtime.pos_max(1)
        runtime.seq_rm(1)
    assert filled.valid and filled.problems == () and filled.relaxed == ()
    assert json.loads(filled.text) == filled.arguments and isinstance(filled.arguments, dict)
    assert 0 < filled.n_tokens <= 48 and 0 <= filled.n_rejected <= filled.n_tokens
    assert filled.n_prompt_tokens == len(prompt) and 0 < filled.first_token_ms <= filled.total_ms
    # Prompt and object stay, but for the last token.
    assert held == len(prompt) + filled.n_tokens - 2


@pytest.mark.integration
def test_a_prompt_may_continue_a_sequence_and_decides_the_arguments(runtime, compiler, smollm2):
    prompt, grammar = smollm2.tokenize(PROMPT), compiler.compile(SCHEMAS["plain"])
    whole = fill(runtime, 0, prompt, grammar, 48)
    runtime.seq_rm(0)
    runtime.decode(prompt[:5], 0, 0)
    rest = fill(runtime, 0, prompt[5:], grammar, 48, pos=5)
    runtime.seq_rm(0)
    assert (rest.arguments, rest.n_prompt_tokens) == (whole.arguments, len(prompt) - 5)
    assert "Lisbon" in whole.text


@pytest.mark.integration
def test_a_budget_that_holds_no_object_is_refused_before_anything_is_decoded(runtime, compiler, smollm2):
    with pytest.raises(ConstrainError, match="max_tokens is 3"):
        fill(runtime, 1, smollm2.tokenize(PROMPT), compiler.compile(SCHEMAS["plain"]), 3)
    assert runtime.pos_max(1) == -1


@pytest.mark.integration
def test_a_position_that_does_not_continue_the_sequence_is_refused(runtime, compiler, smollm2):
    runtime.decode(np.array([1, 2]), 0, 1)
    with pytest.raises(RuntimeFailure, match="does not continue"):
        fill(runtime, 1, smollm2.tokenize(PROMPT), compiler.compile(SCHEMAS["plain"]), 48, pos=9)
    runtime.seq_rm(1)


@pytest.mark.integration
def test_a_relaxed_field_is_still_checked(runtime, compiler, smollm2):
    schema = {"type": "object", "properties": {"city": {"enum": ["Lisbon"]}, "n": {
        "type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 1}, "minItems": 2, "uniqueItems": True}},
        "required": ["n"]}
    filled = fill(runtime, 1, smollm2.tokenize(PROMPT), compiler.compile(schema), 48)
    runtime.seq_rm(1)
    assert [item.keyword for item in filled.relaxed] == ["uniqueItems"]
    assert not filled.valid and "$.n" in filled.problems[0]


def test_problems_name_the_field():
    assert problems_of({"city": "a", "days": 3}, SCHEMAS["plain"]) == ()
    problems = problems_of({"city": 1, "days": 99}, SCHEMAS["plain"])
    assert [problem.split(":")[0] for problem in problems] == ["$.city", "$.days"]


@pytest.mark.parametrize(("schema", "allowed", "refused"), [
    ({"$schema": "http://json-schema.org/draft-04/schema#",
      "properties": {"x": {"minimum": 3, "exclusiveMinimum": True}}}, {"x": 4}, {"x": 3}),
    ({"properties": {"x": {"minimum": 3, "exclusiveMinimum": True}}}, {"x": 4}, {"x": 3}),
    ({"properties": {"x": {"items": [{"type": "null"}], "additionalItems": False}}}, {"x": [None]}, {"x": [None, 1]}),
    ({"properties": {"x": {"prefixItems": [{"type": "null"}], "items": False}}}, {"x": [None]}, {"x": [None, 1]}),
])
def test_a_schema_is_read_by_the_draft_whose_rules_it_keeps(schema, allowed, refused):
    assert problems_of(allowed, schema) == () and len(problems_of(refused, schema)) == 1


def test_references_out_of_the_schema_are_reported_and_not_followed(monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("the network was asked"))
    problem, = problems_of({"x": 1}, {"properties": {"x": {"$ref": "https://example.org/schema.json"}}})
    assert "cannot be applied" in problem and "example.org" in problem

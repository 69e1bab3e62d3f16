"""Walks under a grammar: the mask's own choice at every step, finished and valid within any budget."""
from __future__ import annotations

import json

import numpy as np
import pytest
from constraint_vocabulary import PIECES, accepts, grammars, random_logits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nexus.arguments import problems_of
from nexus.constrain import ConstrainError, Grammars, best_allowed, open_string

SHORT = dict(max_string_chars=12, max_items=3, depth=2)
PERSON = {"type": "object", "properties": {
    "name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}, "tags": {"type": "array", "items": {
        "enum": ["red", "blue"]}}, "address": {"type": "object", "properties": {"code": {
            "type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}}, "required": ["code"]}}, "required": ["name", "age"]}
leaves = st.sampled_from([
    {"type": "string"}, {"type": "string", "minLength": 3}, {"type": "integer", "minimum": -5}, {"type": "number"},
    {"type": ["boolean", "null"]}, {"enum": ["in", '6"', "a\\b", 7, None]}, {}, {"type": "string", "format": "date"},
    {"type": "string", "pattern": "^[a-c]+_x$"}, {"type": "string", "pattern": "[0-9]"}, {"type": "object"},
    {"type": "number", "minimum": 0, "maximum": 1}, {"$ref": "#"}])


def schemas(inner: st.SearchStrategy) -> st.SearchStrategy:
    keys = st.sampled_from(["a", "bb", "b", "to", "$and", "x y"])
    objects = st.dictionaries(keys, inner, max_size=4).flatmap(lambda properties: st.fixed_dictionaries({
        "type": st.just("object"), "properties": st.just(properties),
        "required": st.lists(st.sampled_from(sorted(properties)), unique=True) if properties else st.just([]),
        "additionalProperties": st.booleans()}))
    arrays = st.fixed_dictionaries({"type": st.just("array"), "items": inner}, optional={"minItems": st.integers(0, 4)})
    return st.one_of(objects, arrays, st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}))


roots = st.dictionaries(st.sampled_from(["p", "q", "path"]), st.recursive(leaves, schemas, max_leaves=6), min_size=1,
                        max_size=3).flatmap(lambda properties: st.fixed_dictionaries({
                            "type": st.just("object"), "properties": st.just(properties),
                            "required": st.lists(st.sampled_from(sorted(properties)), unique=True)}))


@pytest.fixture(scope="module")
def compiler() -> Grammars:
    return grammars(**SHORT)


def written(walk, logits_at, most: int = 10_000) -> str:
    for step in range(most):
        if walk.finished:
            return walk.text
        walk.choose(logits_at(step))
    pytest.fail(f"not finished after {most} tokens: {walk.text[-60:]!r}")


def endless(rng: np.random.Generator):
    """Logits that want anything rather than an end: closing tokens are the last choice."""
    closing = [token for token, piece in enumerate(PIECES) if any(mark in piece for mark in (b'"', b"}", b"]"))]

    def logits_at(step: int) -> np.ndarray:
        logits = random_logits(rng)
        logits[closing] -= 100
        return logits
    return logits_at


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture,
                                                                 HealthCheck.too_slow])
@given(roots, st.integers(0, 2**32 - 1), st.sampled_from([0, 3, 25]), st.booleans())
def test_every_text_is_finished_and_valid_whatever_the_logits(compiler, schema, seed, spare, greedy):
    try:
        grammar = compiler.compile(schema)
    except ConstrainError:
        # A required member that must contain itself.
        return
    rng = np.random.default_rng(seed)
    budget = len(grammar.start().completion(10_000)) + spare
    walk = grammar.start(budget)
    text = written(walk, endless(rng) if greedy else lambda step: random_logits(rng), budget + 1)
    assert walk.n_chosen <= budget
    assert not problems_of(json.loads(text), schema) or grammar.relaxed


@settings(deadline=None, max_examples=30)
@given(roots, st.integers(0, 2**32 - 1))
def test_no_text_is_farther_from_its_end_than_the_grammar_says(schema, seed):
    try:
        grammar = grammars(**SHORT).compile(schema)
    except ConstrainError:
        return
    rng, walk = np.random.default_rng(seed), grammar.start()
    for _ in range(25):
        if walk.finished:
            break
        walk.choose(random_logits(rng))
        assert walk.completion(grammar.closing_bytes) is not None


def test_lengths_end_a_text_that_has_no_budget(compiler):
    grammar = compiler.compile(PERSON)
    text = written(grammar.start(), endless(np.random.default_rng(1)), 400)
    assert not problems_of(json.loads(text), PERSON)


def test_the_choice_is_the_full_masks_at_every_step(compiler):
    grammar, rng = compiler.compile(PERSON), np.random.default_rng(5)
    n_rejected = 0
    for _ in range(5):
        walk = grammar.start()
        while not walk.finished:
            logits = random_logits(rng)
            allowed = np.unpackbits(walk.mask().view(np.uint8), bitorder="little")[:len(PIECES)].astype(bool)
            expected = int(np.where(allowed, logits, -np.inf).argmax())
            n_rejected += expected != int(logits.argmax())
            assert walk.choose(logits) == expected
        n_rejected -= walk.n_rejected
        assert accepts(grammar, walk.text)
    assert n_rejected == 0


def test_a_mask_has_every_token_that_can_be_taken_also_where_bytes_are_forced(compiler):
    walk = compiler.compile({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"],
                             "additionalProperties": False}).start()
    for piece in (b'{"', b"n", b"a", b"m", b"e", b'":', b'"'):
        bits = np.unpackbits(walk.mask().view(np.uint8), bitorder="little")[:len(PIECES)]
        taken = np.zeros(len(PIECES), bool)
        for token in range(len(PIECES)):
            taken[token] = walk.matcher.try_consume_tokens([token]) == 1
            walk.matcher.rollback(int(taken[token]))
        assert np.array_equal(bits, taken), walk.text
        logits = np.zeros(len(PIECES), np.float32)
        logits[PIECES.index(piece)] = 1
        walk.choose(logits)


def test_equal_logits_give_the_lowest_token():
    mask = np.zeros(2, np.uint32)
    mask[:] = 1 << 5 | 1 << 9, 1
    logits = np.zeros(40, np.float32)
    assert best_allowed(logits, mask) == 5
    logits[32] = 1
    logits[33] = 9
    assert best_allowed(logits, mask) == 32
    logits[:] = -np.inf
    assert best_allowed(logits, mask) == 5


def test_a_budget_steers_only_where_it_must(compiler):
    grammar = compiler.compile(PERSON)
    shortest = len(grammar.start().completion(100))
    with pytest.raises(ConstrainError, match=f"max_tokens is {shortest - 1}; no object"):
        grammar.start(shortest - 1)
    tight, wide = grammar.start(shortest), grammar.start(400)
    written(tight, endless(np.random.default_rng(0)))
    assert tight.n_chosen <= shortest and tight.n_steered > 0
    written(wide, lambda step: random_logits(np.random.default_rng(step)))
    assert wide.n_steered == 0


def test_of_keys_that_begin_alike_the_required_one_completes(compiler):
    optional = {"type": ["boolean", "null"]}
    grammar = compiler.compile({"type": "object", "properties": {
        "p": optional, "q": optional, "path": {"type": "string"}}, "required": ["path"]})
    walk = grammar.start()
    for byte in b'{"q":null,"p':
        logits = np.zeros(len(PIECES), np.float32)
        logits[PIECES.index(bytes([byte]))] = 1
        walk.choose(logits)
    assert b"".join(PIECES[token] for token in walk.completion(100)) == b'ath":""}'


def test_completion_leaves_the_walk_where_it_is(compiler):
    grammar, rng = compiler.compile(PERSON), np.random.default_rng(3)
    walk, other = grammar.start(), grammar.start()
    while not walk.finished:
        logits = random_logits(rng)
        way = walk.completion(1000)
        assert accepts(grammar, walk.text + b"".join(PIECES[token] for token in way).decode())
        assert walk.choose(logits) == other.choose(logits)


def test_wrong_logits_are_refused(compiler):
    walk = compiler.compile(PERSON).start()
    for logits, what in ((np.full(len(PIECES), np.nan, np.float32), "not a number"),
                         (np.zeros(len(PIECES)), "float64"), (np.zeros(2 * len(PIECES), np.float32), "at most")):
        with pytest.raises(ConstrainError, match=what):
            walk.choose(logits)
    assert walk.n_chosen == 0 and walk.text == ""


def test_a_finished_text_takes_no_more(compiler):
    walk = compiler.compile({"type": "object", "properties": {}, "additionalProperties": False}).start(4)
    assert written(walk, lambda step: random_logits(np.random.default_rng(step))) == "{}"
    with pytest.raises(ConstrainError, match="finished"):
        walk.choose(random_logits(np.random.default_rng(0)))


def test_a_schema_is_compiled_once_and_keeps_its_order():
    compiler = grammars()
    a, b = ({"type": "object", "properties": dict.fromkeys(keys, {"type": "null"})} for keys in ("ab", "ba"))
    assert compiler.compile(a) is compiler.compile(json.loads(json.dumps(a)))
    assert compiler.compile(a) is not compiler.compile(b)
    assert compiler.emptied().compile(a) is not compiler.compile(a)


def test_a_schema_that_cannot_be_read_is_refused_and_breaks_no_other(compiler):
    deep: dict = {}
    for _ in range(2000):
        deep = {"type": "object", "properties": {"x": deep}}
    for schema, what in ((deep, "too deep"), ({"properties": {"\ud800": {"type": "null"}}}, "lone surrogate")):
        with pytest.raises(ConstrainError, match=what):
            compiler.compile(schema)
    assert accepts(compiler.compile({"type": "object"}), {})


def test_unknown_engines_and_missing_vocabularies_are_refused():
    with pytest.raises(ConstrainError, match="engine is 'outlines'; use one of llguidance"):
        Grammars(None, engine="outlines", pieces=PIECES)
    with pytest.raises(ConstrainError, match="model is None"):
        Grammars(None)


@pytest.mark.parametrize(("text", "opened"), [
    (b"", None), (b'{"', b'"'), (b'{"a', b'"a'), (b'{"a"', None), (b'{"a\\"', b'"a\\"'), (b'{"a\\\\"', None),
    (b'{"a":"\\', b'"\\'), (b'["x","yz', b'"yz')])
def test_the_string_in_which_a_text_is_cut_off(text, opened):
    assert open_string(text) == opened


@pytest.mark.integration
def test_the_models_own_tokens_are_taken(smollm2):
    compiler = Grammars(smollm2)
    assert compiler.tokenizer.vocab_size == smollm2.n_vocab == len(compiler.pieces)
    grammar = compiler.compile(PERSON)
    text = '{"age":41,"name":"Zoë 漢","address":{"code":"AB-12"},"tags":["blue"]}'
    tokens = smollm2.tokenize(text)
    assert compiler.tokenizer.tokenize_bytes(text.encode()) == tokens.tolist()
    walk = grammar.start()
    for token in tokens.tolist():
        logits = np.zeros(smollm2.n_vocab, np.float32)
        logits[token] = 1
        assert walk.choose(logits) == token
    assert walk.finished and walk.text == text and walk.n_rejected == 0


@pytest.mark.parametrize("string", [
    *({"format": name} for name in ("uri", "email", "date-time", "date", "time", "uuid", "ipv4", "ipv6", "hostname")),
    {"pattern": "^(https?|ssh)://[^ ]+$"}, {"pattern": "^[a-z]+@[a-z]+[.]com$"}])
def test_a_form_whose_repetitions_never_end_by_themselves_is_completed(string):
    schema = {"type": "object", "properties": {"x": {"type": "string"} | string}, "required": ["x"]}
    grammar = grammars().compile(schema)
    assert grammar.relaxed == ()
    tokens = grammar.start(64).completion(64)
    text = b"".join(PIECES[token] for token in tokens).decode()
    assert accepts(grammar, text) and problems_of(json.loads(text), schema) == ()

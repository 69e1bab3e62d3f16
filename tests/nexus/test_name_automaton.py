"""Names under the automaton: every one of them can be written in any cut into tokens, and nothing else can."""
from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nexus.config import compose, validate
from nexus.model_tuple import open_model
from nexus.name_automaton import AutomatonError, NameAutomaton, Vocabulary, pieces_of, spelling
from nexus.weights import verified_file

BYTES = [bytes([byte]) for byte in range(256)]
PIECES = [*BYTES, b"", b"list", b"list_", b"issue", b"issues", b's"', b'",', b'":', b'issue"', b'issues","',
          "工具".encode(), "工".encode() + b"\xe5", b"_is", b"\\", b'\\"', b'"arguments',
          "😀".encode()[:3], "😀".encode()[3:] + b'"']
VERBS = ("add", "create", "delete", "get", "list", "merge", "search", "update", "fork", "close")
NOUNS = ("issue", "issues", "issue_comment", "pull_request", "pull_request_review", "branch", "branches", "工作流",
         "repo-secret", "tag🏷️")
HUNDRED = [f"{verb}_{noun}" for verb in VERBS for noun in NOUNS]


def write(automaton, tokens):
    """The state behind these tokens, and the last token's tail."""
    state = automaton.start()
    for token in tokens:
        assert token in automaton.allowed(state)
        tail = automaton.tail(state, token)
        state = automaton.advance(state, token)
    return state, tail


def written(automaton, pieces, choose):
    """What results when `choose` picks from the allowed tokens until a name is complete: (name, all bytes)."""
    state, text = automaton.start(), b""
    while automaton.name(state) is None:
        token = choose(automaton.allowed(state))
        state, text = automaton.advance(state, token), text + pieces[token]
    return automaton.name(state), text


names = st.lists(st.text(st.sampled_from('list_isue工具😀"\\\n,'), min_size=1, max_size=8), min_size=1, max_size=12,
                 unique=True)


@given(names=names, data=st.data())
@example(names=["list", "list_issue", "list_issues"], data=None)
@settings(max_examples=60, deadline=None)
def test_any_choice_of_allowed_tokens_writes_a_name_and_every_name_can_be_written(names, data):
    automaton = NameAutomaton(names, PIECES)
    if data is not None:
        name, text = written(automaton, PIECES, lambda allowed: data.draw(st.sampled_from(allowed.tolist())))
        assert name in names and text.startswith(json.dumps(name, ensure_ascii=False)[1:].encode())
    for name in names:
        text = json.dumps(name, ensure_ascii=False)[1:].encode()
        assert automaton.name(write(automaton, text)[0]) == name, "byte by byte: token ids 0 … 255 are the bytes"


def test_a_token_may_end_the_name_and_run_past_the_terminator():
    automaton = NameAutomaton(["list_issue", "list_issues"], PIECES)
    state = automaton.advance(automaton.start(), PIECES.index(b"list_"))
    endings = {b'issue"': ("list_issue", b""), b'issues","': ("list_issues", b',"')}
    for piece, (name, tail) in endings.items():
        token = PIECES.index(piece)
        assert automaton.tail(state, token) == tail
        assert automaton.name(automaton.advance(state, token)) == name
    plural = automaton.advance(state, PIECES.index(b"issue"))
    assert automaton.name(plural) is None and automaton.decided(plural) is None
    assert automaton.decided(automaton.advance(plural, PIECES.index(b"s"))) == "list_issues"
    assert automaton.name(automaton.advance(plural, PIECES.index(b's"'))) == "list_issues"
    done = automaton.advance(plural, PIECES.index(b'"arguments'))
    assert automaton.name(done) == automaton.decided(done) == "list_issue"


def test_a_complete_name_allows_nothing_more():
    automaton = NameAutomaton(["a"], PIECES)
    done, _ = write(automaton, b'a"')
    assert automaton.allowed(done).dtype == np.int32 and len(automaton.allowed(done)) == 0
    with pytest.raises(AutomatonError, match="completes 'a'; nothing may follow"):
        automaton.best(np.zeros(len(PIECES), np.float32), done)
    with pytest.raises(AutomatonError, match="token 97 is not allowed in state"):
        automaton.advance(done, 97)


def test_the_allowed_tokens_are_sorted_and_best_and_mask_agree_with_them():
    automaton = NameAutomaton(["list", "get"], PIECES)
    allowed = automaton.allowed(automaton.start())
    assert allowed.tolist() == sorted([ord("l"), ord("g"), PIECES.index(b"list")])
    logits = np.random.default_rng(3).normal(size=len(PIECES)).astype(np.float32)
    masked = automaton.mask(logits, 0)
    assert np.isneginf(np.delete(masked, allowed)).all() and (masked[allowed] == logits[allowed]).all()
    assert automaton.best(logits, 0) == int(np.argmax(masked))
    logits[:] = 1
    assert automaton.best(logits, 0) == allowed[0]


@pytest.mark.parametrize("name, terminator, expected", [
    ('say "hi"', b'"', rb'say \"hi\"'),
    ("a\\b\n\x01", b'"', rb"a\\b\n\u0001"),
    ("größe 工具", b'"', "größe 工具".encode()),
    ('say "hi"', b"\n", b'say "hi"'),
])
def test_a_name_is_spelled_as_json_before_a_quotation_mark_and_as_it_is_before_others(name, terminator, expected):
    assert spelling(name, terminator) == expected
    automaton = NameAutomaton([name, "other"], PIECES, terminator)
    assert automaton.name(write(automaton, expected + terminator)[0]) == name


def test_half_of_an_escape_does_not_end_a_name():
    automaton = NameAutomaton(['a"', "a\\"], PIECES)
    state, _ = write(automaton, b"a\\")
    assert automaton.name(state) is None
    # The last one is the second backslash of a name, and its terminator.
    assert automaton.allowed(state).tolist() == [ord('"'), ord("\\"), PIECES.index(b"\\", 256), PIECES.index(b'\\"')]
    assert automaton.name(write(automaton, b'a\\""')[0]) == 'a"'


@pytest.mark.parametrize("arguments, message", [
    (([],), "names: the list is empty; give at least one"),
    ((["a", "b", "a"],), "name 'a' is given 2 times; tell the tools apart"),
    ((["a", ""],), "name is ''; give a string"),
    ((["a", 3],), "name is 3; give a string"),
    ((["\ud800"],), "lone surrogate"),
    ((["a"], b""), "terminator is b''"),
    ((["a"], '"'), "terminator is '\"'"),
    ((["a::b"], b"::"), "'a::b' holds the terminator"),
    ((["a:"], b"::"), "'a:' holds the terminator b'::' or runs into it"),
])
def test_what_cannot_be_told_apart_or_written_is_refused(arguments, message):
    names, *terminator = arguments
    with pytest.raises(AutomatonError, match=message):
        NameAutomaton(names, PIECES, *terminator)


def test_a_name_that_the_vocabulary_cannot_write_is_refused_by_name():
    pieces = [b"a", b"ab", b"bd", b'"', b"c"]
    assert NameAutomaton(["abd", "c"], pieces).allowed(0).tolist() == [0, 4], "behind ab no token goes on"
    with pytest.raises(AutomatonError, match="name 'cd' cannot be written with this vocabulary"):
        NameAutomaton(["abd", "cd"], pieces)


@pytest.mark.parametrize("pieces, message", [([], "none of the 0 tokens"), ([b"", b""], "none of the 2 tokens"),
                                             ([b"a", "b"], "piece of token 1 is 'b'; give bytes")])
def test_a_vocabulary_needs_pieces_of_bytes(pieces, message):
    with pytest.raises(AutomatonError, match=message):
        Vocabulary(pieces)


@pytest.mark.parametrize("logits", [np.zeros(len(PIECES)), np.zeros(len(PIECES) - 1, np.float32),
                                    np.zeros(2 * len(PIECES), np.float32)[::2], [0.0] * len(PIECES)])
def test_logits_of_another_shape_type_or_stride_are_refused(logits):
    automaton = NameAutomaton(["a"], PIECES)
    for method in (automaton.best, automaton.mask):
        with pytest.raises(AutomatonError, match=rf"give a contiguous float32\[{len(PIECES)}\]"):
            method(logits, 0)


def test_a_state_that_is_none_is_refused():
    automaton = NameAutomaton(["a"], PIECES)
    for call in (automaton.allowed, automaton.name, automaton.decided, lambda state: automaton.advance(state, 97)):
        for state in (-1, automaton.n_states):
            with pytest.raises(AutomatonError, match=rf"state {state} is not in 0 \.\.\. {automaton.n_states - 1}"):
                call(state)


def test_one_vocabulary_serves_many_automata_and_outlives_its_name():
    automata = [NameAutomaton([f"t{i}"], vocabulary) for vocabulary in [Vocabulary(PIECES)] for i in range(50)]
    assert [written(automaton, PIECES, lambda allowed: allowed[0])[0] for automaton in automata] \
        == [f"t{i}" for i in range(50)]


@pytest.fixture(scope="module", params=["smollm2-135m", "qwen2.5-coder-0.5b"])
def tokeniser(request):
    """(model, its pieces, its vocabulary); the larger model only where its weights are at hand."""
    if request.param == "smollm2-135m":
        model = request.getfixturevalue("smollm2")
    else:
        spec = validate(compose([f"model={request.param}"])).model
        if verified_file(spec) is None:
            pytest.skip(f"the weights of {request.param} are not in the cache")
        model = open_model(spec)
    pieces = pieces_of(model)
    return model, pieces, Vocabulary(pieces)


@pytest.mark.integration
def test_pieces_are_the_bytes_that_tokens_stand_for(tokeniser):
    model, pieces, _ = tokeniser
    assert len(pieces) == model.n_vocab
    for text in ("größer, 工具を選ぶ 🛠️", '<tool_call>\n{"name": "x", "arguments": {}}', " a , b .\n\n\t I'm"):
        assert b"".join(pieces[token] for token in model.tokenize(text, parse_special=False)) == text.encode()
    control = model.tokenize("<|im_end|>")
    assert len(control) == 1 and pieces[control[0]] == b""


@pytest.mark.integration
@pytest.mark.parametrize("after", ['"', '", "arguments": {', '","', '":'])
def test_every_name_is_written_along_its_own_tokens_whatever_the_terminator_merges_with(tokeniser, after):
    model, pieces, vocabulary = tokeniser
    automaton = NameAutomaton(HUNDRED, vocabulary)
    merged = 0
    for name in HUNDRED:
        state, text = automaton.start(), b""
        for token in model.tokenize(name + after, parse_special=False):
            assert token in automaton.allowed(state), (name, text, pieces[token])
            tail, state = automaton.tail(state, token), automaton.advance(state, token)
            text += pieces[token]
            if automaton.name(state) is not None:
                break
        assert automaton.name(state) == name and text == f'{name}"'.encode() + tail
        merged += pieces[token] != b'"'
    assert merged > 0 or after == '"', "no terminator was merged with anything: this test shows nothing"


@pytest.mark.integration
def test_allowed_tokens_are_what_a_search_through_the_whole_vocabulary_finds(tokeniser):
    _, pieces, vocabulary = tokeniser
    automaton = NameAutomaton(HUNDRED, vocabulary)
    keys = [f'{name}"'.encode() for name in HUNDRED]
    for prefix in (b"", b"g", b"get_", b"list_issue", b"list_issues", b"list_branch", "add_工".encode() + b"\xe4"):
        state = automaton.start()
        for byte in prefix:
            state = automaton.advance(state, pieces.index(bytes([byte])))
        rests = [key[len(prefix):] for key in keys if key.startswith(prefix)]
        assert automaton.allowed(state).tolist() == [
            token for token, piece in enumerate(pieces)
            if piece and any(piece.startswith(rest) or rest.startswith(piece) for rest in rests)]


@pytest.mark.integration
def test_nothing_but_names_can_be_written(tokeniser):
    _, pieces, vocabulary = tokeniser
    automaton = NameAutomaton(HUNDRED, vocabulary)
    generator = np.random.default_rng(5)
    found = set()
    for _ in range(2000):
        name, text = written(automaton, pieces, generator.choice)
        assert name in HUNDRED and text.startswith(f'{name}"'.encode())
        found.add(name)
    assert len(found) > 50


@pytest.mark.integration
def test_a_name_of_45_characters_and_one_that_is_another_s_beginning(tokeniser):
    model, _, vocabulary = tokeniser
    long = "list_repository_security_advisories_of_an_org"
    assert len(long) == 45
    automaton = NameAutomaton([long, long[:15], long[:4]], vocabulary)
    for name in automaton.names:
        assert automaton.name(write(automaton, model.tokenize(name + '"'))[0]) == name

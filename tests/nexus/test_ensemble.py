"""What blocks are compiled behind: names, lengths, and the mean of several blocks."""
from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nexus.blocks import Block, BlockError
from nexus.config import ROOT
from nexus.ensemble import left_contexts, load_preambles, mean_block
from nexus.prompt import PromptError, system_tokens

SHAPE = (2, 3, 4)
HALVES = arrays(np.float16, SHAPE, elements=st.floats(-1000, 1000, width=16))


def toy(k, v=None, **changes) -> Block:
    k = np.full(SHAPE, k, dtype=np.float16)
    made = Block(np.array([5, 6, 7], np.int32), 20, 11, k, k if v is None else np.full(SHAPE, v, dtype=np.float16))
    return dataclasses.replace(made, **changes)


@pytest.fixture(scope="module")
def preambles():
    return load_preambles(ROOT / "experiments" / "data" / "preambles.json")


# --- preambles


def test_preambles_are_the_texts_of_the_file(tmp_path):
    path = tmp_path / "preambles.json"
    path.write_text(json.dumps(["one", "zwei äöü"]), encoding="utf-8")
    assert load_preambles(path) == load_preambles(str(path)) == ["one", "zwei äöü"]


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"{}", b'"text"', b'["a", ""]', b'["a", " \\n"]', b'["a", 1]',
                                     b'["a", null]', b'["\xff"]'])
def test_a_file_that_is_no_list_of_texts_is_refused_with_its_path(tmp_path, content):
    path = tmp_path / "preambles.json"
    path.write_bytes(content)
    with pytest.raises(BlockError, match="preambles.json.*give a JSON list"):
        load_preambles(path)
    with pytest.raises(BlockError, match="missing.json.*give a JSON list"):
        load_preambles(tmp_path / "missing.json")


# --- left contexts


@pytest.mark.integration
@pytest.mark.parametrize(("name", "members", "n_tokens"), [
    ("system", 1, 0), ("preamble-64", 1, 64), ("ensemble-2x64", 2, 64), ("ensemble-1x64", 1, 64),
    ("ensemble-4x1000", 4, 1000)])
def test_left_contexts_are_the_system_prompt_and_counted_text(smollm2, preambles, name, members, n_tokens):
    system = system_tokens(smollm2, "You are a helpful assistant.")
    lefts = left_contexts(smollm2, system, name, preambles)
    assert [len(left) for left in lefts] == [len(system) + n_tokens] * members
    assert all(left.dtype == np.int32 and np.array_equal(left[:len(system)], system) for left in lefts)
    assert len({left.tobytes() for left in lefts}) == members, "every member is behind another text"


@pytest.mark.integration
def test_a_left_context_holds_its_preambles_text(smollm2, preambles):
    system = system_tokens(smollm2, "You are a helpful assistant.")
    for left, text in zip(left_contexts(smollm2, system, "ensemble-2x64", preambles), preambles):
        assert text[:80] in smollm2.detokenize(left[len(system):])


@pytest.mark.integration
@pytest.mark.parametrize("n_tokens", [64, 128, 256, 1000])
def test_the_user_and_the_assistant_have_the_last_word_in_turn(smollm2, preambles, n_tokens):
    system = system_tokens(smollm2, "You are a helpful assistant.")
    lefts = left_contexts(smollm2, system, f"ensemble-{len(preambles)}x{n_tokens}", preambles)
    texts = [smollm2.detokenize(left[len(system):]) for left in lefts]
    last = [text.rsplit("<|im_start|>", 1)[-1].split("\n")[0] for text in texts]
    assert last == [("user", "assistant")[i % 2] for i in range(len(texts))]
    assert all(text.endswith("<|im_end|>\n") for text in texts), "the last turn is closed"
    roles = [[turn.split("\n")[0] for turn in text.split("<|im_start|>")[1:]] for text in texts]
    assert all(a != b for turns in roles for a, b in zip(turns, turns[1:])), "they alternate"


@pytest.mark.parametrize("name", ["", "nothing", "preamble", "preamble-0", "preamble-064", "preamble-64 ", "ensemble-2",
                                  "ensemble-0x64", "ensemble-2x0", "ensemble-2x64x2", "System"])
def test_another_name_is_refused_with_it(name):
    with pytest.raises(BlockError, match=f"compiled_behind: '{name}' is not"):
        left_contexts(None, np.arange(3), name, ["text"])


def test_more_members_than_texts_are_refused_with_both_numbers():
    with pytest.raises(BlockError, match="ensemble-3x64 needs 3 preambles, there are 2"):
        left_contexts(None, np.arange(3), "ensemble-3x64", ["one", "two"])


@pytest.mark.integration
def test_a_text_that_is_too_short_is_refused(smollm2):
    with pytest.raises(PromptError, match="64 are needed"):
        left_contexts(smollm2, np.arange(3, dtype=np.int32), "ensemble-2x64", ["word " * 200, "short"])


# --- means


def test_one_block_is_its_own_mean():
    block = toy(1.5)
    assert mean_block([block]) is block


def test_the_mean_of_two_toy_blocks_is_known():
    mean = mean_block([toy(1.0, 3.0), toy(2.0, -7.0)])
    assert (mean.k == np.float16(1.5)).all() and (mean.v == np.float16(-2.0)).all()
    assert mean.k.dtype == mean.v.dtype == np.float16 and mean.k.shape == mean.v.shape == SHAPE
    assert mean.tokens.tolist() == [5, 6, 7] and mean.anchor == 20


def test_means_are_taken_in_float32():
    # In F16, 40000 + 40000 overflows, and 2048 + 1 is 2048.
    assert (mean_block([toy(40000), toy(40000)]).k == np.float16(40000)).all()
    assert (mean_block([toy(2048), toy(1), toy(1), toy(1), toy(1)]).k == np.float16(2052 / 5)).all()


@given(st.lists(HALVES, min_size=2, max_size=5))
def test_a_mean_is_rounded_once_and_order_moves_it_by_one_ulp_at_most(members):
    blocks = [toy(k, -k) for k in members]
    forth, back = mean_block(blocks), mean_block(blocks[::-1])
    exact = np.mean([k.astype(np.float64) for k in members], axis=0)
    largest = np.max(np.abs(members), axis=0).astype(np.float64)
    for mean in (forth.k, back.k, -forth.v, -back.v):
        # Half an ulp for the one rounding to F16, and what float32 sums lose before it.
        allowed = 0.5 * np.abs(np.spacing(exact.astype(np.float16))).astype(np.float64) + 1e-6 * largest + 3e-8
        assert (np.abs(mean.astype(np.float64) - exact) <= allowed).all()
    ulp = np.abs(np.spacing(np.maximum(np.abs(forth.k), np.abs(back.k)))).astype(np.float64)
    assert (np.abs(forth.k.astype(np.float64) - back.k) <= ulp + 1e-6 * largest).all()


def test_a_mean_is_of_no_members_left_context():
    one, two = toy(1.0), toy(1.0, left_context_hash=2**64 - 1)
    assert mean_block([one, two]).left_context_hash not in (one.left_context_hash, two.left_context_hash)
    assert mean_block([one, two]).left_context_hash != mean_block([one, one]).left_context_hash


@pytest.mark.parametrize("changes", [{"anchor": 21}, {"tokens": np.array([5, 6, 8], np.int32)},
                                     {"tokens": np.array([5, 6], np.int32)}])
def test_blocks_of_other_tokens_or_at_another_anchor_are_refused(changes):
    for blocks in ([toy(1.0), toy(2.0, **changes)], [toy(1.0), toy(1.0), toy(2.0, **changes)]):
        with pytest.raises(BlockError, match="same tokens at the same anchor"):
            mean_block(blocks)

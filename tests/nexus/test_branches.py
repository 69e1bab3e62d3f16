"""Readers of several prompts, served by one decode, get what each would get alone (SmolLM2-135M)."""
from __future__ import annotations

import numpy as np
import pytest

from nexus.branches import Branch, read_all
from nexus.fidelity import divergence
from nexus.runtime import ContextOptions, Runtime, RuntimeFailure

# What follows is so plain that other rounding in another batch does not change it.
TEXTS = ["1, 2, 3, 4, 5, 6, 7, 8, 9,", "a b c d e f g h i j k", "Monday, Tuesday, Wednesday, Thursday,"]
# Nats between the same tokens in other batches, far below what another prompt or position makes.
ROUNDING = 0.01


@pytest.fixture(scope="module")
def prompts(smollm2):
    return [smollm2.tokenize(text) for text in TEXTS]


@pytest.fixture(scope="module")
def runtime(smollm2):
    with Runtime(smollm2, ContextOptions(n_ctx=512, n_batch=64, n_seq_max=8, n_threads=1,
                                         flash_attention=False)) as made:
        yield made


@pytest.fixture
def branches(runtime, prompts):
    runtime.clear()
    return [Branch(seq, len(prompt), runtime.decode(prompt, 0, seq, logits=True))
            for seq, prompt in enumerate(prompts)]


def alone(runtime, prompt, tokens):
    """Logits behind prompt and tokens in a sequence of their own."""
    runtime.seq_rm(6)
    try:
        return runtime.decode(np.concatenate([prompt, np.array(tokens, dtype=int)]), 0, 6, logits=True)
    finally:
        runtime.seq_rm(6)


def asking(*questions):
    """Reader that asks these questions and returns all answers."""
    answers = []
    for question in questions:
        answers.append((yield list(question)).copy())
    return answers


def greedy(n):
    written = []
    for _ in range(n):
        written = [*written, int(np.argmax((yield written)))]
    return written


@pytest.mark.integration
def test_each_reader_gets_the_logits_behind_its_own_prompt(runtime, prompts, branches):
    questions = [([], [5], [5, 6, 7]), ([9, 9],), ([], [4], [8], [8, 3])]
    answers = read_all(runtime, branches, [asking(*some) for some in questions])
    for prompt, some, found in zip(prompts, questions, answers):
        for question, logits in zip(some, found, strict=True):
            assert divergence(alone(runtime, prompt, question), logits).kl_nats < ROUNDING


@pytest.mark.integration
def test_greedy_answers_are_those_of_one_reader_alone(runtime, prompts, branches):
    together = read_all(runtime, branches, [greedy(6) for _ in branches])
    for seq, prompt in enumerate(prompts):
        runtime.seq_rm(seq)
        branch = Branch(seq, len(prompt), runtime.decode(prompt, 0, seq, logits=True))
        assert read_all(runtime, [branch], [greedy(6)]) == [together[seq]]


@pytest.mark.integration
def test_what_was_decoded_is_not_decoded_again(runtime, branches, monkeypatch):
    decoded = []
    cut = Branch.cut
    monkeypatch.setattr(Branch, "cut", lambda self, *some: decoded.append(cut(self, *some)) or decoded[-1])
    first, = read_all(runtime, branches[:1], [asking([5], [5, 6], [5, 6, 7])])
    assert decoded == [[5], [6], [7]]
    again, = read_all(runtime, branches[:1], [asking([5, 6], [5], [], [5, 6, 8], [5, 6])])
    assert decoded[3:] == [[8]]
    assert np.array_equal(first[1], again[0]) and np.array_equal(first[0], again[1])
    assert np.array_equal(again[0], again[4])


@pytest.mark.integration
def test_logits_that_were_passed_over_are_made_when_they_are_asked_for(runtime, prompts, branches):
    found, = read_all(runtime, branches[:1], [asking([5, 6, 7], [5, 6])])
    assert divergence(alone(runtime, prompts[0], [5, 6]), found[1]).kl_nats < ROUNDING
    assert runtime.pos_max(0) == len(prompts[0]) + 1


@pytest.mark.integration
def test_more_tokens_than_a_batch_holds_are_refused_by_number(runtime, branches):
    with pytest.raises(RuntimeFailure, match=r"3 branches ask for 66 tokens at once; n_batch is 64"):
        read_all(runtime, branches, [asking([7] * 22) for _ in branches])


@pytest.mark.integration
def test_no_room_is_told(smollm2):
    with Runtime(smollm2, ContextOptions(n_ctx=256, n_batch=256, n_seq_max=4, n_threads=1)) as small:
        prompt = np.arange(200) + 300
        branch = Branch(0, 200, small.decode(prompt, 0, 0, logits=True))
        with pytest.raises(RuntimeFailure, match="llama_decode returned 1"):
            read_all(small, [branch], [asking([7] * 100)])

"""Continues several prompts side by side: each reader asks for logits behind tokens of its own, one decode serves all.

A reader is a generator: it yields a list of token ids, gets the logits behind its prompt and these tokens, and returns
what it read. A question mostly goes on where the last one ended, so that a step decodes one token per reader.
"""
from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nexus import native
from nexus.runtime import Runtime, RuntimeFailure

Reader = Generator[list[int], np.ndarray, Any]


@functools.cache
def branch_kernels():
    """The C++ namespace `nexus` with the decode of several sequences."""
    gbl = native.llama()
    import cppyy

    cppyy.include("branch_logits.hpp")
    return gbl.nexus


@dataclass
class Branch:
    """A sequence that holds a prompt, and the logits behind every prefix of what was written behind it."""

    seq: int
    end: int
    """The position behind the prompt."""
    logits: np.ndarray
    """Behind the prompt, float32[n_vocab]."""
    _written: list[int] = field(default_factory=list)
    # One for each length of what was written; None where a token was decoded only on the way to a later one.
    _behind: list[np.ndarray | None] = field(default_factory=list)

    def known(self, tokens: list[int]) -> np.ndarray | None:
        """Logits behind prompt and `tokens` where they were decoded already."""
        if not tokens:
            return self.logits
        return self._behind[len(tokens) - 1] if self._shared(tokens) == len(tokens) else None

    def cut(self, runtime: Runtime, tokens: list[int]) -> list[int]:
        """What of `tokens` is to be decoded, at least the last one, after the sequence is cut back to the rest."""
        shared = min(self._shared(tokens), len(tokens) - 1)
        if shared < len(self._written):
            runtime.seq_rm(self.seq, self.end + shared, -1)
            del self._written[shared:], self._behind[shared:]
        return tokens[shared:]

    def add(self, tokens: list[int], logits: np.ndarray) -> None:
        """Note what was decoded behind what the sequence held, and the logits behind the last token."""
        self._written += tokens
        self._behind += [*[None] * (len(tokens) - 1), logits]

    def _shared(self, tokens: list[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(tokens, self._written)) if a != b),
                    min(len(tokens), len(self._written)))


def read_all(runtime: Runtime, branches: Sequence[Branch], readers: Sequence[Reader]) -> list[Any]:
    """What each reader returns; reader i continues branch i, and the branches' sequences are left as last continued.

    Raises RuntimeFailure where llama.cpp fails, and whatever a reader raises.
    """
    found: list[Any] = [None] * len(readers)
    asked: dict[int, list[int]] = {}

    def go_on(i: int, logits: np.ndarray | None) -> None:
        """Answer reader i from what is known, until it asks for something else or returns."""
        try:
            question = readers[i].send(logits)
            while (known := branches[i].known(question)) is not None:
                question = readers[i].send(known)
            asked[i] = question
        except StopIteration as end:
            asked.pop(i, None)
            found[i] = end.value

    for i in range(len(readers)):
        go_on(i, None)
    while asked:
        rests = {i: branches[i].cut(runtime, question) for i, question in asked.items()}
        for i, logits in zip(rests, _decoded(runtime, branches, rests), strict=True):
            branches[i].add(rests[i], logits)
            go_on(i, logits)
    return found


def _decoded(runtime: Runtime, branches: Sequence[Branch], rests: dict[int, list[int]]) -> np.ndarray:
    """Logits behind each of `rests`, tokens by the branch that they continue: float32[len(rests), n_vocab]."""
    lengths = [len(rest) for rest in rests.values()]
    if sum(lengths) > runtime.options.n_batch:
        raise RuntimeFailure(f"{len(rests)} branches ask for {sum(lengths)} tokens at once; n_batch is "
                             f"{runtime.options.n_batch}: continue fewer together")
    tokens = np.array([token for rest in rests.values() for token in rest], np.int32)
    seqs = np.array([branches[i].seq for i, rest in rests.items() for _ in rest], np.int32)
    positions = np.array([runtime.pos_max(branches[i].seq) + 1 + k for i, rest in rests.items()
                          for k in range(len(rest))], np.int32)
    flags = np.zeros(len(tokens), np.int8)
    flags[np.cumsum(lengths) - 1] = 1
    logits = np.empty((len(rests), runtime.model.n_vocab), np.float32)
    status = branch_kernels().decode_branches(
        runtime.context.get(), tokens.ctypes.data, positions.ctypes.data, seqs.ctypes.data, flags.ctypes.data,
        len(tokens), logits.ctypes.data, runtime.model.n_vocab)
    if status != 0:
        raise RuntimeFailure(f"decode of {len(tokens)} tokens of {len(rests)} branches: llama_decode returned "
                             f"{status}; is there room in {runtime.options.n_ctx} cells?")
    return logits

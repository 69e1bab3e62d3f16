"""A pool of warm prefixes: a prompt is decoded only from where it leaves the longest prompt that is still in the cache.

Each of a fixed number of slots is one llama.cpp sequence with one prompt in it. A prompt that goes on where a resident
one ends is decoded behind it, in its sequence. One that branches off gets a sequence of its own, which shares the cells
of the common prefix (`seq_cp` in a unified cache: no key and no value is copied). What is resident, what is evicted and
how many cells that takes is decided in kernels/radix_arena.hpp, by exact token ids.

The last token of a prompt is always decoded, since logits do not outlive the next decode. The bits of logits depend on
how a prompt was split into batches and on where its cells lie: a cached prefill equals, to the bit, a prefill with the
same splits whose cells lie alike, and other prefills within the noise floor of batch splits.

A cache is not safe for threads by itself: its calls belong under the lock that the runtime's other calls are under.
"""
from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nexus import native
from nexus.native import describe
from nexus.runtime import Runtime


class PrefixCacheError(RuntimeError):
    """The cache cannot be made or cannot take a prompt; the message names the field or sequence, and the remedy."""


@functools.cache
def arena_kernel():
    """The C++ namespace `nexus` with the class RadixArena."""
    kernels = native.kernels()
    import cppyy

    cppyy.include("radix_arena.hpp")
    return kernels


@dataclass(frozen=True)
class Prefilled:
    """A prompt in the cache."""

    logits: np.ndarray
    """Behind the last token, float32[n_vocab]."""
    seq: int
    """The sequence that holds exactly the prompt, at positions from 0: until the next call, or, pinned, until released.
    It is to be read or copied from; behind a pinned one the caller may decode on."""
    n_tokens: int
    """Tokens of the prompt."""
    n_reused: int
    """Those of them that were not decoded."""
    n_evicted: int
    """Prompts that were evicted for this one."""
    lookup_us: float
    """Finding the prefix and the room, µs."""
    copy_us: float | None
    """The copy between sequences, µs; None without one."""
    decode_ms: float
    """Decoding the rest, ms."""


@dataclass(frozen=True)
class Statistics:
    """Counts since the cache was made."""

    n_prompts: int = 0
    n_warm: int = 0
    """Prompts of which at least a token was reused."""
    n_tokens: int = 0
    n_reused: int = 0
    """Tokens of prompts, and those of them that were not decoded."""
    n_copies: int = 0
    n_evicted: int = 0
    """Prompts that were evicted, or cut back to what another one shares with them."""


class PrefixCache:
    """Warm prefixes in the sequences `seqs` of a runtime, which nobody else may change.

    At most `max_tokens` cells are in use between two calls, one more while a prompt is decoded that is resident as a
    whole. The least recently used prompt is evicted first, for want of a slot or of cells; pinned ones never are.
    """

    def __init__(self, runtime: Runtime, *, max_tokens: int, n_slots: int = 32, seqs: Sequence[int] | None = None):
        """`seqs` are `n_slots` sequence ids, 0 … n_slots−1 without it. They are emptied.

        Raises PrefixCacheError for a runtime or a model whose prefixes cannot be shared, and for sizes that do not fit.
        """
        _check_shareable(runtime)
        seqs = list(range(n_slots)) if seqs is None else [int(seq) for seq in seqs]
        options = runtime.options
        if len(seqs) != n_slots or len(set(seqs)) != n_slots or n_slots < 1:
            raise PrefixCacheError(f"seqs are {seqs}; give n_slots = {n_slots} different ones, and at least one")
        foreign = [seq for seq in seqs if not 0 <= seq < options.n_seq_max or seq == runtime.scratch_seq]
        if foreign:
            raise PrefixCacheError(f"seqs hold {foreign[0]}; sequences are 0 … {options.n_seq_max - 2} (the last "
                                   "is the scratch sequence); raise n_seq_max or lower n_slots")
        if not 1 <= max_tokens < options.n_ctx:
            raise PrefixCacheError(f"max_tokens is {max_tokens} and n_ctx {options.n_ctx}; give 1 to "
                                   f"{options.n_ctx - 1}, one cell is for decoding a resident prompt's last token")
        self.runtime, self.seqs, self.max_tokens = runtime, seqs, max_tokens
        self._arena = arena_kernel().RadixArena(n_slots, max_tokens, max_tokens)
        self._statistics = Statistics()
        self.clear()

    @property
    def statistics(self) -> Statistics:
        """What was counted since the cache was made."""
        return self._statistics

    @property
    def n_cells(self) -> int:
        """KV cells that the resident prompts take, at most `max_tokens`."""
        return int(self._arena.n_cells())

    @property
    def n_pinned_cells(self) -> int:
        """KV cells that pinned prompts take; a prompt has to fit beside them."""
        return int(self._arena.n_pinned_cells())

    def resident(self) -> dict[int, np.ndarray]:
        """The prompts in the cache by sequence, int32[n] each."""
        found = {}
        for slot, seq in enumerate(self.seqs):
            if n_tokens := int(self._arena.length(slot)):
                found[seq] = np.empty(n_tokens, np.int32)
                self._arena.copy_tokens(slot, found[seq].ctypes.data)
        return found

    def match(self, tokens: np.ndarray) -> int:
        """How many tokens at the start of a prompt, int32[n], are resident. Nothing is touched."""
        tokens = self._token_ids(tokens)
        return int(self._arena.match(tokens.ctypes.data, len(tokens)))

    def prefill(self, tokens: np.ndarray, *, pin: bool = False) -> Prefilled:
        """Logits behind a prompt, int32[n], and the sequence that holds it; only what is not resident is decoded.

        `pin` keeps it until `release`. Raises PrefixCacheError for a prompt that does not fit and RuntimeFailure where
        llama.cpp does not decode it. A prompt that does not fit changes nothing; another failure, or an interruption,
        leaves no cell of the prompt that others do not share.
        """
        tokens = self._token_ids(tokens)
        arena, runtime = self._arena, self.runtime
        start = time.perf_counter_ns()
        try:
            plan = arena.place(tokens.ctypes.data, len(tokens))
        except Exception as error:
            raise PrefixCacheError(describe(error)) from None
        slot, n_reused, n_evicted = int(plan.slot), int(plan.n_reused), int(plan.n_evicted)
        lookup_us = (time.perf_counter_ns() - start) / 1e3
        seq, copy_us = self.seqs[slot], None
        try:
            evicted = [int(arena.evicted(i)) for i in range(n_evicted)]
            if plan.in_place:
                self._check_holds(seq, n_reused)
                runtime.seq_rm(seq, n_reused, -1)
            else:
                runtime.seq_rm(seq)
                if n_reused > 0:
                    source = self.seqs[plan.source]
                    self._check_holds(source, n_reused)
                    start = time.perf_counter_ns()
                    runtime.seq_cp(source, seq, 0, n_reused)
                    copy_us = (time.perf_counter_ns() - start) / 1e3
            for gone in evicted:
                if gone != slot:
                    runtime.seq_rm(self.seqs[gone])
            start = time.perf_counter_ns()
            # Refuses, too, where the copy does not end at n_reused.
            logits = runtime.decode(tokens[n_reused:], n_reused, seq, logits=True)
            decode_ms = (time.perf_counter_ns() - start) / 1e6
            if plan.twin >= 0:
                runtime.seq_rm(seq, n_reused, -1)
                runtime.seq_cp(self.seqs[plan.twin], seq, n_reused, n_reused + 1)
            if pin:
                arena.pin(slot)
        except BaseException:
            self._drop(slot)
            raise
        n_evicted += bool(plan.evicts_rest)
        counted = self._statistics
        self._statistics = replace(
            counted, n_prompts=counted.n_prompts + 1, n_warm=counted.n_warm + (n_reused > 0),
            n_tokens=counted.n_tokens + len(tokens), n_reused=counted.n_reused + n_reused,
            n_copies=counted.n_copies + (copy_us is not None), n_evicted=counted.n_evicted + n_evicted)
        return Prefilled(logits, seq, len(tokens), n_reused, n_evicted, lookup_us, copy_us, decode_ms)

    def release(self, seq: int) -> None:
        """Let a pinned prompt be evicted again, and remove what was decoded behind it. Harmless if not pinned."""
        if seq not in self.seqs:
            raise PrefixCacheError(f"sequence {seq} is none of the cache's; release one of {self.seqs}")
        slot = self.seqs.index(seq)
        self._arena.release(slot)
        self.runtime.seq_rm(seq, int(self._arena.length(slot)), -1)

    def clear(self) -> None:
        """Forget every prompt, pinned or not, and empty the cache's sequences; counts go on."""
        self._arena.clear()
        for seq in self.seqs:
            self.runtime.seq_rm(seq)

    def _token_ids(self, tokens: np.ndarray) -> np.ndarray:
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or len(tokens) == 0 or tokens.dtype.kind not in "iu" or \
                tokens.min() < 0 or tokens.max() >= self.runtime.model.n_vocab:
            raise PrefixCacheError(f"prompt is {tokens.dtype}{list(tokens.shape)}; give a list of token ids, at least "
                                   f"one, each in 0 … {self.runtime.model.n_vocab - 1}")
        return np.ascontiguousarray(tokens, dtype=np.int32)

    def _check_holds(self, seq: int, n_tokens: int) -> None:
        """Refuse to reuse a sequence that somebody else emptied or cut: by the positions in memory."""
        runtime = self.runtime
        begin, end = runtime.pos_min(seq), runtime.pos_max(seq)
        if begin != 0 or end < n_tokens - 1:
            raise PrefixCacheError(f"sequence {seq} holds positions {begin} … {end} where the cache left {n_tokens} "
                                   "tokens; leave its sequences alone, and clear() the cache")

    def _drop(self, slot: int) -> None:
        """Forget a slot, and empty every sequence whose prompt is not resident: it may be one of those evicted."""
        self._arena.evict(slot)
        for slot, seq in enumerate(self.seqs):
            if self._arena.length(slot) == 0:
                self.runtime.seq_rm(seq)


def _check_shareable(runtime: Runtime) -> None:
    """Refuse what has no prefix to share. There is no fallback: the caller decodes such prompts with the runtime."""
    model = runtime.model
    if model.is_recurrent or model.is_hybrid:
        raise PrefixCacheError(f"{model.arch} keeps a recurrent state, which holds all tokens at once and has no "
                               "prefix to copy; decode prompts with the runtime")
    if model.n_swa > 0:
        raise PrefixCacheError(f"{model.arch} has sliding-window layers, whose cells behind the window of "
                               f"{model.n_swa} tokens are given to other sequences, so that a prefix cut back would "
                               "miss some; decode prompts with the runtime")
    if not runtime.options.kv_unified:
        raise PrefixCacheError("the runtime has kv_unified=false; prefixes are shared in a unified cache only (a "
                               "partial copy between separate streams aborts llama.cpp)")

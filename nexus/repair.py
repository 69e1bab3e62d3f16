"""Repair: puts a block into a live sequence and decodes a chosen part of its tokens again, behind what really precedes it.

A spliced block was computed behind another left context. An *arm* chooses which of its tokens are recomputed; the
rest keeps the compiled keys and values. Names carry the amount (`arm_of`):

none, full             nothing, everything (full is a prefill, to the bit)
suffix-25              the last ⌈S·25/100⌉ of S tokens (the paper's repair)
head-16, head-10%      the first tokens, counted or as a share (EPIC's LegoLink)
random-10              a seeded sample
blend-10               the tokens whose V at an early layer differs most from the block's, found by decoding the block
                       up to that layer only (CacheBlend's criterion)
oracle-10              as blend, but over all layers of a full prefill: a bound, not a method
head-16+suffix-5       both
"""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nexus.blocks import block_split, read_cells
from nexus.runtime import Runtime
from nexus.splice import Resident, Splicer, SpliceRefused

# V of layer 0 depends on the token alone; layer 1 is the first that has seen the left context.
EARLY_LAYER = 1
# A shorter head shares the batch of the runs behind it: a pass over the weights of its own costs as much as some 4 tokens.
OWN_PASS = 8


class RepairError(ValueError):
    """A repair cannot be done as asked; the message names the arm and the remedy. No sequence has changed."""


@dataclass(frozen=True)
class Place:
    """Where a block goes: behind position−1 of a live sequence."""

    splicer: Splicer
    resident: Resident
    tokens: np.ndarray
    """The block's token ids, int32[n_tokens]."""
    position: int
    seq: int
    seed: int = 0
    """Of the arms that sample."""
    true_values: np.ndarray | None = None
    """V of a full prefill, float[n_layers, n_tokens, width]: for the oracle alone."""
    compiled_behind: str = "system"
    """What the block was compiled behind (nexus/ensemble.py): a calibrated policy holds for no other."""


def share_count(n_tokens: int, share_pct: float) -> int:
    """⌈S·R/100⌉ tokens, at most S."""
    # The margin keeps 200 · 7 / 100 from becoming 15 because of binary fractions.
    return min(n_tokens, math.ceil(n_tokens * share_pct / 100 - 1e-9))


def _head(place: Place, count: int) -> np.ndarray:
    return np.arange(count)


def _suffix(place: Place, count: int) -> np.ndarray:
    return np.arange(len(place.tokens) - count, len(place.tokens))


def _random(place: Place, count: int) -> np.ndarray:
    return np.sort(np.random.default_rng(place.seed).choice(len(place.tokens), count, replace=False))


def _blend(place: Place, count: int) -> np.ndarray:
    if count == len(place.tokens):
        return np.arange(count)
    fresh = early_values(place, EARLY_LAYER)
    return _largest(fresh - block_values(place)[EARLY_LAYER].astype(np.float32), count)


def _oracle(place: Place, count: int) -> np.ndarray:
    if place.true_values is None:
        raise RepairError("arm oracle: needs true_values, the V of a full prefill; it is a control, not a method")
    deviation = place.true_values.astype(np.float32) - block_values(place).astype(np.float32)
    # Layers weigh alike, whatever the scale of their values.
    scale = np.sqrt((place.true_values.astype(np.float64) ** 2).mean(axis=(1, 2), keepdims=True)) + 1e-12
    return _largest(np.moveaxis(deviation / scale, 0, 1).reshape(len(place.tokens), -1), count)


def _largest(deviation: np.ndarray, count: int) -> np.ndarray:
    """Ascending indices of the `count` rows with the largest norm; the first of equals."""
    norms = np.linalg.norm(deviation, axis=-1)
    return np.sort(np.argsort(-norms, kind="stable")[:count])


FAMILIES: dict[str, Callable[[Place, int], np.ndarray]] = {
    "head": _head, "suffix": _suffix, "random": _random, "blend": _blend, "oracle": _oracle,
}
_PART = re.compile(r"([a-z]+)-(\d+(?:\.\d+)?)(%?)")


@dataclass(frozen=True)
class Arm:
    """A choice of tokens to recompute. Made by `arm_of`."""

    name: str
    parts: tuple[tuple[str, float, bool], ...]
    """(family, amount, whether the amount is a share in percent) of each part."""

    def select(self, place: Place) -> np.ndarray:
        """Ascending indices into the block's tokens, int[k]. Raises RepairError where the arm cannot choose here."""
        chosen = [FAMILIES[family](place, count)
                  for (family, _, _), count in zip(self.parts, self._counts(len(place.tokens)))]
        return np.unique(np.concatenate(chosen)) if chosen else np.empty(0, dtype=int)

    def probe_tokens(self, n_tokens: int, n_layers: int) -> float:
        """What choosing costs, in tokens decoded through all layers."""
        probes = sum(family == "blend" for family, _, _ in self.parts)
        return probes * n_tokens * EARLY_LAYER / n_layers

    def _counts(self, n_tokens: int) -> list[int]:
        return [share_count(n_tokens, amount) if is_share else min(n_tokens, int(amount))
                for _, amount, is_share in self.parts]


def arm_of(name: str) -> Arm:
    """The arm of this name (see the module). Raises RepairError naming what is wrong with it."""
    if name == "none":
        return Arm(name, ())
    if name == "full":
        return Arm(name, (("head", 100.0, True),))
    parts = []
    for text in name.split("+"):
        found = _PART.fullmatch(text)
        if not found or found[1] not in FAMILIES:
            raise RepairError(f"arm {name!r}: {text!r} is not none, full, or one of {', '.join(FAMILIES)} with an "
                              "amount, such as head-16, head-10% or suffix-25")
        family, amount = found[1], float(found[2])
        # Only a head is counted in tokens; every other amount is a share, as in the literature.
        is_share = family != "head" or bool(found[3])
        if is_share and amount > 100:
            raise RepairError(f"arm {name!r}: {amount:g} % is more than the whole block; use 0 to 100")
        if not is_share and amount != int(amount):
            raise RepairError(f"arm {name!r}: {amount:g} is not a whole number of tokens; a share is written head-10%")
        parts.append((family, amount, is_share))
    return Arm(name, tuple(parts))


def block_values(place: Place) -> np.ndarray:
    """The compiled V, float16[n_layers, n_tokens, width]."""
    return place.splicer.read(place.resident.blob(), len(place.tokens))[1]


def early_values(place: Place, layer: int) -> np.ndarray:
    """V that a prefill behind the live sequence computes at one layer, float32[n_tokens, width].

    The block's tokens are decoded in a sequence of their own, and the graph stops behind that layer's attention: deeper
    layers cost nothing. Raises RepairError for sliding-window models, whose saved layers have another order.
    """
    runtime = place.splicer.runtime
    if runtime.model.n_swa:
        raise RepairError("arm blend: not available for sliding-window models; use head")
    probe = free_sequences(runtime, place.seq)[0]
    runtime.seq_cp(place.seq, probe)
    runtime.context.stop_after(f"kqv_out-{layer}")
    try:
        runtime.decode(place.tokens, place.position, probe)
        values = read_cells(runtime, probe, place.position, place.position + len(place.tokens))[1]
    finally:
        runtime.context.stop_after("")
        runtime.seq_rm(probe)
    return values[layer].astype(np.float32)


def free_sequences(runtime: Runtime, *taken: int) -> list[int]:
    """Empty sequences that a repair may use, lowest first. Raises RepairError when there is none."""
    free = [seq for seq in range(runtime.scratch_seq) if seq not in taken and runtime.pos_max(seq) < 0]
    if not free:
        raise RepairError(f"no empty sequence is left of n_seq_max = {runtime.options.n_seq_max}; raise n_seq_max")
    return free


def runs_of(indices: np.ndarray) -> list[tuple[int, int]]:
    """Maximal runs [begin, end) of ascending indices."""
    indices = np.asarray(indices, dtype=int)
    if not len(indices):
        return []
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(indices, breaks)]


def place_repaired(place: Place, indices: Sequence[int], then: np.ndarray | None = None,
                   sequential: bool = False) -> np.ndarray | None:
    """Logits behind `then`, float32[n_vocab], or None without it. The block stands at position … position+n−1.

    Tokens `indices` (integers, ascending, each once) are recomputed, the others keep the compiled keys and values;
    afterwards the sequence has one cell per position and no other sequence has changed. `then` (int32[m], such as the
    user's query) is decoded behind the block; a recomputed end of the block goes into the same batch.

    A head of at least OWN_PASS tokens, or one that nothing but the end follows, is decoded first. Then `sequential`
    decodes run after run, each behind all earlier ones; otherwise the runs before the end share one batch, where each
    sees that head and the compiled tokens before it: one pass over the weights instead of one per run (measured:
    `rope_boundary_gate`).

    Raises RepairError for other indices, SpliceRefused or RuntimeFailure, with the sequence cut back to what stood
    before the block.
    """
    splicer, position, seq = place.splicer, place.position, place.seq
    runtime, n = splicer.runtime, len(place.tokens)
    runs = runs_of(_checked(indices, n))
    end = runtime.pos_max(seq)
    if end != position - 1:
        raise SpliceRefused(f"position {position} does not continue sequence {seq}, which ends at {end}")
    try:
        if runs == [(0, n)]:
            return _decode_end(place, 0, then)
        tail = runs.pop()[0] if runs and runs[-1][1] == n else n
        cursor = 0
        if runs and runs[0][0] == 0 and (sequential or len(runs) == 1 or runs[0][1] >= OWN_PASS):
            cursor = runs.pop(0)[1]
            runtime.decode(place.tokens[:cursor], position, seq)
        if runs and 0 < runtime.model.n_swa < n:
            # llama.cpp may give away local cells that only the scratch sequence holds once something is decoded.
            raise RepairError(f"scattered repair of {n} tokens: the model's window is {runtime.model.n_swa}; use head, "
                              "suffix or full")
        if cursor == 0 and not runs and tail == n:
            splicer.place(place.resident, position, seq)
        else:
            splicer.load(place.resident, position)
            for batch in _batches(place, runs, sequential):
                cursor = _recompute(place, cursor, batch)
            runtime.seq_cp(runtime.scratch_seq, seq, position + cursor, position + tail)
            runtime.seq_rm(runtime.scratch_seq)
        return _decode_end(place, tail, then)
    except Exception:
        runtime.seq_rm(runtime.scratch_seq)
        runtime.seq_rm(seq, position, -1)
        raise


def _checked(indices: Sequence[int], n_tokens: int) -> np.ndarray:
    """`indices` as int[k]. RepairError unless they are integers that ascend strictly within a block of n_tokens."""
    indices = np.asarray(indices)
    if indices.size == 0:
        return np.empty(0, dtype=int)
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise RepairError(f"indices are {indices.dtype}{list(indices.shape)}; give one list of integers")
    indices = indices.astype(int)
    falls = np.flatnonzero(np.diff(indices) <= 0)
    if len(falls):
        raise RepairError(f"indices do not ascend: {indices[falls[0] + 1]} follows {indices[falls[0]]}; sort them and "
                          "give each once")
    if indices[0] < 0 or indices[-1] >= n_tokens:
        raise RepairError(f"indices {indices[0]} … {indices[-1]} do not lie in a block of {n_tokens} tokens; "
                          f"give 0 … {n_tokens - 1}")
    return indices


def _decode_end(place: Place, begin: int, then: np.ndarray | None) -> np.ndarray | None:
    """Decode the block from token `begin` to its end and what follows it; logits of the latter."""
    runtime, rest = place.splicer.runtime, place.tokens[begin:]
    if then is not None:
        return runtime.decode(np.concatenate([rest, then]), place.position + begin, place.seq, logits=True)
    if len(rest):
        runtime.decode(rest, place.position + begin, place.seq,
                       split=block_split(len(rest)) if begin == 0 else ())
    return None


def _batches(place: Place, runs: list[tuple[int, int]], sequential: bool) -> list[list[tuple[int, int]]]:
    """Runs in groups that are decoded together: as many as there are free sequences and room in a batch."""
    if not runs:
        return []
    runtime = place.splicer.runtime
    most = 1 if sequential else len(free_sequences(runtime, place.seq))
    batches, n_tokens = [[]], 0
    for begin, end in runs:
        n_tokens += end - begin
        if len(batches[-1]) == most or (batches[-1] and n_tokens > runtime.options.n_batch):
            batches.append([])
            n_tokens = end - begin
        batches[-1].append((begin, end))
    return batches


def _recompute(place: Place, cursor: int, runs: list[tuple[int, int]]) -> int:
    """Index behind the last of `runs`, up to which the live sequence is complete; it was complete up to `cursor`."""
    runtime, position, live = place.splicer.runtime, place.position, place.seq
    scratch = runtime.scratch_seq
    if len(runs) == 1:
        (begin, end), = runs
        runtime.seq_cp(scratch, live, position + cursor, position + begin)
        runtime.decode(place.tokens[begin:end], position + begin, live)
        return end
    branches = free_sequences(runtime, live)[:len(runs)]
    try:
        for branch, (begin, _) in zip(branches, runs):
            runtime.seq_cp(live, branch)
            runtime.seq_cp(scratch, branch, position + cursor, position + begin)
        indices = np.concatenate([np.arange(begin, end) for begin, end in runs])
        tokens = np.ascontiguousarray(place.tokens[indices], dtype=np.int32)
        positions = np.ascontiguousarray(position + indices, dtype=np.int32)
        seqs = np.repeat(np.asarray(branches, dtype=np.int32), [end - begin for begin, end in runs])
        runtime.decode_scattered(tokens, positions, seqs)
        for branch, (begin, end) in zip(branches, runs):
            runtime.seq_cp(scratch, live, position + cursor, position + begin)
            runtime.seq_cp(branch, live, position + begin, position + end)
            cursor = end
    finally:
        for branch in branches:
            runtime.seq_rm(branch)
    return cursor

"""Resident blocks may be moved as often as one likes: keys stay one rounding from exact, and ten cost ten times one.

Keys of a resident block are always rotated from the F16 originals in the arena, so that a move begins where the block
was compiled and not where it was last. The control re-anchors what the last move left, and drifts.
"""
from __future__ import annotations

import dataclasses
import time
from contextlib import ExitStack
from statistics import median

import numpy as np
import pytest

from nexus.block_arena import BlockArena
from nexus.blocks import Block, compile_blocks
from nexus.runtime import ContextOptions, Runtime
from nexus.splice import Splicer, pair_ulps

pytestmark = pytest.mark.integration

N_MOVES, N_TOKENS, WORK = 1000, 24, 0
# A conversation, ten tools behind it, and how often one and all of them are placed in turn.
CONVERSATION, N_BLOCKS, BLOCK_TOKENS, REPETITIONS = 256, 10, 150, 40
MOST = 12.0


@pytest.fixture(scope="module")
def bench(smollm2):
    """(runtime, splicer, block with the model's own keys, compiled behind 19 tokens)."""
    options = ContextOptions(n_ctx=2048, n_seq_max=4, n_threads=1)
    with Runtime(smollm2, options) as runtime:
        rng, splicer = np.random.default_rng(11), Splicer(runtime)
        left, tokens = (rng.integers(100, 20000, n).astype(np.int32) for n in (19, N_TOKENS))
        block = next(iter(compile_blocks(runtime, left, [tokens])))
        runtime.clear()
        yield runtime, splicer, block
        runtime.clear()


def keys_at(splicer: Splicer, resident, position: int) -> np.ndarray:
    """Keys in the live cache once the block stands at `position` of an empty sequence, float16[layers, n, width]."""
    runtime = splicer.runtime
    splicer.place(resident, position, WORK)
    keys, _ = splicer.read(runtime.state_get(WORK), resident.n_tokens)
    runtime.seq_rm(WORK)
    return keys


def ulps(splicer: Splicer, reference: np.ndarray, measured: np.ndarray) -> float:
    """Largest distance in F16 ulps of the rotated pair."""
    model = splicer.runtime.model
    return float(pair_ulps(reference, measured, splicer.runtime.rope, model.n_head_kv, model.head_dim_k).max())


def turned(splicer: Splicer, block: Block, position: int) -> np.ndarray:
    """The block's keys at `position` by the equation in float64, rounded to float16 once."""
    model = splicer.runtime.model
    heads = block.k.astype(np.float64).reshape(*block.k.shape[:2], model.n_head_kv, model.head_dim_k // 2, 2)
    phase = np.exp(1j * (position - block.anchor) * splicer.layer_frequencies)[:, None, None, :]
    moved = (heads[..., 0] + 1j * heads[..., 1]) * phase
    return np.stack([moved.real, moved.imag], axis=-1).reshape(block.k.shape).astype(np.float16)


@pytest.mark.parametrize("held", ["once", "anew"])
def test_a_thousand_moves_leave_the_keys_of_a_single_one(bench, held):
    runtime, splicer, block = bench
    rng, last = np.random.default_rng(5), 1507
    path = [*rng.integers(0, 2000, N_MOVES - 1).tolist(), last]
    single = keys_at(splicer, splicer.hold(block), last)
    arena = BlockArena(4 << 20, 64 << 10, runtime)
    handle = arena.put(block)
    other = dataclasses.replace(block, k=block.v, v=block.k)
    n_sitting = len(arena)
    with arena.resident(handle, splicer) as kept:
        for i, position in enumerate(path):
            if i % 25 == 0:
                # Other blocks come and go; this one is in use.
                arena.put(other)
            if held == "once":
                splicer.place(kept, position, WORK)
            else:
                with arena.resident(handle, splicer) as resident:
                    splicer.place(resident, position, WORK)
            assert runtime.pos_max(WORK) == position + N_TOKENS - 1
            if i < N_MOVES - 1:
                runtime.seq_rm(WORK)
    moved, values = splicer.read(runtime.state_get(WORK), N_TOKENS)
    runtime.seq_rm(WORK)
    assert arena.n_evicted > 0 and len(arena) > n_sitting
    assert ulps(splicer, single, moved) <= 1
    np.testing.assert_array_equal(moved.view(np.uint16), single.view(np.uint16))
    np.testing.assert_array_equal(values.view(np.uint16), block.v.view(np.uint16))
    # The arena's original has not moved, and one rounding is all that a move costs.
    np.testing.assert_array_equal(arena.view(handle).k.view(np.uint16), block.k.view(np.uint16))
    assert ulps(splicer, turned(splicer, block, last), moved) <= 1


def test_moving_what_was_moved_before_drifts(bench):
    _, splicer, block = bench
    rng, last, current = np.random.default_rng(5), 1507, block
    for position in [*rng.integers(0, 2000, 60).tolist(), last]:
        current = dataclasses.replace(current, k=keys_at(splicer, splicer.hold(current), position), anchor=position)
    assert ulps(splicer, keys_at(splicer, splicer.hold(block), last), current.k) > 1


def test_ten_blocks_cost_at_most_twelve_times_one(bench):
    """Without repair, which decodes so many tokens per block. CPU time: a busy machine stretches the other."""
    runtime, splicer, block = bench
    rng = np.random.default_rng(7)

    def made(n_tokens: int) -> Block:
        # What keys hold does not matter to what moving them costs.
        k, v = (rng.standard_normal((block.k.shape[0], n_tokens, array.shape[2])).astype(np.float16)
                for array in (block.k, block.v))
        return Block(rng.integers(100, 20000, n_tokens).astype(np.int32), 19, 7, k, v)

    arena = BlockArena(128 << 20, 64 << 10, runtime)
    with ExitStack() as stack:
        conversation = splicer.hold(made(CONVERSATION))
        residents = [stack.enter_context(arena.resident(arena.put(made(BLOCK_TOKENS)), splicer))
                     for _ in range(N_BLOCKS)]

        def cost(n_blocks: int) -> float:
            """CPU seconds that so many blocks take, one behind the other, behind the conversation."""
            begin, position = time.process_time_ns(), CONVERSATION
            for resident in residents[:n_blocks]:
                splicer.place(resident, position, WORK)
                position += BLOCK_TOKENS
            taken = (time.process_time_ns() - begin) / 1e9
            assert runtime.pos_max(WORK) == position - 1
            runtime.seq_rm(WORK, CONVERSATION, -1)
            return taken

        splicer.place(conversation, 0, WORK)
        costs: dict[int, list[float]] = {1: [], N_BLOCKS: []}
        # The first two are warm-up.
        for repetition in range(-2, REPETITIONS):
            for n_blocks in rng.permutation(list(costs)).tolist():
                taken = cost(n_blocks)
                if repetition >= 0:
                    costs[n_blocks].append(taken)
        runtime.seq_rm(WORK)
    ratio = median(costs[N_BLOCKS]) / median(costs[1])
    # Below the number of blocks by more than noise, something was not placed.
    assert 0.5 * N_BLOCKS < ratio <= MOST, f"{N_BLOCKS} blocks cost {ratio:.1f} times one"

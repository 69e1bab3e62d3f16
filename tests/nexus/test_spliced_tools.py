"""Several blocks in one context (SmolLM2-135M): where they stand, what is repaired, and what an error leaves."""
from __future__ import annotations

import numpy as np
import pytest

from nexus.blocks import block_split, compile_blocks, read_cells
from nexus.fidelity import divergence
from nexus.repair import RepairError, arm_of
from nexus.runtime import ContextOptions, Runtime, RuntimeFailure
from nexus.splice import Splicer
from nexus.spliced_tools import CompiledTool, place_tools, place_unrotated

WORK = 1
LENGTHS = (40, 24, 33)


def text_tokens(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(100, 20000, n).astype(np.int32)


class Bench:
    """Three tools, each compiled right behind the same 16 tokens."""

    def __init__(self, model):
        self.runtime = Runtime(model, ContextOptions(n_ctx=1024, n_seq_max=12, n_threads=1, flash_attention=False))
        self.splicer = Splicer(self.runtime)
        self.left, self.query = text_tokens(1, 16), text_tokens(9, 7)
        self.texts = [text_tokens(10 + i, n) for i, n in enumerate(LENGTHS)]
        blocks = list(compile_blocks(self.runtime, self.left, self.texts))
        self.tools = [CompiledTool(self.splicer.hold(block), block.tokens) for block in blocks]

    def reset(self, n_past: int = 0) -> int:
        """The position behind `left` and so many other tokens, which WORK then holds."""
        self.runtime.clear()
        context = np.concatenate([self.left, text_tokens(3, n_past)])
        self.runtime.decode(context, 0, WORK)
        return len(context)

    def asked(self) -> np.ndarray:
        return self.runtime.decode(self.query, self.runtime.pos_max(WORK) + 1, WORK, logits=True)

    def prefilled(self, position: int) -> np.ndarray:
        for tokens in self.texts:
            self.runtime.decode(tokens, position, WORK, split=block_split(len(tokens)))
            position += len(tokens)
        return self.asked()


@pytest.fixture(scope="module")
def bench(smollm2):
    made = Bench(smollm2)
    yield made
    made.runtime.close()


def place(bench, position, arm, n_past=0, tools=None):
    return place_tools(bench.splicer, bench.tools if tools is None else tools, position, WORK,
                       arm if callable(arm) else lambda _: arm_of(arm), n_past=n_past)


@pytest.mark.integration
def test_everything_recomputed_is_a_prefill_to_the_bit(bench):
    reference = bench.prefilled(bench.reset(64))
    position = bench.reset(64)
    assert place(bench, position, "full") == sum(LENGTHS)
    assert divergence(reference, bench.asked()).bit_identical


@pytest.mark.integration
def test_the_first_tool_at_its_anchor_is_exact_and_the_second_is_not(bench):
    reference = bench.prefilled(bench.reset())
    position = bench.reset()
    assert place(bench, position, "none", tools=bench.tools[:1]) == 0
    for tokens in bench.texts[1:]:
        bench.runtime.decode(tokens, bench.runtime.pos_max(WORK) + 1, WORK, split=block_split(len(tokens)))
    assert divergence(reference, bench.asked()).bit_identical
    place(bench, bench.reset(), "none")
    assert divergence(reference, bench.asked()).kl_nats > 1e-3


@pytest.mark.integration
def test_tools_stand_one_behind_the_other_and_repair_brings_them_nearer(bench):
    reference = bench.prefilled(bench.reset(64))
    drift = {}
    for arm, recomputed in (("none", 0), ("head-8", 24), ("head-50%", 20 + 12 + 17)):
        position = bench.reset(64)
        assert place(bench, position, arm) == recomputed
        assert bench.runtime.pos_max(WORK) + 1 == position + sum(LENGTHS)
        read_cells(bench.runtime, WORK, 0, position + sum(LENGTHS))  # one cell per position, or it raises
        drift[arm] = divergence(reference, bench.asked()).kl_nats
    assert drift["head-50%"] < drift["head-8"] < drift["none"]


@pytest.mark.integration
def test_the_arm_is_chosen_by_what_stands_before_each_tool(bench):
    depths = []

    def arm_at(n_past):
        depths.append(n_past)
        return arm_of("head-2")

    assert place(bench, bench.reset(64), arm_at, n_past=64) == 6
    assert depths == [64, 64 + 40, 64 + 40 + 24]


@pytest.mark.integration
def test_a_control_keeps_the_keys_of_the_compile_position(bench):
    position = bench.reset(64)
    assert place_unrotated(bench.splicer, bench.tools, position, WORK) == 0
    keys, values = read_cells(bench.runtime, WORK, position, position + LENGTHS[0])
    held = bench.tools[0].resident.source
    assert np.array_equal(keys, held.k) and np.array_equal(values, held.v)
    place(bench, bench.reset(64), "none")
    assert not np.array_equal(read_cells(bench.runtime, WORK, position, position + LENGTHS[0])[0], held.k)


@pytest.mark.integration
@pytest.mark.parametrize("error", [RepairError("no arm here"), RuntimeFailure("no room")])
def test_an_error_at_a_later_tool_takes_back_all_of_them(bench, error):
    def arm_at(n_past):
        if n_past > 64:
            raise error
        return arm_of("head-2")

    position = bench.reset(64)
    with pytest.raises(type(error), match=str(error)):
        place(bench, position, arm_at, n_past=64)
    assert bench.runtime.pos_max(WORK) == position - 1
    assert bench.runtime.pos_max(bench.runtime.scratch_seq) == -1


@pytest.mark.integration
def test_no_tools_are_no_work(bench):
    position = bench.reset(64)
    assert place(bench, position, "head-4", tools=[]) == 0
    assert bench.runtime.pos_max(WORK) == position - 1

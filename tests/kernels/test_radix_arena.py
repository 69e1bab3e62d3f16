"""The radix arena against a model that compares whole prompts, and under sanitizers with its allocations counted."""
from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import cppyy
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nexus import native
from nexus.native import KERNELS

SOURCE = Path(__file__).with_name("radix_check.cpp")
SLOT_TOKENS = 160


def arena_of(n_slots, max_tokens, slot_tokens=SLOT_TOKENS):
    native.kernels()
    cppyy.include("radix_arena.hpp")
    return cppyy.gbl.nexus.RadixArena(n_slots, max_tokens, slot_tokens)


def place(arena, prompt):
    tokens = np.array(prompt, np.int32)
    return arena.place(tokens.ctypes.data, len(tokens))


def resident(arena):
    """Prompt by slot, of the slots that hold one."""
    found = {}
    for slot in range(arena.n_slots()):
        tokens = np.full(arena.length(slot) + 1, -7, np.int32)
        arena.copy_tokens(slot, tokens.ctypes.data)
        assert tokens[-1] == -7
        if len(tokens) > 1:
            found[slot] = tuple(tokens[:-1].tolist())
    return found


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def cells(prompts):
    """How many cells hold these prompts where equal beginnings are shared: their distinct prefixes."""
    return len({prompt[:n] for prompt in prompts for n in range(1, len(prompt) + 1)})


@dataclass
class Reference:
    """What the arena is meant to do, by comparing whole prompts. Slots in the order in which they were placed on."""

    n_slots: int
    max_tokens: int
    slots: dict[int, tuple] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)

    def refuses(self, prompt):
        kept = [self.slots[slot] for slot in self.pinned]
        return cells([*kept, prompt]) > self.max_tokens

    def check(self, prompt, plan, evicted):
        """Follow the arena's plan and hold it against the reference's state; what is left open is the slot's number."""
        matches = {slot: common(tokens, prompt) for slot, tokens in self.slots.items()}
        longest = max(matches.values(), default=0)
        assert (plan.n_matched, plan.n_reused) == (longest, min(longest, len(prompt) - 1))
        assert (plan.source >= 0) == (longest > 0)
        if plan.source >= 0:
            assert matches[plan.source] == longest
        unpinned = [slot for slot in self.slots if slot not in self.pinned]
        continued = [slot for slot in unpinned if longest and self.slots[slot] == prompt[:longest]]
        if continued:
            assert plan.slot in continued and plan.in_place and not plan.evicts_rest
        elif len(self.slots) < self.n_slots:
            assert plan.slot not in self.slots and not plan.in_place
        else:
            assert plan.slot == unpinned[0] and plan.in_place == plan.evicts_rest == (plan.slot == plan.source)
        expected = [plan.slot] if plan.slot in self.slots and not plan.in_place else []
        self.slots.pop(plan.slot, None)
        self.slots[plan.slot] = prompt
        while cells(self.slots.values()) > self.max_tokens:
            oldest = next(slot for slot in self.slots if slot not in self.pinned)
            assert oldest != plan.slot
            expected.append(oldest)
            del self.slots[oldest]
        assert evicted == expected
        twins = [slot for slot, tokens in self.slots.items() if slot != plan.slot and tokens[:len(prompt)] == prompt]
        assert plan.twin in twins if twins else plan.twin == -1


# Few ids, so that prompts branch often; and long prompts by repetition, so that runs longer than one comparison match.
pieces = st.lists(st.integers(0, 2), min_size=1, max_size=6)
operations = st.lists(st.one_of(
    st.tuples(st.just("new"), pieces, st.integers(1, 20)),
    st.tuples(st.just("extend"), pieces, st.integers(0, 50)),
    st.tuples(st.just("branch"), pieces, st.integers(0, 50), st.integers(1, 8)),
    st.tuples(st.just("cut"), st.integers(0, 50), st.integers(1, 60)),
    st.tuples(st.just("again"), st.integers(0, 50)),
    st.tuples(st.just("pin")), st.tuples(st.just("release"), st.integers(0, 4)),
    st.tuples(st.just("evict"), st.integers(0, 4)), st.tuples(st.just("clear"))), min_size=1, max_size=40)


@given(operations=operations, n_slots=st.integers(1, 5), max_tokens=st.integers(1, 300))
@example(operations=[("new", [0, 1], 3), ("cut", 0, 3), ("again", 0), ("again", 0)], n_slots=3, max_tokens=20)
@example(operations=[("new", [0], 9), ("pin",), ("new", [1], 9), ("new", [2], 9), ("new", [0], 20)], n_slots=2,
         max_tokens=18)
# The slot that an edge's tokens are read from goes and is taken by another prompt, while several, or one that ends
# there, still share the edge.
@example(operations=[("new", [0, 1], 1), ("new", [0, 2], 1), ("new", [0, 0], 1), ("evict", 0), ("new", [2], 1),
                     ("again", 2)], n_slots=4, max_tokens=50)
@example(operations=[("new", [0, 1], 2), ("cut", 1, 2), ("evict", 0), ("new", [2], 4), ("extend", [0], 2)], n_slots=2,
         max_tokens=50)
@settings(max_examples=300)
def test_prefixes_evictions_and_cells_are_those_of_whole_prompts(operations, n_slots, max_tokens):
    arena, reference = arena_of(n_slots, max_tokens), Reference(n_slots, max_tokens)
    seen, last = [(1,)], None
    for operation, *values in operations:
        if operation == "new":
            prompt = tuple(values[0] * values[1])
        elif operation == "extend":
            prompt = seen[values[1] % len(seen)] + tuple(values[0])
        elif operation == "branch":
            prompt = seen[values[1] % len(seen)][:values[2]] + tuple(values[0])
        elif operation == "cut":
            prompt = seen[values[0] % len(seen)][:values[1]]
        elif operation == "again":
            prompt = seen[values[0] % len(seen)]
        else:
            prompt = None
        if prompt is not None:
            prompt = prompt[:SLOT_TOKENS]
            seen.append(prompt)
            before = resident(arena)
            tokens = np.array(prompt, np.int32)
            assert arena.match(tokens.ctypes.data, len(tokens)) == max(
                (common(prompt, other) for other in before.values()), default=0)
            full = len(reference.pinned) == n_slots
            if reference.refuses(prompt) or full:
                with pytest.raises(Exception, match="max_tokens is" if reference.refuses(prompt) else "are pinned"):
                    place(arena, prompt)
                assert resident(arena) == before
            else:
                plan = place(arena, prompt)
                reference.check(prompt, plan, [arena.evicted(i) for i in range(plan.n_evicted)])
                last = plan.slot
        elif operation == "pin" and last in reference.slots:
            arena.pin(last)
            reference.pinned.add(last)
        elif operation in ("release", "evict") and values[0] < n_slots:
            getattr(arena, operation)(values[0])
            reference.pinned.discard(values[0])
            if operation == "evict":
                reference.slots.pop(values[0], None)
        elif operation == "clear":
            arena.clear()
            reference.slots.clear()
            reference.pinned.clear()
        assert resident(arena) == reference.slots
        assert arena.n_cells() == cells(reference.slots.values()) <= max_tokens
        assert arena.n_pinned_cells() == cells([reference.slots[slot] for slot in reference.pinned])
        assert [arena.pinned(slot) for slot in range(n_slots)] == [slot in reference.pinned for slot in range(n_slots)]
        assert arena.n_nodes() <= 2 * n_slots - 1


def test_ids_are_compared_and_not_their_bytes_or_hashes():
    arena = arena_of(2, 100)
    place(arena, [256, 1, 2])
    assert place(arena, [1, 256, 2]).n_matched == 0
    assert place(arena, [256, 1, 2 + 2**24]).n_matched == 2


@pytest.mark.parametrize("sizes, message", [
    ((0, 10, 10), "n_slots is 0"), ((4, -1, 10), "max_tokens is -1"), ((4, 10, 0), "slot_tokens is 0")])
def test_sizes_that_hold_nothing_are_refused(sizes, message):
    with pytest.raises(Exception, match=message):
        arena_of(*sizes)


@pytest.mark.parametrize("n", [0, -1, 11, 2**31 - 1])
def test_a_prompt_that_is_empty_or_longer_than_a_slot_is_refused(n):
    arena = arena_of(2, 100, 10)
    tokens = np.ones(10, np.int32)
    with pytest.raises(Exception, match="a slot holds 1 to 10"):
        arena.place(tokens.ctypes.data, n)
    assert arena.n_cells() == 0


@pytest.mark.parametrize("method", ["length", "pinned", "evict", "pin", "release"])
def test_a_slot_that_does_not_exist_is_refused(method):
    arena = arena_of(2, 100)
    for slot in (-1, 2):
        with pytest.raises(Exception, match=rf"slot {slot} is not in 0 \.\.\. 1"):
            getattr(arena, method)(slot)
    if method == "pin":
        with pytest.raises(Exception, match="slot 1 is free"):
            arena.pin(1)


def test_nothing_is_allocated_behind_the_constructor_and_no_byte_outside_is_touched(need_programs, tmp_path):
    need_programs("g++")
    program = tmp_path / "radix_check"
    subprocess.run(["g++", "-std=c++17", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
                    f"-I{KERNELS}", SOURCE, "-o", program], check=True, timeout=120)
    run = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert run.stdout == "counted=1 in_place=1 evicted=1 twins=1 cut=1\n"


@pytest.mark.parametrize("compiler", ["g++", "aarch64-linux-gnu-g++"])
def test_the_arena_compiles_alone_without_a_warning(need_programs, compiler, tmp_path):
    need_programs(compiler)
    source = tmp_path / "alone.cpp"
    source.write_text('#include "radix_arena.hpp"\n#include "radix_arena.hpp"\n')
    subprocess.run([compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{KERNELS}", source],
                   check=True, timeout=120)

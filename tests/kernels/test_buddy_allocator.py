"""The buddy allocator against sets of intervals: no overlap, alignment, the lowest address, and whole at the end.

What several threads do to it, and what it allocates itself, is checked by buddy_check.cpp under the sanitizers.
"""
from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from nexus.block_arena import allocator_kernels
from nexus.native import KERNELS

SOURCE = Path(__file__).with_name("buddy_check.cpp")
HEADERS = ("buddy_allocator.hpp", "allocator_contention.hpp")
EXPECTED = """\
padded units=700 served=1 refused=1 broken=0 same=20
unpadded units=700 served=1 refused=1 broken=0 same=20
padded units=4096 served=1 refused=0 broken=0 same=20
heap allocations=0 broken=0 served=1 counted=1
contention whole=12 failed=0
"""
UNIT = 256


@pytest.fixture(scope="module")
def buddy():
    """The C++ namespace `nexus` with the allocator."""
    return allocator_kernels()


class Reference:
    """The same allocator over sets of Python numbers, in units: slow, and plain to see right."""

    def __init__(self, n_units: int):
        self.n_units = n_units
        self.held: dict[int, int] = {}

    def free_blocks(self) -> list[tuple[int, int]]:
        """(order, unit) of the largest aligned blocks of free units, by order and address."""
        free = np.ones(self.n_units, bool)
        for unit, n in self.held.items():
            free[unit:unit + n] = False
        blocks, order = [], 0
        # A level holds which aligned blocks are free as a whole; one whose pair is not free as a whole stands alone.
        while len(free):
            pairs = free[:len(free) // 2 * 2].reshape(-1, 2).all(axis=1)
            merged = np.repeat(pairs, 2)
            merged = np.concatenate([merged, np.zeros(len(free) - len(merged), bool)])
            blocks += [(order, int(block) << order) for block in np.flatnonzero(free & ~merged)]
            free, order = pairs, order + 1
        return blocks

    def allocate(self, n: int) -> int | None:
        """The lowest unit of the smallest free block that serves n units, None where there is none."""
        order = (n - 1).bit_length()
        serving = [block for block in self.free_blocks() if block[0] >= order]
        if not serving:
            return None
        unit = min(serving)[1]
        self.held[unit] = n
        return unit


def free_blocks(allocator) -> list[tuple[int, int]]:
    """The allocator's own free set as the reference tells it."""
    flat = [int(value) for value in allocator.free_blocks()]
    return [((size // UNIT).bit_length() - 1, offset // UNIT) for offset, size in zip(flat[::2], flat[1::2])]


class Trace(RuleBasedStateMachine):
    """Any trace of requests, right and wrong ones: the same answers and the same free set as the reference."""

    blocks = Bundle("blocks")

    @initialize(n_units=st.one_of(st.integers(1, 300), st.sampled_from([1, 2, 63, 64, 65, 127, 128, 4096, 4097])),
                padded=st.booleans())
    def begin(self, n_units, padded):
        kernels = allocator_kernels()
        self.allocator = (kernels.BuddyAllocator if padded else kernels.UnpaddedBuddyAllocator)(n_units * UNIT, UNIT)
        self.kernels, self.reference = kernels, Reference(n_units)
        self.largest = 1 << (n_units.bit_length() - 1)
        self.seen: set[int] = set()
        assert self.allocator.largest() == self.largest * UNIT

    @rule(target=blocks, share=st.floats(0, 1), missing=st.integers(0, UNIT - 1))
    def allocate(self, share, missing):
        n = max(1, round(self.largest ** share))
        n_bytes = n * UNIT - missing
        offset = self.allocator.allocate(n_bytes)
        expected = self.reference.allocate(n)
        if expected is None:
            assert offset == self.kernels.kBuddyNoRoom
            return None
        assert offset == expected * UNIT
        assert offset % (UNIT << (n - 1).bit_length()) == 0
        assert n * UNIT - n_bytes < UNIT, "less than one unit is lost to rounding"
        self.seen.add(offset)
        return offset

    @rule(block=consumes(blocks))
    def release(self, block):
        if block is not None:
            assert self.allocator.release(block) == 0
            del self.reference.held[block // UNIT]

    @rule(at=st.integers(-3, 5000), within=st.integers(1, UNIT - 1))
    def misuse(self, at, within):
        inside = 0 <= at < self.reference.n_units
        if at not in self.reference.held:
            wanted = self.kernels.kBuddyNotHeld if inside else self.kernels.kBuddyForeign
            assert self.allocator.release(at * UNIT) == wanted
        assert self.allocator.release(at * UNIT + within) == self.kernels.kBuddyForeign
        assert self.allocator.allocate(0) == self.kernels.kBuddyZeroSize
        assert self.allocator.allocate(self.largest * UNIT + within) == self.kernels.kBuddyTooLarge

    @invariant()
    def the_free_set_is_the_references(self):
        if not hasattr(self, "allocator"):
            return
        assert free_blocks(self.allocator) == self.reference.free_blocks()
        held = sum(self.reference.held.values())
        assert self.allocator.free_bytes() == (self.reference.n_units - held) * UNIT
        ends = [0, *(end for unit, n in sorted(self.reference.held.items()) for end in (unit, unit + n))]
        assert ends == sorted(ends), "two blocks overlap"

    def teardown(self):
        if hasattr(self, "allocator"):
            for unit in list(self.reference.held):
                assert self.allocator.release(unit * UNIT) == 0
                assert self.allocator.release(unit * UNIT) == self.kernels.kBuddyNotHeld
            assert free_blocks(self.allocator) == Reference(self.reference.n_units).free_blocks()


TestTrace = Trace.TestCase
TestTrace.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def trace(allocator, seed: int, n_operations: int) -> list[int]:
    """Answers to a random trace that fills the allocator again and again."""
    rng, held, answers = np.random.default_rng(seed), [], []
    for n_units, place, kind in zip(rng.integers(1, 40, n_operations), rng.random(n_operations),
                                    rng.random(n_operations)):
        if held and kind < 0.45:
            answers.append(allocator.release(held.pop(int(place * len(held)))))
        else:
            answers.append(allocator.allocate(int(n_units) * UNIT))
            held += answers[-1:] if answers[-1] >= 0 else []
    return answers + [allocator.release(offset) for offset in held]


def test_the_same_requests_get_the_same_offsets(buddy):
    first, again = buddy.BuddyAllocator(1000 * UNIT, UNIT), buddy.BuddyAllocator(1000 * UNIT, UNIT)
    unpadded = buddy.UnpaddedBuddyAllocator(1000 * UNIT, UNIT)
    answers = trace(first, 5, 4000)
    assert answers == trace(again, 5, 4000) == trace(unpadded, 5, 4000)
    # After everything came back it is as new: the trace runs the same once more.
    assert answers == trace(first, 5, 4000) != trace(first, 6, 4000)
    assert buddy.kBuddyNoRoom in answers and buddy.kBuddyNotHeld not in answers


def test_what_a_block_does_not_need_is_free_at_once(buddy):
    allocator = buddy.BuddyAllocator(8 * UNIT, UNIT)
    assert allocator.allocate(5 * UNIT) == 0
    assert free_blocks(allocator) == [(0, 5), (1, 6)]
    assert [allocator.allocate(n * UNIT) for n in (2, 1, 1)] == [6 * UNIT, 5 * UNIT, buddy.kBuddyNoRoom]
    for offset in (5 * UNIT, 0, 6 * UNIT):
        assert allocator.release(offset) == 0
    assert free_blocks(allocator) == [(3, 0)]


def test_a_capacity_that_is_no_power_of_two_is_used_whole(buddy):
    allocator = buddy.BuddyAllocator(11 * UNIT, UNIT)
    assert free_blocks(allocator) == [(0, 10), (1, 8), (3, 0)]
    assert allocator.allocate(9 * UNIT) == buddy.kBuddyTooLarge
    assert [allocator.allocate(n * UNIT) for n in (8, 2, 1, 1)] == [0, 8 * UNIT, 10 * UNIT, buddy.kBuddyNoRoom]
    assert allocator.free_bytes() == 0


@pytest.mark.parametrize(("capacity", "min_block", "message"), [
    (1024, 100, "min_block is 100 bytes; give a power of two of at least 128"), (1024, 64, "min_block is 64"),
    (1024, 0, "min_block is 0"), (0, 128, "capacity is 0 bytes"), (1000, 128, "give 1 to 16777216 times min_block"),
    ((2**24 + 1) * 128, 128, "capacity is 2147483776"),
])
def test_sizes_that_cannot_be_managed_are_refused(buddy, capacity, min_block, message):
    with pytest.raises(Exception, match=message):
        buddy.BuddyAllocator(capacity, min_block)


def test_padded_means_lines_of_their_own_where_they_lie(buddy):
    n_units = 5000
    for _ in range(5):
        allocator = buddy.BuddyAllocator(n_units * UNIT, UNIT)
        assert allocator.address() % buddy.kBuddyLine == 0
        bitmaps = [allocator.bitmap_address(order) for order in range(n_units.bit_length())]
        assert not any(address % buddy.kBuddyLine for address in bitmaps)
        assert len(set(bitmaps)) == len(bitmaps)


def test_threads_never_overlap_and_leave_what_they_found_and_nothing_is_allocated(need_programs, tmp_path):
    need_programs("g++")
    for sanitizers in ("thread", "address,undefined"):
        program = tmp_path / f"buddy_check_{sanitizers[:6]}"
        # The check counts what operator new hands out; inlined, it looks to the compiler like a mismatched pair.
        subprocess.run(["g++", "-std=c++17", "-O1", "-pthread", f"-fsanitize={sanitizers}",
                        "-fno-sanitize-recover=all", "-Wno-mismatched-new-delete", f"-I{KERNELS}", SOURCE, "-o",
                        program], check=True, timeout=120)
        run = subprocess.run([program], capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr[-3000:]
        assert run.stdout == EXPECTED


def test_the_thread_sanitizer_sees_a_missing_lock(need_programs, tmp_path):
    need_programs("g++")
    lock, text = "const std::lock_guard<std::mutex> lock(all_.mutex);", (KERNELS / HEADERS[0]).read_text()
    assert lock in text
    (tmp_path / HEADERS[0]).write_text(text.replace(lock, ""))
    (tmp_path / HEADERS[1]).write_text((KERNELS / HEADERS[1]).read_text())
    program = tmp_path / "buddy_check"
    subprocess.run(["g++", "-std=c++17", "-O1", "-pthread", "-fsanitize=thread", "-fno-sanitize-recover=all",
                    "-Wno-mismatched-new-delete", f"-I{tmp_path}", SOURCE, "-o", program], check=True, timeout=120)
    run = subprocess.run([program], capture_output=True, text=True, timeout=120,
                         env={"TSAN_OPTIONS": "halt_on_error=1"})
    assert run.returncode != 0 and "data race" in run.stderr


@pytest.mark.parametrize("compiler", ["g++", "aarch64-linux-gnu-g++"])
def test_each_header_compiles_alone(need_programs, compiler, tmp_path):
    need_programs(compiler)
    for header in HEADERS:
        (tmp_path / f"{header}.cpp").write_text(f'#include "{header}"\n#include "{header}"\n')
    subprocess.run([compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{KERNELS}",
                    *(tmp_path / f"{header}.cpp" for header in HEADERS)], check=True, timeout=120)

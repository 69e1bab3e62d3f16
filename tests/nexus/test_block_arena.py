"""The arena of resident blocks: bounded, evicting by least recent use, and bit-identical to a block from its file."""
from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nexus.block_arena import ALIGNMENT, BlockArena, BlockArenaError
from nexus.blocks import Block, BlockError, BlockFile, compile_blocks, write_block
from nexus.runtime import ContextOptions, Runtime
from nexus.splice import Splicer

UNIT = 1024
OPTIONS = ContextOptions(n_ctx=512, n_seq_max=6, n_threads=1)
LEFT, WORK = 0, 1


def block_of(n_tokens: int, seed: int = 0, layers: int = 2, k_width: int = 8, v_width: int = 6) -> Block:
    """A block of random keys and values, float16[layers, n_tokens, width]."""
    rng = np.random.default_rng([seed, n_tokens])
    k, v = (rng.standard_normal((layers, n_tokens, width)).astype(np.float16) for width in (k_width, v_width))
    return Block(np.arange(n_tokens, dtype=np.int32), 5, 7, k, v, {"tool": f"t{seed}"})


def size_of(block: Block) -> int:
    """Bytes of the block in an arena."""
    return -(-block.k.nbytes // ALIGNMENT) * ALIGNMENT + block.v.nbytes


def assert_same(held: Block, block: Block) -> None:
    """Both hold the same bits."""
    for name in ("k", "v", "tokens"):
        np.testing.assert_array_equal(getattr(held, name).view(np.uint8), getattr(block, name).view(np.uint8))
    assert (held.anchor, held.left_context_hash, held.facts) == (block.anchor, block.left_context_hash, block.facts)


def test_a_view_is_the_arenas_own_memory_and_read_only():
    arena, block = BlockArena(64 * UNIT, UNIT), block_of(11)
    handle = arena.put(block)
    held = arena.view(handle)
    assert_same(held, block)
    assert arena.address % (2 << 20) == 0
    for array in (held.k, held.v):
        begin = array.ctypes.data - arena.address
        assert 0 <= begin and begin + array.nbytes <= arena.capacity and begin % ALIGNMENT == 0
        assert not array.flags.owndata and array.flags.c_contiguous
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0, 0] = 1
    assert arena.view(handle).k.ctypes.data == held.k.ctypes.data
    # The original may change or go: the arena has its own copy.
    expected, block.k[...] = block.k.copy(), 0
    np.testing.assert_array_equal(held.k, expected)
    assert not np.shares_memory(held.tokens, block.tokens)


def test_strided_arrays_are_copied_in_order():
    block = block_of(6)
    turned = dataclasses.replace(block, k=np.asfortranarray(block.k), v=block.v[:, ::-1])
    arena = BlockArena(64 * UNIT, UNIT)
    assert_same(arena.view(arena.put(turned)), dataclasses.replace(block, v=np.ascontiguousarray(turned.v)))


def test_the_least_recently_used_makes_room():
    arena, blocks = BlockArena(4 * UNIT, UNIT), [block_of(30, seed) for seed in range(6)]
    assert UNIT // 2 < size_of(blocks[0]) <= 2 * UNIT
    a, b = arena.put(blocks[0]), arena.put(blocks[1])
    arena.view(a)
    c = arena.put(blocks[2])
    assert (a in arena, b in arena, c in arena, arena.n_evicted) == (True, False, True, 1)
    with pytest.raises(BlockArenaError, match=f"block {b} was freed or evicted; put it again"):
        arena.view(b)
    with arena.pinned(a):
        d = arena.put(blocks[3])
        assert a in arena and c not in arena
    e = arena.put(blocks[4])
    assert a not in arena and d in arena
    assert_same(arena.view(d), blocks[3])
    assert_same(arena.view(e), blocks[4])
    # A handle is never given twice, though the place is.
    assert len({a, b, c, d, e}) == 5


def test_what_cannot_get_room_evicts_nothing():
    arena = BlockArena(4 * UNIT, UNIT)
    pinned, other = arena.put(block_of(30, 1)), arena.put(block_of(30, 2))
    arena.pin(pinned)
    told = r"1 pinned blocks with \d+ bytes stand in the way; unpin some or raise capacity_bytes \(4096\)"
    with pytest.raises(BlockArenaError, match=r"no room for \d+ bytes: " + told):
        arena.put(block_of(60))
    assert pinned in arena and other in arena and arena.n_evicted == 0
    with pytest.raises(BlockArenaError, match=r"capacity_bytes is 4096, which serves up to 4096; raise it to 8192"):
        arena.put(block_of(100))
    arena.unpin(pinned)
    big = arena.put(block_of(60))
    assert list(arena._places) == [big] and arena.n_evicted == 2


def test_pins_count_and_protect():
    arena = BlockArena(4 * UNIT, UNIT)
    handle = arena.put(block_of(3))
    arena.pin(handle)
    arena.pin(handle)
    arena.unpin(handle)
    with pytest.raises(BlockArenaError, match=f"block {handle} is pinned 1 times; unpin it"):
        arena.free(handle)
    arena.unpin(handle)
    with pytest.raises(BlockArenaError, match=f"block {handle} is not pinned"):
        arena.unpin(handle)
    with pytest.raises(KeyError), arena.pinned(handle):
        raise KeyError
    arena.free(handle)
    for call in (arena.view, arena.pin, arena.unpin, arena.free):
        with pytest.raises(BlockArenaError, match=f"block {handle} was freed or evicted"):
            call(handle)
        for wrong in (0, handle + 1, -1, "tool", None):
            with pytest.raises(BlockArenaError, match="is none of this arena's; use what put returned"):
                call(wrong)
    assert arena.reserved_bytes == 0


@pytest.mark.parametrize(("capacity", "unit", "message"), [
    (0, UNIT, "capacity_bytes is 0"), (-4, UNIT, "capacity_bytes is -4"), (2.5, UNIT, "capacity_bytes is 2.5"),
    (UNIT, 1000, "min_block is 1000 bytes; give a power of two"), (UNIT + 1, UNIT, "capacity is 1025 bytes; give 1 to"),
])
def test_sizes_that_make_no_arena_are_refused(capacity, unit, message):
    with pytest.raises(BlockArenaError, match=message):
        BlockArena(capacity, unit)


def test_blocks_that_are_no_originals_are_refused():
    arena, block = BlockArena(64 * UNIT, UNIT), block_of(4)
    with pytest.raises(BlockArenaError, match="k is float32; the arena keeps originals: convert it to float16"):
        arena.put(dataclasses.replace(block, k=block.k.astype(np.float32)))
    with pytest.raises(BlockArenaError, match="v is int16"):
        arena.put(dataclasses.replace(block, v=block.v.astype(np.int16)))
    with pytest.raises(BlockArenaError, match="no keys and values"):
        arena.put(block_of(0))
    assert len(arena) == 0 and arena.reserved_bytes == 0


def test_memory_stays_while_a_view_of_it_lives():
    arena, block = BlockArena(64 * UNIT, UNIT), block_of(9)
    held = arena.view(arena.put(block))
    del arena
    assert_same(held, block)


class Trace(RuleBasedStateMachine):
    """Any trace: what is held is what was put, memory is bounded, and the order of eviction is that of last use."""

    N_UNITS = 37

    def __init__(self):
        super().__init__()
        self.arena = BlockArena(self.N_UNITS * UNIT, UNIT)
        self.held: dict[int, Block] = {}  # least recently used first
        self.pins: dict[int, int] = {}
        self.n_put = 0

    def used(self, handle: int) -> None:
        self.held[handle] = self.held.pop(handle)

    @rule(n_tokens=st.integers(1, 700))
    def put(self, n_tokens):
        self.n_put += 1
        block, before = block_of(n_tokens, self.n_put), list(self.held)
        try:
            handle = self.arena.put(block)
        except BlockArenaError as error:
            assert set(before) == {handle for handle in self.held if handle in self.arena}
            assert ("pinned" in str(error) and self.pins) or size_of(block) > 32 * UNIT
            return
        evicted = [handle for handle in before if handle not in self.arena]
        # The first of those that are not pinned, and no more than it took.
        assert evicted == [handle for handle in before if handle not in self.pins][:len(evicted)]
        for gone in evicted:
            del self.held[gone]
        self.held[handle] = block

    @precondition(lambda self: self.held)
    @rule(data=st.data(), what=st.sampled_from(["view", "pin", "unpin", "free"]))
    def use(self, data, what):
        handle = data.draw(st.sampled_from(list(self.held)))
        if what == "view":
            self.arena.view(handle)
            self.used(handle)
        elif what == "pin":
            self.arena.pin(handle)
            self.used(handle)
            self.pins[handle] = self.pins.get(handle, 0) + 1
        elif what == "unpin" and handle in self.pins:
            self.arena.unpin(handle)
            self.pins[handle] -= 1
            self.pins = {other: n for other, n in self.pins.items() if n}
        elif what == "free" and handle not in self.pins:
            self.arena.free(handle)
            del self.held[handle]

    @invariant()
    def everything_is_where_it_was_put(self):
        assert list(self.arena._places) == list(self.held) and len(self.arena) == len(self.held)
        ends = []
        for handle, block in self.held.items():
            held = self.arena._places[handle].block
            assert_same(held, block)
            ends.append((held.k.ctypes.data, held.v.ctypes.data + held.v.nbytes))
        for (_, end), (begin, _) in zip(sorted(ends), sorted(ends)[1:]):
            assert end <= begin
        assert self.arena.block_bytes == sum(size_of(block) for block in self.held.values())
        assert self.arena.block_bytes <= self.arena.reserved_bytes <= self.arena.capacity
        assert self.arena.reserved_bytes - self.arena.block_bytes < max(1, len(self.held)) * UNIT


TestTrace = Trace.TestCase
TestTrace.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_several_threads_put_and_read():
    arena, wrong = BlockArena(40 * UNIT, UNIT), []

    def work(thread: int) -> None:
        rng = np.random.default_rng(thread)
        for _ in range(150):
            block = block_of(int(rng.integers(1, 120)), thread)
            handle = arena.put(block)
            try:
                with arena.pinned(handle) as held:
                    assert_same(held, block)
            except BlockArenaError:
                continue  # another thread's block took its place before it was pinned
            except AssertionError as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and arena.n_evicted > 0


@pytest.fixture(scope="module", params=["row", "transposed"])
def bench(request, smollm2, tmp_path_factory):
    """(runtime, splicer, left tokens, file of a block compiled behind `left`) with either layout of V."""
    with Runtime(smollm2, dataclasses.replace(OPTIONS, flash_attention=request.param == "row")) as runtime:
        rng, splicer = np.random.default_rng(3), Splicer(runtime)
        left, tokens = (rng.integers(100, 20000, n).astype(np.int32) for n in (37, 61))
        path = tmp_path_factory.mktemp("arena") / "tool.atb"
        write_block(path, next(iter(compile_blocks(runtime, left, [tokens]))), runtime)
        yield runtime, splicer, left, path
        runtime.clear()


def spliced(runtime, splicer, left, resident, position) -> tuple[np.ndarray, np.ndarray]:
    """The saved state with the block at `position`, and the logits of a query behind it."""
    runtime.clear()
    filling = np.resize(np.arange(300, 900, dtype=np.int32), position - len(left))
    runtime.decode(left, 0, LEFT)
    if len(filling):
        runtime.decode(filling, len(left), LEFT)
    splicer.place(resident, position, LEFT)
    state = runtime.state_get(LEFT)
    return state, runtime.decode(np.array([500, 501, 502], np.int32), position + resident.n_tokens, LEFT, logits=True)


@pytest.mark.integration
def test_a_block_from_the_arena_is_spliced_to_the_bit_like_one_from_its_file(bench):
    runtime, splicer, left, path = bench
    file = BlockFile(path)
    from_file = splicer.hold(file)
    arena = BlockArena(8 << 20, 64 << 10, runtime)
    other = arena.put(BlockFile(path))
    handle = arena.put(BlockFile(path))
    arena.free(other)
    for position in (len(left), 150):
        expected = spliced(runtime, splicer, left, from_file, position)
        with arena.resident(handle, splicer) as resident:
            measured = spliced(runtime, splicer, left, resident, position)
            # Moves before do not matter: every one starts from the original.
            for elsewhere in (400, 3, 77):
                resident.native.reanchor(elsewhere, True)
            again = spliced(runtime, splicer, left, resident, position)
        for state, logits in (measured, again):
            np.testing.assert_array_equal(state, expected[0])
            np.testing.assert_array_equal(logits.view(np.uint32), expected[1].view(np.uint32))
    np.testing.assert_array_equal(arena.view(handle).k.view(np.uint16), _originals(file).view(np.uint16))


def _originals(file: BlockFile) -> np.ndarray:
    """The keys that the file holds, float16[n_layers, n_tokens, width], read with plain file access."""
    header = file.header
    shape = (int(header.n_layers), file.n_tokens, int(header.n_head_kv) * int(header.head_dim_k))
    return np.fromfile(file.path, np.float16, int(np.prod(shape)), offset=2 << 20).reshape(shape)


@pytest.mark.integration
def test_a_resident_reads_its_keys_from_the_arena_each_time_it_is_placed(bench):
    runtime, splicer, left, path = bench
    arena = BlockArena(8 << 20, 64 << 10, runtime)
    handle = arena.put(BlockFile(path))
    with arena.resident(handle, splicer) as resident:
        before, _ = spliced(runtime, splicer, left, resident, 150)
        with pytest.raises(BlockArenaError, match="is pinned 1 times"):
            arena.free(handle)
        # Against the rules, to see where the keys come from.
        held = arena.view(handle)
        begin = held.k.ctypes.data - arena.address
        arena._memory[begin:begin + held.k.nbytes].view(np.float16)[...] = 0
        after, _ = spliced(runtime, splicer, left, resident, 150)
    assert not np.array_equal(before, after)
    arena.free(handle)


@pytest.mark.integration
def test_what_is_not_the_runtimes_does_not_come_in(bench, smollm2, tmp_path, monkeypatch):
    runtime, splicer, left, path = bench
    with pytest.raises(BlockArenaError, match="belongs to one model and the arena to none"):
        BlockArena(8 << 20).put(BlockFile(path))
    arena = BlockArena(8 << 20, 64 << 10, runtime)
    with pytest.raises(BlockError, match="k has shape"):
        arena.put(block_of(4))
    file = BlockFile(path)
    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "sha256", "0" * 64)
        with pytest.raises(BlockError, match="model_fingerprint"):
            arena.put(file)
    assert len(arena) == 0
    handle = arena.put(file)
    with Runtime(smollm2, dataclasses.replace(OPTIONS, n_ctx=256)) as other:
        with pytest.raises(BlockArenaError, match="another runtime"), arena.resident(handle, Splicer(other)):
            pass
    with arena.resident(handle, splicer) as resident:
        assert resident.n_tokens == file.n_tokens
    arena.free(handle)

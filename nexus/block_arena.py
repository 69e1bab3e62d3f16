"""The F16 originals of resident blocks, in one arena of fixed size that a buddy allocator divides.

    arena = BlockArena(64 << 20, 64 << 10, runtime)
    handle = arena.put(BlockFile(path))                   # copied once; evicts what was least recently used
    with arena.resident(handle, splicer) as resident:     # keys are rotated straight from the arena
        splicer.place(resident, position, seq)

A resident block's keys are always rotated from what stands in the arena, which nothing writes after `put`: views of it
are read-only, and what is pinned stays. Memory never exceeds the capacity and one huge page.
"""
from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from nexus import native
from nexus.blocks import Block, BlockFile, check_block
from nexus.native import describe
from nexus.runtime import Runtime
from nexus.splice import Resident, Splicer

# Arrays begin at multiples of it: a cache line, and more than any vector register.
ALIGNMENT = 128
MIN_BLOCK_BYTES = 64 << 10


class BlockArenaError(RuntimeError):
    """The arena cannot do it; the message names the value and the remedy. Nothing has changed."""


@functools.cache
def allocator_kernels():
    """The C++ namespace `nexus` with the buddy allocator."""
    kernels = native.kernels()
    import cppyy

    cppyy.include("buddy_allocator.hpp")
    return kernels


@dataclass
class _Place:
    """Where a block lies: offset and bytes in the arena, and how often it is pinned."""

    offset: int
    n_bytes: int
    block: Block
    pins: int = 0


class BlockArena:
    """Compiled blocks in `capacity_bytes` of memory aligned to 2 MiB, in units of `min_block_bytes`.

    A handle is a number that is never given twice, so a stale one is told from a new block at the same place. With a
    `runtime`, every block is checked against it on the way in; without one only in-memory blocks are taken, since
    those of a file name the model that they belong to. May be called from several threads.
    """

    def __init__(self, capacity_bytes: int, min_block_bytes: int = MIN_BLOCK_BYTES, runtime: Runtime | None = None):
        kernels = allocator_kernels()
        self._allocator = _constructed(kernels.BuddyAllocator, capacity_bytes, min_block_bytes)
        self.capacity, self.min_block, self.runtime = capacity_bytes, min_block_bytes, runtime
        self.largest = int(self._allocator.largest())
        # Of numpy, which keeps it alive as long as any view; the system gives pages only to what is written.
        whole = np.empty(capacity_bytes + kernels.kBlockAlignment, np.uint8)
        begin = -whole.ctypes.data % kernels.kBlockAlignment
        self._memory = whole[begin:begin + capacity_bytes]
        self._places: OrderedDict[int, _Place] = OrderedDict()  # least recently used first
        self._n_put = 0
        self._lock = threading.RLock()
        self.n_evicted = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, handle: int) -> bool:
        return handle in self._places

    @property
    def address(self) -> int:
        """Where the arena begins, a multiple of 2 MiB."""
        return self._memory.ctypes.data

    @property
    def block_bytes(self) -> int:
        """Bytes of keys and values that are held, with the padding between them."""
        with self._lock:
            return sum(place.n_bytes for place in self._places.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the units that are held; per block less than `min_block` above `block_bytes`."""
        return self.capacity - int(self._allocator.free_bytes())

    def put(self, block: Block | BlockFile) -> int:
        """Handle of a copy of the block's keys and values, the most recently used now.

        Blocks that are not pinned make room, the least recently used first. Raises BlockError for a block that is not
        the runtime's, and BlockArenaError, with nothing evicted, for one that cannot get room.
        """
        if isinstance(block, BlockFile):
            if self.runtime is None:
                raise BlockArenaError(f"{block.path} belongs to one model and the arena to none; "
                                      "make the arena with the runtime that will place its blocks")
            block.check(self.runtime)
            tokens, k, v = block.tokens, *_mapped(block)
        else:
            if self.runtime is not None:
                check_block(block, self.runtime.model)
            tokens, k, v = block.tokens, block.k, block.v
            for name, array in (("k", k), ("v", v)):
                if array.dtype != np.float16:
                    raise BlockArenaError(f"{name} is {array.dtype}; the arena keeps originals: convert it to float16")
        v_begin = -(-k.nbytes // ALIGNMENT) * ALIGNMENT
        n_bytes = v_begin + v.nbytes
        with self._lock:
            offset = self._room(n_bytes)
            here = self._memory[offset:offset + n_bytes]
            copies = []
            for begin, array in ((0, k), (v_begin, v)):
                copy = here[begin:begin + array.nbytes].view(np.float16).reshape(array.shape)
                copy[...] = array
                copy.flags.writeable = False
                copies.append(copy)
            self._n_put += 1
            self._places[self._n_put] = _Place(offset, n_bytes, Block(
                np.array(tokens, dtype=np.int32), block.anchor, block.left_context_hash, *copies, dict(block.facts)))
            return self._n_put

    def view(self, handle: int) -> Block:
        """The block, with `k` and `v` as read-only views of the arena; the most recently used now.

        They hold its keys and values until the block is freed or evicted; `pin` it to rely on them.
        """
        with self._lock:
            place = self._place(handle)
            self._places.move_to_end(handle)
            return place.block

    def pin(self, handle: int) -> Block:
        """As `view`; the block is neither evicted nor freed before as many calls of `unpin`."""
        with self._lock:
            block = self.view(handle)
            self._place(handle).pins += 1
            return block

    def unpin(self, handle: int) -> None:
        """None, after one pin is taken back."""
        with self._lock:
            place = self._place(handle)
            if place.pins == 0:
                raise BlockArenaError(f"block {handle} is not pinned; call unpin once per pin")
            place.pins -= 1

    @contextmanager
    def pinned(self, handle: int) -> Iterator[Block]:
        """The block, pinned until the end of the `with`."""
        block = self.pin(handle)
        try:
            yield block
        finally:
            self.unpin(handle)

    @contextmanager
    def resident(self, handle: int, splicer: Splicer) -> Iterator[Resident]:
        """The block ready to be placed by `splicer`, with keys rotated from the arena's memory, pinned meanwhile.

        The resident keeps the address, so it must not be used behind the `with`. One that is to live longer is
        `splicer.hold(arena.pin(handle))`, with `unpin` at its end.
        """
        if self.runtime is not None and splicer.runtime is not self.runtime:
            raise BlockArenaError("splicer works in another runtime than the arena's blocks were checked against; "
                                  "make a Splicer for arena.runtime")
        with self.pinned(handle) as block:
            yield splicer.hold(block)

    def free(self, handle: int) -> None:
        """None, after the block's room is free again."""
        with self._lock:
            place = self._place(handle)
            if place.pins:
                raise BlockArenaError(f"block {handle} is pinned {place.pins} times; unpin it before it is freed")
            self._release(handle)

    def _place(self, handle: int) -> _Place:
        place = self._places.get(handle)
        if place is None:
            known = isinstance(handle, int) and 1 <= handle <= self._n_put
            raise BlockArenaError(f"block {handle} was freed or evicted; put it again" if known else
                                  f"handle {handle!r} is none of this arena's; use what put returned")
        return place

    def _release(self, handle: int) -> None:
        place = self._places[handle]
        if status := int(self._allocator.release(place.offset)):
            raise BlockArenaError(f"offset {place.offset} of block {handle} is not held (code {status}); "
                                  "the arena's allocator was used by somebody else")
        del self._places[handle]

    def _room(self, n_bytes: int) -> int:
        """Offset of that many bytes, after eviction where it takes one."""
        if n_bytes == 0:
            raise BlockArenaError("the block has no keys and values; give at least one token")
        if n_bytes > self.largest:
            raise BlockArenaError(f"the block has {n_bytes} bytes and capacity_bytes is {self.capacity}, which serves "
                                  f"up to {self.largest}; raise it to {_power_of_two(n_bytes)} or more")
        if not self._could_serve(n_bytes):
            pinned = [place.n_bytes for place in self._places.values() if place.pins]
            raise BlockArenaError(f"no room for {n_bytes} bytes: {len(pinned)} pinned blocks with {sum(pinned)} bytes "
                                  f"stand in the way; unpin some or raise capacity_bytes ({self.capacity})")
        unpinned = iter([handle for handle, place in self._places.items() if not place.pins])
        while (offset := int(self._allocator.allocate(n_bytes))) < 0:
            self._release(next(unpinned))
            self.n_evicted += 1
        return offset

    def _could_serve(self, n_bytes: int) -> bool:
        """Whether the allocator had room if nothing but the pinned blocks were there."""
        size = max(_power_of_two(n_bytes), self.min_block)
        taken = np.zeros(self.capacity // size, bool)
        for place in self._places.values():
            if place.pins:
                taken[place.offset // size:-(-(place.offset + place.n_bytes) // size)] = True
        return not taken.all()


def _constructed(allocator, capacity_bytes: int, min_block_bytes: int):
    for name, value in (("capacity_bytes", capacity_bytes), ("min_block_bytes", min_block_bytes)):
        if not isinstance(value, int) or value <= 0:
            raise BlockArenaError(f"{name} is {value!r}; give a number of bytes above 0")
    try:
        return allocator(capacity_bytes, min_block_bytes)
    except Exception as error:
        raise BlockArenaError(describe(error)) from None


def _power_of_two(n_bytes: int) -> int:
    """The smallest power of two that is not below."""
    return 1 << (n_bytes - 1).bit_length()


class _Mapped:
    """An array that lies at an address; keeps the file mapped while numpy reads it."""

    def __init__(self, file: BlockFile, address: int, shape: tuple[int, ...]):
        self.file = file
        self.__array_interface__ = {"version": 3, "typestr": "<f2", "shape": shape, "data": (address, True)}


def _mapped(file: BlockFile) -> list[np.ndarray]:
    """Keys and values of a block file in place, float16[n_layers, n_tokens, width] each."""
    header = file.header
    return [np.asarray(_Mapped(file, int(address), (int(header.n_layers), file.n_tokens,
                                                    int(header.n_head_kv) * int(head_dim))))
            for address, head_dim in ((file.file.k_addr(), header.head_dim_k), (file.file.v_addr(), header.head_dim_v))]

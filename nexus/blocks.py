"""Tool blocks: a tool's tokens with the keys and values that a model computed for them, compiled once, kept as `.atb`.

A block remembers the position it was compiled at (its anchor) and what stood to its left. File form:
kernels/tool_block.hpp.
"""
from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nexus import native
from nexus.rope import LAYOUT_CODES, SCALING_CODES
from nexus.runtime import Model, Runtime

F16 = 1
LIVE_SEQ = 0


class BlockError(RuntimeError):
    """A block cannot be compiled, read, or used with this model; the message names the field."""


@dataclass(frozen=True)
class Block:
    """A compiled block in memory."""

    tokens: np.ndarray
    """Token ids, int32[n_tokens]."""
    anchor: int
    """Position of the first token when the block was compiled."""
    left_context_hash: int
    """`context_hash` of the tokens that stood to its left."""
    k: np.ndarray
    """Rotated keys as computed, float16[n_layers, n_tokens, n_head_kv · head_dim_k].

    Layers stand in the order of llama.cpp's saved state, not of the model: with sliding-window attention all global
    layers come first, then all local ones."""
    v: np.ndarray
    """Values, float16[n_layers, n_tokens, n_head_kv · head_dim_v], layers as in `k`."""
    facts: dict = field(default_factory=dict)
    """Free-form facts such as the tool's name; kept in the file as JSON."""


def context_hash(tokens: np.ndarray) -> int:
    """First 8 bytes of the SHA-256 of token ids (int32, little endian), as an unsigned integer."""
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def block_split(n_tokens: int) -> tuple[int, ...]:
    """Batch sizes in which a block is decoded everywhere: all but the last token, then the last.

    The last token goes alone so that its logits can be read both after a full prefill and after a splice that
    re-decodes only this token, with the same split on both sides.
    """
    return (n_tokens - 1, 1) if n_tokens > 1 else (1,)


def compile_blocks(runtime: Runtime, left: np.ndarray, token_lists: Sequence[np.ndarray]) -> Iterator[Block]:
    """Blocks for each list of token ids, all compiled right behind the tokens `left`.

    Empties the runtime first, so that cells are taken in order and a block placed at its anchor behind the same
    context is bit-identical to a prefill. Anchor = len(left).
    """
    model = runtime.model
    anchor = len(left)
    runtime.clear()
    if anchor:
        runtime.decode(left, 0, LIVE_SEQ)
    work = 1
    if work == runtime.scratch_seq:
        raise BlockError(f"n_seq_max is {runtime.options.n_seq_max}; compiling needs at least 3 sequences")
    for tokens in token_lists:
        n = len(tokens)
        if n == 0:
            raise BlockError("a block needs at least one token")
        try:
            if anchor:
                runtime.seq_cp(LIVE_SEQ, work)
            runtime.decode(tokens, anchor, work, split=block_split(n))
            k, v = read_cells(runtime, work, anchor, anchor + n)
        finally:
            runtime.seq_rm(work)
        yield Block(np.asarray(tokens, dtype=np.int32), anchor, context_hash(left), k, v)


def read_cells(runtime: Runtime, seq: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """(k, v) of positions begin … end−1 of a sequence as in `Block`: float16[n_layers, end−begin, width] each.

    Uses the scratch sequence, which must be empty. Raises BlockError where these positions do not lie there,
    one cell each in every layer.
    """
    model, copy = runtime.model, runtime.scratch_seq
    # A saved state leaves out local cells that lie a whole window before the sequence's end, so that longer ranges are
    # saved in pieces of one window each.
    window = model.n_swa or end - begin
    pieces = []
    for first in range(begin, end, window):
        last = min(first + window, end)
        try:
            runtime.seq_cp(seq, copy, first, last)
            blob = runtime.state_get(copy)
        finally:
            runtime.seq_rm(copy)
        k = np.empty((model.n_layer, last - first, model.n_head_kv * model.head_dim_k), dtype=np.float16)
        v = np.empty((model.n_layer, last - first, model.n_head_kv * model.head_dim_v), dtype=np.float16)
        positions = read_block(blob, k, v)
        # llama.cpp saves cells as they lie in memory, which need not be the order of positions.
        order = np.argsort(positions)
        if not np.array_equal(positions[order], np.arange(first, last)):
            raise BlockError(f"the saved state holds positions {positions.min()} … {positions.max()}, "
                             f"not each of {first} … {last - 1} once")
        pieces.append((np.take(k, order, axis=1), np.take(v, order, axis=1)))
    k, v = (np.concatenate(parts, axis=1) for parts in zip(*pieces))
    return k, v


def read_block(blob: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Positions of the cells, int32[n_cells]; fills k and v (float16[n_layers, n_cells, width]) from a saved state.

    Layers come in the state's order. Raises BlockError when the state's caches hold different cells, another number of
    cells or layers, another type, or rows of unequal width.
    """
    positions = np.empty(k.shape[1], dtype=np.int32)
    kernels = native.kernels()
    try:
        state = kernels.parse_kv_state(blob.ctypes.data, blob.nbytes)
        kernels.read_kv_block(blob.ctypes.data, blob.nbytes, state, k.ctypes.data, k.nbytes, v.ctypes.data, v.nbytes,
                              positions.ctypes.data, positions.nbytes)
    except Exception as error:
        raise BlockError(native.describe(error)) from None
    return positions


def check_block(block: Block, model: Model) -> None:
    """Refuse an in-memory block whose arrays the kernels would misread: BlockError naming field, value and remedy."""
    tokens = block.tokens
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or len(tokens) == 0:
        raise BlockError(f"tokens are {tokens.dtype}{list(tokens.shape)}; give integer ids [n_tokens], at least one")
    if tokens.min() < 0 or tokens.max() >= model.n_vocab:
        raise BlockError(f"tokens hold {tokens.min()} … {tokens.max()}; "
                         f"give ids of this model, 0 … {model.n_vocab - 1}")
    if block.anchor < 0:
        raise BlockError(f"anchor is {block.anchor}; give the first token's position, 0 or more")
    for name, array, head_dim in (("k", block.k, model.head_dim_k), ("v", block.v, model.head_dim_v)):
        shape = (model.n_layer, len(tokens), model.n_head_kv * head_dim)
        if array.dtype != np.float16:
            raise BlockError(f"{name} is {array.dtype}; convert it to float16")
        if array.shape != shape:
            raise BlockError(f"{name} has shape {list(array.shape)}; [n_layers, n_tokens, width] is {list(shape)} here")
        if not array.flags.c_contiguous:
            raise BlockError(f"{name} has strides {array.strides}; make it C-contiguous with np.ascontiguousarray")


def _header(runtime: Runtime):
    """A ToolBlockHeader with the fields that depend on the model."""
    header = native.kernels().ToolBlockHeader()
    model, rope = runtime.model, runtime.rope
    header.n_layers = model.n_layer
    header.n_head_kv = model.n_head_kv
    header.head_dim_k = model.head_dim_k
    header.head_dim_v = model.head_dim_v
    header.n_rot = rope.n_rot
    header.rope_layout = LAYOUT_CODES[rope.layout]
    header.rope_base = rope.base
    header.rope_freq_scale = rope.freq_scale
    header.rope_scaling_type = SCALING_CODES[rope.scaling]
    header.rope_freq_hash = rope.frequency_hash
    header.k_type = header.v_type = F16
    for i, byte in enumerate(bytes.fromhex(model.sha256)[:16]):
        header.model_fingerprint[i] = byte
    return header


def write_block(path: str | os.PathLike, block: Block, runtime: Runtime) -> None:
    """Write a block as `.atb`: to a temporary file, then renamed. `runtime` is the one that compiled it.

    Raises BlockError for a block that does not fit the runtime's model and where the file cannot be written.
    """
    try:
        check_block(block, runtime.model)
    except BlockError as error:
        raise BlockError(f"{path}: {error}") from None
    header = _header(runtime)
    header.anchor = block.anchor
    header.n_tokens = len(block.tokens)
    header.left_context_hash = block.left_context_hash
    tokens = np.ascontiguousarray(block.tokens, dtype=np.int32)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        native.kernels().write_tool_block(os.fspath(path), header, tokens.ctypes.data,
                                          json.dumps(block.facts, ensure_ascii=False, sort_keys=True),
                                          block.k.ctypes.data, block.v.ctypes.data)
    except Exception as error:
        raise BlockError(f"{path}: {native.describe(error)}") from None


class BlockFile:
    """A validated `.atb`, memory-mapped; keys and values are read in place. Raises BlockError naming what is wrong."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        try:
            self.file = native.kernels().ToolBlockFile(os.fspath(path))
        except Exception as error:
            raise BlockError(native.describe(error)) from None
        header = self.file.header()
        self.anchor = int(header.anchor)
        self.n_tokens = int(header.n_tokens)
        self.left_context_hash = int(header.left_context_hash)
        self.facts = json.loads(str(self.file.meta_json()))
        self.tokens = np.array(self.file.tokens(), dtype=np.int32)

    @property
    def header(self):
        return self.file.header()

    def check(self, runtime: Runtime) -> None:
        """Refuse a block that another model, RoPE scaling or KV type made: BlockError naming the mismatched field."""
        mismatch = str(native.kernels().header_mismatch(self.file.header(), _header(runtime)))
        if mismatch:
            raise BlockError(f"{self.path} does not belong to this model and context: {mismatch}; compile it again")

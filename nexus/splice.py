"""Puts a compiled block into a live sequence at another position, or says before any change why it cannot.

The refusal is the contract (fail closed): what cannot be placed faithfully is named, nothing has moved, and the caller
prefills the text instead ("Path B", `place_or_prefill`).
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nexus import native
from nexus.blocks import Block, BlockError, BlockFile, block_split, check_block, read_block
from nexus.native import describe
from nexus.rope import LAYOUT_CODES, Rope, RopeError
from nexus.runtime import Runtime, RuntimeFailure

PROBE_TOKENS = 8
PROBE_DELTA = 219


class SpliceRefused(RuntimeError):
    """The block cannot be placed; the message is the reason. No sequence has changed."""


def memory_refusal(runtime: Runtime | None) -> str | None:
    """Why this model and context cannot take spliced keys, judged from what they declare; None when nothing speaks against it."""
    if runtime is None:
        return "remote model: a text interface gives no access to keys and values"
    model, options = runtime.model, runtime.options
    if model.is_recurrent or model.is_hybrid:
        return f"memory type: {model.arch} keeps recurrent state, which has no per-token keys"
    try:
        runtime.rope
    except RopeError as error:
        return str(error)
    if not runtime.can_shift():
        return "memory cannot shift positions (M-RoPE or per-layer RoPE)"
    if options.kv_type_k != "f16" or options.kv_type_v != "f16":
        return (f"KV type: K is {options.kv_type_k} and V is {options.kv_type_v}; "
                "re-anchored blocks are F16, set kv_type_k=kv_type_v=f16")
    if model.n_swa > 0 and not options.swa_full:
        return (f"sliding-window attention: local layers keep only a window of {model.n_swa} tokens, "
                "so that a block loses its older cells; set swa_full=true")
    if not options.kv_unified:
        return "kv_unified is false: sequences live in separate streams, so cells cannot be shared; set kv_unified=true"
    return None


def pair_ulps(reference: np.ndarray, measured: np.ndarray, rope: Rope, n_head: int, head_dim: int) -> np.ndarray:
    """Distance of two key arrays in F16 ulps of each rotated pair's magnitude, float64[..., n_head, n_rot/2, 2].

    Both arrays are float16[..., n_head · head_dim]. An ulp of the element would be meaningless: where rotation cancels,
    elements near zero differ by many of their own ulps although the pair is as exact as F16 allows.
    """
    def pairs(keys: np.ndarray) -> np.ndarray:
        heads = keys.reshape(*keys.shape[:-1], n_head, head_dim)[..., :rope.n_rot].astype(np.float64)
        if rope.layout == "neox":
            half = rope.n_rot // 2
            return np.stack([heads[..., :half], heads[..., half:]], axis=-1)
        return heads.reshape(*heads.shape[:-1], rope.n_rot // 2, 2)

    a, b = pairs(reference), pairs(measured)
    magnitude = np.maximum(np.hypot(a[..., 0], a[..., 1]), 2.0 ** -14)
    ulp = 2.0 ** (np.floor(np.log2(magnitude)) - 10)
    return np.abs(a - b) / ulp[..., None]


class Resident:
    """A block held ready in the live context's layout. Made by `Splicer.hold`; keeps keys and values alive."""

    def __init__(self, native_block, source: Block | BlockFile):
        self.native, self.source = native_block, source
        self.n_tokens, self.anchor = int(native_block.n_tokens()), int(native_block.anchor())

    @property
    def n_bytes(self) -> int:
        """Size of the state blob that a splice hands to llama.cpp."""
        return int(self.native.blob_size())

    def blob(self) -> np.ndarray:
        """A copy of the state blob as last placed, uint8[n_bytes]."""
        out = np.empty(self.n_bytes, dtype=np.uint8)
        self.native.copy_blob(out.ctypes.data)
        return out


@dataclass(frozen=True)
class SpliceTimes:
    """Microseconds spent in the parts of one splice."""

    reanchor_us: float
    set_state_us: float
    graft_us: float
    total_us: float


class Splicer:
    """Places blocks in one runtime. Construction proves, on this build and model, that placing is exact.

    Raises SpliceRefused when the model or context declares something that cannot be spliced, when llama.cpp's state
    does not survive a byte-exact round trip through our reader and writer, or when our rotation of any layer's keys
    differs from llama.cpp's own shift by more than one ulp of the rotated pair. Needs an empty runtime.
    """

    def __init__(self, runtime: Runtime, isa: str | None = None):
        reason = memory_refusal(runtime)
        if reason:
            raise SpliceRefused(reason)
        self.runtime = runtime
        self.isa, self._isa_code = choose_isa(isa)
        self._frequencies = np.stack([runtime.rope.frequencies, runtime.rope.frequencies_swa])
        if any(runtime.pos_max(seq) >= 0 for seq in range(runtime.options.n_seq_max)):
            raise RuntimeFailure("a Splicer must be made while the runtime is empty: it decodes a few tokens to prove itself")
        try:
            self._prove()
        finally:
            runtime.clear()

    def _prove(self) -> None:
        runtime, n = self.runtime, PROBE_TOKENS
        tokens = (np.arange(n + 1, dtype=np.int32) * 7 + 11) % runtime.model.n_vocab
        work = 0
        runtime.decode(tokens[:n], 0, work)
        saved = runtime.state_get(work)
        keys, values = self.read(saved, n)
        state = native.kernels().parse_kv_state(saved.ctypes.data, saved.nbytes)
        self.magic, self.v_trans = int(state.magic), bool(state.caches[0].v_trans)
        self._n_layers = [int(cache.k.size()) for cache in state.caches]
        if len(self._n_layers) != (2 if runtime.model.n_swa > 0 else 1):
            raise SpliceRefused(f"state format: a saved state holds {len(self._n_layers)} caches; spliced are models "
                                "with one, or with two where global and sliding-window layers alternate")
        probe = self.hold(Block(tokens[:n], 0, 0, keys, values))
        if not np.array_equal(_without_seq(saved), _without_seq(probe.blob())):
            raise SpliceRefused("state format: a saved state does not survive a byte-exact round trip; "
                                "this llama.cpp build is not supported")
        runtime.seq_rm(work)
        self.place(probe, 0, work)
        if not np.array_equal(_without_seq(saved), _without_seq(runtime.state_get(work))):
            raise SpliceRefused("state format: a restored state differs from the saved one; "
                                "this llama.cpp build is not supported")
        runtime.seq_add(work, 0, -1, PROBE_DELTA)
        runtime.decode(tokens[n:], n + PROBE_DELTA, work)
        engine, _ = self.read(runtime.state_get(work), n + 1)
        probe.native.reanchor(PROBE_DELTA, True)
        ours, _ = self.read(probe.blob(), n)
        model = runtime.model
        ulps = pair_ulps(engine[:, :n], ours, runtime.rope, model.n_head_kv, model.head_dim_k)
        if ulps.max() > 1:
            layer = int(np.unravel_index(ulps.argmax(), ulps.shape)[0])
            kind = "local layer" if layer >= self._n_layers[0] else "layer"
            raise SpliceRefused(f"RoPE: keys of {kind} {layer} of the state differ from llama.cpp's own shift by "
                                f"{ulps.max():.1f} ulps of the rotated pair; this model's rotation is not described by its metadata")

    def read(self, blob: np.ndarray, n_cells: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of a state, float16[n_layers, n_cells, width] each. SpliceRefused on any surprise."""
        model = self.runtime.model
        keys = np.empty((model.n_layer, n_cells, model.n_head_kv * model.head_dim_k), dtype=np.float16)
        values = np.empty((model.n_layer, n_cells, model.n_head_kv * model.head_dim_v), dtype=np.float16)
        try:
            read_block(blob, keys, values)
        except BlockError as error:
            raise SpliceRefused(f"state format: {error}") from None
        return keys, values

    @property
    def layer_frequencies(self) -> np.ndarray:
        """θᵢ of every layer in state order, radians per position, float64[n_layers, n_rot/2]."""
        return np.repeat(self._frequencies[:len(self._n_layers)], self._n_layers, axis=0)

    def hold(self, block: Block | BlockFile) -> Resident:
        """The block in this context's layout, ready to be placed. It is checked against the model first.

        Raises BlockError naming the field in which block and model differ.
        """
        model, rope = self.runtime.model, self.runtime.rope
        if isinstance(block, BlockFile):
            block.check(self.runtime)
            k, v, n_tokens = block.file.k_addr(), block.file.v_addr(), block.n_tokens
        else:
            check_block(block, model)
            k, v, n_tokens = block.k.ctypes.data, block.v.ctypes.data, len(block.tokens)
        return Resident(self.runtime.gbl.nexus.ResidentBlock(
            self.magic, self._n_layers, n_tokens, model.n_head_kv, model.head_dim_k, model.head_dim_v, rope.n_rot,
            LAYOUT_CODES[rope.layout], block.anchor, self.v_trans, k, v, self._frequencies.ctypes.data, self._isa_code,
        ), block)

    def load(self, resident: Resident, position: int, reanchor: bool = True) -> SpliceTimes:
        """Time spent. Afterwards the runtime's scratch sequence, which must be empty, holds the block at `position`.

        For callers that graft only parts of it; they empty the scratch sequence. Raises SpliceRefused, with it empty.
        """
        if position < 0:
            raise SpliceRefused(f"position {position} is negative")
        try:
            times = resident.native.load(self.runtime.context, position, self.runtime.scratch_seq, reanchor)
        except Exception as error:
            raise SpliceRefused(describe(error)) from None
        return SpliceTimes(times.reanchor_us, times.set_state_us, times.graft_us, times.total_us)

    def place(self, resident: Resident, position: int, seq: int, reanchor: bool = True) -> SpliceTimes:
        """Time spent. Afterwards `seq` holds the block at positions position … position+n−1, one cell each.

        What the sequence held at these positions is replaced; other sequences keep theirs. `reanchor=False` leaves the
        keys at the anchor's rotation (a control). Raises SpliceRefused, with `seq` unchanged, when the position would
        leave a gap, is negative, or when cells run out, and RuntimeFailure where `seq` does not exist.
        """
        runtime = self.runtime
        end = runtime.pos_max(seq)
        if seq == runtime.scratch_seq:
            raise SpliceRefused(f"sequence {seq} is reserved for splices in flight; use 0 … {runtime.scratch_seq - 1}")
        if position < 0 or (end >= 0 and position > end + 1):
            raise SpliceRefused(f"position {position} leaves a gap: sequence {seq} ends at {end}")
        try:
            times = resident.native.place(runtime.context, position, seq, runtime.scratch_seq, reanchor)
        except Exception as error:
            raise SpliceRefused(describe(error)) from None
        return SpliceTimes(times.reanchor_us, times.set_state_us, times.graft_us, times.total_us)


@dataclass(frozen=True)
class Placement:
    """How a tool got into the context."""

    path: str
    """"splice" or "prefill"."""
    reason: str | None
    """Why it was prefilled; None after a splice."""


def place_or_prefill(runtime: Runtime, splicer: Splicer | None, block: Resident | None, tokens: np.ndarray,
                     position: int, seq: int, reason: str = "no splicer for this model") -> Placement:
    """Splice the block where possible, else prefill its tokens ("Path B"); says which and why.

    Pass `splicer=None` with the `reason` of its SpliceRefused for models that cannot be spliced.
    """
    if splicer is not None and block is not None:
        try:
            splicer.place(block, position, seq)
            return Placement("splice", None)
        except SpliceRefused as refusal:
            reason = str(refusal)
    runtime.decode(tokens, position, seq, split=block_split(len(tokens)))
    return Placement("prefill", reason)


def choose_isa(name: str | None = None) -> tuple[str, int]:
    """(name, code) of the rotation kernel for this CPU: the fastest, or the named one. SpliceRefused if it is not here."""
    kernels = native.kernels()
    if name is None:
        code = kernels.best_isa()
        return str(kernels.isa_name(code)), int(code)
    available = {str(kernels.isa_name(code)): code for code in range(4) if kernels.isa_available(code)}
    if name not in available:
        raise SpliceRefused(f"instruction set {name!r} is not available on this CPU; use one of {', '.join(available)}")
    return name, available[name]


def _without_seq(blob: np.ndarray) -> np.ndarray:
    """The blob with sequence ids zeroed: the header's and each cell's, which llama.cpp ignores on restore."""
    out = blob.copy()
    out[4:8] = 0
    state = native.kernels().parse_kv_state(blob.ctypes.data, blob.nbytes)
    for cache in state.caches:
        begin, n_cells = int(cache.cells_offset), int(cache.n_cells)
        out[begin:begin + 12 * n_cells].reshape(n_cells, 12)[:, 8:12] = 0
    return out

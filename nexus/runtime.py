"""Owns a llama.cpp model and context: tokens in, logits out, sequences copied, removed, saved and restored.

All native access goes through cppyy. Every failure is an exception that leaves the sequences as they were, but for a
restore that llama.cpp refuses: it leaves its sequence empty.
"""
from __future__ import annotations

import functools
import hashlib
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nexus import native
from nexus.native import describe
from nexus.rope import Rope, rope_of

KV_TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2, "f32": 0}
MOST_POSITION = 2**31 - 1


class RuntimeFailure(RuntimeError):
    """The model or a context operation failed; the message names what and why."""


@dataclass(frozen=True)
class ContextOptions:
    """How a context is made. Two contexts with equal options compute bit-identical results for equal calls."""

    n_ctx: int = 4096
    """KV cells, shared by all sequences when `kv_unified`."""
    n_batch: int = 512
    """Tokens computed at once; longer inputs are split at its multiples. Part of the result's bits."""
    n_seq_max: int = 8
    n_threads: int = 2
    flash_attention: bool = True
    """On: V rows are stored per token. Off: V is stored transposed, token innermost."""
    kv_unified: bool = True
    swa_full: bool = True
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    rope_freq_base: float = 0.0
    """0 takes the model's value."""
    rope_freq_scale: float = 0.0
    """0 takes the model's value; 0.5 doubles the context by linear scaling."""


def log_to(path: str | os.PathLike | None) -> None:
    """Send llama.cpp's messages to a file (appended), or drop them with None. They never reach the terminal."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    native.llama().nexus.llama_log_to(os.fspath(path) if path is not None else "")


def _positions(blob: np.ndarray) -> list[np.ndarray]:
    """Positions of the cells of each cache of a saved state, int32[n_cells]. RuntimeFailure if it cannot be parsed."""
    try:
        state = native.kernels().parse_kv_state(blob.ctypes.data, blob.nbytes)
    except Exception as error:
        raise RuntimeFailure(f"saved state: {describe(error)}") from None
    ranges = [(int(cache.cells_offset), 12 * int(cache.n_cells)) for cache in state.caches]
    return [blob[begin:begin + size].view("<i4")[::3] for begin, size in ranges]


def _integers(call: str, name: str, array: np.ndarray) -> np.ndarray:
    """`array` as numpy array. RuntimeFailure unless it has one dimension and at least one integer."""
    array = np.asarray(array)
    if array.ndim != 1:
        raise RuntimeFailure(f"{call}: {name} have {array.ndim} dimensions; give one list")
    if len(array) == 0:
        raise RuntimeFailure(f"{call}: no {name} given; give at least one")
    if array.dtype.kind not in "iu":
        raise RuntimeFailure(f"{call}: {name} are {array.dtype}; give integers")
    return array


def _text(std_string) -> str:
    return bytes(std_string).decode("utf-8", "replace") if not isinstance(std_string, str) else std_string


class Model:
    """A GGUF model in memory. `sha256` identifies the file; pass it when it is already known."""

    def __init__(self, path: str | os.PathLike, sha256: str | None = None):
        self.path = Path(path)
        if not self.path.is_file():
            raise RuntimeFailure(f"model path {self.path} is not a file; give the path of a GGUF file")
        with self.path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise RuntimeFailure(f"model path {self.path} is not a GGUF file (it does not begin with 'GGUF')")
        self.gbl = native.llama()
        if not self.gbl.nexus.llama_log_file():
            self.gbl.nexus.llama_log_to("")
        try:
            self._model = self.gbl.nexus.LlamaModel(os.fspath(self.path))
        except Exception as error:
            raise RuntimeFailure(describe(error)) from None
        self._close = weakref.finalize(self, self._model.close)
        if sha256 is None:
            with self.path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        self.sha256 = sha256
        llama_model = self._model.get()
        self.arch = self.meta("general.architecture")
        self.n_vocab = int(self.gbl.llama_vocab_n_tokens(self._model.vocab()))
        self.n_layer = int(self.gbl.llama_model_n_layer(llama_model))
        self.n_ctx_train = int(self.gbl.llama_model_n_ctx_train(llama_model))
        self.n_swa = int(self.gbl.llama_model_n_swa(llama_model))
        self.rope_type = int(self.gbl.llama_model_rope_type(llama_model))
        self.is_recurrent = bool(self.gbl.llama_model_is_recurrent(llama_model))
        self.is_hybrid = bool(self.gbl.llama_model_is_hybrid(llama_model))
        self.n_head_kv = int(self.gbl.llama_model_n_head_kv(llama_model))
        n_head = int(self.gbl.llama_model_n_head(llama_model))
        head_dim = int(self.gbl.llama_model_n_embd(llama_model)) // max(1, n_head)
        self.head_dim_k = int(self.meta(f"{self.arch}.attention.key_length") or head_dim)
        self.head_dim_v = int(self.meta(f"{self.arch}.attention.value_length") or head_dim)

    def meta(self, key: str) -> str:
        """Value of a GGUF metadata key as text, '' when the file does not have it."""
        return _text(self.native.meta(key))

    def rope(self, options: ContextOptions | None = None) -> Rope:
        """RoPE of the model under these context options. Raises RopeError where keys cannot be moved."""
        options = options or ContextOptions()
        return rope_of(self.meta, self.arch, self.rope_type, self.head_dim_k,
                       options.rope_freq_base, options.rope_freq_scale, self.n_swa)

    def tokenize(self, text: str, add_special: bool = False, parse_special: bool = True) -> np.ndarray:
        """Token ids, int32[n]. `parse_special` reads markers such as <|im_start|> as one token."""
        return np.array(self.native.tokenize(text, add_special, parse_special), dtype=np.int32)

    def detokenize(self, tokens: np.ndarray) -> str:
        tokens = np.ascontiguousarray(tokens, dtype=np.int32)
        return _text(self.native.detokenize(tokens.ctypes.data, len(tokens)))

    @functools.cached_property
    def chat_template(self) -> str:
        """The file's own template where llama.cpp knows it, else "chatml"."""
        template = _text(self.native.chat_template()) or "chatml"
        try:
            self._model.chat_message(template, "user", "x", False)
            return template
        except Exception:
            return "chatml"

    def chat_message(self, role: str, content: str, open_assistant: bool = False) -> str:
        """One message as prompt text; `open_assistant` adds the header after which the model answers."""
        return _text(self.native.chat_message(self.chat_template, role, content, open_assistant))

    def close(self) -> None:
        """Free the model. Contexts made from it must be closed first."""
        self._close()

    @property
    def native(self):
        """The C++ LlamaModel. RuntimeFailure once the model is closed: llama.cpp would end the process."""
        if not self._close.alive:
            raise RuntimeFailure(f"model {self.path} is closed; open it again")
        return self._model


class Runtime:
    """A context on a model. Sequence ids are 0 … n_seq_max − 1; the last one is reserved for splices in flight."""

    def __init__(self, model: Model, options: ContextOptions = ContextOptions()):
        self.model, self.options = model, options
        self.gbl = model.gbl
        self.scratch_seq = options.n_seq_max - 1
        if options.n_seq_max < 2:
            raise RuntimeFailure(f"n_seq_max is {options.n_seq_max}; at least 2 are needed (one is the scratch sequence)")
        for field in ("kv_type_k", "kv_type_v"):
            if getattr(options, field) not in KV_TYPES:
                raise RuntimeFailure(f"{field} is {getattr(options, field)!r}; use one of {', '.join(KV_TYPES)}")
        native_options = self.gbl.nexus.LlamaContextOptions()
        for field in ("n_ctx", "n_batch", "n_seq_max", "n_threads", "flash_attention", "kv_unified", "swa_full",
                      "rope_freq_base", "rope_freq_scale"):
            setattr(native_options, field, getattr(options, field))
        native_options.type_k, native_options.type_v = KV_TYPES[options.kv_type_k], KV_TYPES[options.kv_type_v]
        try:
            self._context = self.gbl.nexus.LlamaContext(model.native, native_options)
        except Exception as error:
            raise RuntimeFailure(f"{describe(error)} ({options})") from None
        self._close = weakref.finalize(self, self._context.close)
        self._memory = self._context.memory()
        self._shift_pending = False

    @property
    def context(self):
        """The C++ LlamaContext, for kernels that drive it. RuntimeFailure once it or its model is closed."""
        if not self._close.alive:
            raise RuntimeFailure("the runtime is closed; make another one")
        self.model.native  # refuses a closed model
        return self._context

    @property
    def memory(self):
        """llama.cpp's memory of this context, for its own functions. RuntimeFailure once it or its model is closed."""
        self.context  # refuses a closed context
        return self._memory

    def close(self) -> None:
        self._close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _check_seq(self, seq: int) -> None:
        if not 0 <= seq < self.options.n_seq_max:
            raise RuntimeFailure(f"sequence {seq} does not exist; n_seq_max is {self.options.n_seq_max}")

    def _check_window(self, seq: int, pos: int) -> None:
        """Refuse to decode at `pos` where local cells in its sliding window are gone.

        llama.cpp gives away local cells that no next token of their sequence sees (find_slot in llama-kv-cache.cpp). A
        sequence that is cut back afterwards would see them again, and would be computed without them in silence.
        """
        n_swa = self.model.n_swa
        if n_swa == 0 or self._shift_pending or self.pos_min(seq) <= max(0, pos - n_swa + 1):
            return
        # It may also have begun that late: then no layer has these positions.
        seen = [int((found > pos - n_swa).sum()) for found in _positions(self.state_get(seq))]
        if min(seen) != max(seen):
            raise RuntimeFailure(f"decode at position {pos} of sequence {seq}: {max(seen) - min(seen)} cells of its "
                                 "sliding window were given to other sequences; remove it and decode it from its start")

    def _token_ids(self, call: str, tokens: np.ndarray) -> np.ndarray:
        """`tokens` as contiguous int32[n]. RuntimeFailure unless they are a list of at least one of the model's ids."""
        tokens = _integers(call, "tokens", tokens)
        if tokens.min() < 0 or tokens.max() >= self.model.n_vocab:
            raise RuntimeFailure(f"{call}: tokens hold {tokens.min()} … {tokens.max()}; the model's token ids are "
                                 f"0 … {self.model.n_vocab - 1}")
        return np.ascontiguousarray(tokens, dtype=np.int32)

    def _check_continues(self, call: str, seq: int, pos: int, n_tokens: int) -> None:
        """Refuse positions pos … pos+n_tokens−1 that do not continue sequence `seq`, or cannot begin it."""
        end = self.pos_max(seq)
        if end >= 0 and pos != end + 1:
            raise RuntimeFailure(f"{call}: position {pos} does not continue sequence {seq}, which ends at {end}")
        if not 0 <= pos <= MOST_POSITION - n_tokens:
            # llama.cpp takes a negative position and then refuses every later one, until the memory is cleared.
            raise RuntimeFailure(f"{call}: position {pos} is out of range; begin a sequence at 0 or later")
        if end >= 0:
            self._check_window(seq, pos)

    def decode(self, tokens: np.ndarray, pos: int, seq: int, logits: bool = False,
               split: tuple[int, ...] = ()) -> np.ndarray | None:
        """Logits after the last token, float32[n_vocab], or None when not asked for.

        Decodes `tokens` (int32[n]) of sequence `seq` at positions pos … pos+n−1, which must continue the sequence.
        `split` lists batch sizes to use first (the rest goes in batches of n_batch): equal splits give equal bits.
        On failure the sequence is cut back to `pos` and RuntimeFailure is raised.
        """
        self._check_seq(seq)
        tokens = self._token_ids("decode", tokens)
        if any(size <= 0 for size in split):
            raise RuntimeFailure(f"decode: split is {split}; every batch needs at least 1 token")
        self._check_continues("decode", seq, pos, len(tokens))
        begin = 0
        for size in (*split, len(tokens)):
            part = tokens[begin:begin + size]
            if len(part) == 0:
                break
            begin += len(part)
            status = self.context.decode(part.ctypes.data, len(part), pos + begin - len(part), seq,
                                          logits and begin == len(tokens))
            if status != 0:
                self.seq_rm(seq, pos, -1)
                reason = {1: f"no room for {len(part)} tokens in {self.options.n_ctx} cells; raise n_ctx",
                          2: "aborted"}.get(status, f"llama_decode returned {status}")
                raise RuntimeFailure(f"decode at position {pos} of sequence {seq}: {reason}")
        self._shift_pending = False
        return self.logits() if logits else None

    def decode_scattered(self, tokens: np.ndarray, positions: np.ndarray, seqs: np.ndarray) -> None:
        """Decode one batch of at most n_batch tokens, each at its own position of its own sequence (int32[n] each).

        Sequences may be mixed; each one's positions must go up by 1 in the batch and continue it, or begin it at 0 or
        later. On failure every sequence is cut back to what it held and RuntimeFailure is raised.
        """
        call = "decode_scattered"
        tokens = self._token_ids(call, tokens)
        positions, seqs = _integers(call, "positions", positions), _integers(call, "sequences", seqs)
        if not len(tokens) == len(positions) == len(seqs) <= self.options.n_batch:
            raise RuntimeFailure(f"{call}: {len(tokens)} tokens, {len(positions)} positions and {len(seqs)} "
                                 f"sequences; give as many of each, at most n_batch = {self.options.n_batch}")
        for seq in (int(seqs.min()), int(seqs.max())):
            self._check_seq(seq)
        # Each sequence's tokens side by side, in the order of the batch. int64: differences must not wrap.
        order = np.argsort(seqs, kind="stable")
        owners, places = seqs[order], positions[order].astype(np.int64)
        same, steps = owners[1:] == owners[:-1], np.diff(places)
        gaps = np.flatnonzero(same & (steps != 1))
        if len(gaps):
            at = gaps[0]
            raise RuntimeFailure(f"{call}: position {places[at + 1]} follows {places[at]} in sequence {owners[at]}; "
                                 "give each sequence's tokens in the order of positions, one each")
        begins = np.concatenate([[0], np.flatnonzero(~same) + 1])
        lengths = np.diff(begins, append=len(owners))
        runs = list(zip(owners[begins].tolist(), places[begins].tolist(), lengths.tolist()))
        for run in runs:
            self._check_continues(call, *run)
        arrays = [tokens, *(np.ascontiguousarray(array, dtype=np.int32) for array in (positions, seqs))]
        status = self.context.decode_scattered(*(array.ctypes.data for array in arrays), len(tokens))
        if status != 0:
            for seq, begin, _ in runs:
                self.seq_rm(seq, begin, -1)
            raise RuntimeFailure(f"decode of {len(tokens)} scattered tokens: llama_decode returned {status}; "
                                 f"is there room in {self.options.n_ctx} cells?")
        self._shift_pending = False

    def logits(self) -> np.ndarray:
        """Logits of the last decode, float32[n_vocab]. They do not survive a restore: decode a token after one."""
        out = np.empty(self.model.n_vocab, dtype=np.float32)
        if not self.context.logits(out.ctypes.data):
            raise RuntimeFailure("logits: the last decode asked for none")
        return out

    def pos_min(self, seq: int) -> int:
        """Smallest position in a sequence, −1 when it is empty. With sliding windows: in the local layers' cache."""
        self._check_seq(seq)
        return int(self.gbl.llama_memory_seq_pos_min(self.memory, seq))

    def pos_max(self, seq: int) -> int:
        """Largest position in a sequence, −1 when it is empty."""
        self._check_seq(seq)
        return int(self.gbl.llama_memory_seq_pos_max(self.memory, seq))

    def seq_rm(self, seq: int, begin: int = -1, end: int = -1) -> None:
        """Remove positions begin … end−1 of a sequence; −1 leaves that side open."""
        self._check_seq(seq)
        if not self.gbl.llama_memory_seq_rm(self.memory, seq, begin, end):
            raise RuntimeFailure(f"sequence {seq}: positions {begin} … {end} cannot be removed from this kind of memory")

    def seq_cp(self, source: int, target: int, begin: int = -1, end: int = -1) -> None:
        """Let `target` share the cells of positions begin … end−1 of `source`; no key or value is copied."""
        self._check_seq(source)
        self._check_seq(target)
        if not self.options.kv_unified:
            # llama.cpp ends the process on a partial copy between streams, so it is refused before it is asked.
            raise RuntimeFailure("seq_cp needs kv_unified=true (a partial copy between separate streams aborts llama.cpp)")
        self.gbl.llama_memory_seq_cp(self.memory, source, target, begin, end)

    def seq_add(self, seq: int, begin: int, end: int, delta: int) -> None:
        """llama.cpp's own position shift. Applied by the next decode, over the whole cache, for every owner of a cell."""
        self._check_seq(seq)
        if not self.can_shift():
            raise RuntimeFailure("this model's memory cannot shift positions (M-RoPE or per-layer RoPE)")
        self.gbl.llama_memory_seq_add(self.memory, seq, begin, end, delta)
        self._shift_pending = True

    def can_shift(self) -> bool:
        return bool(self.gbl.llama_memory_can_shift(self.memory))

    def clear(self) -> None:
        """Empty every sequence, so that the next decode starts at cell 0."""
        self.gbl.llama_memory_clear(self.memory, True)
        self._shift_pending = False

    def state_get(self, seq: int) -> np.ndarray:
        """A sequence's state in llama.cpp's own format, uint8[n] (layout: kernels/kv_state.hpp)."""
        self._check_seq(seq)
        if self._shift_pending:
            # Saved positions would already be shifted while the saved keys are not.
            raise RuntimeFailure("state_get: a position shift is pending; decode a token first")
        blob = np.empty(self.context.state_size(seq), dtype=np.uint8)
        written = self.context.state_get(seq, blob.ctypes.data, blob.nbytes)
        if written != blob.nbytes:
            raise RuntimeFailure(f"state of sequence {seq}: llama.cpp wrote {written} of {blob.nbytes} bytes")
        return blob

    def state_set(self, seq: int, blob: np.ndarray) -> None:
        """Restore a sequence from a saved state. Checked by the positions found in memory, not by a return code.

        Raises RuntimeFailure. A blob that is no saved state leaves the sequence as it was; a restore that llama.cpp
        does not carry out, for want of cells or in another layout, leaves it empty.
        """
        self._check_seq(seq)
        context = self.context
        if blob.dtype != np.uint8 or not blob.flags.c_contiguous or blob.ndim != 1:
            raise RuntimeFailure("state_set: the blob must be a contiguous uint8 array")
        spans = [(int(found.min()), int(found.max())) if len(found) else (-1, -1) for found in _positions(blob)]
        if any(begin < 0 <= end or end < -1 for begin, end in spans):
            raise RuntimeFailure(f"state_set: the blob holds position {min(spans)[0]}; positions begin at 0")
        if len({end for _, end in spans}) > 1:
            raise RuntimeFailure(f"state_set: the blob's caches end at positions {[end for _, end in spans]}; "
                                 "a saved sequence ends at the same one in each")
        self.seq_rm(seq)
        read = context.state_set(seq, blob.ctypes.data, blob.nbytes)
        # Of two caches, llama.cpp reports the second one's positions.
        if read != blob.nbytes or (self.pos_min(seq), self.pos_max(seq)) != spans[-1]:
            self.seq_rm(seq)
            raise RuntimeFailure(f"state of sequence {seq} was not restored ({read} of {blob.nbytes} bytes read); "
                                 f"is there room in {self.options.n_ctx} cells?")

    @functools.cached_property
    def rope(self) -> Rope:
        return self.model.rope(self.options)

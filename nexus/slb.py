"""The semantic lookaside buffer: INT8 embeddings of all tools, searched exactly for the k nearest to a query.

    lookaside = Lookaside(embeddings)                     # float32[n, dim]
    lookaside.search(query, k=5)                          # [(id, score), ...], best first

One scale holds for the whole table, so the order of the integer products is the order of the scores; nothing is
approximate but the codes, whose rounding `quantisation_error` measures. Equal products come in the order of their ids.
"""
from __future__ import annotations

import functools
import operator
import struct
import threading
from dataclasses import dataclass

import numpy as np

from nexus import native
from nexus.native import describe

LARGEST_CODE = 127
# Below, 127 / magnitude is no float32; embeddings have length 1.
SMALLEST_MAGNITUDE = 1e-30
# With fewer rows the threads cost more than they bring.
THREADED_ROWS = 100_000
# A native SlbHit: id and score.
HIT = struct.Struct("=qd")
CHUNK_ROWS = 4096
INT8 = np.dtype(np.int8)


class LookasideError(ValueError):
    """The table or the query cannot be used; the message names the field, the value and the remedy."""


@dataclass(frozen=True)
class QuantisationError:
    """How far codes are from the vectors that they stand for."""

    largest: float
    """Largest |vector - code · scale|, in the vectors' unit; at most half a scale, up to float32 rounding."""
    rms: float
    """Root mean square of the same."""
    relative: float
    """rms over the root mean square of the vectors; 0 where these are all zero."""


def quantise(vectors: np.ndarray) -> tuple[np.ndarray, float]:
    """INT8 codes, int8[n, dim], and the one scale that they all have: vector ≈ code · scale.

    code = round(vector · 127 / largest |vector|), ties to even, in float32; codes are -127 to 127 and zero stays zero.
    Raises LookasideError for vectors that are not float[n, dim], not finite, or too small for float32.
    """
    vectors = _matrix("vectors", vectors)
    codes = np.empty(vectors.shape, np.int8)
    with np.errstate(over="ignore"):  # what float32 cannot hold is refused as infinity
        vectors = vectors.astype(np.float32, copy=False)
    # In chunks: an array of magnitudes as large as the vectors would double the memory.
    largest = max((np.abs(vectors[chunk]).max(initial=0.0) for chunk in _chunks(vectors)), default=np.float32(0))
    if not np.isfinite(largest):
        raise LookasideError("vectors hold NaN or infinity; give finite numbers")
    if largest == 0:
        codes[:] = 0
        return codes, 1.0
    if largest < SMALLEST_MAGNITUDE:
        raise LookasideError(f"vectors have no magnitude above {largest:g}; scale them (embeddings have length 1)")
    inverse = np.float32(LARGEST_CODE) / np.float32(largest)
    for chunk in _chunks(vectors):
        codes[chunk] = np.rint(vectors[chunk] * inverse)
    return codes, 1.0 / float(inverse)


def quantisation_error(vectors: np.ndarray, codes: np.ndarray, scale: float) -> QuantisationError:
    """The error that `codes` make, measured in float64. Raises LookasideError for arrays that do not fit each other."""
    vectors = _matrix("vectors", vectors)
    if codes.shape != vectors.shape:
        raise LookasideError(f"codes have shape {codes.shape}, vectors {vectors.shape}; give codes of these vectors")
    largest = error = power = 0.0
    for chunk in _chunks(vectors):
        exact = vectors[chunk].astype(np.float64)
        difference = exact - codes[chunk] * scale
        largest = max(largest, float(np.abs(difference).max(initial=0.0)))
        error, power = error + float(np.square(difference).sum()), power + float(np.square(exact).sum())
    count = max(1, vectors.size)
    return QuantisationError(largest, (error / count) ** 0.5, (error / power) ** 0.5 if power else 0.0)


@functools.cache
def _native():
    kernels = native.kernels()
    import cppyy

    cppyy.include("slb_scan.hpp")
    return kernels


def available_isas() -> list[str]:
    """Names of the instruction sets that this CPU can scan with, the reference ("scalar") first, the default last."""
    k = _native()
    names = [str(k.slb_isa_name(code)) for code in range(k.kSlbIsas) if k.slb_isa_available(code)]
    return sorted(names, key=str(k.slb_isa_name(k.slb_best_isa())).__eq__)


class _Desk:
    """What the searches of one Python thread read and write, at fixed addresses.

    A call then hands over integers: looking an array's address up costs as much as scanning a small table.
    """

    def __init__(self, dim: int):
        query, codes = np.zeros(dim, np.float32), np.zeros(dim, np.int8)
        # Assigning to a memoryview checks type and shape on the way, at half the price of numpy's assignment. What it
        # does not take, such as unaligned floats, may go to the array behind it, `.obj`.
        self.query, self.codes = memoryview(query), memoryview(codes)
        self.query_at, self.codes_at = query.ctypes.data, codes.ctypes.data
        self.make_room(64)

    def make_room(self, k: int) -> None:
        """Space for k results."""
        self.room = k
        self._hits = np.zeros(k * HIT.size, np.uint8)
        self._ids, self._products = np.zeros(k, np.int64), np.zeros(k, np.int32)
        self.hits_at, self.ids_at, self.products_at = (
            array.ctypes.data for array in (self._hits, self._ids, self._products))
        self.hits: dict[int, memoryview] = {}
        self.arrays: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def hits_of(self, found: int) -> memoryview:
        """The bytes of the first `found` hits; made once."""
        return self.hits.setdefault(found, memoryview(self._hits)[:found * HIT.size])

    def arrays_of(self, found: int) -> tuple[np.ndarray, np.ndarray]:
        """The first `found` ids and products; made once."""
        return self.arrays.setdefault(found, (self._ids[:found], self._products[:found]))


class _Desks(threading.local):
    """A desk for each thread that asks for `mine`."""

    def __init__(self, dim: int):
        self.mine = _Desk(dim)


# What assigning a foreign object to a memoryview raises.
_MISMATCH = (TypeError, ValueError, NotImplementedError, BufferError)


class Lookaside:
    """A table of n embeddings that answers which k are nearest to a query, by inner product.

    isa        instruction set, one of `available_isas()`; by default the best
    threads    used from 100,000 rows on; smaller tables are scanned by the caller alone

    Attributes: `n`, `dim`, `isa`, `threads` (those that are used), `scale`, `nbytes` (of the table in memory, padded to
    blocks of 64 rows and 4 dims), `address` (of its first byte). Python threads may share a table.
    Raises LookasideError for vectors that are not finite float[n, dim] with dim from 1 to 65536.
    """

    def __init__(self, vectors: np.ndarray, isa: str | None = None, threads: int = 1):
        self._hold(*quantise(vectors), isa, threads)

    @classmethod
    def from_codes(cls, codes: np.ndarray, scale: float = 1.0, isa: str | None = None, threads: int = 1) -> Lookaside:
        """A table of codes, int8[n, dim], that are quantised already; any int8 is allowed, -128 too."""
        if not isinstance(codes, np.ndarray) or codes.dtype != INT8 or codes.ndim != 2:
            raise LookasideError(f"codes are {_kind(codes)}; give int8[n, dim]")
        table = cls.__new__(cls)
        table._hold(codes, scale, isa, threads)
        return table

    def _hold(self, codes: np.ndarray, scale: float, isa: str | None, threads: int) -> None:
        available = available_isas()
        self.isa = available[-1] if isa is None else isa
        if self.isa not in available:
            raise LookasideError(f"isa {isa!r} is not available on this CPU; use one of {', '.join(available)}")
        if threads < 1:
            raise LookasideError(f"threads is {threads}; give at least 1")
        (self.n, self.dim), self.scale = codes.shape, float(scale)
        codes = np.ascontiguousarray(codes)
        k = _native()
        code = next(code for code in range(k.kSlbIsas) if str(k.slb_isa_name(code)) == self.isa)
        used = threads if self.n >= THREADED_ROWS else 1
        try:
            table = k.SlbTable(codes.ctypes.data, self.n, self.dim, self.dim, self.scale, code, used)
        except Exception as error:
            raise LookasideError(describe(error)) from None
        self.threads, self.nbytes, self.address = int(table.n_threads()), int(table.n_bytes()), int(table.address())
        # The interpreter's lock is held during a native call, so that threads cannot meet inside the table.
        self._table, self._search, self._scan, self._quantise = table, table.search, table.scan, table.quantise
        self._desks = _Desks(self.dim)

    def search(self, query: np.ndarray, k: int) -> list[tuple[int, float]]:
        """The min(k, n) nearest rows as (id, score), best first; score is the inner product of the codes, dequantised.

        `query` is float[dim], contiguous or not; it is quantised with a scale of its own, which is in the score.
        Raises LookasideError for another shape or type, for numbers that are not finite, and for k below 1.
        """
        desk = self._desks.mine
        try:
            desk.query[:] = query
        except _MISMATCH:
            desk.query.obj[:] = self._float32(query)
        if type(k) is not int or not 0 < k <= desk.room:
            k = self._checked(k, desk)
        try:
            found = self._search(desk.query_at, k, desk.hits_at)
        except Exception as error:
            raise LookasideError(describe(error)) from None
        return list(HIT.iter_unpack(desk.hits.get(found) or desk.hits_of(found)))

    def scan(self, codes: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids, int64[min(k, n)], and exact integer products, int32, of the rows nearest to `codes`, best first.

        `codes` is int8[dim]. Both arrays belong to the table: this thread's next scan overwrites them.
        Raises LookasideError as `search` does.
        """
        desk = self._desks.mine
        try:
            desk.codes[:] = codes
        except _MISMATCH:
            desk.codes.obj[:] = self._int8(codes)
        if type(k) is not int or not 0 < k <= desk.room:
            k = self._checked(k, desk)
        found = self._scan(desk.codes_at, k, desk.ids_at, desk.products_at)
        return desk.arrays.get(found) or desk.arrays_of(found)

    def quantise_query(self, query: np.ndarray) -> tuple[np.ndarray, float]:
        """Codes of a query, int8[dim], and its scale, as `search` uses them. Raises LookasideError as `search` does."""
        desk = self._desks.mine
        desk.query.obj[:] = self._float32(query)
        try:
            scale = self._quantise(desk.query_at, desk.codes_at)
        except Exception as error:
            raise LookasideError(describe(error)) from None
        return np.array(desk.codes), float(scale)

    def _float32(self, query: np.ndarray) -> np.ndarray:
        """The query in the machine's float32, if it is a vector of floats of this table's dim."""
        if not isinstance(query, np.ndarray) or query.dtype.kind != "f" or query.shape != (self.dim,):
            raise LookasideError(f"query is {_kind(query)}; give float32[{self.dim}]")
        with np.errstate(over="ignore"):  # what float32 cannot hold is refused as infinity
            return query.astype(np.float32, copy=False)

    def _int8(self, codes: np.ndarray) -> np.ndarray:
        """The codes, if they are a vector of int8 of this table's dim."""
        if not isinstance(codes, np.ndarray) or codes.dtype != INT8 or codes.shape != (self.dim,):
            raise LookasideError(f"codes are {_kind(codes)}; give int8[{self.dim}]")
        return codes

    def _checked(self, k: int, desk: _Desk) -> int:
        """A usable k, with room for as many results."""
        try:
            k = operator.index(k)
        except TypeError:
            raise LookasideError(f"k is {k!r}; give a whole number, at least 1") from None
        if k < 1:
            raise LookasideError(f"k is {k}; give at least 1")
        k = min(k, max(1, self.n))
        if k > desk.room:
            desk.make_room(k)
        return k


def _matrix(name: str, vectors: np.ndarray) -> np.ndarray:
    if not isinstance(vectors, np.ndarray) or vectors.ndim != 2 or vectors.dtype.kind != "f":
        raise LookasideError(f"{name} are {_kind(vectors)}; give float32[n, dim]")
    return vectors


def _kind(value: object) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def _chunks(vectors: np.ndarray) -> list[slice]:
    return [slice(begin, begin + CHUNK_ROWS) for begin in range(0, len(vectors), CHUNK_ROWS)]

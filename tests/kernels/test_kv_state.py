"""The state blob: written, parsed and read back in both V layouts; anything damaged is refused or read consistently."""
from __future__ import annotations

import re
import struct

import cppyy
import numpy as np
import pytest
from hypothesis import given, strategies as st

MAGIC = 0x67677371
F16, Q8_0 = 1, 8
CELL = struct.Struct("<iIi")


def cache_bytes(positions, k: list[np.ndarray], v: list[np.ndarray], v_trans: bool, seq: int = 0) -> bytes:
    """One cache in llama.cpp's format, from its documentation, not from our writer. k, v: F16 [n_cells, width] each."""
    out = struct.pack("<II", 1, len(positions))
    if not len(positions):
        return out
    out += b"".join(CELL.pack(int(pos), 1, seq) for pos in positions)
    out += struct.pack("<II", v_trans, len(k))
    for rows in k:
        out += struct.pack("<iQ", F16, rows.shape[1] * 2) + rows.tobytes()
    for rows in v:
        if v_trans:
            out += struct.pack("<iII", F16, 2, rows.shape[1]) + np.ascontiguousarray(rows.T).tobytes()
        else:
            out += struct.pack("<iQ", F16, rows.shape[1] * 2) + rows.tobytes()
    return out


def blob_of(*caches: bytes, seq: int = 0) -> np.ndarray:
    return np.frombuffer(struct.pack("<Ii", MAGIC, seq) + b"".join(caches), dtype=np.uint8).copy()


def tensors(n_layers: int, n_cells: int, width_k: int, width_v: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Distinct bit patterns F16 [n_layers, n_cells, width], so that any misplaced element shows."""
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(0, 65536, (n_layers, n_cells, width)).astype(np.uint16) for width in (width_k, width_v))


def parse(k, blob: np.ndarray):
    """The KvState; keep it in a variable, since its caches and layers are references into it."""
    return k.parse_kv_state(blob.ctypes.data, blob.nbytes)


def read(k, blob: np.ndarray, n_layers: int, n_cells: int, width_k: int, width_v: int):
    """(K, V, positions) of a blob, or the kernel's exception."""
    state = parse(k, blob)
    keys, values = (np.zeros((n_layers, n_cells, width), dtype=np.uint16) for width in (width_k, width_v))
    positions = np.zeros(n_cells, dtype=np.int32)
    k.read_kv_block(blob.ctypes.data, blob.nbytes, state, keys.ctypes.data, keys.nbytes, values.ctypes.data,
                    values.nbytes, positions.ctypes.data, positions.nbytes)
    return keys, values, positions


def write(k, keys: np.ndarray, values: np.ndarray, positions: np.ndarray, v_trans: bool, first: int = 0) -> np.ndarray:
    """The kernel's blob; `first` > 0 puts so many layers into a cache of their own."""
    n_layers, n_cells, width_k = keys.shape
    n_layers = [first, n_layers - first] if first else [n_layers]
    width_v = values.shape[2]
    size = k.kv_state_size(n_layers, n_cells, width_k * 2, width_v * 2, v_trans)
    blob = np.zeros(size, dtype=np.uint8)
    k.write_kv_state(blob.ctypes.data, size, MAGIC, n_layers, n_cells, width_k * 2, width_v * 2, v_trans,
                     positions.ctypes.data, keys.ctypes.data, values.ctypes.data)
    return blob


sizes = st.tuples(st.integers(1, 4), st.integers(1, 70), st.integers(1, 70), st.integers(1, 70))


@given(size=sizes, v_trans=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_written_state_is_the_documented_bytes_and_reads_back(k, size, v_trans, seed):
    n_layers, n_cells, width_k, width_v = size
    keys, values = tensors(n_layers, n_cells, width_k, width_v, seed)
    positions = np.sort(np.random.default_rng(seed).choice(10**6, n_cells, replace=False)).astype(np.int32)
    blob = write(k, keys, values, positions, v_trans)
    np.testing.assert_array_equal(blob, blob_of(cache_bytes(positions, list(keys), list(values), v_trans)))
    got = read(k, blob, n_layers, n_cells, width_k, width_v)
    for have, want in zip(got, (keys, values, positions)):
        np.testing.assert_array_equal(have, want)


@given(size=sizes, v_trans=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_two_caches_of_the_same_cells_are_written_in_turn_and_read_as_one_block(k, size, v_trans, seed):
    n_layers, n_cells, width_k, width_v = size
    keys, values = tensors(n_layers + 1, n_cells, width_k, width_v, seed)
    positions = np.arange(n_cells, dtype=np.int32) + seed % 1000
    first = 1 + seed % n_layers
    blob = write(k, keys, values, positions, v_trans, first)
    np.testing.assert_array_equal(blob, blob_of(
        *(cache_bytes(positions, list(keys[part]), list(values[part]), v_trans)
          for part in (slice(first), slice(first, None)))))
    got = read(k, blob, n_layers + 1, n_cells, width_k, width_v)
    for have, want in zip(got, (keys, values, positions)):
        np.testing.assert_array_equal(have, want)


def test_parse_says_where_everything_lies(k):
    keys, values = tensors(2, 3, 4, 5)
    for v_trans in (False, True):
        blob = blob_of(cache_bytes([7, 8, 20], list(keys), list(values), v_trans, seq=6), seq=6)
        state = parse(k, blob)
        assert (int(state.magic), int(state.seq), len(state.caches)) == (MAGIC, 6, 1)
        cache = state.caches[0]
        assert (int(cache.n_cells), int(cache.cells_offset), bool(cache.v_trans)) == (3, 16, v_trans)
        assert [(int(layer.type), int(layer.row_bytes)) for layer in cache.k] == [(F16, 8)] * 2
        assert [(int(layer.type), int(layer.row_bytes)) for layer in cache.v] == [(F16, 10)] * 2
        for layer, rows in zip(cache.k, keys):
            assert blob[layer.offset:layer.offset + rows.nbytes].tobytes() == rows.tobytes()
        for layer, rows in zip(cache.v, values):
            stored = np.ascontiguousarray(rows.T) if v_trans else rows
            assert blob[layer.offset:layer.offset + rows.nbytes].tobytes() == stored.tobytes()


def two_caches(v_trans: bool = False) -> np.ndarray:
    """A sliding-window model's state: global layers with all cells, then local ones with fewer and other positions."""
    k0, v0 = tensors(1, 5, 6, 4, 1)
    k1, v1 = tensors(3, 2, 2, 8, 2)
    return blob_of(cache_bytes([0, 1, 2, 3, 4], list(k0), list(v0), v_trans),
                   cache_bytes([3, 4], list(k1), list(v1), not v_trans))


@pytest.mark.parametrize("v_trans", [False, True])
def test_two_caches_of_other_cells_parse_and_shift_but_are_not_one_block(k, v_trans):
    blob = two_caches(v_trans)
    state = parse(k, blob)
    assert [int(cache.n_cells) for cache in state.caches] == [5, 2]
    assert [cache.k.size() for cache in state.caches] == [1, 3]
    assert [bool(cache.v_trans) for cache in state.caches] == [v_trans, not v_trans]
    with pytest.raises(Exception, match="hold 5 and 2 cells"):
        read(k, blob, 1, 5, 6, 4)
    k.shift_positions(blob.ctypes.data, state, 300)
    assert stored_positions(blob, state) == [[300, 301, 302, 303, 304], [303, 304]]


def test_caches_of_other_positions_or_widths_are_not_one_block(k):
    keys, values = tensors(1, 2, 4, 4)
    wide, _ = tensors(1, 2, 6, 4)
    one = cache_bytes([3, 4], list(keys), list(values), False)
    with pytest.raises(Exception, match="cell 1 has another position in each cache"):
        read(k, blob_of(one, cache_bytes([3, 5], list(keys), list(values), False)), 2, 2, 4, 4)
    with pytest.raises(Exception, match="K rows differ between layers: 8 and 12 bytes"):
        read(k, blob_of(one, cache_bytes([3, 4], list(wide), list(values), False)), 2, 2, 5, 4)


def test_an_empty_cache_ends_after_its_count(k):
    keys, values = tensors(2, 3, 4, 4)
    full, empty = cache_bytes([0, 1, 2], list(keys), list(values), False), cache_bytes([], [], [], False)
    for caches, n_cells in (((empty,), [0]), ((full, empty), [3, 0]), ((empty, full), [0, 3])):
        blob = blob_of(*caches)
        state = parse(k, blob)
        assert [int(cache.n_cells) for cache in state.caches] == n_cells
    with pytest.raises(Exception, match="at most 2 are known"):
        parse(k, blob_of(full, empty, empty))


def stored_positions(blob: np.ndarray, state) -> list[list[int]]:
    return [[CELL.unpack_from(blob, int(cache.cells_offset) + 12 * i)[0] for i in range(int(cache.n_cells))]
            for cache in state.caches]


@given(positions=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), delta=st.integers(-2**31, 2**31 - 1))
def test_shift_adds_to_every_position_or_changes_nothing(k, positions, delta):
    keys, values = tensors(1, len(positions), 2, 2)
    blob = blob_of(cache_bytes(positions, list(keys), list(values), False))
    before, state = blob.copy(), parse(k, blob)
    moved = [pos + delta for pos in positions]
    if all(0 <= pos < 2**31 for pos in moved):
        k.shift_positions(blob.ctypes.data, state, delta)
        np.testing.assert_array_equal(blob, blob_of(cache_bytes(moved, list(keys), list(values), False)))
    else:
        with pytest.raises(Exception, match="cannot move by"):
            k.shift_positions(blob.ctypes.data, state, delta)
        np.testing.assert_array_equal(blob, before)


@pytest.mark.parametrize(("type_k", "type_v", "named"), [(Q8_0, Q8_0, "K"), (Q8_0, F16, "K"), (F16, Q8_0, "V")])
def test_quantised_rows_parse_but_are_not_read(k, type_k, type_v, named):
    cells = CELL.pack(0, 1, 0)
    keys, values = (struct.pack("<iQ", kind, 34) + bytes(34) for kind in (type_k, type_v))
    blob = blob_of(struct.pack("<II", 1, 1) + cells + struct.pack("<II", 0, 1) + keys + values)
    state = parse(k, blob)
    assert (int(state.caches[0].k[0].type), int(state.caches[0].v[0].type)) == (type_k, type_v)
    with pytest.raises(Exception, match=f"{named} type is 8, only F16"):
        read(k, blob, 1, 1, 17, 17)


@pytest.mark.parametrize("v_trans", [False, True])
def test_layers_of_different_width_parse_but_are_not_one_block(k, v_trans):
    """The total would fit the targets: read as equal rows, both layers would be cut in the wrong place."""
    narrow, wide = (np.zeros((2, width), dtype=np.uint16) for width in (2, 6))
    even = [np.zeros((2, 4), dtype=np.uint16)] * 2
    for keys, values, named in (([narrow, wide], even, "K"), (even, [narrow, wide], "V")):
        with pytest.raises(Exception, match=f"{named} rows differ between layers"):
            read(k, blob_of(cache_bytes([0, 1], keys, values, v_trans)), 2, 2, 4, 4)


@pytest.mark.parametrize("v_trans", [False, True])
def test_every_truncation_and_every_extension_is_refused(k, v_trans):
    keys, values = tensors(2, 3, 2, 3)
    one = blob_of(cache_bytes([0, 1, 2], list(keys), list(values), v_trans))
    for length in range(len(one)):
        with pytest.raises(Exception, match=r"kv state: .* at byte \d+ of \d+"):
            parse(k, one[:length].copy())
    for extra in range(1, 8):
        with pytest.raises(Exception, match="kv state: "):
            parse(k, np.append(one, np.zeros(extra, dtype=np.uint8)))


def test_every_truncation_of_two_caches_is_refused_unless_it_ends_between_them(k):
    blob = two_caches()
    first = len(blob_of(cache_bytes([0, 1, 2, 3, 4], *map(list, tensors(1, 5, 6, 4, 1)), False)))
    for length in range(len(blob)):
        if length == first:
            state = parse(k, blob[:length])
            assert len(state.caches) == 1
        else:
            with pytest.raises(Exception, match="kv state: "):
                parse(k, blob[:length].copy())


# Offsets in a row-major state of 2 cells and 1 layer with rows of 4 bytes.
FIELDS = [
    (8, "I", 2, "n_stream is 2, not 1"),
    (8, "I", 0, "n_stream is 0, not 1"),
    (12, "I", 0xffffffff, "cells is cut off"),
    (20, "I", 2, "n_seq of cell 0 is 2, not 1"),
    (32, "I", 0, "n_seq of cell 1 is 0, not 1"),
    (40, "I", 2, "v_trans is 2"),
    (40, "I", 7, "v_trans is 7"),
    (44, "I", 0, "n_layer is 0"),
    (44, "I", 4097, "n_layer is 4097"),
    (44, "I", 0xffffffff, "n_layer is 4294967295"),
    (44, "I", 4096, "K type is cut off"),
    (52, "Q", 0, "K row bytes are 0"),
    (52, "Q", 3, "K row bytes are 3 for type 1"),
    (52, "Q", 2**63, "K row bytes are 9223372036854775808"),
    (52, "Q", 2**26, "K is cut off"),
    (72, "Q", 0, "V row bytes are 0"),
    (72, "Q", 2**63, "V row bytes are 9223372036854775808"),
    (72, "Q", 6, "V is cut off"),
]


@pytest.mark.parametrize(("offset", "kind", "value", "message"), FIELDS)
def test_an_impossible_field_is_named_with_its_value(k, offset, kind, value, message):
    keys, values = tensors(1, 2, 2, 2)
    blob = blob_of(cache_bytes([0, 1], list(keys), list(values), False))
    struct.pack_into("<" + kind, blob, offset, value)
    with pytest.raises(cppyy.gbl.std.runtime_error) as caught:
        parse(k, blob)
    assert message in str(caught.value)
    # The first byte of the bad field, or of the first field that a wrong count leaves no room for.
    at, size = map(int, re.search(r"at byte (\d+) of (\d+)", str(caught.value)).groups())
    assert size == len(blob)
    assert offset < at <= size if "cut off" in message else at == offset


@pytest.mark.parametrize(("element", "width"), [(1, 4), (4, 1), (0, 2), (2, 0), (2, 2**31), (2**31, 2)])
def test_transposed_v_must_have_the_size_of_f16(k, element, width):
    """(1, 4) and (4, 1) have the right total: only the element size gives them away."""
    keys, values = tensors(1, 2, 2, 2)
    blob = blob_of(cache_bytes([0, 1], list(keys), list(values), True))
    struct.pack_into("<II", blob, 48 + 12 + 8 + 4, element, width)
    at = 48 + 12 + 8 + 4 + (0 if element != 2 else 4)
    with pytest.raises(Exception, match=rf"kv state: V .* at byte {at if width != 2**31 else r'[0-9]+'} of"):
        parse(k, blob)


def consistent(state, size: int) -> bool:
    """Whether a parsed state stays inside its blob, in order, without overlap, and ends with it."""
    at = 8
    for cache in state.caches:
        at += 8
        if not cache.n_cells:
            continue
        if int(cache.cells_offset) != at or cache.k.size() != cache.v.size():
            return False
        at += 12 * int(cache.n_cells) + 8
        for layer in [*cache.k, *cache.v]:
            if int(layer.offset) != at + 12:
                return False
            at += 12 + int(layer.row_bytes) * int(cache.n_cells)
    return at == size


@given(two=st.booleans(), v_trans=st.booleans(),
       damage=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6))
def test_corruption_throws_or_gives_a_consistent_parse(k, two, v_trans, damage):
    keys, values = tensors(2, 3, 4, 6)
    blob = two_caches(v_trans) if two else blob_of(cache_bytes([0, 1, 2], list(keys), list(values), v_trans))
    for at, value in damage:
        blob[at % len(blob)] = value
    try:
        state = parse(k, blob)
    except Exception as error:
        assert "kv state: " in str(error)
        return
    assert consistent(state, len(blob))
    try:
        read(k, blob, 2, 3, 4, 6)
    except Exception as error:
        assert "kv state: " in str(error)


def test_each_single_bit_of_the_structure_throws_or_parses_consistently(k):
    for v_trans in (False, True):
        keys, values = tensors(1, 2, 2, 2)
        good = blob_of(cache_bytes([0, 1], list(keys), list(values), v_trans))
        for byte in range(len(good)):
            for bit in range(8):
                blob = good.copy()
                blob[byte] ^= 1 << bit
                try:
                    state = parse(k, blob)
                except Exception as error:
                    assert "kv state: " in str(error)
                else:
                    assert consistent(state, len(blob))


@given(noise=st.binary(max_size=400), header=st.booleans())
def test_noise_never_crashes(k, noise, header):
    blob = np.frombuffer((struct.pack("<IiII", MAGIC, 0, 1, 1) if header else b"") + noise + b"\0", dtype=np.uint8)
    blob = blob[:-1].copy() if len(blob) > 1 else blob.copy()
    try:
        state = parse(k, blob)
        assert consistent(state, len(blob))
    except cppyy.gbl.std.runtime_error as error:
        assert "kv state: " in str(error)


def test_reading_into_targets_of_another_size_is_refused(k):
    keys, values = tensors(2, 3, 4, 6)
    blob = write(k, keys, values, np.arange(3, dtype=np.int32), False)
    for shape, message in (((2, 4, 4, 6), "3 cells, 4 are expected"), ((1, 3, 4, 6), "K holds 48 bytes, 24"),
                           ((2, 3, 5, 6), "K holds 48 bytes, 60"), ((2, 3, 4, 5), "V holds 72 bytes, 60")):
        with pytest.raises(Exception) as caught:
            read(k, blob, *shape)
        assert message in str(caught.value)


def test_a_state_that_belongs_to_a_longer_blob_is_refused(k):
    keys, values = tensors(2, 3, 4, 6)
    blob = write(k, keys, values, np.arange(3, dtype=np.int32), True)
    state = parse(k, blob)
    positions = np.zeros(3, dtype=np.int32)
    for size in (8, 60, len(blob) - 1):
        with pytest.raises(Exception, match="outside of the blob"):
            k.read_kv_block(blob.ctypes.data, size, state, keys.ctypes.data, keys.nbytes, values.ctypes.data,
                            values.nbytes, positions.ctypes.data, positions.nbytes)


@pytest.mark.parametrize(("n_layers", "n_cells", "size_error", "k_row", "message"), [
    (0, 1, 0, 4, "0 layers of 1 cells"), (1, 0, 0, 4, "1 layers of 0 cells"), (1, 1, 1, 4, "do not fit"),
    (1, 1, -1, 4, "do not fit"), (1, 1, 0, 3, "are not rows of F16"), (1, 1, 0, 0, "are not rows of F16"),
])
def test_writing_refuses_what_it_cannot_describe(k, n_layers, n_cells, size_error, k_row, message):
    size = k.kv_state_size([n_layers], n_cells, k_row, 4, False) + size_error
    with pytest.raises(Exception) as caught:
        k.write_kv_state(0, size, MAGIC, [n_layers], n_cells, k_row, 4, False, 0, 0, 0)
    assert message in str(caught.value)

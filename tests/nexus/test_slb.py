"""The lookaside as Python sees it: quantisation, answers and what it refuses. The kernels have tests of their own."""
from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays

from nexus import slb
from nexus.slb import Lookaside, LookasideError, available_isas, quantisation_error, quantise

RNG = np.random.default_rng(3)
FINITE = st.floats(-1e4, 1e4, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6)


def vectors_of(n: int, dim: int) -> np.ndarray:
    return RNG.standard_normal((n, dim), dtype=np.float32)


@settings(deadline=None)
@given(vectors=arrays.arrays(np.float32, arrays.array_shapes(min_dims=2, max_dims=2, max_side=12), elements=FINITE))
def test_codes_are_within_half_a_step_and_use_the_whole_range(vectors):
    codes, scale = quantise(vectors)
    assert codes.dtype == np.int8 and codes.shape == vectors.shape
    assert scale > 0
    error = quantisation_error(vectors, codes, scale)
    assert error.largest <= scale * (0.5 + 2e-5)
    assert error.rms <= error.largest
    if vectors.any():
        assert np.abs(codes.astype(int)).max() == 127
    else:
        assert (scale, error.largest, error.relative) == (1.0, 0.0, 0.0)


def test_the_codes_of_known_vectors():
    codes, scale = quantise(np.array([[1.0, -1.0, 0.0], [0.5, 0.004, -0.003]], np.float32))
    assert codes.tolist() == [[127, -127, 0], [64, 1, 0]]  # 63.5 is a tie and goes to the even code
    assert scale == pytest.approx(1 / 127)


def test_the_error_of_known_codes():
    error = quantisation_error(np.array([[3.0, 4.0]], np.float32), np.array([[3, 3]], np.int8), 1.0)
    assert error.largest == 1.0 and error.rms == pytest.approx(0.5 ** 0.5) and error.relative == pytest.approx(0.2)


def test_chunks_do_not_show(monkeypatch):
    vectors = vectors_of(25, 6)
    whole = quantise(vectors), quantisation_error(vectors, *quantise(vectors))
    monkeypatch.setattr(slb, "CHUNK_ROWS", 7)
    (codes, scale), error = quantise(vectors), quantisation_error(vectors, *quantise(vectors))
    assert np.array_equal(codes, whole[0][0]) and scale == whole[0][1]
    assert error.largest == whole[1].largest and error.rms == pytest.approx(whole[1].rms)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dim", [1, 7, 33, 100, 384])
def test_a_query_gets_the_codes_that_numpy_gives_it(isa, dim):
    for scale in (1.0, 1e-20, 1e30):
        vectors = vectors_of(20, dim) * np.float32(scale)
        table = Lookaside(vectors, isa=isa)
        for row in vectors:
            codes, step = table.quantise_query(row)
            expected, expected_step = quantise(row[None])
            assert np.array_equal(codes, expected[0]) and step == expected_step


@pytest.mark.parametrize("isa", available_isas())
def test_scores_are_the_products_of_codes_in_the_vectors_unit(isa):
    vectors, query = vectors_of(300, 100), vectors_of(1, 100)[0]
    codes, scale = quantise(vectors)
    table = Lookaside(vectors, isa=isa)
    query_codes, step = table.quantise_query(query)
    products = codes.astype(int) @ query_codes.astype(int)
    hits = table.search(query, 7)
    assert [hit[0] for hit in hits] == np.argsort(-products, kind="stable")[:7].tolist()
    assert [hit[1] for hit in hits] == pytest.approx([products[i] * scale * step for i, _ in hits], rel=1e-12)
    assert [hit[1] for hit in hits] == pytest.approx([float(vectors[i] @ query) for i, _ in hits], abs=0.5)
    ids, exact = table.scan(query_codes, 3)
    assert ids.tolist() == [i for i, _ in hits[:3]] and exact.tolist() == products[ids].tolist()
    assert (ids.dtype, exact.dtype) == (np.int64, np.int32)
    assert all(type(i) is int and type(score) is float for i, score in hits)


def test_what_it_says_of_itself():
    table = Lookaside(vectors_of(250, 383), threads=8)
    assert (table.n, table.dim, table.isa, table.threads) == (250, 383, available_isas()[-1], 1)
    assert table.nbytes == 256 * 384 and table.address % 64 == 0


def test_many_rows_are_scanned_by_threads():
    codes = RNG.integers(-128, 128, (slb.THREADED_ROWS, 3)).astype(np.int8)
    query = np.array([1, -2, 3], np.int8)
    table = Lookaside.from_codes(codes, threads=2)
    products = codes.astype(int) @ query.astype(int)
    assert table.threads == 2
    expected = np.argsort(-products, kind="stable")
    for k in (5, 100):
        ids, scores = table.scan(query, k)
        assert ids.tolist() == expected[:k].tolist() and scores.tolist() == products[expected[:k]].tolist()


def test_no_rows_give_no_hits_and_one_row_is_the_only_hit():
    query = np.ones(5, np.float32)
    assert Lookaside(np.zeros((0, 5), np.float32)).search(query, 3) == []
    assert Lookaside(query[None]).search(query, 3) == [(0, pytest.approx(5.0))]


def test_a_query_of_zeros_is_as_near_to_every_row():
    assert Lookaside(vectors_of(9, 4)).search(np.zeros(4, np.float32), 3) == [(0, 0.0), (1, 0.0), (2, 0.0)]


def test_a_table_of_zeros():
    assert Lookaside(np.zeros((3, 4), np.float32)).search(np.ones(4, np.float32), 2) == [(0, 0.0), (1, 0.0)]


def test_views_other_orders_and_other_floats_give_the_same_hits():
    vectors, query = vectors_of(70, 10), vectors_of(1, 10)[0]
    hits = Lookaside(vectors).search(query, 5)
    wide = np.zeros((140, 30), np.float32)
    wide[::2, ::3] = vectors
    unaligned = np.frombuffer(b"x" + vectors.tobytes(), np.uint8)[1:].view(np.float32).reshape(vectors.shape)
    assert not unaligned.flags.aligned
    for same in (wide[::2, ::3], np.asfortranarray(vectors), vectors.astype(np.float64), vectors.astype(">f4"),
                 unaligned):
        assert Lookaside(same).search(query, 5) == hits
    spread = np.zeros(20, np.float32)
    spread[::2] = query
    misplaced = np.frombuffer(b"x" + query.tobytes(), np.uint8)[1:].view(np.float32)
    for same in (spread[::2], query[::-1].copy()[::-1], query.astype(np.float64), query.astype(">f4"), misplaced):
        assert Lookaside(vectors).search(same, 5) == hits
    codes = quantise(vectors)[0]
    expected = Lookaside.from_codes(codes).scan(codes[3], 4)
    doubled = np.repeat(codes, 2, axis=1)
    found = Lookaside.from_codes(doubled[:, ::2]).scan(doubled[3, ::2], 4)
    assert np.array_equal(found, expected) and expected[0][0] == 3


def test_the_table_does_not_follow_its_source():
    vectors = vectors_of(5, 4)
    table, before = Lookaside(vectors), vectors.copy()
    vectors[:] = 0
    assert table.search(before[2], 5) == Lookaside(before).search(before[2], 5)


def test_k_beyond_the_first_buffer_and_k_of_other_integer_types():
    vectors = vectors_of(500, 4)
    table = Lookaside(vectors)
    everything = table.search(vectors[0], 10**30)
    assert sorted(i for i, _ in everything) == list(range(500))
    assert table.search(vectors[0], 3) == table.search(vectors[0], np.int64(3)) == everything[:3]
    assert table.search(vectors[0], 200) == everything[:200]


def test_a_scan_overwrites_the_arrays_of_the_one_before():
    codes = np.eye(3, dtype=np.int8)
    table = Lookaside.from_codes(codes)
    first, kept = table.scan(codes[0], 1), table.scan(codes[0], 2)[0].copy()
    assert kept.tolist() == [0, 1]
    table.scan(codes[2], 1)
    assert first[0].tolist() == [2]


@pytest.mark.parametrize(("k", "message"), [(0, "k is 0; give at least 1"), (-1, "k is -1"),
                                            (2.0, "k is 2.0; give a whole number"), (None, "k is None")])
def test_a_k_that_means_nothing_is_refused(k, message):
    table = Lookaside(vectors_of(5, 4))
    with pytest.raises(LookasideError, match=message):
        table.search(np.ones(4, np.float32), k)
    with pytest.raises(LookasideError, match=message):
        table.scan(np.ones(4, np.int8), k)


@pytest.mark.parametrize("query", [
    np.ones(3, np.float32), np.ones(5, np.float32), np.ones((1, 4), np.float32), np.ones((), np.float32),
    np.ones(4, np.int8), np.ones(4, np.int64), np.ones(4, np.complex64), np.ones(4, bool), [1.0] * 4, None])
def test_a_query_of_another_shape_or_type_is_refused(query):
    table = Lookaside(vectors_of(5, 4))
    for call in (lambda: table.search(query, 1), lambda: table.quantise_query(query)):
        with pytest.raises(LookasideError, match=r"query is .*; give float32\[4\]"):
            call()


@pytest.mark.parametrize("codes", [np.ones(3, np.int8), np.ones((1, 4), np.int8), np.ones(4, np.uint8),
                                   np.ones(4, np.int16), np.ones(4, np.float32), [1] * 4])
def test_query_codes_of_another_shape_or_type_are_refused(codes):
    with pytest.raises(LookasideError, match=r"codes are .*; give int8\[4\]"):
        Lookaside(vectors_of(5, 4)).scan(codes, 1)


@pytest.mark.parametrize(("bad", "message"), [(np.nan, "NaN or infinity"), (np.inf, "NaN or infinity"),
                                              (-np.inf, "NaN or infinity")])
def test_numbers_that_are_not_finite_are_refused(bad, message):
    vectors = vectors_of(70, 20)
    table, query = Lookaside(vectors), vectors[0].copy()
    for at in (0, 17, 19):
        query[at] = bad
        with pytest.raises(LookasideError, match=f"query holds {message}"):
            table.search(query, 1)
        query[at] = 0
    assert table.search(vectors[0], 1)[0][0] == 0  # a refusal leaves nothing behind
    vectors[65, 3] = bad
    with pytest.raises(LookasideError, match=f"vectors hold {message}"):
        Lookaside(vectors)


def test_numbers_too_small_or_too_large_for_float32_are_refused():
    with pytest.raises(LookasideError, match="vectors have no magnitude above 1e-35; scale them"):
        quantise(np.full((2, 2), 1e-35, np.float32))
    with pytest.raises(LookasideError, match="NaN or infinity"):
        quantise(np.full((2, 2), 1e300))
    with pytest.raises(LookasideError, match="no magnitude of 1e-30 or more"):
        Lookaside(vectors_of(5, 4)).search(np.full(4, 1e-35, np.float32), 1)


@pytest.mark.parametrize("vectors", [np.ones((2, 2), np.int8), np.ones(4, np.float32), np.ones((2, 2, 2), np.float32),
                                     np.ones((2, 2), np.int32), [[1.0]], None])
def test_a_table_of_another_shape_or_type_is_refused(vectors):
    with pytest.raises(LookasideError, match=r"vectors are .*; give float32\[n, dim\]"):
        Lookaside(vectors)


def test_other_refusals():
    vectors = vectors_of(3, 4)
    with pytest.raises(LookasideError, match="dim is 0; it must be 1 to 65536"):
        Lookaside(np.zeros((3, 0), np.float32))
    with pytest.raises(LookasideError, match="'sse9' is not available on this CPU; use one of scalar"):
        Lookaside(vectors, isa="sse9")
    with pytest.raises(LookasideError, match="threads is 0; give at least 1"):
        Lookaside(vectors, threads=0)
    with pytest.raises(LookasideError, match=r"codes are float32\[3, 4\]; give int8\[n, dim\]"):
        Lookaside.from_codes(vectors)
    with pytest.raises(LookasideError, match=r"codes have shape \(3, 3\), vectors \(3, 4\)"):
        quantisation_error(vectors, np.ones((3, 3), np.int8), 1.0)


def test_searches_of_several_python_threads_do_not_mix():
    vectors = vectors_of(300, 16)
    table = Lookaside(vectors)
    expected = [table.search(row, 3) for row in vectors]
    wrong = []

    def ask(begin: int) -> None:
        wrong.extend(i for i in list(range(begin, 300)) * 5 if table.search(vectors[i], 3) != expected[i])

    threads = [threading.Thread(target=ask, args=(begin,)) for begin in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

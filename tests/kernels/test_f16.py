"""Half-precision conversion against numpy: every half, and floats where rounding decides."""
from __future__ import annotations

import cppyy
import numpy as np
import pytest
from hypothesis import given, strategies as st

ALL_HALVES = np.arange(65536, dtype=np.uint16)


@pytest.fixture(scope="module")
def convert(k):
    """(floats of halves, halves of floats), whole arrays at a time."""
    cppyy.cppdef("""
    namespace nexus_test {
    void widen(size_t from, size_t to, size_t n) {
        for (size_t i = 0; i < n; ++i) ((float *) to)[i] = nexus::f16_to_f32(((const uint16_t *) from)[i]);
    }
    void narrow(size_t from, size_t to, size_t n) {
        for (size_t i = 0; i < n; ++i) ((uint16_t *) to)[i] = nexus::f32_to_f16(((const float *) from)[i]);
    }
    }""")
    test = cppyy.gbl.nexus_test

    def widen(halves: np.ndarray) -> np.ndarray:
        out = np.empty(halves.size, dtype=np.float32)
        test.widen(halves.ctypes.data, out.ctypes.data, halves.size)
        return out

    def narrow(floats: np.ndarray) -> np.ndarray:
        out = np.empty(floats.size, dtype=np.uint16)
        test.narrow(floats.ctypes.data, out.ctypes.data, floats.size)
        return out

    return widen, narrow


def numpy_halves(floats: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):
        return floats.astype(np.float16).view(np.uint16)


def assert_narrows_like_numpy(narrow, floats: np.ndarray) -> None:
    ours, theirs = narrow(floats), numpy_halves(floats)
    nan = np.isnan(floats)
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])
    assert np.isnan(ours[nan].view(np.float16)).all()
    np.testing.assert_array_equal(ours[nan] & 0x8000, theirs[nan] & 0x8000)


def test_every_half_widens_like_numpy(convert):
    widen, _ = convert
    ours, theirs = widen(ALL_HALVES), ALL_HALVES.view(np.float16).astype(np.float32)
    nan = np.isnan(theirs)
    np.testing.assert_array_equal(ours[~nan].view(np.uint32), theirs[~nan].view(np.uint32))
    assert np.isnan(ours[nan]).all()
    np.testing.assert_array_equal(np.signbit(ours), np.signbit(theirs))
    assert nan.sum() == 2 * 1023


def test_every_half_survives_the_round_trip(convert):
    widen, narrow = convert
    back = narrow(widen(ALL_HALVES))
    nan = np.isnan(ALL_HALVES.view(np.float16))
    np.testing.assert_array_equal(back[~nan], ALL_HALVES[~nan])
    np.testing.assert_array_equal(back[nan], ALL_HALVES[nan] | 0x0200)  # a NaN keeps its payload and becomes quiet


def test_ties_and_their_neighbours_round_to_even(convert):
    _, narrow = convert
    positive = np.arange(0x7c00, dtype=np.uint16).view(np.float16).astype(np.float64)
    above = np.append(positive[1:], 65536.0)
    ties = ((positive + above) / 2).astype(np.float32)  # exact: a half needs 11 bits, a tie between two 12
    np.testing.assert_array_equal(ties.astype(np.float64), (positive + above) / 2)
    for floats in (ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))):
        assert_narrows_like_numpy(narrow, floats)
        assert_narrows_like_numpy(narrow, -floats)
    even = narrow(ties) % 2
    assert not even.any()


@pytest.mark.parametrize("bits", [0x00000000, 0x80000000, 0x00000001, 0x807fffff, 0x33000000, 0x33000001, 0x32ffffff,
                                  0x387fffff, 0x38800000, 0x477fefff, 0x477ff000, 0x7f7fffff, 0x7f800000, 0xff800000,
                                  0x7f800001, 0x7fc00000, 0xffffffff])
def test_edges_narrow_like_numpy(convert, bits):
    _, narrow = convert
    assert_narrows_like_numpy(narrow, np.array([bits], dtype=np.uint32).view(np.float32))


@given(st.lists(st.one_of(st.floats(width=32), st.floats(-70000, 70000, width=32),
                          st.floats(-2.0**-13, 2.0**-13, width=32)), min_size=1, max_size=200))
def test_any_float_narrows_like_numpy(convert, floats):
    _, narrow = convert
    assert_narrows_like_numpy(narrow, np.array(floats, dtype=np.float32))


def test_a_wide_sweep_of_bit_patterns_narrows_like_numpy(convert):
    _, narrow = convert
    bits = np.arange(0, 2**32, 4093, dtype=np.uint64).astype(np.uint32)  # a prime step meets every exponent
    assert_narrows_like_numpy(narrow, bits.view(np.float32))

"""The search under a bit mask, against numpy."""
from __future__ import annotations

import cppyy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def best_allowed(k):
    cppyy.include("token_mask.hpp")

    def call(logits: np.ndarray, allowed: np.ndarray, stray: bool = False) -> int:
        bits = np.full(-(-len(logits) // 32) * 32, stray)
        bits[:len(logits)] = allowed
        mask = np.packbits(bits, bitorder="little").view(np.uint32)
        return int(k.best_allowed(logits.ctypes.data, mask.ctypes.data, len(logits)))
    return call


@given(st.integers(1, 200), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.05, 0.9]), st.booleans())
def test_it_finds_what_numpy_finds(best_allowed, n, seed, share, stray):
    rng = np.random.default_rng(seed)
    # Whole numbers: many are equal, and the lowest id must win.
    logits, allowed = rng.integers(-3, 4, n).astype(np.float32), rng.random(n) < share
    expected = int(np.where(allowed, logits, -np.inf).argmax()) if allowed.any() else -1
    # Bits behind the vocabulary's end are not looked at.
    assert best_allowed(logits, allowed, stray) == expected


def test_infinities_and_what_is_not_a_number(best_allowed):
    logits = np.array([1, -np.inf, -np.inf, np.nan], np.float32)
    assert best_allowed(logits, np.array([0, 1, 1, 0], bool)) == 1
    assert best_allowed(logits, np.array([1, 0, 0, 1], bool)) == -2
    assert best_allowed(logits, np.array([0, 0, 0, 0], bool)) == -1

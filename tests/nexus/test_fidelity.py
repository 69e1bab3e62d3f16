import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nexus.fidelity import divergence

logits = arrays(np.float32, 50, elements=st.floats(-30, 30, width=32))


def test_known_answer():
    reference = np.log(np.array([0.5, 0.5], dtype=np.float32))
    measured = np.log(np.array([0.25, 0.75], dtype=np.float32))
    assert divergence(reference, measured).kl_nats == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3), rel=1e-6)


@given(logits, logits)
def test_never_negative_and_zero_only_for_equal_distributions(a, b):
    found = divergence(a, b)
    assert found.kl_nats >= 0
    assert found.bit_identical == bool((a.view(np.uint32) == b.view(np.uint32)).all())


@given(logits, st.floats(-5, 5, width=32))
def test_a_constant_added_to_all_logits_changes_nothing(a, shift):
    assert divergence(a, a + np.float32(shift)).kl_nats < 1e-9


def test_equal_logits_are_exactly_zero():
    a = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    found = divergence(a, a.copy())
    assert (found.kl_nats, found.top1, found.bit_identical) == (0.0, True, True)


def test_refuses_what_is_not_a_distribution():
    with pytest.raises(ValueError, match="finite"):
        divergence(np.array([0, np.nan], dtype=np.float32), np.zeros(2, dtype=np.float32))
    with pytest.raises(ValueError, match="one length"):
        divergence(np.zeros(3, dtype=np.float32), np.zeros(2, dtype=np.float32))

"""Key drift, un-rotation, predictors and rank correlation, against answers known beforehand."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nexus import drift
from nexus.drift import PREDICTORS, Known, heads, key_drift, spearman, spearman_within_layer, unrotated
from nexus.rope import Rope
from nexus.tables import PAPER_PREDICTOR

SEEDS = st.integers(0, 2**32 - 1)


def random_rows(seed: int, n_layers=3, n_tokens=7, width=2 * 8) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n_layers, n_tokens, width)).astype(np.float16)


def known(seed: int = 0, n_head: int = 2) -> Known:
    keys = {field.name: heads(random_rows(seed + index), n_head) for index, field in
            enumerate(dataclasses.fields(Known))}
    return Known(**keys)


def rotated(vectors: np.ndarray, positions: np.ndarray, rope: Rope) -> np.ndarray:
    """RoPE by its definition, one complex number per pair: float64[n_layers, n_tokens, n_head, head_dim]."""
    out = vectors.astype(np.float64).copy()
    half = rope.n_rot // 2
    for pair, theta in enumerate(rope.frequencies):
        a, b = (2 * pair, 2 * pair + 1) if rope.layout == "normal" else (pair, pair + half)
        turned = (out[..., a] + 1j * out[..., b]) * np.exp(1j * theta * positions)[None, :, None]
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


def test_drift_has_the_stated_value():
    spliced = np.zeros((2, 2, 2 * 2), dtype=np.float16)
    true = spliced.copy()
    true[0, 0] = [3, 4, 0, 0]       # token 0: head 0 is off by 5
    true[0, 1] = [0, 0, 0, -2]      # token 1: head 1 is off by 2
    assert key_drift(true, spliced, 2).tolist() == [[2.5, 1.0], [0.0, 0.0]]
    assert key_drift(true, spliced, 1).tolist() == [[3.5], [0.0]]


@given(SEEDS, SEEDS)
def test_drift_is_zero_for_equal_keys_and_a_distance_otherwise(first: int, second: int):
    a, b = random_rows(first), random_rows(second)
    assert not key_drift(a, a.copy(), 2).any()
    there, back = key_drift(a, b, 2), key_drift(b, a, 2)
    assert there.shape == (3, 2) and there.dtype == np.float64
    assert np.array_equal(there, back) and ((there > 0).all() or first == second)


@given(SEEDS, st.integers(0, 4000), st.sampled_from(["normal", "neox"]))
def test_drift_does_not_depend_on_where_both_sides_are_rotated_to(seed: int, begin: int, layout: str):
    rope = Rope(layout, 1e4, 8, "none", 1.0)
    a, b = random_rows(seed), random_rows(seed + 1)
    positions = begin + np.arange(a.shape[1])
    there = [rotated(heads(side, 2), positions, rope).reshape(a.shape) for side in (a, b)]
    assert key_drift(*there, 2) == pytest.approx(key_drift(a, b, 2), rel=1e-5)


def test_large_f16_differences_do_not_overflow():
    a = np.full((1, 2, 4), 60000, dtype=np.float16)
    assert key_drift(a, -a, 1)[0, 0] == pytest.approx(2 * 2 * float(a[0, 0, 0]))


@pytest.mark.parametrize("true, spliced, n_head", [
    ((1, 2, 4), (1, 3, 4), 2), ((1, 0, 4), (1, 0, 4), 2), ((1, 2, 4), (1, 2, 4), 3), ((2, 4), (2, 4), 2),
])
def test_drift_refuses_what_is_not_one_block(true, spliced, n_head):
    with pytest.raises(ValueError, match="shape"):
        key_drift(np.ones(true, np.float16), np.ones(spliced, np.float16), n_head)


@given(SEEDS, st.integers(0, 8000), st.sampled_from(["normal", "neox"]), st.sampled_from([4, 8]))
def test_unrotation_inverts_rope_and_leaves_the_other_dims(seed: int, begin: int, layout: str, n_rot: int):
    rope = Rope(layout, 1e5, n_rot, "none", 1.0)
    plain = heads(random_rows(seed), 2)
    positions = begin + np.arange(plain.shape[1])
    keys = rotated(plain, positions, rope).reshape(3, 7, 16)
    found = unrotated(keys, positions, 2, layout, rope.frequencies)
    assert found.dtype == np.float32 and found.shape == plain.shape
    assert found == pytest.approx(plain, abs=1e-5)
    assert np.array_equal(found[..., n_rot:], plain[..., n_rot:])


def test_unrotation_takes_frequencies_of_its_own_for_each_layer():
    slow, fast = (Rope("neox", base, 8, "none", 1.0) for base in (1e6, 1e4))
    keys, positions = random_rows(1, n_layers=2), np.arange(100, 107)
    both = unrotated(keys, positions, 2, "neox", np.stack([slow.frequencies, fast.frequencies]))
    for layer, rope in enumerate((slow, fast)):
        alone = unrotated(keys[layer:layer + 1], positions, 2, "neox", rope.frequencies)
        assert np.array_equal(both[layer:layer + 1], alone)


def test_unrotation_at_position_0_changes_nothing_and_keeps_its_input():
    keys = random_rows(2)
    before = keys.copy()
    assert np.array_equal(unrotated(keys, np.zeros(7, int), 2, "normal", np.ones(4)), heads(keys, 2))
    unrotated(keys, np.arange(7), 2, "normal", np.ones(4))
    assert np.array_equal(keys, before)


def test_unrotation_refuses_another_layout():
    with pytest.raises(ValueError, match="mrope"):
        unrotated(random_rows(0), np.arange(7), 2, "mrope", np.ones(4))


@pytest.mark.parametrize("name", PREDICTORS)
def test_every_predictor_gives_one_finite_number_per_head(name: str):
    found = PREDICTORS[name](known())
    assert found.shape == (3, 2) and found.dtype == np.float64 and np.isfinite(found).all()


@pytest.mark.parametrize("name, fields", [
    ("context_k_variance", ("context_keys",)),
    ("context_k_variance_rotated", ("context_keys_rotated",)),
    ("context_shift", ("context_keys", "left_keys")),
    ("context_value_shift", ("context_values", "left_values")),
    ("block_k_variance", ("block_keys",)),
])
@settings(deadline=None)
@given(SEEDS, st.floats(-3, 3))
def test_variance_and_shift_are_invariant_to_a_common_offset_and_scale_with_their_input(name, fields, seed, offset):
    # One offset per layer, head and dim, the same for all tokens.
    move = np.float32(offset) * np.random.default_rng(seed).normal(size=(3, 1, 2, 8)).astype(np.float32)
    before = known(seed)
    moved = dataclasses.replace(before, **{field: getattr(before, field) + move for field in fields})
    assert PREDICTORS[name](moved) == pytest.approx(PREDICTORS[name](before), rel=1e-4, abs=1e-5)
    doubled = dataclasses.replace(before, **{field: 2 * getattr(before, field) for field in fields})
    factor = 4 if "variance" in name else 2
    assert PREDICTORS[name](doubled) == pytest.approx(factor * PREDICTORS[name](before))


@pytest.mark.parametrize("name, fields", [
    ("context_k_variance", {"context_keys"}), ("context_k_variance_rotated", {"context_keys_rotated"}),
    ("sink_key_norm", {"block_keys"}), ("context_shift", {"context_keys", "left_keys"}),
    ("context_value_shift", {"context_values", "left_values"}), ("block_key_norm", {"block_keys"}),
    ("block_k_variance", {"block_keys"}), ("layer_depth", set()),
])
def test_a_predictor_looks_at_what_its_name_says_and_nothing_else(name: str, fields: set[str]):
    before = known()
    for field in dataclasses.fields(Known):
        other = dataclasses.replace(before, **{field.name: getattr(before, field.name)[:, ::-1] ** 3})
        same = np.array_equal(PREDICTORS[name](other), PREDICTORS[name](before))
        assert same == (field.name not in fields), field.name


def test_all_predictors_are_tested_above():
    assert set(PREDICTORS) == {
        "context_k_variance", "context_k_variance_rotated", "sink_key_norm", "context_shift", "context_value_shift",
        "block_key_norm", "block_k_variance", "layer_depth"}
    assert PAPER_PREDICTOR in PREDICTORS


def test_predictors_have_the_stated_values():
    # One layer, two tokens, one head of two dims.
    two = np.array([[1, 2], [3, 6]], dtype=np.float32).reshape(1, 2, 1, 2)
    zero = np.zeros_like(two)
    case = Known(two, 2 * two, two, zero, zero[:, :1], two)
    expected = {"context_k_variance": 1 + 4, "context_k_variance_rotated": 4 * 5, "sink_key_norm": 1 / 3,
                "context_shift": np.sqrt(4 + 16), "context_value_shift": np.sqrt(4 + 16),
                "block_key_norm": 2 * np.sqrt(5), "block_k_variance": 5, "layer_depth": 0}
    for name, value in expected.items():
        assert PREDICTORS[name](case).item() == pytest.approx(value, rel=1e-6), name


def test_sink_strength_takes_four_tokens_and_leaves_one():
    keys = np.ones((1, 10, 1, 4), dtype=np.float32)
    keys[:, :drift.SINK_TOKENS] = 5
    case = dataclasses.replace(known(n_head=1), block_keys=keys)
    assert drift.sink_key_norm(case).item() == pytest.approx(5)
    assert drift.sink_key_norm(dataclasses.replace(case, block_keys=keys[:, 3:5])).item() == pytest.approx(5)
    assert drift.sink_key_norm(dataclasses.replace(case, block_keys=keys[:, :1])).item() == 1


def test_the_same_context_as_at_compile_time_has_not_shifted():
    case = known()
    case = dataclasses.replace(case, left_keys=case.context_keys, left_values=case.context_values)
    assert not drift.context_shift(case).any() and not drift.context_value_shift(case).any()


def test_depth_counts_layers_only():
    assert drift.layer_depth(known()).tolist() == [[0, 0], [1 / 3, 1 / 3], [2 / 3, 2 / 3]]


@given(SEEDS)
def test_rank_correlation_follows_order_alone(seed: int):
    values = np.random.default_rng(seed).normal(size=(4, 3))
    assert spearman(np.exp(values), values) == pytest.approx(1)
    assert spearman(-(values ** 3), values) == pytest.approx(-1)
    swapped = np.arange(4.0).reshape(2, 2)
    assert spearman(swapped, swapped[:, ::-1]) == pytest.approx(1 - 6 * 4 / (4 * 15))


def test_no_rank_correlation_with_a_constant_side():
    values = np.arange(6.0).reshape(3, 2)
    assert spearman(np.ones((3, 2)), values) is None
    assert spearman(values, np.zeros((3, 2))) is None
    assert spearman(values[:1, :1], values[:1, :1]) is None


@pytest.mark.parametrize("correlation", [spearman, spearman_within_layer])
def test_rank_correlation_refuses_other_shapes_and_what_is_not_finite(correlation):
    values = np.arange(6.0).reshape(3, 2)
    with pytest.raises(ValueError, match="shape"):
        correlation(values, values.T)
    with pytest.raises(ValueError, match="drift: 1 of 6"):
        correlation(values, np.where(values == 2, np.nan, values))


@pytest.mark.parametrize("predicted, drift, rho", [
    # Both layers in order; none; one of two: what layers add is gone.
    ([[0, 1], [2, 3]], [[10, 11], [50, 70]], 1), ([[0, 1], [2, 3]], [[11, 10], [70, 50]], -1),
    ([[0, 1], [2, 3]], [[10, 11], [70, 50]], 0),
    # Ranks 1 4 | 2 3 leave ∓1.5 | ∓0.5 and 1 2 | 3 4 leave ∓0.5 | ∓0.5: the pair that is further apart counts more.
    ([[0, 9], [4, 5]], [[0, 1], [2, 3]], 2 / np.sqrt(5)),
    ([[0, 9], [4, 5]], [[0, 1], [3, 2]], 1 / np.sqrt(5)),
    # Ranks 1.5 1.5 3 leave −0.5 −0.5 1, and 1 2 3 leave −1 0 1.
    ([[0, 0, 1]], [[0, 1, 2]], 1.5 / np.sqrt(1.5 * 2)),
])
def test_within_layers_ranks_have_the_stated_correlation(predicted, drift, rho):
    assert spearman_within_layer(np.array(predicted), np.array(drift)) == pytest.approx(rho)


def test_layers_alone_give_a_high_pooled_correlation_and_take_nothing_away_within():
    depth = np.repeat(np.arange(24.0)[:, None], 2, axis=1)
    reversed_heads = depth + np.array([0.1, 0])
    drift_of_heads = depth + np.array([0, 0.1])
    assert spearman(reversed_heads, drift_of_heads) > 0.99
    assert spearman_within_layer(reversed_heads, drift_of_heads) == pytest.approx(-1)


RANKED = arrays(np.int64, st.tuples(st.integers(1, 6), st.integers(1, 4)), elements=st.integers(-9, 9))


@given(st.data())
def test_within_layers_only_the_order_among_all_heads_counts(data):
    predicted = data.draw(RANKED)
    drift = data.draw(arrays(np.int64, predicted.shape, elements=st.integers(-9, 9)))
    rho = spearman_within_layer(predicted, drift)
    assert rho is None or -1 <= rho <= 1
    assert spearman_within_layer(drift, predicted) == rho
    assert spearman_within_layer(predicted**3, np.exp(drift)) == rho
    opposite = spearman_within_layer(-predicted, drift)
    assert opposite is None if rho is None else opposite == pytest.approx(-rho, abs=1e-12)
    of_layer = np.broadcast_to(predicted[:, :1], predicted.shape)
    assert spearman_within_layer(of_layer, drift) is None and spearman_within_layer(drift, of_layer) is None

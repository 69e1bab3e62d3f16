"""Key rotation: every instruction set against the scalar reference, and the reference against float64.

The unit is one F16 ulp of the rotated pair's magnitude sqrt(x0² + x1²). Ulps of the element would mean nothing: where
the rotation cancels, an element near zero is off by many of its own ulps although the pair is as exact as F16 allows.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, example, given, strategies as st

from nexus import native

FAST = [(name, code) for name, code in (("avx2", 1), ("avx512", 2), ("neon", 3))
        if native.kernels().isa_available(code)]
ALL = [("scalar", 0), *FAST]
GUARD = 0x5a5a

# Half an ulp for the one rounding to F16, and 2^-22 of the magnitude for float32 arithmetic and the float32 table. A
# magnitude is less than 2^11 of its ulps, so that is at most 2^-11 ulps.
BOUND_FLOAT64 = 0.5 + 2.0**-11
BOUND_BETWEEN_VERSIONS = 1.0
# The way there leaves an error vector of at most BOUND_FLOAT64 in each component; turning back can put its whole
# length, sqrt(2) times that, into one component, and adds its own.
BOUND_ROUND_TRIP = (np.sqrt(2) + 1) * BOUND_FLOAT64


@dataclass(frozen=True)
class Shape:
    n_rows: int
    n_heads: int
    head_dim: int
    n_rot: int
    layout: int
    src_gap: int
    dst_gap: int

    @property
    def row(self) -> int:
        return self.n_heads * self.head_dim


@st.composite
def shapes(draw) -> Shape:
    head_dim = draw(st.integers(1, 150))
    n_rot = 2 * draw(st.integers(0, head_dim // 2))
    return Shape(draw(st.integers(1, 4)), draw(st.integers(1, 4)), head_dim, n_rot, draw(st.integers(0, 1)),
                 draw(st.integers(0, 9)), draw(st.integers(0, 9)))


deltas = st.integers(-40000, 40000).filter(bool)
seeds = st.integers(0, 2**32 - 1)


def pairs(heads: np.ndarray, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """(x0, x1) of every rotated pair, float64[rows, heads, n_rot/2] each, written independently of the kernel."""
    rotated = heads.reshape(-1, shape.n_heads, shape.head_dim)[..., :shape.n_rot].astype(np.float64)
    if shape.layout == 0:
        return rotated[..., 0::2], rotated[..., 1::2]
    return rotated[..., :shape.n_rot // 2], rotated[..., shape.n_rot // 2:]


def ulp_of(magnitude: np.ndarray) -> np.ndarray:
    """Size of one F16 ulp at each magnitude."""
    return 2.0 ** (np.floor(np.log2(np.maximum(magnitude, 2.0**-14))) - 10)


def keys(shape: Shape, seed: int) -> np.ndarray:
    """float16[rows, row] over the whole exponent range, subnormals and signed zeros included; pairs stay finite."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((shape.n_rows, shape.row)) * 2.0 ** rng.uniform(-24, 12, (shape.n_rows, shape.row))
    values[rng.random(values.shape) < 0.05] = 0.0
    values[rng.random(values.shape) < 0.05] = -0.0
    return values.astype(np.float16)


def frequencies(shape: Shape) -> np.ndarray:
    half = shape.n_rot // 2
    return np.ascontiguousarray(10000.0 ** (-np.arange(half) / max(half, 1)))


def table(k, delta: float, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    theta = theta if theta.size else np.zeros(1)
    cosine, sine = np.empty(theta.size, dtype=np.float32), np.empty(theta.size, dtype=np.float32)
    k.rope_table(delta, theta.ctypes.data, theta.size, cosine.ctypes.data, sine.ctypes.data)
    return cosine, sine


def shift(k, isa: int, shape: Shape, source: np.ndarray, delta: float, in_place: bool = False) -> np.ndarray:
    """The rotated rows, float16[rows, row]. Rows lie `gap` halves apart; the gaps must stay as they were."""
    cosine, sine = table(k, delta, frequencies(shape))
    src = np.full((shape.n_rows, shape.row + shape.src_gap), GUARD, dtype=np.uint16)
    src[:, :shape.row] = source.view(np.uint16)
    dst = src if in_place else np.full((shape.n_rows, shape.row + shape.dst_gap), GUARD, dtype=np.uint16)
    before = src.copy()
    k.rope_shift(isa, src.ctypes.data, dst.ctypes.data, shape.n_rows, src.strides[0], dst.strides[0], shape.n_heads,
                 shape.head_dim, shape.n_rot, shape.layout, cosine.ctypes.data, sine.ctypes.data)
    assert (dst[:, shape.row:] == GUARD).all()
    if not in_place:
        np.testing.assert_array_equal(src, before)
    return np.ascontiguousarray(dst[:, :shape.row]).view(np.float16)


def exact(shape: Shape, source: np.ndarray, delta: float) -> tuple[np.ndarray, np.ndarray]:
    x0, x1 = pairs(source, shape)
    angle = delta * frequencies(shape)
    return x0 * np.cos(angle) - x1 * np.sin(angle), x0 * np.sin(angle) + x1 * np.cos(angle)


def worst_ulps(shape: Shape, got: tuple, wanted: tuple, source: np.ndarray) -> float:
    ulp = ulp_of(np.hypot(*pairs(source, shape)))
    return max((float((np.abs(a - b) / ulp).max(initial=0)) for a, b in zip(got, wanted)), default=0.0)


def unrotated(heads: np.ndarray, shape: Shape) -> np.ndarray:
    return heads.view(np.uint16).reshape(-1, shape.n_heads, shape.head_dim)[..., shape.n_rot:]


@pytest.mark.parametrize(("name", "isa"), ALL)
@given(shape=shapes(), delta=deltas, seed=seeds)
@example(shape=Shape(3, 2, 64, 64, 1, 0, 0), delta=300, seed=0)
@example(shape=Shape(3, 3, 64, 64, 0, 0, 0), delta=-300, seed=0)
def test_within_half_an_ulp_of_float64(k, name, isa, shape, delta, seed):
    source = keys(shape, seed)
    result = shift(k, isa, shape, source, delta)
    assert worst_ulps(shape, pairs(result, shape), exact(shape, source, delta), source) <= BOUND_FLOAT64
    np.testing.assert_array_equal(unrotated(result, shape), unrotated(source, shape))


@pytest.mark.parametrize(("name", "isa"), FAST)
@given(shape=shapes(), delta=deltas, seed=seeds)
def test_fast_version_is_within_one_ulp_of_the_reference(k, name, isa, shape, delta, seed):
    source = keys(shape, seed)
    fast, reference = (shift(k, code, shape, source, delta) for code in (isa, 0))
    assert worst_ulps(shape, pairs(fast, shape), pairs(reference, shape), source) <= BOUND_BETWEEN_VERSIONS
    np.testing.assert_array_equal(unrotated(fast, shape), unrotated(reference, shape))


@pytest.mark.parametrize(("name", "isa"), FAST)
@pytest.mark.parametrize("layout", [0, 1])
def test_every_tail_length(k, name, isa, layout):
    """All numbers of pairs up to three AVX-512 vectors: each tail after 0, 1, 2 and 3 whole vectors."""
    for half in range(1, 49):
        shape = Shape(2, 2, 2 * half + 3, 2 * half, layout, 1, 2)
        source = keys(shape, half)
        fast, reference = (shift(k, code, shape, source, 777) for code in (isa, 0))
        assert worst_ulps(shape, pairs(fast, shape), pairs(reference, shape), source) <= BOUND_BETWEEN_VERSIONS, half
        np.testing.assert_array_equal(unrotated(fast, shape), unrotated(reference, shape))


@pytest.mark.parametrize(("name", "isa"), ALL)
@given(shape=shapes(), seed=seeds)
def test_delta_zero_is_the_bit_exact_identity(k, name, isa, shape, seed):
    """All bit patterns: multiplying by 1 and adding 0 would lose signed zeros and change NaNs."""
    bits = np.random.default_rng(seed).integers(0, 65536, (shape.n_rows, shape.row)).astype(np.uint16)
    bits[:, ::3] = 0x8000
    for in_place in (False, True):
        result = shift(k, isa, shape, bits.view(np.float16), 0, in_place)
        np.testing.assert_array_equal(result.view(np.uint16), bits)


@pytest.mark.parametrize(("name", "isa"), ALL)
@given(shape=shapes(), delta=deltas, seed=seeds)
def test_in_place_equals_out_of_place(k, name, isa, shape, delta, seed):
    source = keys(shape, seed)
    there, here = (shift(k, isa, shape, source, delta, in_place) for in_place in (False, True))
    np.testing.assert_array_equal(here.view(np.uint16), there.view(np.uint16))


@pytest.mark.parametrize(("name", "isa"), ALL)
@given(shape=shapes(), delta=deltas, seed=seeds)
def test_there_and_back_again(k, name, isa, shape, delta, seed):
    source = keys(shape, seed)
    moved = shift(k, isa, shape, source, delta)
    back = shift(k, isa, shape, moved, -delta)
    # The unit is the ulp of the larger magnitude: the first rounding may lift a pair into the next binade.
    larger = np.maximum(np.hypot(*pairs(source, shape)), np.hypot(*pairs(moved, shape)))
    assume(larger.size)
    error = max(np.abs(a - b).max() if a.size else 0 for a, b in
                (((p - q) / ulp_of(larger), 0.0) for p, q in zip(pairs(back, shape), pairs(source, shape))))
    assert error <= BOUND_ROUND_TRIP


@pytest.mark.parametrize(("name", "isa"), ALL)
def test_layouts_differ_only_by_the_place_of_a_pair(k, name, isa):
    adjacent, halves = Shape(3, 2, 40, 36, 0, 0, 0), Shape(3, 2, 40, 36, 1, 0, 0)
    source = keys(adjacent, 7)
    order = np.arange(40)
    order[:36] = np.arange(36).reshape(18, 2).T.reshape(-1)  # neighbours to halves
    rearranged = np.ascontiguousarray(source.reshape(3, 2, 40)[..., order]).reshape(3, 80)
    one, two = shift(k, isa, adjacent, source, 512), shift(k, isa, halves, rearranged, 512)
    expected = np.ascontiguousarray(one.reshape(3, 2, 40)[..., order]).reshape(3, 80)
    assert worst_ulps(halves, pairs(two, halves), pairs(expected, halves), rearranged) <= BOUND_BETWEEN_VERSIONS
    np.testing.assert_array_equal(unrotated(two, halves), unrotated(expected, halves))


@pytest.mark.parametrize(("name", "isa"), ALL)
def test_a_quarter_turn_is_known_without_arithmetic(k, name, isa):
    shape = Shape(1, 1, 6, 4, 1, 0, 0)
    source = np.array([[1, 2, 3, 4, 5, 6]], dtype=np.float16)
    target = np.empty_like(source)
    cosine, sine = np.zeros(2, dtype=np.float32), np.ones(2, dtype=np.float32)
    for layout, wanted in ((0, [-2, 1, -4, 3, 5, 6]), (1, [-3, -4, 1, 2, 5, 6])):
        k.rope_shift(isa, source.ctypes.data, target.ctypes.data, 1, 12, 12, 1, shape.head_dim, shape.n_rot, layout,
                     cosine.ctypes.data, sine.ctypes.data)
        np.testing.assert_array_equal(target[0], wanted)


@pytest.mark.parametrize(("name", "isa"), ALL)
def test_infinite_and_undefined_keys_stay_visible(k, name, isa):
    shape = Shape(1, 1, 64, 64, 1, 0, 0)
    source = keys(shape, 1)
    source[0, 3], source[0, 40] = np.inf, np.nan
    result = shift(k, isa, shape, source, 10)[0]
    assert not np.isfinite(result[[3, 35]]).any() and np.isnan(result[[8, 40]]).all()
    others = np.setdiff1d(np.arange(64), [3, 35, 8, 40])
    assert np.isfinite(result[others]).all()


@pytest.mark.parametrize(("name", "isa"), ALL)
def test_layers_equal_one_call_per_layer(k, name, isa):
    shape, n_layers = Shape(5, 2, 20, 16, 1, 0, 0), 3
    source = np.stack([keys(shape, layer) for layer in range(n_layers)])
    whole = np.zeros_like(source)
    addresses = [np.array([array.ctypes.data + layer * array.strides[0] for layer in range(n_layers)], dtype=np.uint64)
                 for array in (source, whole)]
    cosine, sine = table(k, 99, frequencies(shape))
    k.rope_shift_layers(isa, addresses[0].ctypes.data, addresses[1].ctypes.data, n_layers, shape.n_rows, 80, 80,
                        shape.n_heads, shape.head_dim, shape.n_rot, shape.layout, cosine.ctypes.data, sine.ctypes.data)
    single = np.stack([shift(k, isa, shape, source[layer], 99) for layer in range(n_layers)])
    np.testing.assert_array_equal(whole.view(np.uint16), single.view(np.uint16))


@given(delta=st.integers(-10**6, 10**6), half=st.integers(1, 70))
def test_table_is_float64_cosine_and_sine_rounded_once(k, delta, half):
    theta = np.ascontiguousarray(1e6 ** (-np.arange(half) / half))
    cosine, sine = table(k, delta, theta)
    np.testing.assert_allclose(cosine, np.cos(delta * theta), rtol=0, atol=2.0**-24)
    np.testing.assert_allclose(sine, np.sin(delta * theta), rtol=0, atol=2.0**-24)


@pytest.mark.parametrize(("change", "message"), [
    ({"isa": 99}, "isa 99 (unknown) is not available"),
    ({"isa": -1}, "isa -1 (unknown) is not available"),
    ({"n_rot": 7}, "n_rot is 7"),
    ({"n_rot": 10}, "n_rot is 10"),
    ({"head_dim": 4096, "n_rot": 2048, "src": 8192, "dst": 8192}, "n_rot is 2048"),
    ({"layout": 2}, "layout is 2"),
    ({"src": 15}, "strides of 15 and 16"),
    ({"dst": 14}, "strides of 16 and 14"),
])
def test_misuse_is_refused_with_field_and_value(k, change, message):
    """Refused before memory is touched: the addresses here are null."""
    call = {"isa": 0, "src": 16, "dst": 16, "head_dim": 8, "n_rot": 8, "layout": 0} | change
    with pytest.raises(Exception, match="rope_shift: ") as caught:
        k.rope_shift(call["isa"], 0, 0, 1, call["src"], call["dst"], 1, call["head_dim"], call["n_rot"],
                     call["layout"], 0, 0)
    assert message in str(caught.value)


@pytest.mark.parametrize("isa", [1, 2, 3])
def test_an_instruction_set_that_is_missing_here_is_refused(k, isa):
    if k.isa_available(isa):
        shift(k, isa, Shape(1, 1, 2, 2, 0, 0, 0), np.ones((1, 2), dtype=np.float16), 1)
        return
    with pytest.raises(Exception, match="is not available on this CPU"):
        k.rope_shift(isa, 0, 0, 0, 16, 16, 1, 8, 8, 0, 0, 0)

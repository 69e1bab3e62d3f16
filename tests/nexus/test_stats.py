import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nexus import stats
from nexus.stats import Estimate

FINITE = st.floats(-1e6, 1e6, allow_nan=False, allow_subnormal=False)
SAMPLES = st.lists(FINITE, min_size=2, max_size=30)
SLOW = settings(max_examples=25, deadline=None)


# spec §3, in percent: recomputed known answers
@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(89, 100, 81.4, 93.7), (74, 100, 64.6, 81.6), (95, 100, 88.8, 97.8), (26, 30, 70.3, 94.7), (40, 50, 67.0, 88.8)],
)
def test_wilson_known_answers(successes, n, low, high):
    estimate = stats.wilson(successes, n)
    assert estimate.value == successes / n
    assert round(100 * estimate.ci_low, 1) == low
    assert round(100 * estimate.ci_high, 1) == high


@pytest.mark.parametrize(("n", "bound"), [(40, 91.2), (30, 88.6)])
def test_wilson_of_certain_success_has_a_bound(n, bound):
    estimate = stats.wilson(n, n)
    assert 100 * estimate.ci_low == pytest.approx(bound, abs=0.06)
    assert estimate.ci_high == 1.0
    mirrored = stats.wilson(0, n)
    assert mirrored.ci_low == 0.0
    assert mirrored.ci_high == pytest.approx(1 - estimate.ci_low)


@given(st.integers(0, 500), st.integers(1, 500), st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_wilson_properties(successes, n, level, other):
    assume(successes <= n)
    narrow, wide = (stats.wilson(successes, n, each) for each in sorted((level, other)))
    assert 0 <= wide.ci_low <= narrow.ci_low <= narrow.value <= narrow.ci_high <= wide.ci_high <= 1
    assert narrow.ci_low < narrow.ci_high


@pytest.mark.parametrize(("successes", "n"), [(-1, 3), (4, 3)])
def test_wilson_refuses_impossible_counts(successes, n):
    with pytest.raises(ValueError, match=f"successes={successes} of n={n}"):
        stats.wilson(successes, n)


def test_wilson_refuses_shares():
    with pytest.raises(TypeError):
        stats.wilson(0.5, 1)


@pytest.mark.parametrize("estimate", [stats.mean, stats.median])
@SLOW
@given(samples=SAMPLES, seed=st.integers(0, 2**32), order=st.randoms(use_true_random=False))
def test_bootstrap_properties(estimate, samples, seed, order):
    narrow, wide = estimate(samples, seed, 0.5), estimate(samples, seed, 0.95)
    slack = 1e-14 * max(map(abs, samples))  # percentiles interpolate in float64
    assert wide.value == pytest.approx(getattr(np, estimate.__name__)(samples), rel=1e-12, abs=1e-9)
    if wide.ci_low is not None:
        assert wide.ci_low <= wide.value <= wide.ci_high
        assert wide.ci_low < wide.ci_high
        assert min(samples) - slack <= wide.ci_low and wide.ci_high <= max(samples) + slack
    if narrow.ci_low is not None and narrow.method == wide.method:
        assert wide.ci_low - slack <= narrow.ci_low and narrow.ci_high <= wide.ci_high + slack
    shuffled = list(samples)
    order.shuffle(shuffled)
    assert estimate(shuffled, seed, 0.95) == wide


def test_bootstrap_intervals_cover_at_their_level():
    rng = np.random.default_rng(1)
    hits = sum(
        interval.ci_low <= 0 <= interval.ci_high
        for interval in (stats.mean(rng.normal(size=25), seed) for seed in range(100))
    )
    # Binomial(100, 0.93): outside of 85…99 with probability below 1 %; a 80 % or a 99.9 % interval fails.
    assert 85 <= hits <= 99


def test_mean_uses_bca_and_falls_back_where_it_is_undefined():
    samples = np.random.default_rng(0).exponential(size=20)
    assert stats.mean(samples, 0).method == "bca-bootstrap"
    # Squared deviations underflow: the acceleration is 0/0.
    tiny = stats.mean(samples * 1e-200, 0)
    assert tiny.method == "percentile-bootstrap"
    assert 0 < tiny.ci_low < tiny.value < tiny.ci_high


def test_interval_is_widened_to_contain_the_estimate(monkeypatch):
    monkeypatch.setattr(stats, "_interval", lambda *_, **__: (2.5, 3.0))
    estimate = stats.mean([1.0, 2.0, 3.0], 0)
    assert (estimate.ci_low, estimate.value, estimate.ci_high) == (2.0, 2.0, 3.0)


@pytest.mark.parametrize("estimate", [stats.mean, stats.median])
@pytest.mark.parametrize(
    ("samples", "value", "method"),
    [([], None, "no-samples"), ([3.5], 3.5, "single-sample"), ([0.1] * 7, 0.1, "identical-samples")],
)
def test_no_interval_is_claimed_without_spread(estimate, samples, value, method):
    result = estimate(samples, 0)
    assert result.value == (None if value is None else pytest.approx(value, rel=1e-15))
    assert (result.ci_low, result.ci_high, result.n, result.method) == (None, None, len(samples), method)


def test_median_of_mostly_equal_samples_claims_no_interval():
    result = stats.median([5.0] * 40 + [6.0], 0)
    assert (result.value, result.ci_low, result.ci_high, result.method) == (5.0, None, None, "degenerate-bootstrap")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_samples_that_are_not_finite_are_named(bad):
    for call in (
        lambda: stats.mean([1, 2, bad], 0),
        lambda: stats.median([1, 2, bad], 0),
        lambda: stats.ratio_of_medians([1, 2, bad], [1, 2, 3], 0),
        lambda: stats.ratio_of_medians([1, 2, 3], [1, 2, bad], 0),
        lambda: stats.mean_difference_paired([1, 2, bad], [1, 2, 3], 0),
    ):
        with pytest.raises(ValueError, match=r"(samples|numerator|denominator|a)\[2\] is"):
            call()


def test_overflow_is_refused():
    with pytest.raises(ValueError, match="scale the samples"):
        stats.mean([1.7e308, 1.6e308], 0)


@pytest.mark.parametrize("level", [0, 1, -0.5, 95, math.nan])
def test_level_is_a_share(level):
    with pytest.raises(ValueError, match="level="):
        stats.mean([1, 2], 0, level)
    with pytest.raises(ValueError, match="level="):
        stats.wilson(1, 2, level)


def test_ratio_of_medians_resamples_both_sides():
    rng = np.random.default_rng(2)
    slow, fast = rng.normal(20, 2, 40), rng.normal(10, 1, 40)
    both = stats.ratio_of_medians(slow, fast, 0)
    assert both.value == np.median(slow) / np.median(fast)
    assert both.ci_low < both.value < both.ci_high
    one_side = stats.median(slow / np.median(fast), 0)
    assert both.ci_high - both.ci_low > 1.1 * (one_side.ci_high - one_side.ci_low)


def test_paired_ratio_removes_what_both_sides_share():
    rng = np.random.default_rng(3)
    shared = rng.lognormal(0, 1, 40)
    slow, fast = 2 * shared, shared * rng.normal(1, 0.01, 40)
    paired = stats.ratio_of_medians(slow, fast, 0, paired=True)
    unpaired = stats.ratio_of_medians(slow, fast, 0)
    assert paired.ci_high - paired.ci_low < (unpaired.ci_high - unpaired.ci_low) / 5


@pytest.mark.parametrize("paired", [True, False])
def test_order_of_measurement_does_not_change_a_ratio(paired):
    for seed in range(10):  # percentiles of medians are few: one seed alone may agree by chance
        slow, fast = np.random.default_rng(seed).lognormal(0, 1, (2, 30))
        order = np.random.default_rng(seed).permutation(30)
        expected = stats.ratio_of_medians(slow, fast, seed, paired=paired)
        assert stats.ratio_of_medians(slow[order], fast[order], seed, paired=paired) == expected


def test_ratio_refusals_and_small_counts():
    with pytest.raises(ValueError, match=r"denominator\[1\] = 0.0"):
        stats.ratio_of_medians([1, 2], [1, 0], 0)
    with pytest.raises(ValueError, match="numerator has 2 samples, denominator has 3"):
        stats.ratio_of_medians([1, 2], [1, 2, 3], 0, paired=True)
    assert stats.ratio_of_medians([], [1, 2], 0).value is None
    assert stats.ratio_of_medians([4], [1, 2, 3], 0).method == "single-sample"
    assert stats.ratio_of_medians([4, 4], [2, 2, 2], 0).row() == {
        "value": 2.0, "ci_low": None, "ci_high": None, "n": 2, "method": "identical-samples", "level": 0.95,
    }  # fmt: skip


def test_paired_difference():
    rng = np.random.default_rng(4)
    query = rng.normal(0, 100, 30)
    estimate = stats.mean_difference_paired(query + rng.normal(1, 0.1, 30), query, 0)
    assert estimate.method == "paired-bca-bootstrap"
    assert 0.8 < estimate.ci_low < estimate.value < estimate.ci_high < 1.2
    with pytest.raises(ValueError, match="a has 1 samples, b has 2"):
        stats.mean_difference_paired([1], [1, 2], 0)


def test_mcnemar_exact():
    # 2 · P(X <= 2), X ~ Binomial(10, ½) = 2 · 56/1024
    assert stats.mcnemar(2, 8) == pytest.approx(2 * 56 / 1024)
    assert stats.mcnemar(8, 2) == stats.mcnemar(2, 8)
    assert stats.mcnemar(0, 0) == stats.mcnemar(5, 5) == 1.0
    with pytest.raises(ValueError, match="a_only=-1"):
        stats.mcnemar(-1, 2)


def test_estimate_refuses_what_an_artifact_cannot_hold():
    with pytest.raises(ValueError, match="value of a wilson estimate is nan"):
        Estimate(math.nan, None, None, 1, "wilson", 0.95)
    with pytest.raises(ValueError, match="one bound"):
        Estimate(1.0, 0.5, None, 2, "wilson", 0.95)
    with pytest.raises(ValueError, match="does not contain"):
        Estimate(1.0, 1.5, 2.0, 2, "wilson", 0.95)


SCRIPT = """
import json, numpy as np
from nexus import stats
x, y = np.random.default_rng(5).normal(10, 1, (2, 3000))
estimates = stats.mean(x, 7), stats.median(x, 7), stats.ratio_of_medians(x, y, 7), stats.mean_difference_paired(x, y, 7)
print(json.dumps([estimate.row() for estimate in estimates]), end="")
"""


def test_same_bytes_whatever_the_number_of_threads():
    outputs = set()
    for threads in ("1", "4"):
        limits = {name: threads for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        command = [sys.executable, "-c", SCRIPT]
        outputs.add(subprocess.run(command, env=os.environ | limits, capture_output=True, check=True).stdout)
    assert len(outputs) == 1
    rows = json.loads(outputs.pop())
    assert all(type(row["ci_low"]) is float and row["ci_low"] < row["value"] < row["ci_high"] for row in rows)


@pytest.mark.parametrize(("share", "value"), [(0.001, 1), (0.2, 2), (0.21, 3), (0.5, 5), (0.99, 10), (1, 10)])
def test_a_quantile_is_the_sample_that_this_share_does_not_exceed(share, value):
    samples = [3, 10, 1, 7, 2, 9, 4, 8, 6, 5]
    estimate = stats.quantile(samples, share, 0)
    assert estimate.value == value and estimate.n == 10
    assert sum(sample < value for sample in samples) < share * 10 <= sum(sample <= value for sample in samples)


@SLOW
@given(samples=SAMPLES, share=st.floats(0.01, 1), seed=st.integers(0, 2**32), order=st.randoms(use_true_random=False))
def test_quantile_properties(samples, share, seed, order):
    wide = stats.quantile(samples, share, seed)
    assert wide.value in samples
    if wide.ci_low is not None:
        # A percentile between two equal resamples is interpolated, and rounded.
        rounding = 1e-12 * max(map(abs, samples))
        assert min(samples) - rounding <= wide.ci_low <= wide.value <= wide.ci_high <= max(samples) + rounding
        assert wide.method == "percentile-bootstrap"
    shuffled = list(samples)
    order.shuffle(shuffled)
    assert stats.quantile(shuffled, share, seed) == wide


def test_a_quantiles_interval_covers_at_its_level():
    rng = np.random.default_rng(3)
    # The 20th percentile of a uniform sample is 0.2.
    hits = sum(interval.ci_low <= 0.2 <= interval.ci_high for interval in (
        stats.quantile(rng.uniform(size=60), 0.2, seed) for seed in range(60)))
    # Binomial(60, 0.93): outside of 50…60 with probability below 1 %.
    assert hits >= 50
    samples = rng.uniform(size=60)
    narrow, wide = (stats.quantile(samples, 0.2, 0, level) for level in (0.5, 0.95))
    assert wide.ci_low < narrow.ci_low <= narrow.value == wide.value <= narrow.ci_high < wide.ci_high
    assert (narrow.level, wide.level) == (0.5, 0.95)


@pytest.mark.parametrize(
    ("samples", "value", "method"),
    [([], None, "no-samples"), ([3.5], 3.5, "single-sample"), ([0.1] * 7, 0.1, "identical-samples"),
     ([0.0] * 40 + [1.0], 0.0, "degenerate-bootstrap")],
)
def test_no_interval_of_a_quantile_is_claimed_without_spread(samples, value, method):
    result = stats.quantile(samples, 0.2, 0)
    assert (result.value, result.ci_low, result.ci_high, result.method) == (value, None, None, method)


@pytest.mark.parametrize("share", [0, -0.2, 1.01, 20, math.nan])
def test_a_quantile_is_asked_for_by_a_share(share):
    with pytest.raises(ValueError, match="share=.*above 0, up to 1"):
        stats.quantile([1.0, 2.0], share, 0)


def test_samples_of_a_quantile_are_finite():
    with pytest.raises(ValueError, match=r"samples\[1\] is nan"):
        stats.quantile([1.0, math.nan], 0.5, 0)

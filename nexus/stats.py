"""Estimates with intervals: Wilson for proportions, seeded bootstrap for means, medians and ratios (spec §4).

Every interval is a function of the samples' values and the seed alone. Samples are sorted before they are resampled, so
the order in which they were measured changes no byte; sums are numpy's pairwise ones, so BLAS threads do not either.
"""

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import DegenerateDataWarning, binomtest, bootstrap

RESAMPLES = 9999
# Bounds the resampling buffer to 8 MB. Depends on the sample size only, so the random stream does too.
BATCH_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Estimate:
    """A value in the unit of its samples, with its confidence interval.

    `value` is None without samples; the bounds are None where no honest interval exists, and `method` says why.
    Raises ValueError for a number that is not finite and for an interval that does not contain the value.
    """

    value: float | None
    ci_low: float | None
    ci_high: float | None
    n: int
    method: str
    level: float

    def __post_init__(self) -> None:
        for name in ("value", "ci_low", "ci_high"):
            number = getattr(self, name)
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{name} of a {self.method} estimate is {number}: scale the samples, or use None")
        if (self.ci_low is None) != (self.ci_high is None):
            raise ValueError(f"interval [{self.ci_low}, {self.ci_high}] has one bound: give both or neither")
        if self.ci_low is not None and (self.value is None or not self.ci_low <= self.value <= self.ci_high):
            raise ValueError(f"interval [{self.ci_low}, {self.ci_high}] does not contain the value {self.value}")

    def row(self) -> dict[str, float | int | str | None]:
        """The metric object of an artifact's row (spec §5), as plain Python numbers."""
        return {
            "value": self.value,
            "ci_low": self.ci_low,
            "ci_high": self.ci_high,
            "n": self.n,
            "method": self.method,
            "level": self.level,
        }


def wilson(successes: int, n: int, level: float = 0.95) -> Estimate:
    """The proportion successes / n (0 to 1) with its Wilson score interval, which is never of zero width.

    Raises ValueError unless 0 <= successes <= n; TypeError for counts that are not whole numbers.
    """
    successes, n, level = operator.index(successes), operator.index(n), _level(level)
    if not 0 <= successes <= n:
        raise ValueError(f"successes={successes} of n={n}: a count of successes lies between 0 and n")
    if n == 0:
        return Estimate(None, None, None, 0, "no-samples", level)
    interval = binomtest(successes, n).proportion_ci(confidence_level=level, method="wilson")
    share = successes / n
    # At 0/n and n/n the closed form meets the share exactly; rounding may leave it one ulp inside.
    low, high = max(0.0, min(float(interval.low), share)), min(1.0, max(float(interval.high), share))
    return Estimate(share, low, high, n, "wilson", level)


def mean(samples: Sequence[float], seed: int, level: float = 0.95) -> Estimate:
    """The mean of the samples, in their unit, with a BCa bootstrap interval.

    BCa (Efron 1987) is undefined where the jackknife has no spread in float64; there the percentile interval is used
    and `method` says "percentile-bootstrap". The interval is widened to contain the mean, which BCa does not promise
    for very skewed samples. One sample: no interval, "single-sample". Identical samples: a resample cannot differ, so
    the bootstrap would claim certainty from a zero-width interval; there is no interval, "identical-samples".
    Use `wilson` for proportions. Raises ValueError for a sample that is not finite, naming its index.
    """
    values = np.sort(_samples("samples", samples))
    return _estimate((values,), _mean, seed=seed, level=level, methods=("BCa", "percentile"))


def median(samples: Sequence[float], seed: int, level: float = 0.95) -> Estimate:
    """The median of the samples, in their unit, with a percentile bootstrap interval.

    Few samples and identical ones: as for `mean`. Where samples repeat so often that both percentiles are the same
    number there is no interval either, and `method` says "degenerate-bootstrap".
    """
    values = np.sort(_samples("samples", samples))
    return _estimate((values,), _median, seed=seed, level=level, methods=("percentile",))


def quantile(samples: Sequence[float], share: float, seed: int, level: float = 0.95) -> Estimate:
    """The sample that a `share` (0 to 1) of the samples does not exceed, with a percentile bootstrap interval.

    Few samples and identical ones: as for `median`. Raises ValueError for a share outside 0 to 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share={share}: a quantile is asked for by a share above 0, up to 1")
    values = np.sort(_samples("samples", samples))

    def statistic(array: np.ndarray, axis: int) -> np.ndarray:
        return np.quantile(array, share, axis=axis, method="inverted_cdf")

    return _estimate((values,), statistic, seed=seed, level=level, methods=("percentile",))


def ratio_of_medians(
    numerator: Sequence[float], denominator: Sequence[float], seed: int, level: float = 0.95, paired: bool = False
) -> Estimate:
    """median(numerator) / median(denominator), without unit, with a percentile interval that resamples both sides.

    `paired` resamples the same indices on both sides (one query timed by both arms). `n` is the smaller side's count.
    Raises ValueError for a denominator that is not positive, and for paired sides of different length.
    """
    over, under = _samples("numerator", numerator), _samples("denominator", denominator)
    refused = np.flatnonzero(under <= 0)
    if refused.size:
        raise ValueError(f"denominator[{refused[0]}] = {under[refused[0]]}: a ratio needs positive denominators")
    if paired:
        _same_length("numerator", over, "denominator", under)
        order = np.lexsort((under, over))
        over, under = over[order], under[order]
    else:
        over, under = np.sort(over), np.sort(under)
    return _estimate((over, under), _ratio, seed=seed, level=level, methods=("percentile",), paired=paired)


def mean_difference_paired(a: Sequence[float], b: Sequence[float], seed: int, level: float = 0.95) -> Estimate:
    """The mean of a[i] − b[i], in the samples' unit, with a paired bootstrap interval; `method` begins "paired-".

    a[i] and b[i] are two arms on the same query. Raises ValueError for different lengths.
    """
    first, second = _samples("a", a), _samples("b", b)
    _same_length("a", first, "b", second)
    estimate = mean(first - second, seed, level)
    return replace(estimate, method=f"paired-{estimate.method}")


def mcnemar(a_only: int, b_only: int) -> float:
    """The exact two-sided p-value (0 to 1) that arms a and b succeed equally often on the same queries.

    a_only and b_only count the queries on which only that arm succeeds; without any, p is 1. Equation: binomial test
    of a_only among a_only + b_only at ½ (McNemar 1947, exact form). Raises ValueError for a negative count.
    """
    a_only, b_only = operator.index(a_only), operator.index(b_only)
    if a_only < 0 or b_only < 0:
        raise ValueError(f"a_only={a_only}, b_only={b_only}: counts of queries cannot be negative")
    if a_only + b_only == 0:
        return 1.0
    return float(binomtest(a_only, a_only + b_only, 0.5).pvalue)


def _estimate(
    sides: tuple[np.ndarray, ...],
    statistic: Callable,
    *,
    seed: int,
    level: float,
    methods: tuple[str, ...],
    paired: bool = False,
) -> Estimate:
    level = _level(level)
    n = min(side.size for side in sides)
    if n == 0:
        return Estimate(None, None, None, 0, "no-samples", level)
    with np.errstate(over="ignore"):
        value = float(statistic(*sides, axis=-1))
    if not math.isfinite(value):
        raise ValueError(f"the estimate overflows ({value}) for samples up to {sides[0][-1]}: scale the samples")
    if n == 1:
        return Estimate(value, None, None, 1, "single-sample", level)
    if all(side[0] == side.min() == side.max() for side in sides):
        return Estimate(value, None, None, n, "identical-samples", level)
    for method in methods:
        low, high = _interval(sides, statistic, seed=seed, level=level, method=method, paired=paired)
        if math.isfinite(low) and math.isfinite(high):
            low, high = min(low, value), max(high, value)
            if low == high:
                return Estimate(value, None, None, n, "degenerate-bootstrap", level)
            return Estimate(value, low, high, n, f"{method.lower()}-bootstrap", level)
    raise ValueError(f"a resample overflows for samples up to {sides[0][-1]}: scale the samples")


def _interval(sides, statistic, *, seed, level, method, paired) -> tuple[float, float]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # An undefined BCa answers NaN and warns; the caller tests for NaN and falls back.
        warnings.simplefilter("ignore", DegenerateDataWarning)
        interval = bootstrap(
            sides,
            statistic,
            n_resamples=RESAMPLES,
            batch=max(1, BATCH_ELEMENTS // max(side.size for side in sides)),
            vectorized=True,
            paired=paired,
            axis=-1,
            confidence_level=level,
            method=method,
            rng=np.random.default_rng(seed),
        ).confidence_interval
    return float(interval.low), float(interval.high)


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    return np.mean(values, axis=axis)


def _median(values: np.ndarray, axis: int) -> np.ndarray:
    return np.median(values, axis=axis)


def _ratio(over: np.ndarray, under: np.ndarray, axis: int) -> np.ndarray:
    return np.median(over, axis=axis) / np.median(under, axis=axis)


def _samples(name: str, samples: Sequence[float]) -> np.ndarray:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"{name} has shape {values.shape}: give one flat sequence of numbers")
    refused = np.flatnonzero(~np.isfinite(values))
    if refused.size:
        raise ValueError(f"{name}[{refused[0]}] is {values[refused[0]]}: leave out what was not measured")
    return values


def _same_length(name: str, first: np.ndarray, other: str, second: np.ndarray) -> None:
    if first.size != second.size:
        raise ValueError(f"{name} has {first.size} samples, {other} has {second.size}: paired samples share queries")


def _level(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"level={level}: a confidence level lies between 0 and 1, such as 0.95")
    return float(level)

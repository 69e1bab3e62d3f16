"""When to trust a first candidate: the threshold of its margin, and what any threshold would cost.

τ is a low quantile of the margins on queries written to be confusable (the paper takes the 20th percentile). A curve of
risk against coverage (El-Yaniv & Wiener 2010) shows all thresholds at once.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Point:
    """What a threshold does: of the queries whose margin is at least it, how many there are and how many are wrong."""

    threshold: float
    n_covered: int
    n_wrong: int


def tau_of(margins: Sequence[float], quantile: float) -> float:
    """The margin such that a share `quantile` of `margins` is at most it: the ⌈quantile·n⌉-th smallest.

    Raises ValueError for no margins, one that is not finite, and a quantile outside 0 to 1.
    """
    values = _finite("margins", margins)
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile is {quantile}; give a share above 0, up to 1")
    return float(np.quantile(values, quantile, method="inverted_cdf"))


def risk_coverage(margins: Sequence[float], right: Sequence[bool]) -> list[Point]:
    """One point per distinct margin, from the one that covers fewest; the last covers every query.

    margins    of each query's first candidate
    right      whether that candidate is right
    A query is covered where its margin is at least the point's threshold. Raises ValueError for no margins, one that
    is not finite, and lists of different length.
    """
    values, rights = _finite("margins", margins), np.asarray(right, dtype=bool)
    if len(values) != len(rights):
        raise ValueError(f"{len(values)} margins and {len(rights)} answers; give one answer per margin")
    order = np.argsort(-values, kind="stable")
    values, wrong = values[order], np.cumsum(~rights[order])
    last = np.flatnonzero(np.append(values[1:] != values[:-1], True))
    return [Point(float(values[i]), int(i) + 1, int(wrong[i])) for i in last]


def _finite(name: str, numbers: Sequence[float]) -> np.ndarray:
    values = np.asarray(numbers, dtype=float)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"no {name} given; give at least one")
    if not np.isfinite(values).all():
        raise ValueError(f"{name}[{int(np.argmin(np.isfinite(values)))}] is not finite")
    return values

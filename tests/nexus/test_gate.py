import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexus.gate import Point, risk_coverage, tau_of

MARGINS = st.lists(st.floats(-1, 1).map(lambda x: round(x, 2)), min_size=1, max_size=30)


def test_tau_is_the_twentieth_percentile():
    assert tau_of([0.1, 0.2, 0.3, 0.4, 0.5], 0.2) == 0.1
    assert tau_of([5, 4, 3, 2, 1, 10, 9, 8, 7, 6], 0.2) == 2


@given(MARGINS, st.floats(0.01, 1))
@settings(deadline=None)
def test_the_share_at_or_below_tau_is_the_quantile(margins, quantile):
    tau = tau_of(margins, quantile)
    below = sum(margin <= tau for margin in margins)
    assert tau in margins and below >= quantile * len(margins) - 1e-9
    assert sum(margin < tau for margin in margins) < quantile * len(margins) + 1e-9


def test_a_curve_counts_what_lies_above_each_threshold():
    curve = risk_coverage([0.5, 0.1, 0.5, 0.3], [True, False, False, True])
    assert curve == [Point(0.5, 2, 1), Point(0.3, 3, 1), Point(0.1, 4, 2)]


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=30))
@settings(deadline=None)
def test_every_point_is_a_plain_count(queries):
    margins, right = zip(*queries)
    curve = risk_coverage(margins, right)
    assert [point.threshold for point in curve] == sorted(set(margins), reverse=True)
    for point in curve:
        covered = [ok for margin, ok in queries if margin >= point.threshold]
        assert (point.n_covered, point.n_wrong) == (len(covered), covered.count(False))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tau_of([], 0.2), "no margins given"),
        (lambda: tau_of([0.1], 0), "quantile is 0"),
        (lambda: tau_of([0.1, math.nan], 0.2), r"margins\[1\] is not finite"),
        (lambda: risk_coverage([0.1], []), "1 margins and 0 answers"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()

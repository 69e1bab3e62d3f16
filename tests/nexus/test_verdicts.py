"""The rule by which a claim holds or fails, and that every claim is tested by it."""
from __future__ import annotations

import copy
import json
import math

import pytest

from nexus import artifact as stored_form
from nexus import stats, tables
from nexus.claims import claims
from nexus.config import ROOT
from nexus.verdicts import (COMPUTED, FAILS, HOLDS, PART, UNTESTED, VERDICTS, Cell, Claim, compare, interval, judge,
                            overall)

RUN = ROOT / "results" / "smollm2-135m"
PUBLISHED = tables.published()
CLAIMS = {claim.key: claim for claim in claims()}
INF = math.inf


def metric(value, low=None, high=None, method="bca-bootstrap", n=10):
    return {"value": value, "ci_low": low, "ci_high": high, "n": n, "method": method, "level": 0.95}


@pytest.fixture(scope="module")
def artifacts():
    paths = {name: stored_form.path_of(name, RUN) for name in stored_form.experiments()}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


@pytest.mark.parametrize(("ends", "published", "rule", "better", "verdict"), [
    ((1, 3), 2, "number", None, HOLDS), ((1, 3), 3, "number", None, HOLDS), ((1, 3), 4, "number", None, FAILS),
    ((1, 3), 0, "number", None, FAILS), ((1, 3), 0, "number", "higher", HOLDS), ((1, 3), 4, "number", "higher", FAILS),
    ((1, 3), 4, "number", "lower", HOLDS), ((1, 3), 0.5, "number", "lower", FAILS),
    # Another measurement's interval instead of a number: the two must meet.
    ((1, 3), (2.5, 5), "number", None, HOLDS), ((1, 3), (3.5, 5), "number", None, FAILS),
    ((1, 3), (3.5, 5), "number", "lower", HOLDS), ((1, 3), (0, 0.5), "number", "lower", FAILS),
    ((1, 3), (0, 4), "range", None, HOLDS), ((1, 3), (2, 4), "range", None, PART),
    ((1, 3), (4, 5), "range", None, FAILS),
    ((1, 3), (2, 4), "range", "lower", HOLDS), ((1, 3), (0, 2), "range", "lower", PART),
    ((1, 3), (0, 0.5), "range", "lower", FAILS), ((1, 3), (4, 5), "range", "lower", HOLDS),
    ((1, 3), (0, 2), "range", "higher", HOLDS), ((1, 3), (2, INF), "range", "higher", PART),
    ((1, 3), (3.1, INF), "range", "higher", FAILS), ((1, 3), (-INF, 0.9), "range", "lower", FAILS),
])
def test_an_interval_beside_what_was_published(ends, published, rule, better, verdict):
    assert compare(metric(2, *ends), published, rule, better) == verdict


def test_a_tolerance_widens_what_was_published():
    measured = metric(1.2, 1.15, 1.25)
    assert compare(measured, 1.0) == FAILS
    assert compare(measured, 1.0, tolerance=0.16) == HOLDS and compare(measured, 1.0, tolerance=0.14) == FAILS
    assert compare(measured, (0.9, 1.0), "range", tolerance=0.2) == PART


@pytest.mark.parametrize("better", [None, "higher", "lower"])
def test_a_number_is_decided_and_a_better_measurement_is_never_worse_off(better):
    for shift in range(-20, 21):
        verdict = compare(metric(shift, shift - 2, shift + 2), 0.0, "number", better)
        assert verdict in (HOLDS, FAILS)
        better_by = {"higher": 1, "lower": -1}.get(better, 0)
        if verdict == HOLDS and better_by:
            further = shift + better_by
            assert compare(metric(further, further - 2, further + 2), 0.0, "number", better) == HOLDS


@pytest.mark.parametrize(("measured", "ends"), [
    (None, None), (metric(None, method="no-samples", n=0), None), (metric(2.0, method="single-sample", n=1), None),
    (metric(2.0, method="identical-samples"), (2.0, 2.0)), (metric(2.0, method="degenerate-bootstrap"), (2.0, 2.0)),
    (metric(2.0, method=COMPUTED), (2.0, 2.0)), (stats.wilson(3, 3).row(), (stats.wilson(3, 3).ci_low, 1.0)),
])
def test_the_interval_of_a_metric(measured, ends):
    assert interval(measured) == ends
    assert (compare(measured, 2.0) == UNTESTED) == (ends is None)


@pytest.mark.parametrize(("cells", "verdict"), [
    ([], UNTESTED), ([UNTESTED], UNTESTED), ([HOLDS, HOLDS], HOLDS), ([FAILS, FAILS], FAILS), ([HOLDS, FAILS], PART),
    ([PART, PART], PART), ([PART, FAILS], FAILS), ([HOLDS, PART, FAILS], PART), ([HOLDS, UNTESTED], PART),
    ([FAILS, UNTESTED], FAILS),
])
def test_a_claim_from_its_cells(cells, verdict):
    assert overall(cells) == verdict


def test_a_verdict_tells_what_was_published_and_measured_and_how_many_cells_hold():
    cells = [Cell("a", 1.0, metric(1.0, 0.9, 1.1)), Cell("b", 3.0, metric(2.0, 1.9, 2.1)), Cell("c", 2.0, None)]
    claim = Claim("key", "Table 0", "toy", "toy", lambda artifacts, published: cells, unit="ms", better="higher")
    verdict = judge(claim, {"toy": {}}, {})
    assert verdict.verdict == PART and verdict.published == "1.00 to 3.00 ms"
    assert verdict.measured == "1.00 [0.900, 1.10] to 2.00 [1.90, 2.10] ms"
    assert verdict.count == "1 of 3 hold, 1 fail, 1 not tested"
    assert [cell.verdict for cell in verdict.cells] == [HOLDS, FAILS, UNTESTED]


def test_a_word_must_be_the_published_one():
    cells = [Cell("a", "refused", measured="refused"), Cell("b", "refused", measured="spliced"), Cell("c", "refused")]
    claim = Claim("key", "§", "toy", "toy", lambda artifacts, published: cells, rule="word")
    assert [cell.verdict for cell in judge(claim, {"toy": {}}, {}).cells] == [HOLDS, FAILS, UNTESTED]


def test_a_claim_without_its_artifact_is_not_tested_and_says_why(artifacts):
    for claim in CLAIMS.values():
        without = {name: made for name, made in artifacts.items() if name != claim.experiment}
        verdict = judge(claim, without, PUBLISHED, {claim.experiment: "skipped: too small"})
        assert verdict.verdict == UNTESTED and verdict.reason
        assert claim.cells is None or verdict.reason == f"{claim.experiment}: skipped: too small"


def test_claims_are_told_apart_and_each_is_tested_or_says_why_not():
    assert len(CLAIMS) == len(claims()) == len({claim.text for claim in claims()})
    for claim in CLAIMS.values():
        assert (claim.cells is None) == (claim.untested is not None) == (claim.experiment is None), claim.key


def test_every_published_number_is_part_of_a_claim():
    """All sections of the published numbers but the peers' decide something: without them a claim cannot be judged."""
    read = set()

    class Watched(dict):
        def __getitem__(self, key):
            read.add(key)
            return super().__getitem__(key)

    stored = {name: json.loads(stored_form.path_of(name, RUN).read_text()) for name in stored_form.experiments()
              if stored_form.path_of(name, RUN).is_file()}
    for claim in CLAIMS.values():
        judge(claim, stored, Watched(PUBLISHED))
    assert read == set(PUBLISHED) - {"source", "peers"}


def test_committed_artifacts_decide_every_claim_that_can_be_tested(artifacts):
    verdicts = {key: judge(claim, artifacts, PUBLISHED) for key, claim in CLAIMS.items()}
    undecided = {key for key, verdict in verdicts.items() if verdict.verdict == UNTESTED}
    assert undecided == {key for key, claim in CLAIMS.items() if claim.cells is None}
    assert {verdict.verdict for verdict in verdicts.values()} == set(VERDICTS)


@pytest.mark.parametrize("key", [claim.key for claim in CLAIMS.values()
                                 if claim.cells is not None and claim.rule != "word"])
def test_far_worse_measurements_fail_every_claim_and_far_better_ones_hold(artifacts, key):
    """The verdict follows from the artifact: all its metrics are moved far to one side, and to the other."""
    claim = CLAIMS[key]

    def moved(value: float):
        changed = {name: copy.deepcopy(artifacts[name]) for name in (claim.experiment, *claim.also)}
        # Scattered recompute is measured by both of its experiments.
        names = (claim.experiment, *claim.also) if key.startswith("scattered") else (claim.experiment,)
        for row in (row for name in names for row in changed[name]["rows"]):
            # What a cell is compared with in the same artifact stays.
            bare = key == "scattered-corrupts" and row["arm"] == "none"
            fewest = key in ("routing-flat", "routing-time") and row["n_tools"] == 10
            if row.get("arm") == "noise_floor" or bare or fewest:
                continue
            for name, entry in row.items():
                if isinstance(entry, dict):
                    row[name] = metric(value, value, value)
                elif name == "r_pct":
                    row[name] = value
        return judge(claim, changed, PUBLISHED).verdict

    high, low = moved(1e6), moved(-1e6)
    expected = {"higher": (HOLDS, FAILS), "lower": (FAILS, HOLDS), None: (FAILS, FAILS)}[claim.better]
    assert (high, low) == expected


def test_refusals_and_overflows_follow_the_artifacts(artifacts):
    layouts = copy.deepcopy(artifacts["layouts"])
    for row in layouts["rows"]:
        row["status"] = "spliced"
    assert judge(CLAIMS["fail-closed"], artifacts, PUBLISHED).verdict == HOLDS
    assert judge(CLAIMS["fail-closed"], {"layouts": layouts}, PUBLISHED).verdict == FAILS
    routing = copy.deepcopy(artifacts["routing_accuracy_n250"])
    for status, verdict in (("overflow", HOLDS), ("ok", FAILS)):
        for row in routing["rows"]:
            row["status"] = status
        assert judge(CLAIMS["concat-overflow"], {"routing_accuracy_n250": routing}, PUBLISHED).verdict == verdict

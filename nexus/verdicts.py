"""One verdict per published claim, by the rule in RULE, from artifacts and published numbers; no model is loaded.

`nexus/claims.py` lists the claims; here is what they have in common.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nexus.tables import MISSING, Metric, counts, number, value_of
from nexus.tables import cell as table_cell

HOLDS, PART, FAILS, UNTESTED = "holds", "holds in part", "fails", "not tested"
VERDICTS = (HOLDS, PART, FAILS, UNTESTED)
# These have no interval because there is no spread: all samples agree, or nothing was drawn.
COMPUTED = "computed"
EXACT = ("identical-samples", "degenerate-bootstrap", COMPUTED)
RULE = (
    "A claim is tested in cells: one measured number with its interval beside one published number. A tolerance, where "
    "a claim has one, widens what was published and is stated with the claim.",
    "A claim that gives a number: a cell holds where the published number lies in the measured interval, or the whole "
    "interval lies on its better side; it fails where the whole interval lies on its worse side. A number without a "
    "better side must lie in the interval. Where a claim compares two measurements, the other one's interval stands "
    "for the published number, and its value for a bound.",
    "A claim that gives a range or a bound: a cell holds where the whole interval lies inside, or on the better side; "
    "it fails where the whole interval lies outside; it holds in part where the interval crosses an end.",
    "“≈ 0” means not above the noise floor, which is what a full prefill in other batches differs by: a cell holds "
    "where its interval reaches down to the floor's.",
    "Where all samples agree, the value stands for both ends; a single sample has no interval and tests nothing.",
    "The claim holds where all its cells hold. It fails where none holds and at least one fails. It is not tested "
    "where no cell was measured. Anything else holds in part, also where cells hold and others were not measured.",
)

Artifacts = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Cell:
    """One measured number, its label, and what was published for it.

    `published` is a number, a range (low, high) whose ends may be infinite, or a word that `measured` must equal.
    `metric` is an artifact's metric object, or None where it was not measured.
    """

    label: str
    published: float | tuple[float, float] | str
    metric: Metric = None
    measured: str | None = None
    shown: str | None = None
    """What is published, as printed, where the number alone does not tell it."""


@dataclass(frozen=True)
class Claim:
    """A published claim in words, where it stands, and how it is tested.

    `cells` gets the artifacts by experiment and `results/published.json`. A claim without `cells` is not tested, and
    `untested` says why.
    """

    key: str
    where: str
    text: str
    experiment: str | None = None
    """The experiment whose artifact decides; its command reproduces the verdict."""
    cells: Callable[[Artifacts, Mapping[str, Any]], Sequence[Cell]] | None = None
    also: tuple[str, ...] = ()
    """Further experiments that the cells are taken from."""
    rule: Literal["number", "range", "word"] = "number"
    better: Literal["higher", "lower"] | None = None
    tolerance: float = 0.0
    """Share of the published number by which it may be missed."""
    unit: str = ""
    scale: float = 1.0
    said: str | None = None
    """What was published, as told for all cells together, where they are each beside a number of their own."""
    untested: str | None = None


@dataclass(frozen=True)
class Judged:
    """A cell's verdict, with published and measured as they are shown."""

    label: str
    published: str
    measured: str
    n: str
    verdict: str


@dataclass(frozen=True)
class Verdict:
    """What becomes of a claim in one run: one of VERDICTS, the cells that decided, and why it was not tested."""

    claim: Claim
    verdict: str
    cells: tuple[Judged, ...] = ()
    reason: str = ""

    @property
    def published(self) -> str:
        """What was published: of one cell, or the least and the largest; '–' without any."""
        return self.claim.said or self._span([cell.published for cell in self.cells])

    @property
    def measured(self) -> str:
        """What was measured, with intervals: of one cell, or the least and the largest; '–' without any."""
        return self._span([cell.measured for cell in self.cells if cell.verdict != UNTESTED])

    def _span(self, texts: Sequence[str]) -> str:
        distinct = list(dict.fromkeys(texts))
        try:
            ordered = sorted(distinct, key=lambda text: float(text.split()[0]))
        except ValueError:
            # Words, which have no order.
            return "; ".join(distinct)
        ends = " to ".join(dict.fromkeys([ordered[0], ordered[-1]])) if ordered else MISSING
        return f"{ends} {self.claim.unit}" if ordered and self.claim.unit else ends

    @property
    def count(self) -> str:
        """How many cells hold and so on, such as '3 of 8 hold, 5 fail'; '' for none."""
        if not self.cells:
            return ""
        words_for = ((HOLDS, "hold"), (PART, "hold in part"), (FAILS, "fail"), (UNTESTED, "not tested"))
        told = [(sum(cell.verdict == verdict for cell in self.cells), words) for verdict, words in words_for]
        parts = [f"{count} {words}" for count, words in told if count]
        first, *rest = parts
        size, _, words = first.partition(" ")
        return ", ".join([f"{size} of {len(self.cells)} {words}", *rest])


def judge(claim: Claim, artifacts: Artifacts, published: Mapping[str, Any],
          lacking: Mapping[str, str] | None = None) -> Verdict:
    """The verdict on the claim. `lacking` has the reason why an experiment has no artifact, by its name."""
    if claim.cells is None:
        return Verdict(claim, UNTESTED, reason=claim.untested or "")
    missing = [name for name in (claim.experiment, *claim.also) if name not in artifacts]
    if missing:
        reason = (lacking or {}).get(missing[0], "not measured in this run")
        return Verdict(claim, UNTESTED, reason=f"{missing[0]}: {reason}")
    listed = claim.cells(artifacts, published)
    cells = tuple(_judged(claim, cell) for cell in listed)
    verdict = overall(cell.verdict for cell in cells)
    measured = any(value_of(cell.metric) is not None for cell in listed)
    reason = "" if verdict != UNTESTED else (
        "this run has no interval for what it measured" if measured else
        "this run measured none of the cells that were published")
    return Verdict(claim, verdict, cells, reason)


def overall(verdicts: Iterable[str]) -> str:
    """The claim's verdict from those of its cells (the last sentence of RULE)."""
    found = list(verdicts)
    tested = [verdict for verdict in found if verdict != UNTESTED]
    if not tested:
        return UNTESTED
    if all(verdict == HOLDS for verdict in found):
        return HOLDS
    return FAILS if FAILS in tested and HOLDS not in tested else PART


def compare(metric: Metric, published: float | tuple[float, float], rule: str = "number", better: str | None = None,
            tolerance: float = 0.0) -> str:
    """One of VERDICTS for a metric beside a published number, or a range (see RULE).

    `rule` "number" asks whether the interval meets what was published, "range" whether it lies inside. `tolerance` is a
    share of the published number.
    """
    ends = interval(metric)
    if ends is None:
        return UNTESTED
    low, high = published if isinstance(published, tuple) else (published, published)
    low, high = low - tolerance * abs(low), high + tolerance * abs(high)
    if better == "lower":
        low = -math.inf
    elif better == "higher":
        high = math.inf
    if ends[0] > high or ends[1] < low:
        return FAILS
    return HOLDS if rule == "number" or low <= ends[0] and ends[1] <= high else PART


def interval(metric: Metric) -> tuple[float, float] | None:
    """The ends of the metric's interval; its value twice where all samples agree; None where there is no interval."""
    if value_of(metric) is None:
        return None
    if metric["ci_low"] is not None:
        return metric["ci_low"], metric["ci_high"]
    return (metric["value"],) * 2 if metric["method"].removeprefix("paired-") in EXACT else None


def _judged(claim: Claim, cell: Cell) -> Judged:
    if claim.rule == "word":
        same = UNTESTED if cell.measured is None else HOLDS if cell.measured == cell.published else FAILS
        return Judged(cell.label, str(cell.published), cell.shown or cell.measured or MISSING, MISSING, same)
    verdict = compare(cell.metric, cell.published, claim.rule, claim.better, claim.tolerance)
    return Judged(cell.label, cell.shown or _target(cell.published, claim.scale), table_cell(cell.metric, claim.scale),
                  counts(cell.metric), verdict)


def _target(published: float | tuple[float, float], scale: float) -> str:
    if not isinstance(published, tuple):
        return number(scale * published)
    low, high = published
    if math.isinf(low):
        return f"at most {number(scale * high)}"
    return f"at least {number(scale * low)}" if math.isinf(high) else f"{number(scale * low)} to {number(scale * high)}"

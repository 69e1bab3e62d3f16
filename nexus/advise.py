"""Which way to offer tools is fastest at equal accuracy, from what was measured and with how it is known.

A way was measured at the number of tools and the depth that are asked for, lies between two points that differ in one
of them and is interpolated, or is told at its nearest point. Only the first two compete, and only those that the same
machine measured.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from nexus.measured_options import CHOICE, PREFIX, ROUTING, Measured, Point, Series, estimate, series_of
from nexus.stats import Estimate, mcnemar

MEASURED, BETWEEN, NEAREST, REFUSED = "measured", "between", "nearest", "refused"
# Fewer queries cannot show that two ways are equal: 30 right of 30 still leave 11 % of errors possible.
LEAST_PAIRS = 30
MOST_LOSS = 0.05
SIGNIFICANCE = 0.05
RULE = (
    f"Equal accuracy: on the same queries, at least {LEAST_PAIRS} of them, at most {100 * MOST_LOSS:g} points less "
    "often right than the model that has every tool in full (where that does not fit: than the best of the same "
    f"experiment), and not shown to be worse (McNemar, exact, p ≥ {SIGNIFICANCE:g}; without samples: an interval that "
    "reaches the other's value); between two points at both of them. Moreover, also where queries differ: an interval "
    "that is not wholly below that of the most accurate way. Of those that pass, the fastest by its value."
)


class AdviceError(ValueError):
    """What was asked for cannot be advised on; the message names the argument, its value and the remedy."""


@dataclass(frozen=True)
class Tokens:
    """How long the tools are that advice is asked for, in tokens of the model."""

    lengths: tuple[int, ...]
    source: str
    """What was counted."""

    @property
    def middle(self) -> int:
        """Tokens of one tool, by the median."""
        return round(median(self.lengths))

    def total(self, n_tools: int) -> int:
        """Tokens of so many tools, by the mean."""
        return round(n_tools * sum(self.lengths) / len(self.lengths))


@dataclass(frozen=True)
class Verdict:
    """Whether an option is as accurate as it must be."""

    equal: bool | None
    """None where it was not measured, or on too few queries to say."""
    why: str
    loss: float | None = None
    """Share of queries by which it is less often right than what it is held against."""
    p: float | None = None
    """McNemar, exact, two-sided; None where it is not paired, and the smaller of the two between points."""


@dataclass(frozen=True)
class Option:
    """One way to offer the tools that advice is asked for."""

    kind: str
    name: str
    experiment: str
    measures: str
    """What its accuracy is: of the right tool, or of the next token."""
    basis: str
    """"measured", "between" (interpolated), "nearest" (not for what was asked), or "refused"."""
    at: tuple[tuple[int, int | None], ...]
    """Points (tools, depth) that it is read from; a depth of None is not read."""
    ttft_ms: Estimate | None
    accuracy: Estimate | None
    no_call: Estimate | None
    verdict: Verdict
    cpu: str | None
    remarks: tuple[str, ...] = ()

    @property
    def within(self) -> bool:
        """It is known for what was asked."""
        return self.basis in (MEASURED, BETWEEN)


@dataclass(frozen=True)
class Cost:
    """What one step costs for these tools, beside the options."""

    what: str
    value: Estimate
    unit: str
    basis: str
    at: str
    experiment: str


@dataclass(frozen=True)
class Advice:
    """The advice with everything that it rests on."""

    n_tools: int
    depth: int
    tokens: Tokens
    machine: str
    measured_on: str | None
    """Whose measurements compete: this machine's, or another's where there are none of this one."""
    advised: Option | None
    because: str
    options: tuple[Option, ...]
    """All, those that compete first, faster first."""
    costs: tuple[Cost, ...] = ()
    remarks: tuple[str, ...] = ()
    rule: str = field(default=RULE)


def advise(found: Mapping[str, Measured], n_tools: int, depth: int, tokens: Tokens, machine: str,
           reading: str = "automaton") -> Advice:
    """The advice for `n_tools` tools behind a conversation of `depth` tokens, from artifacts by experiment.

    machine   this machine's CPU, as `nexus.provenance.cpu_model` names it
    reading   which of the two readings of experiments/spliced_choice.py counts; with a single tool it is "free"

    Raises AdviceError for numbers below the smallest that make sense, and where no artifact tells of any option.
    """
    for name, value, least in (("--tools", n_tools, 1), ("--depth", depth, 0)):
        if value < least:
            raise AdviceError(f"{name} is {value}; give a number from {least} on")
    # A single tool leaves the automaton nothing to choose.
    every = series_of(found, "free" if n_tools == 1 else reading)
    if not any(series.shown for series in every):
        raise AdviceError(f"none of {', '.join(found) or 'no artifact'} tells what tools cost this model")
    options = [_option(series, every, n_tools, depth, tokens, machine) for series in every if series.shown]
    cpus = [option.cpu for option in options if option.within]
    cpu = machine if machine in cpus else max(cpus, key=cpus.count, default=None)
    competing = [option for option in options if option.within and option.cpu == cpu and option.ttft_ms is not None]
    options = [_held_against_best(option, competing) for option in options]
    equal = sorted((o for o in options if o.within and o.cpu == cpu and o.ttft_ms is not None and o.verdict.equal),
                   key=_time)
    advised = equal[0] if equal else None
    order = {MEASURED: 0, BETWEEN: 0, NEAREST: 1, REFUSED: 2}
    options.sort(key=lambda o: (o is not advised, order[o.basis], not o.verdict.equal, _time(o)))
    costs = _costs(found, n_tools, depth, tokens)
    return Advice(n_tools, depth, tokens, machine, cpu, advised, _because(advised, equal, options, machine, cpu),
                  tuple(options), tuple(costs), tuple(_remarks(advised, options, found, costs)))


def known_at(series: Series, n_tools: int, depth: int) -> tuple[str, list[Point], float]:
    """(basis, points, weight of the second): what the series tells of so many tools at this depth.

    The nearest point is the one with the smallest |log n/n'| + |log d/d'|, depths counted from 256 tokens before.
    """
    read = series.points
    fits = [p for p in read if p.depth is None or p.depth == depth]
    exact = [p for p in fits if p.n_tools == n_tools]
    if exact:
        return MEASURED, exact[:1], 0.0
    for line, axis, wanted in ((fits, lambda p: p.n_tools, n_tools),
                               ([p for p in read if p.n_tools == n_tools and p.depth is not None],
                                lambda p: p.depth, depth)):
        below = max((p for p in line if axis(p) < wanted), key=axis, default=None)
        above = min((p for p in line if axis(p) > wanted), key=axis, default=None)
        if below and above:
            return BETWEEN, [below, above], (wanted - axis(below)) / (axis(above) - axis(below))

    def distance(p: Point) -> float:
        deep = 0.0 if p.depth is None else abs(math.log((p.depth + 256) / (depth + 256)))
        return abs(math.log(p.n_tools / n_tools)) + deep

    return NEAREST, [min(read, key=distance)], 0.0


def between(low: Estimate | None, high: Estimate | None, weight: float) -> Estimate | None:
    """The estimate on the straight line between two, and so are its bounds; None where one of the two is missing."""
    if low is None or high is None:
        return None

    def mixed(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a + weight * (b - a)

    return Estimate(mixed(low.value, high.value), mixed(low.ci_low, high.ci_low), mixed(low.ci_high, high.ci_high),
                    min(low.n, high.n), "interpolated", min(low.level, high.level))


def verdict_on(point: Point, reference: Point | None) -> Verdict:
    """Whether the point is as accurate as the reference, by RULE. Without samples, by intervals."""
    if point.accuracy is None:
        return Verdict(None, "accuracy was not measured")
    if reference is None or reference is point or reference.accuracy is None:
        return Verdict(True, "the reference")
    loss = reference.accuracy.value - point.accuracy.value
    if point.right and point.right.keys() <= reference.right.keys():
        pairs = [(right, reference.right[query]) for query, right in point.right.items()]
        gains, losses = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
        # Of the pairs: the reference may have been asked more.
        loss, p, n = (losses - gains) / len(pairs), mcnemar(gains, losses), len(pairs)
        how = f"same {n} queries, p = {p:.2g}"
    else:
        p, n, how = None, min(point.accuracy.n, reference.accuracy.n), "not paired"
    told = f"{_signed(-100 * loss)} points ({how})"
    worse = (p < SIGNIFICANCE and loss > 0 if p is not None else
             point.accuracy.ci_high is None or point.accuracy.ci_high < reference.accuracy.value)
    if loss > MOST_LOSS or worse:
        return Verdict(False, told, loss, p)
    if n < LEAST_PAIRS:
        return Verdict(None, f"{told}, too few to tell", loss, p)
    return Verdict(True, told, loss, p)


def _signed(points: float) -> str:
    return f"{round(points):+d}".replace("-", "\N{MINUS SIGN}") if round(points) else "0"


def _option(series: Series, every: Sequence[Series], n_tools: int, depth: int, tokens: Tokens,
            machine: str) -> Option:
    basis, points, weight = known_at(series, n_tools, depth)
    remarks = []
    needed = tokens.total(n_tools) + depth
    refusal = next((f"{p.n_tools} tools: {p.refusal}" for p in points if p.refusal), None)
    if refusal is None and series.reads_all and series.n_ctx_train is not None and needed > series.n_ctx_train:
        refusal = f"tools and conversation have {needed} tokens; the model's context has {series.n_ctx_train}"
    if refusal:
        basis = REFUSED
        remarks.append(refusal)
    verdicts = [verdict_on(p, _reference(p, series, every)) for p in points]
    whole = [getattr(points[0], name) if len(points) == 1 else
             between(*(getattr(p, name) for p in points), weight) for name in ("ttft_ms", "accuracy", "no_call")]
    if series.tool_tokens and not series.tool_tokens[0] <= tokens.middle <= series.tool_tokens[1]:
        remarks.append(f"measured with tools of {series.tool_tokens[0]} to {series.tool_tokens[1]} tokens; yours have "
                       f"{tokens.middle} by the median")
    if series.cpu != machine:
        remarks.append(f"measured on {series.cpu}, not on this machine")
    return Option(series.kind, series.name, series.experiment, series.measures, basis,
                  tuple((p.n_tools, p.depth) for p in points), *whole, _both(verdicts), series.cpu, tuple(remarks))


def _reference(point: Point, series: Series, every: Sequence[Series]) -> Point | None:
    """What was asked the same: the model that has every tool in full, else the most accurate that is shown."""
    peers = [(other, p) for other in every if (other.experiment, other.measures) == (series.experiment, series.measures)
             for p in other.points if p.queries == point.queries and p.accuracy is not None]
    full = [p for other, p in peers if other.reference]
    return full[0] if full else max((p for other, p in peers if other.shown), key=lambda p: p.accuracy.value,
                                    default=None)


def _both(verdicts: Sequence[Verdict]) -> Verdict:
    """What holds at every point; the reasons of those that fail, else of all."""
    if len(verdicts) == 1:
        return verdicts[0]
    failed = [v for v in verdicts if v.equal is False] or [v for v in verdicts if v.equal is None]
    told = failed or verdicts
    losses, ps = ([x for x in (getattr(v, name) for v in verdicts) if x is not None] for name in ("loss", "p"))
    return Verdict(told[0].equal if failed else True, "; ".join(dict.fromkeys(v.why for v in told)),
                   max(losses, default=None), min(ps, default=None))


def _held_against_best(option: Option, competing: Iterable[Option]) -> Option:
    """The option, no longer equal where another way that competes is far better at the same task."""
    others = [o for o in competing if o.measures == option.measures == CHOICE
              and o.accuracy is not None and o.accuracy.ci_low is not None]
    best = max(others, key=lambda o: o.accuracy.value, default=None)
    if not (option.within and option.verdict.equal) or best is None or option.accuracy.ci_high is None:
        return option
    if option.accuracy.ci_high >= best.accuracy.ci_low:
        return option
    why = (f"{option.verdict.why}, but its interval is wholly below that of {best.name} "
           f"({100 * best.accuracy.value:.0f} % on {'the same' if best.experiment == option.experiment else 'other'} "
           "queries)")
    return replace(option, verdict=replace(option.verdict, equal=False, why=why))


def _time(option: Option) -> float:
    return math.inf if option.ttft_ms is None else option.ttft_ms.value


def _because(advised: Option | None, equal: Sequence[Option], options: Sequence[Option], machine: str,
             cpu: str | None) -> str:
    elsewhere = f"on {cpu}, not on this machine ({machine}): " if cpu not in (machine, None) else ""
    if advised is None:
        if cpu is None:
            return "no option was measured for so many tools at this depth, nor on both sides of it"
        return f"{elsewhere}no option that was measured here is known to be as accurate as it must be"
    rivals = [o for o in equal[1:] if o.kind != advised.kind]
    if not rivals:
        alone = len({o.kind for o in options if o.within and o.cpu == cpu}) == 1
        return (f"{elsewhere}{advised.kind} ({advised.name}), the only way that "
                + ("was measured for this" if alone else "is of equal accuracy"))
    rival = rivals[0]
    told = f"{elsewhere}{advised.kind} ({advised.name}) is fastest at equal accuracy"
    apart = (advised.ttft_ms.ci_high is not None and rival.ttft_ms.ci_low is not None
             and advised.ttft_ms.ci_high < rival.ttft_ms.ci_low)
    return told + (f"; next is {rival.kind} ({rival.name})" if apart else
                   f", but not shown to be faster than {rival.kind} ({rival.name}): their intervals overlap")


def _remarks(advised: Option | None, options: Sequence[Option], found: Mapping[str, Measured],
             costs: Sequence[Cost]) -> list[str]:
    told = []
    within = [o for o in options if o.within]
    if any(o.experiment == "spliced_choice" and o.at[0][0] == 1 for o in within):
        told.append("with a single tool the automaton has nothing to choose: accuracies are of free generation")
    if "spliced_choice" not in found:
        told.append("choosing from spliced tools was not measured for this model: splicing is known by the time and "
                    "fidelity of one tool only")
    if len({o.experiment for o in within if o.measures == CHOICE}) > 1:
        told.append("accuracies of different artifacts are of different queries; compare them within an artifact")
    if advised is None:
        return told
    if advised.kind == ROUTING:
        told.append("a router reads the query alone; queries that need the conversation were not among those measured")
        first = next((c for c in costs if c.experiment == "sidecar_accuracy"), None)
        if first:
            told.append(f"routing gives a tool and no arguments: the first of them comes {first.value.value:.0f} ms "
                        f"later, {advised.ttft_ms.value + first.value.value:.0f} ms in all, once the model read the "
                        "tool's signature; in context they follow the name in the same sequence")
    if advised.kind == PREFIX:
        told.append("that is its time where the prefix is resident; where tools change, all behind it is decoded again")
    if advised.no_call is not None and advised.no_call.value > 0:
        told.append(f"generating freely, the model makes no call on {100 * advised.no_call.value:.0f} % of queries")
    n_tried = sum(o.kind == advised.kind and o.experiment == advised.experiment for o in within)
    if n_tried > 1:
        told.append(f"it is the fastest that passes of {n_tried} of its kind; the rule does not correct for that")
    return told


def _costs(found: Mapping[str, Measured], n_tools: int, depth: int, tokens: Tokens) -> list[Cost]:
    """Steps whose cost follows from lengths, each at the nearest measured length or between two."""
    costs: list[Cost] = []

    def add(what: str, unit: str, experiment: str, points: Mapping[int, Estimate | None], wanted: int,
            scale: float = 1.0) -> None:
        known = {at: value for at, value in points.items() if value is not None}
        if known:
            basis, at, value = _along(known, wanted)
            costs.append(Cost(what, _scaled(value, scale), unit, basis, at, experiment))

    def rows(experiment: str, keep: Callable[[Mapping], bool]) -> list[Mapping]:
        return [row for row in found[experiment].artifact["rows"] if keep(row)] if experiment in found else []

    n_ctx = found["splice_cost"].artifact["config"]["runtime"]["n_ctx"] if "splice_cost" in found else None
    placed = {row["n_tokens"]: row for row in rows("splice_cost", lambda row: (
        row["n_ctx"], row["v_layout"], row["cells"]) == (n_ctx, "row", "contiguous"))}
    threads = found["splice_cost"].artifact["provenance"].get("threads") if placed else None
    on = f" ({threads} thread{'s' if threads != 1 else ''})" if threads else ""
    for what, unit, column, scale in ((f"prefilling one tool of {tokens.middle} tokens{on}", "ms", "prefill_us", 1e-3),
                                      (f"placing its block, without repair{on}", "µs", "total_us", 1.0)):
        add(what, unit, "splice_cost", {n: estimate(row[column]) for n, row in placed.items()}, tokens.middle, scale)
    prefix = tokens.total(n_tools) + depth
    add(f"copying a cached prefix of {prefix} tokens (tools and conversation)", "µs", "l0_radix",
        {row["n_tokens"]: estimate(row["copy_us"]) for row in rows(
            "l0_radix", lambda row: row["part"] == "copy" and row["n_tokens"] is not None)}, prefix)
    whole = [("requests of simulated agents that a cache of prefixes answers", "%", "l0_radix", 100.0, [
                row["hit_rate"] for row in rows(
                    "l0_radix", lambda row: (row["part"], row["arm"]) == ("trace", "nexus"))]),
             ("time to the first token without that cache, over the time with it", "×", "l0_radix", 1.0, [
                row["speedup_vs_none"] for row in rows(
                    "l0_radix", lambda row: (row["part"], row["arm"]) == ("ttft", "nexus"))]),
             ("the first argument once a tool is routed to, instructions resident", "ms", "sidecar_accuracy", 1.0, [
                row["value"] for row in rows(
                    "sidecar_accuracy", lambda row: row["metric"] == "first_argument_signature_ms")])]
    for what, unit, experiment, scale, metrics in whole:
        for value in map(estimate, metrics):
            if value is not None:
                costs.append(Cost(what, _scaled(value, scale), unit, MEASURED, "as measured", experiment))
    return costs


def _along(points: Mapping[int, Estimate], wanted: int) -> tuple[str, str, Estimate]:
    below = max((n for n in points if n <= wanted), default=None)
    above = min((n for n in points if n >= wanted), default=None)
    if below is None or above is None:
        nearest = above if below is None else below
        return NEAREST, f"{nearest} tokens", points[nearest]
    if below == above:
        return MEASURED, f"{below} tokens", points[below]
    value = between(points[below], points[above], (wanted - below) / (above - below))
    return BETWEEN, f"{below} and {above} tokens", value


def _scaled(value: Estimate, scale: float) -> Estimate:
    return replace(value, value=value.value * scale, **{
        name: None if getattr(value, name) is None else getattr(value, name) * scale for name in ("ci_low", "ci_high")})

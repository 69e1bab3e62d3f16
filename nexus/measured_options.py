"""What the artifacts of one model say about ways to offer tools: per way, a point for each number of tools and depth.

Only what was measured stands here; what lies between the points, or outside of them, is `nexus.advise`'s to say.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from nexus import stats
from nexus.stats import Estimate

PREFILL, PREFIX, SPLICING, ROUTING = "full prefill", "prefix caching", "splicing", "routing"
KINDS = (PREFILL, PREFIX, SPLICING, ROUTING)
# What an accuracy says. The two are never compared with each other.
CHOICE, FIDELITY = "right tool chosen", "next token as after a full prefill"
READINGS = ("automaton", "free")
# Arms that nobody would serve with.
SPLICED_CONTROLS = ("bare-no-reanchor", "noise_floor", "identity")
FRONTIER_CONTROLS = ("full", "noise_floor", "oracle", "random")
# Tools in the cached prefix of the peer `group-cache` of experiments/deep_splice_ttft.py.
GROUP_TOOLS = 5

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """An artifact and its per-sample rows, as `nexus.artifact` reads them."""

    artifact: Mapping[str, Any]
    samples: Sequence[Row]


@dataclass(frozen=True)
class Point:
    """What one way did at one number of tools and one depth."""

    n_tools: int
    depth: int | None
    """Tokens of conversation in the context; None where the conversation is not read."""
    ttft_ms: Estimate | None
    accuracy: Estimate | None
    right: Mapping[Any, bool] = field(default_factory=dict)
    """Per query whether it was right; what two ways are paired by."""
    no_call: Estimate | None = None
    """Share of queries that are answered without any call when the model generates freely."""
    refusal: str | None = None
    """Why there is nothing here, such as an overflow."""
    queries: tuple = ()
    """Points of one experiment with equal `queries` were asked the same."""


@dataclass(frozen=True)
class Series:
    """One way to offer tools, as one artifact measured it."""

    kind: str
    name: str
    experiment: str
    measures: str
    """What its accuracies are: CHOICE or FIDELITY."""
    points: tuple[Point, ...]
    cpu: str | None
    n_ctx_train: int | None
    reference: bool = False
    """The model has every tool in full: what others of its experiment are held against."""
    shown: bool = True
    reads_all: bool = True
    """All tools must fit the model's context."""
    tool_tokens: tuple[int, int] | None = None
    """Fewest and most tokens of a tool that was measured; None where the artifact does not say."""


def series_of(found: Mapping[str, Measured], reading: str = READINGS[0]) -> list[Series]:
    """Every way to offer tools that the artifacts, by experiment, tell of; `reading` is one of READINGS."""
    return [series for experiment, read in READERS.items() if experiment in found
            for series in read(found[experiment], reading) if series.points]


def estimate(metric: Mapping[str, Any] | None) -> Estimate | None:
    """The metric of a row; None where nothing was measured."""
    return None if metric is None or metric["value"] is None else Estimate(**metric)


def block_lengths(found: Mapping[str, Measured]) -> list[int]:
    """Tokens of every tool whose block was measured, one entry per tool and length, ascending."""
    return sorted(length for _, length in {(s.get("tool"), s["block_tokens"]) for read in found.values()
                                           for s in read.samples if s.get("block_tokens") is not None})


def _spliced_choice(found: Measured, reading: str) -> list[Series]:
    rights = _by(found.samples, "arm", "n_tools", "depth", "compiled_behind", "reading")
    free = {_key(row, "arm", "n_tools", "depth", "compiled_behind"): estimate(row["no_call_rate"])
            for row in found.artifact["rows"] if row["reading"] == "free"}

    def series(arm: str, behind: str, rows: Iterable[Row]) -> Series:
        kind = {"full": PREFILL, "group": PREFIX}.get(arm, SPLICING)
        points = tuple(Point(
            row["n_tools"], row["depth"], estimate(row["ttft_ms"]), estimate(row["accuracy"]),
            {s["case"]: s["correct"] for s in rights.get((arm, row["n_tools"], row["depth"], behind, reading), ())},
            free.get((arm, row["n_tools"], row["depth"], behind)), queries=(row["n_tools"], row["depth"]))
            for row in rows)
        name = f"{arm}, compiled behind {behind}" if kind == SPLICING else arm
        return Series(kind, name, "spliced_choice", CHOICE, points, reference=arm == "full",
                      **_facts(found), tool_tokens=_lengths(found.samples))

    rows = [row for row in found.artifact["rows"] if row["reading"] == reading and row["arm"] not in SPLICED_CONTROLS]
    return [series(arm, behind, group) for (arm, behind), group in _by(rows, "arm", "compiled_behind").items()]


def _routing(found: Measured, reading: str) -> list[Series]:
    default = found.artifact["config"]["routing"]["system"]
    rights = _by(found.samples, "system", "n_tools")
    ways = {default: dict(kind=ROUTING, name=default, reads_all=False),
            "rag_mcp": dict(kind=ROUTING, name="rag_mcp (the model reads the first schemas)", reads_all=False),
            "concat_all": dict(kind=PREFIX, name="concat_all (every schema is resident)", reference=True)}

    def point(row: Row, depth: int | None) -> Point:
        refusal = None if row["status"] == "ok" else f"{row['status']}: the tools did not fit the context"
        samples = rights.get((row["system"], row["n_tools"]), ()) if refusal is None else ()
        return Point(row["n_tools"], depth, estimate(row.get("choice_ms")), estimate(row["accuracy"]),
                     {s["case"]: s["right"] for s in samples}, refusal=refusal, queries=(row["n_tools"],))

    # A router reads the query alone; the baselines were asked without a conversation.
    return [Series(experiment="routing_accuracy_n250", measures=CHOICE, **_facts(found), **way, points=tuple(
        point(row, None if system == default else 0) for row in found.artifact["rows"] if row["system"] == system))
        for system, way in ways.items() if any(row["system"] == system for row in found.artifact["rows"])]


def _deep_splice(found: Measured, reading: str) -> list[Series]:
    rows = found.artifact["rows"]
    samples = [s for s in found.samples if s.get("probe") == "query"]
    rights = _by(samples, "arm", "curve_k", "protocol", "n_past")

    def right(arm: str, curve: float | None, protocol: str, n_past: int) -> dict:
        return {(s["case"], s["trial"]): s["top1"] for s in rights.get((arm, curve, protocol, n_past), ())
                if s.get("top1") is not None}

    def series(kind: str, name: str, group: Iterable[Row], n_tools: int = 1) -> Series:
        points = tuple(Point(n_tools, row["n_past"], estimate(row["splice_ms"]), estimate(row["top1"]),
                             right(row["arm"], row["curve_k"], row["protocol"], row["n_past"]),
                             queries=(row["protocol"], row["n_past"])) for row in group)
        return Series(kind, name, "deep_splice_ttft", FIDELITY, points, **_facts(found),
                      tool_tokens=_lengths(found.samples))

    def reference(protocol: str) -> Series:
        times = {row["n_past"]: row["prefill_ms"] for row in rows if row["protocol"] == protocol}
        points = tuple(_prefill(n_past, metric, right("prefill", None, protocol, n_past), (protocol, n_past),
                                metric["level"]) for n_past, metric in sorted(times.items()))
        return Series(PREFILL, "full prefill of one tool", "deep_splice_ttft", FIDELITY, points, **_facts(found),
                      reference=True, shown=protocol == "warm", tool_tokens=_lengths(found.samples))

    all_series = [reference(protocol) for protocol in ("warm", "cold")]
    for (arm, protocol, curve, behind), group in _by(rows, "arm", "protocol", "curve_k", "compiled_behind").items():
        if arm in ("prefix-reuse", "group-cache"):
            all_series.append(series(PREFIX, arm, group, 1 if arm == "prefix-reuse" else GROUP_TOOLS))
        elif protocol == "warm" and arm != "engine-shift":
            curved = "" if curve is None else f", K = {curve:g}"
            all_series.append(series(SPLICING, f"{arm}{curved}, compiled behind {behind}", group))
    return all_series


def _frontier(found: Measured, reading: str) -> list[Series]:
    rows = [row for row in found.artifact["rows"] if row["probe"] == "query"]
    # An arm with its number in its name has another share at every depth; a family is one arm per share.
    rights = _by([s for s in found.samples if s["probe"] == "query"], "arm", "n_past", "compiled_behind")

    def right(arm: str, n_past: int, behind: str, pct: float | None) -> dict:
        return {s["case"]: s["top1"] for s in rights.get((arm, n_past, behind), ())
                if pct is None or s["recompute_pct"] == pct}

    def pct_of(row: Row) -> float | None:
        return None if row["arm"] == "none" or "-" in row["arm"] else row["recompute_pct"]

    facts = _facts(found) | {"tool_tokens": _lengths(found.samples)}
    full = [row for row in rows if row["arm"] == "full"]
    references = Series(PREFILL, "full prefill of one tool", "repair_frontier", FIDELITY, tuple(
        _prefill(row["n_past"], row["prefill_ms"], right("full", row["n_past"], row["compiled_behind"], None),
                 (row["n_past"],), row["top1"]["level"]) for row in full), reference=True, **facts)
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if row["arm"] not in FRONTIER_CONTROLS:
            groups.setdefault((row["arm"], pct_of(row), row["compiled_behind"]), []).append(row)
    return [references, *(Series(
        SPLICING, f"{arm}{'' if pct is None else f' {pct:g} %'}, compiled behind {behind}", "repair_frontier", FIDELITY,
        tuple(Point(1, row["n_past"], estimate(row["splice_ms"]), estimate(row["top1"]),
                    right(arm, row["n_past"], behind, pct), queries=(row["n_past"],)) for row in group), **facts)
        for (arm, pct, behind), group in groups.items())]


READERS: dict[str, Callable[[Measured, str], list[Series]]] = {
    "spliced_choice": _spliced_choice, "routing_accuracy_n250": _routing, "deep_splice_ttft": _deep_splice,
    "repair_frontier": _frontier}


def _prefill(depth: int, time: Mapping[str, Any], right: dict, queries: tuple, level: float) -> Point:
    """A full prefill in other batches than the one it is read against, which need not agree with it either."""
    agreed = stats.wilson(sum(right.values()), len(right), level)
    return Point(1, depth, estimate(time), agreed if right else None, right, queries=queries)


def _facts(found: Measured) -> dict[str, Any]:
    return {"cpu": found.artifact["provenance"].get("cpu"),
            "n_ctx_train": found.artifact["config"].get("model", {}).get("n_ctx_train")}


def _lengths(samples: Iterable[Row]) -> tuple[int, int] | None:
    """Fewest and most tokens of a tool, or of the tools of a set by their mean."""
    lengths = [s["block_tokens"] for s in samples if s.get("block_tokens") is not None]
    lengths += [round(s["tools_tokens"] / s["n_tools"]) for s in samples if s.get("tools_tokens") is not None]
    return (min(lengths), max(lengths)) if lengths else None


def _key(row: Row, *columns: str) -> tuple:
    return tuple(row.get(column) for column in columns)


def _by(rows: Iterable[Row], *columns: str) -> dict[tuple, list[Row]]:
    """The rows by their values in the columns, in order of first appearance."""
    groups: dict[tuple, list[Row]] = {}
    for key, group in groupby(rows, key=lambda row: _key(row, *columns)):
        groups.setdefault(key, []).extend(group)
    return groups

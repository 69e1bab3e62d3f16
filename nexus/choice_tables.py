"""Tables of the choice from spliced tools, in Markdown. No model is loaded."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nexus.tables import MISSING, Row, at, cell, counts, distinct, document, heading, markdown, number

READINGS = {"automaton": "right, names alone allowed, %", "free": "right, free text, %"}
ALPHA = 0.05


def spliced_choice(artifact: dict[str, Any]) -> str:
    """Accuracy and time to the first token of every arm: where all were measured, and along both axes."""
    rows, section = artifact["rows"], artifact["config"]["spliced_choice"]
    main = {"n_tools": section["at_n_tools"], "depth": section["at_depth"]}
    here = at(rows, **main)
    parts = [
        heading("Choosing from spliced tools", artifact),
        "Each tool is compiled alone and spliced behind the conversation; `full` prefills them all, `group` keeps them as "
        "one prefix before the conversation. Read under the automaton of the offered names, and as free text, in which a "
        "call may be missing. p: McNemar's exact test against `full` on the same queries, not corrected for the number "
        "of arms. Times are warm: conversation (`group`: tools, too), and compiled blocks are at hand.",
        f"## {main['n_tools']} tools behind {main['depth']} tokens", _arms(here), _verdict(here),
    ]
    for key, title in (("n_tools", "Number of tools"), ("depth", "Depth")):
        others = {other: value for other, value in main.items() if other != key}
        along = at(rows, **others)
        if len(distinct(along, key)) > 1:
            parts += [f"## {title}", _axis(along, key)]
    if identical := [row for row in rows if row.get("bit_identical")]:
        row = identical[0]
        parts.append(f"Identity control: with the first tool spliced at its own anchor and the others prefilled, "
                     f"{cell(row['bit_identical'], 100)} % of the queries have every logit to the bit "
                     f"({counts(row['bit_identical'])}).")
    return document(*parts)


def _arms(rows: Sequence[Row]) -> str:
    """One line per arm and what it was compiled behind."""
    lines = []
    for arm, behind in distinct(rows, "arm", "compiled_behind"):
        of = {row["reading"]: row for row in at(rows, arm=arm, compiled_behind=behind)}
        any_ = next(iter(of.values()))
        line = [f"`{arm}`", f"`{behind}`" if behind else MISSING, number(any_["recompute_pct"])]
        for reading in READINGS:
            row = of.get(reading, {})
            line += [cell(row.get("accuracy"), 100), _p(row)]
        free = of.get("free", {})
        lines.append([*line, cell(free.get("no_call_rate"), 100), cell(any_["dkl_nats"]), cell(any_["ttft_ms"])])
    n = max((row["accuracy"]["n"] for row in rows), default=0)
    columns = ["arm", "compiled behind", "decoded, %", READINGS["automaton"], "p", READINGS["free"], "p", "no call, %",
               "KL to full, nats", f"first token, ms (n = {n} queries)"]
    return markdown(columns, lines)


def _axis(rows: Sequence[Row], key: str) -> str:
    """One line per arm that is measured all along an axis and reading, one column per place on it."""
    places = sorted(place for place, in distinct(rows, key))
    lines = []
    for arm, behind, reading in distinct(rows, "arm", "compiled_behind", "reading"):
        found = {row[key]: row for row in at(rows, arm=arm, compiled_behind=behind, reading=reading)}
        if len(found) > 1:
            lines.append([f"`{arm}`", f"`{behind}`" if behind else MISSING, reading,
                          *(_accuracy(found.get(place)) for place in places),
                          *(cell((found.get(place) or {}).get("ttft_ms")) for place in places)])
    return markdown(["arm", "compiled behind", "reading", *(f"{key} = {place}: right, %" for place in places),
                     *(f"{place}: first token, ms" for place in places)], lines)


def _accuracy(row: Row | None) -> str:
    if row is None:
        return MISSING
    p = _p(row)
    return cell(row["accuracy"], 100) + ("" if p == MISSING else f", p {p}")


def _p(row: Row) -> str:
    return MISSING if row.get("p_value") is None else number(row["p_value"])


def _verdict(rows: Sequence[Row]) -> str:
    """Which arms are told from `full` at the point, in words."""
    sentences = []
    for reading, what in (("automaton", "Under the automaton"), ("free", "As free text")):
        tested = [row for row in at(rows, reading=reading) if row["p_value"] is not None]
        worse = [row for row in tested if row["p_value"] < ALPHA and row["only_full"] > row["only_here"]]
        better = [row for row in tested if row["p_value"] < ALPHA and row["only_full"] < row["only_here"]]
        if tested:
            sentences.append(f"{what}, worse than `full` at p < {ALPHA:g}: {_listed(worse)}; better: {_listed(better)}; "
                             f"not told from it: {len(tested) - len(worse) - len(better)} of {len(tested)}.")
    return " ".join(sentences)


def _listed(rows: Sequence[Row]) -> str:
    return ", ".join(f"`{row['arm']}`" + (f" behind `{row['compiled_behind']}`" if row["compiled_behind"] else "")
                     for row in rows) or "none"

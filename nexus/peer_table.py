"""Table I in Markdown, and where every figure of it comes from. No model is loaded.

What others report stands in `results/peers.json` with its source; what is measured here is read from a run's artifacts
by the rules that stand beside it. `python -m nexus.peer_table` writes `results/comparison_sources.md` anew.
"""
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from nexus import artifact as stored_form
from nexus.canonical import write_atomically
from nexus.config import ROOT
from nexus.tables import MISSING, Metric, Row, cell, document, markdown, number, published

PEERS = ROOT / "results" / "peers.json"
SOURCES = ROOT / "results" / "comparison_sources.md"
SCHEMA = Path(__file__).with_name("peers.schema.json")
FAMILIES = {
    "serving": "As in the paper: serving, and tools in the prompt",
    "reuse": "Reuse of KV blocks at other positions",
    "routing": "Finding a tool",
    "constraints": "Constrained decoding",
    "scan": "INT8 scan",
}
SEEN = {
    "abstract": "the paper's abstract", "repository": "the project's repository", "summary": "a summary of the paper",
    "quoted": "as quoted in Table I or the list of peers",
}
CONTEXTUAL = "contextual"
OURS = "**Nexus**"
Rule = dict[str, Any]


class PeersError(ValueError):
    """`results/peers.json` does not have the form of `peers.schema.json`; the message names the entry."""


def peers() -> dict[str, Any]:
    """What others report and the rules for what is measured here, as in `results/peers.json`. Raises PeersError."""
    found = json.loads(PEERS.read_text(encoding="utf-8"))
    error = best_match(Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).iter_errors(found))
    if error is not None:
        place = ".".join(map(str, error.absolute_path))
        raise PeersError(f"{PEERS.name}: {place}: {error.message}")
    return found


def table1(run_folder: Path | None) -> str:
    """Table I with its measured column, from the artifacts in `run_folder` (`results/<run>`).

    What the run has not measured, or everything without a run, is shown as missing. Raises ArtifactError for a broken
    artifact.
    """
    stored = peers()
    run = _Run(run_folder)
    sections = []
    for family, title in FAMILIES.items():
        lines = [_line(peer, run) for peer in _of(stored, family)]
        if rules := stored["this_work"].get(family):
            lines.append([OURS, *_own(family), run.told(rules)])
        sections += [f"## {title}", markdown(_columns(family), lines)]
    return document("# Table I: Nexus and its peers", _what_is_shown(run), *sections)


def comparison_sources() -> str:
    """Where every quoted figure comes from, and which row of which artifact stands beside it; the same for all runs."""
    stored = peers()
    parts = []
    for family, title in FAMILIES.items():
        figures = [[peer["system"], figure["what"], f"{figure['value']} {figure['unit']}",
                    figure["conditions"] or MISSING, figure["source"], SEEN[figure["seen"]], peer["here"] or CONTEXTUAL]
                   for peer in _of(stored, family) for figure in peer["figures"]]
        notes = [f"- {peer['system']}: {figure['note']}"
                 for peer in _of(stored, family) for figure in peer["figures"] if "note" in figure]
        silent = [peer["system"] for peer in _of(stored, family) if not peer["figures"]]
        rules = [[name, rule["label"], f"`{_file(rule)}`", _place(rule["row"]), f"`{rule['metric']}`", rule["unit"]]
                 for name, rules in _measured(stored, family) for rule in rules]
        parts.append(f"## {title}")
        if figures:
            parts.append(markdown(["system", "figure", "reported", "where", "source", "read in", "measured here"],
                                  figures))
        if notes:
            parts.append("\n".join(notes))
        if silent:
            parts.append(f"No figure is quoted of {', '.join(silent)}.")
        if rules:
            parts += ["Measured here:",
                      markdown(["beside", "what", "artifact", "row", "metric", "unit"], rules)]
    return document(
        "# Where the figures of Table I come from",
        "Written from `results/peers.json`. Every reported figure was measured by others, on other hardware and "
        f"another workload. Where nothing of the kind is measured here it is {CONTEXTUAL}: it says where a system stands, and "
        "no comparison follows from it. `same program` means that the system itself runs here beside ours; `same idea` "
        "that its mechanism does, in this project's code, so that the system as its authors built it may do better.",
        "A figure is as good as where it was read; one that is only quoted was not found in the work that is named. "
        "The measured figures are no part of this file: `tables/table1.md` in a run's folder reads them from the row "
        "named below.",
        *parts)


class _Run:
    """The artifacts of a run's folder, each read once; None has none."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.levels: set[float] = set()
        self._stored = cache(self._read)

    def _read(self, experiment: str) -> dict[str, Any] | None:
        try:
            return None if self.folder is None else stored_form.read(stored_form.path_of(experiment, self.folder))
        except FileNotFoundError:
            return None

    def metric(self, rule: Rule) -> Metric:
        """The metric that the rule names; None where the run has no such artifact, row or metric."""
        artifact = self._stored(rule["artifact"])
        if artifact is None:
            return None
        row = row_of(artifact["rows"], rule["row"])
        return None if row is None else row.get(rule["metric"])

    def told(self, rules: Sequence[Rule]) -> str:
        """The measured figures in one cell of a table, with their intervals and n."""
        texts = []
        for rule in rules:
            metric = self.metric(rule)
            if metric is None or metric["value"] is None:
                texts.append(f"{rule['label']}: {MISSING}")
            else:
                self.levels.add(metric["level"])
                texts.append(f"{rule['label']}: {cell(metric, rule['scale'])} {rule['unit']}, n = {metric['n']}")
        return "; ".join(texts)

    @property
    def model(self) -> str | None:
        """The model of the run; None where it has no artifact that a rule reads."""
        read = (self._stored(rule["artifact"]) for rules in _all_rules(peers()) for rule in rules)
        return next((artifact["tuple"]["model"] for artifact in read if artifact), None)


def row_of(rows: Sequence[Row], keys: Row) -> Row | None:
    """The one row whose columns have these values, or None. Raises PeersError where there are several."""
    found = [row for row in rows if all(column in row and row[column] == value for column, value in keys.items())]
    if len(found) > 1:
        raise PeersError(f"{PEERS.name}: {len(found)} rows have {_place(keys)}; name more columns")
    return found[0] if found else None


def _of(stored: dict[str, Any], family: str) -> list[dict[str, Any]]:
    return [peer for peer in stored["peers"] if peer["family"] == family]


def _measured(stored: dict[str, Any], family: str) -> Iterator[tuple[str, list[Rule]]]:
    yield from ((peer["system"], peer["measured"]) for peer in _of(stored, family))
    yield OURS, stored["this_work"].get(family, [])


def _all_rules(stored: dict[str, Any]) -> Iterator[list[Rule]]:
    for family in FAMILIES:
        yield from (rules for _, rules in _measured(stored, family))


def _columns(family: str) -> list[str]:
    how = ["KV strategy", "routing"] if family == "serving" else ["mechanism"]
    return ["system", *how, "reported elsewhere†", "here", "measured here"]


def _line(peer: dict[str, Any], run: _Run) -> list[str]:
    how = [peer["mechanism"]]
    if peer["family"] == "serving":
        said = {said["system"]: said for said in published()["peers"]}[peer["system"]]
        how = [said["kv_strategy"], said["routing"] or MISSING]
    return [peer["system"], *how, _reported(peer["figures"]) or MISSING, peer["here"] or CONTEXTUAL,
            run.told(peer["measured"]) or MISSING]


def _reported(figures: Sequence[dict[str, Any]]) -> str:
    """The figures in one cell, with conditions that several share behind the last of them."""
    texts = []
    for i, figure in enumerate(figures):
        where = figure["conditions"]
        shared = i + 1 < len(figures) and figures[i + 1]["conditions"] == where
        texts.append(f"{figure['what']}: {figure['value']} {figure['unit']}"
                     + (f" ({where})" if where and not shared else ""))
    return "; ".join(texts)


def _own(family: str) -> list[str]:
    """This work's cells before what is measured: in the paper's own table, what the paper reports."""
    if family != "serving":
        return [MISSING, MISSING, "this work"]
    said = published()
    speedups = [row["speedup"] for row in said["deep_splice_ttft"]["rows"]]
    return ["moved, one block per tool", "INT8 scan and margin gate",
            f"published: {number(100 * said['routing_accuracy_n250']['accuracy']['250'])} % of 250 tools; first "
            f"argument {said['sidecar_accuracy']['speedup']:g} times sooner; deep splice {min(speedups):g} to {max(speedups):g} "
            "times as fast over all depths (14B model, other machine)", "this work"]


def _what_is_shown(run: _Run) -> str:
    levels = " / ".join(f"{100 * level:g} %" for level in sorted(run.levels)) or "no"
    of = f"Measured: {run.model}, with {levels} intervals. " if run.model else "Nothing is measured in this run. "
    return (f"{of}† {CONTEXTUAL}: measured by others on other hardware and workloads, no head-to-head; sources in "
            "`results/comparison_sources.md`. `same program` runs here beside ours, `same idea` is the mechanism in "
            f"this project's code. Speed-ups are over a prefill, KL is from one, in nats, behind the query; {MISSING} is "
            "not reported or not measured.")


def _file(rule: Rule) -> str:
    return stored_form.path_of(rule["artifact"], Path()).as_posix()


def _place(keys: Row) -> str:
    return ", ".join(f"{column} = {json.dumps(value, ensure_ascii=False)}" for column, value in keys.items())


if __name__ == "__main__":
    write_atomically(SOURCES, comparison_sources())

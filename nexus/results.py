"""Stored results for a reader: which runs there are, their artifacts, and their samples as data frames.

Nothing is measured here and no model is loaded. Notebooks and one's own analyses begin with this module.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from nexus import artifact as stored_form
from nexus.config import ROOT
from nexus.tables import MissingArtifact

RESULTS = ROOT / "results"


def runs(experiment: str) -> dict[str, Path]:
    """The folders of the runs that have the experiment's artifact, by the run's name, in alphabetical order.

    Raises MissingArtifact where no run has it, with the command that makes it.
    """
    found = {folder.name: folder for folder in sorted(RESULTS.glob("*"))
             if stored_form.path_of(experiment, folder).is_file()}
    if not found:
        raise MissingArtifact(f"no run in {RESULTS} has {stored_form.path_of(experiment, Path())}; make one with: make "
                              "repro, or check out the committed results with: git checkout -- results")
    return found


def artifact(experiment: str, run: str) -> dict[str, Any]:
    """The run's artifact, validated. Raises MissingArtifact, and ArtifactError where it is broken."""
    return stored_form.read(_path(experiment, run))


def samples(experiment: str, run: str) -> pd.DataFrame:
    """The samples behind the run's artifact, one row per measurement, in their order. Errors: as `artifact`."""
    return pd.DataFrame(stored_form.read_samples(_path(experiment, run)))


def routing_choices(run: str) -> pd.DataFrame:
    """What every system chose for every query at every number of tools, with the query's text and the tool it wants.

    Columns are those of the samples of `routing_accuracy_n250`, and `query` and `wanted` ("server/name"). Errors: as
    `artifact`, and FileNotFoundError where the run's file of queries is gone.
    """
    workload = artifact("routing_accuracy_n250", run)["config"]["workload"]
    queries = _queries(ROOT / (workload["path"] or workload["routing"]["evaluation"]))
    return samples("routing_accuracy_n250", run).merge(queries, on="case", how="left")


def routing_errors(choices: pd.DataFrame, *, system: str | None = None, n_tools: int | None = None,
                   wording: str | None = None, text: str = "") -> pd.DataFrame:
    """The wrong choices among `routing_choices`, most often missed queries first.

    system, n_tools, wording   only of this system, this number of tools, this wording ("own", "paraphrase")
    text                       only where query, wanted or chosen tool contains it, in any case
    `missed_by` counts the systems that miss a query at that number of tools. What does not fit a model's window is no
    choice and left out. Raises ValueError for a system, number of tools or wording that the run does not have.
    """
    wrong = choices[(choices["status"] == "ok") & ~choices["right"].astype(bool)]
    wrong = wrong.assign(missed_by=wrong.groupby(["n_tools", "case"])["system"].transform("nunique"))
    for column, value in (("system", system), ("n_tools", n_tools), ("wording", wording)):
        if value is not None:
            known = choices[column].dropna().unique().tolist()
            if value not in known:
                raise ValueError(f"{column} {value!r} is not in this run; it has {', '.join(map(str, known))}")
            wrong = wrong[wrong[column] == value]
    columns = ["query", "wanted", "chosen"]
    holds = wrong[columns].apply(lambda column: column.str.contains(text, case=False, regex=False, na=False))
    shown = ["missed_by", "n_tools", "system", "case", *columns, "rank", "margin", "wording"]
    return wrong.loc[holds.any(axis=1), shown].sort_values(
        ["missed_by", "case", "n_tools", "system"], ascending=[False, True, True, True], ignore_index=True)


def _path(experiment: str, run: str) -> Path:
    found = runs(experiment)
    if run not in found:
        raise MissingArtifact(f"run {run!r} has no {stored_form.path_of(experiment, Path())}; there is one of "
                              f"{', '.join(found)}")
    return stored_form.path_of(experiment, found[run])


def _queries(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, the queries that this run asked; put the file back")
    # Not splitlines(): it also splits at U+2028 and others that a JSON string may hold.
    lines = enumerate(path.read_text(encoding="utf-8").split("\n"), start=1)
    cases = [{"id": f"line-{number}"} | json.loads(line) for number, line in lines if line.strip()]
    return pd.DataFrame({
        "case": [case["id"] for case in cases],
        "query": [case["query"] for case in cases],
        "wanted": ["/".join(filter(None, (case.get("server"), case["tool"]))) for case in cases],
    })

"""`report.html`: everything that a run, or all committed runs, measured, in one page that needs nothing else.

Written from artifacts and `results/published.json`; no model is loaded. Equal artifacts give equal bytes.
"""
from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nexus import artifact as stored_form
from nexus import latex, tables
from nexus.canonical import write_atomically
from nexus.claims import claims
from nexus.config import CONF, ROOT, Config, ConfigError, compose, validate
from nexus.run_folder import PARAMS, RunFolderError, profile_of, read_skipped
from nexus.verdicts import RULE, Verdict, judge

NAME = "report.html"
PYTHON = ".venv/bin/python"


class ReportError(RuntimeError):
    """There is nothing to report; the message says what to run."""


@dataclass(frozen=True)
class Run:
    """The artifacts of one folder below results/, by experiment, and why others are not there."""

    name: str
    folder: Path
    artifacts: Mapping[str, Mapping[str, Any]]
    lacking: Mapping[str, str]
    commands: Mapping[str, str]
    """What makes an experiment's artifact, by experiment: as it is, or, where it is lacking, one of this run."""

    @property
    def model(self) -> str:
        """The model under test; '' where nothing is measured."""
        return next((artifact["tuple"]["model"] for artifact in self.artifacts.values()), "")

    def verdicts(self) -> list[Verdict]:
        """One per published claim."""
        published = tables.published()
        return [judge(claim, self.artifacts, published, self.lacking) for claim in claims()]


def load(folder: Path) -> Run:
    """The run in `folder`. A broken artifact counts as lacking. Raises ReportError where there is none at all."""
    artifacts, lacking = {}, {}
    try:
        skipped = read_skipped(folder)
    except RunFolderError as error:
        raise ReportError(str(error)) from error
    for experiment in stored_form.experiments():
        path = stored_form.path_of(experiment, folder)
        try:
            artifacts[experiment] = stored_form.read(path)
        except FileNotFoundError:
            reason = skipped.get(experiment)
            lacking[experiment] = f"skipped: {reason}" if reason else "not measured in this run"
        except stored_form.ArtifactError as error:
            lacking[experiment] = f"not readable: {error}"
    if not artifacts:
        raise ReportError(f"{folder}: no artifact to report; make some with: make repro")
    model = next(iter(artifacts.values()))["tuple"]["model"]
    commands = {name: command(name, model, folder, artifacts.get(name)) for name in stored_form.experiments()}
    return Run(folder.name, folder, artifacts, lacking, commands)


def committed(results: Path) -> list[Run]:
    """The runs of models of `conf/model` under the full profile, the default model's first. Raises ReportError."""
    default = validate(compose()).model.name
    models = sorted((path.stem for path in (CONF / "model").glob("*.yaml")), key=lambda name: (name != default, name))
    runs = [load(folder) for name in models if has_artifacts(folder := results / name)]
    if not runs:
        raise ReportError(f"{results}: no full run of a model of conf/model; make one with: make repro PROFILE=full")
    return runs


def has_artifacts(folder: Path) -> bool:
    """Whether any artifact is in the folder, readable or not."""
    return any(stored_form.path_of(experiment, folder).is_file() for experiment in stored_form.experiments())


def write(runs: Sequence[Run], path: Path, about: str) -> Path:
    """`path`, after the page about these runs is there; `about` names them in the title."""
    from nexus import report_page

    write_atomically(path, report_page.render(runs, about))
    return path


def verdict_table(run: Run) -> str:
    """The run's verdicts and the rule behind them, in Markdown."""
    lines = [[verdict.claim.text, verdict.claim.where, verdict.published, verdict.measured, verdict.verdict,
              verdict.count or verdict.reason] for verdict in run.verdicts()]
    return tables.document(
        "# Verdicts on the published claims",
        f"Run `{run.name}`, model {run.model}. Measured: value [low, high], or the least and the largest of several "
        "cells.",
        tables.markdown(["claim", "in the paper", "published", "measured", "verdict", "cells"], lines),
        "## The rule", "\n".join(f"- {item}" for item in RULE))


def write_verdicts(run: Run) -> list[Path]:
    """The verdicts as `tables/verdicts.md` and `.tex` in the run's folder."""
    return latex.write(run.folder / "tables", "verdicts", verdict_table(run))


def command(experiment: str, model: str, folder: Path, artifact: Mapping[str, Any] | None = None) -> str:
    """The command that measures the experiment for the run in `folder`, and the artifact again if there is one.

    Of several configurations in conf/ it is the one whose hash the artifact states; where none has it, the model's,
    with a remark that its configuration is another one by now.
    """
    if (folder / PARAMS).is_file():
        place = _shown(folder / PARAMS)
        return shlex.join([PYTHON, "-m", "nexus", "stage", experiment, "--params", place, "--run", folder.name])
    plain, named = (f"model={model}",), (f"model={model}", f"profile={profile_of(folder.name)}")
    fitting = None if artifact is None else next(
        (overrides for overrides in (plain, named)
         if _config_sha256(experiment, overrides) == artifact["config_sha256"]), None)
    text = shlex.join([PYTHON, "-m", f"experiments.{experiment}", *(fitting or named)])
    return text if fitting or artifact is None else f"{text}   # the configuration has changed since"


def machines(runs: Iterable[Run]) -> list[str]:
    """The CPUs that measured, each once."""
    artifacts = [artifact for run in runs for artifact in run.artifacts.values()]
    return sorted({artifact["provenance"].get("cpu") or "an unknown CPU" for artifact in artifacts})


@cache
def _config_sha256(experiment: str, overrides: tuple[str, ...]) -> str | None:
    try:
        return _composed(overrides).sha256(experiment)
    except ConfigError:
        # A model that is no file of conf/model.
        return None


@cache
def _composed(overrides: tuple[str, ...]) -> Config:
    return validate(compose(overrides))


def _shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)

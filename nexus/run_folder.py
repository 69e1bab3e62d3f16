"""What lies in a run's folder below results/ beside artifacts, what its name tells, and what can be made of it."""
from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from nexus.config import CONF
from nexus.tables import MissingArtifact

# What a run that does not go through DVC leaves: its configuration, and why it skipped an experiment.
PARAMS, SKIPPED = "params.yaml", "skipped.json"
# Only runs of this profile are committed; any other is part of the run's name.
COMMITTED_PROFILE = "full"

Made = TypeVar("Made")


class RunFolderError(RuntimeError):
    """A file of a run's folder cannot be read; the message names it and the remedy."""


def profile_of(run_name: str) -> str:
    """The profile of conf/profile that the run's name tells."""
    ending = run_name.rpartition(".")[2]
    return ending if (CONF / "profile" / f"{ending}.yaml").is_file() else COMMITTED_PROFILE


def read_skipped(folder: Path) -> dict[str, str]:
    """Reasons by experiment that a run skipped; {} where it skipped none. Raises RunFolderError for another form."""
    path = folder / SKIPPED
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunFolderError(f"{path}: not valid JSON ({error}); remove it, or run this case again") from error
    if not isinstance(found, dict):
        raise RunFolderError(f"{path}: reasons by experiment are an object, not a {type(found).__name__}; remove it")
    return found


def made(makers: Mapping[str, Callable[[], Made]], folder: Path) -> dict[str, Made]:
    """What the makers return, by name. Where the run skipped experiments, those that lack an artifact are left out.

    Raises MissingArtifact where an artifact is missing and nothing was skipped, and whatever a maker raises.
    """
    found = {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except MissingArtifact:
            if not (folder / SKIPPED).is_file():
                raise
    return found

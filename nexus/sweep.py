"""Sweeps: which jobs there are, where each writes, and what became of them, in whichever processes they ran.

Hydra's launchers tell little: one stops at the first error, another forgets all but the first, and a job whose process
dies leaves no word. So every job leaves a report in a folder of the sweep, and a job without one has failed.
"""

import json
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from nexus.canonical import write_atomically
from nexus.config import NOT_HASHED, ConfigError

# Files of conf/hydra/launcher bear the names of the plugins' own on purpose: Hydra checks them by the plugins' fields.
warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")
SLUG_LENGTH = 80
NO_REPORT = ("no report: its process died or never began, or it is still in a queue; "
             "the same command goes on with what is missing")


class SweepError(RuntimeError):
    """A job cannot run where its launcher put it; the message says what must be shared."""


class Sweep:
    """The reports of one sweep's jobs, in `folder`; travels to the jobs' processes."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.planned: list[list[str]] = []

    def plan(self, overrides: list[list[str]]) -> None:
        """None, after the folder is there for reports of jobs with these overrides."""
        self.folder.mkdir(parents=True)
        self.planned = overrides

    def begin(self, root: Path) -> None:
        """None, where this process runs the checkout `root` in which the sweep was started, and sees its files.

        Raises SweepError elsewhere.
        """
        if not self.folder.is_relative_to(root):
            raise SweepError(f"{platform.node()} runs the code of {root} and not that of {self.folder}: "
                             "give both the same checkout, at the same path")
        if not self.folder.is_dir():
            raise SweepError(f"{platform.node()} does not see {self.folder}: "
                             "put the checkout on a disk that all machines mount at the same path")

    def report(self, number: int, overrides: Sequence[str], problem: str | None) -> None:
        """None, after it is on disk how the job ended; a job that was started again replaces its report."""
        write_atomically(self.folder / f"{number}.json", json.dumps({"overrides": list(overrides), "problem": problem}))

    def end(self, name: str, *, began: bool) -> int:
        """The number of jobs that failed, after they were listed; removes the folder.

        Where nothing `began`, because no configuration could be composed, there is nothing to list.
        """
        reports = {int(path.stem): json.loads(path.read_text(encoding="utf-8")) for path in self.folder.glob("*.json")}
        self.discard()
        for number, overrides in enumerate(self.planned if began or reports else []):
            reports.setdefault(number, {"overrides": overrides, "problem": NO_REPORT})
        failed = [report for _, report in sorted(reports.items()) if report["problem"]]
        if reports:
            print(f"{name}: {len(reports) - len(failed)} of {len(reports)} jobs done", flush=True)
        for report in failed:
            print(f"{name}: failed: {' '.join(report['overrides'])}: {report['problem']}", file=sys.stderr, flush=True)
        return len(failed)

    def discard(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


class PlannedJobs(Callback):
    """Hydra's callback that tells the process's sweep which jobs it has."""

    # Hydra makes the object and keeps it to itself.
    sweep: ClassVar[Sweep | None] = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        parsed = parser.parse_overrides(list(config.hydra.overrides.task))
        self.sweep.plan([job for batch in BasicSweeper.split_arguments(parsed, None) for job in batch])


def not_installed(error: Exception) -> ConfigError | None:
    """The error with its remedy, where it is Hydra's about a launcher that is not installed."""
    found = re.search(r"Unknown plugin class : '([\w.]+)'", str(error))
    return ConfigError(f"hydra/launcher: {found[1]} is not installed; run `make install`, or install this project with "
                       "its extra `cluster`") if found else None


def job_folder(overrides: Sequence[str], sha256: str) -> str:
    """A legal folder name for a sweep's job: its overrides, made harmless and cut, and 8 digits of its config's hash.

    Overrides that change no result are left out, so that a job finds what it wrote without them.
    """
    overrides = [override for override in overrides if override.partition("=")[0] not in NOT_HASHED]
    slug = re.sub(r"[^A-Za-z0-9.=_-]+", "-", ",".join(overrides)).replace("=", "-").strip("-.")[:SLUG_LENGTH]
    return f"{slug or 'defaults'}-{sha256[:8]}"

"""How long each stage of a run takes: remembered here, expected elsewhere, and what of the whole run is left.

`nexus repro` writes the plan; every `nexus stage` finds its place in it, whoever starts it, and adds its own seconds.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from nexus.canonical import write_atomically
from nexus.config import ROOT
from nexus.progress import duration, followed_by

TIMES = ROOT / ".nexus" / "times"
# Seconds per stage by profile, on 2 cores with the default model: only shown, and only before a stage was run here.
EXPECTED = Path(__file__).with_name("stage_seconds.json")
# For a stage that nobody has timed yet.
UNKNOWN_SECONDS = 60.0


@dataclass
class StageTimes:
    """The stages of one run with their seconds."""

    seconds: dict[str, float] = field(default_factory=dict)
    """The longest time that each stage took here: one that goes on where it stopped takes less."""
    plan: list[str] = field(default_factory=list)
    """The stages of the run that is going on, [] if none is."""
    done: list[str] = field(default_factory=list)
    """Those of the plan that are done."""
    expected: dict[str, float] = field(default_factory=dict)
    """What those that never ran here should take."""

    def left(self, among: Iterable[str] | None = None) -> float:
        """Seconds that the stages of the plan which are not done will take; `among` counts only these of them."""
        waiting = [name for name in self.plan if name not in self.done]
        return sum(self.of(name) for name in (waiting if among is None else set(waiting) & set(among)))

    def of(self, name: str) -> float:
        """Seconds of one stage: as measured here, or as expected, at the pace of this machine and model so far."""
        if name in self.seconds:
            return self.seconds[name]
        return self.expected.get(name, UNKNOWN_SECONDS) * self.pace

    @property
    def pace(self) -> float:
        """How many times as long as expected the stages took that ran here; 1 before the first."""
        known = [name for name in self.seconds if name in self.expected]
        expected = sum(self.expected[name] for name in known)
        return sum(self.seconds[name] for name in known) / expected if expected else 1.0


@cache
def expected_seconds(profile: str, minutes: float) -> Mapping[str, float]:
    """Seconds per stage of a profile; of one that was never timed, `minutes` shared out as in the profile full."""
    tables = json.loads(EXPECTED.read_text(encoding="utf-8"))
    if profile in tables:
        return tables[profile]
    full = tables["full"]
    return {name: seconds * 60 * minutes / sum(full.values()) for name, seconds in full.items()}


def load(run: str) -> StageTimes:
    """What is known about a run's stages; nothing is where no file is, or a damaged one."""
    try:
        return StageTimes(**json.loads(_path(run).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return StageTimes()


def save(run: str, times: StageTimes) -> None:
    path = _path(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(vars(times), indent=1) + "\n")


def begin(run: str, plan: Iterable[str], done: Iterable[str], expected: Mapping[str, float]) -> StageTimes:
    """The times with a new plan, of which `done` needs no work; on disk, for the stages to find."""
    times = load(run)
    times.plan, times.done, times.expected = list(plan), list(done), dict(expected)
    save(run, times)
    return times


def pass_over(run: str, name: str) -> None:
    """None, after a stage of the plan counts as done without having run."""
    times = load(run)
    if name in times.plan and name not in times.done:
        times.done.append(name)
        save(run, times)


def end(run: str) -> StageTimes:
    """The times after a run, without its plan."""
    times = load(run)
    times.plan, times.done = [], []
    save(run, times)
    return times


@contextmanager
def timed(run: str | None, name: str) -> Iterator[None]:
    """The time of the block counts as that of the stage, if it succeeds; progress tells what is left of the plan.

    Nothing is remembered of a stage that was started by hand and names no run.
    """
    if run is None:
        yield
        return
    times, start = load(run), time.monotonic()
    planned = name in times.plan
    if planned:
        place = f"stage {len(times.done) + 1} of {len(times.plan)}"
        print(f"{name}: {place}, about {duration(times.left())} left of the whole run", flush=True)
    with followed_by(times.left(set(times.plan) - {name}) if planned else 0.0):
        yield
    times = load(run)
    times.seconds[name] = round(max(time.monotonic() - start, times.seconds.get(name, 0.0)), 1)
    if planned and name not in times.done:
        times.done.append(name)
    save(run, times)


def shares(times: StageTimes) -> str:
    """Where the time goes, one line per stage, longest first; '' where nothing was timed."""
    if not times.seconds:
        return ""
    total = sum(times.seconds.values())
    lines = [f"Where the time goes, {duration(total)} in all"]
    for name, seconds in sorted(times.seconds.items(), key=lambda item: -item[1]):
        lines.append(f"  {name:<24} {duration(seconds):>12} {100 * seconds / total:>5.1f} %")
    return "\n".join(lines)


def _path(run: str) -> Path:
    return TIMES / f"{run}.json"

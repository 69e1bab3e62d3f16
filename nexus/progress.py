"""Progress with the time left: a live bar on a terminal, now and then a plain line elsewhere."""
from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

PLAIN_SECONDS = 10.0
# What comes behind all that this process does, in seconds: a run has several stages, each a process of its own.
_behind = 0.0


@contextmanager
def followed_by(seconds: float) -> Iterator[None]:
    """Every estimate within the block also tells the time left when as many seconds of other work follow."""
    global _behind
    before, _behind = _behind, seconds
    try:
        yield
    finally:
        _behind = before


def duration(seconds: float) -> str:
    """Seconds as people say them: "45 s", "3 min 20 s", "1 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Meter:
    """Work done of a total, by weight. Work that was done before the start does not distort the estimate."""

    def __init__(self, description: str, total: float, unit: str, done: float = 0.0, clock=time.monotonic):
        self.description, self.total, self.unit, self.done = description, total, unit, done
        self._clock = clock
        self._start, self._before = clock(), done

    def advance(self, weight: float) -> None:
        self.done += weight
        self.show()

    def note(self, text: str) -> None:
        """Say something without moving on."""

    def show(self, last: bool = False) -> None:
        """Tell the reader."""

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    @property
    def seconds_left(self) -> float | None:
        """By the pace since the start; None until something was done."""
        moved = self.done - self._before
        return None if moved <= 0 else self.elapsed * max(0.0, self.total - self.done) / moved

    @property
    def percent(self) -> float:
        return 100.0 * self.done / self.total if self.total else 100.0

    @property
    def left(self) -> str:
        """What is left in words, '' before anything was done."""
        seconds = self.seconds_left
        if seconds is None:
            return ""
        whole = f", {duration(seconds + _behind)} of the whole run" if _behind else ""
        return f"about {duration(seconds)} left{whole}"

    def text(self) -> str:
        amount = f", {decimal(int(self.done))} of {decimal(int(self.total))}" if self.unit == "bytes" else ""
        left = "" if self.done >= self.total else self.left
        return f"{self.percent:.0f} %{amount}, {duration(self.elapsed)}" + (f", {left}" if left else "")


class _Lines(Meter):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._shown = self._clock()
        self._told = self.done

    def note(self, text: str) -> None:
        print(f"{self.description}: {text}", file=sys.stderr, flush=True)

    def show(self, last: bool = False) -> None:
        now = self._clock()
        if last and (self.elapsed < 1 or self.done == self._told) or not last and now - self._shown < PLAIN_SECONDS:
            return
        self._shown, self._told = now, self.done
        print(f"{self.description}: {self.text()}", file=sys.stderr, flush=True)


class _Bar(Meter):
    def __init__(self, *args, bar: Progress, **kwargs):
        super().__init__(*args, **kwargs)
        self._bar = bar
        self._task = bar.add_task(self.description, total=self.total, completed=self.done, detail="")

    def note(self, text: str) -> None:
        self._bar.console.print(f"{self.description}: {text}", markup=False, highlight=False)

    def show(self, last: bool = False) -> None:
        self._bar.update(self._task, completed=self.done, detail="" if last else self.left)


@contextmanager
def progress(description: str, total: float, unit: str = "cells", done: float = 0.0) -> Iterator[Meter]:
    """A Meter that shows itself on standard error; `total` and `done` are sums of weights, for unit "bytes" bytes."""
    console = Console(stderr=True)
    if not console.is_terminal:
        lines = _Lines(description, total, unit, done)
        yield lines
        lines.show(last=True)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.percentage:3.0f} %"),
               TimeElapsedColumn(), TextColumn("{task.fields[detail]}"))
    with Progress(*columns, console=console) as bar:
        meter = _Bar(description, total, unit, done, bar=bar)
        meter.show()
        yield meter
        meter.show(last=True)

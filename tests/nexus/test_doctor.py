"""`nexus doctor`: everything is said, and one broken check does not hide the others."""
from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from nexus import doctor
from nexus.config import compose, validate
from nexus.weights import target_files


def test_a_sound_machine_has_nothing_wrong(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("NEXUS_WEIGHTS", str(tmp_path / "weights"))
    assert doctor.report() == 0
    printed = capsys.readouterr().out
    for word in ("Python", "CPU features", "key rotation kernel", "llama.cpp", "weights qwen2.5-coder-0.5b", "disk"):
        assert word in printed
    assert "not here" in printed and "Nothing is wrong" in printed


def test_a_failing_check_is_a_finding_and_the_others_still_run(capsys, monkeypatch):
    def broken():
        raise RuntimeError("kernels do not compile")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor._disk))
    assert doctor.report() == 1
    printed = capsys.readouterr().out
    assert "kernels do not compile" in printed and "make install" in printed and "disk for project" in printed


def test_a_missing_package_and_a_full_disk_are_wrong(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("no-such-package",))
    full = type(shutil.disk_usage("/"))(10**9, 10**9, 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    monkeypatch.setattr(doctor, "CHECKS", (doctor._python, doctor._disk))
    wrong = {finding.what: finding for finding in doctor.findings() if finding.status == "wrong"}
    assert set(wrong) == {"no-such-package", "disk for project", "disk for weights"}
    assert all(finding.remedy for finding in wrong.values())


@pytest.mark.parametrize("programs, said", [
    (("sed", "ldd"), "none on the PATH (looked for c++, g++, clang++)"), (("clang++",), "without sed"),
    (("g++", "sed", "ldd"), "g++")])
def test_a_compiler_and_what_the_interpreter_asks_it_through(programs, said, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: name if name in programs else None)
    [found] = doctor._compiler()
    assert said in found.detail and (found.status == "ok") == (said == "g++") == (found.remedy == "")


def test_a_weights_folder_below_a_file_is_wrong(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NEXUS_WEIGHTS", str(tmp_path / "file" / "weights"))
    wrong = [finding for finding in doctor._disk() if finding.status == "wrong"]
    assert [finding.what for finding in wrong] == ["disk for weights"]
    assert f"{tmp_path / 'file'} is not a folder" in wrong[0].detail and "NEXUS_WEIGHTS" in wrong[0].remedy


def test_what_a_check_found_before_it_failed_is_kept(capsys, monkeypatch):
    def half():
        yield doctor.Finding("first thing", "note", "found", "look at it")
        raise OSError("the second thing is unreadable")

    monkeypatch.setattr(doctor, "CHECKS", (half, doctor._disk))
    found = doctor.findings()
    assert [(finding.what, finding.status) for finding in found[:2]] == [("first thing", "note"), ("half", "wrong")]
    assert "unreadable" in found[1].detail and found[1].remedy
    assert doctor.report() == 1 and "1 thing is wrong" in capsys.readouterr().out


def test_notes_alone_are_no_failure(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", (lambda: [doctor.Finding("thing", "note", "odd", "look at it")],))
    assert doctor.report() == 0
    printed = capsys.readouterr().out
    assert "look at it" in printed and "Nothing is wrong" in printed


@pytest.mark.parametrize("detail", ["/data/[/old]/weights", "[bold]models[/bold]", "a [link=x]"])
def test_brackets_in_a_path_are_printed_as_they_are(capsys, monkeypatch, detail):
    monkeypatch.setattr(doctor, "CHECKS", (lambda: [doctor.Finding(detail, "wrong", detail, detail)],))
    assert doctor.report() == 1
    assert capsys.readouterr().out.count(detail) == 3


def test_the_scalar_kernel_is_a_note_with_the_reason(monkeypatch):
    kernels = doctor.native.kernels()
    scalar = next(code for code in range(4) if str(kernels.isa_name(code)) == "scalar")

    scalar_only = SimpleNamespace(cpu_features=kernels.cpu_features, isa_name=kernels.isa_name, best_isa=lambda: scalar)
    monkeypatch.setattr(doctor.native, "kernels", lambda: scalar_only)
    found = {finding.what: finding for finding in doctor._kernels()}["key rotation kernel"]
    assert (found.status, found.detail) == ("note", "scalar") and "slower" in found.remedy


@pytest.mark.integration
def test_verified_weights_are_ok(monkeypatch, smollm2):
    monkeypatch.setattr(doctor, "CHECKS", (doctor._weights,))
    found = {finding.what: finding for finding in doctor.findings()}["weights smollm2-135m"]
    assert found.status == "ok" and "verified" in found.detail and str(smollm2.path) in found.detail


@pytest.mark.parametrize("content", [b"GGUF but not the right bytes"])
def test_wrong_weights_are_wrong(monkeypatch, tmp_path, content):
    monkeypatch.setenv("NEXUS_WEIGHTS", str(tmp_path))
    spec = validate(compose(["model=smollm2-135m"])).model
    target_files(spec, tmp_path)[0].write_bytes(content)
    monkeypatch.setattr(doctor, "CHECKS", (doctor._weights,))
    found = {finding.what: finding for finding in doctor.findings()}
    wrong = found["weights smollm2-135m"]
    assert wrong.status == "wrong" and "98362432" in wrong.detail and "make repro MODEL=smollm2-135m" in wrong.remedy
    assert found["weights qwen2.5-coder-0.5b"].status == "note"

"""`nexus doctor`: everything is said, and one broken check does not hide the others."""
from __future__ import annotations

import shutil

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


@pytest.mark.parametrize("content", [b"GGUF but not the right bytes"])
def test_wrong_weights_are_wrong(monkeypatch, tmp_path, content):
    monkeypatch.setenv("NEXUS_WEIGHTS", str(tmp_path))
    spec = validate(compose(["model=smollm2-135m"])).model
    target_files(spec, tmp_path)[0].write_bytes(content)
    monkeypatch.setattr(doctor, "CHECKS", (doctor._weights,))
    found = {finding.what: finding for finding in doctor.findings()}
    assert found["weights smollm2-135m"].status == "wrong" and "98362432" in found["weights smollm2-135m"].detail
    assert found["weights qwen2.5-coder-0.5b"].status == "note"

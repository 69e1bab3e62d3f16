"""The report as an experiment: a run's own page, and the one over all committed runs."""
from __future__ import annotations

import shutil

import pytest

from experiments import report as experiment
from nexus import report
from nexus.config import ROOT, compose, validate

SMOL = "smollm2-135m"


def test_a_full_run_refreshes_both_pages_and_a_quick_one_its_own(tmp_path, monkeypatch):
    written = {}
    monkeypatch.setattr(report, "write", lambda runs, path, about: written.update(
        {path.relative_to(tmp_path).as_posix(): ([run.name for run in runs], about)}) or path)
    monkeypatch.setattr(experiment, "ROOT", tmp_path)
    full = validate(compose([f"model={SMOL}", "profile=full"]))
    quick = validate(compose([f"model={SMOL}", "profile=quick"]))
    for cfg in (full, quick):
        folder = tmp_path / cfg.results_folder / cfg.run_name
        folder.mkdir(parents=True)
        shutil.copy(ROOT / "results" / SMOL / "gating_nogo.json", folder)
    folder = tmp_path / quick.results_folder / quick.run_name
    assert experiment.run(quick, folder).name == report.NAME
    assert sorted(path.name for path in (folder / "tables").iterdir()) == ["verdicts.md", "verdicts.tex"]
    assert written == {f"results/{SMOL}.quick/report.html": ([f"{SMOL}.quick"], f"{SMOL}.quick")}
    written.clear()
    experiment.run(full, tmp_path / full.results_folder / full.run_name)
    assert written == {f"results/{SMOL}/report.html": ([SMOL], SMOL),
                       "results/report.html": ([SMOL], "all committed runs")}
    written.clear()
    # A job of a sweep is no committed run.
    shutil.copytree(tmp_path / full.results_folder / SMOL, tmp_path / "job")
    experiment.run(full, tmp_path / "job")
    assert written == {"job/report.html": (["job"], "job")}


def test_a_run_without_artifacts_is_an_error(tmp_path):
    with pytest.raises(report.ReportError):
        experiment.run(validate(compose([f"model={SMOL}", "profile=quick"])), tmp_path)
    assert list(tmp_path.iterdir()) == []

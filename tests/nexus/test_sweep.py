"""Sweeps: names of folders, and what is said of jobs that report, fail, or leave no word, under every launcher here."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexus.sweep import NO_REPORT, Sweep, SweepError, job_folder
from repository_copy import Copy, copy, pristine  # noqa: F401

SHA = "0123456789" * 6
# In the fake experiments of the copy.
DIES = 'if cfg.dkl_sweep.n_cases == 5: import os, signal, time; time.sleep(2); os.kill(os.getpid(), signal.SIGKILL)\n'


@given(st.lists(st.text(), max_size=8), st.lists(st.text(), max_size=8))
def test_folders_are_legal_and_unique(overrides: list[str], others: list[str]):
    folder = job_folder(overrides, SHA)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,120}", folder)
    assert folder != job_folder(others, "9876543210" * 6)


def test_overrides_that_change_no_result_lead_to_the_same_folder():
    told = job_folder(["seed=1", "force=true", "share_machine=true"], SHA)
    assert told == job_folder(["seed=1"], SHA) == "seed-1-01234567"


def planned(folder: Path, *overrides: list[str]) -> Sweep:
    sweep = Sweep(folder / "sweep")
    sweep.plan(list(overrides))
    return sweep


def test_jobs_are_counted_and_failures_listed_in_order_with_those_that_left_no_report(tmp_path: Path, capsys):
    sweep = planned(tmp_path, ["a=1"], ["a=2", "b=x"], ["a=3"])
    sweep.report(2, ["a=3"], "RuntimeError: broken")
    sweep.report(0, ["a=1"], "first try")
    sweep.report(0, ["a=1"], None)
    assert sweep.end("toy", began=True) == 2
    told = capsys.readouterr()
    assert told.out == "toy: 1 of 3 jobs done\n"
    assert told.err == f"toy: failed: a=2 b=x: {NO_REPORT}\ntoy: failed: a=3: RuntimeError: broken\n"
    assert not sweep.folder.exists()


def test_nothing_is_listed_where_no_job_could_begin(tmp_path: Path, capsys):
    assert planned(tmp_path, ["a=1"]).end("toy", began=False) == 0
    assert Sweep(tmp_path / "single").end("toy", began=True) == 0
    assert capsys.readouterr() == ("", "")


def test_a_job_refuses_another_checkout_and_a_disk_that_it_does_not_see(tmp_path: Path):
    sweep = planned(tmp_path, ["a=1"])
    sweep.begin(tmp_path)
    with pytest.raises(SweepError, match="give both the same checkout"):
        sweep.begin(tmp_path / "other")
    sweep.discard()
    with pytest.raises(SweepError, match="all machines mount"):
        sweep.begin(tmp_path)


def sweep_of(copy: Copy, launcher: str, cases: str, *overrides: str):
    """A sweep of a fake experiment, which dies with 5 cases and fails with 13."""
    path = copy.path / "experiments" / "dkl_sweep.py"
    path.write_text(path.read_text().replace("def run(cfg, out):\n", f"def run(cfg, out):\n    {DIES}", 1))
    return copy.python("experiments.dkl_sweep", "--multirun", "profile=quick", f"hydra/launcher={launcher}",
                       f"dkl_sweep.n_cases={cases}", *overrides)


def written(copy: Copy) -> list[int]:
    """n_cases of the artifacts in the folders of the sweep, one per folder."""
    found = copy.path.glob("results/multirun/dkl_sweep/*/dkl_sweep.json")
    return sorted(json.loads(path.read_text())["n_cases"] for path in found)


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_jobs_in_other_processes_report_fail_and_die(copy: Copy, launcher: str):
    swept = sweep_of(copy, launcher, "3,13,x,4")
    assert swept.returncode == 1
    assert "2 of 4 jobs done" in swept.stdout and "UserWarning" not in swept.stderr
    failed = [line for line in swept.stderr.splitlines() if line.startswith("dkl_sweep: failed")]
    assert len(failed) == 2, swept.stderr
    assert "n_cases=13" in failed[0] and failed[0].endswith("RuntimeError: thirteen is refused")
    assert "n_cases=x" in failed[1] and "'x' is not allowed" in failed[1]
    assert written(copy) == [3, 4]
    assert copy.git("status", "--porcelain") == " M experiments/dkl_sweep.py\n"

    copy.calls()
    died = sweep_of(copy, launcher, "3,5,4")
    assert died.returncode == 1
    failed = [line for line in died.stderr.splitlines() if line.startswith("dkl_sweep: failed")]
    assert len(failed) == 1 and "n_cases=5" in failed[0] and failed[0].endswith(NO_REPORT), died.stderr
    assert "2 of 3 jobs done" in died.stdout and "Traceback" not in died.stderr
    assert written(copy) == [3, 4] and not any(line.startswith(("dkl_sweep 3", "dkl_sweep 4")) for line in copy.calls())


@pytest.mark.parametrize("choices, message", [
    (["hydra/launcher=rya"], "hydra/launcher: no choice 'rya'; did you mean ray?; there are joblib, ray, submitit, "
                             "submitit_local, submitit_slurm"),
    (["hydra.launcher._target_=hydra_plugins.none.Launcher"],
     "hydra/launcher: hydra_plugins.none.Launcher is not installed; run `make install`, or install this project with "
     "its extra `cluster`")])
def test_a_launcher_that_is_not_there_is_one_line(copy: Copy, choices: list[str], message: str):
    refused = copy.python("experiments.dkl_sweep", "--multirun", "profile=quick", "seed=1,2", *choices)
    assert refused.returncode == 1 and refused.stdout == ""
    assert refused.stderr == f"dkl_sweep: {message}\n"

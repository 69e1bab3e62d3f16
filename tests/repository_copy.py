"""A copy of this repository, by default one in which experiments take no time: the harness around them is tested."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
# In the order of dvc.yaml; DVC may run those that do not need each other in another one.
EXPERIMENTS = tuple(YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"])
FAKE = '''
import json, time
from pathlib import Path
from nexus.artifact import path_of
from nexus.config import ROOT
from nexus.lockfile import stages
from nexus.pipeline import experiment_main, write_metrics

NAME = Path(__file__).stem
METRICS = {
    "dkl_sweep": {"bare.query.0": {"dkl_nats": 0.5}},
    "splice_cost": {"row.contiguous.1536.200": {"total_us": 175.0, "engine_shift_per_total": None}},
}
TEXTS = {".svg": "<svg xmlns='http://www.w3.org/2000/svg'/>", ".png": "png", ".md": "table\\n", ".jsonl": "{}\\n"}

def run(cfg, out):
    with (ROOT / "calls.log").open("a") as log:
        log.write(f"{NAME} {cfg.run_name} {cfg.dkl_sweep.n_cases} {cfg.force}\\n")
    if cfg.dkl_sweep.n_cases == 13:
        raise RuntimeError("thirteen is refused")
    while NAME == "splice_cost" and (ROOT / "wait").exists():
        time.sleep(0.05)
    mine = next(stage for stage in stages(cfg) if stage.name == f"{NAME}@{cfg.run_name}")
    for name in mine.outs:
        path = out / Path(name).relative_to(Path(cfg.results_folder) / cfg.run_name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent.name == "metrics":
            write_metrics(out, NAME, METRICS.get(NAME, {"cells": 1}))
        else:
            path.write_text(TEXTS.get(path.suffix) or json.dumps({"n_cases": cfg.dkl_sweep.n_cases}))
    artifact = path_of(NAME, out)
    return artifact if artifact.is_file() else out / NAME

if __name__ == "__main__":
    experiment_main(NAME, run)
'''


class Copy:
    """A git repository at `path`; commands run with this Python and see no other checkout."""

    def __init__(self, path: Path):
        self.path = path
        self.output = ""
        identity = {f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        self.environment = os.environ | identity | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "DVC_NO_ANALYTICS": "1",
            "NEXUS_DEBUG": "0",
            "HYDRA_FULL_ERROR": "0",
        }

    def duplicate(self, path: Path) -> "Copy":
        shutil.copytree(self.path, path, symlinks=True)
        duplicate = Copy(path)
        duplicate.output = self.output
        return duplicate

    def python(self, module: str, *arguments: str, cwd: Path | None = None,
               timeout: float = 300) -> subprocess.CompletedProcess:
        return self._run([sys.executable, "-m", module, *arguments], cwd, timeout)

    def git(self, *arguments: str) -> str:
        done = self._run(["git", *arguments], None)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "state")

    def calls(self) -> list[str]:
        """What was measured since the last call of this method, one line per experiment run."""
        log = self.path / "calls.log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def start(self, module: str, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=self.path, env=self.environment,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def _run(self, command: list[str], cwd: Path | None, timeout: float = 300) -> subprocess.CompletedProcess:
        environment = self.environment | {"PYTHONPATH": str(self.path)}
        return subprocess.run(command, cwd=cwd or self.path, env=environment, capture_output=True, text=True,
                              timeout=timeout)


def make_copy(path: Path, real: bool = False) -> Copy:
    """This checkout as a git repository at `path`; `real` keeps its experiments and its weights."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True, check=True).stdout
    for name in listed.rstrip("\0").split("\0"):
        source, parts = ROOT / name, Path(name).parts
        measured = parts[0] == "results" and len(parts) > 2
        if source.is_file() and not measured and name != "dvc.lock":
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, path / name)
    if not real:
        for name in EXPERIMENTS:
            (path / "experiments" / f"{name}.py").write_text(FAKE)
        # The copy fetches no weights.
        with (path / "nexus" / "weights.py").open("a") as weights:
            weights.write("\n\ndef ensure(spec):\n    return Weights(Path(spec.path or '.'), 'ab' * 32, 1, 'path')\n")
        with (path / ".gitignore").open("a") as ignore:
            ignore.write("\ncalls.log\nwait\n")
    copy = Copy(path)
    copy.git("init", "--quiet")
    copy.commit()
    return copy


@pytest.fixture(scope="session")
def pristine(tmp_path_factory) -> Copy:
    """Never changed: tests copy it."""
    return make_copy(tmp_path_factory.mktemp("pristine") / "repository")


@pytest.fixture(scope="session")
def measured_once(pristine: Copy, tmp_path_factory) -> Copy:
    """After `nexus repro` of the defaults, which is the profile full; never changed: tests copy it."""
    measured = pristine.duplicate(tmp_path_factory.mktemp("measured") / "repository")
    done = measured.python("nexus", "repro", "--profile", "full")
    assert done.returncode == 0, done.stderr
    measured.output = done.stdout
    return measured


@pytest.fixture
def copy(pristine: Copy, tmp_path: Path) -> Copy:
    return pristine.duplicate(tmp_path / "repository")


@pytest.fixture
def measured(measured_once: Copy, tmp_path: Path) -> Copy:
    return measured_once.duplicate(tmp_path / "repository")

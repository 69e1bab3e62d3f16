"""Sweeps on clusters that are started here: Ray of two nodes, one of which dies, and SLURM of one node.

Nothing of these clusters outlives its test: each runs in processes and folders of its own.
"""
from __future__ import annotations

import getpass
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from nexus import artifact
from nexus.config import compose, validate
from repository_copy import Copy, copy, make_copy, pristine  # noqa: F401

PATIENCE = 400.0
SMALL = ("model=smollm2-135m", "profile=quick", "runtime.n_threads=1", "dkl_sweep.offsets=[0,64]",
         "dkl_sweep.n_cases=1", "dkl_sweep.arms=[bare]")
SLURM = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(what: str, reached: Callable[[], object], process: subprocess.Popen | None = None) -> None:
    """None, once it is reached; fails after PATIENCE, or where the process ends before."""
    end = time.monotonic() + PATIENCE
    while not reached():
        assert process is None or process.poll() is None, f"ended with {process.returncode} before {what}"
        assert time.monotonic() < end, f"waited {PATIENCE:.0f} s in vain for {what}"
        time.sleep(0.1)


def family(process: subprocess.Popen) -> list[psutil.Process]:
    """The process and all that it started."""
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(process: subprocess.Popen) -> None:
    """None, after the process and all that it started are gone, as if their machine had lost its power."""
    doomed = family(process)
    for member in doomed:
        with suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGKILL)
    process.wait()
    psutil.wait_procs(doomed, timeout=10)


@contextmanager
def running(command: list[str], log: Path, **options) -> Iterator[subprocess.Popen]:
    """The command's process, which is killed at the end with all that it started."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, **options)
    try:
        yield process
    finally:
        kill(process)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets, which may have 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="nexus-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def real_copy(tmp_path_factory) -> Copy:
    return make_copy(tmp_path_factory.mktemp("cluster") / "repository", real=True)


def artifacts(copy: Copy) -> list[Path]:
    """The artifacts of the sweep, each of which is whole."""
    folder = copy.path / "results" / "multirun" / "dkl_sweep"
    assert not list(folder.rglob(".*.tmp"))
    return sorted(folder.glob("*/dkl_sweep.json"))


def check_whole(copy: Copy, *seeds: int) -> None:
    """One valid artifact per seed, with the samples and the configuration of that seed."""
    found = artifacts(copy)
    read = {artifact.read(path)["config"]["seed"]: path for path in found}
    assert sorted(read) == sorted(seeds) and len(found) == len(seeds)
    for seed, path in read.items():
        cfg = validate(compose([*SMALL, f"seed={seed}"]))
        content = artifact.read(path)
        assert content["config_sha256"] == cfg.sha256("dkl_sweep")
        assert {(row["offset"], row["arm"]) for row in content["rows"]} == {
            (offset, arm) for offset in cfg.dkl_sweep.offsets for arm in cfg.dkl_sweep.arms}
        assert len(artifact.read_samples(path)) == len(
            {json.dumps(sample, sort_keys=True) for sample in artifact.read_samples(path)})


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="two nodes on one machine need two loopback addresses: Linux only")
def test_ray_cluster_loses_a_node_and_every_cell_has_one_artifact(real_copy: Copy, short_folder: Path, tmp_path: Path):
    ray, port = str(Path(sys.executable).parent / "ray"), free_port()
    environment = real_copy.environment | {
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": f"127.0.0.1:{port}",
        # The cluster's own; without these, what a user has set up for another cluster decides.
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # A node that refuses three connections, a second apart, counts as dead; one that is slow does not.
        "RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
    common = [ray, "start", "--block", "--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats"]
    head = [*common, "--head", "--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={short_folder}",
            "--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
    other = [*common, "--node-ip-address=127.0.0.2", f"--address=127.0.0.1:{port}"]
    options = {"env": environment, "cwd": tmp_path}
    with ExitStack() as started:
        first = started.enter_context(running(head, tmp_path / "head.log", **options))
        wait_for("the first node", lambda: "Ray runtime started" in (tmp_path / "head.log").read_text(), first)
        second = started.enter_context(running(other, tmp_path / "other.log", **options))
        wait_for("the second node", lambda: "Ray runtime started" in (tmp_path / "other.log").read_text(), second)
        sweep = started.enter_context(running(
            [sys.executable, "-m", "experiments.dkl_sweep", "--multirun", "hydra/launcher=ray", "seed=1,2,3", *SMALL],
            tmp_path / "sweep.log", env=environment, cwd=real_copy.path))

        def job_of(node: subprocess.Popen) -> bool:
            names = []
            for process in family(node):
                with suppress(psutil.NoSuchProcess):
                    names += process.cmdline()[:1]
            return any("_run_job" in name for name in names)

        def cells() -> int:
            return len(list((real_copy.path / ".nexus" / "cells").glob("*.json")))

        wait_for("a job on the second node", lambda: job_of(second), sweep)
        begun = cells()
        wait_for("a measured cell", lambda: cells() > begun, sweep)
        assert job_of(second)
        kill(second)
        wait_for("the end of the sweep", lambda: sweep.poll() is not None)
    told = (tmp_path / "sweep.log").read_text()
    assert sweep.returncode == 0, told
    assert "dkl_sweep: 3 of 3 jobs done" in told and "UserWarning" not in told
    check_whole(real_copy, 1, 2, 3)


def munge(folder: Path, started: ExitStack) -> Path:
    """The socket of an authentication service of its own."""
    key, where = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    command = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={where}",
               f"--pid-file={folder / 'munge.pid'}", f"--seed-file={folder / 'munge.seed'}",
               f"--log-file={folder / 'munge.log'}"]
    process = started.enter_context(running(command, folder / "munge.out"))
    wait_for("munged", where.exists, process)
    return where


@pytest.fixture
def slurm(short_folder: Path) -> Iterator[Path]:
    """The configuration of a SLURM whose only node is this machine."""
    folder, host = short_folder, platform.node().split(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    conf = folder / "slurm.conf"
    with ExitStack() as started:
        where = munge(folder, started)
        conf.write_text("\n".join((
            "ClusterName=nexus", f"SlurmctldHost={host}(127.0.0.1)", f"SlurmUser={getpass.getuser()}",
            f"SlurmdUser={getpass.getuser()}", f"SlurmctldPort={free_port()}", f"SlurmdPort={free_port()}",
            "AuthType=auth/munge", "CredType=cred/munge", f"AuthInfo=socket={where}",
            f"StateSaveLocation={folder / 'state'}", f"SlurmdSpoolDir={folder / 'spool'}",
            f"SlurmctldPidFile={folder / 'slurmctld.pid'}", f"SlurmdPidFile={folder / 'slurmd.pid'}",
            # No control groups, which need rights that a container does not have.
            "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "JobAcctGatherType=jobacct_gather/none",
            "SelectType=select/cons_tres", "SelectTypeParameters=CR_CPU", "MpiDefault=none", "ReturnToService=2",
            f"NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory=2048 State=UNKNOWN",
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP", "")))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        environment = os.environ | {"SLURM_CONF": str(conf)}
        for name in ("slurmctld", "slurmd"):
            started.enter_context(running([name, "-D", "-f", str(conf)], folder / f"{name}.log", env=environment))

        def idle() -> bool:
            asked = subprocess.run(["sinfo", "--noheader", "--format=%T"], env=environment, capture_output=True,
                                   text=True)
            return asked.stdout.strip() == "idle"

        wait_for(f"an idle node; see {folder}", idle)
        yield conf


@pytest.mark.slow
@pytest.mark.skipif(any(shutil.which(name) is None for name in SLURM),
                    reason="SLURM is not here (Debian/Ubuntu: apt-get install slurmctld slurmd slurm-client munge)")
def test_slurm_runs_a_sweep_and_lists_what_failed(copy: Copy, slurm: Path):
    copy.environment["SLURM_CONF"] = str(slurm)
    swept = copy.python("experiments.dkl_sweep", "--multirun", "hydra/launcher=submitit", "profile=quick",
                        "dkl_sweep.n_cases=3,13,4", "runtime.n_threads=1", "hydra.launcher.partition=main",
                        "hydra.launcher.mem_gb=1")
    assert swept.returncode == 1, swept.stderr
    assert "2 of 3 jobs done" in swept.stdout
    failed = [line for line in swept.stderr.splitlines() if line.startswith("dkl_sweep: failed")]
    assert len(failed) == 1 and failed[0].endswith("RuntimeError: thirteen is refused")
    assert sorted(json.loads(path.read_text())["n_cases"] for path in artifacts(copy)) == [3, 4]
    assert len(copy.calls()) == 3

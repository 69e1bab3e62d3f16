"""Where a result comes from: commit, machine and versions, and nothing that identifies a person, a host or a moment."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PROJECT_ROOT = Path(__file__).resolve().parents[1]

# What a run itself writes: a second run of clean code must not call itself dirty.
# params.yaml describes another run while that run is at work.
OUTPUTS = ("results", "dvc.lock", "params.yaml")

PACKAGES = (
    "cppyy",
    "cppyy-cling",
    "dvc",
    "gguf",
    "hydra-core",
    "jsonschema",
    "llama-cpp-python",
    "matplotlib",
    "numpy",
    "omegaconf",
    "pandas",
    "scipy",
)


def collect(*, isa: str | None = None, threads: int | None = None, llama_cpp: str | None = None) -> dict[str, Any]:
    """The provenance object of an artifact (spec §5); memory in 10⁹ bytes; None for what cannot be found out.

    isa         the kernels' instruction set, such as "avx512"
    threads     the number of threads that measured
    llama_cpp   the llama.cpp build
    """
    commit, dirty = git_state(PROJECT_ROOT)
    return {
        "git_commit": commit,
        "git_dirty": dirty,
        "cpu": cpu_model(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(logical=True),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "isa": isa,
        "threads": threads,
        "llama_cpp": llama_cpp,
        "versions": {package: version(package) for package in PACKAGES},
    }


def cpu_model() -> str:
    """The CPU's model name as the system tells it; its architecture where it tells none."""
    try:
        if platform.system() == "Darwin":
            return _run(["sysctl", "-n", "machdep.cpu.brand_string"])
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except (OSError, subprocess.SubprocessError):
        pass
    # Linux on arm lists no model name.
    return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    """The installed version of a Python package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """The commit checked out at `root`, and whether files outside `OUTPUTS` differ from it or are new.

    (None, None) where git is missing, `root` is not the top of a repository, or nothing is committed yet.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    # A copy installed inside somebody else's repository must not claim that repository's commit.
    if top is None or Path(top).resolve() != root.resolve():
        return None, None
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None, None
    changes = _git(root, "status", "--porcelain", "--", ".", *(f":(exclude,top){output}" for output in OUTPUTS))
    return commit, None if changes is None else bool(changes)


def source_digest(paths: Iterable[Path | str]) -> str:
    """SHA-256 (64 hex digits) over the content of the files, to invalidate cached cells when the code changes.

    The order of `paths` and the place of the checkout do not matter, a file's place inside it does.
    Raises ValueError without files, OSError for one that cannot be read.
    """
    contents = {_name_in_project(Path(path)): hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths}
    if not contents:
        raise ValueError("paths is empty: name the source files that the result depends on")
    listing = "".join(f"{digest} {name}\n" for name, digest in sorted(contents.items()))
    return hashlib.sha256(listing.encode()).hexdigest()


def _name_in_project(path: Path) -> str:
    path = path.resolve()
    return path.relative_to(PROJECT_ROOT).as_posix() if path.is_relative_to(PROJECT_ROOT) else path.name


def _git(root: Path, *arguments: str) -> str | None:
    # Inside a git hook GIT_DIR and friends name another repository than `root`.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return _run(["git", "--no-optional-locks", "-C", str(root), *arguments], environment)
    except (OSError, subprocess.SubprocessError):
        return None


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=30)
    return finished.stdout.strip()

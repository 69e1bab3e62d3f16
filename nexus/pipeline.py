"""How one experiment is started: by hand with Hydra overrides, as a sweep, or as a DVC stage. All call the same `run`.

    def run(cfg: Config, out: Path) -> Path: ...       # measures, and returns the main file that it wrote into `out`

    if __name__ == "__main__":
        experiment_main("dkl_sweep", run)
"""

import errno
import hashlib
import importlib
import json
import os
import re
import secrets
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from nexus import artifact, provenance
from nexus.canonical import write_atomically
from nexus.cells import Cell, CellStore, Samples, run_cells
from nexus.config import CONF, NEEDS, ROOT, ROUTING, Config, ConfigError, as_config_error, from_hydra, load_params
from nexus.locks import exclusive, measuring
from nexus.progress import progress
from nexus.sources import code_sha256, sampling_sha256
from nexus.sweep import PlannedJobs, Sweep, job_folder, not_installed

Run = Callable[[Config, Path], Path]
LOCKS = ROOT / ".nexus" / "locks"
DONE = ROOT / ".nexus" / "done"
SWEEPS = ROOT / ".nexus" / "sweeps"
# What to do about an error of the operating system.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REMEDIES = {
    errno.ENOENT: "check the path",
    errno.EISDIR: "a folder is where a file is needed; move it or give another path",
    errno.ENAMETOOLONG: "give a shorter path",
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file is where a folder is needed; move it or give another path"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "change its permissions or give another path"),
    **dict.fromkeys(FULL, "free some disk and run again"),
}
# These sample every system; which one is the default is told by their rows alone.
ALL_SYSTEMS = ("calibration", "routing_accuracy_n250", "routing_generalisation")


class ResultsError(RuntimeError):
    """Results cannot be written; the message names the folder and the remedy."""


def experiment_main(name: str, run: Run) -> None:
    """None, after `run` wrote `<results_folder>/<run_name>`, or one folder per job with `--multirun`.

    An error is one line per problem and exit status 1; NEXUS_DEBUG=1 shows the traceback. In a sweep the other jobs
    go on, and the failed ones are listed at the end.
    """
    debug = debugging()
    # Hydra then hands its errors over instead of printing them with a traceback.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Ray would otherwise tell its makers that it was used.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Paths in the configuration are relative to the repository, wherever the command is given.
    os.chdir(ROOT)
    # What runs as `__main__` travels to the processes of jobs by value; what has a module of its own, by name.
    run = importlib.import_module(f"experiments.{name}").run
    PlannedJobs.sweep = sweep = Sweep(SWEEPS / secrets.token_hex(6))
    raised: list[Exception] = []

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def task(composed: DictConfig) -> None:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            _job(name, run, sweep, composed, debug)
            return
        try:
            cfg = from_hydra(composed)
            execute(name, run, cfg, ROOT / cfg.results_folder / cfg.run_name)
        except Exception as error:
            # Kept from Hydra, which would announce it in lines of its own.
            raised.append(error)

    composing = False
    try:
        task()
    except Exception as problem:
        error = not_installed(problem) or problem
        composing = type(error).__module__.startswith(("hydra.", "omegaconf.", "nexus.config"))
        raised.append(as_config_error(error) if composing else error)
    except KeyboardInterrupt:
        sweep.discard()
        print(f"{name}: stopped; the same command goes on where it stopped", file=sys.stderr)
        sys.exit(130)
    failed = sweep.end(name, began=not composing)
    if raised and debug:
        raise raised[0]
    for error in raised:
        print(*(f"{name}: {line}" for line in one_line(error).splitlines()), sep="\n", file=sys.stderr)
    if raised or failed:
        sys.exit(1)


def stage(name: str, params: Path, run_name: str | None = None) -> Path:
    """The main file of the experiment, measured with the configuration in `params`: what the DVC stages call.

    `run_name` is the run that DVC expects outputs of. Raises ConfigError if `params` is not a valid configuration, is
    another run's, or if there is no such experiment; LockedError while another process writes the same results.
    """
    cfg = load_params(params)
    if run_name is not None and run_name != cfg.run_name:
        raise ConfigError(
            f"{params}: run_name: {cfg.run_name!r} is not the run {run_name!r} that this stage was started for; "
            "it was changed meanwhile: run again"
        )
    files = (ROOT / "experiments").glob("*.py")
    known = sorted(path.stem for path in files if re.search(r"^def run\(", path.read_text("utf-8"), re.M))
    if name not in known:
        raise ConfigError(f"stage: {name!r} is not an experiment; there are {', '.join(known)}")
    run = importlib.import_module(f"experiments.{name}").run
    return execute(name, run, cfg, ROOT / cfg.results_folder / cfg.run_name)


def execute(name: str, run: Run, cfg: Config, out: Path) -> Path:
    """The main file (or folder) that `run` wrote into `out`.

    Not run where an earlier run here, of the same configuration, code and texts, left this very artifact, unless
    `cfg.force`. Raises LockedError while another process writes there, ConfigError for a text that cannot be read,
    ResultsError before any work where `out` cannot be written, or when the disk is full, and whatever `run` raises.
    """
    label = re.sub(r"[^\w.-]+", "-", os.path.relpath(out, ROOT)).strip("-")[-150:] + f".{name}"
    with exclusive(LOCKS, label):
        record = DONE / f"{label}.json"
        inputs = {
            "config": cfg.sha256(name),
            "code": code_sha256(f"experiments.{name}"),
            "texts": [_text_sha256(cfg, path) for path in cfg.texts(name)],
            "llama_cpp": provenance.version("llama-cpp-python"),
            "cpu": provenance.cpu_model(),
            "models": _models(name, cfg),
            "files": [_file_sha256(path) if path.is_file() else None for path in _others(name, cfg, out)],
        }
        path = artifact.path_of(name, out)
        if not cfg.force and _is_current(record, inputs, path):
            print(f"{name}: {_shown(path)} is complete for this configuration and code; force=true measures it again")
            return path
        _make_writable(out)
        _remove_partials(name, out)
        record.unlink(missing_ok=True)
        try:
            path = run(cfg, out)
            if path.is_file():
                record.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(record, json.dumps(inputs | {"artifact": _file_sha256(path)}))
        except OSError as error:
            # While a file is written, no error names it.
            if error.errno not in FULL or error.filename is not None:
                raise
            raise ResultsError(f"{out}: a result cannot be written ({error.strerror}); {REMEDIES[error.errno]}, which "
                               "goes on where it stopped") from error
    return path


def cell_inputs(name: str, cfg: Config, model_sha256: str) -> dict[str, Any]:
    """What all cells of the experiment depend on: configuration, weights, texts, llama.cpp and the code that samples."""
    config = cfg.resolved(name)
    if name in ALL_SYSTEMS:
        del config["routing"]["system"]
    return {
        "experiment": name,
        "config": config,
        "model_sha256": model_sha256,
        "texts": [_file_sha256(ROOT / path) for path in cfg.texts(name)],
        # Another build computes other bits.
        "llama_cpp": provenance.version("llama-cpp-python"),
        "code": sampling_sha256(f"experiments.{name}"),
    }


def timed_cell_inputs(name: str, cfg: Config, model_sha256: str) -> dict[str, Any]:
    """`cell_inputs` of an experiment that takes times: a time belongs to the machine, too."""
    return cell_inputs(name, cfg, model_sha256) | {"cpu": provenance.cpu_model()}


def measure_cells(cfg: Config, cells: Sequence[Cell], measure: Callable[[Cell], Samples], description: str) -> Samples:
    """The samples of all cells, one after the other; cells measured earlier are not measured again, unless `cfg.force`.

    `description` stands at the bar of progress. Raises CellStoreError, ValueError (see `run_cells`), and what `measure`
    raises; LockedError where cells take times and others measure on this machine, or others take times, unless
    `cfg.share_machine`.
    """
    # See timed_cell_inputs.
    timed = any("cpu" in cell.inputs for cell in cells)
    with ExitStack() as held:

        def measure_held(cell: Cell) -> Samples:
            nonlocal holding
            # Not before there is something to measure.
            if not holding:
                held.enter_context(measuring(cell.inputs.get("experiment", description), alone=timed))
                holding = True
            return measure(cell)

        holding = cfg.share_machine
        per_cell = run_cells(cells, measure_held, store=CellStore(), progress=progress, anew=cfg.force,
                             description=description)
    return [sample for samples in per_cell for sample in samples]


def write_results(
    name: str,
    cfg: Config,
    out: Path,
    *,
    tuple_: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    samples: Samples,
    metrics: Mapping[str, Any],
    isa: str,
    threads: int | None = None,
) -> Path:
    """Path of the artifact (`artifact.path_of`), after it, its samples and the metrics are written.

    tuple_     the model under test, `model_tuple.tuple_of`
    rows       of the artifact, and the `samples` that they summarise (`artifact.write`)
    metrics    the headline numbers (`write_metrics`)
    isa        the kernels' instruction set
    threads    the number of threads that measured; those of `cfg.runtime` without it

    Raises ArtifactError for what the artifact's form refuses, ValueError for metrics that are not finite.
    """
    path = artifact.path_of(name, out)
    path.parent.mkdir(parents=True, exist_ok=True)
    origin = provenance.collect(isa=isa, threads=threads or cfg.runtime.n_threads)
    artifact.write(path, experiment=name, tuple_=tuple_, config=cfg.resolved(name), rows=rows, samples=samples,
                   provenance=origin)
    write_metrics(out, name, metrics)
    return path


def write_metrics(out: Path, name: str, numbers: Mapping[str, Any]) -> Path:
    """`<out>/metrics/<name>.json`, after the headline numbers are in it, for `dvc metrics show` and summaries.

    `numbers` are numbers, or mappings of them, by name with the unit in it; what was not measured (None) is left out.
    Raises ValueError for NaN and infinities.
    """
    path = out / "metrics" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(_numeric(numbers), indent=1, allow_nan=False) + "\n")
    return path


def debugging() -> bool:
    """Whether tracebacks are wanted instead of one line: NEXUS_DEBUG=1, or Hydra's own HYDRA_FULL_ERROR=1."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in ("NEXUS_DEBUG", "HYDRA_FULL_ERROR"))


def one_line(error: BaseException) -> str:
    """The error's message; several problems of a configuration keep a line each. Its type where that is needed."""
    text = str(error).strip()
    if not text:
        return type(error).__name__
    # These are written for people; anything else needs its type to make sense.
    ours = type(error).__module__.startswith(("nexus.", "experiments."))
    if isinstance(error, RecursionError):
        return "an input is nested too deeply; make it flatter"
    if not ours and isinstance(error, OSError) and error.filename is not None and error.errno in REMEDIES:
        # Of a file that was to be replaced, not of what was to replace it.
        return f"{error.filename2 or error.filename}: {error.strerror}; {REMEDIES[error.errno]}"
    return text if ours else f"{type(error).__name__}: {text.splitlines()[0]}"


def _job(name: str, run: Run, sweep: Sweep, composed: DictConfig, debug: bool) -> None:
    """One job of a sweep, in whichever process the launcher chose."""
    os.chdir(ROOT)
    sweep.begin(ROOT)
    job = HydraConfig.get()
    overrides = list(job.overrides.task)
    # An error must not leave the task: one launcher stops at it, another forgets all but the first.
    try:
        cfg = from_hydra(composed)
        out = ROOT / cfg.results_folder / "multirun" / name / job_folder(overrides, cfg.sha256(name))
        execute(name, run, cfg, out)
        problem = None
    except Exception as error:
        if debug:
            traceback.print_exc()
        problem = one_line(error)
    sweep.report(job.job.num, overrides, problem)


def _make_writable(out: Path) -> None:
    """None, after the folder is there and took a file. Raises ResultsError: hours of work would end with it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as probe:
            probe.write(b"probe")
    except OSError as error:
        raise ResultsError(f"results_folder: {out} cannot be written ({error.strerror}); make it writable or choose "
                           "another folder") from None


def _remove_partials(name: str, out: Path) -> None:
    """Removes the files that a killed process of this experiment had begun to write."""
    path = artifact.path_of(name, out)
    for folder, pattern in ((path.parent, f".{path.stem}.*.tmp"), (out / "metrics", f".{name}.*.tmp"),
                            (out / name, ".*.tmp")):
        for partial in folder.glob(pattern):
            partial.unlink(missing_ok=True)


def _text_sha256(cfg: Config, path: str) -> str:
    try:
        return _file_sha256(ROOT / path)
    except OSError as error:
        raise ConfigError(f"{cfg.key_of(path)}: {ROOT / path}: {error.strerror}; give the path of a file") from None


def _is_current(record: Path, inputs: Mapping[str, Any], path: Path) -> bool:
    try:
        return json.loads(record.read_text(encoding="utf-8")) == {**inputs, "artifact": _file_sha256(path)}
    except (FileNotFoundError, ValueError):
        return False


def _models(name: str, cfg: Config) -> list[str]:
    """Hashes of the files that describe the other models an experiment covers."""
    return [_file_sha256(CONF / "model" / f"{model}.yaml") for model in cfg.layouts.also] if name == "layouts" else []


def _others(name: str, cfg: Config, out: Path) -> list[Path]:
    """Further files that the results depend on: listing, thresholds, adapters, locks of servers."""
    if name == "registry":
        locks = [server.requirements for server in cfg.registry.servers if server.requirements]
        return [ROOT / path for path in (locks if cfg.registry.path is None else [cfg.registry.path])]
    if name == "constrain_cost":
        return [out / "registry.json", ROOT / (cfg.registry.path or "")]
    if name == "spliced_choice":
        return [out / "registry.json", ROOT / (cfg.registry.path or ""), out / "calibrated_repair.json"]
    if not set(ROUTING) <= set(NEEDS.get(name, ())):
        return []
    embedders = [CONF / "embedder" / f"{embedder}.yaml" for embedder in (cfg.embedder.name, cfg.routing.tuned_embedder)]
    thresholds = [] if name == "calibration" else [out / "calibration.json"]
    return [out / "registry.json", ROOT / (cfg.registry.path or ""), *thresholds, ROOT / cfg.routing.cross_encoder,
            *embedders]


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _numeric(numbers: Mapping[str, Any]) -> dict[str, Any]:
    nested = {key: _numeric(item) if isinstance(item, Mapping) else item for key, item in numbers.items()}
    return {key: item for key, item in nested.items() if item is not None and item != {}}


def _shown(path: Path) -> str:
    return os.path.relpath(path, ROOT) if path.is_relative_to(ROOT) else str(path)

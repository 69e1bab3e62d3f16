"""How experiments are started: skipping, locking, sweeps, and errors in one line."""

import errno
import json
import os
from pathlib import Path

import pytest

from nexus import artifact, cells, pipeline, stats
from nexus.cells import Cell
from nexus.config import ROOT, Config, ConfigError, compose, params_text, validate
from nexus.locks import LockedError
from nexus.pipeline import ResultsError, execute, measure_cells, one_line, stage, write_metrics, write_results
from repository_copy import Copy, copy, pristine  # noqa: F401

NAME = "dkl_sweep"


class Counted:
    """An experiment that counts its runs."""

    def __init__(self):
        self.runs = 0

    def __call__(self, cfg: Config, out: Path) -> Path:
        self.runs += 1
        path = out / f"{NAME}.json"
        path.write_text(json.dumps({"run": self.runs}))
        return path


@pytest.fixture
def places(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(pipeline, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(pipeline, "DONE", tmp_path / "done")
    return tmp_path


def test_complete_artifact_is_skipped(places: Path, capsys):
    run, cfg, out = Counted(), validate(compose()), places / "out"
    assert execute(NAME, run, cfg, out) == execute(NAME, run, cfg, out) == out / f"{NAME}.json"
    assert run.runs == 1
    assert "is complete" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["config", "code", "text", "artifact", "gone", "force", "record"])
def test_changed_artifact_is_measured_again(places: Path, monkeypatch, change: str):
    tools = places / "tools.json"
    tools.write_text("[]")
    overrides = [f"workload.tools={tools}"]
    run, out = Counted(), places / "out"
    path = execute(NAME, run, validate(compose(overrides)), out)
    match change:
        case "config":
            overrides.append("seed=1")
        case "code":
            monkeypatch.setattr(pipeline, "code_sha256", lambda module: "0" * 64)
        case "text":
            tools.write_text("[1]")
        case "artifact":
            path.write_text("{}")
        case "gone":
            path.unlink()
        case "force":
            overrides.append("force=true")
        case "record":
            for record in (places / "done").iterdir():
                record.write_text("{")
    execute(NAME, run, validate(compose(overrides)), out)
    assert run.runs == 2


def test_cells_depend_on_the_build_of_llama_cpp_and_timed_ones_on_the_cpu(monkeypatch):
    cfg = validate(compose())
    before, timed = (inputs(NAME, cfg, "ab") for inputs in (pipeline.cell_inputs, pipeline.timed_cell_inputs))
    assert timed == before | {"cpu": pipeline.provenance.cpu_model()}
    monkeypatch.setattr(pipeline.provenance, "version", lambda package: f"another {package}")
    assert pipeline.cell_inputs(NAME, cfg, "ab") == before | {"llama_cpp": "another llama-cpp-python"} != before


def test_other_experiments_config_does_not_measure_again(places: Path):
    run, out = Counted(), places / "out"
    execute(NAME, run, validate(compose()), out)
    execute(NAME, run, validate(compose(["splice_cost.repetitions=7"])), out)
    assert run.runs == 1


def test_failed_run_is_not_complete(places: Path):
    def broken(cfg, out):
        raise RuntimeError("stopped")

    run, cfg, out = Counted(), validate(compose()), places / "out"
    execute(NAME, run, cfg, out)
    with pytest.raises(RuntimeError):
        execute(NAME, broken, validate(compose(["seed=1"])), out)
    execute(NAME, run, cfg, out)
    assert run.runs == 2


def test_a_full_disk_names_the_folder_and_other_errors_pass(places: Path):
    def fails(error):
        def run(cfg, out):
            raise error
        return lambda: execute(NAME, run, validate(compose()), places / "out")

    with pytest.raises(ResultsError, match=r"/out: a result cannot be written \(No space left\); free some disk and run"):
        fails(OSError(errno.ENOSPC, "No space left"))()
    for error in (OSError(errno.ENOSPC, "No space left", "elsewhere"), OSError(errno.EIO, "Input/output error")):
        with pytest.raises(OSError) as passed:
            fails(error)()
        assert passed.value is error


def test_what_a_killed_process_had_begun_to_write_is_removed(places: Path):
    out = places / "out"
    begun = [out / f".{NAME}.json.12ab.tmp", out / f".{NAME}.samples.jsonl.12ab.tmp",
             out / "metrics" / f".{NAME}.json.12ab.tmp"]
    others = [out / ".splice_cost.json.12ab.tmp", out / ".mine"]
    for path in (*begun, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    execute(NAME, Counted(), validate(compose()), out)
    assert [path.exists() for path in (*begun, *others)] == [False] * 3 + [True] * 2


def test_two_writers_are_refused(places: Path):
    cfg = validate(compose())

    def nested(cfg, out):
        with pytest.raises(LockedError):
            execute(NAME, Counted(), cfg, out)
        return Counted()(cfg, out)

    assert execute(NAME, nested, cfg, places / "out").is_file()


def test_stage_refuses_another_run_and_an_unknown_experiment(tmp_path: Path):
    params = tmp_path / "params.yaml"
    params.write_text(params_text())
    with pytest.raises(ConfigError, match="is not the run 'other'"):
        stage("figures", params, "other")
    known = [path.stem for path in (ROOT / "experiments").glob("*.py") if "\ndef run(" in path.read_text("utf-8")]
    for name in ("figure", "compiled", "rows"):
        with pytest.raises(ConfigError) as error:
            stage(name, params)
        assert str(error.value) == f"stage: {name!r} is not an experiment; there are {', '.join(sorted(known))}"


def test_cells_are_measured_once_unless_forced_and_their_samples_joined_in_order(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(pipeline, "CellStore", lambda: cells.CellStore(tmp_path))
    planned, seen = [Cell({"x": x}, 1.0, f"cell {x}") for x in (2, 1)], []

    def measure(cell: Cell) -> list[dict]:
        seen.append(cell.inputs["x"])
        return [{"x": cell.inputs["x"], "i": i} for i in range(2)]

    expected = [{"x": x, "i": i} for x in (2, 1) for i in range(2)]
    assert measure_cells(validate(compose()), planned, measure, "cells") == expected
    assert measure_cells(validate(compose()), planned, measure, "cells") == expected and seen == [2, 1]
    assert measure_cells(validate(compose(["force=true"])), planned, measure, "cells") == expected
    assert seen == [2, 1, 2, 1]


def test_cells_with_times_are_not_measured_beside_others_unless_told(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(pipeline, "CellStore", lambda: cells.CellStore(tmp_path / "cells"))
    monkeypatch.setenv("NEXUS_LOCKS", str(tmp_path / "locks"))
    cfg, shared = validate(compose()), validate(compose(["share_machine=true"]))
    timed = [Cell(pipeline.timed_cell_inputs(name, cfg, "ab"), 1.0, name) for name in ("slb_latency", "splice_cost")]
    untimed = [Cell(pipeline.cell_inputs(NAME, cfg, "ab"), 1.0, NAME)]
    assert shared.sha256("slb_latency") == cfg.sha256("slb_latency")

    def beside(others: list[Cell], chosen: Config):
        """Measures `others` while a cell is measured."""
        def measure(cell: Cell) -> list[dict]:
            measure_cells(chosen, others, lambda other: [{"x": 1}], "others")
            return [{"x": 2}]
        return measure

    with pytest.raises(LockedError, match="splice_cost takes times, and slb_latency .* share_machine=true"):
        measure_cells(cfg, timed[:1], beside(timed[1:], cfg), "first")
    with pytest.raises(LockedError, match="slb_latency .* takes times on this machine, which dkl_sweep would disturb"):
        measure_cells(cfg, timed[:1], beside(untimed, cfg), "first")
    assert measure_cells(cfg, timed[:1], beside(timed[1:], shared), "first") == [{"x": 2}]
    # What is in the store needs no machine.
    assert measure_cells(cfg, untimed, beside(timed, cfg), "first") == [{"x": 2}]


def test_results_are_artifact_samples_and_metrics(tmp_path: Path):
    cfg = validate(compose())
    row = {"offset": 0, "arm": "bare", "probe": "query", "dkl_nats": stats.mean([0.1, 0.2], 0),
           "top1": stats.wilson(2, 2)}
    given = {"tuple_": {"model": "m", "model_sha256": "0" * 64, "embedder": None, "llama_cpp": "1"}, "rows": [row],
             "samples": [{"dkl_nats": 0.1}, {"dkl_nats": 0.2}], "metrics": {"bare": 0.15}, "isa": "avx2"}
    path = write_results(NAME, cfg, tmp_path, **given)
    read = artifact.read(path)
    assert path == tmp_path / f"{NAME}.json" and artifact.read_samples(path) == given["samples"]
    assert (read["config"], read["tuple"]) == (cfg.resolved(NAME), given["tuple_"])
    assert (read["provenance"]["isa"], read["provenance"]["threads"]) == ("avx2", cfg.runtime.n_threads)
    assert json.loads((tmp_path / "metrics" / f"{NAME}.json").read_text()) == given["metrics"]
    other = artifact.read(write_results(NAME, cfg, tmp_path, **given, threads=3))
    assert other["provenance"]["threads"] == 3


def test_metrics_have_numeric_leaves(tmp_path: Path):
    path = write_metrics(tmp_path, NAME, {"a": {"b": 1.5, "c": None}, "d": 2, "e": {"f": None}})
    assert path == tmp_path / "metrics" / "dkl_sweep.json"
    assert json.loads(path.read_text()) == {"a": {"b": 1.5}, "d": 2}
    with pytest.raises(ValueError):
        write_metrics(tmp_path, NAME, {"a": float("nan")})
    assert json.loads(path.read_text())["d"] == 2


def test_error_lines():
    assert one_line(ConfigError("seed: wrong")) == "seed: wrong"
    assert one_line(OSError("disk\nfull")) == "OSError: disk"
    assert one_line(FileNotFoundError(errno.ENOENT, "No such file", "/x")) == "/x: No such file; check the path"
    assert one_line(IsADirectoryError(errno.EISDIR, "Is a directory", "/.x.tmp", None, "/x")).startswith("/x: Is a dir")
    assert one_line(OSError(errno.EIO, "Input/output error", "/x")) == "OSError: [Errno 5] Input/output error: '/x'"
    assert one_line(RecursionError("depth")) == "an input is nested too deeply; make it flatter"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_an_error_of_the_measurement_is_one_line(copy: Copy):
    failed = copy.python("experiments.dkl_sweep", "dkl_sweep.n_cases=13", "profile=quick")
    assert failed.returncode == 1
    assert failed.stderr.splitlines() == ["dkl_sweep: RuntimeError: thirteen is refused"]


def test_debugging_shows_the_traceback(copy: Copy):
    copy.environment["NEXUS_DEBUG"] = "1"
    failed = copy.python("experiments.dkl_sweep", "profile=quick", "dkl_sweep.n_cases=13")
    assert failed.returncode == 1
    assert "Traceback" in failed.stderr and "thirteen is refused" in failed.stderr


def test_plain_run_writes_the_runs_folder_from_anywhere_and_nothing_else(copy: Copy, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = copy.python("experiments.dkl_sweep", "profile=quick", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    cfg = validate(compose(["profile=quick"]))
    assert (copy.path / "results" / cfg.run_name / "dkl_sweep.json").is_file()
    assert list(elsewhere.iterdir()) == []
    assert copy.git("status", "--porcelain") == ""
    assert not {"outputs", "multirun"} & set(os.listdir(copy.path))


def test_sweep_goes_on_and_lists_what_failed(copy: Copy):
    long = "x" * 400
    swept = copy.python("experiments.dkl_sweep", "--multirun", "profile=quick", "dkl_sweep.n_cases=3,13,x,4",
                        f"workload.system_prompt='a/b [c], d=e {long}'")
    assert swept.returncode == 1
    assert "2 of 4 jobs done" in swept.stdout
    failed = swept.stderr.splitlines()
    assert len(failed) == 2
    assert "n_cases=13" in failed[0] and failed[0].endswith("RuntimeError: thirteen is refused")
    assert "n_cases=x" in failed[1] and "'x' is not allowed" in failed[1]
    written = sorted(copy.path.glob("results/multirun/dkl_sweep/*/dkl_sweep.json"))
    assert sorted(json.loads(path.read_text())["n_cases"] for path in written) == [3, 4]
    assert copy.git("status", "--porcelain") == ""

    copy.calls()
    again = copy.python("experiments.dkl_sweep", "-m", "profile=quick", "dkl_sweep.n_cases=3,4",
                        f"workload.system_prompt='a/b [c], d=e {long}'")
    assert again.returncode == 0, again.stderr
    assert copy.calls() == []

"""The pipeline as its users meet it: DVC's own commands, being killed, being run twice, and a user's own case."""
from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from experiments.toy_models import write_toy_mamba
from nexus import artifact
from nexus.config import ROOT, compose, params_text, validate
from nexus.lockfile import stages
from nexus.weights import ensure
from repository_copy import EXPERIMENTS, Copy, copy, make_copy, pristine  # noqa: F401

QWEN, SMOL = "qwen2.5-coder-0.5b", "smollm2-135m"
# What draws from artifacts: whatever is there of it.
DRAWING = [name for name in ("figures", "tables", "report") if name in EXPERIMENTS]
# Stages that read no other's results.
FEW = ("dkl_sweep", "splice_cost", "gating_nogo", "slb_latency", "block_allocator")
TINY = ("model=smollm2-135m", "profile=quick", "runtime.n_threads=1", "dkl_sweep.offsets=[0,32]", "dkl_sweep.n_cases=2",
        "gating_nogo.n_past=[32]", "gating_nogo.n_cases=2")
TOOLS = {"find_recipe": "Search recipes by an ingredient.", "add_recipe": "Store a new recipe.",
         "rate_recipe": "Give a recipe stars.", "list_pantry": "Tell what food is in the pantry.",
         "set_timer": "Start a kitchen timer.", "cancel_timer": "Stop a kitchen timer.",
         "convert_unit": "Convert grams, cups and ounces.", "plan_week": "Propose dinners for a week."}
QUERIES = (("What can I cook with leeks?", "find_recipe"), ("Keep this soup for later", "add_recipe"),
           ("Five stars for the curry", "rate_recipe"), ("Is there any rice left?", "list_pantry"),
           ("Twelve minutes for the eggs", "set_timer"), ("Never mind the egg alarm", "cancel_timer"),
           ("How many grams are three ounces?", "convert_unit"), ("Dinners from Monday to Friday", "plan_week"),
           ("Something with chickpeas", "find_recipe"), ("Play some jazz", None), ("Who won the match?", None))


def whole(folder: Path) -> None:
    """Every file below `folder` that has a name to be read by is complete."""
    for path in folder.rglob("*"):
        if path.name.startswith(".") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8") if path.suffix not in (".png", ".pdf") else "whole"
        if path.suffix == ".json":
            json.loads(text)
        elif path.suffix == ".jsonl":
            assert text.endswith("\n") and all(json.loads(line) is not None for line in text.splitlines())
        elif path.suffix == ".svg":
            assert text.rstrip().endswith(("</svg>", "/>"))
        assert text


def keep_stages(repository: Copy, names: tuple[str, ...]) -> None:
    """Let the repository's pipeline have these stages only: every one costs seconds, whatever it does."""
    pipeline, yaml = repository.path / "dvc.yaml", YAML()
    content = yaml.load(pipeline)
    content["stages"] = {name: stage for name, stage in content["stages"].items() if name in names}
    with pipeline.open("w") as file:
        yaml.dump(content, file)


def kill(run: subprocess.Popen) -> None:
    """SIGKILL to a command started by `Copy.start` and to all that it started; it may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def test_every_stage_says_what_it_is_for():
    described = {name: stage.get("desc") for name, stage in YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"].items()}
    assert all(described.values()) and len(set(described.values())) == len(described)


def test_dvc_shows_experiments_and_differences_of_metrics_and_plots(copy: Copy):
    keep_stages(copy, ("dkl_sweep",))
    pipeline, yaml = copy.path / "dvc.yaml", YAML()
    content = yaml.load(pipeline)
    # A drawing of one stage alone, in place of the real ones, which draw from many.
    content["stages"]["dkl_sweep"]["plots"] = [{"${results_folder}/${item.run}/figures/figure1.svg": {"cache": False}}]
    with pipeline.open("w") as file:
        yaml.dump(content, file)
    copy.commit()
    done = copy.python("dvc", "exp", "run", "--name", "small", "-S", f"model={SMOL}", "-S", "dkl_sweep.n_cases=5")
    assert done.returncode == 0, done.stderr
    assert copy.calls() == [f"dkl_sweep {SMOL} 5 False"]
    shown = copy.python("dvc", "exp", "show", "--json").stdout
    assert '"small"' in shown and f"results/{SMOL}/metrics/dkl_sweep.json" in shown
    changed = json.loads(copy.python("dvc", "params", "diff", "--json").stdout)["params.yaml"]
    assert changed["dkl_sweep.n_cases"] == {"old": 12, "new": 5, "diff": -7} and changed["model.name"]["new"] == SMOL

    copy.commit()
    metrics = copy.path / f"results/{SMOL}/metrics/dkl_sweep.json"
    metrics.write_text(metrics.read_text().replace("0.5", "0.75"))
    differences = json.loads(copy.python("dvc", "metrics", "diff", "--json").stdout)
    assert differences == {f"results/{SMOL}/metrics/dkl_sweep.json": {
        "bare.query.0.dkl_nats": {"old": 0.5, "new": 0.75, "diff": 0.25}}}
    assert copy.python("dvc", "plots", "diff").returncode == 0
    assert "figure1.svg" in (copy.path / "dvc_plots" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("override, said", [("nosuch=1", "nosuch"), ("dkl_sweep.n_kases=3", "n_kases"),
                                            ("model=nosuch", "nosuch"),
                                            ("+dkl_sweep.n_kases=3", "dkl_sweep.n_kases: unknown key; did you mean")])
def test_unknown_keys_and_choices_are_errors_before_anything_is_measured(copy: Copy, override: str, said: str):
    refused = copy.python("dvc", "exp", "run", "-S", override)
    assert refused.returncode != 0 and said in refused.stdout + refused.stderr
    assert copy.calls() == []


def test_killed_at_any_point_it_goes_on_and_nothing_is_half_written(copy: Copy):
    keep_stages(copy, FEW)
    copy.commit()
    choices = ("repro", "--model", SMOL, "--profile", "full")
    log, seed = copy.path / "calls.log", random.Random(20261130)
    kills = sorted(seed.sample(range(1, len(FEW) + 3), 3))
    for n_calls in kills:
        run = copy.start("nexus", *choices)
        deadline = time.monotonic() + 240
        while run.poll() is None and not (log.exists() and len(log.read_text().splitlines()) >= n_calls):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        # At its stage, at its end, between two of them: DVC and its child together, which the child outlives otherwise.
        time.sleep(seed.uniform(0, 1))
        kill(run)
        whole(copy.path / "results")
    done = copy.python("nexus", *choices)
    assert done.returncode == 0, done.stderr
    cfg = validate(compose([f"model={SMOL}"]))
    results = [out for stage in stages(cfg) if stage.name.partition("@")[0] in FEW for out in stage.outs]
    assert all((copy.path / out).is_file() for out in results)
    assert (copy.path / "params.yaml").read_text() == params_text()
    # DVC removes what a stage made before it runs it again: real stages make it anew from their cells.
    assert {line.split()[0] for line in copy.calls()} == set(FEW)
    assert "nothing to do" in copy.python("nexus", *choices).stdout


def test_figures_tables_and_report_load_no_model(pristine: Copy, tmp_path: Path):
    real = make_copy(tmp_path / "repository", real=True)
    shutil.copytree(ROOT / "results" / SMOL, real.path / "results" / SMOL, dirs_exist_ok=True)
    (real.path / "params.yaml").write_text(params_text([f"model={SMOL}"]))
    program = (
        "import sys\n"
        "from nexus.cli import main\n"
        f"status = main(['stage', sys.argv[1], '--run', {SMOL!r}])\n"
        "native = [name for name in ('cppyy', 'llama_cpp', 'llguidance') if name in sys.modules]\n"
        "maps = '/proc/self/maps'\n"
        "lines = open(maps).read() if sys.platform == 'linux' else ''\n"
        "native += [name for name in ('libllama', 'libggml', 'libcppyy', 'libCling') if name in lines]\n"
        "print('native:', native)\n"
        "sys.exit(status)\n"
    )
    for name in DRAWING:
        done = subprocess.run([sys.executable, "-c", program, name], cwd=real.path, capture_output=True, text=True,
                              env=real.environment | {"PYTHONPATH": str(real.path)}, timeout=240)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("native: []\n")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Copy:
    """A real repository with a params file of few and small cells."""
    real = make_copy(tmp_path_factory.mktemp("tiny") / "repository", real=True)
    (real.path / "tiny.yaml").write_text(params_text(TINY))
    return real


@pytest.mark.integration
@pytest.mark.slow
def test_forced_twice_and_killed_meanwhile_gives_the_same_bytes(tiny: Copy):
    results = tiny.path / "results" / f"{SMOL}.quick"
    command = ("nexus", "stage", "dkl_sweep", "--params", "tiny.yaml", "--run", results.name)

    def written() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(results.glob("dkl_sweep.*"))}

    done = tiny.python(*command)
    assert done.returncode == 0, done.stderr
    first, cells = written(), tiny.path / ".nexus" / "cells"
    assert len(first) == 2 and all(first.values())
    for name in ("cells", "done"):
        shutil.rmtree(tiny.path / ".nexus" / name)
    seed = random.Random(7)
    for _ in range(3):
        before = len(list(cells.glob("*.json"))) if cells.is_dir() else 0
        run = tiny.start(*command)
        deadline = time.monotonic() + 240
        while run.poll() is None and not (cells.is_dir() and len(list(cells.glob("*.json"))) > before):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(seed.uniform(0, 0.3))
        kill(run)
        whole(results)
        assert written() in ({}, first)
    again = tiny.python(*command)
    assert again.returncode == 0, again.stderr
    assert written() == first
    assert "already measured" in again.stderr or "is complete" in again.stdout
    forced = (tiny.path / "tiny.yaml").read_text().replace("force: false", "force: true")
    (tiny.path / "forced.yaml").write_text(forced)
    done = tiny.python(*command[:4], "forced.yaml", *command[5:])
    assert done.returncode == 0 and "already measured" not in done.stderr
    assert written() == first


@pytest.fixture(scope="module")
def small(tiny: Copy, tmp_path_factory) -> Copy:
    """A real repository with few stages and the smallest sizes that mean anything, and a user's files beside it."""
    few = tiny.duplicate(tmp_path_factory.mktemp("small") / "repository")
    keep_stages(few, ("dkl_sweep", "registry", "calibration", "routing_accuracy_n250", "constrain_cost", *DRAWING))
    quick = few.path / "conf" / "profile" / "quick.yaml"
    text = quick.read_text().replace("offsets: [0, 64, 256]\n  n_cases: 3", "offsets: [0, 32]\n  n_cases: 2")
    assert text != quick.read_text()
    quick.write_text(text.replace("systems: [slb, hybrid, slb-tuned+gate, linear-tuned]", "systems: [slb, bm25]"))
    config = few.path / "conf" / "config.yaml"
    config.write_text(config.read_text().replace("  n_threads: 2\n", "  n_threads: 1\n"))
    few.commit()
    user = few.path.parent / "user's files"
    user.mkdir()
    tools = [{"name": name, "description": text, "inputSchema": {"type": "object", "properties": {
        "what": {"type": "string"}}}} for name, text in TOOLS.items()]
    (user / "my tools.json").write_text(json.dumps({"tools": tools}))
    (user / "queries.jsonl").write_text("".join(json.dumps({"query": query, "tool": tool}) + "\n"
                                                for query, tool in QUERIES))
    weights = ensure(validate(compose([f"model={SMOL}"])).model).path
    (user / "My Model.gguf").symlink_to(weights)
    write_toy_mamba(user / "recurrent.gguf")
    return few


def own(repository: Copy, model: str) -> tuple[subprocess.CompletedProcess, Path]:
    """How `nexus repro` of the user's files ended, and the run's folder."""
    user = repository.path.parent / "user's files"
    done = repository.python("nexus", "repro", "--model", str(user / model), "--profile", "quick", "--registry",
                             str(user / "my tools.json"), "--queries", str(user / "queries.jsonl"), timeout=1500)
    name = re.search(r"^(own-[\w.-]+): ", done.stdout, re.M)
    assert name, done.stdout + done.stderr
    return done, repository.path / "results" / name[1]


@pytest.mark.integration
@pytest.mark.slow
def test_own_model_registry_and_queries_are_measured_and_then_there_is_nothing_to_do(small: Copy):
    done, out = own(small, "My Model.gguf")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"own-My-Model-my-tools-queries-[0-9a-f]{8}\.quick", out.name)
    whole(out)
    sweep = artifact.read(out / "dkl_sweep.json")
    assert sweep["tuple"]["model"] == "local-My-Model"
    tools = {sample["tool"] for sample in artifact.read_samples(out / "dkl_sweep.json")}
    assert tools == {"find_recipe", "add_recipe"}
    routed = artifact.read(out / "routing_accuracy_n250.json")["rows"]
    assert {row["n_tools"] for row in routed} == {8}
    assert {row["system"] for row in routed} == {"slb", "bm25", "concat_all", "rag_mcp"}
    chosen = {sample["chosen"] for sample in artifact.read_samples(out / "routing_accuracy_n250.json")}
    assert chosen - {None} and chosen - {None} <= {f"None/{name}" for name in TOOLS}
    assert {row["n_compiled"] for row in artifact.read(out / "constrain_cost.json")["rows"] if row["impl"] == "nexus"
            } == {8}
    skipped = json.loads((out / "skipped.json").read_text(encoding="utf-8"))
    assert "sidecar_accuracy" in skipped and "dkl_sweep" not in skipped
    assert all(f"  {name}: {reason}" in done.stdout for name, reason in skipped.items())
    assert "Where the time goes" in done.stdout and "of the whole run" in done.stdout
    # It leaves what git and DVC know alone.
    assert small.git("status", "--porcelain") == "" and not (small.path / "dvc.lock").exists()
    before = {path: path.stat().st_mtime_ns for path in (*out.glob("*.json"), *out.glob("metrics/*.json"))}
    again, _ = own(small, "My Model.gguf")
    assert again.returncode == 0 and "nothing to do" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.integration
@pytest.mark.slow
def test_a_recurrent_model_is_routed_for_and_not_spliced(small: Copy):
    done, out = own(small, "recurrent.gguf")
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = json.loads((out / "skipped.json").read_text(encoding="utf-8"))
    for name in ("dkl_sweep", "constrain_cost"):
        assert "mamba keeps recurrent state" in skipped[name] and not artifact.path_of(name, out).exists()
    routed = artifact.read(out / "routing_accuracy_n250.json")["rows"]
    assert {row["system"] for row in routed} == {"slb", "bm25"}
    assert f"dkl_sweep: skipped: {skipped['dkl_sweep']}" in done.stdout
    if "report" in DRAWING:
        assert "mamba keeps recurrent state" in (out / "report.html").read_text(encoding="utf-8")

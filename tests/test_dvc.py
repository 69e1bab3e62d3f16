"""The pipeline around the experiments: what is run, what is skipped, and what is refused."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from nexus import artifact
from nexus.config import CONF, ROOT, Config, compose, load_params, params_text, validate
from nexus.lockfile import Stage, stages
from nexus.registry_spec import RegistrySpec
from nexus.sources import sources
from repository_copy import EXPERIMENTS, Copy, copy, measured, measured_once, pristine  # noqa: F401

QWEN, SMOL = "qwen2.5-coder-0.5b", "smollm2-135m"
# Measured by a command of its own (README): an hour of a model's time, for three models.
BY_HAND = {"spliced_choice"}
MEASURING = tuple(name for name in artifact.experiments() if name not in BY_HAND)
# What is written from artifacts, and from every one of them.
WRITTEN, SHOWING_ALL = ("figures", "tables", "report"), ("tables", "report")


def stage_of(cfg: Config, name: str) -> Stage:
    return next(stage for stage in stages(cfg) if stage.name == f"{name}@{cfg.run_name}")


def edges(cfg: Config) -> list[tuple[str, str]]:
    """(stage, stage that reads its results) of a run."""
    plan = stages(cfg)
    return [(first.name, then.name) for first in plan for then in plan if set(first.outs) & set(then.deps)]


def names(calls: list[str]) -> list[str]:
    return [line.split()[0] for line in calls]


def test_params_yaml_is_the_composition():
    assert (ROOT / "params.yaml").read_text(encoding="utf-8") == params_text()
    assert load_params(ROOT / "params.yaml") == validate(compose())


def test_every_experiment_is_a_stage_and_every_measuring_stage_has_its_form():
    files = [path for path in (ROOT / "experiments").glob("*.py") if "\ndef run(" in path.read_text(encoding="utf-8")]
    assert {path.stem for path in files} == set(EXPERIMENTS) | BY_HAND
    assert set(EXPERIMENTS) - set(MEASURING) == {*WRITTEN, "registry"}
    assert set(MEASURING) < set(EXPERIMENTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_stage_depends_on_every_source_file_that_it_uses(name: str):
    stage = stage_of(validate(compose()), name)
    code = {path for path in stage.deps if path.endswith((".py", ".hpp", ".h", ".css", ".schema.json"))}
    assert code == set(sources(f"experiments.{name}"))


@pytest.mark.parametrize("name", MEASURING)
def test_measuring_stage_depends_on_the_texts_that_it_reads_and_writes_artifact_samples_and_metrics(name: str):
    cfg = validate(compose())
    stage = stage_of(cfg, name)
    assert {path for path in stage.deps if path.endswith(".jsonl")} <= set(cfg.texts(name)) <= set(stage.deps)
    folder = Path(cfg.results_folder, cfg.run_name)
    made = artifact.path_of(name, folder)
    assert set(stage.outs) == {str(path) for path in (made, made.with_suffix(".samples.jsonl"),
                                                      folder / "metrics" / f"{name}.json")}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_stage_depends_on_the_artifacts_that_it_reads_and_on_no_other(name: str):
    cfg = validate(compose())
    folder = f"{cfg.results_folder}/{cfg.run_name}/"

    def path(experiment: str) -> str:
        return str(artifact.path_of(experiment, Path(folder)))

    source = (ROOT / "experiments" / f"{name}.py").read_text(encoding="utf-8")
    read = {path(found) for found in re.findall(r'stored\(cfg, out, "(\w+)"\)', source)}
    # Table I and the report show whatever a run has.
    read |= {path(found) for found in MEASURING if name in SHOWING_ALL}
    # These read the listing, and thresholds through `routing_setup.thresholds_of`.
    routed = {"calibration": ("registry",), "routing_accuracy_n250": ("registry", "calibration"),
              "routing_generalisation": ("registry", "calibration"), "sidecar_accuracy": ("registry", "calibration"),
              "constrain_cost": ("registry",)}.get(name, ())
    deps = set(stage_of(cfg, name).deps)
    assert {path for path in deps if path.startswith(folder)} == read | {path(found) for found in routed}
    assert bool(read) == (name in WRITTEN)
    assert ("results/published.json" in deps) == (name in WRITTEN)


def test_layouts_depends_on_the_other_models_that_it_covers():
    cfg = validate(compose())
    also = {f"conf/model/{name}.yaml" for name in cfg.layouts.also}
    assert also == {path for path in stage_of(cfg, "layouts").deps if path.startswith("conf/")}


@pytest.mark.parametrize("name", MEASURING)
def test_stage_depends_on_every_parameter_that_its_results_state(name: str):
    cfg = validate(compose())
    stage = stage_of(cfg, name)
    for key, value in cfg.resolved(name).items():
        if key == "model":
            assert {f"model.{part}" for part in value} <= stage.params.keys()
        elif key == "workload":
            # The files are dependencies; where they lie is not what was measured.
            assert stage.params["workload.system_prompt"] == value["system_prompt"]
        elif key == "registry":
            # DVC locks what the file says, without the defaults of what it leaves out.
            assert RegistrySpec.model_validate(stage.params[key]).model_dump(mode="json") == value
        else:
            assert stage.params[key] == value


def test_no_output_but_the_listing_is_cached_and_none_is_outside_the_runs_folder():
    listing = "${results_folder}/${item.run}/registry.json"
    for definition in YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"].values():
        for kind in ("outs", "metrics", "plots"):
            for item in definition.get(kind, []):
                if item == listing:
                    continue
                ((path, options),) = item.items()
                assert path.startswith("${results_folder}/${item.run}/")
                assert options == {"cache": False}


@pytest.mark.parametrize("profile", sorted(path.stem for path in (CONF / "profile").glob("*.yaml")))
def test_git_ignores_every_profile_but_full(profile: str):
    cfg = validate(compose([f"profile={profile}"]))
    checked = subprocess.run(["git", "check-ignore", "-q", f"results/{cfg.run_name}/dkl_sweep.json"], cwd=ROOT)
    assert checked.returncode == (1 if profile == "full" else 0)


def test_dvc_reads_the_pipeline(copy: Copy):
    dag = copy.python("dvc", "dag", "--dot").stdout
    assert edges(validate(compose()))
    assert all(f'"{first}" -> "{then}"' in dag for first, then in edges(validate(compose())))
    assert all(f'"{name}@{QWEN}"' in dag for name in EXPERIMENTS)


def test_first_run_is_real_and_the_second_does_nothing(measured: Copy):
    cfg, calls = validate(compose()), measured.calls()
    assert sorted(calls) == sorted(f"{name} {QWEN} {cfg.dkl_sweep.n_cases} False" for name in EXPERIMENTS)
    order = [f"{name}@{QWEN}" for name in names(calls)]
    assert all(order.index(first) < order.index(then) for first, then in edges(cfg))
    assert "0.5000" in measured.output and f"results/{QWEN}/figures/figure1.svg" in measured.output
    start = time.monotonic()
    second = measured.python("nexus", "repro", "--profile", "full")
    assert "nothing to do" in second.stdout and measured.calls() == []
    assert time.monotonic() - start < 5


def test_changed_result_is_made_again(measured: Copy):
    measured.calls()
    (measured.path / f"results/{QWEN}/splice_cost.json").write_text("{}")
    assert measured.python("nexus", "repro", "--profile", "full").returncode == 0
    assert names(measured.calls()) == ["splice_cost"]


def test_first_run_in_a_clean_clone_is_real_although_dvc_has_nothing_to_do(measured: Copy, tmp_path: Path):
    measured.commit()
    clone = Copy(tmp_path / "clone")
    measured.git("clone", "--quiet", str(measured.path), str(clone.path))
    # The listing is other people's text: a clone has to collect it, and misses nothing else.
    # Training is a pipeline of its own, which nothing here has run.
    status = re.sub(r"^experiments/training/.*?(?=^\S|\Z)", "", clone.python("dvc", "status").stdout, flags=re.M | re.S)
    assert {path for _, path in re.findall(r"^\t\t([\w ]+):\s+(\S+)$", status, re.M)} == {
        f"results/{QWEN}/registry.json"}, status
    assert clone.python("nexus", "verify").stdout == "Results match dvc.lock.\n"
    assert clone.python("nexus", "repro", "--profile", "full").returncode == 0
    assert sorted(names(clone.calls())) == sorted(EXPERIMENTS)


def test_other_profile_leaves_no_trace_in_git(measured: Copy):
    measured.commit()
    measured.calls()
    committed = [(measured.path / name).read_bytes() for name in ("dvc.lock", "params.yaml")]
    quick = measured.python("nexus", "repro", "--model", SMOL, "--profile", "quick", "--force")
    assert quick.returncode == 0, quick.stderr
    assert [line.split()[1::2] for line in measured.calls()] == [[f"{SMOL}.quick", "True"]] * len(EXPERIMENTS)
    assert measured.git("status", "--porcelain") == ""
    assert [(measured.path / name).read_bytes() for name in ("dvc.lock", "params.yaml")] == committed
    assert "nothing to do" in measured.python("nexus", "repro", "--model", SMOL, "--profile", "quick").stdout


def test_switching_models_and_back_skips(measured: Copy):
    measured.calls()
    assert measured.python("nexus", "repro", "--model", SMOL, "--profile", "full").returncode == 0
    assert [line.split()[1] for line in measured.calls()] == [SMOL] * len(EXPERIMENTS)
    assert measured.python("dvc", "repro").returncode == 0
    assert measured.calls() == []
    assert "nothing to do" in measured.python("nexus", "repro", "--model", SMOL, "--profile", "full").stdout
    assert measured.python("nexus", "verify").stdout == "Results match dvc.lock.\n"


def test_own_file_is_measured_again_when_its_bytes_change(copy: Copy, tmp_path: Path):
    gguf = tmp_path / "My Model.gguf"
    gguf.touch()
    command = "nexus", "repro", "--model", str(gguf), "--profile", "quick"
    done = copy.python(*command)
    assert done.returncode == 0, done.stderr
    (run,) = {line.split()[1] for line in copy.calls()}
    assert re.fullmatch(r"own-My-Model-[0-9a-f]{8}\.quick", run)
    assert copy.git("status", "--porcelain") == ""
    assert "nothing to do" in copy.python(*command).stdout and copy.calls() == []
    weights = copy.path / "nexus" / "weights.py"
    weights.write_text(weights.read_text().replace("'ab' * 32", "'cd' * 32"))
    assert "nothing to do" not in copy.python(*command).stdout
    assert {"slb_latency", "calibration", "figures", "tables"} <= set(names(copy.calls()))


def test_killed_run_goes_on(copy: Copy):
    (copy.path / "wait").touch()
    run = copy.start("nexus", "repro", "--model", SMOL, "--profile", "full")
    try:
        deadline, log = time.monotonic() + 200, copy.path / "calls.log"
        while not log.exists() or "splice_cost" not in names(log.read_text().splitlines()):
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.05)
        run.kill()
        run.wait()
        # The stage is left over: nobody may write the same results while it lives.
        refused = copy.python("nexus", "repro", "--model", SMOL, "--profile", "full")
        assert refused.returncode == 1 and "is already writing these results" in refused.stderr
    finally:
        os.killpg(run.pid, signal.SIGKILL)
    (copy.path / "wait").unlink()
    copy.calls()
    assert copy.python("nexus", "repro", "--model", SMOL, "--profile", "full").returncode == 0
    assert (copy.path / "params.yaml").read_text() == params_text()
    assert copy.python("nexus", "verify").stdout.splitlines() == [
        f"{name}@{QWEN}: not in dvc.lock; it was never run" for name in EXPERIMENTS
    ]


def test_failed_stage_is_an_error_and_leaves_default_params(copy: Copy):
    (copy.path / "experiments" / "splice_cost.py").write_text("def run(cfg, out):\n    raise OSError('disk is full')\n")
    failed = copy.python("nexus", "repro", "--model", SMOL, "--profile", "full")
    assert failed.returncode == 1
    assert "disk is full" in failed.stderr and "Traceback" not in failed.stderr
    assert (copy.path / "params.yaml").read_text() == params_text()


def test_experiment_reaches_the_code_and_wrong_types_do_not(copy: Copy):
    done = copy.python("dvc", "exp", "run", "-S", f"model={SMOL}", "-S", "dkl_sweep.n_cases=5")
    assert done.returncode == 0, done.stderr
    assert sorted(copy.calls()) == sorted(f"{name} {SMOL} 5 False" for name in EXPERIMENTS)
    shown = copy.python("dvc", "metrics", "show", "--json")
    assert '"dkl_nats": 0.5' in shown.stdout
    plots = copy.python("dvc", "plots", "show")
    assert plots.returncode == 0 and "figure1.svg" in (copy.path / "dvc_plots" / "index.html").read_text()

    wrong = copy.python("dvc", "exp", "run", "-S", "dkl_sweep.n_cases=many")
    assert wrong.returncode != 0 and copy.calls() == []
    assert "dkl_sweep.n_cases: 'many' is not allowed" in wrong.stderr


@pytest.mark.parametrize(
    "before, after, message",
    [
        ("n_seq_max: 64", "n_seq_max: '64'", "runtime.n_seq_max: '64' is not allowed"),
        ("n_seq_max: 64", "n_seq_max: 64.0", "runtime.n_seq_max: 64.0 is not allowed"),
        ("flash_attention: false", "flash_attention: 0", "runtime.flash_attention: 0 is not allowed"),
        ("n_seq_max:", "n_sek_max: 8\n  n_seq_max:", "runtime.n_sek_max: unknown key; did you mean runtime.n_seq_max?"),
        ("seed:", "seeed:", "seed: missing"),
        ("  level: 0.95", "  level: .nan", "statistics.level: nan is not allowed"),
        ("run_name: ", "run_name: other-", "is not the run"),
        ("runtime:", "runtime: [", "params.yaml: "),
    ],
)
def test_stage_refuses_edited_params(tmp_path: Path, capsys, before: str, after: str, message: str):
    from nexus.cli import main

    text = params_text()
    assert before in text
    params = tmp_path / "params.yaml"
    params.write_text(text.replace(before, after, 1))
    assert main(["stage", "figures", "--params", str(params), "--run", QWEN]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize("change", ["result", "input", "parameter", "missing", "command"])
def test_verify_agrees_with_dvc_status(measured: Copy, change: str):
    path = measured.path / f"results/{QWEN}/dkl_sweep.json"
    match change:
        case "result":
            path.write_text("{}")
        case "input":
            with (measured.path / "nexus" / "stats.py").open("a") as file:
                file.write("\n")
        case "parameter":
            config = measured.path / "conf" / "config.yaml"
            config.write_text(config.read_text().replace("level: 0.95", "level: 0.9"))
            measured.python("nexus", "params")
        case "missing":
            path.unlink()
        case "command":
            pipeline = measured.path / "dvc.yaml"
            pipeline.write_text(pipeline.read_text().replace("stage dkl_sweep --run", "stage dkl_sweep  --run"))
    verified, status = measured.python("nexus", "verify"), measured.python("dvc", "status")
    assert verified.returncode == 1
    assert "up to date" not in status.stdout
    stages_named = {line.partition(":")[0] for line in verified.stdout.splitlines()}
    changed = {line.rstrip(":") for line in status.stdout.splitlines() if line and not line[0].isspace()}
    # Training is a pipeline of its own, which nothing here has run.
    assert stages_named == {name for name in changed if not name.startswith("experiments/training/")}

"""Which run `nexus repro` makes of its choices, and how the stages of a user's own case are run without DVC."""
from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from nexus import reproduce, stage_times
from nexus.config import compose, validate
from nexus.lockfile import Stage, stages
from nexus.own_tuple import OwnTuple
from nexus.reproduce import DEFAULT_PROFILE, in_order


def stage(name: str, deps: tuple[str, ...] = (), outs: tuple[str, ...] = ()) -> Stage:
    return Stage(f"{name}@run", "", deps, {}, outs, frozenset())


@pytest.fixture
def chosen(monkeypatch) -> list:
    """What each call of `reproduce` would have run."""
    calls = []
    monkeypatch.setattr(reproduce, "_reproduce_named", lambda *arguments: calls.append(("named", *arguments)))
    monkeypatch.setattr(reproduce, "_reproduce_own", lambda *arguments: calls.append(("own", *arguments)))
    return calls


def test_without_a_profile_it_is_the_one_for_a_laptop_into_a_folder_of_its_own(chosen: list):
    reproduce.reproduce()
    ((kind, overrides, force),) = chosen
    assert (kind, force) == ("named", False) and overrides == [f"profile={DEFAULT_PROFILE}"]
    assert validate(compose(overrides)).run_name == "qwen2.5-coder-0.5b.laptop"


def test_the_committed_profile_is_named_and_keeps_the_models_own_folder(chosen: list):
    reproduce.reproduce(model="smollm2-135m", profile="full", force=True)
    assert chosen == [("named", ["model=smollm2-135m", "profile=full"], True)]
    assert validate(compose(chosen[0][1])).run_name == "smollm2-135m"


@pytest.mark.parametrize("model, registry, queries", [
    ("/models/x.gguf", None, None), ("x.gguf", None, None), ("smollm2-135m", Path("/t.json"), Path("/q.jsonl")),
    (None, None, Path("/q.jsonl"))])
def test_any_file_of_the_users_makes_it_their_own_case(chosen: list, model, registry, queries):
    reproduce.reproduce(model=model, registry=registry, queries=queries)
    assert chosen == [("own", OwnTuple(model, registry, queries), DEFAULT_PROFILE, False)]


def test_files_are_found_from_the_home_and_the_present_folder(chosen: list, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    reproduce.reproduce(registry=Path("~/t.json"), queries=Path("q.jsonl"))
    assert chosen[0][1] == OwnTuple(None, tmp_path / "t.json", tmp_path / "q.jsonl")


def test_stages_come_behind_those_whose_results_they_read():
    plan = stages(validate(compose()))
    ordered = in_order(list(reversed(plan)))
    assert sorted(stage.name for stage in ordered) == sorted(stage.name for stage in plan)
    for i, each in enumerate(ordered):
        later = {out for other in ordered[i + 1:] for out in other.outs}
        assert not later & set(each.deps)
    unrelated = [stage("b"), stage("a")]
    assert in_order(unrelated) == unrelated


@pytest.fixture
def run_stages(tmp_path: Path, monkeypatch):
    """Runs a plan whose stages end as said: a number is the process's status, a text the reason of a refusal."""
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    monkeypatch.setattr(stage_times, "TIMES", tmp_path / "times")
    ran = []

    def run(plan: list[Stage], ends: dict[str, int | str], skipped: dict[str, str]):
        def ended(command: list[str], **_):
            name, reason = command[command.index("stage") + 1], Path(command[-1])
            ran.append(name)
            end = ends.get(name, 0)
            if isinstance(end, str):
                reason.write_text(end)
            return subprocess.CompletedProcess(command, 0 if isinstance(end, str) else end)

        monkeypatch.setattr(reproduce.subprocess, "run", ended)
        return reproduce._run_stages(plan, tmp_path / "params.yaml", tmp_path, skipped), ran

    return run


def test_what_is_skipped_takes_what_reads_it_along_and_leaves_nothing_old(run_stages, tmp_path: Path, capsys):
    (tmp_path / "old.json").write_text("{}")
    plan = [stage("dkl_sweep", outs=("old.json",)), stage("calibration", outs=("c.json",)),
            stage("routing_accuracy_n250", deps=("c.json",), outs=("r.json",)), stage("tables", deps=("c.json",))]
    failed, ran = run_stages(plan, {"calibration": "no query fits"}, {"dkl_sweep": "no keys"})
    assert failed == [] and ran == ["calibration", "tables"]
    assert json.loads((tmp_path / "skipped.json").read_text()) == {
        "dkl_sweep": "no keys", "calibration": "no query fits",
        "routing_accuracy_n250": "it needs calibration, which was skipped"}
    assert not (tmp_path / "old.json").exists()
    assert "calibration: skipped: no query fits" in capsys.readouterr().out


def test_a_failed_stage_does_not_lose_the_others(run_stages, capsys):
    plan = [stage("dkl_sweep"), stage("gating_nogo"), stage("layouts")]
    failed, ran = run_stages(plan, {"dkl_sweep": 1, "gating_nogo": -9}, {})
    assert failed == ["dkl_sweep", "gating_nogo"] and ran == ["dkl_sweep", "gating_nogo", "layouts"]
    assert "gating_nogo: ended by signal 9; is there enough memory?" in capsys.readouterr().err


def test_a_stopped_stage_stops_the_run(run_stages):
    with pytest.raises(KeyboardInterrupt):
        run_stages([stage("dkl_sweep"), stage("layouts")], {"dkl_sweep": 130}, {})

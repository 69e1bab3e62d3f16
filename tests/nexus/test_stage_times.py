"""What is known about the stages of a run, and what of the whole run is left."""
from __future__ import annotations

import json

import pytest
from ruamel.yaml import YAML

from nexus import stage_times
from nexus.config import CONF, ROOT, compose, validate
from nexus.progress import Meter
from nexus.stage_times import StageTimes


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(stage_times, "TIMES", tmp_path)
    return tmp_path


def test_what_ran_here_counts_as_measured_and_the_rest_at_this_machines_pace():
    times = StageTimes(seconds={"a": 20.0}, plan=["a", "b", "c"], done=["a"], expected={"a": 10.0, "b": 30.0})
    assert times.pace == 2
    assert times.of("a") == 20 and times.of("b") == 60
    assert times.of("c") == 2 * stage_times.UNKNOWN_SECONDS
    assert times.left() == 60 + 2 * stage_times.UNKNOWN_SECONDS
    assert times.left({"b"}) == 60


def test_nothing_known_is_taken_as_expected():
    times = StageTimes(plan=["a"], expected={"a": 10.0})
    assert (times.pace, times.left()) == (1, 10)


def test_a_planned_stage_tells_its_place_and_what_is_left(capsys):
    stage_times.begin("run", ["a", "b", "c"], ["a"], {"a": 5.0, "b": 60.0, "c": 120.0})
    with stage_times.timed("run", "b"):
        meter = Meter("cells", total=2, unit="cells", clock=iter([0.0, *[10.0] * 9]).__next__)
        meter.advance(1)
        assert meter.text() == "50 %, 10 s, about 10 s left, 2 min 10 s of the whole run"
    assert capsys.readouterr().out == "b: stage 2 of 3, about 3 min 00 s left of the whole run\n"
    times = stage_times.load("run")
    assert times.done == ["a", "b"] and times.seconds.keys() == {"b"}
    assert stage_times.end("run").plan == []
    assert "of the whole run" not in meter.text()


def test_a_stage_that_goes_on_keeps_its_longest_time_and_a_failed_one_has_none():
    stage_times.save("run", StageTimes(seconds={"a": 100.0}))
    with stage_times.timed("run", "a"):
        pass
    with pytest.raises(OSError), stage_times.timed("run", "b"):
        raise OSError("disk is full")
    assert stage_times.load("run").seconds == {"a": 100.0}


def test_a_stage_that_is_skipped_is_no_longer_waited_for():
    stage_times.begin("run", ["a", "b"], [], {"a": 5.0, "b": 60.0})
    stage_times.pass_over("run", "b")
    stage_times.pass_over("run", "other")
    assert stage_times.load("run").done == ["b"] and stage_times.load("run").left() == 5


def test_a_stage_by_hand_without_a_run_leaves_no_trace(folder):
    with stage_times.timed(None, "a"):
        pass
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("content", ["", "[]", "{", '{"others": 1}'])
def test_damaged_file_counts_as_none(folder, content: str):
    (folder / "run.json").write_text(content)
    assert stage_times.load("run") == StageTimes()


def test_shares_name_the_longest_first():
    lines = stage_times.shares(StageTimes(seconds={"a": 30.0, "b": 90.0})).splitlines()
    assert "2 min 00 s" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["b", "a"] and "75.0 %" in lines[1]
    assert stage_times.shares(StageTimes()) == ""


@pytest.mark.parametrize("profile", sorted(path.stem for path in (CONF / "profile").glob("*.yaml")))
def test_expected_seconds_of_a_profile_are_its_expected_minutes(profile: str):
    minutes = validate(compose([f"profile={profile}"])).expected_minutes
    seconds = stage_times.expected_seconds(profile, minutes)
    assert sum(seconds.values()) == pytest.approx(60 * minutes, rel=0.15)


def test_expected_seconds_are_of_stages():
    known = set(YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"])
    known |= {path.stem for path in (ROOT / "experiments").glob("*.py")}
    for table in json.loads(stage_times.EXPECTED.read_text(encoding="utf-8")).values():
        assert set(table) <= known and min(table.values()) > 0


def test_the_default_profile_takes_half_an_hour_at_most():
    from nexus.reproduce import DEFAULT_PROFILE

    assert validate(compose([f"profile={DEFAULT_PROFILE}"])).expected_minutes <= 30

"""Tables of arguments and serving from synthetic artifacts: known numbers in known cells, bars worded right."""
from __future__ import annotations

import argument_artifacts as synthetic
import pytest
import test_tables
from experiments import tables as experiment
from nexus import argument_tables, artifact, tables
from nexus.config import compose, validate
from test_tables import parsed

PUBLISHED = tables.published()


def rest():
    return argument_tables.table4_rest(synthetic.sidecar(), synthetic.radix(), PUBLISHED)


def arguments(**values):
    return argument_tables.arguments(synthetic.sidecar(**values), synthetic.constraint())


def serving():
    return argument_tables.serving(synthetic.radix(), synthetic.allocator())


@pytest.mark.parametrize("render", [rest, arguments, serving])
def test_a_table_is_the_same_twice_and_well_formed(render):
    text = render()
    assert render() == text and text.endswith("\n") and "None" not in text and all(parsed(text))


def test_published_stands_beside_measured():
    table, = parsed(rest())
    lines = {line[""]: line for line in table}
    assert lines["specified arguments right, end to end, %"]["published"] == "80.0 (40/50)"
    assert lines["specified arguments right, end to end, %"]["measured"] == "74.0 [66.6, 81.4]"
    assert lines["L0 warm-hit rate, 32 slots, %"]["published"] == "69.5"
    assert lines["L0 warm-hit rate, 32 slots, %"]["measured"] == "80.0 [78.4, 81.6]", "ours, not the peer's"
    assert lines["L0 copy of 1024 tokens, p50, µs"]["published"] == "3.04"
    assert lines["L0 copy as in the traces, p50, µs"]["measured"] == "2.00 [1.80, 2.20]"
    assert lines["tokens saved in the context, %"]["measured"].startswith("70.0 [")


def test_units_follow_the_metric():
    table, *_ = parsed(arguments())
    lines = {line["metric"]: line for line in table}
    assert lines["json valid rate"]["unit"] == "%" and lines["json valid rate"]["value"].startswith("100 [")
    assert lines["ir tokens median"]["unit"] == "tokens" and lines["ir tokens median"]["value"].startswith("30.0 [")
    assert lines["first argument speedup"]["unit"] == lines["first argument speedup tool given cold"]["unit"] == "times"
    assert lines["first argument signature ms"]["unit"] == "ms"
    minus = lines["specified argument signature minus full schema"]
    assert (minus["value"], minus["unit"], minus["p"]) == ("-4.00 [-10.0, 2.00]", "points", "0.250")
    assert lines["prompt tokens full"]["unit"] == "tokens"


@pytest.mark.parametrize(("values", "told"), [
    ({}, "%, at least 90.0 wanted: met."),
    ({"specified_argument_accuracy": 0.89}, "at least 90.0 wanted: missed."),
    ({}, "tokens are saved: 70.0 [63.0, 77.0] %, at least 80.0 wanted: missed."),
    ({"first_argument_speedup": 1.5}, "times, at least 1.66 wanted: missed."),
    ({"placeholder_leak_rate": 0.1}, "none wanted: missed."),
    ({}, "none wanted: met.")])
def test_the_sidecars_bars_go_by_the_estimates(values, told):
    assert told in arguments(**values)


@pytest.mark.parametrize(("constraint", "told"), [
    ({}, "40.0 [38.0, 42.0] µs, under 100 wanted: met."),
    ({"ours_us": 120.0}, "under 100 wanted: missed."),
    ({"ours_us": 200.0}, "under 1000 wanted: missed."),
    ({"peer_ratio": 49.0}, "at least 50 wanted: missed."),
    ({}, "at least 50 wanted: met.")])
def test_the_constraints_bars(constraint, told):
    assert told in argument_tables.arguments(synthetic.sidecar(), synthetic.constraint(**constraint))


def test_an_engine_that_is_not_there_says_so():
    *_, table = parsed(arguments())
    absent = table[-1]
    assert absent["engine"] == "`xgrammar` (not installed)" and absent["p50, µs"] == absent["n"] == tables.MISSING
    assert table[1]["refused"] == "21" and table[0]["rejected first, %"].startswith("10.0 [")


def test_the_allocators_table_leaves_the_clock_out():
    *_, contention, fragmentation = parsed(serving())
    assert [(line["threads"], line["layout"]) for line in contention] == [
        ("1", "padded"), ("1", "unpadded"), ("4", "padded"), ("4", "unpadded")]
    assert contention[0]["rate over unpadded"] == "2.00 [1.90, 2.10]"
    assert contention[1]["rate over unpadded"] == tables.MISSING
    assert [line["more threads than CPUs"] for line in contention] == ["no", "no", "yes", "yes"]
    assert fragmentation[0]["blocks are"] == "trimmed"


@pytest.mark.parametrize("name", synthetic.MAKERS)
def test_every_one_of_these_artifacts_is_needed(tmp_path, name):
    cfg = validate(compose([]))
    test_tables.write_all(tmp_path, cfg)
    artifact.path_of(name, tmp_path).unlink()
    with pytest.raises(tables.MissingArtifact, match=f"is missing; make it with: .*experiments.{name} "):
        experiment.run(cfg, tmp_path)
    assert not (tmp_path / "tables").exists()


def test_table_four_is_complete(tmp_path):
    cfg = validate(compose([]))
    test_tables.write_all(tmp_path, cfg)
    text = (experiment.run(cfg, tmp_path) / "table4.md").read_text()
    assert text.index("accuracy at N = 250, %") < text.index("## Arguments and the prefix cache")
    assert "the right tool is chosen for a call, %" in text

import copy
import json
import math

import numpy as np
import pytest

from nexus import artifact, stats
from nexus.artifact import ArtifactError

TUPLE = {"model": "smollm2-135m", "model_sha256": "ab" * 32, "embedder": None, "llama_cpp": "0c1e570"}
PROVENANCE = {
    "git_commit": "0" * 40, "git_dirty": False, "cpu": "test", "threads": 1, "isa": "scalar",
    "versions": {"numpy": "2.4.6", "dvc": None},
}  # fmt: skip
SPLICE_METRICS = [
    "reanchor_us", "set_state_us", "graft_us", "total_us", "memcpy_us", "total_per_memcpy",
    "engine_shift_us", "engine_shift_per_total", "prefill_us",
]  # fmt: skip


def dkl_rows():
    nats = np.random.default_rng(0).exponential(size=(4, 5))
    keys = [(offset, probe) for offset in (0, 256) for probe in ("query", "block_end")]
    return [
        {
            "top1": stats.wilson(5, 5),
            "dkl_nats": stats.mean(sample, 0),
            "probe": probe,
            "arm": "bare",
            "offset": np.int64(offset),
        }
        for (offset, probe), sample in zip(keys, nats, strict=True)
    ]


def inputs(**changes):
    samples = [{"query": index, "dkl_nats": np.float64(0.1) * index, "offset": 0} for index in range(3)]
    return {
        "experiment": "dkl_sweep",
        "tuple_": TUPLE,
        "config": {"seed": 0, "offsets": [0, 256], "model": {"name": "smollm2-135m"}},
        "rows": dkl_rows(),
        "samples": samples,
        "provenance": PROVENANCE,
    } | changes


def test_write_then_read(tmp_path):
    path = tmp_path / "results" / "dkl_sweep.json"
    written = artifact.write(path, **inputs())
    assert artifact.read(path) == written
    assert written["schema_version"] == 1
    assert written["samples"] == "dkl_sweep.samples.jsonl"
    assert written["config_sha256"] == artifact.config_sha256(inputs()["config"])
    assert artifact.read_samples(path) == [
        {"offset": 0, "dkl_nats": 0.1 * index, "query": index} for index in range(3)
    ]
    assert {file.name for file in path.parent.iterdir()} == {"dkl_sweep.json", "dkl_sweep.samples.jsonl"}


def test_layout_is_canonical_and_readable_in_a_diff(tmp_path):
    path = tmp_path / "dkl_sweep.json"
    artifact.write(path, **inputs())
    text = path.read_text()
    lines = [line for line in text.splitlines() if line.startswith(' {"offset"')]
    assert len(lines) == 4
    for line in lines:
        assert list(json.loads(line.strip(" ,"))) == ["offset", "arm", "probe", "dkl_nats", "top1"]
    assert text.endswith("}\n")
    assert list(json.loads(text)) == [
        "schema_version", "experiment", "tuple", "config", "config_sha256", "provenance", "rows", "samples"
    ]  # fmt: skip
    first = (tmp_path / "dkl_sweep.samples.jsonl").read_text().splitlines()[1]
    assert first == '{"offset": 0, "dkl_nats": 0.1, "query": 1}'


def test_equal_inputs_give_equal_bytes(tmp_path):
    once, again = tmp_path / "a" / "x.json", tmp_path / "b" / "x.json"
    artifact.write(once, **inputs())
    shuffled = inputs()
    shuffled["config"] = dict(reversed(shuffled["config"].items()))
    shuffled["rows"] = [dict(reversed(row.items())) for row in shuffled["rows"]]
    shuffled["samples"] = [dict(reversed(sample.items())) for sample in shuffled["samples"]]
    artifact.write(again, **shuffled)
    for name in ("x.json", "x.samples.jsonl"):
        assert (once.parent / name).read_bytes() == (again.parent / name).read_bytes()


def test_floats_keep_full_precision(tmp_path):
    numbers = [0.1 + 0.2, 5e-324, 1.7976931348623157e308, 1e16 + 2, float(np.float32(0.1))]
    artifact.write(tmp_path / "x.json", **inputs(samples=[{"x": number} for number in numbers]))
    assert [sample["x"] for sample in artifact.read_samples(tmp_path / "x.json")] == numbers


def test_samples_text_may_hold_any_character(tmp_path):
    text = "line\u2028separator\nnewline \u0085 é"
    artifact.write(tmp_path / "x.json", **inputs(samples=[{"text": text}]))
    assert artifact.read_samples(tmp_path / "x.json") == [{"text": text}]


@pytest.mark.parametrize("bad", [math.nan, math.inf, np.float32("nan")])
def test_numbers_that_are_not_finite_name_row_and_key(tmp_path, bad):
    rows = dkl_rows()
    rows[2]["dkl_nats"] = rows[2]["dkl_nats"].row() | {"ci_high": bad}
    with pytest.raises(ArtifactError, match=r"row 2 \(offset=256, arm=bare, probe=query\)\.dkl_nats\.ci_high is"):
        artifact.write(tmp_path / "x.json", **inputs(rows=rows))
    with pytest.raises(ArtifactError, match=r"sample 1\.dkl_nats is"):
        artifact.write(tmp_path / "x.json", **inputs(samples=[{"dkl_nats": 1.0}, {"dkl_nats": bad}]))
    with pytest.raises(ArtifactError, match=r"config\.rate is"):
        artifact.write(tmp_path / "x.json", **inputs(config={"rate": bad}))
    assert not list(tmp_path.iterdir())


def change(**changes):
    return lambda row: row.update(changes)


METRIC = stats.wilson(1, 2).row()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(probe="querry"), r"row 1 .*\.probe: 'querry' is not one of"),
        (change(offset=-1), r"row 1 .*\.offset: -1 is less than the minimum"),
        (change(offset=0.5), r"row 1 .*\.offset: 0\.5 is not of type 'integer'"),
        (change(arm=""), r"row 1 .*\.arm: "),
        (change(dkl=METRIC), r"row 1 .*'dkl' was unexpected"),
        (change(dkl_nats=0.5), r"row 1 .*\.dkl_nats: 0\.5 is not of type 'object', 'null'"),
        (change(top1={**METRIC, "value": "1"}), r"row 1 .*\.top1\.value: '1' is not of type"),
        (change(top1={**METRIC, "level": 95}), r"row 1 .*\.top1\.level: 95 is greater"),
        (change(top1={**METRIC, "p": 0.1}), r"row 1 .*\.top1: .*'p' was unexpected"),
        (change(top1={**METRIC, "ci_low": 0.9}), r"row 1 .*\.top1: interval .* does not contain"),
        (change(top1={**METRIC, "ci_low": None}), r"row 1 .*\.top1: .*one bound"),
        (change(bit_identical="yes"), r"row 1 .*\.bit_identical: 'yes' is not of type"),
        (lambda row: row.pop("top1"), r"row 1 .*'top1' is a required property"),
        (lambda row: row.pop("offset"), r"row 1 .*'offset' is a required property"),
        (change(probe="query"), r"row 1 \(offset=0, arm=bare, probe=query\) has the same keys as row 0"),
    ],
)
def test_rows_that_break_the_form_are_refused_on_writing_and_reading(tmp_path, edit, message):
    rows = dkl_rows()
    edit(rows[1])
    with pytest.raises(ArtifactError, match=message):
        artifact.write(tmp_path / "x.json", **inputs(rows=rows))
    assert not list(tmp_path.iterdir())

    stored = artifact.write(tmp_path / "x.json", **inputs())
    edit(stored["rows"][1])
    (tmp_path / "x.json").write_text(json.dumps(stored))
    with pytest.raises(ArtifactError, match=message):
        artifact.read(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": []}, "rows: "),
        ({"samples": []}, "no samples"),
        ({"tuple_": {**TUPLE, "model_sha256": "abc"}}, r"tuple\.model_sha256: 'abc' does not match"),
        ({"tuple_": {"model": "m"}}, "tuple: .*is a required property"),
        ({"provenance": {**PROVENANCE, "threads": "two"}}, r"provenance\.threads: 'two' is not of type"),
        ({"provenance": {}}, "provenance: .*is a required property"),
        ({"experiment": "dkl_swep"}, "did you mean 'dkl_sweep'"),
        ({"experiment": "other"}, "known: dkl_sweep, splice_cost"),
    ],
)
def test_envelopes_that_break_the_form_are_refused(tmp_path, changes, message):
    with pytest.raises(ArtifactError, match=message):
        artifact.write(tmp_path / "x.json", **inputs(**changes))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", [None, True, stats.wilson(3, 5)])
def test_optional_columns(tmp_path, flag):
    rows = dkl_rows()
    rows[0] |= {"bit_identical": flag, "status": "overflow", "dkl_nats": None}
    first = artifact.write(tmp_path / "x.json", **inputs(rows=rows))["rows"][0]
    assert list(first) == ["offset", "arm", "probe", "status", "dkl_nats", "top1", "bit_identical"]
    assert first["dkl_nats"] is None


def test_splice_cost_rows(tmp_path):
    row = dict.fromkeys(SPLICE_METRICS) | {"total_us": stats.median([1.0, 2.0, 4.0], 0)}
    keys = {"n_tokens": 200, "n_ctx": 4096, "v_layout": "row", "cells": "contiguous"}
    rows = [keys | row, keys | row | {"cells": "fragmented"}]
    written = artifact.write(tmp_path / "splice_cost.json", **inputs(experiment="splice_cost", rows=rows))
    assert list(written["rows"][0]) == [*artifact.key_columns("splice_cost"), *SPLICE_METRICS]
    with pytest.raises(ArtifactError, match="'diagonal' is not one of"):
        artifact.write(
            tmp_path / "x.json", **inputs(experiment="splice_cost", rows=[keys | row | {"v_layout": "diagonal"}])
        )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text[: len(text) // 2], "not valid JSON"),
        (lambda text: "[]\n", "an artifact is an object, not a list"),
        (lambda text: "{}\n", "experiment None is unknown"),
        (lambda text: text.replace('"seed": 0', '"seed": 1'), "config_sha256 is not the hash of config"),
        (lambda text: text.replace('"seed": 0', '"seed": NaN'), r"artifact\.config\.seed is nan"),
        (lambda text: text.replace('"seed": 0', '"seed": 1e999'), r"artifact\.config\.seed is inf"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 2'),
         "schema_version is 2, and this version of the code reads 1; measure it again"),
        (lambda text: text.replace('"seed": 0', '"seed": ' + "[" * 100_000), "not valid JSON"),
        (lambda text: text.replace("dkl_sweep.samples", "../dkl_sweep.samples"), "samples: .*does not match"),
    ],
)
def test_edited_files_are_refused(tmp_path, edit, message):
    path = tmp_path / "dkl_sweep.json"
    artifact.write(path, **inputs())
    before = path.read_text()
    path.write_text(edit(before))
    assert path.read_text() != before
    with pytest.raises(ArtifactError, match=message):
        artifact.read(path)


def test_samples_that_are_gone_are_named(tmp_path):
    artifact.write(tmp_path / "dkl_sweep.json", **inputs())
    (tmp_path / "dkl_sweep.samples.jsonl").unlink()
    with pytest.raises(ArtifactError, match="dkl_sweep.samples.jsonl is missing, the samples of dkl_sweep.json; measure"):
        artifact.read_samples(tmp_path / "dkl_sweep.json")


def test_samples_are_on_disk_before_the_artifact(tmp_path, monkeypatch):
    order = []
    write_atomically = artifact.write_atomically
    monkeypatch.setattr(
        artifact, "write_atomically", lambda path, text: (order.append(path.name), write_atomically(path, text))
    )
    artifact.write(tmp_path / "x.json", **inputs())
    assert order == ["x.samples.jsonl", "x.json"]


def test_every_experiment_block_is_complete_and_listed():
    schema = json.loads(artifact.SCHEMA_PATH.read_text())
    blocks = {name for name, block in schema["$defs"].items() if block.get("$ref") == "#/$defs/envelope"}
    assert blocks == set(artifact.experiments())
    for name in blocks:
        block = copy.deepcopy(schema["$defs"][name])
        row = block["properties"]["rows"]["items"]
        assert block["properties"]["experiment"] == {"const": name}
        assert row["additionalProperties"] is False
        assert set(row["keyColumns"]) <= set(row["required"]) <= set(row["properties"])
        assert list(row["properties"])[: len(row["keyColumns"])] == row["keyColumns"]

"""The placement sweep: its summary on synthetic samples, and a tiny real sweep on SmolLM2."""
from __future__ import annotations

import pytest

from experiments import compiled, dkl_sweep
from nexus import artifact, cells, config, pipeline
from nexus.runtime import Runtime
from nexus.splice import PROBE_TOKENS

QUICK = ["model=smollm2-135m", "profile=quick", "dkl_sweep.offsets=[0,64]", "dkl_sweep.n_cases=2"]


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """(config, folder) of a tiny sweep whose cells and blocks are kept in a temporary folder."""
    monkeypatch.setattr(pipeline, "CellStore", lambda: cells.CellStore(tmp_path / "cells"))
    monkeypatch.setattr(compiled, "BLOCK_FOLDER", tmp_path / "blocks")
    return config.validate(config.compose(QUICK)), tmp_path


def synthetic(cfg, kl):
    return [
        {"offset": offset, "arm": arm, "probe": probe, "case": f"c{case}", "dkl_nats": kl(offset, case),
         "top1": case != 0, "bit_identical": offset == 0}
        for offset in cfg.dkl_sweep.offsets for arm in cfg.dkl_sweep.arms for probe in dkl_sweep.PROBES
        for case in range(8)
    ]


def test_summary_has_one_row_per_cell_with_the_right_intervals():
    cfg = config.validate(config.compose(QUICK))
    rows = dkl_sweep.summarise(cfg, synthetic(cfg, lambda offset, case: offset * (1 + case)))
    assert [(row["offset"], row["arm"], row["probe"]) for row in rows][:3] == [
        (0, "bare", "query"), (0, "bare", "block_end"), (0, "bare-no-reanchor", "query")]
    assert len(rows) == 2 * 3 * 2
    zero, moved = rows[0], rows[-1]
    assert (zero["dkl_nats"].value, zero["dkl_nats"].method) == (0.0, "identical-samples")
    assert zero["bit_identical"].ci_low > 0.5 and zero["bit_identical"].method == "wilson"
    assert moved["dkl_nats"].value == pytest.approx(64 * 4.5)
    assert moved["dkl_nats"].ci_low < moved["dkl_nats"].value < moved["dkl_nats"].ci_high
    assert moved["top1"].value == 7 / 8 and moved["top1"].n == 8


def test_a_summary_does_not_depend_on_the_order_of_samples():
    cfg = config.validate(config.compose(QUICK))
    samples = synthetic(cfg, lambda offset, case: offset * (1 + case) ** 2)
    assert dkl_sweep.summarise(cfg, samples) == dkl_sweep.summarise(cfg, samples[::-1])


def test_a_summary_follows_level_and_seed_and_mixes_no_cells():
    overrides = [*QUICK, "dkl_sweep.arms=[noise_floor,bare]"]
    cfg = config.validate(config.compose([*overrides, "statistics.level=0.6"]))
    samples = synthetic(cfg, lambda offset, case: offset + case)
    for sample in samples:
        if sample["arm"] == "noise_floor":
            sample["dkl_nats"], sample["top1"] = 0.25, False
    rows = dkl_sweep.summarise(cfg, samples)
    assert [row["arm"] for row in rows] == ["noise_floor", "noise_floor", "bare", "bare"] * 2
    for row in rows:
        assert row["dkl_nats"].n == row["top1"].n == row["bit_identical"].n == 8
        assert row["dkl_nats"].level == row["top1"].level == 0.6
        assert row["top1"].method == row["bit_identical"].method == "wilson"
        floor = row["arm"] == "noise_floor"
        assert row["dkl_nats"].value == (0.25 if floor else row["offset"] + 3.5)
        assert row["dkl_nats"].method == ("identical-samples" if floor else "bca-bootstrap")
        assert row["top1"].value == (0 if floor else 7 / 8) and row["top1"].ci_high > row["top1"].value
    wide = dkl_sweep.summarise(config.validate(config.compose(overrides)), samples)
    assert wide[-1]["dkl_nats"].ci_low < rows[-1]["dkl_nats"].ci_low


@pytest.mark.integration
def test_a_real_sweep_has_exact_controls_resumes_and_repeats_itself(tiny, monkeypatch):
    cfg, folder = tiny
    path = dkl_sweep.run(cfg, folder / "first")
    first = artifact.read(path)
    cell = {(row["offset"], row["arm"], row["probe"]): row for row in first["rows"]}
    for probe in dkl_sweep.PROBES:
        for arm in ("bare", "bare-no-reanchor"):
            assert cell[0, arm, probe]["dkl_nats"]["value"] == 0.0
            assert cell[0, arm, probe]["bit_identical"]["value"] == 1.0
        assert cell[64, "bare", probe]["dkl_nats"]["value"] > 0
        assert cell[64, "bare-no-reanchor", probe]["dkl_nats"]["value"] > cell[64, "bare", probe]["dkl_nats"]["value"]
    assert any(row["dkl_nats"]["value"] > 0 for row in first["rows"] if row["arm"] == "noise_floor")
    assert len(artifact.read_samples(path)) == 2 * 2 * 3 * 2
    assert (folder / "first" / "metrics" / "dkl_sweep.json").is_file()

    # From the stored cells: the same bytes, and no token is decoded but those with which the splicer proves itself.
    decoded, decode = [], Runtime.decode

    def counted(runtime, tokens, *args, **kwargs):
        decoded.append(len(tokens))
        return decode(runtime, tokens, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "decode", counted)
        again = dkl_sweep.run(cfg, folder / "second")
    assert again.read_bytes() == path.read_bytes()
    assert sum(decoded) == PROBE_TOKENS + 1
    # From an empty store, with blocks compiled anew: measured again, with the same bits.
    monkeypatch.setattr(pipeline, "CellStore", lambda: cells.CellStore(folder / "empty"))
    monkeypatch.setattr(compiled, "BLOCK_FOLDER", folder / "empty blocks")
    third = dkl_sweep.run(cfg, folder / "third")
    assert third.read_bytes() == path.read_bytes()
    samples = "dkl_sweep.samples.jsonl"
    assert third.with_name(samples).read_bytes() == path.with_name(samples).read_bytes()
    assert len(list((folder / "empty").iterdir())) == 2 * 2


@pytest.mark.integration
def test_a_damaged_block_file_is_compiled_again(tiny, smollm2):
    cfg, folder = tiny
    with Runtime(smollm2, dkl_sweep.context_options(cfg.runtime, n_ctx=1024)) as runtime:
        left = smollm2.tokenize("A system prompt.")
        tokens = {"a": smollm2.tokenize("First tool of two."), "b": smollm2.tokenize("Second tool of two.")}
        files = compiled.compiled_blocks(runtime, [left], tokens)
        keys = {name: file.path.read_bytes() for name, file in files.items()}
        damaged, kept = files["a"].path, files["b"].path
        before = kept.stat().st_mtime_ns
        damaged.write_bytes(damaged.read_bytes()[:-1])
        files = compiled.compiled_blocks(runtime, [left], tokens)
        assert {name: file.path.read_bytes() for name, file in files.items()} == keys
        assert kept.stat().st_mtime_ns == before

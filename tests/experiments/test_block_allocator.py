"""Contention of the block allocator: a tiny real run, the arithmetic of the rows, and runs that must not count."""
from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from experiments import block_allocator
from nexus import artifact, cells, config, pipeline

THREADS = [1, 2]


def configured(*overrides: str) -> config.Config:
    """The configuration of a run that takes a second; further overrides come last."""
    return config.validate(config.compose([
        "model=smollm2-135m", "profile=quick", f"block_allocator.n_threads={THREADS}",
        "block_allocator.n_operations=2000", "block_allocator.repetitions=3", *overrides]))


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A function that runs the experiment and returns the path of its artifact."""
    monkeypatch.setattr(pipeline, "CellStore", lambda: cells.CellStore(tmp_path / "cells"))
    return lambda cfg, folder="out": block_allocator.run(cfg, tmp_path / folder)


def test_every_contestant_is_timed_and_a_second_run_measures_nothing(measured, monkeypatch):
    monkeypatch.setattr(block_allocator, "n_usable_cpus", lambda: 1)
    path = measured(configured())
    written = artifact.read(path)
    rows = {kind: [row for row in written["rows"] if row["kind"] == kind]
            for kind in ("contention", "order", "fragmentation")}
    assert [(row["n_threads"], row["sharing"], row["layout"]) for row in rows["contention"]] == [
        (1, "own", "padded"), (1, "own", "unpadded"), (1, "own", "malloc"),
        (2, "own", "padded"), (2, "own", "unpadded"), (2, "own", "malloc"),
        (2, "one", "padded"), (2, "one", "unpadded")]
    for row in rows["contention"]:
        assert row["operations_per_s"]["n"] == 3 and row["operations_per_s"]["value"] > 1000
        assert 0 < row["p50_ns"]["value"] <= row["p99_ns"]["value"]
        assert row["oversubscribed"] == (row["n_threads"] > 1)
        assert ("rate_vs_unpadded" in row) == (row["layout"] == "padded")
        assert ("rate_vs_malloc" in row) == (row["layout"] != "malloc")
    assert [(row["order"], row["layout"]) for row in rows["order"]] == [
        (order, layout) for order in block_allocator.ORDERS for layout in block_allocator.LAYOUTS]
    for row in rows["order"]:
        for call in ("allocate", "free"):
            assert 0 <= row[f"{call}_p50_ns"]["value"] <= row[f"{call}_p99_ns"]["value"]
    assert [row["layout"] for row in rows["fragmentation"]] == ["trimmed", "power-of-two"]
    assert written["provenance"]["threads"] == 2 and written["tuple"]["embedder"] is None
    metrics = json.loads((path.parent / "metrics" / path.name).read_text())
    ratio = next(row["rate_vs_unpadded"] for row in rows["contention"] if row["sharing"] == "one")
    assert metrics["one.2"]["rate_vs_unpadded"] == ratio["value"] > 0

    monkeypatch.setattr(block_allocator, "measure", lambda *_: pytest.fail("a stored cell was measured again"))
    assert measured(configured(), "again").read_bytes() == path.read_bytes()


def test_rounding_loses_less_than_a_unit_per_block_or_up_to_half():
    samples = block_allocator.fragmentation_samples(2, seed=0)
    assert samples == block_allocator.fragmentation_samples(2, seed=0)
    trimmed, rounded = ([s for s in samples if s["layout"] == policy] for policy in block_allocator.POLICIES)
    for ours, plain in zip(trimmed, rounded):
        assert 0 < ours["internal_pct"] < 6 and 20 < plain["internal_pct"] < 50
        for sample in (ours, plain):
            assert 40 < sample["filled_pct"] < 100 and 40 < sample["first_filled_pct"] < 100


def test_rows_of_known_times():
    def sample(n_threads, sharing, layout, repetition, rate):
        return {"kind": "contention", "n_threads": n_threads, "sharing": sharing, "layout": layout, "order": None,
                "repetition": repetition, "operations_per_s": rate, "p50_ns": 50.0, "p99_ns": 90.0 + repetition}

    samples = [sample(4, sharing, layout, repetition, rate * (1 + repetition))
               for repetition in (2, 0, 1) for sharing, layout, rate in (
                   ("own", "malloc", 1e6), ("own", "unpadded", 2e6), ("own", "padded", 8e6), ("one", "padded", 3e6),
                   ("one", "unpadded", 4e6))]
    # A repetition of its own pair: the medians of other rows must not take part.
    samples += [sample(1, "own", layout, repetition, 1e3) for repetition in range(3)
                for layout in ("padded", "unpadded", "malloc")]
    rows = block_allocator.summarise(samples, 0, 0.95, n_cpus=2)
    assert [(row["n_threads"], row["sharing"], row["layout"]) for row in rows] == [
        (1, "own", "padded"), (1, "own", "unpadded"), (1, "own", "malloc"), (4, "own", "padded"),
        (4, "own", "unpadded"), (4, "own", "malloc"), (4, "one", "padded"), (4, "one", "unpadded")]
    assert [row["oversubscribed"] for row in rows] == [False] * 3 + [True] * 5
    padded, unpadded, malloc, one, one_unpadded = rows[3:]
    assert padded["operations_per_s"].value == 16e6 and padded["p99_ns"].value == 91
    assert (padded["rate_vs_unpadded"].value, padded["rate_vs_malloc"].value) == (4, 8)
    # Paired by repetition, every resample has the same ratio.
    assert padded["rate_vs_unpadded"].method == "degenerate-bootstrap"
    assert (one["rate_vs_unpadded"].value, one["rate_vs_malloc"].value) == (0.75, 3)
    assert unpadded["rate_vs_malloc"].value == 2 and "rate_vs_unpadded" not in unpadded
    assert "rate_vs_malloc" not in malloc and one_unpadded["rate_vs_malloc"].value == 4
    assert block_allocator.headline(rows)["own.4"] == {"million_operations_per_s": 16, "rate_vs_unpadded": 4}


@pytest.mark.parametrize(("n_failed", "whole"), [(3, True), (0, False)])
def test_a_run_that_went_wrong_is_no_measurement(monkeypatch, n_failed, whole):
    run = SimpleNamespace(operations_per_s=1e6, p50_ns=1.0, p99_ns=2.0, n_failed=n_failed, whole=whole)
    monkeypatch.setattr(block_allocator, "contention_kernels", lambda: SimpleNamespace(contend=lambda *_: run))
    told = f"{n_failed} requests failed, whole at the end: {whole}"
    with pytest.raises(block_allocator.AllocatorFailure, match=told):
        block_allocator.contend("padded", "own", 2, 100, 0)


def test_more_threads_than_there_is_room_for_are_refused():
    with pytest.raises(Exception, match="n_threads is 8 .* give 1 to 7 threads"):
        block_allocator.contend("padded", "own", 8, 100, 0)

"""Latency of the lookaside scan: a tiny real run against the installed peers, and the arithmetic of the rows."""
from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import slb_latency
from nexus import artifact, cells, config, pipeline
from nexus.slb import available_isas

PEERS = ["numkong", "faiss", "usearch", "numpy"]
INSTALLED = [peer for peer in PEERS if peer not in slb_latency.missing(PEERS)]
BEST = available_isas()[-1]


def configured(*overrides: str) -> config.Config:
    """The configuration with a tiny table; further overrides come last."""
    return config.validate(config.compose([
        "model=smollm2-135m", "profile=quick", "slb_latency.n_vectors=[70,300]", "slb_latency.dims=[33]",
        "slb_latency.repetitions=30", f"slb_latency.peers=[{','.join(INSTALLED)}]", *overrides]))


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A function that runs the experiment and returns the path of its artifact."""
    monkeypatch.setattr(pipeline, "CellStore", lambda: cells.CellStore(tmp_path / "cells"))
    return lambda cfg, folder="out": slb_latency.run(cfg, tmp_path / folder)


def test_everybody_is_exact_and_timed(measured, monkeypatch):
    path = measured(configured())
    written = artifact.read(path)
    rows = written["rows"]
    own = [(slb_latency.OURS, isa) for isa in available_isas()]
    expected = [*own, (slb_latency.IN_SITU, BEST), (slb_latency.QUANTISE, BEST),
                *((peer, "auto") for peer in INSTALLED)]
    for n in (70, 300):
        of_size = [row for row in rows if row["n_vectors"] == n]
        assert [(row["impl"], row["isa"]) for row in of_size[:-2]] == expected
        assert [row["impl"] for row in of_size[-2:]] == ["ceiling", "overhead"]
        for row in of_size:
            searches = row["impl"] not in ("nexus quantise", "ceiling", "overhead")
            assert row["exact"] is (True if searches else None), row
            rounds = slb_latency.SCALAR_ROUNDS if row["isa"] == "scalar" else 30
            assert row["p50_us"]["n"] == row["p99_us"]["n"] == rounds and row["p50_us"]["value"] > 0
            assert row["p99_us"]["value"] >= row["p50_us"]["value"]
            if searches:
                # A row with a little noise is nearly always nearest to itself, and rounding hardly ever changes that.
                assert row["recall_at_1"]["n"] == slb_latency.QUERIES and row["recall_at_1"]["value"] > 0.8
            ours = row["impl"] in ("nexus", "nexus in situ")
            assert (row["ceiling_share_pct"] is not None) == ours
            for peer in INSTALLED:
                assert (row[f"speedup_vs_{peer}"] is not None) == ours
            assert (row["gb_per_s"] is not None) == (searches or row["impl"] == "ceiling")
    assert written["tuple"]["model"] == "smollm2-135m" and written["tuple"]["embedder"] is None
    assert written["provenance"]["threads"] == 1 and written["provenance"]["isa"] == BEST
    metrics = json.loads((path.parent / "metrics" / path.name).read_text())
    assert metrics[f"300.33.nexus.{BEST}"]["p50_us"] == next(
        row["p50_us"]["value"] for row in rows
        if (row["n_vectors"], row["impl"], row["isa"]) == (300, "nexus", BEST))
    assert [sample["kind"] for sample in artifact.read_samples(path)].count("round") == 60

    # Times are measured once: a second run takes them from the store.
    monkeypatch.setattr(slb_latency.Bench, "measure", lambda *_: pytest.fail("a stored size was measured again"))
    assert measured(configured(), "again").read_bytes() == path.read_bytes()


def test_a_peer_that_is_not_installed_is_named_and_left_out(measured, monkeypatch, capsys):
    def without_numkong(name):
        if name == "numkong":
            raise ImportError(name)
        return importlib.import_module(name)

    monkeypatch.setattr(slb_latency, "importlib", SimpleNamespace(import_module=without_numkong))
    rows = artifact.read(measured(configured(
        "slb_latency.n_vectors=[70]", "slb_latency.repetitions=3", "slb_latency.peers=[numkong,numpy]")))["rows"]
    assert "numkong is not installed and is left out" in capsys.readouterr().err
    absent = [row for row in rows if row["impl"] == "numkong"]
    assert [(row["status"], row["p50_us"], row["exact"]) for row in absent] == [("not installed", None, None)]
    ours = next(row for row in rows if row["impl"] == "nexus in situ")
    assert ours["speedup_vs_numkong"] is None and ours["speedup_vs_numpy"]["value"] > 0


def test_a_wrong_answer_is_not_called_exact():
    table = slb_latency.Table(200, 16, 5, ["numpy"], seed=1)
    peer = next(contestant for contestant in table.contestants() if contestant.impl == "numpy")
    assert table.check(peer)["exact"]

    def changed(change):
        def answer(i):
            ids, scores = peer.answer(i)
            return change(ids.copy(), scores.copy())
        return slb_latency.Contestant("peer", "auto", answer, answer)

    def another_row(ids, scores):
        ids[2] = min(set(range(200)) - set(ids.tolist()))
        return ids, scores

    def one_off(ids, scores):
        scores[4] += 1
        return ids, scores

    def twice(ids, scores):
        ids[1], scores[1] = ids[0], scores[0]
        return ids, scores

    def not_quite_whole(ids, scores):
        return ids, scores + 0.01

    for change in (another_row, one_off, twice, not_quite_whole):
        assert not table.check(changed(change))["exact"], change.__name__
    assert table.check(changed(lambda ids, scores: (ids, scores)))["exact"]


def test_fewer_rows_than_k():
    table = slb_latency.Table(3, 16, 5, INSTALLED, seed=1)
    for contestant in table.contestants():
        if contestant.answer:
            assert table.check(contestant)["exact"], contestant.impl


def test_the_rows_of_known_times():
    keys = {"n_vectors": 100, "dim": 10}
    contestants = (("nexus", "avx2", 2000, {"exact": True, "nearest": 99, "queries": 100}),
                   ("numpy", "auto", 4000, {"exact": False, "nearest": 100, "queries": 100}),
                   ("ceiling", "slow", 2000, {}), ("ceiling", "fast", 2000, {}), ("overhead", "none", None, {}))
    checks = [{**keys, "impl": impl, "isa": isa, "kind": "check", "nbytes": nbytes, **facts}
              for impl, isa, nbytes, facts in contestants]
    rounds = [{**keys, "kind": "round", "nexus|avx2": 2.0 * i, "numpy|auto": 6.0 * i, "ceiling|slow": 3.0 * i,
               "ceiling|fast": 1.0 * i, "overhead|none": 0.5} for i in (1, 2, 3)]
    nexus, numpy, ceiling, overhead = slb_latency.rows_of_size(checks + rounds, ["numpy"], 0, 0.95)
    assert nexus["p50_us"].value == 4 and nexus["speedup_vs_numpy"].value == 3
    assert nexus["ceiling_share_pct"].value == 50
    assert nexus["gb_per_s"].value == 0.5 and nexus["gb_per_s"].ci_low <= 0.5 <= nexus["gb_per_s"].ci_high
    assert nexus["recall_at_1"].value == 0.99 and nexus["exact"] and not numpy["exact"]
    assert (ceiling["isa"], ceiling["p50_us"].value, ceiling["exact"]) == ("fast", 2, None)
    assert overhead["gb_per_s"] is None and overhead["p50_us"].value == 0.5


def test_the_tail_has_an_interval_of_order_statistics():
    values = list(np.random.default_rng(0).permutation(1000) + 1.0)
    estimate = slb_latency.p99(values, 0.95)
    assert (estimate.value, estimate.method, estimate.n) == (990, "order-statistics", 1000)
    # Binomial(1000, 0.99): 2.5 % lie below 983 or so, 2.5 % above 996.
    assert (estimate.ci_low, estimate.ci_high) == (983, 997)
    few = slb_latency.p99(values[:366], 0.95)
    assert (few.ci_low, few.ci_high, few.method) == (None, None, "too-few-samples")
    assert slb_latency.p99(values[:400], 0.95).ci_high is not None
    assert slb_latency.p99([2.0], 0.95).value == 2.0


def test_the_tail_interval_covers_as_often_as_it_says():
    rng, covered = np.random.default_rng(1), 0
    for _ in range(400):
        estimate = slb_latency.p99(rng.random(500).tolist(), 0.95)
        covered += estimate.ci_low <= 0.99 <= estimate.ci_high
    assert covered >= 0.92 * 400


def test_rounds_shuffle_and_call_everybody_twice():
    calls = []
    contestants = [slb_latency.Contestant(name, "x", lambda i, name=name: calls.append((name, i)), most_rounds=limit)
                   for name, limit in (("a", None), ("b", 2), ("c", None))]
    rounds = slb_latency.timed_rounds(contestants, 6, seed=0)
    assert [sorted(times) for times in rounds] == [["a|x", "b|x", "c|x"]] * 2 + [["a|x", "c|x"]] * 4
    assert calls[::2] == calls[1::2] and len(calls) == 2 * (3 * 2 + 2 * 4)
    assert len({tuple(name for name, i in calls if i == query and name != "b") for query in range(6)}) > 1


def test_the_module_lists_its_native_sources():
    from nexus.sources import sources

    assert {"kernels/slb_scan.hpp", "kernels/slb_dot.hpp", "kernels/slb_ceiling.hpp", "nexus/slb.py"} <= set(
        sources("experiments.slb_latency"))

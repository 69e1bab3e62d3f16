"""What artifacts say about ways to offer tools: points, queries that pair them, and what is no option."""
from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from choice_artifacts import measured, routing, spliced_choice

from experiments import rows
from experiments.deep_splice_ttft import GROUP_TOOLS
from nexus import artifact, measured_options, stats
from nexus.config import ROOT
from nexus.measured_options import CHOICE, FIDELITY, READERS, Measured, block_lengths, estimate, series_of

RUNS = [ROOT / "results" / name for name in ("qwen2.5-coder-0.5b", "smollm2-135m", "qwen2.5-coder-1.5b")]


@cache
def committed(out: Path) -> dict[str, Measured]:
    """The artifacts of a committed run that options are read from."""
    paths = {name: artifact.path_of(name, out) for name in READERS if name in artifact.experiments()}
    return {name: Measured(artifact.read(path), artifact.read_samples(path))
            for name, path in paths.items() if path.is_file()}


@pytest.mark.parametrize("out", RUNS, ids=lambda out: out.name)
def test_samples_of_committed_artifacts_give_the_accuracies_of_their_rows(out):
    series = series_of(committed(out))
    assert series and len({(s.experiment, s.name, s.shown) for s in series}) == len(series)
    for each in series:
        for point in each.points:
            if point.accuracy is not None:
                assert sum(point.right.values()) / len(point.right) == pytest.approx(point.accuracy.value)
                assert len(point.right) == point.accuracy.n
    for experiment in {s.experiment for s in series}:
        full = [s for s in series if s.experiment == experiment and s.reference]
        # What is held against it was asked no more than it was.
        for each in (s for s in series if s.experiment == experiment):
            for point in each.points:
                of_full = [p for s in full for p in s.points if p.queries == point.queries and p.accuracy is not None]
                if point.right and of_full:
                    assert any(point.right.keys() <= p.right.keys() for p in of_full), (each.name, point.queries)


def test_a_group_cache_has_the_tools_that_the_experiment_gives_it():
    assert measured_options.GROUP_TOOLS == GROUP_TOOLS


def test_controls_are_no_options():
    series = series_of(committed(RUNS[0]))
    for control in ("oracle", "random", "noise_floor", "engine-shift", "group-cache-rebuilt"):
        assert not [s.name for s in series if s.shown and s.name.startswith(control)]
    toy = spliced_choice({("full", 5, 256): 0.9, ("bare-no-reanchor", 5, 256): 0.1, ("noise_floor", 5, 256): 0.9,
                          ("identity", 5, 256): 0.9, ("bare", 5, 256): 0.4})
    assert [s.name for s in series_of({"spliced_choice": toy})] == ["full", "bare, compiled behind system"]


def test_routing_is_the_artifacts_own_default_and_reads_no_conversation():
    found = {"routing_accuracy_n250": routing({("bm25", 10): 0.7, ("toy", 10): 0.9, ("concat_all", 10): 0.8,
                                               ("concat_all", 250): None}, default="toy")}
    by_name = {s.name.split(" ")[0]: s for s in series_of(found)}
    assert set(by_name) == {"toy", "concat_all"}
    assert [p.depth for p in by_name["toy"].points] == [None] and not by_name["toy"].reads_all
    full, overflow = by_name["concat_all"].points
    assert by_name["concat_all"].reference and full.depth == 0 and full.accuracy.value == 0.8
    assert overflow.accuracy is None and "did not fit" in overflow.refusal and not overflow.right


def test_the_reading_decides_which_accuracy_counts_and_calls_left_out_are_those_of_free_generation():
    toy = spliced_choice({("head-16", 5, 256): 0.9}, free={("head-16", 5, 256): (0.4, 0.5)})
    for reading, accuracy in (("automaton", 0.9), ("free", 0.4)):
        [series] = series_of({"spliced_choice": toy}, reading)
        [point] = series.points
        assert point.accuracy.value == pytest.approx(accuracy) and point.no_call.value == pytest.approx(0.5)
        assert sum(point.right.values()) == round(accuracy * 60) and series.measures == CHOICE


def test_measured_nothing_is_no_estimate():
    assert estimate(None) is None
    assert estimate({"value": None, "ci_low": None, "ci_high": None, "n": 0, "method": "no-samples",
                     "level": 0.95}) is None


def test_block_lengths_count_each_tool_once():
    found = {"a": measured("a", [], [{"tool": "x", "block_tokens": 20}, {"tool": "x", "block_tokens": 20},
                                     {"tool": "y", "block_tokens": 20}, {"tool": "z"}])}
    assert block_lengths(found) == [20, 20]


def test_fidelity_of_one_tool_is_not_called_a_choice():
    for each in series_of(committed(RUNS[0])):
        one_tool = each.experiment in ("deep_splice_ttft", "repair_frontier")
        assert each.measures == (FIDELITY if one_tool else CHOICE)


def test_rows_of_the_experiment_are_read_as_they_are_written():
    """Samples in the experiment's own form, summarised by its own rows."""
    samples = []
    for arm, behind, n_right in (("full", None, 50), ("group", None, 48), ("head-16", "start", 45)):
        point = {"arm": arm, "n_tools": 5, "depth": 256, "compiled_behind": behind, "set": 0}
        samples += [{**point, "part": "choice", "reading": reading, "case": f"case-{i}", "correct": i < n_right,
                     "no_call": i == 59, "unknown_tool": False, "tools_tokens": 600, "recomputed": 80,
                     "dkl_nats": 0.1 * i, "top1": True} for i in range(60) for reading in ("automaton", "free")]
        samples += [{**point, "part": "time", "trial": trial, "ttft_ms": 300.0 + trial, "place_ms": None,
                     "recomputed": 80, "tools_tokens": 600} for trial in range(5)]
    table = [{key: item.row() if isinstance(item, stats.Estimate) else item for key, item in row.items()}
             for row in rows.spliced_choice(samples, 0, 0.95)]
    found = series_of({"spliced_choice": measured("spliced_choice", table, samples)})
    assert [(s.name, s.kind) for s in found] == [
        ("full", measured_options.PREFILL), ("group", measured_options.PREFIX),
        ("head-16, compiled behind start", measured_options.SPLICING)]
    for series, n_right in zip(found, (50, 48, 45)):
        [point] = series.points
        assert sum(point.right.values()) == n_right and len(point.right) == 60 and point.ttft_ms.value == 302
        assert point.no_call.value == pytest.approx(1 / 60) and series.tool_tokens == (120, 120)

"""What `make repro` says at its end, from metrics files alone."""
from __future__ import annotations

import pytest

from nexus.pipeline import write_metrics
from nexus.summary import summary


def lines_of(folder, **metrics):
    for name, numbers in metrics.items():
        write_metrics(folder, name, numbers)
    return summary(folder).splitlines()


def test_a_run_without_metrics_has_no_summary(tmp_path):
    assert summary(tmp_path) == ""


def test_the_best_repair_of_each_depth_in_the_order_of_depths(tmp_path):
    title, header, *lines = lines_of(tmp_path, repair_frontier={
        f"best.{n_past}": {"dkl_nats": 0.0123, "top1": 0.9, "speedup": 5.2, "recompute_pct": 10.0}
        for n_past in (2048, 256)})
    assert title.startswith("Best repair of at most 10 %")
    assert header.split() == ["n_past", "recomputed", "%", "KL", "nats", "same", "top-1", "%", "speed-up"]
    assert [line.split() for line in lines] == [[str(n_past), "10", "0.0123", "90", "5.20"] for n_past in (256, 2048)]


def test_the_calibrated_policy_with_its_violations(tmp_path):
    lines = lines_of(tmp_path, calibrated_repair={
        "256": {"recompute_pct": 2.5, "dkl_nats": 0.004, "violation_rate": 0.05, "speedup": 6.0},
        "1024": {"recompute_pct": 100.0, "dkl_nats": 0.0, "violation_rate": 0.0, "speedup": None}})
    assert lines[0].startswith("Calibrated policy")
    assert lines[1].split()[-3:] == ["violations", "%", "speed-up"]
    assert [line.split() for line in lines[2:]] == [["256", "2.5", "0.0040", "5", "6.00"],
                                                    ["1024", "100", "0.0000", "0", "-"]]


def test_accuracy_by_system_and_number_of_tools(tmp_path):
    lines = lines_of(tmp_path, routing_accuracy_n250={
        "hybrid.250": {"accuracy": 0.5}, "hybrid.10": {"accuracy": 0.875}, "concat_all.10": {"accuracy": 1.0},
        "concat_all.250": {"prompt_tokens": 40000.0}})
    assert lines[0].startswith("Right tool chosen")
    assert [line.split() for line in lines[1:]] == [["system", "10", "250"], ["hybrid", "87.5", "50"],
                                                    ["concat_all", "100", "-"]]


def test_no_accuracy_no_lines(tmp_path):
    assert lines_of(tmp_path, routing_accuracy_n250={"cells": 1}) == []


def test_columns_stand_under_their_headings(tmp_path):
    _, header, line = lines_of(tmp_path, calibrated_repair={
        "256": {"recompute_pct": 2.5, "dkl_nats": 0.004, "violation_rate": 0.05, "speedup": 6.0}})
    assert len(header) == len(line) <= 120


def test_all_parts_in_the_order_of_the_work(tmp_path):
    lines = lines_of(tmp_path, dkl_sweep={"bare.query.0": {"dkl_nats": 0.0}, "bare.query.64": {"dkl_nats": 0.16}},
                     splice_cost={"row.contiguous.4096.200": {"total_us": 190.0, "total_per_memcpy": 3.1}},
                     gating_nogo={"mean_spearman_rho": 0.2}, deep_splice_ttft={"warm.K4.256": {"speedup": 3.0}},
                     repair_frontier={"best.256": {"dkl_nats": 0.01}}, calibrated_repair={"256": {"dkl_nats": 0.01}})
    titles = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert titles == ["Divergence", "Splice", "Best", "Calibrated"]
    # Query probe and contiguous cells alone are all that these files hold.
    assert lines[2].split() == ["bare", "query", "0.0000", "0.1600"]


@pytest.mark.parametrize("name", ["repair_frontier", "calibrated_repair"])
def test_metrics_without_a_depth_are_passed_over(tmp_path, name):
    assert lines_of(tmp_path, **{name: {}}) == []
    assert lines_of(tmp_path, **{name: {"note": 1.0, "best.none": 2.0}}) == []

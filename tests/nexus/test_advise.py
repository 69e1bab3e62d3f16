"""Advice: what competes, what counts as equally accurate, and that nothing is extrapolated without a word."""
from __future__ import annotations

import dataclasses

import pytest
from choice_artifacts import CPU, measured, routing, share, spliced_choice, times

from nexus import artifact
from nexus.advise import (BETWEEN, MEASURED, NEAREST, REFUSED, RULE, Advice, AdviceError, Option, Tokens, advise,
                          between, known_at, verdict_on)
from nexus.config import ROOT
from nexus.measured_options import PREFILL, PREFIX, ROUTING, SPLICING, Measured, series_of
from nexus.stats import Estimate

TOKENS = Tokens((100, 120, 140), "three toy tools")
# Times at five tools and depth 256, by arm.
FAST = {("full", 5, 256): 900.0, ("group", 5, 256): 300.0, ("head-16", 5, 256): 200.0, ("bare", 5, 256): 100.0}


def advised(found: dict[str, Measured], n_tools: int = 5, depth: int = 256, machine: str = CPU, **more) -> Advice:
    return advise(found, n_tools, depth, TOKENS, machine, **more)


def choice(accuracies: dict, times_ms: dict | None = None, **more) -> dict[str, Measured]:
    return {"spliced_choice": spliced_choice(accuracies, times_ms or FAST, **more)}


def option(advice: Advice, name: str) -> Option:
    [found] = [o for o in advice.options if o.name.startswith(name)]
    return found


def elsewhere(found: Measured, cpu: str) -> Measured:
    return dataclasses.replace(found, artifact={**found.artifact, "provenance": {"cpu": cpu}})


def test_the_fastest_of_equal_accuracy_is_advised():
    advice = advised(choice({("full", 5, 256): 0.9, ("group", 5, 256): 0.9, ("head-16", 5, 256): 0.9,
                             ("bare", 5, 256): 0.1}))
    assert advice.advised.name == "head-16, compiled behind system" and advice.advised.kind == SPLICING
    assert advice.advised.basis == MEASURED and advice.advised.at == ((5, 256),)
    assert advice.advised.ttft_ms.value == 200 and advice.advised.accuracy.value == pytest.approx(0.9)
    bare = option(advice, "bare")
    assert bare.verdict.equal is False and bare.verdict.loss == pytest.approx(0.8) and bare.verdict.p < 1e-9
    assert [o.name.split(",")[0] for o in advice.options] == ["head-16", "group", "full", "bare"]
    assert "fastest at equal accuracy; next is prefix caching (group)" in advice.because
    assert advice.rule == RULE


def test_times_that_are_not_apart_are_said_to_be_so():
    advice = advised(choice({("full", 5, 256): 0.9, ("group", 5, 256): 0.9, ("head-16", 5, 256): 0.9},
                            FAST | {("group", 5, 256): 210.0}))
    assert advice.advised.name.startswith("head-16")
    assert "not shown to be faster than prefix caching (group)" in advice.because


@pytest.mark.parametrize("value, n, wrong_first, equal, p", [
    (0.9, 60, (), True, 1.0),
    (0.9, 60, ("bare",), True, 1.0),  # as often, on other queries
    (0.95, 60, (), True, 0.25),
    (52 / 60, 60, (), True, 0.5),
    (50 / 60, 60, (), False, 0.125),  # 6.7 points: more than allowed though not significant
    (0.86, 400, (), False, 3.1e-5),  # 4 points: allowed, but surely worse
    (0.9, 20, (), None, 1.0),  # too few to tell
    (0.5, 20, (), False, 0.0078),
])
def test_equal_is_paired_and_errs_on_the_safe_side(value, n, wrong_first, equal, p):
    found = choice({("full", 5, 256): 0.9, ("bare", 5, 256): value}, n=n, wrong_first=wrong_first)
    verdict = option(advised(found), "bare").verdict
    assert verdict.equal is equal, verdict
    assert verdict.p == pytest.approx(p, rel=0.1) and f"same {n} queries" in verdict.why


def test_without_samples_intervals_decide():
    found = choice({("full", 5, 256): 0.9, ("bare", 5, 256): 52 / 60, ("head-16", 5, 256): 0.5})
    found["spliced_choice"] = dataclasses.replace(found["spliced_choice"], samples=[])
    advice = advised(found)
    assert option(advice, "bare").verdict.equal is True and option(advice, "bare").verdict.p is None
    assert option(advice, "head-16").verdict.equal is False
    assert "not paired" in option(advice, "bare").verdict.why
    [series] = [s for s in series_of(found) if s.name == "full"]
    far = dataclasses.replace(series.points[0], accuracy=Estimate(**share(0.88, 1000)))
    sure = dataclasses.replace(series.points[0], accuracy=Estimate(**share(0.92, 1000)))
    # Only 4 points, but the interval does not reach the other's value.
    assert verdict_on(far, sure).equal is False
    unknown = verdict_on(dataclasses.replace(far, accuracy=None), sure)
    assert unknown.equal is None and "not measured" in unknown.why


CROSS = {("full", n, d): 0.9 for n, d in ((1, 256), (5, 256), (10, 256), (5, 0), (5, 1024))}


def test_between_two_depths_it_is_interpolated_and_must_be_equal_at_both():
    accuracies = CROSS | {("bare", 5, 256): 0.9, ("bare", 5, 1024): 0.9,
                          ("head-16", 5, 256): 0.9, ("head-16", 5, 1024): 0.3}
    speeds = {("full", 5, 256): 800.0, ("full", 5, 1024): 1000.0, ("bare", 5, 256): 100.0, ("bare", 5, 1024): 140.0,
              ("head-16", 5, 256): 50.0, ("head-16", 5, 1024): 50.0}
    advice = advised(choice(accuracies, speeds), depth=640)
    assert advice.advised.name.startswith("bare") and advice.advised.basis == BETWEEN
    assert advice.advised.at == ((5, 256), (5, 1024))
    time = advice.advised.ttft_ms
    assert (time.value, time.ci_low, time.ci_high) == pytest.approx((120, 108, 132))
    assert (time.n, time.method, time.level) == (60, "interpolated", 0.95)
    assert option(advice, "full").ttft_ms.value == 900
    worse = option(advice, "head-16")
    assert worse.verdict.equal is False and worse.accuracy.value == pytest.approx(0.6) and "+" not in worse.verdict.why


def test_between_two_numbers_of_tools():
    advice = advised(choice(CROSS, {("full", 5, 256): 500.0, ("full", 10, 256): 1000.0}), n_tools=7)
    assert advice.advised.basis == BETWEEN and advice.advised.at == ((5, 256), (10, 256))
    assert advice.advised.ttft_ms.value == pytest.approx(700)


@pytest.mark.parametrize("n_tools, depth, nearest", [(11, 256, (10, 256)), (5, 1025, (5, 1024)), (20, 3000, None),
                                                     (7, 640, None), (3, 0, (5, 0))])
def test_outside_of_both_axes_the_nearest_point_is_told_and_does_not_compete(n_tools, depth, nearest):
    advice = advised(choice(CROSS), n_tools=n_tools, depth=depth)
    assert advice.advised is None and advice.measured_on is None
    [full] = advice.options
    assert full.basis == NEAREST and full.at[0] in {key[1:] for key in CROSS}
    assert nearest is None or full.at == (nearest,)
    assert "no option was measured for so many tools at this depth" in advice.because


def test_a_measured_option_wins_over_a_nearer_one_that_is_not():
    found = choice(CROSS) | {"routing_accuracy_n250": routing({("toy", 50): 0.8, ("concat_all", 50): 0.8})}
    advice = advised(found, n_tools=50)
    assert advice.advised.kind == ROUTING and advice.advised.basis == MEASURED
    assert option(advice, "concat_all").basis == NEAREST and option(advice, "concat_all").at == ((50, 0),)
    assert "the only way that was measured for this" in advice.because


def test_routing_is_held_against_the_model_that_reads_everything():
    accuracies = {("toy", 10): 0.6, ("concat_all", 10): 0.9, ("rag_mcp", 10): 0.88}
    advice = advised({"routing_accuracy_n250": routing(accuracies, {"rag_mcp": 500.0, "concat_all": 900.0})}, 10, 0)
    assert option(advice, "toy").verdict.equal is False
    assert advice.advised.name.startswith("rag_mcp")
    better = routing(accuracies | {("toy", 10): 0.97})
    assert advised({"routing_accuracy_n250": better}, 10, 0).advised.name == "toy"


def test_where_everything_does_not_fit_the_best_is_the_reference():
    found = {"routing_accuracy_n250": routing({("toy", 250): 0.5, ("rag_mcp", 250): 0.7, ("concat_all", 250): None},
                                              {"rag_mcp": 500.0})}
    advice = advised(found, 250, 0)
    assert advice.advised.name.startswith("rag_mcp") and option(advice, "toy").verdict.equal is False
    full = option(advice, "concat_all")
    assert full.basis == REFUSED and any("did not fit" in remark for remark in full.remarks)


def test_between_what_fits_and_what_does_not_is_refused():
    found = {"routing_accuracy_n250": routing({("concat_all", 10): 0.9, ("concat_all", 50): None, ("toy", 10): 0.9,
                                               ("toy", 50): 0.8})}
    full = option(advised(found, 30, 0), "concat_all")
    assert full.basis == REFUSED and full.ttft_ms is None and full.remarks[0].startswith("50 tools")


def test_tools_that_do_not_fit_the_models_context_are_refused_but_for_routing():
    found = choice({("full", 5, 256): 0.9}) | {"routing_accuracy_n250": routing({("toy", 5): 0.9})}
    advice = advise(found, 5, 256, Tokens((2000,), "long"), CPU)
    full = option(advice, "full")
    assert full.basis == REFUSED and "tools and conversation have 10256 tokens" in full.remarks[0]
    assert advice.advised.kind == ROUTING


def test_equal_within_its_queries_and_far_below_on_others_is_not_equal():
    found = choice({("full", 10, 256): 0.5, ("bare", 10, 256): 0.5}, {("bare", 10, 256): 1.0})
    found["routing_accuracy_n250"] = routing({("toy", 10): 0.95, ("concat_all", 10): 0.9})
    advice = advised(found, 10)
    assert advice.advised.kind == ROUTING
    assert option(advice, "bare").verdict.equal is False and "wholly below that of toy" in option(
        advice, "bare").verdict.why
    assert any("different queries" in remark for remark in advice.remarks)


def test_what_reads_everything_is_not_equal_where_another_way_is_far_better_on_its_queries():
    found = {"routing_accuracy_n250": routing({("toy", 10): 0.95, ("concat_all", 10): 0.7}, {"concat_all": 1.0})}
    advice = advised(found, 10, 0)
    full = option(advice, "concat_all")
    assert advice.advised.kind == ROUTING and full.ttft_ms.value < advice.advised.ttft_ms.value
    assert full.verdict.equal is False and "wholly below that of toy (95 % on the same queries)" in full.verdict.why
    # Outside of what was measured it is told as it was there.
    assert option(advised(found, 10, 256), "concat_all").verdict.equal is True


def test_only_one_machine_competes_and_this_one_first():
    found = choice({("full", 5, 256): 0.9, ("bare", 5, 256): 0.9})
    found["routing_accuracy_n250"] = elsewhere(routing({("toy", 5): 0.95}), "other CPU")
    advice = advised(found)
    assert advice.measured_on == CPU and advice.advised.name.startswith("bare")
    assert option(advice, "toy").remarks == ("measured on other CPU, not on this machine",)
    away = advised(found, machine="third CPU")
    assert away.measured_on == CPU and away.because.startswith(f"on {CPU}, not on this machine (third CPU): ")
    assert advised(found, machine="other CPU").advised.kind == ROUTING


def test_what_is_not_known_to_be_equal_is_not_advised():
    advice = advised(choice({("bare", 5, 256): 0.9, ("group", 5, 256): 0.3}))
    # Of a lone experiment the best is the reference.
    assert advice.advised.name.startswith("bare")
    found = {"deep_splice_ttft": measured("deep_splice_ttft", [
        {"n_past": 256, "curve_k": None, "arm": "group-cache", "protocol": "cold", "compiled_behind": "nothing",
         "splice_ms": times(100.0, 5), "prefill_ms": times(900.0, 5), "top1": None}], [])}
    nothing = advised(found)
    assert nothing.advised is None and "is known to be as accurate as it must be" in nothing.because
    assert option(nothing, "group-cache").verdict.equal is None and option(nothing, "group-cache").kind == PREFIX


def test_remarks_tell_what_the_numbers_do_not():
    found = choice({("full", 5, 256): 0.9, ("group", 5, 256): 0.9}, free={("group", 5, 256): (0.5, 0.4)})
    advice = advised(found)
    assert any("makes no call on 40 % of queries" in remark for remark in advice.remarks)
    assert any("where the prefix is resident" in remark for remark in advice.remarks)
    assert not any("choosing from spliced tools" in remark for remark in advice.remarks)
    alone = advised({"routing_accuracy_n250": routing({("toy", 5): 0.9})})
    assert any("choosing from spliced tools was not measured" in remark for remark in alone.remarks)
    assert any("reads the query alone" in remark for remark in alone.remarks)
    sidecar = measured("sidecar_accuracy", [{"metric": "first_argument_signature_ms", "value": times(300.0)},
                                            {"metric": "turn_ms", "value": times(900.0)}], [])
    with_arguments = advised({"routing_accuracy_n250": routing({("toy", 5): 0.9}), "sidecar_accuracy": sidecar})
    assert any("comes 300 ms later, 310 ms in all" in remark for remark in with_arguments.remarks)
    assert [cost.value.value for cost in with_arguments.costs] == [300.0]


def test_the_reading_changes_what_is_equal():
    found = choice({("full", 5, 256): 0.9, ("bare", 5, 256): 0.9},
                   free={("full", 5, 256): (0.9, 0.0), ("bare", 5, 256): (0.1, 0.8)})
    assert advised(found).advised.name.startswith("bare")
    assert advised(found, reading="free").advised.kind == PREFILL


def test_one_tool_is_read_as_generated_freely():
    found = choice({("full", 5, 256): 0.9}, free={("full", 1, 256): (0.8, 0.2), ("bare", 1, 256): (0.8, 0.1)})
    advice = advised(found, n_tools=1)
    assert advice.advised.basis == MEASURED and advice.advised.accuracy.value == pytest.approx(0.8)
    assert any("accuracies are of free generation" in remark for remark in advice.remarks)


def test_tools_of_another_length_than_measured_are_remarked():
    found = choice({("full", 5, 256): 0.9})
    found["spliced_choice"].samples[0]["block_tokens"] = 300
    assert "measured with tools of 300 to 300 tokens; yours have 120" in advised(found).options[0].remarks[0]
    # Of five tools together: 90 tokens each.
    found["spliced_choice"].samples[1]["tools_tokens"] = 450
    assert advised(found).options[0].remarks == ()


def test_costs_are_interpolated_between_lengths_and_marked_outside():
    rows = [{"n_tokens": n, "n_ctx": 4096, "v_layout": layout, "cells": "contiguous", "prefill_us": times(us),
             "total_us": times(us / 1000)} for n, us in ((50, 1e5), (200, 4e5)) for layout in ("row", "transposed")]
    found = choice({("full", 5, 256): 0.9}) | {
        "splice_cost": measured("splice_cost", rows, [], runtime={"n_ctx": 4096}),
        "l0_radix": measured("l0_radix", [
            {"part": "copy", "arm": "nexus", "n_tokens": 256, "copy_us": times(20.0), "hit_rate": None},
            {"part": "trace", "arm": "nexus", "n_tokens": None, "copy_us": None, "hit_rate": share(0.8)}], [])}
    prefill, place, copy, hits = advised(found).costs
    assert (prefill.basis, prefill.unit, prefill.at) == (BETWEEN, "ms", "50 and 200 tokens")
    assert prefill.value.value == pytest.approx(240) and place.value.value == pytest.approx(240)
    assert "120 tokens (2 threads)" in prefill.what
    # 5 tools of 120 tokens and 256 of conversation.
    assert (copy.basis, copy.at, copy.value.value) == (NEAREST, "256 tokens", 20.0) and "856 tokens" in copy.what
    assert hits.unit == "%" and hits.value.value == pytest.approx(80) and hits.value.ci_high < 100


@pytest.mark.parametrize("n_tools, depth, said", [(0, 5, "--tools is 0"), (1, -1, "--depth is -1")])
def test_numbers_that_make_no_sense_are_refused(n_tools, depth, said):
    with pytest.raises(AdviceError, match=said):
        advised(choice({("full", 5, 256): 0.9}), n_tools, depth)


def test_no_option_is_an_error():
    with pytest.raises(AdviceError, match="none of splice_cost tells"):
        advised({"splice_cost": measured("splice_cost", [], [], runtime={"n_ctx": 4096})})


def test_a_line_between_estimates_keeps_what_is_missing_missing():
    a, b = Estimate(1.0, 0.5, 2.0, 9, "x", 0.95), Estimate(3.0, None, None, 4, "single-sample", 0.9)
    assert between(a, None, 0.5) is None
    assert between(a, b, 0.25) == Estimate(1.5, None, None, 4, "interpolated", 0.9)


def test_a_known_point_is_taken_as_it_is():
    [series] = series_of(choice(CROSS))
    assert known_at(series, 5, 1024) == (MEASURED, [p for p in series.points if p.depth == 1024], 0.0)


@pytest.mark.parametrize("model", ["qwen2.5-coder-0.5b", "smollm2-135m"])
def test_advice_from_committed_artifacts_repeats_their_numbers(model):
    out = ROOT / "results" / model
    path = artifact.path_of("routing_accuracy_n250", out)
    found = {"routing_accuracy_n250": Measured(artifact.read(path), artifact.read_samples(path))}
    read = found["routing_accuracy_n250"].artifact
    cpu, system = read["provenance"]["cpu"], read["config"]["routing"]["system"]
    rows = {row["n_tools"]: row for row in read["rows"] if row["system"] == system}
    for n_tools in rows:
        advice = advised(found, n_tools, 600, machine=cpu)
        routed = option(advice, system)
        assert routed.basis == MEASURED and routed.accuracy.row() == rows[n_tools]["accuracy"]
        assert routed.ttft_ms.row() == rows[n_tools]["choice_ms"]
        # At this depth it is all that was measured; the model that reads everything was asked at depth 0.
        assert advice.advised is routed
    beyond = advised(found, max(rows) + 1, 600, machine=cpu)
    assert beyond.advised is None and option(beyond, system).basis == NEAREST
    assert option(beyond, system).at == ((max(rows), None),)

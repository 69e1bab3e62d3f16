"""Rows of the repair experiments from synthetic samples: known answers, and what may not be mixed."""
from __future__ import annotations

import pytest

from experiments import rows
from nexus import stats

SEED, LEVEL = 0, 0.95


def sample(case=0, ttft_ms=10.0, **changes):
    """20 of 80 block tokens decoded before a query of 20: 40 % of a prefill."""
    return {"n_past": 256, "arm": "head", "recompute_pct": 25.0, "compiled_behind": "system", "probe": "query",
            "case": f"c{case}", "block_tokens": 80, "query_tokens": 20, "recomputed": 20, "probe_tokens": 0.0,
            "dkl_nats": 0.01 * (1 + case), "top1": True, "ttft_ms": ttft_ms} | changes


def floor(case=0, ttft_ms=100.0, **changes):
    return sample(case, ttft_ms, **{"arm": "noise_floor", "recompute_pct": 100.0, "compiled_behind": "nothing",
                                    "recomputed": 80, "dkl_nats": 0.001 * (1 + case)} | changes)


# --- building blocks


def test_groups_and_members_keep_the_order_of_appearance():
    samples = [sample(0, n_past=512), sample(0), sample(1, n_past=512), sample(1)]
    assert {key: [s["case"] for s in members] for key, members in rows.grouped(samples, "n_past").items()} == {
        (512,): ["c0", "c1"], (256,): ["c0", "c1"]}
    assert list(rows.grouped(samples, "n_past", "arm")) == [(512, "head"), (256, "head")]


@pytest.mark.parametrize(("changes", "share"), [
    ({}, 0.4), ({"recomputed": 0}, 0.2), ({"recomputed": 80}, 1.0), ({"probe_tokens": 6.0}, 0.47),
    ({"context_tokens": 100}, 0.7), ({"context_tokens": 100, "probe_tokens": 12.0}, 0.77),
])
def test_the_decoded_share_counts_context_block_query_and_probe(changes, share):
    assert rows.decoded_share(sample(**changes)) == pytest.approx(share)
    assert rows.decoded_share({k: v for k, v in sample().items() if k != "probe_tokens"}) == 0.4


def test_fidelity_is_a_mean_and_a_wilson_share():
    found = rows.fidelity([sample(case, top1=case != 0) for case in range(4)], SEED, LEVEL)
    assert found["dkl_nats"] == stats.mean([0.01, 0.02, 0.03, 0.04], SEED, LEVEL)
    assert found["top1"] == stats.wilson(3, 4, LEVEL)


def test_latencies_are_medians_and_ratios_of_pairs():
    prefills = [floor(case, ms) for case, ms in enumerate((100.0, 200.0, 400.0))]
    found = rows.latency([sample(case, ms) for case, ms in enumerate((60.0, 50.0, 100.0))], prefills, SEED, LEVEL)
    assert (found["prefill_ms"].value, found["splice_ms"].value) == (200, 60)
    assert found["speedup"].value == pytest.approx(200 / 60)
    assert found["ideal_speedup"].value == pytest.approx(2.5)
    assert found["latency_per_ideal"].value == pytest.approx(60 / 80)
    assert {estimate.n for estimate in found.values()} == {3}


def test_ratios_are_paired_by_case():
    # Every pair has the ratio 4, although the times differ tenfold: resampled together, it never changes by much.
    times = [10.0 * (1 + case) for case in range(10)]
    prefills = [floor(case, 4 * ms) for case, ms in enumerate(times)]
    found = rows.latency([sample(case, ms) for case, ms in enumerate(times)], prefills, SEED, LEVEL)
    assert found["speedup"].value == pytest.approx(4) and found["latency_per_ideal"].value == pytest.approx(0.625)
    assert found["speedup"].ci_high == pytest.approx(4) or found["speedup"].ci_high is None
    apart = stats.ratio_of_medians([4 * ms for ms in times], times, SEED, LEVEL)
    assert apart.ci_high > 5, "unpaired, it would"


def test_ideals_scale_each_prefill_by_its_own_share():
    samples = [sample(0, 10.0, recomputed=0), sample(1, 10.0, recomputed=80), sample(2, 10.0, recomputed=30)]
    found = rows.latency(samples, [floor(case, 100.0) for case in range(3)], SEED, LEVEL)
    assert found["ideal_speedup"].value == pytest.approx(100 / 50)
    assert found["latency_per_ideal"].value == pytest.approx(10 / 50)


# --- repair_frontier


def frontier_samples():
    samples = []
    for n_past, factor in ((256, 1), (512, 2)):
        for probe in ("query", "block_end"):
            for case in range(3):
                samples += [floor(case, 100.0 * factor, n_past=n_past, probe=probe),
                            sample(case, 40.0, n_past=n_past, probe=probe, dkl_nats=0.1 * factor),
                            sample(case, 20.0, n_past=n_past, probe=probe, arm="head-4", recompute_pct=None,
                                   recomputed=4, block_tokens=(40, 80, 160)[case])]
    return samples


def test_the_frontier_has_a_row_per_cell_beside_the_prefill_of_its_depth():
    table = rows.repair_frontier(frontier_samples(), SEED, LEVEL)
    assert len(table) == 2 * 2 * 3
    for row in table:
        factor = row["n_past"] // 256
        assert row["prefill_ms"].value == 100 * factor
        assert row["speedup"].value == pytest.approx(
            {"noise_floor": 1, "head": 2.5 * factor, "head-4": 5 * factor}[row["arm"]])
        assert row["recomputed_tokens"].value == {"noise_floor": 80, "head": 20, "head-4": 4}[row["arm"]]
        assert row["dkl_nats"].n == row["speedup"].n == 3
        if row["arm"] == "head":
            assert row["dkl_nats"].value == pytest.approx(0.1 * factor) and row["recompute_pct"] == 25
        if row["arm"] == "noise_floor":
            assert row["ideal_speedup"].value == row["latency_per_ideal"].value == 1


def test_the_latency_over_all_depths_is_the_median_of_all_pairs_behind_the_query():
    samples = [make for n_past, ms in ((256, (40.0, 44.0)), (512, (48.0, 80.0))) for case in range(2)
               for make in (floor(case, n_past=n_past), sample(case, ms[case], n_past=n_past),
                            sample(case, 999.0, n_past=n_past, probe="block_end"),
                            floor(case, 1.0, n_past=n_past, probe="block_end"))]
    heads = [row for row in rows.repair_frontier(samples, SEED, LEVEL) if row["arm"] == "head"]
    # 40 % of 100 ms is the ideal: 1, 1.1, 1.2 and 2 times that were taken.
    assert len(heads) == 4
    assert [row["latency_per_ideal_all_depths"].value for row in heads] == pytest.approx([1.15] * 4)
    assert {row["latency_per_ideal_all_depths"].n for row in heads} == {4}


def test_the_share_of_an_arm_that_counts_tokens_is_its_mean():
    counted = [row for row in rows.repair_frontier(frontier_samples(), SEED, LEVEL) if row["arm"] == "head-4"]
    assert len(counted) == 4
    assert all(row["recompute_pct"] == pytest.approx((10 + 5 + 2.5) / 3) for row in counted)


def test_what_blocks_are_compiled_behind_is_not_mixed():
    samples = [floor(0), floor(1)] + [sample(case, behind_ms, compiled_behind=behind, dkl_nats=nats)
                                      for behind, behind_ms, nats in (("system", 50.0, 0.5), ("preamble-64", 25.0, 0.1))
                                      for case in range(2)]
    table = {row["compiled_behind"]: row for row in rows.repair_frontier(samples, SEED, LEVEL)}
    assert {name: (row["dkl_nats"].value, row["speedup"].value) for name, row in table.items()} == {
        "nothing": (pytest.approx(0.0015), 1), "system": (0.5, 2), "preamble-64": (0.1, 4)}


# --- best_within


def entry(arm, pct, nats, n_past=256, probe="query", speedup=3.0):
    def metric(value):
        return stats.Estimate(value, None, None, 3, "identical-samples", LEVEL)
    return {"arm": arm, "recompute_pct": pct, "n_past": n_past, "probe": probe, "dkl_nats": metric(nats),
            "top1": metric(1.0), "speedup": metric(speedup)}


def test_the_best_arm_is_found_per_depth_among_those_that_recompute_little():
    table = [entry("head", 10.0, 0.02), entry("suffix", 5.0, 0.3), entry("head", 10.5, 0.001), entry("full", 100.0, 0.0),
             entry("head", 2.0, 0.0001, probe="block_end"), entry("head", 5.0, 0.07, 512, speedup=4.0)]
    assert rows.best_within(table, 10.0) == {
        "best.256": {"recompute_pct": 10.0, "dkl_nats": 0.02, "top1": 1.0, "speedup": 3.0},
        "best.512": {"recompute_pct": 5.0, "dkl_nats": 0.07, "top1": 1.0, "speedup": 4.0}}


def test_the_oracle_does_not_compete():
    table = [entry("oracle", 5.0, 0.0), entry("head", 5.0, 0.5)]
    assert rows.best_within(table, 10.0)["best.256"]["dkl_nats"] == 0.5
    assert rows.best_within(table[:1], 10.0) == {}


# --- rope_boundary_gate


def test_the_gate_keeps_ways_of_recomputing_apart():
    samples = [sample(case, arm=arm, probe=probe, faithful=arm == "sequential", cells_per_position=cells, ttft_ms=9.0)
               for arm, cells in (("sequential", 1.0), ("duplicates", 1.25)) for probe in ("query", "block_end")
               for case in range(2)]
    table = rows.rope_boundary_gate(samples, SEED, LEVEL)
    assert [(row["arm"], row["probe"], row["faithful"], row["cells_per_position"].value) for row in table] == [
        (arm, probe, faithful, cells) for arm, faithful, cells in (("sequential", True, 1.0),
                                                                   ("duplicates", False, 1.25))
        for probe in ("query", "block_end")]
    assert all(row["ttft_ms"].value == 9 and row["dkl_nats"].value == pytest.approx(0.015) for row in table)


# --- deep_splice_ttft


def trial(i, arm, ttft_ms, protocol="warm", curve=None, **changes):
    return sample(i, ttft_ms, **{"trial": i, "arm": arm, "protocol": protocol, "curve_k": curve, "r_pct": 25.0,
                                 "context_tokens": 300 if protocol == "cold" else 0} | changes)


def timed(n_past=256, protocol="warm", trials=4, scale=1.0):
    """Prefill takes 100, 200, 300 … ms, the arm a quarter of that."""
    samples = []
    for i in range(trials):
        ms = 100.0 * scale * (1 + i)
        for probe in ("query", "block_end"):
            end = {"dkl_nats": 0.5, "top1": False} if probe == "block_end" else {}
            at = {"n_past": n_past, "protocol": protocol, "probe": probe} | end
            samples += [trial(i, "prefill", ms, **at, recomputed=80), trial(i, "head-4", ms / 4, **at),
                        trial(i, "suffix-R(n)", ms / 2, curve=4.0, **at)]
    return samples


def peer(i, arm, ttft_ms, **changes):
    """A peer whose logits are not compared: one sample, without fidelity."""
    return {key: value for key, value in trial(i, arm, ttft_ms, **changes).items() if key not in ("dkl_nats", "top1")}


def test_each_arm_stands_beside_the_prefill_of_its_depth_and_protocol():
    samples = timed() + timed(protocol="cold", scale=10) + timed(n_past=512, scale=3)
    table = {(row["n_past"], row["protocol"], row["arm"]): row for row in rows.deep_splice_ttft(samples, SEED, LEVEL)}
    assert len(table) == 3 * 2
    for (n_past, protocol, arm), row in table.items():
        assert row["prefill_ms"].value == 250 * (3 if n_past == 512 else 10 if protocol == "cold" else 1)
        assert row["speedup"].value == pytest.approx(4 if arm == "head-4" else 2)
        assert row["ideal_speedup"].value == pytest.approx(400 / 340 if protocol == "cold" else 2.5)
        assert row["curve_k"] == (None if arm == "head-4" else 4.0) and row["r_pct"] == 25
        assert row["recomputed_tokens"].value == 20
        assert row["dkl_nats"].value == pytest.approx(0.025) and row["top1"].value == 1
        assert row["dkl_block_end_nats"].value == 0.5 and row["top1_block_end"].value == 0


def test_a_peer_measured_in_fewer_trials_is_paired_with_the_prefills_of_these():
    samples = timed() + [peer(i, "group-cache", 50.0 * (1 + i)) for i in (2, 1)]
    row, = (row for row in rows.deep_splice_ttft(samples, SEED, LEVEL) if row["arm"] == "group-cache")
    assert row["prefill_ms"].value == 250 and row["prefill_ms"].n == 2, "of trials 1 and 2: 200 and 300 ms"
    # Paired: 200/100 and 300/150. A wrong pairing has the same ratio of medians but a wide interval.
    assert row["speedup"].value == pytest.approx(2)
    assert row["speedup"].ci_high is None or row["speedup"].ci_high == pytest.approx(2)
    assert row["dkl_nats"] is row["top1"] is row["dkl_block_end_nats"] is row["top1_block_end"] is None


@pytest.mark.parametrize(("prefill", "splice", "found"), [
    ([100, 200, 400], [50, 100, 100], (2.0, 10 / 3)), ([90, 90, 90], [30, 30, 30], (3.0, 3.0)),
    ([100, 200], [50, 100], (None, None)), ([], [], (None, None))])
def test_speed_ups_without_one_trial(prefill, splice, found):
    assert rows.without_one(prefill, splice) == pytest.approx(found)


@pytest.mark.parametrize("arm", ["engine-shift", "group-cache", "group-cache-rebuilt", "prefix-reuse"])
def test_what_decodes_other_tokens_has_no_ideal(arm):
    table = rows.deep_splice_ttft(timed() + [trial(i, arm, 10.0, probe=probe) for i in range(4)
                                             for probe in ("query", "block_end")], SEED, LEVEL)
    assert {row["arm"]: row["ideal_speedup"] is None for row in table} == {
        "head-4": False, "suffix-R(n)": False, arm: True}
    row, = (row for row in table if row["arm"] == arm)
    assert row["latency_per_ideal"] is None and row["speedup"].value == pytest.approx(25)
    assert row["dkl_nats"].value == pytest.approx(0.025)


# --- calibrated_repair


def ladder_samples(nats, which="calibration", n_past=256, arm="head-16"):
    keys = {"n_past": n_past, "set": which, "compiled_behind": "preamble-64"}
    return [make(case, probe=probe, **keys | extra) for case, kl in enumerate(nats) for probe, extra in (
        ("query", {}), ("block_end", {"dkl_nats": 9.0, "ttft_ms": 999.0}))
        for make, extra in ((sample, {"arm": arm, "dkl_nats": kl} | extra), (floor, {"arm": "full"} | extra))]


def by_arm(table):
    return {(row["n_past"], row["set"], row["arm"]): row for row in table}


def test_a_ladders_rows_count_violations_behind_the_query():
    nats = [0.001, 0.002, 0.02, 0.021, 0.5]
    table = by_arm(rows.calibrated_repair(
        ladder_samples([0.003, 0.001, 0.002]), ladder_samples(nats, "test"),
        {256: "head-16"}, SEED, LEVEL, 0.02))
    assert list(table) == [(256, which, arm) for which in ("calibration", "test") for arm in ("head-16", "full")]
    calibration, test = (table[256, which, "head-16"] for which in ("calibration", "test"))
    assert test["violation_rate"] == stats.wilson(2, 5, LEVEL), "exactly epsilon is no violation"
    assert calibration["violation_rate"] == stats.wilson(0, 3, LEVEL)
    assert test["dkl_nats"] == stats.mean(nats, SEED, LEVEL)
    assert test["dkl_upper_nats"] == pytest.approx(stats.mean(nats, SEED, 0.90).ci_high, rel=1e-9)
    assert test["dkl_nats"].value < test["dkl_upper_nats"] < test["dkl_nats"].ci_high
    assert test["noise_floor_nats"].value == table[256, "test", "full"]["dkl_nats"].value == pytest.approx(0.003)
    for row in (calibration, test):
        assert (row["chosen"], row["compiled_behind"], row["epsilon_nats"]) == (True, "preamble-64", 0.02)
        assert row["recompute_pct"] == 25 and row["speedup"].value == 10
        assert not {"ideal_speedup", "latency_per_ideal"} & set(row)
    assert not table[256, "test", "full"]["chosen"]


def test_depths_and_sets_are_not_mixed():
    table = by_arm(rows.calibrated_repair(
        ladder_samples([0.1, 0.2]) + ladder_samples([0.3, 0.5], n_past=512),
        ladder_samples([0.0, 0.0], "test") + ladder_samples([1.0, 2.0], "test", 512, "none"), {256: "head-16", 512: "full"},
        SEED, LEVEL, 0.4))
    found = {key: (row["dkl_nats"].value, row["violation_rate"].value) for key, row in table.items()
             if key[2] != "full"}
    assert found == {(256, "calibration", "head-16"): (pytest.approx(0.15), 0.0),
                     (512, "calibration", "head-16"): (0.4, 0.5),
                     (256, "test", "head-16"): (0.0, 0.0), (512, "test", "none"): (1.5, 1.0)}
    assert table[256, "test", "head-16"]["dkl_upper_nats"] is None, "identical samples give no bound"
    assert {key for key, row in table.items() if row["chosen"]} == {
        (n_past, which, arm) for n_past, arm in ((256, "head-16"), (512, "full")) for which in ("calibration", "test")}

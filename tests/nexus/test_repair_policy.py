"""The published schedule and the calibrated policy: known answers, and what calibration may never choose."""
from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexus import artifact, repair_policy, stats
from nexus.repair import Place, RepairError, arm_of
from nexus.repair_policy import (
    Calibrated, Choice, Rung, Schedule, calibrate, default_policy, schedule_pct, splice_with, upper_bound,
)

SHA = "ab" * 32
TUPLE = {"model": "toy", "model_sha256": SHA, "embedder": None, "llama_cpp": "b1"}
PROVENANCE = {"git_commit": "0" * 40, "git_dirty": False, "cpu": "test", "threads": 1, "isa": "scalar",
              "versions": {"numpy": "2"}}
CHOICES = (Choice(1024, "head-10%", "ensemble-4x256", 0.011), Choice(256, "head-16", "system", 0.012),
           Choice(512, "full", "system", None))


def chosen(policy, n_past: int, n_tokens: int = 200) -> list[int]:
    return policy.arm(n_past).select(Place(None, None, np.arange(n_tokens), 0, 0)).tolist()


# --- the schedule


@pytest.mark.parametrize(("n_past", "k", "pct"), [
    (0, 4, 5.0), (256, 4, 5.0), (512, 4, 36.7), (1024, 4, 100.0), (1025, 4, 100.0), (10**6, 4, 100.0),
    (0, 16, 5.0), (256, 16, 5.0), (512, 16, 11.3), (1024, 16, 24.0), (2048, 16, 49.3), (4096, 16, 100.0),
    (5000, 16, 100.0),
])
def test_the_schedule_has_the_published_values(n_past, k, pct):
    assert round(schedule_pct(n_past, recompute_full_mult=k), 1) == pct
    assert Schedule(recompute_full_mult=k).pct(n_past) == schedule_pct(n_past, recompute_full_mult=k)


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 2000), st.floats(0, 100),
       st.floats(1.001, 50))
def test_the_schedule_never_falls_and_stays_between_base_and_100(n, more, max_splice_pos, base, k):
    shallow, deep = (schedule_pct(depth, max_splice_pos, base, k) for depth in (n, n + more))
    assert base <= shallow <= deep <= 100
    assert schedule_pct(max_splice_pos, max_splice_pos, base, k) == base
    assert schedule_pct(ceil(k * max_splice_pos) + 1, max_splice_pos, base, k) == 100


@pytest.mark.parametrize(("values", "named"), [
    ({"n_past": -1}, "n_past=-1"), ({"max_splice_pos": 0}, "max_splice_pos=0"),
    ({"recompute_pct": -0.5}, "recompute_pct=-0.5"), ({"recompute_pct": 100.5}, "recompute_pct=100.5"),
    ({"recompute_full_mult": 1.0}, "recompute_full_mult=1.0"),
    ({"recompute_full_mult": float("nan")}, "recompute_full_mult=nan"),
])
def test_a_schedule_that_makes_no_sense_is_refused_with_its_values(values, named):
    with pytest.raises(RepairError, match=named):
        schedule_pct(**{"n_past": 300} | values)


@pytest.mark.parametrize("k", [4, 16])
@pytest.mark.parametrize("n_past", [0, 1, 255, 256, 257, 300, 511, 512, 640, 1000, 1023, 1024, 2048, 4095, 4096])
def test_the_schedules_arm_is_the_rounded_up_suffix(n_past, k):
    pct = min(Fraction(100), 5 + max(0, n_past - 256) * Fraction(95, 256 * (k - 1)))
    count = ceil(200 * pct / 100)
    assert chosen(Schedule(recompute_full_mult=k), n_past) == list(range(200 - count, 200))
    assert (Schedule(recompute_full_mult=k).arm(n_past).name == "full") == (pct == 100)


def test_a_share_that_is_a_whole_number_of_tokens_is_not_rounded_up():
    # R(512) = 36.666… %, of which 300 tokens are exactly 110.
    assert len(chosen(Schedule(), 512, n_tokens=300)) == 110


def test_without_deep_splices_everything_behind_p_is_prefilled():
    shallow = Schedule(enable_deep_splice=False)
    assert chosen(shallow, 256) == list(range(190, 200))
    assert shallow.arm(257).name == "full" and shallow.pct(257) == 100
    assert Schedule().arm(257).name != "full"


# --- the bound


@given(st.lists(st.floats(0, 5), min_size=2, max_size=12), st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_the_one_sided_bound_is_the_upper_end_of_the_wider_interval(nats, seed):
    # 2 · 0.95 − 1 is not 0.9 to the last bit.
    bound, expected = upper_bound(nats, seed, 0.95), stats.mean(nats, seed, level=0.90).ci_high
    assert (bound is None) == (expected is None)
    assert bound is None or bound == pytest.approx(expected, rel=1e-9)


def test_a_bound_grows_with_its_level_and_lies_above_the_mean():
    nats = [0.01, 0.02, 0.05, 0.04, 0.03]
    low, high = (upper_bound(nats, 0, level) for level in (0.8, 0.99))
    assert np.mean(nats) < low < high


@pytest.mark.parametrize("nats", [[], [0.0], [0.001] * 4])
def test_samples_without_an_interval_have_no_bound(nats):
    assert upper_bound(nats, 0, 0.95) is None


# --- calibration


def rung(arm="head-16", around=0.01, n=6):
    """A rung whose samples lie within a tenth of `around`."""
    return Rung(arm, tuple(around * (0.9 + 0.2 * i / (n - 1)) for i in range(n)))


def bound(of, seed=0):
    return upper_bound(of.dkl_nats, seed, 0.95)


LADDER = [rung("none", 0.1), rung("head-16", 0.01), rung("head-50%", 0.001), rung("full", 0.0001)]


@pytest.mark.parametrize(("epsilon", "arm"), [
    (1, "none"), (0.02, "head-16"), (0.002, "head-50%"), (0.0002, "full"), (0.00001, "full")])
def test_a_smaller_epsilon_escalates_up_to_full(epsilon, arm):
    assert calibrate(LADDER, epsilon, seed=0)[0] == arm


def test_the_taken_rungs_bound_is_told_and_full_without_a_measurement_has_none():
    assert calibrate(LADDER, 0.02, seed=0) == ("head-16", bound(LADDER[1]))
    assert calibrate(LADDER[:1], 0.02, seed=0) == calibrate([], 0.02, seed=0) == ("full", None)


def test_a_rung_below_one_that_failed_is_not_tested():
    ladder = [rung("none", 0.001), rung("head-16", 0.1), rung("head-50%", 0.001)]
    assert calibrate(ladder, 0.02, seed=0)[0] == "head-50%"


def test_epsilon_itself_is_allowed():
    assert calibrate([rung()], bound(rung()), seed=0)[0] == "head-16"
    assert calibrate([rung()], np.nextafter(bound(rung()), 0), seed=0)[0] == "full"


def test_a_rung_with_a_mean_below_epsilon_and_a_bound_above_is_not_taken():
    wide = Rung("head-16", (0.0, 0.0, 0.0, 0.0, 0.0, 0.09))
    assert np.mean(wide.dkl_nats) < 0.02 < bound(wide)
    assert calibrate([wide], 0.02, seed=0)[0] == "full"


@pytest.mark.parametrize("nats", [(0.0,), ()])
def test_a_single_sample_is_never_taken(nats):
    assert calibrate([Rung("none", nats)], 10.0, seed=0) == ("full", None)


@given(st.lists(st.lists(st.floats(0, 0.1), min_size=1, max_size=6), max_size=4), st.floats(0.001, 0.1))
@settings(max_examples=25, deadline=None)
def test_every_rung_from_the_taken_one_up_keeps_to_epsilon_and_the_next_does_not(nats, epsilon):
    ladder = [Rung(f"head-{i + 1}", tuple(values)) for i, values in enumerate(nats)]
    arm, upper = calibrate(ladder, epsilon, seed=3)
    bounds = [bound(each, 3) for each in ladder]
    first = next((i for i, each in enumerate(ladder) if each.arm == arm), len(ladder))
    assert all(each is not None and each <= epsilon for each in bounds[first:])
    assert upper == (bounds[first] if first < len(ladder) else None)
    if first:
        assert bounds[first - 1] is None or bounds[first - 1] > epsilon


def test_many_rungs_do_not_let_a_bad_one_through_more_often():
    """Of 40 rungs whose true mean is above ε, the cheapest that passes would be found nearly always."""
    rng = np.random.default_rng(5)
    passed = sum(calibrate([Rung(f"head-{i + 1}", tuple(rng.exponential(0.025, 24))) for i in range(40)], 0.02,
                           seed=1)[0] != "full" for _ in range(40))
    assert passed <= 8, "one test in twenty, with room for the bootstrap's own error"


# --- the calibrated policy


@pytest.mark.parametrize(("n_past", "arm"), [(0, "full"), (255, "full"), (256, "head-16"), (257, "full"), (512, "full"),
                                             (513, "head-10%"), (1024, "head-10%"), (1025, "full"), (9999, "full")])
def test_the_next_deeper_depth_decides_and_outside_of_the_measured_ones_all_is_prefilled(n_past, arm):
    policy = Calibrated(CHOICES)
    assert policy.arm(n_past) == arm_of(arm)
    assert (policy.choice(n_past) is None) == (not 256 <= n_past <= 1024)


@pytest.mark.parametrize("choices", [CHOICES, ()])
def test_a_negative_depth_is_refused(choices):
    with pytest.raises(RepairError, match="n_past is -3"):
        Calibrated(choices).arm(-3)


def written(path):
    """A calibrated_repair artifact whose test rows state other arms than its calibration rows."""
    level = stats.mean([0.001, 0.002], 0)
    rows = [{"n_past": choice.n_past, "set": which, "arm": choice.arm if which == "calibration" else "none",
             "recompute_pct": 10.0, "compiled_behind": choice.compiled_behind, "epsilon_nats": 0.02, "chosen": True,
             "dkl_nats": level, "dkl_upper_nats": choice.dkl_upper_nats, "violation_rate": stats.wilson(0, 2)}
            for which in ("test", "calibration") for choice in CHOICES]
    artifact.write(path, experiment="calibrated_repair", tuple_=TUPLE, config={"seed": 0}, rows=rows,
                   samples=[{"dkl_nats": 0.001}], provenance=PROVENANCE)
    return path


def test_the_policy_is_read_from_the_calibration_rows_of_an_artifact(tmp_path):
    path = written(tmp_path / "calibrated_repair.json")
    for policy in (Calibrated.read(path), Calibrated.read(path, SHA), default_policy(path, SHA)):
        assert policy == Calibrated(CHOICES)


def test_another_models_policy_is_refused(tmp_path):
    path = written(tmp_path / "calibrated_repair.json")
    for read in (Calibrated.read, default_policy):
        with pytest.raises(RepairError, match="model abababababab, not cdcdcdcdcdcd"):
            read(path, "cd" * 32)


def test_without_an_artifact_the_default_prefills_and_a_broken_one_is_an_error(tmp_path):
    missing = tmp_path / "calibrated_repair.json"
    assert default_policy(missing, SHA).arm(0).name == "full"
    with pytest.raises(FileNotFoundError):
        Calibrated.read(missing)
    missing.write_text("{}")
    with pytest.raises(artifact.ArtifactError):
        default_policy(missing, SHA)


@pytest.mark.parametrize("policy", [Schedule(), Calibrated(CHOICES)])
def test_a_splice_by_policy_recomputes_what_its_arm_chooses(policy, monkeypatch):
    placed = []
    monkeypatch.setattr(repair_policy, "place_repaired",
                        lambda place, indices, then: placed.append((indices.tolist(), then)) or "logits")
    behind = policy.compiled_behind(600) or "anything"
    place = Place(None, None, np.arange(200), 300, 1, compiled_behind=behind)
    assert splice_with(policy, place, 600, "query") == ("logits", len(chosen(policy, 600)))
    assert placed == [(chosen(policy, 600), "query")]


def test_a_block_compiled_behind_another_text_than_calibrated_is_refused_with_both_names(monkeypatch):
    placed = []
    monkeypatch.setattr(repair_policy, "place_repaired", lambda *_: placed.append(1))
    block = Place(None, None, np.arange(200), 300, 1)
    with pytest.raises(RepairError, match="behind 'system', the policy at depth 600 was .* for 'ensemble-4x256'"):
        splice_with(Calibrated(CHOICES), block, 600)
    assert not placed
    for policy, n_past in ((Calibrated(CHOICES), 256), (Schedule(), 600)):
        splice_with(policy, block, n_past)


@pytest.mark.parametrize("n_past", [0, 300, 2000])
def test_a_prefill_takes_a_block_compiled_behind_anything(n_past, monkeypatch):
    monkeypatch.setattr(repair_policy, "place_repaired", lambda place, indices, then: None)
    block = Place(None, None, np.arange(200), 300, 1, compiled_behind="preamble-8")
    assert splice_with(Calibrated(CHOICES), block, n_past) == (None, 200)

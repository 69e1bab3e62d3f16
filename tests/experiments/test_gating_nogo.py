"""The drift gate: its summary on synthetic samples, and a tiny real study on SmolLM2."""
from __future__ import annotations

import json

import numpy as np
import pytest

from experiments import gating_nogo
from nexus import artifact
from nexus.drift import PREDICTORS, heads
from nexus.prompt import conversation_tokens
from nexus.runtime import Runtime
from nexus.tables import PAPER_PREDICTOR

EXPERIMENT = gating_nogo
QUICK = ["model=smollm2-135m", "profile=quick", "runtime.n_threads=1", "runtime.n_ctx=1024",
         "gating_nogo.n_past=[64]", "gating_nogo.n_cases=2"]


@pytest.fixture(scope="module")
def study(folder, cfg):
    study = gating_nogo.Study(cfg)
    yield study
    study.runtime.close()


def synthetic(cfg, rho):
    return [
        {"n_past": n_past, "context": context, "predictor": predictor, "case": f"c{case}", "max_drift": 2.0 * case,
         "mean_drift": 1.0 * case, "spearman_rho": rho(context, predictor, case),
         "spearman_rho_within_layer": case / 10 if case < 5 else None}
        for n_past in cfg.gating_nogo.n_past for context in cfg.gating_nogo.contexts for case in range(8)
        for predictor in PREDICTORS
    ]


def test_summary_has_one_row_per_cell_and_mixes_none(cfg):
    paper = {"on": 0.5, "off": 0.25}

    def rho(context, predictor, case):
        return paper[context] if predictor == PAPER_PREDICTOR else case / 10

    samples = synthetic(cfg, rho)
    rows = gating_nogo.summarise(cfg, samples)
    assert [(row["n_past"], row["context"], row["predictor"]) for row in rows] == [
        (64, context, predictor) for context in ("on", "off") for predictor in PREDICTORS]
    for row in rows:
        assert row["max_drift"].value == 7 and row["mean_drift"].value == 3.5
        assert row["max_drift"].n == row["spearman_rho"].n == 8
        within = row["spearman_rho_within_layer"]
        assert (within.n, within.value) == (5, pytest.approx(0.2)) and within.ci_low < 0.2 < within.ci_high
        if row["predictor"] == PAPER_PREDICTOR:
            assert row["spearman_rho"].value == paper[row["context"]]
            assert row["spearman_rho"].method == "identical-samples"
        else:
            assert row["spearman_rho"].value == pytest.approx(0.35)
            assert row["spearman_rho"].ci_low < 0.35 < row["spearman_rho"].ci_high
    assert gating_nogo.summarise(cfg, samples[::-1]) == rows
    numbers = gating_nogo.headline(rows)
    assert numbers["mean_spearman_rho"] == numbers[PAPER_PREDICTOR] == pytest.approx(0.375)
    assert set(numbers) == {"mean_spearman_rho", *PREDICTORS}


def test_cases_without_a_rank_correlation_are_left_out_of_its_mean_only(cfg):
    some = gating_nogo.summarise(cfg, synthetic(cfg, lambda context, predictor, case: 0.1 * case if case < 3 else None))
    assert all(row["spearman_rho"].n == 3 and row["mean_drift"].n == 8 for row in some)
    none = gating_nogo.summarise(cfg, synthetic(cfg, lambda context, predictor, case: None))
    assert all(row["spearman_rho"].value is None and row["spearman_rho"].method == "no-samples" for row in none)
    assert gating_nogo.headline(none)["mean_spearman_rho"] is None


@pytest.mark.integration
@pytest.mark.parametrize("context", ["on", "off"])
def test_at_the_compile_position_no_key_has_drifted(study, context):
    study.enter(0, context)
    for case_id in study.cases:
        assert not study.drift(case_id).any()
        assert np.array_equal(study.true_keys(case_id).view(np.uint16), study.spliced_keys(case_id).view(np.uint16))
        known = study.known(case_id)
        assert known.context_keys.shape == known.left_keys.shape and np.array_equal(known.context_keys, known.left_keys)
        assert not PREDICTORS["context_shift"](known).any()


@pytest.mark.integration
def test_drift_begins_behind_layer_0_and_a_study_leaves_only_the_context(study):
    study.enter(64, "on")
    drift = study.drift(next(iter(study.cases)))
    assert drift.shape == (study.model.n_layer, study.model.n_head_kv)
    # Keys of layer 0 depend on the token alone: what is left there is the rounding of one re-anchoring to F16.
    assert drift[0].max() < 0.01 < drift[1:].min()
    ends = [study.runtime.pos_max(seq) for seq in range(study.runtime.options.n_seq_max)]
    assert ends == [study.position - 1] + [-1] * (len(ends) - 1)


@pytest.mark.integration
def test_unrotated_layer_0_keys_of_one_token_are_equal_wherever_it_stands(study):
    study.enter(64, "on")
    conversation = conversation_tokens(study.model, study.conversations["on"], 64)
    context = np.concatenate([study.system, conversation])
    rotated = heads(study.context_keys, study.model.n_head_kv)[0]
    seen = 0
    for token in np.unique(context):
        places = np.flatnonzero(context == token)
        if len(places) > 1:
            plain = study.context_unrotated[0, places]
            largest = np.abs(plain).max()
            assert np.abs(plain - plain[0]).max() < 0.01 * largest
            assert np.abs(rotated[places] - rotated[places[0]]).max() > 0.1 * largest
            seen += 1
    assert seen >= 5


@pytest.mark.integration
def test_a_real_study_has_all_rows_and_resumes_to_the_same_bytes(folder, cfg, monkeypatch):
    path = gating_nogo.run(cfg, folder / "first")
    rows, samples = artifact.read(path)["rows"], artifact.read_samples(path)
    assert len(rows) == 2 * len(PREDICTORS) and len(samples) == 2 * 2 * len(PREDICTORS)
    for sample in samples:
        assert 0 < sample["mean_drift"] < sample["max_drift"]
        assert -1 <= sample["spearman_rho"] <= 1
        if sample["predictor"] == "layer_depth":
            assert sample["spearman_rho_within_layer"] is None
        else:
            assert -1 <= sample["spearman_rho_within_layer"] <= 1
    # Drift belongs to the cell: no predictor changes it.
    assert len({(sample["context"], sample["case"], sample["mean_drift"]) for sample in samples}) == 4
    numbers = json.loads((folder / "first" / "metrics" / "gating_nogo.json").read_text())
    assert set(numbers) == {"mean_spearman_rho", *PREDICTORS}

    monkeypatch.setattr(Runtime, "seq_cp", None)    # A cell that is measured again needs it.
    again = gating_nogo.run(cfg, folder / "second")
    assert again.read_bytes() == path.read_bytes()
    assert again.with_name("gating_nogo.samples.jsonl").read_bytes() == path.with_name(
        "gating_nogo.samples.jsonl").read_bytes()

"""The gate's calibration: known answers on synthetic samples, and a tiny real one over a toy registry."""
from __future__ import annotations

import json

import numpy as np
import pytest

from experiments import calibration
from nexus import artifact, cells, config, pipeline, routing_setup, tables
from nexus.route import GATED, SYSTEMS
from nexus.routing_setup import Thresholds, thresholds_of

ADVERSARIAL, DEVELOPMENT, TRAINING = calibration.ADVERSARIAL, calibration.DEVELOPMENT, calibration.TRAINING

FACTORS = {system: 0.5 ** i for i, system in enumerate(GATED)}


@pytest.fixture(scope="module")
def cfg():
    return config.validate(config.compose(["statistics.level=0.9", "routing.gate_quantile=0.2"]))


def sample(which, case, margin=0.5, right=True, cosine=0.5, answerable=True, system=GATED[0]):
    return {"system": system, "set": which, "case": f"{which}-{case}", "kind": "gate", "answerable": answerable,
            "margin": margin, "best_cosine": cosine, "right": right}


def synthetic():
    """Ten adversarial queries, five of development and two without an answer, eight of training, per system.

    Each system's margins are half of the one's before.
    """
    samples = []
    for system, factor in FACTORS.items():
        # τ is the second smallest of ten: 0.02.
        samples += [sample(ADVERSARIAL, i, factor * margin / 100, right=margin > 1, system=system)
                    for i, margin in enumerate((7, 3, 10, 1, 5, 2, 9, 4, 8, 6))]
        samples += [sample(DEVELOPMENT, i, factor * margin, right, cosine, system=system) for i, (margin, right, cosine)
                    in enumerate(((0.01, False, 0.61), (0.02, True, 0.75), (0.03, True, 0.9), (0.03, False, 0.8),
                                  (0.30, True, 0.71)))]
        samples += [sample(DEVELOPMENT, 5 + i, 0.0, False, cosine, False, system)
                    for i, cosine in enumerate((0.6, 0.71))]
        samples += [sample(TRAINING, i, cosine=cosine, system=system)
                    for i, cosine in enumerate((0.61, 0.71, 0.8, 0.9))]
        samples += [sample(TRAINING, 4 + i, cosine=cosine, answerable=False, right=False, system=system)
                    for i, cosine in enumerate((0.2, 0.4, 0.3, 0.65))]
    return samples


def count(estimate):
    return None if estimate.value is None else round(estimate.value * estimate.n), estimate.n


@pytest.mark.parametrize(("system", "tau"), [(system, 0.02 * factor) for system, factor in FACTORS.items()])
def test_tau_is_the_quantile_of_the_adversarial_margins_and_fires_up_to_itself(cfg, system, tau):
    adversarial, development = tables.at(calibration.summarise(cfg, synthetic()), system=system, kind="gate")
    for row in (adversarial, development):
        assert row["threshold"] == row["tau"].value == pytest.approx(tau)
        assert row["tau"].n == 10 and row["tau"].ci_low <= tau <= row["tau"].ci_high
        assert {row[name].level for name in ("tau", "fire_rate", "risk_accepted", "risk_fired")} == {0.9}
        assert row["fire_rate"].method == "wilson"
    assert (adversarial["set"], count(adversarial["fire_rate"])) == (ADVERSARIAL, (2, 10))
    assert (count(adversarial["risk_accepted"]), count(adversarial["risk_fired"])) == ((0, 8), (1, 2))
    # The two queries without an answer are no part of it.
    assert (development["set"], count(development["fire_rate"])) == (DEVELOPMENT, (2, 5))
    assert (count(development["risk_accepted"]), count(development["risk_fired"])) == ((1, 3), (1, 2))


def test_a_gate_that_always_fires_accepts_nothing(cfg):
    samples = [s | {"margin": 0.1} for s in synthetic()]
    for row in tables.at(calibration.summarise(cfg, samples), kind="gate"):
        assert row["fire_rate"].value == 1 and row["risk_accepted"].value is None
        assert row["risk_accepted"].method == "no-samples"


def test_risk_against_coverage_has_a_point_per_distinct_margin(cfg):
    curve = tables.at(calibration.summarise(cfg, synthetic()), system=GATED[0], kind="risk_coverage")
    assert [(row["threshold"], count(row["coverage"]), count(row["risk"])) for row in curve] == [
        (0.30, (1, 5), (0, 1)), (0.03, (3, 5), (1, 3)), (0.02, (4, 5), (1, 4)), (0.01, (5, 5), (2, 5))]
    assert {row["set"] for row in curve} == {DEVELOPMENT}


def test_abstention_is_chosen_on_training_and_told_of_development(cfg):
    rows = tables.at(calibration.summarise(cfg, synthetic()), system=GATED[0], kind="abstention")
    chosen, = (row for row in rows if row["chosen"])
    # At 0.71 three of four are kept and all others refused; at 0.61 all are kept and three of four refused: a tie.
    assert chosen["threshold"] == 0.61
    assert (count(chosen["refused_unanswerable"]), count(chosen["refused_answerable"])) == ((1, 2), (0, 5))
    assert len(rows) == 26 and [row["threshold"] for row in rows] == sorted(row["threshold"] for row in rows)
    assert (rows[0]["threshold"], rows[-1]["threshold"]) == (0.1, 0.7)
    # A cosine that equals the threshold is kept.
    assert (count(rows[-1]["refused_unanswerable"]), count(rows[-1]["refused_answerable"])) == ((1, 2), (1, 5))


@pytest.mark.parametrize(("answerable", "others", "threshold"), [
    ((0.6, 0.7, 0.8, 0.9), (0.3, 0.4, 0.65), 0.7), ((0.5, 0.9), (0.1, 0.2), 0.5), ((0.3,), (0.8,), 0.3)])
def test_the_threshold_separates_best(answerable, others, threshold):
    samples = [{"best_cosine": cosine, "answerable": kept} for kept, cosines in ((True, answerable), (False, others))
               for cosine in cosines]
    assert calibration.abstention_threshold(samples) == threshold == calibration.abstention_threshold(samples[::-1])


def test_a_chosen_threshold_on_the_grid_is_one_row(cfg):
    samples = [s | {"best_cosine": 0.7 if s["answerable"] else 0.2} for s in synthetic()]
    rows = tables.at(calibration.summarise(cfg, samples), system=GATED[0], kind="abstention")
    assert len(rows) == 25 and [row["threshold"] for row in rows if row["chosen"]] == [0.7]


def test_the_order_of_samples_does_not_matter(cfg):
    samples = synthetic()
    shuffled = [samples[i] for i in np.random.default_rng(0).permutation(len(samples))]
    assert calibration.summarise(cfg, shuffled) == calibration.summarise(cfg, samples)


def test_rows_have_the_form_of_the_artifact_and_thresholds_are_read_from_it(cfg, tmp_path):
    samples = synthetic()
    artifact.write(tmp_path / "calibration.json", experiment="calibration",
                   tuple_={"model": "m", "model_sha256": "0" * 64, "embedder": "minilm", "llama_cpp": "b1"},
                   config=cfg.resolved("calibration"), rows=calibration.summarise(cfg, samples), samples=samples,
                   provenance={"git_commit": None, "git_dirty": None, "cpu": "test", "threads": 1, "isa": None,
                               "versions": {}})
    gated = {system: Thresholds(0.02 * factor, 0.61) for system, factor in FACTORS.items()}
    # The same without a gate: abstention goes by the embedding alone.
    bare = {system.removesuffix("+gate"): Thresholds(None, 0.61) for system in FACTORS}
    assert thresholds_of(cfg, tmp_path) == gated | bare
    assert artifact.read_samples(tmp_path / "calibration.json") == samples


def test_without_a_calibration_the_command_that_makes_it_is_named(cfg, tmp_path):
    with pytest.raises(tables.MissingArtifact, match="calibration.json is missing; make it with: .*"
                                                     "experiments.calibration"):
        thresholds_of(cfg, tmp_path)


# --- with MiniLM


TOOLS = {"create_issue": "Open a new issue in a repository, with a title and a body.",
         "list_issues": "List the issues of a repository.", "merge_pull_request": "Merge a pull request.",
         "get_weather": "Current weather and forecast of a city.", "send_email": "Send an e-mail to somebody.",
         "convert_currency": "Convert an amount of money from one currency to another."}
QUERIES = {
    "adversarial": [("Show me all issues of this repository", "list_issues"), ("Open an issue here", "create_issue"),
                    ("Merge the issue about the pull request", "merge_pull_request")],
    "development": [("Will it rain in Lisbon tomorrow?", "get_weather"), ("How many euros are 12 dollars?",
                    "convert_currency"), ("Good morning! Slept well?", None)],
    "training": [("Write a mail to Ann", "send_email"), ("What is the weather in Oslo?", "get_weather"),
                 ("Tell me a joke", None)],
    "evaluation": [("Send Bob an e-mail", "send_email")],
}


class ToyCrossEncoder:
    """Finds all documents alike, so that the retriever's order stays: a toy, made for these tests."""

    def score(self, query, documents):
        return [0.0] * len(documents)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The configuration of a toy registry and toy queries in a temporary folder."""
    monkeypatch.setattr(pipeline, "CellStore", lambda: cells.CellStore(tmp_path / "cells"))
    monkeypatch.setattr(routing_setup.RoutingSetup, "cross_encoder", ToyCrossEncoder())
    listing = tmp_path / "tools.json"
    listing.write_text(json.dumps([{"name": name, "description": text, "inputSchema": {}}
                                   for name, text in TOOLS.items()]))
    overrides = ["registry=file", f"registry.path={listing}", "routing.tuned_embedder=minilm"]
    for name, queries in QUERIES.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"query": query, "tool": tool}) + "\n" for query, tool in queries))
        overrides.append(f"workload.routing.{name}={path}")
    return config.validate(config.compose(overrides))


@pytest.mark.integration
def test_a_real_calibration_repeats_itself_and_also_asks_every_system(toy, tmp_path):
    path = calibration.run(toy, tmp_path / "first")
    samples = artifact.read_samples(path)
    selected = [s for s in samples if s["kind"] == "selection"]
    assert {s["system"] for s in selected} == set(SYSTEMS) and len(selected) == len(SYSTEMS) * 6
    samples = [s for s in samples if s["kind"] == "gate"]
    assert len(samples) == len(GATED) * 9 and len(artifact.read(path)["rows"]) > len(GATED) * 25
    rights = {(s["system"], s["set"]): [each["right"] for each in samples
                                        if (each["system"], each["set"]) == (s["system"], s["set"])] for s in samples}
    for system in GATED:
        assert rights[system, "development"] == [True, True, False], "a retriever answers also where nothing fits"
        assert rights[system, "adversarial"][:2] == [True, True]
    offtopic = [s["best_cosine"] for s in samples if not s["answerable"]]
    assert max(offtopic) < min(s["best_cosine"] for s in samples if s["answerable"])
    again = calibration.run(toy, tmp_path / "second")
    assert again.read_bytes() == path.read_bytes()
    taus = {system: found.tau for system, found in thresholds_of(toy, tmp_path / "first").items()}
    metrics = json.loads((tmp_path / "first" / "metrics" / "calibration.json").read_text())
    assert metrics[f"{GATED[1]}.adversarial"]["tau"] == taus[GATED[1]] > 0
    assert metrics[f"{GATED[0]}.adversarial"]["fire_rate"] == pytest.approx(1 / 3)

"""Routing of public sets: known answers on synthetic samples, and a tiny real run over a stand-in for the sets."""
from __future__ import annotations

import json

import numpy as np
import pytest

from experiments import routing_generalisation
from nexus import artifact, cells, config, pipeline, routing_setup
from nexus.public_queries import PublicQueries
from nexus.registry import Tool
from nexus.routing_workload import RoutingCase
from nexus.stats import wilson

N_TOOLS = 1400
# Per set and system the rank of each query's tool; None where it is not among the first five.
RANKS = {
    ("bfcl", "slb"): [1, 2, 4, None, None, 1, 6, 3],
    ("bfcl", "hybrid"): [1, 1, 1, 1, 1, 2, 3, None],
    ("bfcl", "hybrid+gate"): [1, 1, 1, 1, 1, 1, 1, 2],
    ("bfcl-live", "hybrid"): [2, 2, 1],
    ("bfcl-live", "hybrid+gate"): [2, 2, 1],
    ("other", "slb"): [1, None],
}


@pytest.fixture(scope="module")
def cfg():
    return config.validate(config.compose(["statistics.level=0.9"]))


def synthetic():
    return [{"set": name, "system": system, "case": f"q{i}", "rank": rank,
             "gate_fired": system.endswith("+gate") and i < 2, "choice_ms": 5.0 + i}
            for (name, system), ranks in RANKS.items() for i, rank in enumerate(ranks)]


def by_key(rows):
    return {(row["set"], row["system"]): row for row in rows}


def test_recall_counts_ranks_up_to_k(cfg):
    rows = by_key(routing_generalisation.summarise(cfg, synthetic(), N_TOOLS))
    assert list(rows) == list(RANKS)
    slb = rows["bfcl", "slb"]
    assert [slb[f"top{k}_recall"] for k in (1, 3, 5)] == [wilson(n, 8, 0.9) for n in (2, 4, 5)]
    assert (slb["choice_ms"].value, slb["choice_ms"].n, slb["choice_ms"].level) == (8.5, 8, 0.9)
    assert {row["n_tools"] for row in rows.values()} == {N_TOOLS}


def test_only_gates_fire(cfg):
    rows = by_key(routing_generalisation.summarise(cfg, synthetic(), N_TOOLS))
    assert rows["bfcl", "hybrid+gate"]["fire_rate"] == wilson(2, 8, 0.9)
    assert rows["bfcl", "slb"]["fire_rate"] is rows["bfcl", "hybrid"]["fire_rate"] is None


def test_systems_are_compared_with_plain_rank_fusion_on_the_same_queries(cfg):
    rows = by_key(routing_generalisation.summarise(cfg, synthetic(), N_TOOLS))
    # slb alone is right once, hybrid alone four times: p = 2 · (1 + 5) / 2⁵.
    slb = rows["bfcl", "slb"]
    assert slb["top1_minus_hybrid"].value == pytest.approx(-3 / 8) and slb["mcnemar_p_hybrid"] == pytest.approx(0.375)
    # The gate alone is right twice, hybrid alone never: p = 2 / 2².
    gated = rows["bfcl", "hybrid+gate"]
    assert gated["top1_minus_hybrid"].value == pytest.approx(2 / 8)
    assert gated["top1_minus_hybrid"].method.startswith("paired-") and gated["top1_minus_hybrid"].n == 8
    assert gated["mcnemar_p_hybrid"] == pytest.approx(0.5)
    same = rows["bfcl-live", "hybrid+gate"]
    assert (same["top1_minus_hybrid"].value, same["mcnemar_p_hybrid"]) == (0.0, 1.0)
    for key in (("bfcl", "hybrid"), ("other", "slb")):
        assert rows[key]["top1_minus_hybrid"] is rows[key]["mcnemar_p_hybrid"] is None, "nothing to compare with"


def test_the_order_of_samples_does_not_matter(cfg):
    samples = synthetic()
    expected = by_key(routing_generalisation.summarise(cfg, samples, N_TOOLS))
    for seed in range(3):
        shuffled = [samples[i] for i in np.random.default_rng(seed).permutation(len(samples))]
        assert by_key(routing_generalisation.summarise(cfg, shuffled, N_TOOLS)) == expected


def test_rows_have_the_form_of_the_artifact(cfg, tmp_path):
    samples, path = synthetic(), tmp_path / "routing_generalisation.json"
    rows = routing_generalisation.summarise(cfg, samples, N_TOOLS)
    artifact.write(path, experiment="routing_generalisation",
                   tuple_={"model": "m", "model_sha256": "0" * 64, "embedder": "minilm", "llama_cpp": "b1"},
                   config=cfg.resolved("routing_generalisation"), rows=rows, samples=samples,
                   provenance={"git_commit": None, "git_dirty": None, "cpu": "test", "threads": 1, "isa": None,
                               "versions": {}})
    stored = artifact.read(path)["rows"]
    assert [row["top5_recall"]["value"] for row in stored] == [row["top5_recall"].value for row in rows]
    assert artifact.read_samples(path) == samples


# --- with MiniLM

TOOLS = [Tool(None, name, text, {}) for name, text in (
    ("create_issue", "Open a new issue in a repository, with a title and a body."),
    ("get_weather", "Current weather and forecast of a city."), ("send_email", "Send an e-mail to somebody."),
    ("convert_currency", "Convert an amount of money from one currency to another."))]
CASES = {"one": [RoutingCase(f"one-{i}", query, (None, name)) for i, (query, name) in enumerate((
             ("Will it rain in Lisbon tomorrow?", "get_weather"),
             ("How many euros are 12 dollars?", "convert_currency"),
             ("Mail this to Ann", "send_email"), ("Report this bug as an issue", "create_issue")))],
         "two": [RoutingCase("two-0", "Is it warm in Oslo?", (None, "get_weather"))]}


class Backwards:
    """A cross-encoder that prefers what comes last."""

    def score(self, query, documents):
        return np.arange(len(documents), dtype=np.float32)


@pytest.mark.integration
def test_a_real_run_asks_a_seeded_part_of_each_set(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "CellStore", lambda: cells.CellStore(tmp_path / "cells"))
    monkeypatch.setattr(routing_setup.RoutingSetup, "cross_encoder", Backwards())
    monkeypatch.setattr(routing_generalisation, "public_queries", lambda folder: PublicQueries(TOOLS, CASES))
    monkeypatch.setattr(routing_generalisation, "thresholds_of",
                        lambda cfg, out: {"hybrid+gate": routing_setup.Thresholds(1.0, 0.0)})
    listing = tmp_path / "tools.json"
    listing.write_text(json.dumps([{"name": "unused", "description": "", "inputSchema": {}}]))
    cfg = config.validate(config.compose(["registry=file", f"registry.path={listing}", "routing.tuned_embedder=minilm",
                                          "routing_generalisation.systems=[slb,hybrid,hybrid+gate]",
                                          "routing_generalisation.n_queries=3"]))
    path = routing_generalisation.run(cfg, tmp_path)
    rows = {(row["set"], row["system"]): row for row in artifact.read(path)["rows"]}
    # One query of the first set is left for choosing a default, none of the second.
    assert list(rows) == [(name, system) for name in ("one", "two", "one-selection")
                          for system in ("slb", "hybrid", "hybrid+gate")]
    assert {row["n_tools"] for row in rows.values()} == {len(TOOLS)}
    assert [row["top1_recall"]["n"] for row in rows.values()] == [3] * 3 + [1] * 3 + [1] * 3
    assert rows["one", "slb"]["top1_recall"]["value"] == rows["one", "hybrid"]["top1_recall"]["value"] == 1
    gated = rows["one", "hybrid+gate"]
    assert (gated["top1_recall"]["value"], gated["fire_rate"]["value"]) == (0, 1)
    asked = {s["system"]: [] for s in artifact.read_samples(path)}
    for sample in artifact.read_samples(path):
        asked[sample["system"]].append(sample["case"])
    assert asked["slb"] == asked["hybrid"] == asked["hybrid+gate"]
    assert sorted(asked["slb"]) == [case.id for cases in CASES.values() for case in cases], "each query once"

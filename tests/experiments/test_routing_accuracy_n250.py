"""Routing accuracy: known answers on synthetic samples, and a tiny real run over a toy registry."""
from __future__ import annotations

import json

import numpy as np
import pytest

from experiments import routing_accuracy_n250 as experiment
from nexus import artifact, cells, config, pipeline, routing_setup
from nexus.stats import wilson

DEFAULT = "hybrid+gate"
N = 8
# Per size and system whether each query's tool was chosen; the first four queries are in the tool's own words.
RIGHT = {
    (10, "slb"): "11110111", (10, DEFAULT): "11111111", (10, "concat_all"): "11111110", (10, "rag_mcp"): "11010111",
    (250, "slb"): "10000001", (250, DEFAULT): "11111110", (250, "concat_all"): None, (250, "rag_mcp"): "10000000",
}
# Ranks of the right tool in the retriever's order, at every size.
RANKS = [1, 2, 3, 4, None, 1, 5, 3]


@pytest.fixture(scope="module")
def cfg():
    return config.validate(config.compose(["statistics.level=0.9", f"routing.system={DEFAULT}"]))


def synthetic(right=RIGHT):
    samples = []
    for (n_tools, system), rights in right.items():
        routed, gated = system not in experiment.BASELINES, system.endswith("+gate")
        for i in range(N):
            samples.append({
                "n_tools": n_tools, "system": system, "case": f"q{i}", "wording": "own" if i < 4 else "paraphrase",
                "chosen": None, "right": rights is not None and rights[i] == "1",
                "status": "overflow" if rights is None else "ok",
                "rank": None if system == "concat_all" else RANKS[i], "margin": 0.1 if routed else None,
                "gate_fired": (i < 3 if gated else False) if routed else None,
                "prompt_tokens": 0 if routed else 100 * n_tools + i, "resident_tokens": 0,
                "scan_us": 9.0 + i if routed else None, "choice_ms": None if rights is None else 5.0 + i})
    return samples


def by_key(rows):
    return {(row["n_tools"], row["system"]): row for row in rows}


@pytest.fixture(scope="module")
def rows(cfg):
    return by_key(experiment.summarise(cfg, synthetic()))


def test_there_is_a_row_per_size_and_system(rows):
    assert list(rows) == list(RIGHT)


def test_accuracy_counts_and_is_split_by_wording(rows):
    row = rows[250, DEFAULT]
    assert (row["status"], row["accuracy"]) == ("ok", wilson(7, 8, 0.9))
    assert (row["accuracy_own"], row["accuracy_paraphrase"]) == (wilson(4, 4, 0.9), wilson(3, 4, 0.9))
    assert (rows[250, "slb"]["accuracy_own"], rows[250, "slb"]["accuracy_paraphrase"]) == (
        wilson(1, 4, 0.9), wilson(1, 4, 0.9))


def test_queries_of_unknown_wording_are_counted_once(cfg):
    samples = [s | {"wording": None} for s in synthetic({(10, DEFAULT): "11110000"})]
    row, = experiment.summarise(cfg, samples)
    assert row["accuracy"] == wilson(4, 8, 0.9) and row["accuracy_own"] is row["accuracy_paraphrase"] is None


def test_recall_is_of_the_retrievers_ranks(rows):
    for system in ("slb", DEFAULT, "rag_mcp"):
        row = rows[10, system]
        assert (row["top1_recall"], row["top3_recall"]) == (wilson(2, 8, 0.9), wilson(5, 8, 0.9))
    assert rows[10, "concat_all"]["top1_recall"] is rows[10, "concat_all"]["top3_recall"] is None


def test_only_a_gate_fires_and_only_routers_scan(rows):
    assert rows[10, DEFAULT]["fire_rate"] == wilson(3, 8, 0.9) and rows[10, "slb"]["fire_rate"] is None
    assert (rows[10, "slb"]["scan_us"].value, rows[10, "slb"]["scan_us"].n) == (12.5, 8)
    assert rows[10, "rag_mcp"]["scan_us"] is None and rows[10, "rag_mcp"]["choice_ms"].value == 8.5
    # A lexical system has no dense part to scan.
    assert rows[10, "slb"]["prompt_tokens"].value == 0


def test_a_system_without_a_scan_has_no_time_of_one(cfg):
    row, = experiment.summarise(cfg, [s | {"scan_us": None} for s in synthetic({(10, "bm25"): "11111111"})])
    assert row["scan_us"] is None and row["choice_ms"].value == 8.5


def test_an_overflow_has_no_accuracy_but_its_tokens(rows):
    row = rows[250, "concat_all"]
    assert row["status"] == "overflow" and row["prompt_tokens"].value == 25003.5 and row["prompt_tokens"].n == N
    assert {row[name] for name in ("accuracy", "accuracy_own", "accuracy_paraphrase", "top1_recall", "top3_recall",
                                   "scan_us", "choice_ms", "fire_rate")} == {None}
    assert rows[10, "concat_all"]["status"] == "ok"


def test_one_query_that_does_not_fit_makes_the_row_an_overflow(cfg):
    samples = synthetic({(10, "concat_all"): "11111111"})
    samples[3] |= {"status": "overflow", "right": False, "choice_ms": None}
    row, = experiment.summarise(cfg, samples)
    assert row["status"] == "overflow" and row["accuracy"] is None


def test_the_default_is_compared_on_the_same_queries(rows):
    row = rows[250, DEFAULT]
    # It alone is right on six queries, slb alone on one: p = 2 · (7 + 1) / 2⁷.
    assert row["accuracy_minus_slb"].value == pytest.approx(5 / 8) and row["mcnemar_p_slb"] == pytest.approx(0.125)
    # Six and none: p = 2 / 2⁶.
    assert row["accuracy_minus_rag_mcp"].value == pytest.approx(6 / 8)
    assert row["mcnemar_p_rag_mcp"] == pytest.approx(1 / 32)
    # The same system among the fewest tools: one and none.
    assert row["accuracy_minus_fewest"].value == pytest.approx(-1 / 8) and row["mcnemar_p_fewest"] == 1
    for name in ("slb", "rag_mcp", "fewest"):
        difference = row[f"accuracy_minus_{name}"]
        assert difference.method.startswith("paired-") and difference.n == N and difference.level == 0.9
    assert row["accuracy_minus_slb"].ci_low < 5 / 8 < row["accuracy_minus_slb"].ci_high
    first = rows[10, DEFAULT]
    assert first["accuracy_minus_fewest"].value == 0 and first["accuracy_minus_rag_mcp"].value == pytest.approx(2 / 8)


def test_other_systems_are_compared_with_nothing(rows):
    others = [row for (_, system), row in rows.items() if system != DEFAULT]
    assert not [name for row in others for name in row if name.startswith(("accuracy_minus", "mcnemar"))]


@pytest.mark.parametrize("right", [None, "absent"])
def test_a_rival_that_overflows_or_was_not_asked_gives_no_difference(cfg, right):
    given = {(10, "slb"): "11110000", (10, DEFAULT): "11111111", (10, "rag_mcp"): None}
    if right == "absent":
        del given[10, "rag_mcp"]
    row = by_key(experiment.summarise(cfg, synthetic(given)))[10, DEFAULT]
    assert row["accuracy_minus_rag_mcp"] is row["mcnemar_p_rag_mcp"] is None
    assert row["accuracy_minus_slb"].value == 0.5


def test_the_order_of_samples_does_not_matter(cfg, rows):
    samples = synthetic()
    for seed in range(3):
        shuffled = [samples[i] for i in np.random.default_rng(seed).permutation(len(samples))]
        assert by_key(experiment.summarise(cfg, shuffled)) == rows


def test_metrics_are_values_by_system_and_size(cfg):
    found = experiment.metrics(experiment.summarise(cfg, synthetic()))
    assert found[f"{DEFAULT}.250"]["accuracy"] == 7 / 8 and found["concat_all.250"]["accuracy"] is None
    assert found["concat_all.250"]["prompt_tokens"] == 25003.5 and list(found)[0] == "slb.10"


def test_rows_have_the_form_of_the_artifact(cfg, rows, tmp_path):
    samples, path = synthetic(), tmp_path / "routing_accuracy_n250.json"
    artifact.write(path, experiment="routing_accuracy_n250",
                   tuple_={"model": "m", "model_sha256": "0" * 64, "embedder": "minilm", "llama_cpp": "b1"},
                   config=cfg.resolved("routing_accuracy_n250"), rows=list(rows.values()), samples=samples,
                   provenance={"git_commit": None, "git_dirty": None, "cpu": "test", "threads": 1, "isa": None,
                               "versions": {}})
    stored = by_key(artifact.read(path)["rows"])
    assert stored[250, DEFAULT]["accuracy"] == rows[250, DEFAULT]["accuracy"].row()
    assert stored[250, DEFAULT]["mcnemar_p_slb"] == rows[250, DEFAULT]["mcnemar_p_slb"]
    assert artifact.read_samples(path) == samples


# --- with SmolLM2 and MiniLM

TOOLS = {"create_issue": "Open a new issue in a repository, with a title and a body.",
         "list_branches": "List the branches of a repository.",
         "get_weather": "Current weather and forecast of a city.",
         "send_email": "Send an e-mail to somebody.", "play_music": "Play a song.",
         "convert_currency": "Convert an amount of money from one currency to another."}
QUERIES = [("Will it rain in Lisbon tomorrow?", "get_weather", "paraphrase"),
           ("Convert 12 dollars to euros", "convert_currency", "own")]


class Backwards:
    """A cross-encoder that prefers what comes last."""

    def score(self, query, documents):
        return np.arange(len(documents), dtype=np.float32)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The configuration of a toy registry with toy queries, in whose context three tools fit and six do not."""
    monkeypatch.setattr(pipeline, "CellStore", lambda: cells.CellStore(tmp_path / "cells"))
    monkeypatch.setattr(routing_setup.RoutingSetup, "cross_encoder", Backwards())
    monkeypatch.setattr(experiment, "thresholds_of", lambda cfg, out: {DEFAULT: routing_setup.Thresholds(1.0, 0.0)})
    parameters = {"type": "object", "properties": {"text": {"type": "string", "description": "What is said. " * 14}}}
    listing = tmp_path / "tools.json"
    listing.write_text(json.dumps([{"name": name, "description": text, "inputSchema": parameters}
                                   for name, text in TOOLS.items()]))
    queries = tmp_path / "queries.jsonl"
    queries.write_text("".join(json.dumps({"id": tool, "query": query, "tool": tool, "wording": wording}) + "\n"
                               for query, tool, wording in QUERIES))
    section = "routing_accuracy_n250"
    return config.validate(config.compose([
        "model=smollm2-135m", "runtime.n_threads=1", f"routing.system={DEFAULT}", "routing.tuned_embedder=minilm",
        "registry=file", f"registry.path={listing}",
        f"workload.routing.evaluation={queries}", f"{section}.n_tools=[3,250]",
        f"{section}.systems=[slb,bm25,{DEFAULT}]",
        f"{section}.rag_k=3", f"{section}.n_ctx=600"]))


@pytest.mark.integration
def test_a_real_run_asks_every_query_at_every_size(toy, tmp_path, monkeypatch):
    asked, choose = [], experiment.InContextChooser.choose

    def counted(chooser, tools, query):
        asked.append((query, tuple(tool.name for tool in tools)))
        return choose(chooser, tools, query)

    monkeypatch.setattr(experiment.InContextChooser, "choose", counted)
    path = experiment.run(toy, tmp_path / "first")
    rows, samples = by_key(artifact.read(path)["rows"]), artifact.read_samples(path)
    systems = ["slb", "bm25", DEFAULT, "concat_all", "rag_mcp"]
    # 250 is more than there are: all six.
    assert set(rows) == {(n, system) for n in (3, 6) for system in systems}
    assert len(samples) == len(rows) * len(QUERIES)
    for n in (3, 6):
        slb, gated, rag = rows[n, "slb"], rows[n, DEFAULT], rows[n, "rag_mcp"]
        assert slb["accuracy"]["value"] == slb["top1_recall"]["value"] == gated["top1_recall"]["value"] == 1
        assert slb["scan_us"]["value"] > 0 and rows[n, "bm25"]["scan_us"] is None
        assert slb["prompt_tokens"]["value"] == 0 < rag["prompt_tokens"]["value"]
        # The stand-in turns the right answer around; recall before it stays.
        assert gated["fire_rate"]["value"] == 1 and gated["accuracy"]["value"] == 0
        # What so small a model picks from three schemas is not this test's business.
        assert (rag["status"], rag["top3_recall"]["value"], rag["accuracy"]["n"]) == ("ok", 1, len(QUERIES))
    fits, over = rows[3, "concat_all"], rows[6, "concat_all"]
    assert fits["status"] == "ok" and fits["accuracy"]["n"] == 2 and fits["choice_ms"]["value"] > 0
    assert over["status"] == "overflow" and over["accuracy"] is None
    assert over["prompt_tokens"]["value"] > 600 > fits["prompt_tokens"]["value"]
    assert all(s["chosen"] is None for s in samples if s["status"] == "overflow")

    # Where rag_mcp offers the same schemas at both sizes, they are read once.
    queries = {query for query, _, _ in QUERIES}
    read = [(query, names) for query, names in asked if query in queries]
    assert 3 * len(QUERIES) <= len(read) == len(set(read)) <= 4 * len(QUERIES)

    # The same cells give the same artifact, and the model is not asked again.
    monkeypatch.setattr(experiment.InContextChooser, "choose", None)
    assert experiment.run(toy, tmp_path / "second").read_bytes() == path.read_bytes()

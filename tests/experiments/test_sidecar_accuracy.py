"""Sidecar accuracy: known answers on synthetic samples, and a tiny real run over a toy registry."""
from __future__ import annotations

import json

import numpy as np
import pytest

from experiments import sidecar_accuracy as experiment
from nexus import artifact, cells, config, pipeline, routing_setup
from nexus.stats import mcnemar, wilson
from nexus.workload import WorkloadError

LEVEL = 0.9
# Per case the two specified arguments that each arm fills right; in the third case the router takes another tool.
RIGHT = {"c1": {"routed": "ab", "signature": "ab", "full": "a"}, "c2": {"routed": "a", "signature": "a", "full": "a"},
         "c3": {"routed": "", "signature": "ab", "full": "b"}}
# Of these the first two stand in the conversation only.
REFERRED = {"r1": {"window": "pqz", "no_window": "z", "full_history": "pqz"},
            "r2": {"window": "pz", "no_window": "z", "full_history": "pqz"}}
TOKENS = {"s/one": (20, 100), "s/two": (10, 100), "s/three": (30, 200), "s/four": (60, 120)}


@pytest.fixture(scope="module")
def cfg():
    return config.validate(config.compose([f"statistics.level={LEVEL}"]))


def answered(arm, case, right, names, **others):
    return {"arm": arm, "case": case, "tool": "s/one", "chosen": "s/one", "tool_right": True, "right": list(right),
            "wrong": [name for name in names if name not in right], "filled": True, "arguments_text": "{}",
            "valid": True, "problems": [], "placeholders": [], "n_arguments": 2, "unspecified_optional": [],
            "n_relaxed": 0, "n_prompt_tokens": 50, "n_tokens": 20, "n_rejected": 1, "first_token_ms": 100.0,
            "total_ms": 400.0} | others


def synthetic():
    samples = [{"arm": "tokens", "tool": tool, "n_signature_tokens": some, "n_schema_tokens": all_, "n_cut": 0}
               for tool, (some, all_) in TOKENS.items()]
    for case, arms in RIGHT.items():
        for arm, right in arms.items():
            others = {"n_prompt_tokens": 160} if arm == "full" else {"untold": ["b"] if case == "c3" else []}
            samples.append(answered(arm, case, right, "ab", **others))
    by_key = {(s["arm"], s.get("case")): s for s in samples}
    by_key["routed", "c3"] |= {"tool_right": False, "chosen": "s/two", "valid": False, "unspecified_optional": None}
    by_key["routed", "c1"] |= {"placeholders": ["x"], "unspecified_optional": ["x"], "n_arguments": 3}
    by_key["full", "c2"] |= {"unspecified_optional": ["x", "y"], "n_arguments": 4}
    by_key["signature", "c1"]["tool"], by_key["signature", "c2"]["tool"] = "s/two", "s/three"
    for case in RIGHT:
        by_key["routed", case]["route_ms"] = 10.0
    for case, arms in REFERRED.items():
        for i, (arm, right) in enumerate(arms.items()):
            samples.append(answered(arm, case, right, "pqz", from_history=["p", "q"], routed_right=case == "r1",
                                    n_prompt_tokens=100 * (3, 1, 5)[i]))
    for head, more in (("kept", 0.0), ("cold", 100.0)):
        for i, case in enumerate(("c1", "c2", "c3")):
            timed = {"arm": "timed", "head": head, "case": case, "repetition": 0}
            samples.append(timed | {"side": "signature", "n_decoded": 50, "route_ms": 20.0,
                                    "first_token_ms": 80.0 + more + i})
            samples.append(timed | {"side": "full", "n_decoded": 160, "route_ms": 0.0,
                                    "first_token_ms": 202.0 + more + i})
    return samples


def by_metric(rows):
    return {row["metric"]: row for row in rows}


@pytest.fixture(scope="module")
def rows(cfg):
    return by_metric(experiment.summarise(cfg, synthetic()))


def test_the_metrics_that_reports_rely_on_are_there(rows):
    assert {"routing_accuracy", "specified_argument_accuracy", "end_to_end_argument_accuracy", "json_valid_rate",
            "placeholder_leak_rate", "ir_tokens_median", "ir_tokens_p99", "first_argument_speedup",
            "main_context_token_saving", "coreference_accuracy"} <= set(rows)


@pytest.mark.parametrize(("metric", "successes", "n"), [
    ("routing_accuracy", 2, 3),
    # Three of four where the tool was right; the third case adds two to be filled, none of them right.
    ("specified_argument_accuracy", 3, 4),
    ("end_to_end_argument_accuracy", 3, 6),
    ("specified_argument_accuracy_oracle_routing", 5, 6),
    ("specified_argument_accuracy_full_schema", 3, 6),
    ("json_valid_rate", 2, 3), ("json_valid_rate_oracle_routing", 3, 3), ("json_valid_rate_full_schema", 3, 3),
    ("placeholder_leak_rate", 1, 3), ("placeholder_leak_rate_full_schema", 0, 3),
    # What the wrong tool was given is not judged.
    ("unspecified_optional_rate", 1, 5), ("unspecified_optional_rate_full_schema", 2, 8),
    ("rejection_rate", 3, 60), ("ir_information_kept", 5, 6),
    ("coreference_accuracy", 3, 4), ("coreference_accuracy_no_window", 0, 4),
    ("coreference_accuracy_full_history", 4, 4),
    ("coreference_all_arguments_accuracy", 5, 6), ("coreference_routing_accuracy", 1, 2),
    ("coreference_json_valid_rate", 2, 2), ("coreference_placeholder_leak_rate", 0, 2),
])
def test_shares_are_counts_with_wilson_intervals(rows, metric, successes, n):
    assert rows[metric]["value"] == wilson(successes, n, LEVEL)


@pytest.mark.parametrize(("metric", "value"), [
    ("ir_tokens_median", 25), ("ir_tokens_p99", 60), ("schema_tokens_median", 110),
    # Savings .8 .9 .85 .5 over all tools; the cases' tools are one, two and three.
    ("ir_token_saving", 0.825), ("main_context_token_saving", 0.85), ("prompt_token_saving", 1 - 50 / 160),
    ("prompt_tokens_signature", 50), ("prompt_tokens_full_schema", 160),
    # 203 ms over 81 ms, and over 101 ms with routing.
    ("first_argument_speedup", 203 / 101), ("first_argument_speedup_tool_given", 203 / 81),
    ("first_argument_signature_ms", 101), ("first_argument_full_schema_ms", 203), ("route_ms", 20), ("prefill_ms", 81),
    # 100 ms more on both sides where nothing is kept.
    ("first_argument_speedup_cold", 303 / 201), ("first_argument_speedup_tool_given_cold", 303 / 181),
    ("first_argument_signature_cold_ms", 201), ("first_argument_full_schema_cold_ms", 303), ("prefill_cold_ms", 181),
    ("arguments_ms", 300), ("turn_ms", 410),
    ("coreference_prompt_tokens", 300), ("coreference_prompt_tokens_no_window", 100),
    ("coreference_prompt_tokens_full_history", 500),
])
def test_other_values_are_medians_and_quantiles(rows, metric, value):
    assert rows[metric]["value"].value == pytest.approx(value)


@pytest.mark.parametrize(("metric", "difference", "n", "only"), [
    # Right by signature alone: c1 b, c3 a; by the schema alone: none.
    ("specified_argument_signature_minus_full_schema", 2 / 6, 6, (2, 0)),
    ("coreference_window_minus_no_window", 3 / 4, 4, (3, 0)),
    ("coreference_window_minus_full_history", -1 / 4, 4, (0, 1)),
])
def test_arms_are_compared_on_the_same_arguments(rows, metric, difference, n, only):
    row = rows[metric]
    assert row["value"].value == pytest.approx(difference) and row["value"].n == n
    assert row["value"].method.startswith("paired-") and row["mcnemar_p"] == mcnemar(*only)


def test_a_turn_without_a_tool_has_no_call_and_nothing_right(cfg):
    samples = synthetic()
    for sample in samples:
        if (sample["arm"], sample.get("case")) == ("routed", "c2"):
            kept = {key: sample[key] for key in ("arm", "case", "tool", "route_ms")}
            sample.clear()
            sample.update(kept, chosen=None, tool_right=False, right=[], wrong=["a", "b"], filled=False)
    found = by_metric(experiment.summarise(cfg, samples))
    assert found["routing_accuracy"]["value"] == wilson(1, 3, LEVEL)
    assert found["end_to_end_argument_accuracy"]["value"] == wilson(2, 6, LEVEL)
    assert found["json_valid_rate"]["value"] == wilson(1, 2, LEVEL)
    assert found["rejection_rate"]["value"] == wilson(2, 40, LEVEL)


def test_the_order_of_samples_does_not_matter(cfg, rows):
    samples = synthetic()
    for seed in range(3):
        shuffled = [samples[i] for i in np.random.default_rng(seed).permutation(len(samples))]
        assert by_metric(experiment.summarise(cfg, shuffled)) == rows


def test_metrics_are_values_by_name(cfg):
    found = experiment.metrics(experiment.summarise(cfg, synthetic()))
    assert found["routing_accuracy"] == 2 / 3 and found["ir_tokens_median"] == 25


def test_rows_have_the_form_of_the_artifact(cfg, rows, tmp_path):
    samples, path = synthetic(), tmp_path / "accuracy.json"
    artifact.write(path, experiment="sidecar_accuracy",
                   tuple_={"model": "m", "model_sha256": "0" * 64, "embedder": "minilm", "llama_cpp": "b1"},
                   config=cfg.resolved("sidecar_accuracy"), rows=list(rows.values()), samples=samples,
                   provenance={"git_commit": None, "git_dirty": None, "cpu": "test", "threads": 1, "isa": None,
                               "versions": {}})
    stored = by_metric(artifact.read(path)["rows"])
    assert stored["coreference_accuracy"]["value"] == rows["coreference_accuracy"]["value"].row()
    assert artifact.read_samples(path) == samples


# --- with SmolLM2 and MiniLM

def listed(name, description, properties, required):
    return {"server": "toy", "name": name, "description": description, "inputSchema": {
        "type": "object", "required": required, "additionalProperties": False,
        "properties": {key: {"description": "What is meant by this. " * 3, **schema}
                       for key, schema in properties.items()}}}


TOOLS = [listed("get_weather", "Current weather and forecast of a city.",
                {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "kelvin"]}}, ["city"]),
         listed("play_music", "Play a song.", {"song": {"type": "string", "maxLength": 12}}, ["song"]),
         listed("set_alarm", "Set an alarm for an hour of the day.", {"hour": {"type": "integer", "minimum": 0,
                                                                              "maximum": 23}}, ["hour"])]
CASES = [{"id": "rain", "server": "toy", "tool": "get_weather", "query": "Will it rain in Lisbon?",
          "arguments": {"city": "Lisbon"}},
         {"id": "wake", "server": "toy", "tool": "set_alarm", "query": "Play the song at 7 that I like.",
          "arguments": {"hour": 7}}]
COREFERENCE = [{"id": "there", "server": "toy", "tool": "get_weather", "query": "What is the weather there?",
                "arguments": {"city": "Quito"}, "from_history": ["city"], "history": [
                    {"role": "user", "content": "Find me a flight to Quito."},
                    {"role": "tool", "name": "find_flight", "content": json.dumps([{"flight": n} for n in range(20)])},
                    {"role": "assistant", "content": "There are twenty flights."}]}]


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The configuration of a toy registry; its second query is routed to another tool."""
    monkeypatch.setattr(pipeline, "CellStore", lambda: cells.CellStore(tmp_path / "cells"))
    monkeypatch.setattr(routing_setup.RoutingSetup, "cross_encoder", None)
    monkeypatch.setattr(experiment, "thresholds_of", lambda cfg, out: {"slb": routing_setup.Thresholds(None, 0.0)})
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    for name, cases in (("cases", CASES), ("coreference", COREFERENCE)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    section = "sidecar_accuracy"
    return config.compose([
        "model=smollm2-135m", "runtime.n_threads=1", "routing.system=slb", "routing.tuned_embedder=minilm",
        "registry=file", f"registry.path={tmp_path}/tools.json", "arguments.max_tokens=32",
        "arguments.surrogate_chars=60", f"{section}.cases={tmp_path}/cases.jsonl",
        f"{section}.coreference={tmp_path}/coreference.jsonl", f"{section}.n_cases=2", f"{section}.n_coreference=1",
        f"{section}.n_timed=1", f"{section}.repetitions=2", f"{section}.n_ctx=1024"])


@pytest.mark.integration
def test_a_real_run_asks_every_case_in_every_arm(toy, tmp_path, monkeypatch):
    cfg, asked, fill = config.validate(toy), [], experiment.Sidecar.fill

    def counted(sidecar, tool, query, history=(), schema="signature"):
        asked.append((tool.name, query, len(history), schema, sidecar.options.surrogate_chars))
        filled = fill(sidecar, tool, query, history, schema)
        assert sidecar.runtime.pos_max(experiment.SEQ) == -1
        return filled

    monkeypatch.setattr(experiment.Sidecar, "fill", counted)
    path = experiment.run(cfg, tmp_path / "first")
    assert path == tmp_path / "first" / "sidecar" / "accuracy.json"
    rows, samples = by_metric(artifact.read(path)["rows"]), artifact.read_samples(path)
    found = {(s["arm"], s.get("case")): s for s in samples if s["arm"] not in ("tokens", "timed")}
    assert set(found) == {(arm, case) for arm in experiment.CASE_ARMS for case in ("rain", "wake")} | {
        (arm, "there") for arm in experiment.COREFERENCE_ARMS}
    assert [s["tool"] for s in samples if s["arm"] == "tokens"] == [f"toy/{tool['name']}" for tool in TOOLS]

    # Routing is right once; a small model's arguments are not this test's business, but that they are valid is.
    assert (found["routed", "rain"]["tool_right"], found["routed", "wake"]["chosen"]) == (True, "toy/play_music")
    assert rows["routing_accuracy"]["value"]["value"] == 0.5 and found["routed", "wake"]["right"] == []
    assert all(s["valid"] and json.loads(s["arguments_text"]) is not None for s in found.values())
    assert rows["json_valid_rate"]["value"]["value"] == rows["ir_information_kept"]["value"]["value"] == 1
    # What was told of the tool, and of the conversation, is what the arm says.
    assert found["signature", "rain"]["n_prompt_tokens"] < found["full", "rain"]["n_prompt_tokens"]
    lengths = [found[arm, "there"]["n_prompt_tokens"] for arm in ("no_window", "window", "full_history")]
    assert lengths == sorted(set(lengths))
    # The routed turn and the told arm have one prompt, which is decoded once.
    real = [call for call in asked if call[1] != "warm up"]
    assert len(real) == len(set(real)) == 1 + 1 + 1 + 2 + 3

    timed = [s for s in samples if s["arm"] == "timed"]
    assert [(s["head"], s["repetition"], s["side"]) for s in timed] == [
        ("kept", 0, "signature"), ("kept", 0, "full"), ("kept", 1, "full"), ("kept", 1, "signature"),
        ("cold", 0, "signature"), ("cold", 0, "full")]
    # Cold, the instructions are decoded, too.
    assert all(s["n_decoded"] < cold["n_decoded"] for s in timed[:4] for cold in timed[4:] if s["side"] == cold["side"])
    assert all((s["route_ms"] > 0) == (s["side"] == "signature") and s["first_token_ms"] > 0 for s in timed)
    assert rows["first_argument_speedup"]["value"]["n"] == 2

    # The same cells give the same artifact, and the model is not asked again.
    monkeypatch.setattr(experiment.Sidecar, "fill", None)
    assert experiment.run(cfg, tmp_path / "second").read_bytes() == path.read_bytes()


@pytest.mark.integration
@pytest.mark.parametrize(("field", "value", "message"), [
    ("n_cases", 3, "n_cases is 3 and there are 2; lower it"),
    ("coreference", "cases.jsonl", "case 'rain' has no \"from_history\""),
])
def test_what_the_files_do_not_have_is_named(toy, tmp_path, field, value, message):
    toy["sidecar_accuracy"][field] = f"{tmp_path}/{value}" if isinstance(value, str) else value
    with pytest.raises(WorkloadError, match=message):
        experiment.Bench(config.validate(toy), tmp_path)

"""What a constraint costs: a tiny real run on SmolLM2, and the rows made of samples."""
from __future__ import annotations

import json
import sys

import pytest

from experiments import constrain_cost
from experiments.constraint_engines import (
    ARGMAX, CHECKED, LLAMA_CPP, LLGUIDANCE, OUR_MASK, OURS, XGRAMMAR, EngineError, XGrammar, gbnf, llguidance_text)
from nexus import artifact, cells, config, pipeline
from nexus.constrain import Grammars

TOOLS = [
    {"server": "clock", "name": "set_alarm", "description": "Sets an alarm.", "inputSchema": {
        "type": "object", "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23},
                                         "label": {"type": "string", "maxLength": 12}},
        "required": ["hour"], "additionalProperties": False}},
    {"server": "clock", "name": "snooze", "description": "Waits.", "inputSchema": {
        "type": "object", "properties": {"unit": {"enum": ["s", "min"]}}, "required": ["unit"],
        "additionalProperties": False}},
    # Neither llguidance's own conversion nor llama-cpp-python's takes this one.
    {"server": "clock", "name": "zone", "description": "Tells a zone.", "inputSchema": {
        "type": "object", "properties": {"name": {"type": "string", "pattern": "^(?!x)[a-z]+$"}}}},
]
QUERIES = [{"id": "q1", "query": "Wake me at seven", "tool": "set_alarm"},
           {"id": "q2", "query": "Wake me at eight", "tool": "set_alarm"},
           {"id": "q3", "query": "Five more minutes", "tool": "snooze"}]


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "tools.json").write_text(json.dumps(TOOLS))
    (folder / "queries.jsonl").write_text("".join(json.dumps(query) + "\n" for query in QUERIES))
    return config.validate(config.compose([
        "model=smollm2-135m", "profile=quick", "registry=file", f"registry.path={folder / 'tools.json'}",
        f"workload.routing.development={folder / 'queries.jsonl'}", "constrain_cost.n_cases=2",
        "constrain_cost.repetitions=1", f"constrain_cost.peers=[{LLGUIDANCE},{LLAMA_CPP},{XGRAMMAR}]",
        "constrain_cost.xgrammar_python=null", "arguments.max_tokens=24", "runtime.n_threads=1"]))


@pytest.mark.integration
def test_every_engine_is_timed_on_the_same_tokens(cfg, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "CellStore", lambda: cells.CellStore(tmp_path / "cells"))
    path = constrain_cost.run(cfg, tmp_path)
    rows = {row["impl"]: row for row in artifact.read(path)["rows"]}
    assert set(rows) == {OURS, OUR_MASK, LLGUIDANCE, LLAMA_CPP, CHECKED, ARGMAX, XGRAMMAR}
    assert rows[XGRAMMAR]["status"] == "not installed" and rows[XGRAMMAR]["p50_us"] is None
    timed = [impl for impl in rows if impl != XGRAMMAR]
    for impl in timed:
        assert 0 < rows[impl]["p50_us"]["value"] <= rows[impl]["p99_us"]["value"], impl
    samples = artifact.read_samples(path)
    ours = [s for s in samples if s["impl"] == OURS and s["kind"] == "step"]
    # Two cases: the second query's tool had its turn.
    assert {s["case"] for s in ours} == {"q1", "q3"}
    for impl in (OUR_MASK, LLGUIDANCE, LLAMA_CPP, CHECKED):
        steps = [(s["case"], s["step"]) for s in samples if s["impl"] == impl and s["kind"] == "step"]
        assert set(steps) <= {(s["case"], s["step"]) for s in ours} and len(steps) == rows[impl]["n_steps"] > 0
    assert rows[OUR_MASK]["agrees"]["value"] == 1 and rows[OUR_MASK]["n_steps"] == len(ours)
    assert rows[OURS]["per_nexus"]["value"] == 1
    # An order of magnitude is asserted, not a bar: CI machines are noisy.
    assert rows[LLAMA_CPP]["per_nexus"]["value"] > 5
    assert (rows[OURS]["n_compiled"], rows[OURS]["n_failed"]) == (3, 0)
    for impl in (LLGUIDANCE, LLAMA_CPP):
        assert (rows[impl]["n_compiled"], rows[impl]["n_failed"]) == (2, 1), impl

    # Timings are measured once: a second run takes them from the store.
    with monkeypatch.context() as patch:
        patch.setattr(constrain_cost.Bench, "measure", lambda *_: pytest.fail("a stored cell was measured again"))
        assert constrain_cost.run(cfg, tmp_path / "again").read_bytes() == path.read_bytes()


@pytest.mark.integration
def test_what_an_engine_says_against_a_schema(smollm2):
    grammars = Grammars(smollm2)
    with pytest.raises(EngineError, match="look-around"):
        llguidance_text(grammars, TOOLS[2]["inputSchema"])
    with pytest.raises(EngineError):
        gbnf({"type": "object", "properties": {"x": {"type": "string", "pattern": "\\S"}}})
    engine = XGrammar(sys.executable, grammars)
    try:
        # This interpreter has no xgrammar.
        with pytest.raises(EngineError, match="xgrammar_python"):
            engine.ask(schema="{}")
    finally:
        engine.close()


def step(impl: str, us: float, agrees: bool | None = True, **more) -> dict:
    return {"kind": "step", "impl": impl, "case": "q", "repetition": 0, "step": 0, "us": us, "agrees": agrees, **more}


def test_rows_of_samples(cfg):
    samples = [step(OURS, us, rejected=us > 15) for us in (10, 20, 10)]
    samples += [step(OUR_MASK, us, agrees) for us, agrees in ((50, True), (100, None), (100, False))]
    samples += [{"kind": "argmax", "impl": ARGMAX, "case": "q", "repetition": 0, "step": 0, "us": 5.0}]
    samples += [{"kind": "compile", "impl": OURS, "tool": "t", "compile_ms": ms, "grown_kib": 4, "problem": None}
                for ms in (1.0, 3.0)]
    samples += [{"kind": "compile", "impl": LLGUIDANCE, "tool": "t", "compile_ms": 1.0, "grown_kib": 0,
                 "problem": "no"}]
    rows = {row["impl"]: row for row in constrain_cost.summarise(cfg, samples)}
    ours, mask = rows[OURS], rows[OUR_MASK]
    assert (ours["p50_us"].value, ours["p99_us"].value, ours["n_steps"]) == (10, 20, 3)
    assert ours["rejection_rate"].value == pytest.approx(1 / 3) and ours["agrees"] is None
    assert (ours["compile_ms"].value, ours["compile_ms_max"], ours["n_compiled"], ours["n_failed"]) == (2, 3, 2, 0)
    # Where the budget decided there is nothing to agree with.
    assert (mask["agrees"].value, mask["agrees"].n, mask["per_nexus"].value) == (0.5, 2, 10)
    assert (rows[LLGUIDANCE]["status"], rows[LLGUIDANCE]["n_failed"]) == ("no schema taken", 1)
    assert rows[XGRAMMAR]["status"] == "not installed"

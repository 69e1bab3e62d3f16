"""What a model can do, found in a process that a bad file may end."""
from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from experiments.toy_models import write_toy_mamba
from nexus import model_probe
from nexus.config import compose
from nexus.model_probe import ModelFacts, probe
from nexus.own_tuple import write_params


def params(tmp_path: Path, *overrides: str, **model) -> Path:
    values = compose(["profile=quick", *overrides])
    values["model"] |= model
    values["runtime"]["n_threads"] = 1
    write_params(values, tmp_path / "params.yaml")
    return tmp_path / "params.yaml"


@pytest.mark.integration
def test_a_chat_model_with_attention_can_be_spliced(tmp_path: Path):
    facts = probe(params(tmp_path, "model=smollm2-135m"))
    assert (facts.problem, facts.refusal) == (None, None)
    assert (facts.n_ctx_train, facts.has_template, facts.keeps_tokens) == (8192, True, True)
    assert len(facts.block_tokens) == 24 and all(40 < n < 600 for n in facts.block_tokens.values())
    assert 5 < facts.system_tokens < 60 and 5 < facts.query_tokens < 100 and facts.conversation_tokens > 2048


@pytest.mark.integration
def test_recurrent_memory_is_refused_with_the_reason(tmp_path: Path):
    gguf = write_toy_mamba(tmp_path / "toy.gguf")
    facts = probe(params(tmp_path, "model=local", f"model.path={gguf}", "model.name=local-toy"))
    assert facts.problem is None and "recurrent state" in facts.refusal
    assert not facts.keeps_tokens and not facts.has_template and facts.n_ctx_train == 4096


@pytest.mark.integration
def test_a_file_that_is_no_model_is_a_problem_in_one_line(tmp_path: Path):
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"GGUF" + bytes(200))
    facts = probe(params(tmp_path, "model=local", f"model.path={gguf}", "model.name=local-broken"))
    assert "broken.gguf" in facts.problem and len(facts.problem.splitlines()) == 1


@pytest.mark.parametrize("program, said", [
    ("import os; os.kill(os.getpid(), 11)", "signal 11: it said nothing"),
    ("import sys; print('a'); print('out of memory', file=sys.stderr); sys.exit(3)", "status 3: out of memory"),
    ("print('[1, 2]')", "status 0"),
])
def test_a_process_that_ends_without_facts_is_a_problem(tmp_path: Path, monkeypatch, program: str, said: str):
    run = subprocess.run
    monkeypatch.setattr(model_probe.subprocess, "run",
                        lambda command, **options: run([command[0], "-c", program], **options))
    assert said in probe(tmp_path / "params.yaml").problem


def test_facts_survive_the_way_from_process_to_process(monkeypatch):
    told = ModelFacts(n_ctx_train=7, block_tokens={"a": 1}, refusal="no")
    ended = subprocess.CompletedProcess([], 0, f"a line of some library\n{json.dumps(dataclasses.asdict(told))}\n", "")
    monkeypatch.setattr(model_probe.subprocess, "run", lambda *_, **__: ended)
    assert probe(Path("params.yaml")) == told

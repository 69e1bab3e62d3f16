"""The shipped adapter, and its training: what needs no JAX always, the rest where the `train` extra is installed."""
from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.numpy import load, load_file, save_file

from experiments import train_cross_encoder, train_embedder
from experiments.train_cross_encoder import TrainError
from experiments.train_embedder import LINEARS, Example, Settings
from nexus.config import ROOT
from nexus.registry import Tool
from nexus.routing_workload import RoutingCase
from nexus.tool_document import document_text

ADAPTER = ROOT / "experiments" / "data" / "routing" / "embedder.safetensors"
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
TOOLS = [Tool("toy", f"tool_{word}", f"Does the {word} thing, and then the thing please.", {}) for word in WORDS]
# Queries whose words say nothing about the tool: only training can tell.
EXAMPLES = [Example(f"{word} toner", (index + 1,)) for index, word in enumerate(WORDS[:6])]
SMALL = Settings(frozen=1, queries=3, group=2, epochs=2, learning_rate=1e-2, query_tokens=8,
                 document_tokens=24)
ALL = np.ones(len(TOOLS), bool)


# --- The adapter that is shipped ---


def test_adapter_has_the_form_that_the_conversion_reads():
    tensors = load_file(ADAPTER)
    assert all(array.dtype == np.float16 and np.isfinite(array).all() for array in tensors.values())
    assert set(tensors) == {f"encoder.layer.{layer}.{name}.lora_{side}"
                            for layer in range(Settings.frozen, 6) for name in LINEARS for side in "AB"}
    for name, array in tensors.items():
        assert min(array.shape) == Settings.rank and max(array.shape) in (384, 1536)
        assert array.any(), f"{name} was not trained"
    assert ADAPTER.stat().st_size < 3 << 20


def test_adapter_names_what_it_was_trained_on():
    with safe_open(ADAPTER, "np") as file:
        metadata = file.metadata()
    base = OmegaConf.load(train_cross_encoder.BASE).source.files["model.safetensors"].sha256
    assert metadata["base_sha256"] == base
    assert metadata["training_sha256"] == hashlib.sha256(train_embedder.TRAINING.read_bytes()).hexdigest()
    settings = json.loads(metadata["settings"])
    assert settings == json.loads(json.dumps(Settings().__dict__)), "the settings changed: train again"
    assert float(metadata["scale"]) == settings["strength"] * settings["alpha"] / settings["rank"]


# --- Without JAX ---


def test_without_jax_one_line_names_the_extra(tmp_path):
    code = ("import sys, runpy\nsys.modules['jax'] = None\n"
            "sys.argv = ['train', '--registry', 'none.json', '--out', sys.argv[1]]\n"
            "runpy.run_module('experiments.train_embedder', run_name='__main__')")
    out = tmp_path / "adapter.safetensors"
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert 'extra "train"' in done.stderr
    assert not out.exists()


def test_fusion_is_the_sum_of_reciprocal_ranks():
    # 5: 1/61 + 1/62, 7: 1/62 + 1/63, 1: 1/61, 2: 1/63.
    assert train_embedder.fused([5, 7, 2], [1, 5, 7]) == [5, 7, 1, 2]
    assert train_embedder.fused([4], [3]) == [3, 4]


def unit(rows) -> np.ndarray:
    rows = np.array(rows, float)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_every_query_is_drawn_once_with_one_of_its_right_tools():
    examples = [Example("a", (0, 3)), Example("b", (1,)), Example("c", (2,)), Example("d", (4,)), Example("e", (5,))]
    seen = set()
    for seed in range(20):
        drawn = list(train_embedder.batches(examples, [0, 1, 2, 4], np.eye(6), replace(SMALL, queries=2),
                                            np.random.default_rng(seed)))
        rows = np.concatenate([rows for rows, _ in drawn])
        assert sorted(rows) == [0, 1, 2, 4]
        for row, tool in zip(rows, np.concatenate([tools for _, tools in drawn]), strict=True):
            assert tool in examples[row].right
            seen.add((int(row), int(tool)))
    assert {(0, 0), (0, 3)} <= seen


def test_near_tools_share_a_batch():
    # Tools 2i and 2i + 1 are near each other.
    vectors = unit([[i == pair for pair in range(4)] + [0.2 * (side + 1)] for i in range(4) for side in range(2)])
    examples = [Example(str(index), (index,)) for index in range(8)]
    for seed in range(10):
        for rows, _ in train_embedder.batches(examples, range(8), vectors, replace(SMALL, queries=2),
                                              np.random.default_rng(seed)):
            assert rows[0] // 2 == rows[1] // 2


def test_file_names_the_upper_layers_and_its_scale():
    lora = {f"{name}.lora_{side}": np.full((2, 8, 4), layer_value)
            for name in LINEARS for side, layer_value in (("A", 0.5), ("B", 0.25))}
    lora["output.dense.lora_A"][1] = 7
    content = train_embedder.embedder_adapter(lora, Settings(frozen=4, strength=0.5), {"seed": "0"})
    tensors = load(content)
    assert {name.split(".")[2] for name in tensors} == {"4", "5"} and len(tensors) == 24
    assert (tensors["encoder.layer.5.output.dense.lora_A"] == 7).all()
    assert (tensors["encoder.layer.4.output.dense.lora_A"] == 0.5).all()
    size = int.from_bytes(content[:8], "little")
    assert json.loads(content[8:8 + size])["__metadata__"] == {"seed": "0", "scale": "1.0"}


# --- With JAX, on a tiny model named toy ---

needs_jax = pytest.mark.skipif(any(importlib.util.find_spec(name) is None for name in ("jax", "optax", "tokenizers")),
                               reason="the extra \"train\" is not installed")


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory):
    """A BERT of two layers and width 24 with random weights."""
    folder = tmp_path_factory.mktemp("toy")
    rng = np.random.default_rng(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", "please", "tool", "does", "the", "thing", "toner",
             *WORDS]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    shapes = {"embeddings.word_embeddings.weight": (len(words), 24), "embeddings.position_embeddings.weight": (512, 24),
              "embeddings.token_type_embeddings.weight": (2, 24)}
    for layer in range(2):
        for name in LINEARS:
            n_out, n_in = {"intermediate.dense": (48, 24), "output.dense": (24, 48)}.get(name, (24, 24))
            shapes |= {f"encoder.layer.{layer}.{name}.weight": (n_out, n_in),
                       f"encoder.layer.{layer}.{name}.bias": (n_out,)}
    tensors = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    for name in ("embeddings.LayerNorm", *(f"encoder.layer.{layer}.{part}.LayerNorm" for layer in range(2)
                                           for part in ("attention.output", "output"))):
        tensors |= {f"{name}.weight": np.ones(24, np.float32), f"{name}.bias": np.zeros(24, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def toy_training(folder, seed=0, allowed=ALL, **changes):
    model = train_embedder.Embedder(folder, replace(SMALL, **changes))
    texts = train_embedder.TrainingTexts(model, TOOLS, EXAMPLES, seed)
    return model, model.train(texts, range(len(EXAMPLES)), allowed, seed)


@needs_jax
def test_vectors_are_those_of_the_whole_encoder(toy_folder):
    import jax
    model, lora = toy_training(toy_folder)
    documents = [document_text(tool) for tool in TOOLS] + ["alpha", "theta toner please"]
    ours = train_embedder.LowerStates(model, documents, 256, one_length=False).vectors(
        train_embedder.merged(model.layers, lora, model.scale))
    base = train_cross_encoder.base_arrays(load_file(toy_folder / "model.safetensors"))
    # The other encoder has an update in every layer; the frozen one's is 0.
    adapter = {name: np.concatenate([np.zeros_like(array), array]) for name, array in lora.items()}
    for text, vector in zip(documents, ours, strict=True):
        tokens = np.array(model.tokens([text], 256))
        states = train_cross_encoder.hidden_states(jax.tree.map(np.asarray, base), adapter, model.scale, tokens,
                                                   np.ones(tokens.shape, bool))
        np.testing.assert_allclose(vector, unit(np.asarray(states).mean(1))[0], atol=1e-5)


@needs_jax
@pytest.mark.slow
def test_equal_seeds_give_equal_bytes(toy_folder):
    first, again, other = (train_embedder.embedder_adapter(toy_training(toy_folder, seed)[1], SMALL, {})
                           for seed in (1, 1, 2))
    assert first == again != other


@needs_jax
def test_training_raises_recall(toy_folder):
    model, lora = toy_training(toy_folder, epochs=40)
    cases = [RoutingCase(str(index), example.query, TOOLS[example.right[0]].identity)
             for index, example in enumerate(EXAMPLES)]
    recall = train_embedder.Recall(model, TOOLS, cases)
    before, after = (row for row in train_embedder.rows_of(model, recall, range(len(cases)), lora, (0.0, 1.0), "toy"))
    assert before["strength"] == 0 and before["n"] == 6
    assert after["alone"]["1"] == 1.0 > before["alone"]["1"]
    # BM25 knows only the words, which name another tool.
    assert before["fused"]["1"] < after["alone"]["1"]


@needs_jax
def test_cross_validation_asks_what_was_left_out(toy_folder, monkeypatch):
    tools = [replace(tool, server="github" if index < 5 else "grafana") for index, tool in enumerate(TOOLS)]
    cases = [RoutingCase(word, f"{word} toner", tools[index].identity) for index, word in enumerate(WORDS)]
    cases[0] = replace(cases[0], also=(tools[6].identity,))
    model = train_embedder.Embedder(toy_folder, SMALL)
    trained, train = [], model.train

    def watched(texts, chosen, allowed, *rest):
        trained.append((list(chosen), allowed.tolist()))
        return train(texts, chosen, allowed, *rest)

    monkeypatch.setattr(model, "train", watched)
    rows = list(train_embedder.cross_validated(model, tools, cases, 0, strengths=(0.0, 1.0)))
    assert [(row["set"], row["strength"], row["n"]) for row in rows] == [
        ("queries", 0.0, 2), ("queries", 1.0, 2), ("servers", 0.0, 3), ("servers", 1.0, 3)]
    assert len(trained[0][0]) == 6 and all(trained[0][1])
    # The first query has a right tool among those left out.
    assert trained[1] == ([1, 2, 3, 4], [True] * 5 + [False] * 3)


@needs_jax
def test_other_right_tools_of_a_query_do_not_count():
    scores, right = np.array([[2.0, 1.0, 0.5]]), np.array([[True, False, False]])
    barred = np.array([[False, True, False]])
    expected = -np.log(np.exp(2.0) / (np.exp(2.0) + np.exp(0.5)))
    for other in (1.0, 20.0):
        scores[0, 1] = other
        assert float(train_embedder.cross_entropy(scores, right, barred)) == pytest.approx(expected, rel=1e-5)
    # Where they are right as well, their shares add up.
    assert float(train_embedder.cross_entropy(scores, right | barred, np.zeros((1, 3), bool))) < 1e-6


@needs_jax
def test_too_few_queries_are_refused(toy_folder):
    with pytest.raises(TrainError, match="6 queries can be used; a step needs 7: add queries"):
        toy_training(toy_folder, queries=7)


@needs_jax
def test_nothing_left_to_train_is_refused(toy_folder):
    with pytest.raises(TrainError, match="frozen is 2; the base has 2 layers: give 0 to 1"):
        train_embedder.Embedder(toy_folder, replace(SMALL, frozen=2))

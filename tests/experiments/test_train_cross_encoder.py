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

from experiments import train_cross_encoder as training
from experiments.train_cross_encoder import Example, Settings, TrainError
from nexus.config import ROOT
from nexus.registry import Tool
from nexus.routing_workload import RoutingCase
from nexus.tool_document import document_text

ADAPTER = ROOT / "experiments" / "data" / "routing" / "cross_encoder.safetensors"
TOOLS = [Tool("toy", f"tool_{word}", f"Does the {word} thing, and then some more of it at length.", {})
         for word in ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")]
ALL = np.ones(len(TOOLS), bool)


# --- The adapter that is shipped ---


def test_adapter_has_the_form_that_the_conversion_reads():
    tensors = load_file(ADAPTER)
    assert all(array.dtype == np.float16 for array in tensors.values())
    assert all(np.isfinite(array).all() for array in tensors.values())
    head = {"pooler.dense.weight": (384, 384), "pooler.dense.bias": (384,), "classifier.weight": (1, 384),
            "classifier.bias": (1,)}
    assert {name: tensors[name].shape for name in head} == head
    lora = set(tensors) - set(head)
    assert lora == {f"encoder.layer.{layer}.{name}.lora_{side}"
                    for layer in range(6) for name in training.LINEARS for side in "AB"}
    for name in lora:
        assert 384 in tensors[name].shape and min(tensors[name].shape) == Settings.rank
        assert tensors[name].any(), f"{name} was not trained"
    assert ADAPTER.stat().st_size < 3 << 20


def test_adapter_names_what_it_was_trained_on():
    with safe_open(ADAPTER, "np") as file:
        metadata = file.metadata()
    base = OmegaConf.load(training.BASE).source.files["model.safetensors"].sha256
    assert metadata["base_sha256"] == base
    assert metadata["training_sha256"] == hashlib.sha256(training.TRAINING.read_bytes()).hexdigest()
    settings = json.loads(metadata["settings"])
    assert float(metadata["scale"]) == settings["alpha"] / settings["rank"]
    assert settings == json.loads(json.dumps(Settings(epochs=settings["epochs"]).__dict__))


# --- Without JAX ---


def test_without_jax_one_line_names_the_extra(tmp_path):
    code = ("import sys, runpy\nsys.modules['jax'] = None\n"
            "sys.argv = ['train', '--registry', 'none.json', '--out', sys.argv[1]]\n"
            "runpy.run_module('experiments.train_cross_encoder', run_name='__main__')")
    out = tmp_path / "adapter.safetensors"
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert 'extra "train"' in done.stderr and "requirements-train.txt" in done.stderr
    assert not out.exists()


def test_model_without_jax_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "MISSING", ModuleNotFoundError("No module named 'optax'", name="optax"))
    with pytest.raises(TrainError, match="optax is not installed"):
        training.CrossEncoder(tmp_path, Settings())


def test_lock_pins_every_package_by_hash_and_names_no_host():
    text = (ROOT / "requirements-train.txt").read_text()
    pins = [line for line in text.splitlines() if line and line[0].isalnum()]
    assert {"jax", "jaxlib", "optax", "tokenizers"} <= {pin.split("==")[0] for pin in pins}
    assert all("==" in pin and pin.endswith("\\") for pin in pins)
    assert "://" not in text and "--index" not in text


def test_lock_agrees_with_the_main_lock():
    def pins(name):
        lines = (ROOT / name).read_text().splitlines()
        return {line.rstrip(" \\") for line in lines if line and line[0].isalnum()}

    ours, main = pins("requirements-train.txt"), pins("requirements.txt")
    shared = {pin.split("==")[0] for pin in ours} & {pin.split("==")[0] for pin in main}
    assert "numpy" in shared
    versions = [{tuple(pin.split(" ; ")[0].split("==")) for pin in lock if pin.split("==")[0] in shared}
                for lock in (ours, main)]
    assert versions[0] == versions[1]


# --- Examples ---


def fake_embed(texts):
    """Vectors that are nearer the more words two texts share."""
    words = [tool.name.removeprefix("tool_") for tool in TOOLS]
    vectors = np.array([[0.1, *(word in text for word in words)] for text in texts], float)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_fusion_is_the_sum_of_reciprocal_ranks():
    retrieval = training.Retrieval(TOOLS, fake_embed)
    dense, lexical, fused = retrieval.lists("gamma or beta", ALL)
    scores = {i: sum(1 / (training.RRF_K + found.index(i) + 1) for found in (dense, lexical) if i in found)
              for i in range(len(TOOLS))}
    assert set(dense[:2]) == set(lexical) == {1, 2}
    assert fused == sorted(scores, key=lambda i: (-scores[i], i))


def test_tools_left_out_are_no_candidates():
    allowed = ALL.copy()
    allowed[2] = False
    assert all(2 not in found for found in training.Retrieval(TOOLS, fake_embed).lists("gamma or beta", allowed))


def test_right_tools_are_no_negatives():
    cases = [RoutingCase("1", "gamma or beta", TOOLS[2].identity, also=(TOOLS[1].identity,)),
             RoutingCase("2", "order more toner", None)]
    allowed = ALL.copy()
    allowed[7] = False
    answerable, other = training.examples_of(cases, TOOLS, training.Retrieval(TOOLS, fake_embed), allowed)
    assert answerable.right == (2, 1) and not set(answerable.near) & {1, 2, 7}
    assert other.right == () and 7 not in other.near and other.near


def test_query_whose_tool_is_left_out_is_no_example():
    allowed = ALL.copy()
    allowed[2] = False
    cases = [RoutingCase("1", "gamma", TOOLS[2].identity)]
    assert training.examples_of(cases, TOOLS, training.Retrieval(TOOLS, fake_embed), allowed) == []


@pytest.mark.parametrize("seed", range(20))
def test_varied_document(seed):
    rng = np.random.default_rng(seed)
    full = document_text(TOOLS[0])
    assert training.varied_document(TOOLS[0], Settings(nameless=0, shortened=0), rng) == full
    nameless = training.varied_document(TOOLS[0], Settings(nameless=1, shortened=0), rng)
    assert full == f"tool alpha. {nameless}"
    short = training.varied_document(TOOLS[0], Settings(nameless=0, shortened=1), rng)
    assert full.startswith(short) and short.startswith("tool alpha. Does the alpha thing,")


def test_document_without_description_keeps_its_name():
    tool = Tool("toy", "lonely_tool", "", {})
    assert training.varied_document(tool, Settings(nameless=1, shortened=1), np.random.default_rng(0)) == "lonely tool"


EXAMPLES = [Example("alpha please", (0,), (1, 2, 3)), Example("beta please", (1, 4), (0, 2)),
            Example("toner please", (), (5, 6, 7))]
PLAIN = Settings(queries=3, negatives=2, nameless=0, shortened=0)


def drawn(settings=PLAIN, seed=0, hardness=1.0):
    return list(training.batches(EXAMPLES, TOOLS, ALL, settings, np.random.default_rng(seed), lambda: hardness))


def test_batch_shows_each_query_beside_right_and_wrong_tools():
    position = {document_text(tool): index for index, tool in enumerate(TOOLS)}
    for seed in range(20):
        (queries, documents, answerable), = drawn(seed=seed)
        assert len(queries) == len(documents) == 9
        for row in range(3):
            asked = set(queries[3 * row:3 * row + 3])
            shown = [position[text] for text in documents[3 * row:3 * row + 3]]
            example, = (example for example in EXAMPLES if {example.query} == asked)
            assert answerable[row] == bool(example.right)
            assert len(set(shown)) == 3
            if example.right:
                assert shown[0] in example.right
            assert not set(shown[1:] if example.right else shown) & set(example.right)
            assert shown[1 if example.right else 0] in example.near


def test_hardness_turns_negatives_from_random_to_near():
    wide = [Example("alpha please", (0,), (1,))] * 3
    position = {document_text(tool): index for index, tool in enumerate(TOOLS)}

    def near(hardness):
        found = [training.batches(wide, TOOLS, ALL, PLAIN, np.random.default_rng(seed), lambda: hardness)
                 for seed in range(40)]
        return np.mean([position[text] == 1 for batch in found for _, texts, _ in batch for text in texts[1::3]])

    assert near(1.0) == 1 and near(0.0) < 0.4


def test_batches_depend_on_the_seed_alone():
    assert drawn(seed=3)[0][:2] == drawn(seed=3)[0][:2]
    assert any(drawn(seed=3)[0][1] != drawn(seed=seed)[0][1] for seed in range(4, 8))


# --- Cross-validation ---


def test_orders_of_the_first_ten():
    right = [False, True] + [False] * 8
    good = training.ranks_right(right, np.array([5., 9, 0, 0, 0, 0, 0, 0, 0, 0]))
    assert good == {"rrf": False, "rrf_in_5": True, "rrf_in_10": True, "top5": True, "top10": True,
                    "top10_and_rrf": False}
    # The sixth tool has the best logit: it counts among ten, not among five.
    good = training.ranks_right([False] * 5 + [True] + [False] * 4, np.array([1., 2, 3, 4, 5, 9, 0, 0, 0, 0]))
    assert (good["rrf_in_5"], good["rrf_in_10"], good["top5"], good["top10"]) == (False, True, False, True)


class FakeModel:
    """Trains on nothing, remembers what it was shown; its logit is the fake embedding's cosine."""

    embed = staticmethod(fake_embed)

    def train(self, examples, tools, allowed, seed, label):
        self.examples, self.allowed = examples, allowed

    def score(self, trained, query, documents):
        return fake_embed(documents) @ fake_embed([query])[0]


def test_cross_validation_hides_tools_and_queries_of_a_server():
    tools = [replace(tool, server="other" if index > 5 else "toy") for index, tool in enumerate(TOOLS)]
    words = [tool.name.removeprefix("tool_") for tool in tools]
    cases = [RoutingCase(word, f"{word} please", tool.identity) for word, tool in zip(words, tools)]
    cases += [RoutingCase(f"none {i}", f"order toner {i}", None) for i in range(5)]
    model = FakeModel()
    row, abstention = training.cross_validated(model, tools, cases, 0, [("other",)])
    assert not any("theta" in e.query or e.query.startswith("eta") for e in model.examples)
    assert not {6, 7} & {index for e in model.examples for index in (*e.right, *e.near)}
    assert list(np.flatnonzero(~model.allowed)) == [6, 7]
    assert sum(not e.right for e in model.examples) == 4
    assert (row["server"], row["n"], row["top10"]) == ("other", 2, 2)
    assert abstention["n_unanswerable"] == 1 and 0 <= abstention["auc_answerable"] <= 1


def test_cross_validation_by_query_keeps_the_tools():
    cases = [RoutingCase(tool.name, f"{tool.name} please", tool.identity) for tool in TOOLS]
    model = FakeModel()
    row, = training.cross_validated(model, TOOLS, cases, 0, [training.QUERIES])
    assert row["n"] == 2 and len(model.examples) == 6 and model.allowed.all()


def test_fold_without_queries_is_refused():
    with pytest.raises(TrainError, match="no query is about nobody; the registry has the servers toy"):
        list(training.cross_validated(FakeModel(), TOOLS, [], 0, [("nobody",)]))


# --- The file ---


def toy_trained(value=0.5):
    return {"lora": {"attention.self.query.lora_A": np.full((2, 8, 24), value), "attention.self.query.lora_B":
                     np.arange(2 * 24 * 8.).reshape(2, 24, 8)},
            "head": {"classifier.weight": np.ones((1, 24)), "classifier.bias": np.zeros(1)}}


def test_file_holds_the_layers_under_their_own_names():
    content = training.adapter_bytes(toy_trained(), {"scale": "2.0", "seed": "0"})
    tensors = load(content)
    assert set(tensors) == {"classifier.weight", "classifier.bias",
                            *(f"encoder.layer.{i}.attention.self.query.lora_{side}" for i in (0, 1) for side in "AB")}
    assert (tensors["encoder.layer.1.attention.self.query.lora_B"] == np.arange(192, 384.).reshape(24, 8)).all()
    # The order in which metadata were given must not matter.
    assert content == training.adapter_bytes(toy_trained(), {"seed": "0", "scale": "2.0"})


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("value", [1e6, np.nan])
def test_file_refuses_what_f16_cannot_hold(value):
    with pytest.raises(TrainError, match="attention.self.query.lora_A"):
        training.adapter_bytes(toy_trained(value), {})


# --- With JAX, on a tiny model named toy ---

needs_jax = pytest.mark.skipif(any(importlib.util.find_spec(name) is None for name in ("jax", "optax", "tokenizers")),
                               reason="the extra \"train\" is not installed")


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory):
    """A BERT of two layers and width 24 with random weights."""
    folder = tmp_path_factory.mktemp("toy")
    rng = np.random.default_rng(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", "please", "tool", "does", "the", "thing", "toner",
             *(tool.name.removeprefix("tool_") for tool in TOOLS)]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    shapes = {"embeddings.word_embeddings.weight": (len(words), 24), "embeddings.position_embeddings.weight": (512, 24),
              "embeddings.token_type_embeddings.weight": (2, 24), "pooler.dense.weight": (24, 24),
              "pooler.dense.bias": (24,)}
    for layer in range(2):
        for name, n_out, n_in in (("attention.self.query", 24, 24), ("attention.self.key", 24, 24),
                                  ("attention.self.value", 24, 24), ("attention.output.dense", 24, 24),
                                  ("intermediate.dense", 48, 24), ("output.dense", 24, 48)):
            shapes |= {f"encoder.layer.{layer}.{name}.weight": (n_out, n_in),
                       f"encoder.layer.{layer}.{name}.bias": (n_out,)}
    tensors = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    for name in ("embeddings.LayerNorm", *(f"encoder.layer.{layer}.{part}.LayerNorm" for layer in range(2)
                                           for part in ("attention.output", "output"))):
        tensors |= {f"{name}.weight": np.ones(24, np.float32), f"{name}.bias": np.zeros(24, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def toy_training(folder, seed, epochs):
    model = training.CrossEncoder(folder, replace(PLAIN, epochs=epochs, learning_rate=1e-2, head_rate=1e-2, dropout=0))
    return model, model.train(EXAMPLES[:2] + EXAMPLES[:2], TOOLS, ALL, seed)


@needs_jax
@pytest.mark.slow
def test_equal_seeds_give_equal_bytes(toy_folder):
    first, again, other = (training.adapter_bytes(toy_training(toy_folder, seed, 2)[1], {}) for seed in (1, 1, 2))
    assert first == again != other


@needs_jax
def test_training_puts_the_right_tool_first(toy_folder):
    model, trained = toy_training(toy_folder, 0, 60)
    documents = [document_text(tool) for tool in TOOLS]
    assert np.argmax(model.score(trained, "alpha please", documents[:4])) == 0


@needs_jax
def test_score_does_not_depend_on_the_batch(toy_folder):
    model, trained = toy_training(toy_folder, 0, 2)
    documents = [document_text(tool) for tool in TOOLS]
    long = documents + [" ".join(documents)]
    alone = [model.score(trained, "beta please", [document])[0] for document in documents]
    assert model.score(trained, "beta please", long)[:-1] == pytest.approx(alone, abs=1e-5)


@needs_jax
def test_too_few_queries_are_refused(toy_folder):
    model = training.CrossEncoder(toy_folder, replace(PLAIN, queries=4))
    with pytest.raises(TrainError, match="3 queries can be used; a step needs 4"):
        model.train(EXAMPLES, TOOLS, ALL, 0)

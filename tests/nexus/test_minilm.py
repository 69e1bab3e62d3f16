"""A published BERT becomes the same GGUF every time, tensor by tensor; an adapter becomes part of it."""
from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from bert_reference import toy_adapter, toy_model
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from nexus.minilm import ConversionError, convert


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return toy_model(tmp_path_factory.mktemp("toy"))


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    reader = gguf.GGUFReader(path)
    return ({tensor.name: np.array(tensor.data) for tensor in reader.tensors},
            {name: field.contents() for name, field in reader.fields.items()})


def test_same_bytes_twice_and_nothing_left_behind(model: Path, tmp_path: Path):
    first, second = convert(model, tmp_path / "a.gguf"), convert(model, tmp_path / "deeper" / "b.gguf")
    assert first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.gguf", "b.gguf", "deeper"]


def test_every_tensor_and_fact_is_the_models(model: Path, tmp_path: Path):
    tensors, facts = read(convert(model, tmp_path / "toy.gguf"))
    source = load_file(model / "model.safetensors")
    assert len(tensors) == len(source)
    pairs = {"token_embd": "embeddings.word_embeddings", "position_embd": "embeddings.position_embeddings",
             "token_types": "embeddings.token_type_embeddings", "token_embd_norm": "embeddings.LayerNorm"}
    for layer in range(2):
        pairs |= {f"blk.{layer}.{ours}": f"encoder.layer.{layer}.{theirs}" for ours, theirs in {
            "attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
        }.items()}
    for name, array in tensors.items():
        ours, _, kind = name.rpartition(".")
        exact = array.ndim == 1 or ours in ("position_embd", "token_types")
        expected = source[f"{pairs[ours]}.{kind}"].astype(np.float32 if exact else np.float16)
        assert array.dtype == expected.dtype, name
        np.testing.assert_array_equal(array, expected, err_msg=name)
    assert facts["general.architecture"] == "bert" and facts["tokenizer.ggml.model"] == "bert"
    assert facts["bert.pooling_type"] == 1 and facts["bert.attention.causal"] is False
    assert facts["bert.context_length"] == 64 and facts["bert.attention.head_count"] == 2
    assert facts["bert.attention.layer_norm_epsilon"] == pytest.approx(1e-12)
    pieces = facts["tokenizer.ggml.tokens"]
    assert pieces[:7] == ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁a"]
    assert "ing" in pieces and "▁list" in pieces and "▁[" in pieces
    assert facts["tokenizer.ggml.bos_token_id"] == 3
    # Its key is misspelt in the format, and read so.
    assert facts["tokenizer.ggml.seperator_token_id"] == 4
    assert facts["tokenizer.ggml.token_type"][:7] == [3, 1, 3, 3, 3, 3, 1]


def test_an_adapter_is_merged(model: Path, tmp_path: Path):
    adapter = toy_adapter(tmp_path / "adapter.safetensors", model)
    plain, _ = read(convert(model, tmp_path / "plain.gguf"))
    merged, facts = read(convert(model, tmp_path / "merged.gguf", adapter))
    update, source = load_file(adapter), load_file(model / "model.safetensors")
    assert facts["bert.pooling_type"] == 4
    changed = {name for name in plain if not np.array_equal(plain[name], merged[name])}
    assert changed == {"blk.0.attn_q.weight", "blk.1.attn_v.weight"}
    for name, linear in (("blk.0.attn_q", "encoder.layer.0.attention.self.query"),
                         ("blk.1.attn_v", "encoder.layer.1.attention.self.value")):
        expected = source[f"{linear}.weight"] + 2.0 * update[f"{linear}.lora_B"] @ update[f"{linear}.lora_A"]
        np.testing.assert_allclose(merged[f"{name}.weight"], expected, rtol=1e-3, atol=1e-4)
    head = {"cls.weight": "pooler.dense.weight", "cls.bias": "pooler.dense.bias",
            "cls.output.weight": "classifier.weight", "cls.output.bias": "classifier.bias"}
    assert set(merged) - set(plain) == set(head)
    for ours, theirs in head.items():
        np.testing.assert_array_equal(merged[ours].reshape(update[theirs].shape),
                                      update[theirs].astype(merged[ours].dtype))
    again = convert(model, tmp_path / "again.gguf", adapter)
    assert again.read_bytes() == (tmp_path / "merged.gguf").read_bytes()


def test_an_adapter_without_a_head_gives_a_tuned_embedder(tmp_path: Path):
    model = toy_model(tmp_path / "model")
    # As the published base, this one has a pooler, which an embedder does not use.
    rewrite(model, "model.safetensors", lambda t: t.update({"pooler.dense.weight": np.ones((32, 32), np.float32),
                                                            "pooler.dense.bias": np.ones(32, np.float32)}))
    adapter = toy_adapter(tmp_path / "adapter.safetensors", model)
    whole, _ = read(convert(model, tmp_path / "cross.gguf", adapter))
    keep_only(adapter, "lora_")
    plain, plain_facts = read(convert(model, tmp_path / "plain.gguf"))
    tuned, facts = read(convert(model, tmp_path / "tuned.gguf", adapter))
    assert facts["bert.pooling_type"] == 1 and facts["general.name"] == "toy embedder"
    assert set(facts) == set(plain_facts) and set(tuned) == set(plain)
    changed = {name for name in plain if not np.array_equal(plain[name], tuned[name])}
    assert changed == {"blk.0.attn_q.weight", "blk.1.attn_v.weight"}
    for name in tuned:
        np.testing.assert_array_equal(tuned[name], whole[name], err_msg=name)


def test_an_empty_adapter_is_refused(model: Path, tmp_path: Path):
    adapter = toy_adapter(tmp_path / "adapter.safetensors", model)
    keep_only(adapter, "nothing")
    with pytest.raises(ConversionError, match="adapter.safetensors holds no tensors; train again"):
        convert(model, tmp_path / "out.gguf", adapter)


def keep_only(adapter: Path, part: str) -> None:
    """Drops the tensors of an adapter that do not have `part` in their name."""
    with safe_open(adapter, "numpy") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    save_file({name: array for name, array in tensors.items() if part in name}, adapter, metadata)


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("classifier.bias"), "no classifier.bias; a cross-encoder needs its head"),
    (lambda t: t.pop("encoder.layer.0.attention.self.query.lora_B"), "query.lora_A .* do not fit"),
    (lambda t: t.pop("encoder.layer.0.attention.self.query.lora_A"), "query.lora_B has no lora_A"),
    (lambda t: t.update({"encoder.layer.9.output.dense.lora_A": np.zeros((4, 32), np.float32),
                         "encoder.layer.9.output.dense.lora_B": np.zeros((32, 4), np.float32)}), "9.* do not fit"),
    (lambda t: t.update({"encoder.layer.1.attention.self.value.lora_A": np.zeros((4, 31), np.float32)}), "do not fit"),
    (lambda t: t["pooler.dense.bias"].fill(np.nan), "pooler.dense.bias holds NaN"),
    (lambda t: t.update(colour=np.zeros(1, np.float32)), "colour is neither"),
    (lambda t: t.update({"classifier.weight": np.zeros((2, 32), np.float32)}), r"cls.output.weight has the shape \(2"),
])
def test_a_wrong_adapter_is_refused(model: Path, tmp_path: Path, change, message: str):
    adapter = toy_adapter(tmp_path / "adapter.safetensors", model)
    tensors = load_file(adapter)
    with safe_open(adapter, "numpy") as file:
        metadata = file.metadata()
    change(tensors)
    save_file(tensors, adapter, metadata)
    with pytest.raises(ConversionError, match=message):
        convert(model, tmp_path / "out.gguf", adapter)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("metadata, message", [
    ({"base_sha256": "0" * 64}, "trained on weights with SHA-256 0000"),
    ({"scale": "a lot"}, "scale is 'a lot'; write a finite number"),
    ({"scale": "inf"}, "scale is 'inf'"),
])
def test_wrong_metadata_of_an_adapter(model: Path, tmp_path: Path, metadata: dict, message: str):
    adapter = toy_adapter(tmp_path / "adapter.safetensors", model, **metadata)
    with pytest.raises(ConversionError, match=message):
        convert(model, tmp_path / "out.gguf", adapter)


def rewrite(folder: Path, name: str, change) -> None:
    path = folder / name
    if name == "model.safetensors":
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
    elif name == "config.json":
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))
    else:
        path.write_text(change(path.read_text()))


@pytest.mark.parametrize("name, change, message", [
    ("vocab.txt", lambda text: text + "more\n", "tokens, config.json says vocab_size"),
    ("vocab.txt", lambda text: text.replace("list", "open"), "has a token twice"),
    ("vocab.txt", lambda text: text.replace("[SEP]", "[END]"), "has no token '\\[SEP\\]'"),
    ("config.json", lambda c: c.update(model_type="gpt2"), "model_type is 'gpt2', expected 'bert'"),
    ("config.json", lambda c: c.update(position_embedding_type="relative_key"), "position_embedding_type is 'relative"),
    ("config.json", lambda c: c.pop("hidden_size"), "hidden_size is None"),
    ("config.json", lambda c: c.update(num_hidden_layers=3), "no tensor encoder.layer.2"),
    ("config.json", lambda c: c.update(intermediate_size=65), r"ffn_up.weight has the shape \(64, 32\)"),
    ("model.safetensors", lambda t: t.pop("encoder.layer.1.output.dense.bias"), "no tensor encoder.layer.1.output"),
])
def test_a_wrong_model_folder_is_refused(tmp_path: Path, name: str, change, message: str):
    folder = toy_model(tmp_path / "model")
    rewrite(folder, name, change)
    with pytest.raises(ConversionError, match=message):
        convert(folder, tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_unreadable_files_are_named(tmp_path: Path):
    folder = toy_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"no such format")
    with pytest.raises(ConversionError, match="model.safetensors is not a readable safetensors file"):
        convert(folder, tmp_path / "out.gguf")
    (folder / "config.json").write_text("{")
    with pytest.raises(ConversionError, match="config.json is not JSON"):
        convert(folder, tmp_path / "out.gguf")
    (folder / "config.json").unlink()
    with pytest.raises(ConversionError, match="has no config.json"):
        convert(folder, tmp_path / "out.gguf")

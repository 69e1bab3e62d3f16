"""all-MiniLM-L6-v2 and models of its form as GGUF, for llama.cpp: an embedder, or with an adapter a tuned one or a
cross-encoder.

llama.cpp's architecture "bert" is the original BERT encoder: learned positions, post-layer norms, GELU. It adds the
type-0 row to every token, so both texts of a pair are of type 0. Matrices are stored as F16 and the rest as F32. The
bytes depend on the input alone: the same files give the same GGUF, and so the same SHA-256, on every machine.
"""
from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from safetensors import SafetensorError, safe_open

from nexus.embedder_spec import SOURCE_FILES

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "max_position_embeddings", "type_vocab_size")
LAYER_NAMES = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
EMBEDDING_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
HEAD_NAMES = {"pooler.dense": "cls", "classifier": "cls.output"}
# Their names in the vocabulary are control tokens for llama.cpp; all others, "[unused0]" too, are plain ones.
CONTROL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class ConversionError(ValueError):
    """A model folder or an adapter cannot become a GGUF; the message names the file, what was found and the remedy."""


def convert(model_folder: str | os.PathLike, out: Path, adapter: Path | None = None) -> Path:
    """`out`, written whole or not at all: the model in `model_folder` as GGUF.

    model_folder   config.json, model.safetensors and vocab.txt as published (Hugging Face names)
    adapter        safetensors trained on these weights: for a linear L, `L.lora_A` [r, in] and `L.lora_B` [out, r],
                   merged as W + scale · B A in float32; of a cross-encoder also its head, `pooler.dense` and
                   `classifier` with .weight and .bias. Metadata: `scale`, the `base_sha256` of model.safetensors.

    The result is an embedder with mean pooling; with an adapter that has a head it is a cross-encoder with rank
    pooling, whose score is classifier(tanh(pooler(h₀))) of the first token's last state h₀. Raises ConversionError.
    """
    folder = Path(model_folder)
    missing = [name for name in SOURCE_FILES if not (folder / name).is_file()]
    if missing:
        raise ConversionError(f"model folder {folder} has no {', '.join(missing)}; give a published model's folder")
    config = _config(folder / "config.json")
    # Not splitlines(): a token may be one of the other characters that it takes for the end of a line.
    tokens = (folder / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    if len(tokens) != config["vocab_size"]:
        raise ConversionError(f"{folder / 'vocab.txt'} has {len(tokens)} tokens, config.json says vocab_size "
                              f"{config['vocab_size']}; take both from one model")
    if len({_piece(token) for token in tokens}) != len(tokens):
        # llama.cpp would end the process.
        raise ConversionError(f"{folder / 'vocab.txt'} has a token twice; fetch it again")
    tensors = _read(folder / "model.safetensors")[0]
    head = False
    if adapter is not None:
        tensors, head = _merged(tensors, Path(adapter), folder / "model.safetensors")
    named = list(_named(tensors, config["num_hidden_layers"], head))
    _check_shapes(named, config, folder)

    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    writer = gguf.GGUFWriter(partial, "bert")
    try:
        _describe(writer, config, tokens, "cross-encoder" if head else "embedder")
        for name, array in named:
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return out


def _config(path: Path) -> dict:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConversionError(f"{path} is not JSON ({error}); fetch it again") from None
    expected = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
    for field, value in expected.items():
        # Old configs leave the position type out; then it is the absolute one.
        if config.get(field, value if field == "position_embedding_type" else None) != value:
            raise ConversionError(f"{path}: {field} is {config.get(field)!r}, expected {value!r}; only models of the "
                                  "original BERT's form can be converted")
    for field in SIZES:
        if not isinstance(config.get(field), int) or config[field] < 1:
            raise ConversionError(f"{path}: {field} is {config.get(field)!r}, expected a whole number; fetch it again")
    return config


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """All tensors of a safetensors file, and its metadata."""
    try:
        with safe_open(path, "numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ConversionError(f"{path} is not a readable safetensors file ({error}); fetch it again") from None


def _merged(tensors: dict[str, np.ndarray], adapter: Path, base: Path) -> tuple[dict[str, np.ndarray], bool]:
    """The model's tensors with the adapter's low-rank updates added and its head put in; whether it has a head."""
    updates, metadata = _read(adapter)
    with base.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if metadata.get("base_sha256") != sha256:
        raise ConversionError(f"{adapter} was trained on weights with SHA-256 {metadata.get('base_sha256')}; {base} "
                              f"has {sha256}: take the adapter's own base, or train again")
    try:
        scale = float(metadata["scale"])
    except (KeyError, ValueError):
        scale = math.nan
    if not math.isfinite(scale):
        raise ConversionError(f"{adapter}: metadata scale is {metadata.get('scale')!r}; write a finite number")
    merged = dict(tensors)
    for name in sorted(updates):
        array = updates[name].astype(np.float32)
        if not np.isfinite(array).all():
            raise ConversionError(f"{adapter}: {name} holds NaN or an infinity; train again")
        if name.endswith(".lora_A"):
            linear = name.removesuffix(".lora_A")
            second = updates.get(f"{linear}.lora_B")
            weight = tensors.get(f"{linear}.weight")
            if second is None or weight is None or second.ndim != 2 or (
                    array.ndim != 2 or second.shape[1] != array.shape[0]
                    or (second.shape[0], array.shape[1]) != weight.shape):
                raise ConversionError(f"{adapter}: {name} {array.shape} and {linear}.lora_B "
                                      f"{getattr(second, 'shape', None)} do not fit {linear}.weight "
                                      f"{getattr(weight, 'shape', None)} of {base}; train on this base")
            # One rank after the other: a BLAS product's last bits, and so the file's hash, would depend on the machine.
            product = np.zeros(weight.shape, np.float32)
            for column, row in zip(second.astype(np.float32).T, array, strict=True):
                product += np.outer(column, row)
            merged[f"{linear}.weight"] = weight.astype(np.float32) + np.float32(scale) * product
        elif name.endswith(".lora_B"):
            if f"{name.removesuffix('.lora_B')}.lora_A" not in updates:
                raise ConversionError(f"{adapter}: {name} has no lora_A; store both")
        elif name.rpartition(".")[0] in HEAD_NAMES:
            merged[name] = array
        else:
            raise ConversionError(f"{adapter}: {name} is neither a low-rank update nor part of the head "
                                  f"({', '.join(HEAD_NAMES)}); leave it out")
    absent = [f"{part}.{kind}" for part in HEAD_NAMES for kind in ("weight", "bias") if f"{part}.{kind}" not in updates]
    # The base may bring a pooler of its own, which an embedder does not use: only the adapter's counts.
    head = len(absent) < 2 * len(HEAD_NAMES)
    if head and absent:
        raise ConversionError(f"{adapter} has no {', '.join(absent)}; a cross-encoder needs its head")
    if not updates:
        raise ConversionError(f"{adapter} holds no tensors; train again")
    return merged, head


def _named(tensors: dict[str, np.ndarray], n_layers: int, head: bool) -> Iterator[tuple[str, np.ndarray]]:
    """(name in the GGUF, array) in the file's order: embeddings, layers, head."""
    names = dict(EMBEDDING_NAMES)
    for layer in range(n_layers):
        names |= {f"encoder.layer.{layer}.{ours}": f"blk.{layer}.{theirs}" for ours, theirs in LAYER_NAMES.items()}
    names |= HEAD_NAMES if head else {}
    for source, target in names.items():
        for kind in ("weight", "bias"):
            array = tensors.get(f"{source}.{kind}")
            if array is None:
                if kind == "bias" and source in EMBEDDING_NAMES and "LayerNorm" not in source:
                    continue
                raise ConversionError(f"the model has no tensor {source}.{kind}; it is not a BERT of {n_layers} layers")
            # Norms, biases and what llama.cpp adds without a product stay exact.
            exact = array.ndim == 1 or target in ("position_embd", "token_types")
            yield f"{target}.{kind}", np.ascontiguousarray(array, dtype=np.float32 if exact else np.float16)


def _check_shapes(named: list[tuple[str, np.ndarray]], config: dict, folder: Path) -> None:
    # llama.cpp would refuse too, but without saying which file is wrong.
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    expected = {"token_embd.weight": (config["vocab_size"], hidden), "cls.output.weight": (1, hidden),
                "position_embd.weight": (config["max_position_embeddings"], hidden), "cls.output.bias": (1,),
                "token_types.weight": (config["type_vocab_size"], hidden)}
    for name, array in named:
        wide = re.search(r"ffn_(up|down)\.(weight|bias)$", name)
        shape = expected.get(name, (hidden,) * array.ndim)
        if wide:
            shape = {"up.weight": (inner, hidden), "down.weight": (hidden, inner),
                     "up.bias": (inner,), "down.bias": (hidden,)}[f"{wide[1]}.{wide[2]}"]
        if array.shape != shape:
            raise ConversionError(f"{folder}: {name} has the shape {array.shape}, config.json says {shape}; take both "
                                  "from one model")


def _describe(writer: gguf.GGUFWriter, config: dict, tokens: list[str], kind: str) -> None:
    writer.add_name(f"{config.get('_name_or_path', 'bert')} {kind}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.RANK if kind == "cross-encoder" else gguf.PoolingType.MEAN)
    if kind == "cross-encoder":
        writer.add_classifier_output_labels(["score"])
    writer.add_tokenizer_model("bert")
    writer.add_token_type_count(config["type_vocab_size"])
    writer.add_token_list([_piece(token) for token in tokens])
    writer.add_token_types([gguf.TokenType.CONTROL if token in CONTROL_TOKENS else gguf.TokenType.NORMAL
                            for token in tokens])
    ids = {token: index for index, token in enumerate(tokens)}
    try:
        writer.add_pad_token_id(ids["[PAD]"])
        writer.add_unk_token_id(ids["[UNK]"])
        writer.add_bos_token_id(ids["[CLS]"])
        writer.add_sep_token_id(ids["[SEP]"])
        writer.add_mask_token_id(ids["[MASK]"])
    except KeyError as error:
        raise ConversionError(f"vocab.txt has no token {error}; it is not a BERT vocabulary") from None


def _piece(token: str) -> str:
    # llama.cpp marks the start of a word where WordPiece marks its continuation.
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[2:] if token.startswith("##") else "\u2581" + token

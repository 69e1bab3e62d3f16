"""A BERT encoder in NumPy float32 with its own WordPiece, independent of llama.cpp; and a toy model of that form."""
from __future__ import annotations

import hashlib
import json
import unicodedata
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from scipy.special import erf

CJK = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F),
       (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F))


class Reference:
    """A published model folder, and what its embeddings and pair scores should be."""

    def __init__(self, folder: Path, adapter: Path | None = None):
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.vocabulary = {token: index for index, token in
                           enumerate((folder / "vocab.txt").read_text(encoding="utf-8").rstrip("\n").split("\n"))}
        with safe_open(folder / "model.safetensors", "numpy") as file:
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}
        if adapter is not None:
            with safe_open(adapter, "numpy") as file:
                update = {name: file.get_tensor(name) for name in file.keys()}
                scale = float(file.metadata()["scale"])
            for name in update:
                if name.endswith(".lora_A"):
                    linear = name.removesuffix(".lora_A")
                    self.tensors[f"{linear}.weight"] = (
                        self.tensors[f"{linear}.weight"] + scale * update[f"{linear}.lora_B"] @ update[name])
                elif not name.endswith(".lora_B"):
                    self.tensors[name] = update[name]

    def tokens(self, text: str) -> list[int]:
        """WordPiece of the text as published for uncased BERT, without [CLS] and [SEP]."""
        spaced = ""
        for char in unicodedata.normalize("NFD", text.replace("\t", " ").replace("\n", " ").replace("\r", " ")):
            category = unicodedata.category(char)
            if category == "Mn" or category.startswith("C") or char == "\ufffd":
                continue
            char = char.lower()
            alone = (category.startswith("P") or char.isascii() and category.startswith("S")
                     or any(first <= ord(char) <= last for first, last in CJK))
            spaced += f" {char} " if alone else " " if category == "Zs" else char
        return [index for word in spaced.split() for index in self._pieces(word)]

    def _pieces(self, word: str) -> list[int]:
        found, begin = [], 0
        while begin < len(word):
            for end in range(len(word), begin, -1):
                index = self.vocabulary.get(("##" if begin else "") + word[begin:end])
                if index is not None:
                    found.append(index)
                    begin = end
                    break
            else:
                return [self.vocabulary["[UNK]"]]
        return found

    def states(self, ids: list[int]) -> np.ndarray:
        """Last hidden states, float32[n, hidden], of token ids that are all of type 0."""
        t, eps, heads = self.tensors, self.config["layer_norm_eps"], self.config["num_attention_heads"]

        def norm(x, name):
            x = x - x.mean(-1, keepdims=True)
            return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * t[f"{name}.weight"] + t[f"{name}.bias"]

        def linear(x, name):
            return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

        h = norm(t["embeddings.word_embeddings.weight"][ids] + t["embeddings.token_type_embeddings.weight"][0]
                 + t["embeddings.position_embeddings.weight"][:len(ids)], "embeddings.LayerNorm")
        for layer in range(self.config["num_hidden_layers"]):
            name = f"encoder.layer.{layer}"
            q, k, v = (linear(h, f"{name}.attention.self.{part}").reshape(len(ids), heads, -1).swapaxes(0, 1)
                       for part in ("query", "key", "value"))
            scores = q @ k.swapaxes(1, 2) / np.sqrt(np.float32(q.shape[-1]))
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(len(ids), -1)
            h = norm(h + linear(mixed, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm")
            inner = linear(h, f"{name}.intermediate.dense")
            inner = inner * np.float32(0.5) * (1 + erf(inner / np.sqrt(np.float32(2))))
            h = norm(h + linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")
        return h

    def embed(self, text: str, max_tokens: int) -> np.ndarray:
        """Unit vector of the mean over all tokens, [CLS] and [SEP] included."""
        ids = [self.vocabulary["[CLS]"], *self.tokens(text)[:max_tokens - 2], self.vocabulary["[SEP]"]]
        mean = self.states(ids).mean(0)
        return mean / np.linalg.norm(mean)

    def score(self, query: str, document: str, max_tokens: int) -> float:
        first, second = self.tokens(query), self.tokens(document)
        query_longer = len(first) > len(second)
        while len(first) + len(second) > max_tokens - 3:
            # One by one from the longer, as in "longest first"; of equals the one that was shorter loses a token.
            (first if (len(first), not query_longer) > (len(second), query_longer) else second).pop()
        sep = self.vocabulary["[SEP]"]
        state = self.states([self.vocabulary["[CLS]"], *first, sep, *second, sep])[0]
        pooled = np.tanh(self.tensors["pooler.dense.weight"] @ state + self.tensors["pooler.dense.bias"])
        return float((self.tensors["classifier.weight"] @ pooled + self.tensors["classifier.bias"])[0])


def toy_model(folder: Path, hidden: int = 32, seed: int = 1) -> Path:
    """A random BERT of two layers whose words are letters, digits and a few longer pieces."""
    rng = np.random.default_rng(seed)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    tokens = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters),
              "list", "open", "##ed", "##ing", "issue", "[", "]", ".", ",", "'", "_", "中", "文", "ß"]
    config = {"model_type": "bert", "hidden_act": "gelu", "hidden_size": hidden, "intermediate_size": 2 * hidden,
              "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64, "type_vocab_size": 2,
              "layer_norm_eps": 1e-12, "vocab_size": len(tokens), "_name_or_path": "toy"}
    shapes = {"embeddings.word_embeddings.weight": (len(tokens), hidden),
              "embeddings.position_embeddings.weight": (64, hidden),
              "embeddings.token_type_embeddings.weight": (2, hidden)}
    linears = {"attention.self.query": (hidden, hidden), "attention.self.key": (hidden, hidden),
               "attention.self.value": (hidden, hidden), "attention.output.dense": (hidden, hidden),
               "intermediate.dense": (2 * hidden, hidden), "output.dense": (hidden, 2 * hidden)}
    norms = ["embeddings.LayerNorm"]
    for layer in range(2):
        for name, shape in linears.items():
            shapes |= {f"encoder.layer.{layer}.{name}.weight": shape, f"encoder.layer.{layer}.{name}.bias": shape[:1]}
        norms += [f"encoder.layer.{layer}.{part}.LayerNorm" for part in ("attention.output", "output")]
    tensors = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    for name in norms:
        tensors[f"{name}.weight"] = rng.normal(1, 0.1, hidden).astype(np.float32)
        tensors[f"{name}.bias"] = rng.normal(0, 0.1, hidden).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def toy_adapter(path: Path, folder: Path, seed: int = 2, **metadata: str) -> Path:
    """A random cross-encoder adapter of rank 4 with small values for the model in `folder`."""
    rng = np.random.default_rng(seed)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        hidden = file.get_slice("embeddings.word_embeddings.weight").get_shape()[1]
    tensors = {}
    for name in ("encoder.layer.0.attention.self.query", "encoder.layer.1.attention.self.value"):
        tensors[f"{name}.lora_A"] = rng.normal(0, 0.05, (4, hidden)).astype(np.float32)
        tensors[f"{name}.lora_B"] = rng.normal(0, 0.05, (hidden, 4)).astype(np.float32)
    tensors["pooler.dense.weight"] = rng.normal(0, 0.05, (hidden, hidden)).astype(np.float32)
    tensors["pooler.dense.bias"] = rng.normal(0, 0.05, hidden).astype(np.float32)
    tensors["classifier.weight"] = rng.normal(0, 0.05, (1, hidden)).astype(np.float32)
    tensors["classifier.bias"] = rng.normal(0, 0.05, 1).astype(np.float32)
    base = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    save_file(tensors, path, {"scale": "2.0", "base_sha256": base} | metadata)
    return path

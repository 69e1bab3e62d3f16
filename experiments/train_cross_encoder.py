"""The adapter that makes a cross-encoder for tools of all-MiniLM-L6-v2: LoRA matrices, pooler and a head of one logit.

    python -m experiments.train_cross_encoder --registry FILE --out FILE --seed N
    python -m experiments.train_cross_encoder --registry FILE --cross-validate

The model reads `[CLS] query [SEP] document [SEP]` with token type 0 throughout, as llama.cpp scores it. A query is
shown beside one right tool, tools that BM25 or the untuned embeddings take for it, and a random one. The loss is the
cross-entropy of choosing the right one among them, and a share of the binary one of every pair, which gives the logit
a zero: queries that no tool answers have only this part. Documents lose their name or the end of their description now
and then, so that neither can be learnt by heart.

Cross-validation leaves out all tools and queries of some servers, trains on the others, and then ranks the first tools
of reciprocal rank fusion for the queries that were left out, among all tools. Needs the `train` extra, which CI does
not have. Equal inputs and seed give equal bytes on one machine.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf
from safetensors.numpy import load_file

from nexus.canonical import write_atomically
from nexus.carriers import WeightsError
from nexus.config import ROOT
from nexus.embedder import ensure_source
from nexus.embedder_spec import EmbedderSpec
from nexus.lexical import Lexical
from nexus.progress import progress
from nexus.registry import RegistryError, Tool, load_registry
from nexus.routing_workload import RoutingCase, load_cases
from nexus.tool_document import document_text, name_words
from nexus.workload import WorkloadError

try:
    import jax
    import jax.numpy as jnp
    import optax
    from tokenizers.implementations import BertWordPieceTokenizer
except ImportError as error:
    MISSING: ImportError | None = error
else:
    MISSING = None

TRAINING = ROOT / "experiments" / "data" / "routing" / "training.jsonl"
BASE = ROOT / "conf" / "embedder" / "minilm.yaml"
HEADS = 12
EPSILON = 1e-12
# Rank constant of reciprocal rank fusion, and how many tools of each list are negatives or candidates.
RRF_K, DEPTH = 60, 10
# Pairs are padded to the next of these lengths, so that XLA compiles few programs.
LENGTHS = (48, 64, 96, 128, 256)
# More of them cost half as much again per step.
LINEARS = ("attention.self.query", "attention.self.value")
QUERIES = ("queries",)
FOLDS = (QUERIES, ("github",), ("atlassian",), ("grafana", "jenkins"), ("git", "fetch", "time"))

Arrays = dict[str, np.ndarray]


class TrainError(RuntimeError):
    """No adapter can be trained; the message names what is missing and the remedy."""


@dataclass(frozen=True)
class Settings:
    """What the result depends on beside data and seed."""

    rank: int = 8
    alpha: float = 16.0
    """Updates are scaled by alpha / rank."""
    epochs: int = 6
    queries: int = 8
    """Of one step."""
    negatives: int = 3
    """Of one query, the last of them random."""
    easy: float = 0.4
    """Share of the steps in which negatives turn from random ones into near ones: matching is learnt first."""
    learning_rate: float = 2e-3
    head_rate: float = 1e-3
    weight_decay: float = 0.01
    warm_up: float = 0.1
    """Share of the steps; then the rate falls to 0 along a cosine."""
    binary_weight: float = 0.3
    dropout: float = 0.1
    """Of the pooled vector."""
    max_tokens: int = 64
    nameless: float = 0.2
    """Probability of a document without its name."""
    shortened: float = 0.3
    """Probability of a description without its end."""


@dataclass(frozen=True)
class Example:
    """One query, its right tools and those that retrievers take for it, as positions among the tools."""

    query: str
    right: tuple[int, ...]
    near: tuple[int, ...]


# --- The model -------------------------------------------------------------------------------------------------------


def normalised(x, weight, bias):
    mean = x.mean(-1, keepdims=True)
    centred = x - mean
    return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + EPSILON) * weight + bias


def hidden_states(base, adapter, scale, tokens, mask):
    """Last hidden states [n, length, 384] of a BERT encoder. `base["layers"]` and the adapter are stacked by layer."""
    x = base["words"][tokens] + base["positions"][:tokens.shape[1]] + base["type"]
    x = normalised(x, base["norm.weight"], base["norm.bias"])
    return layered(base["layers"], adapter, scale, x, mask)


def layered(layers, adapter, scale, x, mask):
    """States [n, length, width] behind the stacked layers, from those before them; an empty adapter changes nothing."""
    n, length, width = x.shape
    shut = jnp.where(mask, 0.0, -1e9)[:, None, None, :]

    def linear(layer, lora, name, x):
        y = x @ layer[f"{name}.weight"].T + layer[f"{name}.bias"]
        if f"{name}.lora_A" in lora:
            y = y + scale * ((x @ lora[f"{name}.lora_A"].T) @ lora[f"{name}.lora_B"].T)
        return y

    def one_layer(x, parts):
        layer, lora = parts
        query, key, value = (linear(layer, lora, f"attention.self.{name}", x)
                             .reshape(n, length, HEADS, width // HEADS).transpose(0, 2, 1, 3)
                             for name in ("query", "key", "value"))
        weights = jax.nn.softmax(query @ key.transpose(0, 1, 3, 2) / np.sqrt(width // HEADS) + shut, axis=-1)
        mixed = (weights @ value).transpose(0, 2, 1, 3).reshape(n, length, width)
        x = normalised(x + linear(layer, lora, "attention.output.dense", mixed),
                       layer["attention.output.LayerNorm.weight"], layer["attention.output.LayerNorm.bias"])
        inner = jax.nn.gelu(linear(layer, lora, "intermediate.dense", x), approximate=False)
        x = normalised(x + linear(layer, lora, "output.dense", inner),
                       layer["output.LayerNorm.weight"], layer["output.LayerNorm.bias"])
        return x, None

    return jax.lax.scan(one_layer, x, (layers, adapter))[0]


def logits(base, trained, scale, tokens, mask, keep):
    """One logit per pair: head(tanh(pooler(state of [CLS]))). `keep` is 1, or a mask of dropout over the pooled."""
    first = hidden_states(base, trained["lora"], scale, tokens, mask)[:, 0]
    head = trained["head"]
    pooled = jnp.tanh(first @ head["pooler.dense.weight"].T + head["pooler.dense.bias"]) * keep
    return pooled @ head["classifier.weight"][0] + head["classifier.bias"][0]


def base_arrays(weights: Arrays) -> dict:
    """The encoder's weights by short names, those of its layers stacked."""
    layers: dict[str, list[np.ndarray]] = {}
    count = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer."))
    for index in range(count):
        prefix = f"encoder.layer.{index}."
        for name, array in weights.items():
            if name.startswith(prefix):
                layers.setdefault(name.removeprefix(prefix), []).append(array)
    # llama.cpp gives both texts of a pair token type 0.
    return {"words": weights["embeddings.word_embeddings.weight"],
            "positions": weights["embeddings.position_embeddings.weight"],
            "type": weights["embeddings.token_type_embeddings.weight"][0],
            "norm.weight": weights["embeddings.LayerNorm.weight"], "norm.bias": weights["embeddings.LayerNorm.bias"],
            "layers": {name: np.stack(arrays) for name, arrays in layers.items()}}


def initial(weights: Arrays, base: dict, settings: Settings, rng: np.random.Generator) -> dict:
    """What is trained, before training: LoRA that changes nothing, the base's own pooler, a small head."""
    lora = {}
    for name in LINEARS:
        n_layers, n_out, n_in = base["layers"][f"{name}.weight"].shape
        lora[f"{name}.lora_A"] = rng.uniform(-1, 1, (n_layers, settings.rank, n_in)) / np.sqrt(n_in)
        lora[f"{name}.lora_B"] = np.zeros((n_layers, n_out, settings.rank))
    width = weights["pooler.dense.weight"].shape[0]
    head = {"pooler.dense.weight": weights["pooler.dense.weight"], "pooler.dense.bias": weights["pooler.dense.bias"],
            "classifier.weight": rng.normal(0, 0.02, (1, width)), "classifier.bias": np.zeros(1)}
    return {part: {name: np.asarray(array, np.float32) for name, array in arrays.items()}
            for part, arrays in (("lora", lora), ("head", head))}


# --- Texts and examples ----------------------------------------------------------------------------------------------


class Reader:
    """Texts as padded token arrays."""

    def __init__(self, vocabulary: Path):
        self._tokenizer = BertWordPieceTokenizer(str(vocabulary), lowercase=True)

    def pairs(self, queries: Sequence[str], documents: Sequence[str], max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and mask [n, length] of query and document; a document too long loses its end."""
        self._tokenizer.enable_truncation(max_tokens, strategy="only_second")
        return self._padded(self._tokenizer.encode_batch(list(zip(queries, documents, strict=True))))

    def texts(self, texts: Sequence[str], max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        self._tokenizer.enable_truncation(max_tokens)
        return self._padded(self._tokenizer.encode_batch(list(texts)))

    @staticmethod
    def _padded(encoded) -> tuple[np.ndarray, np.ndarray]:
        longest = max(len(item.ids) for item in encoded)
        tokens = np.zeros((len(encoded), next(length for length in LENGTHS if length >= longest)), np.int32)
        mask = np.zeros(tokens.shape, bool)
        for row, item in enumerate(encoded):
            tokens[row, :len(item.ids)] = item.ids
            mask[row, :len(item.ids)] = True
        return tokens, mask


class Retrieval:
    """BM25 and the untuned embeddings over the same documents."""

    def __init__(self, tools: Sequence[Tool], embed: Callable[[Sequence[str]], np.ndarray]):
        documents = [document_text(tool) for tool in tools]
        self._lexical, self._embed, self._vectors = Lexical(documents), embed, embed(documents)

    def lists(self, query: str, allowed: np.ndarray) -> tuple[list[int], list[int], list[int]]:
        """Best first: by embedding, by BM25 (only tools that share a word), and by the fusion of 50 of each."""
        cosines = self._vectors @ self._embed([query])[0]
        dense = [int(i) for i in np.argsort(-cosines, kind="stable") if allowed[i]][:50]
        lexical = [i for i, _ in self._lexical.search(query, len(self._vectors)) if allowed[i]][:50]
        scores: dict[int, float] = {}
        for found in (dense, lexical):
            for rank, index in enumerate(found, start=1):
                scores[index] = scores.get(index, 0.0) + 1 / (RRF_K + rank)
        return dense, lexical, sorted(scores, key=lambda index: (-scores[index], index))


def examples_of(cases: Sequence[RoutingCase], tools: Sequence[Tool], retrieval: Retrieval,
                allowed: np.ndarray) -> list[Example]:
    """The cases as examples over the allowed tools; a right tool is never a negative."""
    position = {tool.identity: index for index, tool in enumerate(tools)}
    examples = []
    for case in cases:
        right = tuple(position[identity] for identity in ((case.tool, *case.also) if case.tool else ())
                      if allowed[position[identity]])
        if case.tool and not right:
            continue
        dense, lexical, fused = retrieval.lists(case.query, allowed)
        near = dict.fromkeys(fused[:DEPTH] + dense[:DEPTH] + lexical[:DEPTH])
        examples.append(Example(case.query, right, tuple(index for index in near if index not in right)))
    return examples


def varied_document(tool: Tool, settings: Settings, rng: np.random.Generator) -> str:
    """The tool's document, now and then without its name or without the end of its description."""
    nameless, shortened, share = rng.random(3)
    text = document_text(tool)
    name = name_words(tool.name)
    words = text.removeprefix(f"{name}. ").split() if tool.description.strip() else []
    if not words:
        return text
    if shortened < settings.shortened:
        words = words[:max(4, round(len(words) * (0.3 + 0.7 * share)))]
    description = " ".join(words)
    return description if nameless < settings.nameless else f"{name}. {description}"


def batches(examples: Sequence[Example], tools: Sequence[Tool], allowed: np.ndarray, settings: Settings,
            rng: np.random.Generator,
            hardness: Callable[[], float] = lambda: 1.0) -> Iterator[tuple[list[str], list[str], np.ndarray]]:
    """Of one epoch: queries and documents of the pairs, `1 + negatives` per query, and which queries have an answer.

    The first document of an answerable query is the right one. `hardness` is the probability that a negative, but for
    the last of a query, is a near one. The last queries of an epoch that do not fill a batch
    are left for the next one, whose order is another.
    """
    wanted = settings.negatives + 1
    everything = np.flatnonzero(allowed)
    order = rng.permutation(len(examples))
    for start in range(0, len(order) - settings.queries + 1, settings.queries):
        chosen = [examples[i] for i in order[start:start + settings.queries]]
        queries, documents = [], []
        for example in chosen:
            picked = [int(rng.choice(example.right))] if example.right else []
            near = list(example.near)
            hard = min(len(near), int(rng.binomial(wanted - len(picked) - 1, hardness())))
            # Nearer tools are likelier: the gate asks about the first few.
            weights = 1 / (3 + np.arange(len(near)))
            picked += [near[i] for i in rng.choice(len(near), hard, replace=False, p=weights / weights.sum())]
            others = np.setdiff1d(everything, [*picked, *example.right])
            picked += [int(i) for i in rng.choice(others, wanted - len(picked), replace=False)]
            queries += [example.query] * wanted
            documents += [varied_document(tools[i], settings, rng) for i in picked]
        yield queries, documents, np.array([bool(example.right) for example in chosen])


# --- Training --------------------------------------------------------------------------------------------------------


class CrossEncoder:
    """A base model with what was trained of it."""

    def __init__(self, folder: Path, settings: Settings):
        """`folder` holds model.safetensors and vocab.txt as published. Raises TrainError without the `train` extra."""
        require_packages()
        self.folder, self.settings = folder, settings
        self.weights = load_file(folder / "model.safetensors")
        self.reader = Reader(folder / "vocab.txt")
        self.base = jax.tree.map(jnp.asarray, base_arrays(self.weights))
        self.scale = settings.alpha / settings.rank
        self._score = jax.jit(lambda trained, tokens, mask: logits(self.base, trained, self.scale, tokens, mask, 1.0))
        self._states = jax.jit(lambda tokens, mask: hidden_states(self.base, {}, 0.0, tokens, mask))

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Mean-pooled vectors of the untuned base, L2-normalised, float32[n, 384]."""
        rows = []
        for text in texts:
            tokens, mask = self.reader.texts([text], LENGTHS[-1])
            states = np.asarray(self._states(tokens, mask))[0][mask[0]]
            rows.append(states.mean(0))
        vectors = np.stack(rows)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def score(self, trained: dict, query: str, documents: Sequence[str]) -> np.ndarray:
        """One logit per document."""
        tokens, mask = self.reader.pairs([query] * len(documents), documents, LENGTHS[-1])
        return np.asarray(self._score(trained, tokens, mask))

    def train(self, examples: Sequence[Example], tools: Sequence[Tool], allowed: np.ndarray, seed: int,
              label: str = "training") -> dict:
        """What was trained, as `initial` has it."""
        settings = self.settings
        if len(examples) < settings.queries:
            raise TrainError(f"{len(examples)} queries can be used; a step needs {settings.queries}: add queries")
        rng = np.random.default_rng(seed)
        trained = initial(self.weights, self.base, settings, rng)
        per_epoch = len(examples) // settings.queries
        steps = per_epoch * settings.epochs

        def rate(peak: float):
            return optax.warmup_cosine_decay_schedule(0.0, peak, max(1, round(settings.warm_up * steps)), steps)

        def adam(peak: float):
            return optax.adamw(rate(peak), weight_decay=settings.weight_decay)

        optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(
            {"lora": adam(settings.learning_rate), "head": adam(settings.head_rate)}, {"lora": "lora", "head": "head"}))
        state = optimiser.init(trained)
        base, scale, width = self.base, self.scale, settings.negatives + 1

        def loss(trained, tokens, mask, answerable, keep):
            scores = logits(base, trained, scale, tokens, mask, keep).reshape(-1, width)
            chosen = -jax.nn.log_softmax(scores, axis=1)[:, 0]
            truth = jnp.zeros(scores.shape).at[:, 0].set(answerable)
            binary = optax.sigmoid_binary_cross_entropy(scores, truth).mean()
            return (chosen * answerable).sum() / jnp.maximum(answerable.sum(), 1) + settings.binary_weight * binary

        @jax.jit
        def step(trained, state, *batch):
            value, gradient = jax.value_and_grad(loss)(trained, *batch)
            updates, state = optimiser.update(gradient, state, trained)
            return optax.apply_updates(trained, updates), state, value

        with progress(label, total=steps, unit="steps") as bar:
            for epoch in range(settings.epochs):
                values = []
                for queries, documents, answerable in batches(
                        examples, tools, allowed, settings, rng,
                        lambda: min(1.0, bar.done / max(1, settings.easy * steps))):
                    tokens, mask = self.reader.pairs(queries, documents, settings.max_tokens)
                    keep = rng.random((len(tokens), trained["head"]["classifier.weight"].shape[1])) >= settings.dropout
                    keep = (keep / (1 - settings.dropout)).astype(np.float32)
                    trained, state, value = step(trained, state, tokens, mask, answerable.astype(np.float32), keep)
                    values.append(float(value))
                    bar.advance(1)
                bar.note(f"epoch {epoch + 1}, mean loss {np.mean(values):.3f}")
        if not np.isfinite(values).all():
            raise TrainError(f"the loss became {values[-1]}; lower learning_rate (now {settings.learning_rate})")
        return trained


def adapter_bytes(trained: dict, metadata: dict[str, str]) -> bytes:
    """The safetensors file: F16 tensors under Hugging Face names, sorted; equal content gives equal bytes."""
    tensors = {}
    for name, stacked in trained["lora"].items():
        for index, array in enumerate(np.asarray(stacked)):
            tensors[f"encoder.layer.{index}.{name}"] = array
    tensors |= {name: np.asarray(array) for name, array in trained["head"].items()}
    header: dict[str, dict] = {"__metadata__": dict(sorted(metadata.items()))}
    body = b""
    for name in sorted(tensors):
        data = np.ascontiguousarray(tensors[name], dtype="<f2")
        if not np.isfinite(data).all():
            raise TrainError(f"{name} does not fit into F16; lower learning_rate")
        header[name] = {"dtype": "F16", "shape": list(data.shape), "data_offsets": [len(body), len(body) + data.nbytes]}
        body += data.tobytes()
    # The package's own writer puts the metadata in another order each time.
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


# --- Cross-validation ------------------------------------------------------------------------------------------------


def ranks_right(right: Sequence[bool], scores: np.ndarray) -> dict[str, bool]:
    """Whether the first tool is right, by each way of ordering the ten that the fusion gave.

    right    of the fusion's tools, best first
    scores   their logits
    """
    order = np.argsort(-scores, kind="stable")
    rank = np.empty(len(order), int)
    rank[order] = np.arange(len(order))
    both = 1 / (RRF_K + 1 + np.arange(len(order))) + 1 / (RRF_K + 1 + rank)
    return {"rrf": right[0], "rrf_in_5": any(right[:5]), "rrf_in_10": any(right),
            "top5": right[int(np.argmax(scores[:5]))], "top10": right[int(order[0])],
            "top10_and_rrf": right[int(np.argmax(both))]}


def cross_validated(model: CrossEncoder, tools: Sequence[Tool], cases: Sequence[RoutingCase], seed: int,
                    folds: Sequence[Sequence[str]] = FOLDS) -> Iterator[dict]:
    """Per fold one row per server: right answers of `n`, as `ranks_right` names them; then one row on abstention.

    A fold leaves out servers, or is QUERIES: a fifth of the queries, their tools staying. `auc_answerable` is the
    probability that the best logit of a query with an answer is above that of one without.
    """
    retrieval = Retrieval(tools, model.embed)
    everything = np.ones(len(tools), bool)
    unanswerable = [case for case in cases if case.tool is None]
    answerable = [case for case in cases if case.tool is not None]
    for number, fold in enumerate(folds):
        # Queries that nothing answers are left out in turn, as they belong to no server.
        spared = unanswerable[number::max(5, len(folds))]
        if tuple(fold) == QUERIES:
            allowed, asked = everything, answerable[::5]
        else:
            allowed = np.array([tool.server not in fold for tool in tools])
            asked = [case for case in answerable if case.tool[0] in fold]
        if not asked:
            raise TrainError(f"no query is about {', '.join(fold)}; the registry has the servers "
                             f"{', '.join(sorted({str(tool.server) for tool in tools}))}")
        kept = [case for case in cases if case not in spared and case not in asked]
        trained = model.train(examples_of(kept, tools, retrieval, allowed), tools, allowed, seed,
                              f"without {', '.join(fold)}")
        rows: dict[str, dict] = {}
        strongest: dict[bool, list[float]] = {True: [], False: []}
        for case in asked + spared:
            found = retrieval.lists(case.query, everything)[2][:DEPTH]
            scores = model.score(trained, case.query, [document_text(tools[i]) for i in found])
            strongest[case.tool is not None].append(float(scores[:5].max()))
            if case.tool is not None:
                row = rows.setdefault(str(case.tool[0]), {"fold": "+".join(fold), "server": case.tool[0], "n": 0})
                row["n"] += 1
                for name, good in ranks_right([case.accepts(tools[i]) for i in found], scores).items():
                    row[name] = row.get(name, 0) + bool(good)
        yield from rows.values()
        some, none = np.array(strongest[True])[:, None], np.array(strongest[False])[None, :]
        if none.size:
            yield {"fold": "+".join(fold), "auc_answerable": float(((some > none) + 0.5 * (some == none)).mean()),
                   "n_unanswerable": none.size}


def require_packages() -> None:
    """Raises TrainError where the `train` extra is not installed."""
    if MISSING is not None:
        raise TrainError(f"{MISSING.name or MISSING} is not installed; it comes with the extra \"train\":  "
                         "python -m pip install --require-hashes -r requirements-train.txt")


def base_folder() -> Path:
    """The verified files of the base model, fetched if need be."""
    spec = EmbedderSpec.model_validate(OmegaConf.to_container(OmegaConf.load(BASE)))
    return ensure_source(spec)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the adapter to --out, or print the rows of the cross-validation as JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m experiments.train_cross_encoder", description="Train the adapter "
                                     "of the cross-encoder, or tell how it does on servers that it has not seen.")
    parser.add_argument("--registry", type=Path, required=True, help="listing of the tools that the queries are about")
    parser.add_argument("--training", type=Path, default=TRAINING, help="queries, one JSON object per line")
    parser.add_argument("--base", type=Path, help="folder of all-MiniLM-L6-v2, fetched if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=Settings.epochs)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, help="safetensors file to write")
    task.add_argument("--cross-validate", nargs="*", metavar="SERVER+SERVER",
                      help=f"leave out these servers, by default {' '.join(map('+'.join, FOLDS))} in turn")
    given = parser.parse_args(arguments)
    require_packages()
    settings = Settings(epochs=given.epochs)
    tools = load_registry(given.registry).tools
    cases = load_cases(given.training, tools)
    model = CrossEncoder(given.base or base_folder(), settings)
    if given.cross_validate is not None:
        folds = [tuple(fold.split("+")) for fold in given.cross_validate] or FOLDS
        for row in cross_validated(model, tools, cases, given.seed, folds):
            print(json.dumps(row), flush=True)
        return
    everything = np.ones(len(tools), bool)
    examples = examples_of(cases, tools, Retrieval(tools, model.embed), everything)
    trained = model.train(examples, tools, everything, given.seed)
    write_atomically(given.out, adapter_bytes(trained, {
        "scale": str(model.scale), "seed": str(given.seed),
        "base_sha256": file_sha256(model.folder / "model.safetensors"),
        "training_sha256": file_sha256(given.training), "registry_sha256": file_sha256(given.registry),
        "settings": json.dumps(asdict(settings)), "jax": jax.__version__}))


if __name__ == "__main__":
    try:
        main()
    except (TrainError, RegistryError, WorkloadError, WeightsError, OSError) as error:
        sys.exit(str(error))

"""The adapter that tunes all-MiniLM-L6-v2 to find tools: LoRA matrices of the upper layers, and how far to follow them.

    python -m experiments.train_embedder --registry FILE --out FILE --seed N
    python -m experiments.train_embedder --registry FILE --cross-validate [--public FOLDER]

The loss is InfoNCE, three times: of a query against the documents of its batch, of a document against the queries of
its batch, and of a query against all tools of the registry as they were embedded when the epoch began. A batch is made
of groups of near tools, so that the documents in it are hard negatives of each other. Tools that answer the same query
are never each other's negatives. Documents lose their name or the end of their description now and then.

Nothing is learnt in the lower layers: their states are computed once per text. The update is then scaled down by
`strength` (Wortsman et al., "Robust fine-tuning of zero-shot models", CVPR 2022): between the base and the tuned model
lies one that knows these tools better and has not unlearnt others. Cross-validation tells recall for several strengths,
0 being the base: by queries and by servers left out, and on public functions that nobody trained on. Needs the `train`
extra, which CI does not have. Equal inputs and seed give equal bytes on one machine.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from experiments.train_cross_encoder import (
    EPSILON,
    RRF_K,
    TRAINING,
    TrainError,
    adapter_bytes,
    base_arrays,
    base_folder,
    file_sha256,
    hidden_states,
    layered,
    require_packages,
    varied_document,
)
from nexus.canonical import write_atomically
from nexus.carriers import WeightsError
from nexus.lexical import Lexical
from nexus.progress import progress
from nexus.public_queries import public_queries
from nexus.registry import RegistryError, Tool, load_registry
from nexus.routing_workload import RoutingCase, load_cases
from nexus.tool_document import document_text
from nexus.workload import WorkloadError

try:
    import jax
    import jax.numpy as jnp
    import optax
    from tokenizers.implementations import BertWordPieceTokenizer
except ImportError:
    pass  # require_packages says it

LINEARS = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
           "intermediate.dense", "output.dense")
# Texts are padded to the next of these lengths and embedded so many at a time, so that XLA compiles few programs.
LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256)
ROWS = 32
# How many tools of each list are fused, and the ranks up to which a right tool counts as found.
FUSED, RANKS = 50, (1, 5, 10, 20)
STRENGTHS = (0.0, 0.3, 0.5, 0.7, 1.0)
TRAINED_SERVERS = ("github", "atlassian")
PUBLIC_QUERIES = 300


@dataclass(frozen=True)
class Settings:
    """What the result depends on beside data and seed."""

    strength: float = 1.0
    """Share of the trained update that goes into the adapter's scale."""
    frozen: int = 3
    """Lower layers that keep the base's weights."""
    rank: int = 8
    alpha: float = 16.0
    """Updates are scaled by alpha / rank while training."""
    epochs: int = 5
    queries: int = 32
    """Of one step."""
    group: int = 8
    """Queries of one step whose tools are near each other."""
    temperature: float = 0.05
    reverse: float = 0.5
    """Weight of the loss of documents against the batch's queries."""
    registry: float = 1.0
    """Weight of the loss of queries against all tools."""
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.01
    warm_up: float = 0.1
    """Share of the steps; then the rate falls to 0 along a cosine."""
    variants: int = 3
    """Documents of one tool, the first of them whole."""
    nameless: float = 0.2
    """Probability of a variant without its name."""
    shortened: float = 0.3
    """Probability of a variant without the end of its description."""
    query_tokens: int = 32
    document_tokens: int = 48
    """Of a text in training; recall is measured with the first 256."""


@dataclass(frozen=True)
class Example:
    """One query and its right tools, as positions among the tools."""

    query: str
    right: tuple[int, ...]


# --- The model -------------------------------------------------------------------------------------------------------


def upper_layers(layers, x, mask):
    """Last hidden states [n, length, width] from those of a lower layer; `layers` are stacked."""
    return layered(layers, {}, 0.0, x, mask)


def merged(layers, lora, scale):
    """The stacked layers with W + scale · B A for every linear of `lora`: cheaper than two thin products per token."""
    layers = dict(layers)
    for name in LINEARS:
        product = jnp.einsum("lor,lri->loi", lora[f"{name}.lora_B"], lora[f"{name}.lora_A"])
        layers[f"{name}.weight"] = layers[f"{name}.weight"] + scale * product
    return layers


def mean_pooled(states, mask):
    """Unit vectors [n, width] of the mean over all tokens."""
    mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return mean / jnp.sqrt((mean * mean).sum(1, keepdims=True) + EPSILON)


def cross_entropy(scores, right, barred):
    """Mean over the rows of -log of the share of `right` among all that is not barred."""
    share = (jax.nn.logsumexp(jnp.where(right, scores, -1e9), axis=1)
             - jax.nn.logsumexp(jnp.where(barred, -1e9, scores), axis=1))
    return -share.mean()


class LowerStates:
    """Texts as states of the last frozen layer: all of one length for training, or by length for recall."""

    def __init__(self, model: Embedder, texts: Sequence[str], max_tokens: int, one_length: bool):
        self.n, self._model = len(texts), model
        ids = model.tokens(texts, max_tokens)
        if one_length:
            self.states = np.zeros((self.n, max_tokens, model.width), np.float32)
            self.mask = np.zeros((self.n, max_tokens), bool)
        self._parts = []
        for rows, length in _by_length(ids, max_tokens if one_length else None):
            tokens, mask = np.zeros((ROWS, length), np.int32), np.zeros((ROWS, length), bool)
            mask[:, 0] = True  # rows without a text must not divide by 0
            for place, row in enumerate(rows):
                tokens[place, :len(ids[row])] = ids[row]
                mask[place, :len(ids[row])] = True
            states = np.asarray(model.lower(tokens, mask))
            if one_length:
                self.states[rows], self.mask[rows] = states[:len(rows)], mask[:len(rows)]
            else:
                self._parts.append((rows, states, mask))

    def vectors(self, layers) -> np.ndarray:
        """float32[n, width] of texts kept by length, through these upper layers."""
        vectors = np.zeros((self.n, self._model.width), np.float32)
        for rows, states, mask in self._parts:
            vectors[rows] = np.asarray(self._model.upper(layers, states, mask))[:len(rows)]
        return vectors


def _by_length(ids: Sequence[Sequence[int]], length: int | None) -> Iterator[tuple[list[int], int]]:
    """At most ROWS texts at a time, shortest first, and the length to pad them to."""
    order = sorted(range(len(ids)), key=lambda row: len(ids[row]))
    while order:
        padded = length or next(limit for limit in LENGTHS if limit >= len(ids[order[0]]))
        count = sum(len(ids[row]) <= padded for row in order[:ROWS])
        yield order[:count], padded
        order = order[count:]


# --- Training --------------------------------------------------------------------------------------------------------


class TrainingTexts:
    """The lower states of all queries and of several documents per tool; they are the same in every epoch."""

    def __init__(self, model: Embedder, tools: Sequence[Tool], examples: Sequence[Example], seed: int):
        settings = model.settings
        rng = np.random.default_rng([seed, 1])
        texts = [document_text(tool) for tool in tools]
        for _ in range(settings.variants - 1):
            texts += [varied_document(tool, settings, rng) for tool in tools]
        self.examples, self.n_tools = list(examples), len(tools)
        self.documents = LowerStates(model, texts, settings.document_tokens, one_length=True)
        queries = [example.query for example in examples]
        self.queries = LowerStates(model, queries, settings.query_tokens, one_length=True)


class Embedder:
    """A base model, of which the layers above `frozen` can be trained."""

    def __init__(self, folder: Path, settings: Settings):
        require_packages()
        self.folder, self.settings = folder, settings
        base = jax.tree.map(jnp.asarray, base_arrays(load_file(folder / "model.safetensors")))
        n_layers, self.width = base["layers"]["attention.self.query.bias"].shape
        if not 0 <= settings.frozen < n_layers:
            raise TrainError(f"frozen is {settings.frozen}; the base has {n_layers} layers: give 0 to {n_layers - 1}")
        self.scale = settings.alpha / settings.rank
        self.layers = {name: array[settings.frozen:] for name, array in base["layers"].items()}
        frozen = base | {"layers": {name: array[:settings.frozen] for name, array in base["layers"].items()}}
        self._tokenizer = BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=True)
        self.lower = jax.jit(lambda tokens, mask: hidden_states(frozen, {}, 0.0, tokens, mask))
        self.upper = jax.jit(lambda layers, states, mask: mean_pooled(upper_layers(layers, states, mask), mask))

    def tokens(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Token ids of every text between [CLS] and [SEP], at most `max_tokens` with these."""
        self._tokenizer.enable_truncation(max_tokens)
        return [item.ids for item in self._tokenizer.encode_batch(list(texts))]

    def initial(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """LoRA that changes nothing."""
        lora = {}
        for name in LINEARS:
            n_layers, n_out, n_in = self.layers[f"{name}.weight"].shape
            first = rng.uniform(-1, 1, (n_layers, self.settings.rank, n_in)) / np.sqrt(n_in)
            lora[f"{name}.lora_A"] = first.astype(np.float32)
            lora[f"{name}.lora_B"] = np.zeros((n_layers, n_out, self.settings.rank), np.float32)
        return lora

    def train(self, texts: TrainingTexts, chosen: Sequence[int], allowed: np.ndarray, seed: int,
              label: str = "training") -> dict[str, np.ndarray]:
        """LoRA trained on the chosen examples, with the allowed tools alone as negatives."""
        settings, scale, layers = self.settings, self.scale, self.layers
        if len(chosen) < settings.queries:
            raise TrainError(f"{len(chosen)} queries can be used; a step needs {settings.queries}: add queries")
        rng = np.random.default_rng(seed)
        lora = self.initial(rng)
        steps = len(chosen) // settings.queries * settings.epochs
        rate = optax.warmup_cosine_decay_schedule(0.0, settings.learning_rate,
                                                  max(1, round(settings.warm_up * steps)), steps)
        optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=settings.weight_decay))
        state = optimiser.init(lora)

        def loss(lora, queries, query_mask, documents, document_mask, registry, same, right):
            upper = merged(layers, lora, scale)
            asked = mean_pooled(upper_layers(upper, queries, query_mask), query_mask)
            found = mean_pooled(upper_layers(upper, documents, document_mask), document_mask)
            scores = asked @ found.T / settings.temperature
            own = jnp.eye(len(scores), dtype=bool)
            other = same & ~own
            # The registry's vectors are constants. Right ones among them are compared with wrong ones of the same
            # age: beside fresh documents they would teach that whatever is fresh is right.
            return (cross_entropy(scores, own, other) + settings.reverse * cross_entropy(scores.T, own, other.T)
                    + settings.registry * cross_entropy(asked @ registry.T / settings.temperature, right, ~allowed))

        @jax.jit
        def step(lora, state, *batch):
            value, gradient = jax.value_and_grad(loss)(lora, *batch)
            updates, state = optimiser.update(gradient, state, lora)
            return optax.apply_updates(lora, updates), state, value

        with progress(label, total=steps, unit="steps") as bar:
            for epoch in range(settings.epochs):
                registry = self._registry(texts, lora)
                values = []
                for rows, picked in batches(texts.examples, chosen, registry, settings, rng):
                    rights = [texts.examples[row].right for row in rows]
                    same = np.array([[tool in right for tool in picked] for right in rights])
                    right = np.array([np.isin(np.arange(texts.n_tools), right) for right in rights])
                    # Variant v of tool t is document v · n_tools + t.
                    drawn = picked + texts.n_tools * rng.integers(settings.variants, size=len(picked))
                    lora, state, value = step(lora, state, texts.queries.states[rows], texts.queries.mask[rows],
                                              texts.documents.states[drawn], texts.documents.mask[drawn], registry,
                                              same, right)
                    values.append(float(value))
                    bar.advance(1)
                bar.note(f"epoch {epoch + 1}, mean loss {np.mean(values):.3f}")
        if not np.isfinite(values).all():
            raise TrainError(f"the loss became {values[-1]}; lower learning_rate (now {settings.learning_rate})")
        return lora

    def _registry(self, texts: TrainingTexts, lora: dict) -> np.ndarray:
        """Vectors of all tools' whole documents, float32[n_tools, width]."""
        layers = merged(self.layers, lora, self.scale)
        parts = []
        for start in range(0, texts.n_tools, ROWS):
            part = slice(start, start + ROWS)
            parts.append(np.asarray(self.upper(layers, texts.documents.states[part], texts.documents.mask[part])))
        return np.concatenate(parts)[:texts.n_tools]


def batches(examples: Sequence[Example], chosen: Sequence[int], registry: np.ndarray, settings: Settings,
            rng: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of one epoch: examples of a batch and, for each, one of its right tools.

    Batches are made of groups of near tools in random order. The last queries that do not fill a batch are left for the
    next epoch, whose order is another.
    """
    rows = rng.permutation(np.asarray(chosen))
    picked = np.array([rng.choice(examples[row].right) for row in rows])
    vectors = registry[picked]
    groups, left = [], np.arange(len(rows))
    while len(left):
        nearest = np.argsort(-(vectors[left] @ vectors[left[0]]), kind="stable")
        # The first is its own nearest, or of the same tool as the nearest.
        groups.append(left[nearest[:settings.group]])
        left = np.delete(left, nearest[:settings.group])
        left = rng.permutation(left)
    # The last group is what no other wanted and may not be full: never at the same place.
    order = np.concatenate([groups[index] for index in rng.permutation(len(groups))])
    for start in range(0, len(order) - settings.queries + 1, settings.queries):
        part = order[start:start + settings.queries]
        yield rows[part], picked[part]


def embedder_adapter(lora: dict[str, np.ndarray], settings: Settings, metadata: dict[str, str]) -> bytes:
    """The safetensors file of the tuned layers; its scale is strength · alpha / rank."""
    tensors = {f"encoder.layer.{settings.frozen + index}.{name}": array
               for name, stacked in lora.items() for index, array in enumerate(np.asarray(stacked))}
    scale = settings.strength * settings.alpha / settings.rank
    return adapter_bytes({"lora": {}, "head": tensors}, metadata | {"scale": str(scale)})


# --- Recall ----------------------------------------------------------------------------------------------------------


class Recall:
    """Queries over a registry, and how often their right tools are among the first."""

    def __init__(self, model: Embedder, tools: Sequence[Tool], cases: Sequence[RoutingCase]):
        documents = [document_text(tool) for tool in tools]
        self.cases = [case for case in cases if case.tool]
        position = {tool.identity: index for index, tool in enumerate(tools)}
        self.examples = [Example(case.query, tuple(position[identity] for identity in (case.tool, *case.also)))
                         for case in self.cases]
        queries = [example.query for example in self.examples]
        lexical = Lexical(documents)
        self._lexical = [[index for index, _ in lexical.search(query, FUSED)] for query in queries]
        self._documents = LowerStates(model, documents, LENGTHS[-1], one_length=False)
        self._queries = LowerStates(model, queries, LENGTHS[-1], one_length=False)

    def row(self, layers, which: Sequence[int]) -> dict[str, object]:
        """Recall@k of some of the queries, by embedding alone and fused with BM25 (reciprocal ranks)."""
        documents, queries = self._documents.vectors(layers), self._queries.vectors(layers)
        ranks: dict[str, list[float]] = {"alone": [], "fused": []}
        for index in which:
            right = self.examples[index].right
            dense = np.argsort(-(documents @ queries[index]), kind="stable").tolist()
            for name, found in (("alone", dense), ("fused", fused(dense[:FUSED], self._lexical[index]))):
                ranks[name].append(min((found.index(tool) for tool in right if tool in found), default=np.inf))
        return {"n": len(which)} | {name: {str(k): round(float(np.mean(np.array(values) < k)), 4) for k in RANKS}
                                    for name, values in ranks.items()}


def fused(*lists: Sequence[int]) -> list[int]:
    """Reciprocal rank fusion, best first, ties by lowest index."""
    scores: dict[int, float] = {}
    for found in lists:
        for rank, index in enumerate(found, start=1):
            scores[index] = scores.get(index, 0.0) + 1 / (RRF_K + rank)
    return sorted(scores, key=lambda index: (-scores[index], index))


def cross_validated(model: Embedder, tools: Sequence[Tool], cases: Sequence[RoutingCase], seed: int,
                    strengths: Sequence[float] = STRENGTHS) -> Iterator[dict[str, object]]:
    """Rows of recall per strength: a third of the queries left out, then all servers but TRAINED_SERVERS."""
    recall = Recall(model, tools, cases)
    texts = TrainingTexts(model, tools, recall.examples, seed)
    order = np.random.default_rng([seed, 2]).permutation(len(recall.cases))
    third = len(order) // 3
    trained = np.array([case.tool[0] in TRAINED_SERVERS for case in recall.cases])
    splits = {
        "queries": (order[third:], order[:third], np.ones(len(tools), bool)),
        "servers": (np.flatnonzero(trained), np.flatnonzero(~trained),
                    np.array([tool.server in TRAINED_SERVERS for tool in tools])),
    }
    for name, (chosen, left_out, allowed) in splits.items():
        # A query that is trained on must not have a right tool that is left out.
        chosen = [int(row) for row in np.sort(chosen) if all(allowed[tool] for tool in recall.examples[row].right)]
        lora = model.train(texts, chosen, allowed, seed, f"without some {name}")
        yield from rows_of(model, recall, np.sort(left_out), lora, strengths, name)


def on_public(model: Embedder, lora: dict, folder: Path, seed: int,
              strengths: Sequence[float] = STRENGTHS) -> Iterator[dict[str, object]]:
    """Rows of recall per strength and public set, over the functions of all sets."""
    public = public_queries(folder)
    for name, cases in public.cases.items():
        drawn = np.random.default_rng([seed, 3]).permutation(len(cases))[:PUBLIC_QUERIES]
        recall = Recall(model, public.tools, [cases[index] for index in np.sort(drawn)])
        yield from rows_of(model, recall, range(len(recall.cases)), lora, strengths, name)


def rows_of(model: Embedder, recall: Recall, which: Sequence[int], lora: dict, strengths: Sequence[float],
            name: str) -> Iterator[dict[str, object]]:
    """One row of recall per strength."""
    for strength in strengths:
        layers = merged(model.layers, lora, strength * model.scale)
        yield {"set": name, "strength": strength} | recall.row(layers, which)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the adapter to --out, or print rows of recall as JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m experiments.train_embedder", description="Train the adapter that "
                                     "tunes the embedder to tools, or tell what it finds that was left out of it.")
    parser.add_argument("--registry", type=Path, required=True, help="listing of the tools that the queries are about")
    parser.add_argument("--training", type=Path, default=TRAINING, help="queries, one JSON object per line")
    parser.add_argument("--base", type=Path, help="folder of all-MiniLM-L6-v2, fetched if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=Settings.epochs)
    parser.add_argument("--public", type=Path, metavar="FOLDER",
                        help="with --cross-validate: also train on all queries and ask public ones, kept in FOLDER")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, help="safetensors file to write")
    task.add_argument("--cross-validate", action="store_true", help="write no adapter")
    given = parser.parse_args(arguments)
    require_packages()
    settings = Settings(epochs=given.epochs)
    tools = load_registry(given.registry).tools
    cases = load_cases(given.training, tools)
    model = Embedder(given.base or base_folder(), settings)
    if given.cross_validate:
        for row in cross_validated(model, tools, cases, given.seed):
            print(json.dumps(row), flush=True)
    if given.out or given.public:
        lora = trained_on_all(model, tools, cases, given.seed)
    if given.cross_validate and given.public:
        for row in on_public(model, lora, given.public, given.seed):
            print(json.dumps(row), flush=True)
    if given.out:
        write_atomically(given.out, embedder_adapter(lora, settings, {
            "seed": str(given.seed), "base_sha256": file_sha256(model.folder / "model.safetensors"),
            "training_sha256": file_sha256(given.training), "registry_sha256": file_sha256(given.registry),
            "settings": json.dumps(asdict(settings)), "jax": jax.__version__}))


def trained_on_all(model: Embedder, tools: Sequence[Tool], cases: Sequence[RoutingCase], seed: int) -> dict:
    """LoRA trained on every query that some tool answers."""
    position = {tool.identity: index for index, tool in enumerate(tools)}
    examples = [Example(case.query, tuple(position[identity] for identity in (case.tool, *case.also)))
                for case in cases if case.tool]
    texts = TrainingTexts(model, tools, examples, seed)
    return model.train(texts, range(len(examples)), np.ones(len(tools), bool), seed)


if __name__ == "__main__":
    try:
        main()
    except (TrainError, RegistryError, WorkloadError, WeightsError, OSError) as error:
        sys.exit(str(error))

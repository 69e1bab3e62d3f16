"""From a query to a tool without the context: two retrievers, two fusions of them, a margin gate and a cross-encoder.

    dense     INT8 scan of embeddings (nexus/slb.py)
    lexical   BM25 (nexus/lexical.py)
    fused     reciprocal rank fusion of both (Cormack et al. 2009): Σ 1 / (60 + rank)
    linear    weighted sum of both scores (Bruch et al. 2023): cosine + w · BM25 / (largest BM25 of this query)

A system is a retriever, alone or with the gate. The gate looks at the margin between the first two candidates: above
τ the first is taken, otherwise the cross-encoder decides among the first few. Nothing here depends on how many tokens
a context holds.
"""
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from nexus.encoder import CrossEncoder, Encoder
from nexus.lexical import Lexical
from nexus.registry import Tool
from nexus.slb import Lookaside
from nexus.tool_document import document_text, lexical_text

# Rank constant of reciprocal rank fusion, as published.
RRF_K = 60
# How far down each list the fusion looks.
FUSED_DEPTH = 50
# In the embedder that was tuned on tool queries instead of the configured one.
TUNED = "-tuned"
GATED = ("slb+gate", "slb-tuned+gate", "hybrid+gate", "hybrid-tuned+gate", "linear-tuned+gate")
SYSTEMS = ("slb", "slb-tuned", "bm25", "hybrid", "hybrid-tuned", "linear", "linear-tuned", *GATED)


class RouteError(ValueError):
    """A router cannot be made or asked like this; the message names what and the remedy."""


@dataclass(frozen=True)
class Candidate:
    """One tool that a query may mean."""

    tool: Tool
    score: float
    """What the retriever orders by: cosine of INT8 codes, BM25, fused reciprocal ranks, or the weighted sum."""
    cross_score: float | None = None
    """The cross-encoder's logit, where the gate fired."""


@dataclass(frozen=True)
class Route:
    """The answer to one query."""

    candidates: list[Candidate]
    """Best first; empty where nothing matches."""
    retrieved: list[Tool]
    """The same tools in the retriever's order, before the gate."""
    margin: float | None
    """Score of the first minus score of the second, before the cross-encoder; None with fewer than two."""
    gate_fired: bool
    """Whether the cross-encoder was asked."""
    abstained: bool
    """Whether even the best tool is too far from the query to be meant."""
    best_cosine: float | None
    """Cosine of the nearest tool's embedding, what abstention goes by; None without a dense part."""
    scan_us: float | None
    """The INT8 scan with quantisation of the query and top-k, as Python sees it; None without a dense part."""
    total_ms: float
    """Everything, from text to ranked tools."""

    @property
    def tool(self) -> Tool | None:
        """The tool to call; None where none matches or the router abstained."""
        return self.candidates[0].tool if self.candidates and not self.abstained else None


class Retriever(Protocol):
    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        """At most `k` (index of a tool, score), best first, ties by lowest index."""


class Dense:
    """Embeddings of all tools in the INT8 buffer; remembers time and best score of the newest scan.

    Not to be shared by threads: encoders are not, either.
    """

    def __init__(self, encoder: Encoder, vectors: np.ndarray, *, isa: str | None = None):
        self.encoder, self.lookaside = encoder, Lookaside(vectors, isa=isa)
        self.last_scan_us: float | None = None
        self.last_best: float | None = None

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        vector = self.encoder.embed_query(query)
        begin = time.perf_counter_ns()
        found = self.lookaside.search(vector, k)
        self.last_scan_us = (time.perf_counter_ns() - begin) / 1e3
        self.last_best = found[0][1]
        return found


class Fused:
    """Reciprocal rank fusion of other retrievers."""

    def __init__(self, *parts: Retriever):
        self.parts = parts

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        scores: dict[int, float] = {}
        for part in self.parts:
            for rank, (index, _) in enumerate(part.search(query, max(k, FUSED_DEPTH)), start=1):
                scores[index] = scores.get(index, 0.0) + 1 / (RRF_K + rank)
        return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:k]


class Linear:
    """Cosine plus `weight` times BM25 relative to its largest for the query, among the FUSED_DEPTH nearest tools.

    Unlike ranks, the scores tell a clear lead from a close one, so that the weaker retriever seldom overrules the
    better one where that one is sure.
    """

    def __init__(self, dense: Dense, lexical: Lexical, weight: float):
        self.dense, self.lexical, self.weight = dense, lexical, weight

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        lexical = self.lexical.scores(query)
        largest = float(lexical.max(initial=0.0))
        factor = self.weight / largest if largest > 0 else 0.0
        found = [(index, score + factor * float(lexical[index]))
                 for index, score in self.dense.search(query, max(k, FUSED_DEPTH))]
        return sorted(found, key=lambda item: (-item[1], item[0]))[:k]


@dataclass(frozen=True)
class Gate:
    """When to ask the cross-encoder, and among how many."""

    tau: float
    """The first candidate is taken where its margin is above."""
    cross_encoder: CrossEncoder
    n_candidates: int = 3


class Router:
    """Routes queries to `tools` with one retriever and, if given, a gate."""

    def __init__(self, tools: Sequence[Tool], retriever: Retriever, dense: Dense | None = None,
                 gate: Gate | None = None, abstain_below: float | None = None):
        """`dense` is the dense part of `retriever`, if it has one; `abstain_below` is a cosine and needs one."""
        if not tools:
            raise RouteError("the registry has no tools; give at least one")
        if gate is not None and gate.n_candidates < 2:
            raise RouteError(f"n_candidates is {gate.n_candidates}; the cross-encoder decides among at least 2")
        if abstain_below is not None and dense is None:
            raise RouteError("abstain_below compares cosines; give the retriever a dense part")
        self.tools, self.retriever, self.dense, self.gate = list(tools), retriever, dense, gate
        self.abstain_below = abstain_below
        self._texts = [document_text(tool) for tool in tools]

    def route(self, query: str, top: int = 5) -> Route:
        """The `top` best tools for a query. Raises RouteError for a blank query."""
        if not query.strip():
            raise RouteError("the query is blank; say what the tool shall do")
        begin = time.perf_counter_ns()
        depth = max(top, 2, self.gate.n_candidates if self.gate else 0)
        found = self.retriever.search(query, depth)
        margin = found[0][1] - found[1][1] if len(found) > 1 else None
        fired = self.gate is not None and margin is not None and margin <= self.gate.tau
        candidates = [Candidate(self.tools[index], score) for index, score in found]
        if fired:
            candidates = self._reranked(query, found)
        scan_us, best = (self.dense.last_scan_us, self.dense.last_best) if self.dense else (None, None)
        abstained = self.abstain_below is not None and best < self.abstain_below
        retrieved = [self.tools[index] for index, _ in found[:top]]
        total_ms = (time.perf_counter_ns() - begin) / 1e6
        return Route(candidates[:top], retrieved, margin, fired, abstained, best, scan_us, total_ms)

    def _reranked(self, query: str, found: list[tuple[int, float]]) -> list[Candidate]:
        """The candidates, the first few in the cross-encoder's order; equal logits keep the retriever's order."""
        n = self.gate.n_candidates
        logits = self.gate.cross_encoder.score(query, [self._texts[index] for index, _ in found[:n]])
        first = [Candidate(self.tools[index], score, float(logit))
                 for (index, score), logit in zip(found[:n], logits, strict=True)]
        first.sort(key=lambda candidate: -candidate.cross_score)
        return first + [Candidate(self.tools[index], score) for index, score in found[n:]]


def retriever_of(system: str, tools: Sequence[Tool], dense: Dense | None, lexical_weight: float) -> Retriever:
    """The retriever of one of SYSTEMS over `tools`; the weight is that of BM25 in a weighted sum.

    Raises RouteError for an unknown name or a missing dense part.
    """
    name = system.removesuffix("+gate").removesuffix(TUNED)
    if system not in SYSTEMS:
        raise RouteError(f"system {system!r} is unknown; use one of {', '.join(SYSTEMS)}")
    if name == "bm25":
        return _lexical(tools)
    if dense is None:
        raise RouteError(f"system {system!r} needs the embeddings of the tools")
    if name == "slb":
        return dense
    return Linear(dense, _lexical(tools), lexical_weight) if name == "linear" else Fused(dense, _lexical(tools))


def _lexical(tools: Sequence[Tool]) -> Lexical:
    return Lexical([lexical_text(tool) for tool in tools])

"""Everything a configuration names for routing, opened once: encoders, embeddings, calibrated thresholds, routers."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from nexus import tables
from nexus.config import CONF, ROOT, Config
from nexus.embedder import ensure_cross_encoder, ensure_embedder, open_embedder
from nexus.embedder_spec import EmbedderSpec
from nexus.embedding_cache import EmbeddingCache
from nexus.encoder import CrossEncoder
from nexus.registry import Tool
from nexus.route import Dense, Gate, Router, retriever_of
from nexus.tool_document import description_text, document_text

# The ablation: descriptions are embedded without the tools' names.
NO_NAME = "slb-no-name"
# Length of a pair that the cross-encoder was trained with, in tokens.
PAIR_TOKENS = 128
# Routers that are kept: a registry in blocks of ten has some thirty.
KEPT = 64


@dataclass(frozen=True)
class Thresholds:
    """What `calibration.json` says about one system."""

    tau: float
    """Margin up to which the gate fires."""
    abstain_below: float
    """Cosine of the nearest tool below which no tool is said to fit."""


def thresholds_of(cfg: Config, out: Path) -> dict[str, Thresholds]:
    """By gated system, from `<out>/calibration.json`. Raises MissingArtifact, which names the command that makes it."""
    rows = tables.stored(cfg, out, "calibration")["rows"]
    taus = {row["system"]: row["threshold"] for row in tables.at(rows, kind="gate")}
    cosines = {row["system"]: row["threshold"] for row in tables.at(rows, kind="abstention") if row["chosen"]}
    return {system: Thresholds(tau, cosines[system]) for system, tau in taus.items()}


class RoutingSetup:
    """Encoders of one configuration, and routers over any tools. Raises WeightsError where weights are missing."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        embedder = ensure_embedder(cfg.embedder)
        self.hashes = {"embedder": embedder.sha256}
        self.encoder = open_embedder(cfg.embedder, cfg.routing.n_threads)
        self._cache = EmbeddingCache(self.encoder, embedder.sha256)
        self._routers = functools.lru_cache(maxsize=KEPT)(self._new_router)

    @functools.cached_property
    def cross_encoder(self) -> CrossEncoder:
        """Opened, and converted if need be, when a gate first needs it."""
        weights = ensure_cross_encoder(_base(), ROOT / self.cfg.routing.cross_encoder)
        self.hashes["cross_encoder"] = weights.sha256
        return CrossEncoder(weights.path, self.cfg.routing.n_threads, PAIR_TOKENS)

    def router(self, system: str, tools: Sequence[Tool], tau: float | None = None,
               abstain_below: float | None = None) -> Router:
        """The router of a system (`nexus.route.SYSTEMS` or NO_NAME); one with a gate needs `tau`."""
        return self._routers(system, tuple(tools), tau, abstain_below)

    def _new_router(self, system: str, tools: tuple[Tool, ...], tau: float | None,
                    abstain_below: float | None) -> Router:
        dense = None
        if system != "bm25":
            text = description_text if system == NO_NAME else document_text
            dense = Dense(self.encoder, self.vectors([text(tool) for tool in tools]))
        gate = None
        if system.endswith("+gate"):
            if tau is None:
                raise ValueError(f"system {system!r} needs a threshold; run the experiment calibration")
            gate = Gate(tau, self.cross_encoder, self.cfg.routing.n_candidates)
        retriever = retriever_of("slb" if system == NO_NAME else system, tools, dense)
        return Router(tools, retriever, dense, gate, abstain_below)

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """Embeddings of documents, float32[n, dim], from the cache where they are in it."""
        return self._cache.embed_documents(texts)

    @property
    def isa(self) -> str:
        """Instruction set of the scan."""
        from nexus.slb import available_isas

        return available_isas()[-1]


def _base() -> EmbedderSpec:
    """What the cross-encoder's adapter is merged into, whatever the embedder is."""
    values = OmegaConf.to_container(OmegaConf.load(CONF / "embedder" / "minilm.yaml"))
    return EmbedderSpec.model_validate(values, strict=True)

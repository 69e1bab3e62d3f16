"""Everything a configuration names for routing, opened once: encoders, embeddings, calibrated thresholds, routers."""
from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from pydantic import ValidationError

from nexus import tables
from nexus.config import CONF, ROOT, Config, ConfigError
from nexus.embedder import ensure_cross_encoder, ensure_embedder, open_embedder
from nexus.embedder_spec import EmbedderSpec
from nexus.embedding_cache import EmbeddingCache
from nexus.encoder import CrossEncoder
from nexus.registry import Tool
from nexus.route import TUNED, Dense, Gate, Router, retriever_of
from nexus.tool_document import description_text, document_text

# The ablation: descriptions are embedded without the tools' names.
NO_NAME = "slb-no-name"
# What the cross-encoder's adapter is merged into, whatever the embedder is.
BASE = "minilm"
# Longest pair that the cross-encoder reads, in tokens, as in its training; longer documents lose their end.
PAIR_TOKENS = 64
# Routers that are kept: a registry in blocks of ten has some thirty.
KEPT = 64


@dataclass(frozen=True)
class Thresholds:
    """What `calibration.json` says about one system."""

    tau: float | None
    """Margin up to which the gate fires; None for a system without one."""
    abstain_below: float
    """Cosine of the nearest tool below which no tool is said to fit."""


def thresholds_of(cfg: Config, out: Path) -> dict[str, Thresholds]:
    """By system, those with a gate and the same without it, from `<out>/calibration.json`.

    Raises MissingArtifact, which names the command that makes it.
    """
    calibration = tables.stored(cfg, out, "calibration")
    for section in ("registry", "embedder"):
        theirs, mine = calibration["config"][section]["name"], getattr(cfg, section).name
        if theirs != mine:
            print(f"thresholds are those of {section} {theirs}, not of {mine}; run the experiment calibration with "
                  f"your settings for your own", file=sys.stderr)
    rows = calibration["rows"]
    taus = {row["system"]: row["threshold"] for row in tables.at(rows, kind="gate")}
    cosines = {row["system"]: row["threshold"] for row in tables.at(rows, kind="abstention") if row["chosen"]}
    bare = {system.removesuffix("+gate"): Thresholds(None, cosine) for system, cosine in cosines.items()}
    return bare | {system: Thresholds(tau, cosines[system]) for system, tau in taus.items()}


class RoutingSetup:
    """Encoders of one configuration, and routers over any tools. Raises WeightsError where weights are missing."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.hashes: dict[str, str] = {}
        self._embedders = functools.cache(self._open)
        self._routers = functools.lru_cache(maxsize=KEPT)(self._new_router)

    def open_all(self) -> None:
        """Open every encoder now, so that `hashes` has all of them."""
        for tuned in (False, True):
            self._embedders(tuned)
        self.cross_encoder  # noqa: B018

    def _open(self, tuned: bool) -> EmbeddingCache:
        spec = embedder_spec(self.cfg.routing.tuned_embedder) if tuned else self.cfg.embedder
        weights = ensure_embedder(spec)
        self.hashes["tuned_embedder" if tuned else "embedder"] = weights.sha256
        return EmbeddingCache(open_embedder(spec, self.cfg.routing.n_threads), weights.sha256)

    @functools.cached_property
    def cross_encoder(self) -> CrossEncoder:
        """Opened, and converted if need be, when a gate first needs it."""
        weights = ensure_cross_encoder(embedder_spec(BASE), ROOT / self.cfg.routing.cross_encoder)
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
            embedder = self._embedders(TUNED in system)
            text = description_text if system == NO_NAME else document_text
            # Queries are embedded anew every time, as they come; only documents are looked up.
            dense = Dense(embedder.encoder, embedder.embed_documents([text(tool) for tool in tools]))
        gate = None
        if system.endswith("+gate"):
            if tau is None:
                raise ValueError(f"system {system!r} needs a threshold; run the experiment calibration")
            gate = Gate(tau, self.cross_encoder, self.cfg.routing.n_candidates)
        named = "slb" if system == NO_NAME else system
        retriever = retriever_of(named, tools, dense, self.cfg.routing.lexical_weight)
        return Router(tools, retriever, dense, gate, abstain_below)

    @property
    def isa(self) -> str:
        """Instruction set of the scan."""
        from nexus.slb import available_isas

        return available_isas()[-1]


def embedder_spec(name: str) -> EmbedderSpec:
    """What `conf/embedder/<name>.yaml` says. Raises ConfigError where there is no such file or it is not valid."""
    path = CONF / "embedder" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        raise ConfigError(f"routing.tuned_embedder: no file conf/embedder/{name}.yaml; there are {known}")
    try:
        return EmbedderSpec.model_validate(OmegaConf.to_container(OmegaConf.load(path)), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None

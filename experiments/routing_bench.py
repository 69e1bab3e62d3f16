"""What the routing experiments share: the registry, its queries, and what their cells depend on."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from nexus import provenance
from nexus.canonical import sha256_of
from nexus.config import ROOT, Config
from nexus.listing import load_listing
from nexus.pipeline import timed_cell_inputs
from nexus.routing_setup import RoutingSetup
from nexus.routing_workload import RoutingCase, load_cases
from nexus.weights import ensure


class RoutingBench(RoutingSetup):
    """Registry and routers of one run; `out` is the run's folder, which holds the collected listing."""

    def __init__(self, cfg: Config, out: Path):
        super().__init__(cfg)
        self.open_all()
        # Weights without a hash in the configuration are a user's own file.
        self.model_sha256 = cfg.model.sha256 or ensure(cfg.model).sha256
        registry = load_listing(cfg.registry, out / "registry.json")
        for problem in registry.problems:
            print(f"left out of the registry: entry {problem.index} ({problem.name}): {problem.reason}",
                  file=sys.stderr)
        self.tools = registry.tools

    def cases_of(self, path: str, known_only: bool = False) -> list[RoutingCase]:
        """The cases of a file of the workload; with `known_only`, those whose tools this registry has."""
        return load_cases(ROOT / path, self.tools, known_only)

    def inputs(self, name: str, **others: Any) -> dict[str, Any]:
        """What the cells of an experiment depend on, tools, encoders and `others` included."""
        return {**timed_cell_inputs(name, self.cfg, self.model_sha256), **self.hashes, "registry": self.registry_sha256,
                **others}

    @property
    def registry_sha256(self) -> str:
        return sha256_of([[tool.server, tool.name, tool.description, tool.input_schema] for tool in self.tools])

    def tuple(self) -> dict[str, Any]:
        """The artifact's `tuple`; the model takes part only where the experiment says so."""
        return {"model": self.cfg.model.name, "model_sha256": self.model_sha256, "embedder": self.cfg.embedder.name,
                "llama_cpp": f"llama-cpp-python {provenance.version('llama-cpp-python')}",
                "encoders_sha256": dict(self.hashes), "registry_sha256": self.registry_sha256}

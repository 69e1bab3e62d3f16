"""What the routing experiments share: the registry, its queries, and what their cells depend on."""
from __future__ import annotations

from pathlib import Path
from typing import Any

from nexus import provenance
from nexus.canonical import sha256_of
from nexus.config import ROOT, Config
from nexus.listing import load_listing
from nexus.pipeline import timed_cell_inputs
from nexus.routing_setup import RoutingSetup
from nexus.routing_workload import RoutingCase, load_cases


class RoutingBench(RoutingSetup):
    """Registry and routers of one run; `out` is the run's folder, which holds the collected listing."""

    def __init__(self, cfg: Config, out: Path):
        super().__init__(cfg)
        self.open_all()
        self.tools = load_listing(cfg.registry, out / "registry.json").tools

    def cases_of(self, path: str) -> list[RoutingCase]:
        """The cases of a file of the workload."""
        return load_cases(ROOT / path, self.tools)

    def inputs(self, name: str, **others: Any) -> dict[str, Any]:
        """What the cells of an experiment depend on, tools, encoders and `others` included."""
        registry = sha256_of([[tool.server, tool.name, tool.description, tool.input_schema] for tool in self.tools])
        return {**timed_cell_inputs(name, self.cfg, self.cfg.model.sha256), **self.hashes, "registry": registry,
                **others}

    def tuple(self) -> dict[str, Any]:
        """The artifact's `tuple`; the model takes part only where the experiment says so."""
        return {"model": self.cfg.model.name, "model_sha256": self.cfg.model.sha256, "embedder": self.cfg.embedder.name,
                "llama_cpp": f"llama-cpp-python {provenance.version('llama-cpp-python')}"}

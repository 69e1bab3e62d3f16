"""The registry that routing is measured on: what real MCP servers list, or a user's file, in one canonical form.

The listing is other people's text: it stays in DVC's cache and is never committed. A server that fails is reported and
does not lose the others; `metrics/registry.json` counts what is missing.
"""
from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from nexus.collect import collect
from nexus.config import ROOT, Config
from nexus.listing import write_listing
from nexus.pipeline import experiment_main, write_metrics
from nexus.registry import RegistryError, load_registry

NAME = "registry"


def run(cfg: Config, out: Path) -> Path:
    """Path of the listing, `<out>/registry.json`. Raises RegistryError where not one tool came."""
    spec = cfg.registry
    if spec.path is None:
        found = collect(spec)
        tools, failures = found.tools, [str(failure) for failure in found.failures]
    else:
        registry = load_registry(ROOT / Path(spec.path).expanduser())
        tools = registry.tools
        failures = [f"entry {p.index} ({p.name}): {p.reason}" for p in registry.problems]
    for failure in failures:
        print(f"{NAME}: left out: {failure}", file=sys.stderr)
    if not tools:
        raise RegistryError(f"registry {spec.name}: no tool was collected; mend what is reported above")
    path = out / f"{NAME}.json"
    write_listing(path, tools)
    servers = Counter(tool.server or "unnamed" for tool in tools)
    missing = [server.name for server in spec.servers if server.name not in servers]
    if missing:
        print(f"{NAME}: WITHOUT {', '.join(missing)}: queries for their tools will be refused; force=true collects "
              "again", file=sys.stderr)
    write_metrics(out, NAME, {"tools": len(tools), "left_out": len(failures), "missing_servers": len(missing),
                               "servers": dict(servers)})
    print(f"{NAME}: {len(tools)} tools of {len(servers)} servers; {len(failures)} entries left out")
    return path


if __name__ == "__main__":
    experiment_main(NAME, run)

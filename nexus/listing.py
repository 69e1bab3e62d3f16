"""The collected registry as a file: one canonical form, read back, and its seeded order."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nexus.canonical import plain, sha256_of, write_atomically
from nexus.registry import Registry, RegistryError, Tool, load_registry
from nexus.registry_spec import RegistrySpec

ROOT = Path(__file__).resolve().parents[1]
LISTINGS = ROOT / ".nexus" / "registry"


def write_listing(path: Path | str, tools: Sequence[Tool]) -> None:
    """None, after `path` holds the tools as a JSON list of {"server", "name", "description", "inputSchema"}.

    Equal tools give equal bytes: keys are sorted, except in `properties`, whose order a model sees and a signature
    keeps; tools and lists stay in the given order. Raises ValueError when there is no tool.
    """
    if not tools:
        raise ValueError(f"{path}: no tool was collected, so there is no registry to write; mend the servers' failures")
    entries = [{"server": tool.server, "name": tool.name, "description": tool.description,
                "inputSchema": in_order(plain(tool.input_schema, f"inputSchema of {tool.name}"))} for tool in tools]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(entries, ensure_ascii=False, allow_nan=False, indent=1) + "\n")


def listing_path(spec: RegistrySpec) -> Path:
    """Where the listing of `spec` is: the user's file, or else where a collection is kept by default."""
    return LISTINGS / f"{spec.name}.json" if spec.path is None else ROOT / Path(spec.path).expanduser()


def load_listing(spec: RegistrySpec, listing: Path | str | None = None) -> Registry:
    """The registry of `spec`, from its file or from what was collected into `listing`; identity is (server, name).

    Raises RegistryError, see `load_registry`, and when nothing was collected yet.
    """
    path = Path(listing) if listing is not None and spec.path is None else listing_path(spec)
    if spec.path is None and not path.is_file():
        raise RegistryError(f"{path}: registry {spec.name} is not collected yet; collect it with .venv/bin/python -m "
                            "experiments.registry, or give your own tools with registry=file registry.path=...")
    return load_registry(path)


def ordered(tools: Sequence[Tool], seed: int) -> list[Tool]:
    """All tools in one seeded order: those of the first one's server, then all others.

    Within each part the order is that of a hash of seed, server and name: a tool that comes or goes moves no other.
    """
    first = tools[0].server
    return sorted(tools, key=lambda tool: (tool.server != first, sha256_of([seed, tool.server, tool.name])))


def in_order(schema: Any, names: bool = False) -> Any:
    """The JSON value with sorted keys, but for keys that are names of properties (`names`): these keep their order."""
    match schema:
        case dict():
            keys = list(schema) if names else sorted(schema)
            # A property may itself be called "properties": its value is a schema again.
            return {key: in_order(schema[key], key == "properties" and not names) for key in keys}
        case list():
            return [in_order(item) for item in schema]
    return schema

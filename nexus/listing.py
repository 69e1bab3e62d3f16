"""The collected registry as a file: one canonical form, read back, and its seeded order and subsets."""
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

Identity = tuple[str | None, str]


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
        raise RegistryError(f"{path}: registry {spec.name} is not collected yet; collect it first, or give your own "
                            "tools with registry=file registry.path=...")
    return load_registry(path)


def subset(tools: Sequence[Tool], n: int | None, seed: int, required: Sequence[Identity] = ()) -> list[Tool]:
    """The first `n` tools of one seeded order (null: all): a smaller subset is a prefix of every larger one.

    First come the `required` ones, so that what is the right answer of a query can be found at every n; then the other
    tools of the first server in `tools`; then all others. Within each part the order is that of a hash of seed, server
    and name: a tool that comes or goes moves no other. Raises ValueError when n or required cannot be met.
    """
    known = {tool.identity for tool in tools}
    wanted = {(server, name) for server, name in required}
    if missing := sorted(wanted - known, key=repr):
        server, name = missing[0]
        raise ValueError(f"required: tool {name!r} of server {server!r} is not in the registry ({len(missing)} are "
                         "missing); remove it, or collect its server")
    n = len(tools) if n is None else n
    if not 1 <= n <= len(tools):
        raise ValueError(f"n: {n} tools of a registry of {len(tools)}; use 1 to {len(tools)}, or null for all")
    if n < len(wanted):
        raise ValueError(f"n: {n} tools cannot hold the {len(wanted)} required ones; use at least {len(wanted)}")
    first = tools[0].server

    def rank(tool: Tool) -> tuple[int, str]:
        part = 0 if tool.identity in wanted else 1 if tool.server == first else 2
        return part, sha256_of([seed, tool.server, tool.name])

    return sorted(tools, key=rank)[:n]


def in_order(schema: Any, names: bool = False) -> Any:
    """The JSON value with sorted keys; `names` says that the keys are the names of properties, which keep their order."""
    match schema:
        case dict():
            keys = list(schema) if names else sorted(schema)
            # A property may itself be called "properties": its value is a schema again.
            return {key: in_order(schema[key], key == "properties" and not names) for key in keys}
        case list():
            return [in_order(item) for item in schema]
    return schema

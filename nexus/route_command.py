"""`nexus route`: the tools that a query most likely means, with scores, as a table for people or as JSON."""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nexus.collect import collect
from nexus.config import ROOT, Config
from nexus.listing import listing_path, load_listing, write_listing
from nexus.registry import Tool, load_registry
from nexus.route import GATED, SYSTEMS, Route, RouteError, Router
from nexus.routing_setup import RoutingSetup, Thresholds, thresholds_of
from nexus.tables import MissingArtifact

if TYPE_CHECKING:
    from rich.text import Text

# Longest part of a description that a table line shows.
SHOWN = 60


def run(args: argparse.Namespace, cfg: Config) -> int:
    """0, after the answer is printed. Raises what loading raises: RegistryError, WeightsError, MissingArtifact."""
    begin = time.monotonic()
    check_query(args.query)
    out = ROOT / cfg.results_folder / cfg.run_name
    system = args.system or cfg.routing.system
    if system not in SYSTEMS:
        raise RouteError(f"--system {system} is unknown; use one of {', '.join(SYSTEMS)}")
    tools = configured_tools(args.registry, cfg, out)
    router = configured_router(system, tools, cfg, out)
    tau = router.gate and router.gate.tau
    # The first decode of a context allocates; a user's second query is what a server would see.
    router.route("warm up")
    if router.gate:
        router.gate.cross_encoder.score("warm up", ["warm up"])
    loading = time.monotonic() - begin
    route = router.route(args.query, args.top)
    print(_as_json(route, system) if args.json else _as_text(route, system, tau, tools, loading))
    return 0


def check_query(query: str) -> None:
    """Raises RouteError for a query that is blank or, as the command line gave it, is not UTF-8."""
    if not query.strip():
        raise RouteError("the query is blank; say what the tool shall do")
    try:
        query.encode()
    except UnicodeEncodeError as error:
        raise RouteError(f"the query is not UTF-8 at character {error.start + 1}; give it in UTF-8") from None


def configured_router(system: str, tools: Sequence[Tool], cfg: Config, out: Path) -> Router:
    """The router of a system over `tools`, with the thresholds that were calibrated into the folder `out`.

    Raises RouteError or MissingArtifact for a system with a gate that was not calibrated, WeightsError.
    """
    thresholds = _thresholds(cfg, out, system)
    if system in GATED and system not in thresholds:
        raise RouteError(f"{out / 'calibration.json'} has no threshold of {system}; make it again with "
                         ".venv/bin/python -m experiments.calibration")
    found = thresholds.get(system)
    return RoutingSetup(cfg).router(system, tools, found and found.tau, found and found.abstain_below)


def _thresholds(cfg: Config, out: Path, system: str) -> dict[str, Thresholds]:
    """What calibration says; a system without a gate works without, and then never abstains."""
    try:
        return thresholds_of(cfg, out) if system != "bm25" else {}
    except MissingArtifact:
        if system in GATED:
            raise
        return {}


def configured_tools(listing: Path | None, cfg: Config, out: Path) -> list[Tool]:
    """The tools of the user's file, or of the configured registry, which is collected into `out` if it never was."""
    if listing:
        registry = load_registry(listing)
        for problem in registry.problems:
            name = "no name" if problem.name is None else _printable(problem.name)
            print(f"nexus: left out entry {problem.index} ({name}): {problem.reason}", file=sys.stderr)
        return registry.tools
    path = out / "registry.json"
    if cfg.registry.path is None and not path.is_file():
        path = listing_path(cfg.registry)
        if not path.is_file():
            print("nexus: the registry is collected from its servers, once; about a minute", file=sys.stderr)
            found = collect(cfg.registry)
            for failure in found.failures:
                print(f"nexus: left out {failure}", file=sys.stderr)
            if not found.tools:
                raise RouteError(f"registry {cfg.registry.name}: no tool was collected; mend what is reported above")
            if any(failure.tool is None for failure in found.failures):
                print("nexus: a server is missing, so the listing is not kept and is collected anew next time",
                      file=sys.stderr)
                return found.tools
            write_listing(path, found.tools)
    return load_listing(cfg.registry, path).tools


def _as_json(route: Route, system: str) -> str:
    return json.dumps({
        "system": system, "margin": route.margin, "gate_fired": route.gate_fired, "abstained": route.abstained,
        "scan_us": route.scan_us, "total_ms": route.total_ms,
        "candidates": [{"server": c.tool.server, "name": c.tool.name, "score": c.score, "cross_score": c.cross_score}
                       for c in route.candidates]}, ensure_ascii=False, indent=1)


def _as_text(route: Route, system: str, tau: float | None, tools: list[Tool], loading: float) -> str:
    if not route.candidates:
        return f"no tool of {len(tools)} shares anything with the query"
    from rich.console import Console
    from rich.table import Column, Table

    # A name is never cut: it is what a reader looks for.
    table = Table("#", "server", Column("tool", overflow="fold"), "score",
                  *(["cross-encoder"] if route.gate_fired else []), "description")
    for i, c in enumerate(route.candidates, start=1):
        cross = "–" if c.cross_score is None else f"{c.cross_score:.2f}"
        text = " ".join(c.tool.description.split())
        # As Text: a string's brackets would be read as markup.
        table.add_row(*map(_cell, (str(i), c.tool.server or "–", c.tool.name, f"{c.score:.4f}",
                                  *([cross] if route.gate_fired else []),
                                  text[:SHOWN] + ("…" if len(text) > SHOWN else ""))))
    console = Console()
    with console.capture() as captured:
        console.print(table)
    margin = "none" if route.margin is None else f"{route.margin:.4f}"
    if tau is None:
        gate = "no gate"
    else:
        gate = f"τ {tau:.4f}, the gate {'fired' if route.gate_fired else 'did not fire'}"
    told = [f"{system} over {len(tools)} tools: margin {margin}, {gate}; {route.total_ms:.1f} ms"
            + (f", of which the scan {route.scan_us:.1f} µs" if route.scan_us is not None else "")
            + f" (loading: {loading:.1f} s)"]
    if route.abstained:
        told.append(f"Probably no tool fits: the nearest has a cosine of {route.best_cosine:.2f}.")
    return captured.get() + "\n".join(told)


def _cell(text: str) -> Text:
    from rich.text import Text

    return Text(_printable(text))


def _printable(text: str) -> str:
    """The text as it may stand in a terminal: a listing is other people's and may hold control characters."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)

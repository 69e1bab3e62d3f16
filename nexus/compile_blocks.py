"""`nexus compile`: writes one `.atb` block per tool of a registry file."""
from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from nexus.blocks import BlockError, BlockFile, compile_blocks, context_hash, write_block
from nexus.config import Config
from nexus.model_tuple import context_options, open_model
from nexus.progress import progress
from nexus.prompt import block_tokens, system_tokens
from nexus.registry import Tool, load_registry
from nexus.runtime import Runtime
from nexus.splice import SpliceRefused, memory_refusal


def block_file_name(tool: Tool) -> str:
    """A legal, unique file name for a tool: its name where that is plain, else made plain and told apart by a hash."""
    identity = tool.name if tool.server is None else f"{tool.server}/{tool.name}"
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", identity)[:80]
    # Capitals are told apart too, because macOS takes Read.atb and read.atb for one file.
    if plain.lower() != identity:
        # Of both parts: server "a" with tool "b/c" is not server "a/b" with tool "c".
        plain += "-" + hashlib.sha256(json.dumps(tool.identity).encode()).hexdigest()[:8]
    return plain + ".atb"


def compile_registry(runtime: Runtime, system: np.ndarray, tools: Sequence[Tool], folder: Path) -> tuple[int, int]:
    """(written, kept): blocks compiled right behind `system`; a valid block of the same tokens is kept.

    A tool's block is written as a whole or not at all; a stopped run goes on where it was.
    """
    tokens = [block_tokens(runtime.model, tool) for tool in tools]
    paths = [folder / block_file_name(tool) for tool in tools]
    missing = [i for i in range(len(tools)) if not _is_current(paths[i], tokens[i], system, runtime)]
    total = float(sum(len(ids) for ids in tokens))
    done = total - sum(len(tokens[i]) for i in missing)
    with progress("compiling blocks", total=total, unit="tokens", done=done) as bar:
        blocks = compile_blocks(runtime, system, [tokens[i] for i in missing])
        for i, block in zip(missing, blocks):
            facts = {"server": tools[i].server, "tool": tools[i].name}
            write_block(paths[i], replace(block, facts=facts), runtime)
            bar.advance(len(block.tokens))
    return len(missing), len(tools) - len(missing)


def _is_current(path: Path, tokens: np.ndarray, system: np.ndarray, runtime: Runtime) -> bool:
    if not path.exists():
        return False
    try:
        block = BlockFile(path)
        block.check(runtime)
    except BlockError:
        return False
    return (block.left_context_hash == context_hash(system) and block.anchor == len(system)
            and np.array_equal(block.tokens, tokens))


def run(args: argparse.Namespace, cfg: Config) -> int:
    """Compiles `args.registry` into `args.out` for the model of `cfg`; 1 when an entry of the registry is broken."""
    registry = load_registry(args.registry)
    model = open_model(cfg.model)
    with Runtime(model, context_options(cfg.runtime)) as runtime:
        if reason := memory_refusal(runtime):
            raise SpliceRefused(reason)
        written, kept = compile_registry(runtime, system_tokens(model, cfg.workload.system_prompt), registry.tools,
                                         Path(args.out))
    print(f"{written} blocks written, {kept} already there, in {args.out}")
    for problem in registry.problems:
        print(f"left out: entry {problem.index} ({problem.name or 'no name'}): {problem.reason}", file=sys.stderr)
    return 1 if registry.problems else 0

"""`nexus compile`: writes one `.atb` block per tool of a registry file."""
from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from nexus.blocks import Block, BlockError, BlockFile, compile_blocks, context_hash, write_block
from nexus.config import ROOT, Config
from nexus.ensemble import joint_hash, left_contexts, load_preambles, mean_block, parse_behind
from nexus.model_tuple import context_options, open_model
from nexus.progress import progress
from nexus.prompt import block_tokens, system_tokens
from nexus.registry import Tool, load_registry
from nexus.runtime import Runtime
from nexus.splice import SpliceRefused, memory_refusal

# Blocks of an ensemble whose members are held in memory at once; each group decodes the ensemble's texts again.
GROUP = 32


def block_file_name(tool: Tool) -> str:
    """A legal, unique file name for a tool: its name where that is plain, else made plain and told apart by a hash."""
    identity = tool.name if tool.server is None else f"{tool.server}/{tool.name}"
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", identity)[:80]
    # Capitals are told apart too, because macOS takes Read.atb and read.atb for one file.
    if plain.lower() != identity:
        # Of both parts: server "a" with tool "b/c" is not server "a/b" with tool "c".
        plain += "-" + hashlib.sha256(json.dumps(tool.identity).encode()).hexdigest()[:8]
    return plain + ".atb"


def compile_registry(runtime: Runtime, lefts: Sequence[np.ndarray], tools: Sequence[Tool], folder: Path,
                     behind: str = "system") -> tuple[int, int]:
    """(written, kept): each tool's block, the mean over those compiled right behind each of `lefts` (int32[n] each).

    A valid block of the same tokens, left contexts and facts is kept; the facts name server, tool and `behind`, what
    `lefts` are called in nexus/ensemble.py. A block is written as a whole or not at all; a stopped run goes on where it
    was.
    """
    tokens = [block_tokens(runtime.model, tool) for tool in tools]
    paths = [folder / block_file_name(tool) for tool in tools]
    facts = [{"server": tool.server, "tool": tool.name, "compiled_behind": behind} for tool in tools]
    missing = [i for i in range(len(tools)) if not _is_current(paths[i], tokens[i], lefts, facts[i], runtime)]
    total = float(sum(len(ids) for ids in tokens))
    done = total - sum(len(tokens[i]) for i in missing)
    with progress("compiling blocks", total=total, unit="tokens", done=done) as bar:
        blocks = _mean_blocks(runtime, lefts, [tokens[i] for i in missing])
        for i, block in zip(missing, blocks):
            write_block(paths[i], replace(block, facts=facts[i]), runtime)
            bar.advance(len(block.tokens))
    return len(missing), len(tools) - len(missing)


def _mean_blocks(runtime: Runtime, lefts: Sequence[np.ndarray],
                 token_lists: Sequence[np.ndarray]) -> Iterator[Block]:
    """Per list of token ids the mean over the blocks compiled behind each of `lefts`."""
    if len(lefts) == 1:
        yield from compile_blocks(runtime, lefts[0], token_lists)
        return
    for begin in range(0, len(token_lists), GROUP):
        members = [list(compile_blocks(runtime, left, token_lists[begin:begin + GROUP])) for left in lefts]
        yield from map(mean_block, zip(*members))


def _is_current(path: Path, tokens: np.ndarray, lefts: Sequence[np.ndarray], facts: dict, runtime: Runtime) -> bool:
    if not path.exists():
        return False
    try:
        block = BlockFile(path)
        block.check(runtime)
    except BlockError:
        return False
    return (block.left_context_hash == joint_hash([context_hash(left) for left in lefts])
            and block.anchor == len(lefts[0]) and block.facts == facts and np.array_equal(block.tokens, tokens))


def _make_writable(folder: Path) -> None:
    """None, after the folder is there and took a file. Raises BlockError: minutes of work would end with it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"probe")
    except OSError as error:
        raise BlockError(f"--out: {folder} cannot be written ({error.strerror}); make it writable or choose another "
                         "folder") from None


def run(args: argparse.Namespace, cfg: Config) -> int:
    """Compiles `args.registry` behind `args.behind` into `args.out` for the model of `cfg`.

    1 when an entry of the registry is broken. Raises BlockError for a name that `args.behind` cannot have.
    """
    # Before the weights are fetched.
    parse_behind(args.behind)
    preambles = load_preambles(ROOT / cfg.workload.preambles)
    registry = load_registry(args.registry)
    _make_writable(Path(args.out))
    model = open_model(cfg.model)
    with Runtime(model, context_options(cfg.runtime)) as runtime:
        if reason := memory_refusal(runtime):
            raise SpliceRefused(reason)
        lefts = left_contexts(model, system_tokens(model, cfg.workload.system_prompt), args.behind, preambles)
        written, kept = compile_registry(runtime, lefts, registry.tools, Path(args.out), args.behind)
    print(f"{written} blocks written, {kept} already there, in {args.out}")
    for problem in registry.problems:
        print(f"left out: entry {problem.index} ({problem.name or 'no name'}): {problem.reason}", file=sys.stderr)
    return 1 if registry.problems else 0

"""Blocks of the workload as `.atb` files: compiled when missing, else read from the block folder."""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nexus.blocks import BlockError, BlockFile, compile_blocks, context_hash, write_block
from nexus.config import ROOT
from nexus.ensemble import mean_block
from nexus.native import KERNELS
from nexus.progress import progress
from nexus.provenance import cpu_model, source_digest, version
from nexus.runtime import Runtime

BLOCK_FOLDER = ROOT / ".nexus" / "blocks"


def compiled_blocks(runtime: Runtime, lefts: Sequence[np.ndarray],
                    tokens: dict[str, np.ndarray]) -> dict[str, BlockFile]:
    """One validated block file per name, the mean of blocks compiled right behind each of `lefts`. Empties the runtime.

    A file's name states everything that its bits depend on, so a stale one is never read; a damaged one is compiled
    again.
    """
    options = runtime.options
    behind = "-".join(f"{context_hash(left):016x}"[: 16 if len(lefts) == 1 else 8] for left in lefts)
    folder = BLOCK_FOLDER / (f"{runtime.model.sha256[:12]}-{behind}-b{options.n_batch}"
                             f"-t{options.n_threads}-fa{int(options.flash_attention)}-{_maker()[:8]}")
    paths = {name: folder / f"{context_hash(ids):016x}.atb" for name, ids in tokens.items()}
    missing = [name for name in tokens if not _usable(paths[name], runtime)]
    if missing:
        lists = [tokens[name] for name in missing]
        total = sum(len(left) + sum(map(len, lists)) for left in lefts)
        with progress("compiling blocks", total=total, unit="tokens") as bar:
            members = []
            for left in lefts:
                members.append(list(compile_blocks(runtime, left, lists)))
                bar.advance(len(left) + sum(map(len, lists)))
        for name, *blocks in zip(missing, *members):
            write_block(paths[name], mean_block(blocks), runtime)
    runtime.clear()
    return {name: BlockFile(path) for name, path in paths.items()}


def _usable(path: Path, runtime: Runtime) -> bool:
    try:
        BlockFile(path).check(runtime)
        return True
    except BlockError:
        return False


def _maker() -> str:
    """SHA-256 (64 hex digits) of what computes and writes the blocks: code, kernels, llama.cpp's build and the CPU."""
    code = [*(ROOT / "nexus" / name for name in ("blocks.py", "ensemble.py", "runtime.py")), *KERNELS.glob("*.hpp")]
    parts = (source_digest(code), version("llama-cpp-python"), cpu_model())
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()

"""Blocks of the workload as `.atb` files: compiled when missing, else read from the block folder."""
from __future__ import annotations

from pathlib import Path

import numpy as np

from nexus.blocks import BlockError, BlockFile, compile_blocks, context_hash, write_block
from nexus.config import ROOT
from nexus.provenance import source_digest
from nexus.runtime import Runtime

BLOCK_FOLDER = ROOT / ".nexus" / "blocks"


def compiled_blocks(runtime: Runtime, left: np.ndarray, tokens: dict[str, np.ndarray]) -> dict[str, BlockFile]:
    """One validated block file per name, compiled right behind `left`. Empties the runtime.

    A file's name states everything that its bits depend on, so a stale one is never read; a damaged one is compiled
    again.
    """
    options = runtime.options
    folder = BLOCK_FOLDER / (f"{runtime.model.sha256[:12]}-{context_hash(left):016x}-b{options.n_batch}"
                             f"-t{options.n_threads}-fa{int(options.flash_attention)}-{_code()[:8]}")
    paths = {name: folder / f"{context_hash(ids):016x}.atb" for name, ids in tokens.items()}
    missing = [name for name in tokens if not _usable(paths[name], runtime)]
    for name, block in zip(missing, compile_blocks(runtime, left, [tokens[name] for name in missing])):
        write_block(paths[name], block, runtime)
    runtime.clear()
    return {name: BlockFile(path) for name, path in paths.items()}


def _usable(path: Path, runtime: Runtime) -> bool:
    try:
        BlockFile(path).check(runtime)
        return True
    except BlockError:
        return False


def _code() -> str:
    return source_digest([ROOT / "nexus" / "blocks.py", ROOT / "nexus" / "runtime.py"])

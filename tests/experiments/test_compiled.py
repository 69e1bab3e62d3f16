"""Block files of the workload on SmolLM2: compiled once, under a name that states what their bits depend on."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from experiments import compiled
from experiments.compiled import compiled_blocks
from nexus.blocks import compile_blocks, write_block
from nexus.ensemble import mean_block
from nexus.runtime import ContextOptions, Runtime

pytestmark = pytest.mark.integration
OPTIONS = ContextOptions(n_ctx=256, n_batch=64, n_seq_max=4, n_threads=1)
ONE, TWO, FIRST, SECOND = (np.random.default_rng(seed).integers(100, 20000, n).astype(np.int32)
                           for seed, n in enumerate((12, 12, 7, 9)))
TOKENS = {"first": FIRST, "second": SECOND}


@pytest.fixture(scope="module")
def runtime(smollm2):
    with Runtime(smollm2, OPTIONS) as runtime:
        yield runtime


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "BLOCK_FOLDER", tmp_path / "blocks")
    return tmp_path / "blocks"


@pytest.mark.parametrize("lefts", [[ONE], [ONE, TWO]])
def test_files_hold_the_mean_of_blocks_behind_each_left_context(runtime, tmp_path, lefts):
    files = compiled_blocks(runtime, lefts, TOKENS)
    assert list(files) == list(TOKENS)
    members = [list(compile_blocks(runtime, left, list(TOKENS.values()))) for left in lefts]
    for (name, file), *blocks in zip(files.items(), *members):
        write_block(tmp_path / "expected.atb", mean_block(blocks), runtime)
        assert file.path.read_bytes() == (tmp_path / "expected.atb").read_bytes()
        assert file.tokens.tolist() == TOKENS[name].tolist() and file.anchor == len(ONE)


def test_only_what_is_missing_is_compiled_and_the_runtime_is_empty_afterwards(runtime, monkeypatch):
    asked = []

    def counted(runtime, left, lists):
        asked.extend(len(tokens) for tokens in lists)
        return compile_blocks(runtime, left, lists)

    monkeypatch.setattr(compiled, "compile_blocks", counted)
    for tokens, expected in (({"first": FIRST}, [7]), (TOKENS, [7, 9]), (TOKENS, [7, 9])):
        runtime.decode(ONE, 0, 2)
        compiled_blocks(runtime, [ONE], tokens)
        assert asked == expected
        assert all(runtime.pos_max(seq) < 0 for seq in range(OPTIONS.n_seq_max))


def test_a_name_is_of_the_tokens_and_not_of_the_tool(runtime):
    files = compiled_blocks(runtime, [ONE], {"a": FIRST, "b": SECOND})
    again = compiled_blocks(runtime, [ONE], {"b": FIRST})
    assert again["b"].path == files["a"].path != files["b"].path


def test_what_bits_depend_on_has_a_folder_of_its_own(runtime, smollm2, folder, monkeypatch):
    for lefts in ([ONE], [TWO], [ONE, TWO], [TWO, ONE]):
        compiled_blocks(runtime, lefts, {"first": FIRST})
    for change in ({"n_batch": 32}, {"flash_attention": False}, {"n_threads": 2}):
        with Runtime(smollm2, dataclasses.replace(OPTIONS, **change)) as other:
            compiled_blocks(other, [ONE], {"first": FIRST})
    for name in ("source_digest", "version", "cpu_model"):
        with monkeypatch.context() as patch:
            patch.setattr(compiled, name, lambda *_: "another")
            compiled_blocks(runtime, [ONE], {"first": FIRST})
    assert len(list(folder.iterdir())) == 10
    assert all(len(list(each.iterdir())) == 1 for each in folder.iterdir())


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_file_is_compiled_again_to_the_same_bytes(runtime, damage):
    path = compiled_blocks(runtime, [ONE, TWO], {"first": FIRST})["first"].path
    good = path.read_bytes()
    flipped = good[:8] + bytes([good[8] ^ 0xFF]) + good[9:]
    path.write_bytes({"cut": good[:-1], "flip": flipped, "empty": b""}[damage])
    assert compiled_blocks(runtime, [ONE, TWO], {"first": FIRST})["first"].path.read_bytes() == good


def test_the_kernels_and_the_code_are_part_of_a_name(monkeypatch):
    read = []
    monkeypatch.setattr(compiled, "source_digest", lambda paths: read.extend(path.name for path in paths))
    compiled._maker()
    assert {"blocks.py", "ensemble.py", "runtime.py", "tool_block.hpp", "kv_state.hpp", "llama_session.hpp"} <= set(read)

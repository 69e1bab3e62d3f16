"""Tool blocks: what they contain does not depend on how they came about, and what cannot be one is refused."""
from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexus.blocks import BlockError, BlockFile, block_split, compile_blocks, context_hash, read_block, write_block
from nexus.runtime import ContextOptions, Runtime, RuntimeFailure

LEFT = np.random.default_rng(1).integers(100, 20000, 20).astype(np.int32)
ONE = np.random.default_rng(2).integers(100, 20000, 100).astype(np.int32)
TWO = np.random.default_rng(3).integers(100, 20000, 7).astype(np.int32)
# A block of more than one batch, so that another split of it gives other bits.
OPTIONS = ContextOptions(n_ctx=256, n_batch=64, n_seq_max=4)


@pytest.fixture(scope="module")
def runtime(smollm2):
    with Runtime(smollm2, OPTIONS) as runtime:
        yield runtime


def equal(a, b) -> bool:
    """Whether two blocks hold the same tokens, place and bits."""
    return (a.anchor == b.anchor and a.left_context_hash == b.left_context_hash and np.array_equal(a.tokens, b.tokens)
            and all(np.array_equal(x.view(np.uint16), y.view(np.uint16)) for x, y in ((a.k, b.k), (a.v, b.v))))


@given(st.integers(1, 5000))
def test_the_last_token_is_decoded_alone(n_tokens):
    split = block_split(n_tokens)
    assert sum(split) == n_tokens and split[-1] == 1 and all(size > 0 for size in split) and len(split) <= 2


def test_context_hash_is_of_the_ids_as_little_endian_int32():
    ids = [1, 2, 70000]
    expected = hashlib.sha256(bytes([1, 0, 0, 0, 2, 0, 0, 0, 0x70, 0x11, 1, 0])).digest()[:8]
    for array in (np.array(ids, np.int32), np.array(ids, np.int64), np.array([1, 0, 2, 0, 70000])[::2]):
        assert context_hash(array) == int.from_bytes(expected, "little")


@given(st.lists(st.integers(0, 10**6), max_size=8), st.lists(st.integers(0, 10**6), max_size=8))
def test_other_contexts_have_other_hashes(a, b):
    assert (context_hash(np.array(a)) == context_hash(np.array(b))) == (a == b)


@pytest.mark.integration
def test_a_block_does_not_depend_on_the_others_compiled_with_it(runtime):
    alone = [next(iter(compile_blocks(runtime, LEFT, [tokens]))) for tokens in (ONE, TWO)]
    forth, back = list(compile_blocks(runtime, LEFT, [ONE, TWO])), list(compile_blocks(runtime, LEFT, [TWO, ONE]))
    for i, block in enumerate(alone):
        assert equal(block, forth[i]) and equal(block, back[1 - i])
    assert (alone[0].anchor, alone[0].left_context_hash) == (len(LEFT), context_hash(LEFT))
    model = runtime.model
    assert alone[0].k.shape == (model.n_layer, len(ONE), model.n_head_kv * model.head_dim_k)


@pytest.mark.integration
def test_what_the_runtime_held_before_does_not_matter_and_other_contexts_do(runtime):
    expected = next(iter(compile_blocks(runtime, LEFT, [ONE])))
    runtime.clear()
    runtime.decode(TWO, 0, 2)
    assert equal(expected, next(iter(compile_blocks(runtime, LEFT, [ONE]))))
    other = next(iter(compile_blocks(runtime, LEFT[::-1].copy(), [ONE])))
    assert not equal(expected, other) and not np.array_equal(expected.v, other.v)


@pytest.mark.integration
def test_without_left_context_a_block_begins_at_0_and_equals_the_engines_state(runtime):
    block = next(iter(compile_blocks(runtime, LEFT[:0], [ONE])))
    assert (block.anchor, block.left_context_hash) == (0, context_hash(LEFT[:0]))
    runtime.clear()
    runtime.decode(ONE, 0, 0, split=block_split(len(ONE)))
    k, v = np.empty_like(block.k), np.empty_like(block.v)
    assert list(read_block(runtime.state_get(0), k, v)) == list(range(len(ONE)))
    np.testing.assert_array_equal(k.view(np.uint16), block.k.view(np.uint16))
    np.testing.assert_array_equal(v.view(np.uint16), block.v.view(np.uint16))


@pytest.mark.integration
def test_a_block_without_tokens_is_refused(runtime):
    with pytest.raises(BlockError, match="at least one token"):
        list(compile_blocks(runtime, LEFT, [TWO, ONE[:0]]))


@pytest.mark.integration
def test_compiling_needs_three_sequences(smollm2):
    with Runtime(smollm2, dataclasses.replace(OPTIONS, n_seq_max=2)) as small:
        with pytest.raises(BlockError, match="n_seq_max is 2.*at least 3"):
            list(compile_blocks(small, LEFT, [ONE]))


@pytest.mark.integration
def test_a_block_that_does_not_fit_is_an_error_and_leaves_only_the_context(runtime):
    blocks = compile_blocks(runtime, LEFT, [TWO, np.resize(ONE, OPTIONS.n_ctx)])
    next(blocks)
    with pytest.raises(RuntimeFailure, match="no room"):
        next(blocks)
    assert [runtime.pos_max(seq) for seq in range(OPTIONS.n_seq_max)] == [len(LEFT) - 1, -1, -1, -1]


@pytest.mark.integration
@pytest.mark.parametrize("change", ["cells", "layers", "width"])
def test_a_state_of_another_shape_is_not_read(runtime, change):
    runtime.clear()
    runtime.decode(ONE, 0, 0)
    blob = runtime.state_get(0)
    model = runtime.model
    shape = [model.n_layer, len(ONE), model.n_head_kv * model.head_dim_k]
    shape[("layers", "cells", "width").index(change)] -= 1
    k, v = np.zeros(shape, np.float16), np.zeros(shape, np.float16)
    with pytest.raises(BlockError, match="kv state|bytes"):
        read_block(blob, k, v)
    assert not k.any() and not v.any(), "nothing is written where something does not fit"


@pytest.mark.integration
def test_a_file_gives_back_facts_in_any_script_and_names_itself_when_refused(runtime, tmp_path):
    block = next(iter(compile_blocks(runtime, LEFT, [TWO])))
    facts = {"server": None, "tool": "工具 🛠️ \"quoted\"\n", "n": [1, 2.5]}
    path = tmp_path / "new" / "folder" / "tool.atb"
    write_block(path, dataclasses.replace(block, facts=facts), runtime)
    file = BlockFile(path)
    assert file.facts == facts
    file.check(runtime)
    assert file.header.n_layers == runtime.model.n_layer
    assert bytes(file.header.model_fingerprint) == bytes.fromhex(runtime.model.sha256)[:16]
    for name, content in (("missing.atb", None), ("short.atb", b"NEXUSATB"), ("other.atb", b"x" * 5000)):
        target = tmp_path / name
        if content is not None:
            target.write_bytes(content)
        with pytest.raises(BlockError, match=name):
            BlockFile(target)


@pytest.mark.integration
def test_a_folder_that_cannot_be_written_is_an_error_naming_the_file(runtime, tmp_path):
    block = next(iter(compile_blocks(runtime, LEFT, [TWO])))
    (tmp_path / "tool.atb").mkdir()
    with pytest.raises(BlockError, match="tool.atb"):
        write_block(tmp_path / "tool.atb", block, runtime)
    assert [path.name for path in tmp_path.iterdir()] == ["tool.atb"]

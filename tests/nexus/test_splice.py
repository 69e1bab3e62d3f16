"""Correctness invariants of splicing on a real model (SmolLM2-135M), with both V layouts."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nexus.blocks import Block, BlockError, BlockFile, block_split, compile_blocks, context_hash, read_block, write_block
from nexus.fidelity import divergence
from nexus.runtime import ContextOptions, Runtime, RuntimeFailure
from nexus.splice import SpliceRefused, Splicer, choose_isa, memory_refusal, pair_ulps, place_or_prefill

pytestmark = pytest.mark.integration
OPTIONS = ContextOptions(n_ctx=1536, n_seq_max=6)
CONTEXT, WORK, OTHER = 0, 1, 2


def text_tokens(model, seed: int, n: int) -> np.ndarray:
    """Tokens of ordinary ids; what they say does not matter to exactness."""
    return np.random.default_rng(seed).integers(100, 20000, n).astype(np.int32)


@pytest.fixture(scope="module", params=["row", "transposed"])
def bench(request, smollm2):
    """(runtime, splicer, left tokens, block) with the block compiled right behind `left`."""
    runtime = Runtime(smollm2, dataclasses.replace(OPTIONS, flash_attention=request.param == "row"))
    splicer = Splicer(runtime)
    assert splicer.v_trans == (request.param == "transposed")
    left, tokens = text_tokens(smollm2, 1, 37), text_tokens(smollm2, 2, 61)
    block = next(iter(compile_blocks(runtime, left, [tokens])))
    yield runtime, splicer, left, block
    runtime.close()


@pytest.fixture
def fresh(bench):
    """The bench with only the left context in its cache."""
    runtime, _, left, _ = bench
    runtime.clear()
    runtime.decode(left, 0, CONTEXT)
    yield bench
    runtime.clear()


def keys_of(runtime, seq: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """(keys, values) of positions begin … end−1 as float16[n_layers, n, width]."""
    model, n = runtime.model, end - begin
    runtime.seq_cp(seq, runtime.scratch_seq, begin, end)
    try:
        blob = runtime.state_get(runtime.scratch_seq)
    finally:
        runtime.seq_rm(runtime.scratch_seq)
    k = np.empty((model.n_layer, n, model.n_head_kv * model.head_dim_k), dtype=np.float16)
    v = np.empty((model.n_layer, n, model.n_head_kv * model.head_dim_v), dtype=np.float16)
    positions = read_block(blob, k, v)
    assert sorted(positions) == list(range(begin, end)), "one cell per position"
    order = np.argsort(positions)
    return k[:, order], v[:, order]


def test_at_the_anchor_logits_are_bit_identical(fresh):
    runtime, splicer, left, block = fresh
    query = text_tokens(runtime.model, 3, 9)
    runtime.seq_cp(CONTEXT, WORK)
    runtime.decode(block.tokens, len(left), WORK, split=block_split(len(block.tokens)))
    expected = runtime.decode(query, len(left) + len(block.tokens), WORK, logits=True)
    runtime.seq_rm(WORK)
    runtime.seq_cp(CONTEXT, WORK)
    splicer.place(splicer.hold(block), len(left), WORK)
    measured = runtime.decode(query, len(left) + len(block.tokens), WORK, logits=True)
    assert divergence(expected, measured).bit_identical


def test_moved_without_reanchoring_is_not_faithful(fresh):
    runtime, splicer, left, block = fresh
    query, end = text_tokens(runtime.model, 3, 9), len(left) + 300
    runtime.decode(text_tokens(runtime.model, 4, 300), len(left), CONTEXT)
    logits = {}
    for reanchor in (True, False, None):
        runtime.seq_cp(CONTEXT, WORK)
        if reanchor is None:
            runtime.decode(block.tokens, end, WORK, split=block_split(len(block.tokens)))
        else:
            splicer.place(splicer.hold(block), end, WORK, reanchor=reanchor)
        logits[reanchor] = runtime.decode(query, end + len(block.tokens), WORK, logits=True)
        runtime.seq_rm(WORK)
    assert divergence(logits[None], logits[True]).kl_nats < divergence(logits[None], logits[False]).kl_nats


@pytest.mark.parametrize("offset", [1, 16, 300, 1000])
def test_keys_equal_the_engines_own_shift_on_every_layer_and_values_are_untouched(fresh, offset):
    runtime, splicer, left, block = fresh
    n, start = len(block.tokens), len(left)
    resident = splicer.hold(block)
    splicer.place(resident, start, WORK)
    runtime.seq_add(WORK, start, start + n, offset)
    runtime.decode(text_tokens(runtime.model, 5, 1), start + n + offset, WORK)
    engine_k, engine_v = keys_of(runtime, WORK, start + offset, start + n + offset)
    runtime.seq_rm(WORK)
    splicer.place(resident, start + offset, OTHER)
    ours_k, ours_v = keys_of(runtime, OTHER, start + offset, start + n + offset)
    model = runtime.model
    assert pair_ulps(engine_k, ours_k, runtime.rope, model.n_head_kv, model.head_dim_k).max() <= 1
    np.testing.assert_array_equal(ours_v.view(np.uint16), block.v.view(np.uint16))
    np.testing.assert_array_equal(ours_v.view(np.uint16), engine_v.view(np.uint16))


def test_layer_0_keys_equal_a_fresh_prefills(fresh):
    runtime, splicer, left, block = fresh
    n, position = len(block.tokens), 500
    runtime.decode(text_tokens(runtime.model, 6, position - len(left)), len(left), CONTEXT)
    runtime.seq_cp(CONTEXT, WORK)
    runtime.decode(block.tokens, position, WORK, split=block_split(n))
    fresh_k, fresh_v = keys_of(runtime, WORK, position, position + n)
    runtime.seq_rm(WORK)
    splicer.place(splicer.hold(block), position, OTHER)
    ours_k, ours_v = keys_of(runtime, OTHER, position, position + n)
    model = runtime.model
    ulps = pair_ulps(fresh_k, ours_k, runtime.rope, model.n_head_kv, model.head_dim_k)
    assert ulps[0].max() <= 1
    assert ulps[1:].max() > 1, "deeper layers saw another context: equal keys there would mean that the test compares nothing"
    np.testing.assert_array_equal(fresh_v[0].view(np.uint16), ours_v[0].view(np.uint16))


def test_splicing_twice_leaves_one_cell_per_position_and_others_alone(fresh):
    runtime, splicer, left, block = fresh
    n = len(block.tokens)
    runtime.seq_cp(CONTEXT, OTHER)
    runtime.decode(text_tokens(runtime.model, 7, 20), len(left), OTHER)
    before = runtime.state_get(OTHER)
    resident = splicer.hold(block)
    runtime.seq_cp(CONTEXT, WORK)
    for position in (len(left), len(left), len(left) + n, len(left) + n // 2):
        splicer.place(resident, position, WORK)
    keys_of(runtime, WORK, 0, runtime.pos_max(WORK) + 1)
    np.testing.assert_array_equal(before, runtime.state_get(OTHER))


def test_moves_do_not_add_up_errors(fresh):
    runtime, splicer, left, block = fresh
    resident = splicer.hold(block)
    splicer.place(resident, 900, WORK)
    once = runtime.state_get(WORK)
    runtime.seq_rm(WORK)
    for position in np.random.default_rng(0).integers(0, 1000, 50):
        resident.native.reanchor(int(position), True)
    splicer.place(resident, 900, WORK)
    np.testing.assert_array_equal(once, runtime.state_get(WORK))


def test_shifting_twice_equals_shifting_once(fresh):
    runtime, splicer, left, block = fresh
    resident, states = splicer.hold(block), []
    for steps in ((8, 5), (13,)):
        splicer.place(resident, len(left), WORK)
        for step in steps:
            runtime.seq_add(WORK, 0, -1, step)
        runtime.decode(block.tokens[:1], runtime.pos_max(WORK) + 1, WORK)
        states.append(runtime.state_get(WORK))
        runtime.seq_rm(WORK)
    np.testing.assert_array_equal(*states)


def test_state_with_a_pending_shift_is_not_read(fresh):
    runtime, splicer, left, block = fresh
    runtime.seq_add(CONTEXT, 0, -1, 3)
    with pytest.raises(RuntimeFailure, match="pending"):
        runtime.state_get(CONTEXT)


def test_refusals_change_nothing(fresh):
    runtime, splicer, left, block = fresh
    resident = splicer.hold(block)
    before = runtime.state_get(CONTEXT)
    for position, seq, message in ((len(left) + 5, CONTEXT, "gap"), (-1, CONTEXT, "gap"),
                                   (0, runtime.scratch_seq, "reserved")):
        with pytest.raises(SpliceRefused, match=message):
            splicer.place(resident, position, seq)
    for seq in (-1, OPTIONS.n_seq_max):
        with pytest.raises(RuntimeFailure, match=f"sequence {seq} does not exist"):
            splicer.place(resident, 0, seq)
    np.testing.assert_array_equal(before, runtime.state_get(CONTEXT))


@pytest.mark.parametrize("field, change, message", [
    ("k", lambda k: k.astype(np.float32), "k is float32; convert it to float16"),
    ("v", lambda v: v.astype(np.float32), "v is float32"),
    ("k", lambda k: k[:, :-1], r"k has shape .*30, 60, 192"), ("v", lambda v: v[:-1], "v has shape"),
    ("v", lambda v: v[..., :-2], "v has shape"), ("k", lambda k: np.asfortranarray(k), "k has strides"),
    ("v", lambda v: v[..., ::-1], "v has strides"), ("tokens", lambda ids: ids[:-1], "k has shape"),
    ("tokens", lambda ids: ids.reshape(1, -1), "tokens are int32"), ("tokens", lambda ids: ids[:0], "tokens are"),
    ("tokens", lambda ids: ids.astype(np.float64), "tokens are float64"),
    ("tokens", lambda ids: -ids, "give ids of this model"), ("anchor", lambda anchor: -1, "anchor is -1"),
])
def test_a_block_whose_arrays_would_be_misread_is_refused(bench, tmp_path, field, change, message):
    runtime, splicer, _, block = bench
    bad = dataclasses.replace(block, **{field: change(getattr(block, field))})
    for use in (splicer.hold, lambda block: write_block(tmp_path / "tool.atb", block, runtime)):
        with pytest.raises(BlockError, match=message):
            use(bad)
    assert not list(tmp_path.iterdir())


def test_a_full_cache_refuses_and_the_text_can_still_be_refused_too(fresh):
    runtime, splicer, left, block = fresh
    resident = splicer.hold(block)
    free = OPTIONS.n_ctx - len(left)
    runtime.decode(text_tokens(runtime.model, 8, free - 10), 0, OTHER)
    before = runtime.state_get(CONTEXT)
    with pytest.raises(SpliceRefused, match="no room"):
        splicer.place(resident, len(left), CONTEXT)
    np.testing.assert_array_equal(before, runtime.state_get(CONTEXT))
    with pytest.raises(RuntimeFailure, match="no room"):
        runtime.decode(block.tokens, len(left), CONTEXT)
    np.testing.assert_array_equal(before, runtime.state_get(CONTEXT))


def test_falls_back_to_text_with_the_reason(fresh):
    runtime, splicer, left, block = fresh
    resident = splicer.hold(block)
    runtime.seq_cp(CONTEXT, WORK)
    assert place_or_prefill(runtime, splicer, resident, block.tokens, len(left), WORK).path == "splice"
    runtime.seq_rm(WORK)
    runtime.seq_cp(CONTEXT, WORK)
    placement = place_or_prefill(runtime, None, None, block.tokens, len(left), WORK, reason="remote model")
    assert (placement.path, placement.reason) == ("prefill", "remote model")
    keys_of(runtime, WORK, 0, len(left) + len(block.tokens))


def test_block_file_round_trip_and_refusals(fresh, tmp_path):
    runtime, splicer, left, block = fresh
    path = tmp_path / "tool.atb"
    write_block(path, dataclasses.replace(block, facts={"tool": "größe"}), runtime)
    file = BlockFile(path)
    assert (file.anchor, file.n_tokens, file.facts) == (len(left), len(block.tokens), {"tool": "größe"})
    assert file.left_context_hash == context_hash(left)
    np.testing.assert_array_equal(file.tokens, block.tokens)
    for source in (file, block):
        splicer.place(splicer.hold(source), 200, WORK)
        k, v = keys_of(runtime, WORK, 200, 200 + file.n_tokens)
        runtime.seq_rm(WORK)
        if source is file:
            expected = k, v
    np.testing.assert_array_equal(expected[0].view(np.uint16), k.view(np.uint16))
    np.testing.assert_array_equal(expected[1].view(np.uint16), v.view(np.uint16))

    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(BlockError, match="checksum"):
        BlockFile(path)


def test_block_of_another_scaling_or_model_is_refused(smollm2, bench, tmp_path):
    _, _, left, block = bench
    scaled_options = dataclasses.replace(OPTIONS, rope_freq_scale=0.5)
    with Runtime(smollm2, scaled_options) as scaled:
        splicer = Splicer(scaled)
        write_block(tmp_path / "plain.atb", block, bench[0])
        with pytest.raises(BlockError, match="rope_(freq_scale|scaling_type)"):
            splicer.hold(BlockFile(tmp_path / "plain.atb"))
        k = np.ascontiguousarray(block.k)
        assert Block(block.tokens, block.anchor, 0, k, block.v).k is k
    other = dataclasses.replace(block)
    sha256, smollm2.sha256 = smollm2.sha256, "0" * 64
    try:
        write_block(tmp_path / "other.atb", other, bench[0])
    finally:
        smollm2.sha256 = sha256
    with pytest.raises(BlockError, match="model_fingerprint"):
        BlockFile(tmp_path / "other.atb").check(bench[0])


@pytest.mark.parametrize("change, reason", [
    ({"kv_type_k": "q8_0"}, "KV type"),
    ({"kv_unified": False}, "kv_unified"),
])
def test_contexts_that_cannot_be_spliced_are_refused_up_front(smollm2, change, reason):
    with Runtime(smollm2, dataclasses.replace(OPTIONS, n_ctx=256, **change)) as runtime:
        assert reason in memory_refusal(runtime)
        with pytest.raises(SpliceRefused, match=reason):
            Splicer(runtime)
        if "kv_unified" in change:
            with pytest.raises(RuntimeFailure, match="kv_unified"):
                runtime.seq_cp(0, 1, 2, 3)


def test_a_remote_model_is_refused():
    assert "remote" in memory_refusal(None)


@pytest.mark.parametrize("field, value, reason", [
    ("is_recurrent", True, "recurrent"), ("rope_type", 8, "M-RoPE"),
])
def test_declared_model_facts_are_refused(smollm2, monkeypatch, field, value, reason):
    monkeypatch.setattr(smollm2, field, value)
    with Runtime(smollm2, dataclasses.replace(OPTIONS, n_ctx=256)) as runtime:
        assert reason in memory_refusal(runtime)


def test_a_wrong_rotation_is_found_before_the_first_splice(smollm2, monkeypatch):
    with Runtime(smollm2, dataclasses.replace(OPTIONS, n_ctx=256)) as runtime:
        runtime.__dict__["rope"] = dataclasses.replace(runtime.rope, base=50000.0)
        with pytest.raises(SpliceRefused, match="keys of layer"):
            Splicer(runtime)


def test_unknown_instruction_set_is_refused():
    with pytest.raises(SpliceRefused, match="use one of"):
        choose_isa("mmx")

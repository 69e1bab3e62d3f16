"""Splicing where global and sliding-window layers alternate: two caches, two RoPE bases, masked cells."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from experiments.toy_models import GEMMA2_LAYERS, GEMMA2_WINDOW, write_toy_gemma2
from nexus.blocks import Block, BlockError, BlockFile, block_split, compile_blocks, read_cells, write_block
from nexus.config import compose, validate
from nexus.fidelity import divergence
from nexus.model_tuple import ModelFactsError, check_facts
from nexus.runtime import ContextOptions, Model, Runtime, RuntimeFailure
from nexus.splice import SpliceRefused, Splicer, _without_seq, memory_refusal, pair_ulps

pytestmark = pytest.mark.integration
CONTEXT, WORK, OTHER = 0, 1, 2
LAYOUTS = {"row": True, "transposed": False}


def ids(model: Model, seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, min(model.n_vocab, 20000), n).astype(np.int32)


@dataclasses.dataclass
class Bench:
    runtime: Runtime
    splicer: Splicer
    left: np.ndarray
    long: Block
    short: Block

    def logits(self, block: Block, query: np.ndarray, splice: bool) -> np.ndarray:
        """Logits after left, block and query in an empty cache, the block spliced at its anchor or prefilled."""
        runtime, anchor, n = self.runtime, len(self.left), len(block.tokens)
        runtime.clear()
        runtime.decode(self.left, 0, CONTEXT)
        if splice:
            self.splicer.place(self.splicer.hold(block), anchor, CONTEXT)
        else:
            runtime.decode(block.tokens, anchor, CONTEXT, split=block_split(n))
        return runtime.decode(query, anchor + n, CONTEXT, logits=True)


def bench_of(model: Model, flash_attention: bool, n_left: int, n_long: int, n_short: int, n_ctx: int) -> Bench:
    runtime = Runtime(model, ContextOptions(n_ctx=n_ctx, n_seq_max=6, flash_attention=flash_attention))
    splicer, left = Splicer(runtime), ids(model, 1, n_left)
    long, short = compile_blocks(runtime, left, [ids(model, 2, n_long), ids(model, 3, n_short)])
    return Bench(runtime, splicer, left, long, short)


@pytest.fixture(scope="module", params=LAYOUTS)
def bench(request, gemma3):
    """Gemma 3 270M with a block longer than its window of 512 tokens and a shorter one."""
    bench = bench_of(gemma3, LAYOUTS[request.param], 21, 700, 40, 2304)
    assert bench.splicer.v_trans == (request.param == "transposed")
    yield bench
    bench.runtime.close()


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    model = Model(write_toy_gemma2(tmp_path_factory.mktemp("toy") / "gemma2.gguf"))
    yield model
    model.close()


@pytest.mark.parametrize("length", ["long", "short"])
def test_at_the_anchor_logits_are_bit_identical(bench, length):
    block, query = getattr(bench, length), ids(bench.runtime.model, 4, 9)
    expected, measured = (bench.logits(block, query, splice) for splice in (False, True))
    assert divergence(expected, measured).bit_identical


@pytest.mark.parametrize("length", ["long", "short"])
def test_moved_keys_equal_the_engines_own_shift_in_all_layers(bench, length):
    runtime, splicer, block, offset = bench.runtime, bench.splicer, getattr(bench, length), 256
    model, start, n = runtime.model, len(bench.left), len(block.tokens)
    runtime.clear()
    resident = splicer.hold(block)
    splicer.place(resident, start, WORK)
    # A second owner: the decode after a shift looks for cells from 0 on, and would take masked ones of a single owner.
    runtime.seq_cp(WORK, OTHER)
    runtime.seq_add(WORK, start, start + n, offset)
    runtime.decode(bench.left[:1], start + n + offset, WORK)
    engine_k, engine_v = read_cells(runtime, WORK, start + offset, start + n + offset)
    runtime.clear()
    splicer.place(resident, start + offset, OTHER)
    ours_k, ours_v = read_cells(runtime, OTHER, start + offset, start + n + offset)
    assert pair_ulps(engine_k, ours_k, runtime.rope, model.n_head_kv, model.head_dim_k).max() <= 1
    for values in (ours_v, engine_v):
        np.testing.assert_array_equal(values.view(np.uint16), block.v.view(np.uint16))


def test_other_sequences_keep_their_bytes(bench):
    runtime, splicer, block = bench.runtime, bench.splicer, bench.long
    runtime.clear()
    runtime.decode(bench.left, 0, OTHER)
    runtime.decode(ids(runtime.model, 5, 600), len(bench.left), OTHER)
    before, cells = runtime.state_get(OTHER), read_cells(runtime, OTHER, 0, len(bench.left) + 600)
    resident = splicer.hold(block)
    for position in (len(bench.left), 100, 300):
        splicer.place(resident, position, WORK)
    np.testing.assert_array_equal(before, runtime.state_get(OTHER))
    for have, want in zip(read_cells(runtime, OTHER, 0, len(bench.left) + 600), cells):
        np.testing.assert_array_equal(have.view(np.uint16), want.view(np.uint16))


def test_local_cells_that_llama_cpp_gave_away_are_missed_only_by_a_sequence_cut_back_to_them(toy):
    with Runtime(toy, ContextOptions(n_ctx=512, n_seq_max=4)) as runtime:
        tokens = ids(toy, 6, 100)
        runtime.decode(tokens[:20], 0, CONTEXT)
        runtime.decode(tokens, 0, WORK)
        runtime.seq_rm(CONTEXT)
        runtime.decode(tokens[:60], 0, OTHER)
        assert runtime.pos_min(WORK) == 40, "WORK kept its first 40 local cells: this test tests nothing"
        with pytest.raises(BlockError, match="caches hold"):
            read_cells(runtime, WORK, 30, 44)
        runtime.decode(tokens[:1], 100, WORK)
        runtime.seq_rm(WORK, 80)
        runtime.decode(tokens[:1], 80, WORK)
        runtime.seq_rm(WORK, 48)
        with pytest.raises(RuntimeFailure, match="8 cells of its sliding window.*decode it from its start"):
            runtime.decode(tokens[:1], 48, WORK)


def test_load_puts_into_the_scratch_sequence_what_place_puts_into_a_live_one(bench):
    runtime, splicer, resident = bench.runtime, bench.splicer, bench.splicer.hold(bench.short)
    runtime.clear()
    splicer.place(resident, 300, WORK)
    placed = runtime.state_get(WORK)
    runtime.clear()
    resident.native.load(runtime.context, 300, runtime.scratch_seq, True)
    loaded = runtime.state_get(runtime.scratch_seq)
    assert runtime.pos_max(WORK) == -1
    assert (runtime.pos_min(runtime.scratch_seq), runtime.pos_max(runtime.scratch_seq)) == (300, 339)
    assert _without_seq(placed).tobytes() == _without_seq(loaded).tobytes()
    runtime.clear()
    for block in (*[bench.long] * 3, *[bench.short] * 5):
        splicer.place(splicer.hold(block), runtime.pos_max(OTHER) + 1, OTHER)
    assert 0 <= runtime.options.n_ctx - runtime.pos_max(OTHER) < len(bench.short.tokens)
    with pytest.raises(Exception, match="no room for a block of 40 tokens"):
        resident.native.load(runtime.context, 300, runtime.scratch_seq, True)
    assert runtime.pos_max(runtime.scratch_seq) == -1


def test_a_window_without_a_second_cache_is_refused(smollm2, monkeypatch):
    monkeypatch.setattr(smollm2, "n_swa", 512)
    with Runtime(smollm2, ContextOptions(n_ctx=256, n_seq_max=3)) as runtime:
        with pytest.raises(SpliceRefused, match="holds 1 caches"):
            Splicer(runtime)


def test_a_block_file_holds_both_caches_layers(bench, tmp_path):
    runtime, splicer, block = bench.runtime, bench.splicer, bench.short
    write_block(tmp_path / "tool.atb", block, runtime)
    file = BlockFile(tmp_path / "tool.atb")
    runtime.clear()
    splicer.place(splicer.hold(file), 90, WORK)
    from_file = runtime.state_get(WORK)
    runtime.clear()
    splicer.place(splicer.hold(block), 90, WORK)
    np.testing.assert_array_equal(from_file, runtime.state_get(WORK))
    rope = runtime.rope
    runtime.__dict__["rope"] = dataclasses.replace(rope, base_swa=20000.0)
    try:
        with pytest.raises(BlockError, match="rope_freq_hash"):
            file.check(runtime)
    finally:
        runtime.__dict__["rope"] = rope


def test_a_wrong_local_base_is_found_before_the_first_splice(gemma3):
    with Runtime(gemma3, ContextOptions(n_ctx=512, n_seq_max=3)) as runtime:
        runtime.__dict__["rope"] = dataclasses.replace(runtime.rope, base_swa=None)
        with pytest.raises(SpliceRefused, match="keys of local layer"):
            Splicer(runtime)


def test_without_the_full_size_local_cache_splicing_is_refused(gemma3):
    with Runtime(gemma3, ContextOptions(n_ctx=2048, n_seq_max=3, swa_full=False)) as runtime:
        assert "swa_full=true" in memory_refusal(runtime)
        with pytest.raises(SpliceRefused, match="window of 512 tokens"):
            Splicer(runtime)


def test_the_configs_local_base_is_held_against_the_architectures(gemma3):
    spec = validate(compose(["model=gemma3-270m"])).model
    wrong = spec.model_copy(update={"rope": spec.rope.model_copy(update={"base_swa": 20000.0})})
    check_facts(gemma3, spec)
    with pytest.raises(ModelFactsError, match=r"rope.base_swa is 20000.0 .* 10000.0"):
        check_facts(gemma3, wrong)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_soft_capped_toy_is_bit_identical_at_the_anchor(toy, layout):
    """A block of several windows and one of less than a window, with flash attention on and off."""
    bench = bench_of(toy, LAYOUTS[layout], 11, 75, 9, 512)
    try:
        assert toy.n_swa == GEMMA2_WINDOW and bench.long.k.shape[0] == GEMMA2_LAYERS
        query = ids(toy, 4, 7)
        for block in (bench.long, bench.short):
            expected = bench.logits(block, query, splice=False)
            assert divergence(expected, bench.logits(block, query, splice=True)).bit_identical
            bent = dataclasses.replace(block, v=block.v * np.float16(1.01))
            assert not divergence(expected, bench.logits(bent, query, splice=True)).bit_identical, "no one looks at it"
    finally:
        bench.runtime.close()

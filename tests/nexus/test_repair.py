"""Repair on a real model (SmolLM2-135M): what an arm chooses, and that recomputed tokens land where they belong."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexus import native
from nexus.blocks import block_split, compile_blocks, read_cells
from nexus.fidelity import divergence
from nexus.repair import (
    EARLY_LAYER, Place, RepairError, arm_of, block_values, early_values, free_sequences, place_repaired, runs_of,
    share_count,
)
from nexus.runtime import ContextOptions, Runtime, RuntimeFailure
from nexus.splice import SpliceRefused, Splicer

CONTEXT, WORK, OTHER = 0, 1, 2
N_PAST, N_BLOCK, N_QUERY = 96, 40, 9
SHARED = [name for family in ("suffix", "random", "blend", "oracle") for name in (f"{family}-10", f"{family}-50")]
PARTIAL = [*SHARED, "head-1", "head-4", "head-25%", "head-4+suffix-10", "head-4+blend-10"]


def text_tokens(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(100, 20000, n).astype(np.int32)


class Bench:
    """A block compiled behind 12 tokens, and a live context of 96 others."""

    def __init__(self, model, flash_attention: bool):
        self.runtime = Runtime(model, ContextOptions(n_ctx=1024, n_seq_max=12, n_threads=1,
                                                     flash_attention=flash_attention))
        self.splicer = Splicer(self.runtime)
        self.left, self.block = text_tokens(1, 12), text_tokens(2, N_BLOCK)
        self.context, self.query = text_tokens(3, N_PAST), text_tokens(4, N_QUERY)
        self.resident = self.splicer.hold(next(iter(compile_blocks(self.runtime, self.left, [self.block]))))
        self.reset()
        self.reference, self.values = self.prefill()

    def reset(self):
        self.runtime.clear()
        self.runtime.decode(self.context, 0, CONTEXT)
        self.runtime.seq_cp(CONTEXT, WORK)

    def place(self, position=N_PAST, seq=WORK, **more) -> Place:
        return Place(self.splicer, self.resident, self.block, position, seq, **more)

    def prefill(self):
        """Logits behind the query after a full prefill with the block's split, and the block's V."""
        self.runtime.decode(self.block, N_PAST, WORK, split=block_split(N_BLOCK))
        values = read_cells(self.runtime, WORK, N_PAST, N_PAST + N_BLOCK)[1]
        logits = self.runtime.decode(self.query, N_PAST + N_BLOCK, WORK, logits=True)
        self.reset()
        return logits, values

    def cells(self, seq: int) -> tuple[np.ndarray, bytes]:
        """Positions of a sequence's cells, ascending, and all of its bytes."""
        blob = self.runtime.state_get(seq)
        state = native.kernels().parse_kv_state(blob.ctypes.data, blob.nbytes)
        cache = state.caches[0]
        begin, n = int(cache.cells_offset), int(cache.n_cells)
        positions = blob[begin:begin + 12 * n].reshape(n, 12)[:, :4].copy().view(np.int32).ravel()
        return np.sort(positions), blob.tobytes()


@pytest.fixture(scope="module", params=[False, True], ids=["transposed", "row"])
def bench(request, smollm2):
    made = Bench(smollm2, request.param)
    yield made
    made.runtime.close()


@pytest.fixture
def fresh(bench):
    bench.reset()
    return bench


# --- choosing, without a model


@given(st.lists(st.integers(0, 200), unique=True))
def test_runs_cover_the_indices_once_and_never_touch(indices):
    indices = sorted(indices)
    runs = runs_of(np.array(indices, dtype=int))
    assert [i for begin, end in runs for i in range(begin, end)] == indices
    assert all(a[1] < b[0] for a, b in zip(runs, runs[1:]))


@pytest.mark.parametrize(("n", "pct", "count"), [(200, 7, 14), (193, 5, 10), (193, 36.7, 71), (50, 0, 0), (50, 100, 50),
                                                 (3, 1, 1), (1, 99, 1)])
def test_a_share_is_rounded_up_once(n, pct, count):
    assert share_count(n, pct) == count


@pytest.mark.parametrize(("name", "chosen"), [
    ("none", []), ("full", range(20)), ("head-3", [0, 1, 2]), ("head-10%", [0, 1]), ("suffix-25", range(15, 20)),
    ("head-2+suffix-5", [0, 1, 19]), ("head-99", range(20)), ("head-15+suffix-50", range(20)),
])
def test_arms_that_need_no_model_choose_known_tokens(name, chosen):
    place = Place(None, None, np.arange(20), 0, 0)
    assert arm_of(name).select(place).tolist() == list(chosen)


def test_random_arms_differ_by_seed_and_repeat():
    first, again, other = (arm_of("random-25").select(Place(None, None, np.arange(40), 0, 0, seed=seed))
                           for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()
    assert len(set(first)) == 10 and (np.diff(first) > 0).all()


@pytest.mark.parametrize("name", ["head", "head-", "suffix-101", "head-2.5", "tail-5", "", "head-4+", "HEAD-4", "blend-x"])
def test_a_name_that_is_no_arm_is_refused_with_it(name):
    with pytest.raises(RepairError, match="arm '"):
        arm_of(name)


def test_the_oracle_needs_the_answer():
    with pytest.raises(RepairError, match="true_values"):
        arm_of("oracle-10").select(Place(None, None, np.arange(20), 0, 0))


# --- recomputing, on the model


@pytest.mark.integration
def test_full_is_bit_identical_to_a_prefill_with_the_same_split(fresh):
    assert place_repaired(fresh.place(), arm_of("full").select(fresh.place())) is None
    logits = fresh.runtime.decode(fresh.query, N_PAST + N_BLOCK, WORK, logits=True)
    assert divergence(fresh.reference, logits).bit_identical


@pytest.mark.integration
@pytest.mark.parametrize("name", ["head-100%", "suffix-100", "random-100", "blend-100", "oracle-100",
                                  "head-20+suffix-50", "head-50%+blend-100"])
def test_recomputing_every_token_by_any_arm_equals_full(fresh, name):
    place = fresh.place(true_values=fresh.values)
    place_repaired(place, arm_of(name).select(place))
    logits = fresh.runtime.decode(fresh.query, N_PAST + N_BLOCK, WORK, logits=True)
    assert divergence(fresh.reference, logits).bit_identical


@pytest.mark.integration
@pytest.mark.parametrize("sequential", [False, True], ids=["one-batch", "sequential"])
@pytest.mark.parametrize("name", PARTIAL)
def test_one_cell_per_position_and_no_other_sequence_changes(fresh, name, sequential):
    fresh.runtime.decode(text_tokens(9, 17), 0, OTHER)
    others = {seq: fresh.cells(seq)[1] for seq in (CONTEXT, OTHER)}
    place = fresh.place(true_values=fresh.values)
    logits = place_repaired(place, arm_of(name).select(place), fresh.query, sequential=sequential)
    positions, _ = fresh.cells(WORK)
    assert positions.tolist() == list(range(N_PAST + N_BLOCK + N_QUERY))
    assert {seq: fresh.cells(seq)[1] for seq in others} == others
    assert all(fresh.runtime.pos_max(seq) < 0 for seq in range(3, fresh.runtime.options.n_seq_max))
    assert np.isfinite(logits).all()


@pytest.mark.integration
def test_what_is_not_recomputed_keeps_the_compiled_values_and_what_is_equals_sequential_order(fresh):
    chosen = np.array([0, 1, 7, 8, 20, 39])
    place_repaired(fresh.place(), chosen, sequential=True)
    values = read_cells(fresh.runtime, WORK, N_PAST, N_PAST + N_BLOCK)[1]
    kept = np.setdiff1d(np.arange(N_BLOCK), chosen)
    assert np.array_equal(values[:, kept], block_values(fresh.place())[:, kept])
    # V of layer 0 depends on the token alone: recomputed, it is what the prefill has, up to batch rounding.
    assert np.allclose(values[0, chosen].astype(float), fresh.values[0, chosen].astype(float), atol=2e-2)
    # The head sees nothing but the context, so that it is exactly a prefill's.
    head = np.abs(values[:, :2].astype(float) - fresh.values[:, :2].astype(float)).max()
    moved = np.abs(block_values(fresh.place())[:, :2].astype(float) - fresh.values[:, :2].astype(float)).max()
    assert head < moved / 5


@pytest.mark.integration
def test_a_head_repair_comes_nearer_than_none(fresh):
    far = divergence(fresh.reference, place_repaired(fresh.place(), [], fresh.query)).kl_nats
    fresh.reset()
    near = divergence(fresh.reference, place_repaired(fresh.place(), np.arange(20), fresh.query)).kl_nats
    assert near < far


@pytest.mark.integration
def test_the_early_values_are_those_of_a_prefill_and_deeper_layers_are_not_computed(fresh):
    # One batch on both sides; the reference's split differs by its last token.
    found = early_values(fresh.place(), EARLY_LAYER)
    fresh.runtime.decode(fresh.block, N_PAST, WORK)
    true = read_cells(fresh.runtime, WORK, N_PAST, N_PAST + N_BLOCK)[1][EARLY_LAYER]
    assert np.array_equal(found, true.astype(np.float32))
    assert fresh.runtime.pos_max(fresh.runtime.scratch_seq) < 0


@pytest.mark.integration
def test_the_probe_stops_the_graph_early(fresh):
    import time

    def seconds(call):
        best = np.inf
        for _ in range(3):
            fresh.reset()
            start = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - start)
        return best

    whole = seconds(lambda: fresh.runtime.decode(fresh.block, N_PAST, WORK))
    assert seconds(lambda: early_values(fresh.place(), EARLY_LAYER)) < whole / 2


@pytest.mark.integration
def test_a_decode_after_a_probe_runs_to_its_end(fresh):
    early_values(fresh.place(), EARLY_LAYER)
    assert divergence(fresh.reference, fresh.prefill()[0]).bit_identical


@pytest.mark.integration
@pytest.mark.parametrize("position", [N_PAST - 1, N_PAST + 1, -1])
def test_a_position_that_does_not_continue_the_sequence_is_refused(fresh, position):
    before = fresh.cells(WORK)
    with pytest.raises(SpliceRefused, match="does not continue"):
        place_repaired(fresh.place(position=position), [0])
    assert fresh.cells(WORK)[1] == before[1]


@pytest.mark.integration
@pytest.mark.parametrize("indices", [[-1], [N_BLOCK], [0, 1, N_BLOCK + 5]])
def test_indices_outside_of_the_block_are_refused(fresh, indices):
    with pytest.raises(RepairError, match="do not lie in a block"):
        place_repaired(fresh.place(), indices)


@pytest.mark.integration
@pytest.mark.parametrize(("indices", "message"), [
    ([3, 1], "1 follows 3"), ([0, 1, 1], "1 follows 1"), ([0, 5, 4], "4 follows 5"),
    (np.array([5, 4], np.uint8), "4 follows 5"), ([0.0, 1.0], r"float64\[2\]"), ([True, False], r"bool\[2\]"),
    ([[0, 1]], r"int64\[1, 2\]"),
])
def test_indices_that_are_no_ascending_integers_are_refused_before_anything_changes(fresh, indices, message):
    before = fresh.cells(WORK)[1]
    with pytest.raises(RepairError, match=message):
        place_repaired(fresh.place(), indices)
    assert fresh.cells(WORK)[1] == before


@pytest.mark.integration
def test_runs_beyond_the_free_sequences_are_recomputed_in_several_batches(fresh):
    chosen = np.arange(1, N_BLOCK - 1, 2)
    assert len(runs_of(chosen)) > len(free_sequences(fresh.runtime, WORK))
    place_repaired(fresh.place(), chosen, fresh.query)
    assert fresh.cells(WORK)[0].tolist() == list(range(N_PAST + N_BLOCK + N_QUERY))


@pytest.mark.integration
@pytest.mark.parametrize("indices", [[], [0, 1], [3, 9, 10], range(30, N_BLOCK)])
def test_a_failure_leaves_what_stood_before_the_block(smollm2, indices):
    # Room for the context and part of the block only.
    with Runtime(smollm2, ContextOptions(n_ctx=256, n_seq_max=6, n_threads=1)) as runtime:
        splicer = Splicer(runtime)
        block = text_tokens(5, 60)
        resident = splicer.hold(next(iter(compile_blocks(runtime, text_tokens(1, 12), [block]))))
        runtime.clear()
        runtime.decode(text_tokens(3, 90), 0, WORK)
        runtime.decode(text_tokens(6, 120), 0, OTHER)
        with pytest.raises((SpliceRefused, RuntimeFailure)):
            place_repaired(Place(splicer, resident, block, 90, WORK), np.array(list(indices), dtype=int))
        assert runtime.pos_max(WORK) == 89 and runtime.pos_max(OTHER) == 119
        assert all(runtime.pos_max(seq) < 0 for seq in (0, 3, 4, 5))


@pytest.mark.integration
def test_an_anchored_block_needs_no_repair(smollm2):
    with Runtime(smollm2, dataclasses.replace(ContextOptions(), n_ctx=512, n_seq_max=6, n_threads=1)) as runtime:
        splicer = Splicer(runtime)
        left, block, query = text_tokens(1, 24), text_tokens(2, N_BLOCK), text_tokens(4, N_QUERY)
        resident = splicer.hold(next(iter(compile_blocks(runtime, left, [block]))))
        runtime.clear()
        runtime.decode(left, 0, CONTEXT)
        runtime.seq_cp(CONTEXT, WORK)
        spliced = place_repaired(Place(splicer, resident, block, len(left), WORK), [], query)
        runtime.seq_rm(WORK)
        runtime.seq_cp(CONTEXT, WORK)
        runtime.decode(block, len(left), WORK, split=block_split(N_BLOCK))
        assert divergence(runtime.decode(query, len(left) + N_BLOCK, WORK, logits=True), spliced).bit_identical

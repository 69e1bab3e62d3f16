"""The prefix cache over real sequences: right logits, shared cells, a bound that holds, nothing left behind."""
from __future__ import annotations

import numpy as np
import pytest

from experiments.toy_models import TOKENS, write_toy_gemma2, write_toy_mamba, write_toy_qwen2vl
from nexus.fidelity import divergence
from nexus.prefix_cache import PrefixCache, PrefixCacheError
from nexus.runtime import ContextOptions, Model, Runtime, RuntimeFailure

N_CTX = 256
OPTIONS = ContextOptions(n_ctx=N_CTX, n_batch=64, n_seq_max=8, n_threads=1, flash_attention=False)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A toy with attention over all tokens: sharing prefixes asks nothing else of a model."""
    model = Model(write_toy_qwen2vl(tmp_path_factory.mktemp("toy") / "toy.gguf"))
    yield model
    model.close()


@pytest.fixture
def runtime(toy):
    with Runtime(toy, OPTIONS) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def plain(toy):
    """Logits of a prompt that is decoded as a whole, in a context of its own."""
    with Runtime(toy, OPTIONS) as runtime:
        def logits(prompt):
            runtime.clear()
            return runtime.decode(prompt, 0, 0, logits=True)

        yield logits


def ids(seed, n):
    return np.random.default_rng(seed).integers(3, len(TOKENS), n).astype(np.int32)


def joined(*parts):
    return np.concatenate(parts)


def free_cells(runtime):
    """How many tokens can still be decoded, found by trying."""
    low, high = 0, runtime.options.n_ctx
    while low < high:
        middle = (low + high + 1) // 2
        try:
            for begin in range(0, middle, OPTIONS.n_batch):
                runtime.decode(ids(0, min(OPTIONS.n_batch, middle - begin)), begin, runtime.scratch_seq)
            low = middle
        except RuntimeFailure:
            high = middle - 1
        runtime.seq_rm(runtime.scratch_seq)
    return low


def check_state(cache):
    """The sequences hold what the cache says, and no cell more."""
    resident = cache.resident()
    for seq in cache.seqs:
        tokens = resident.get(seq, [])
        assert (cache.runtime.pos_min(seq), cache.runtime.pos_max(seq)) == (0 if len(tokens) else -1, len(tokens) - 1)
    assert cache.n_cells <= cache.max_tokens
    assert free_cells(cache.runtime) == N_CTX - cache.n_cells


@pytest.mark.integration
@pytest.mark.parametrize("seed", range(3))
def test_random_prompts_get_the_logits_of_a_full_prefill_and_no_cell_is_lost(runtime, plain, seed):
    rng = np.random.default_rng(seed)
    cache = PrefixCache(runtime, max_tokens=N_CTX - 1, n_slots=5)
    seen, reused, evicted = [ids(seed, 40)], 0, 0
    for step in range(30):
        old = seen[rng.integers(len(seen))]
        # Keeps all of an old prompt, or branches off; sometimes nothing is added, so that all of it is resident.
        kept = old[:rng.integers(1, len(old) + 1)] if rng.random() < 0.6 else old
        prompt = joined(kept, ids([seed, step], rng.integers(0, 40)))[:120]
        seen.append(prompt)
        found = cache.match(prompt)
        filled = cache.prefill(prompt)
        assert filled.n_reused == min(found, len(prompt) - 1) and filled.n_tokens == len(prompt)
        np.testing.assert_array_equal(cache.resident()[filled.seq], prompt)
        # A wrong prefix moves these by whole units; another split or other cells by roundings.
        np.testing.assert_allclose(filled.logits, plain(prompt), atol=5e-3)
        if step % 6 == 5:
            check_state(cache)
        reused, evicted = reused + filled.n_reused, evicted + filled.n_evicted
    counted = cache.statistics
    assert (counted.n_prompts, counted.n_reused, counted.n_evicted) == (30, reused, evicted)
    assert reused > 300 and evicted > 5 and counted.n_copies > 5
    cache.clear()
    check_state(cache)


@pytest.mark.integration
def test_a_wrong_prefix_would_show(plain):
    """The tolerance above tells a prompt from one that differs in its first token alone."""
    prompt = ids(1, 100)
    other = prompt.copy()
    other[0] += 1
    assert np.abs(plain(prompt) - plain(other)).max() > 0.05


@pytest.mark.integration
def test_a_prompt_that_goes_on_is_decoded_in_place_and_a_branch_shares_its_cells(runtime):
    cache = PrefixCache(runtime, max_tokens=200, n_slots=4)
    begin, more, other = ids(1, 50), ids(2, 20), ids(3, 30)
    first = cache.prefill(begin)
    assert (first.n_reused, first.copy_us) == (0, None) and first.decode_ms > 0
    second = cache.prefill(joined(begin, more))
    assert (second.seq, second.n_reused, second.copy_us) == (first.seq, 50, None)
    third = cache.prefill(joined(begin, other))
    assert third.seq != first.seq and third.n_reused == 50 and third.copy_us > 0
    assert cache.n_cells == 50 + 20 + 30
    # Wholly resident, within another prompt: its last token has one cell all the same.
    fourth = cache.prefill(begin)
    assert fourth.seq not in (first.seq, third.seq) and fourth.n_reused == 49
    assert cache.n_cells == 100
    again = cache.prefill(begin)
    assert (again.seq, again.n_reused, again.copy_us) == (fourth.seq, 49, None)
    check_state(cache)
    assert cache.statistics.n_warm == 4


@pytest.mark.integration
def test_the_least_recently_used_prompt_goes_and_a_pinned_one_stays(runtime, plain):
    cache = PrefixCache(runtime, max_tokens=120, n_slots=3)
    kept = cache.prefill(ids(1, 40), pin=True)
    oldest, newer = cache.prefill(ids(2, 40)), cache.prefill(ids(3, 30))
    fourth = cache.prefill(ids(4, 50))
    assert fourth.seq == oldest.seq and fourth.n_evicted == 1
    assert {kept.seq, newer.seq, fourth.seq} == set(cache.resident())
    before = cache.resident()
    with pytest.raises(PrefixCacheError, match="90 tokens needs 130 cells beside pinned ones; max_tokens is 120"):
        cache.prefill(ids(5, 90))
    assert {seq: tokens.tolist() for seq, tokens in cache.resident().items()} == {
        seq: tokens.tolist() for seq, tokens in before.items()}
    # The caller goes on behind the pinned prompt, and gives it back.
    runtime.decode(ids(6, 5), 40, kept.seq)
    assert cache.n_pinned_cells == 40
    longer = joined(ids(1, 40), ids(6, 5))
    np.testing.assert_allclose(cache.prefill(longer).logits, plain(longer), atol=5e-3)
    cache.release(kept.seq)
    assert runtime.pos_max(kept.seq) == 39 and cache.n_pinned_cells == 0
    assert cache.prefill(ids(5, 90)).n_tokens == 90
    check_state(cache)


@pytest.mark.integration
def test_all_pinned_is_refused(runtime):
    cache = PrefixCache(runtime, max_tokens=100, n_slots=2, seqs=[3, 5])
    assert [cache.prefill(ids(i, 10), pin=True).seq for i in range(2)] == [3, 5]
    with pytest.raises(PrefixCacheError, match="all 2 slots are pinned; release one"):
        cache.prefill(ids(0, 20))
    cache.release(3)
    assert cache.prefill(ids(0, 20)).n_reused == 10
    with pytest.raises(PrefixCacheError, match=r"sequence 4 is none of the cache's; release one of \[3, 5\]"):
        cache.release(4)


@pytest.mark.integration
@pytest.mark.parametrize("error", [RuntimeFailure("no room"), KeyboardInterrupt()])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_failure_leaves_nothing_of_the_prompt_behind(runtime, monkeypatch, error, in_place):
    cache = PrefixCache(runtime, max_tokens=100, n_slots=2)
    begin = ids(1, 30)
    cache.prefill(begin)
    if not in_place:
        cache.prefill(ids(3, 20))
        cache.prefill(joined(begin, ids(2, 40)))
    decode = runtime.decode

    def fail(tokens, pos, seq, **more):
        decode(tokens[:2], pos, seq)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "decode", fail)
        with pytest.raises(type(error)):
            # In place, or with one prompt evicted for its slot and the other for its cells.
            cache.prefill(joined(begin, ids(4, 69 if in_place else 60)))
    assert cache.statistics.n_prompts == (1 if in_place else 3)
    assert cache.resident() == {}
    check_state(cache)
    assert cache.prefill(begin).n_tokens == 30
    check_state(cache)


@pytest.mark.integration
def test_foreign_cells_that_leave_no_room_are_an_error_of_the_runtime(runtime):
    cache = PrefixCache(runtime, max_tokens=200, n_slots=2)
    runtime.decode(ids(1, 200), 0, 5)
    with pytest.raises(RuntimeFailure, match="no room"):
        cache.prefill(ids(2, 60))
    assert cache.resident() == {} and cache.n_cells == 0 and runtime.pos_max(5) == 199


@pytest.mark.integration
def test_sequences_that_somebody_else_emptied_are_noticed(runtime):
    cache = PrefixCache(runtime, max_tokens=200, n_slots=3)
    prompt = ids(1, 40)
    cache.prefill(prompt)
    runtime.clear()
    with pytest.raises(PrefixCacheError, match=r"sequence 0 holds positions -1 … -1 .*clear\(\) the cache"):
        cache.prefill(joined(prompt[:20], ids(2, 5)))
    cache.clear()
    assert cache.prefill(prompt).n_reused == 0


@pytest.mark.integration
@pytest.mark.parametrize("tokens", [[], [[3, 4]], [-1], [len(TOKENS)], [0.5]])
def test_what_is_no_list_of_the_models_ids_is_refused(runtime, tokens):
    cache = PrefixCache(runtime, max_tokens=50, n_slots=2)
    for call in (cache.prefill, cache.match):
        with pytest.raises(PrefixCacheError, match=f"each in 0 … {len(TOKENS) - 1}"):
            call(np.array(tokens))
    with pytest.raises(PrefixCacheError, match="51 tokens; a slot holds 1 to 50"):
        cache.prefill(ids(1, 51))
    assert cache.n_cells == 0


@pytest.mark.integration
@pytest.mark.parametrize("more, message", [
    ({"max_tokens": 0}, "max_tokens is 0 and n_ctx 256; give 1 to 255"),
    ({"max_tokens": N_CTX}, "max_tokens is 256"),
    ({"n_slots": 0}, "n_slots = 0"),
    ({"n_slots": 8}, r"seqs hold 7; sequences are 0 … 6 \(the last is the scratch"),
    ({"seqs": [0, 1]}, r"seqs are \[0, 1\]; give n_slots = 3"),
    ({"seqs": [0, 1, 1]}, "different"),
    ({"seqs": [0, 1, -1]}, "seqs hold -1"),
])
def test_sizes_and_sequences_that_do_not_fit_are_refused(runtime, more, message):
    with pytest.raises(PrefixCacheError, match=message):
        PrefixCache(runtime, **{"max_tokens": 100, "n_slots": 3} | more)


@pytest.mark.integration
@pytest.mark.parametrize("write, options, message", [
    (write_toy_mamba, {}, "mamba keeps a recurrent state"),
    (write_toy_gemma2, {}, "gemma2 has sliding-window layers, .* window of 16 tokens"),
    (write_toy_qwen2vl, {"kv_unified": False}, "kv_unified=false; .*aborts llama.cpp"),
])
def test_a_memory_without_prefixes_to_share_is_refused(tmp_path, write, options, message):
    model = Model(write(tmp_path / "toy.gguf"))
    with Runtime(model, ContextOptions(**{"n_ctx": 256, "n_seq_max": 4, "n_threads": 1} | options)) as runtime:
        with pytest.raises(PrefixCacheError, match=message):
            PrefixCache(runtime, max_tokens=100, n_slots=2)
    model.close()


@pytest.mark.integration
@pytest.mark.parametrize("flash_attention", [False, True])
def test_a_cached_prefill_is_the_prefill_with_the_same_splits_to_the_bit(smollm2, flash_attention):
    options = ContextOptions(n_ctx=512, n_batch=128, n_seq_max=4, n_threads=1, flash_attention=flash_attention)
    prompt = smollm2.tokenize("The harbour gauge of Brannock shows a sawtooth since the deploy on Tuesday: the level "
                              "climbs for forty minutes, drops by eleven centimetres and climbs again.")
    with Runtime(smollm2, options) as runtime:
        cache = PrefixCache(runtime, max_tokens=400, n_slots=3)
        cache.prefill(prompt[:20])
        extended = cache.prefill(prompt)
        assert extended.n_reused == 20
        resident = cache.prefill(prompt)
        assert resident.n_reused == len(prompt) - 1
        cache.prefill(prompt[:12])
        cache.prefill(np.concatenate([prompt[:12], prompt[30:]]))
        branched = cache.prefill(prompt[:25])
        runtime.clear()
        same_split = runtime.decode(prompt, 0, 0, logits=True, split=(20,))
        runtime.clear()
        last_alone = runtime.decode(prompt, 0, 0, logits=True, split=(20, len(prompt) - 21))
        runtime.clear()
        whole = runtime.decode(prompt[:25], 0, 0, logits=True)
    assert divergence(same_split, extended.logits).bit_identical
    assert divergence(last_alone, resident.logits).bit_identical
    # Its cells lie otherwise.
    assert divergence(whole, branched.logits).kl_nats < 0.01

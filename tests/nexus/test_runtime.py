"""The runtime on SmolLM2: what it refuses, and what it leaves behind."""
from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nexus.config import ROOT
from nexus.fidelity import divergence
from nexus.runtime import ContextOptions, Model, Runtime, RuntimeFailure
from nexus.workload import load_conversation

pytestmark = pytest.mark.integration
TOKENS = np.random.default_rng(1).integers(100, 20000, 96).astype(np.int32)
N_CTX = 256
OPTIONS = ContextOptions(n_ctx=N_CTX, n_batch=64, n_seq_max=4)


@pytest.fixture(scope="module")
def runtime(smollm2):
    with Runtime(smollm2, OPTIONS) as runtime:
        yield runtime


@pytest.fixture(autouse=True)
def empty(runtime):
    runtime.clear()


@pytest.fixture(scope="module")
def words(smollm2):
    """120 tokens of ordinary text."""
    turns = load_conversation(ROOT / "experiments" / "data" / "conversation.json")
    return smollm2.tokenize(" ".join(turn["content"] for turn in turns))[:120]


def fill(runtime, n_tokens, seq=0):
    runtime.decode(np.resize(TOKENS, n_tokens), 0, seq)


@pytest.mark.parametrize("text", ["plain words", "größer, 工具を選ぶ 🛠️", "<|im_start|>user\nhi<|im_end|>\n"])
def test_tokens_give_the_text_back(smollm2, text):
    assert smollm2.detokenize(smollm2.tokenize(text)) == text


# This model's vocabulary lacks six control characters and the unassigned planes from 4 up: it drops them.
@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x3FFFF, exclude_categories=["Cs"])))
@example("日本語のツール、한국어, 中文")
@example("👩‍👩‍👧‍👦 🇩🇪 e\u0301 \u200b")
@example(" a , b .  I 'm\n\n")
@settings(max_examples=150, deadline=None)
def test_any_text_survives_tokenising(smollm2, text):
    tokens = smollm2.tokenize(text, parse_special=False)
    assert tokens.dtype == np.int32 and smollm2.detokenize(tokens) == text


def test_markers_are_one_token_only_where_they_are_parsed(smollm2):
    assert len(smollm2.tokenize("<|im_end|>")) == 1
    assert len(smollm2.tokenize("<|im_end|>", parse_special=False)) > 1


def test_equal_splits_give_equal_bits_and_other_splits_nearly(runtime):
    logits = {}
    others = ((95, 1), (10, 20), (3, 50, 7), (1,) * 95)
    for split in ((), (64, 32), *others):
        logits[split] = runtime.decode(TOKENS, 0, 0, logits=True, split=split)
        runtime.clear()
    again = runtime.decode(TOKENS, 0, 0, logits=True)
    assert divergence(logits[()], again).bit_identical
    assert divergence(logits[()], logits[64, 32]).bit_identical, "n_batch = 64 splits 96 tokens the same way"
    found = [divergence(logits[()], logits[split]) for split in others]
    assert any(not other.bit_identical for other in found), "no split matters: the noise floor would measure nothing"
    assert all(other.kl_nats < 0.1 for other in found)


def test_another_split_of_real_text_moves_logits_only_a_little(runtime, words):
    reference = runtime.decode(words, 0, 0, logits=True)
    divergences = []
    for split in ((119, 1), (10, 20), (1,)):
        runtime.clear()
        divergences.append(divergence(reference, runtime.decode(words, 0, 0, logits=True, split=split)))
    assert all(found.top1 and found.kl_nats < 0.05 for found in divergences)
    assert not all(found.bit_identical for found in divergences), "then the splits were not applied"


def test_n_batch_splits_like_an_explicit_split(smollm2, runtime, words):
    explicit = runtime.decode(words, 0, 0, logits=True, split=(32, 32, 32))
    with Runtime(smollm2, dataclasses.replace(OPTIONS, n_batch=32)) as small:
        assert divergence(explicit, small.decode(words, 0, 0, logits=True)).bit_identical


def test_a_text_decoded_in_two_calls_is_one_sequence(runtime, words):
    whole = runtime.decode(words, 0, 0, logits=True, split=(60, 60))
    runtime.clear()
    assert runtime.decode(words[:60], 0, 0) is None
    assert divergence(whole, runtime.decode(words[60:], 60, 0, logits=True)).bit_identical


@pytest.mark.parametrize("tokens, pos, seq, message", [
    (TOKENS[:0], 0, 0, "no tokens"), ([-1], 0, 0, "token ids"), ([10**7], 0, 0, "token ids"),
    (TOKENS[:3], 0, 9, "sequence 9"), (TOKENS[:3], 0, -1, "sequence -1"), (TOKENS[:3], 7, 0, "does not continue"),
    (TOKENS[:3], 3, 0, "does not continue"), (TOKENS[:3], -1, 0, "does not continue"),
])
def test_refused_input_changes_nothing(runtime, tokens, pos, seq, message):
    runtime.decode(TOKENS[:5], 0, 0)
    before = runtime.state_get(0)
    with pytest.raises(RuntimeFailure, match=message):
        runtime.decode(np.asarray(tokens, dtype=np.int32), pos, seq)
    np.testing.assert_array_equal(before, runtime.state_get(0))


@pytest.mark.parametrize("tokens, pos, split, message", [
    (TOKENS[:3], -1, (), "position -1 is out of range"), (TOKENS[:3], -7, (), "position -7"),
    (TOKENS[:3], 2**31 - 2, (), "out of range"), (TOKENS[:3], 0, (0,), r"split is \(0,\)"),
    (TOKENS[:3], 0, (2, -1), r"split is \(2, -1\)"), (TOKENS[:4].reshape(2, 2), 0, (), "2 dimensions"),
    (TOKENS[0], 0, (), "0 dimensions"), (TOKENS[:3].astype(np.float32), 0, (), "float32"),
    (np.array([2**32 + 5]), 0, (), "token ids"),
])
def test_input_that_would_poison_an_empty_sequence_is_refused(runtime, tokens, pos, split, message):
    with pytest.raises(RuntimeFailure, match=message):
        runtime.decode(tokens, pos, 0, split=split)
    assert (runtime.pos_min(0), runtime.pos_max(0)) == (-1, -1)
    runtime.decode(TOKENS[:3], 0, 0)
    assert runtime.pos_min(0) == 0


def test_after_close_every_call_is_refused_and_the_process_lives(smollm2):
    runtime = Runtime(smollm2, OPTIONS)
    runtime.decode(TOKENS[:4], 0, 0)
    blob = runtime.state_get(0)
    runtime.close()
    runtime.close()
    for call in (lambda: runtime.decode(TOKENS[:1], 4, 0), lambda: runtime.logits(), lambda: runtime.pos_min(0),
                 lambda: runtime.pos_max(0), lambda: runtime.seq_rm(0), lambda: runtime.seq_cp(0, 1),
                 lambda: runtime.seq_add(0, 0, -1, 1), lambda: runtime.can_shift(), lambda: runtime.clear(),
                 lambda: runtime.state_get(0), lambda: runtime.state_set(0, blob), lambda: runtime.context,
                 lambda: scattered(runtime, [5], [4], [0])):
        with pytest.raises(RuntimeFailure, match="the runtime is closed"):
            call()


def test_a_closed_model_is_refused_by_itself_and_by_its_runtimes(smollm2):
    model = Model(smollm2.path, smollm2.sha256)
    runtime = Runtime(model, OPTIONS)
    model.close()
    for call in (lambda: model.tokenize("a"), lambda: model.detokenize(TOKENS), lambda: model.meta("x"),
                 lambda: model.chat_template, lambda: model.chat_message("user", "x"), lambda: runtime.pos_max(0),
                 lambda: runtime.decode(TOKENS[:1], 0, 0), lambda: scattered(runtime, [5], [0], [0]),
                 lambda: Runtime(model, OPTIONS)):
        with pytest.raises(RuntimeFailure, match="is closed"):
            call()


def test_a_decode_that_does_not_fit_leaves_the_sequence_as_it_was(runtime):
    runtime.decode(np.tile(TOKENS, 3)[:200], 0, 0)
    before = runtime.state_get(0)
    with pytest.raises(RuntimeFailure, match="no room"):
        runtime.decode(TOKENS, 200, 0)
    np.testing.assert_array_equal(before, runtime.state_get(0))


@pytest.mark.parametrize("split", [(), (50, 30)])
def test_batches_decoded_before_the_one_that_does_not_fit_are_taken_back(runtime, split):
    fill(runtime, 150)
    before = runtime.state_get(0)
    with pytest.raises(RuntimeFailure, match="position 150 of sequence 0: no room.*256 cells"):
        runtime.decode(np.resize(TOKENS, 150), 150, 0, split=split)
    assert runtime.pos_max(0) == 149
    np.testing.assert_array_equal(before, runtime.state_get(0))
    runtime.decode(np.resize(TOKENS, N_CTX - 150), 150, 0)


def assert_free(runtime, n_cells):
    """Exactly this many cells are free: so many tokens fit, and not one more. Uses them up."""
    fill(runtime, n_cells, 3)
    with pytest.raises(RuntimeFailure, match="no room"):
        runtime.decode(TOKENS[:1], n_cells, 3)


def test_a_copied_sequence_takes_no_cells(runtime):
    fill(runtime, N_CTX - 16)
    runtime.seq_cp(0, 1)
    runtime.seq_cp(0, 2, 10, 20)
    assert [(runtime.pos_min(seq), runtime.pos_max(seq)) for seq in (1, 2)] == [(0, N_CTX - 17), (10, 19)]
    assert_free(runtime, 16)


def test_cells_are_free_once_their_last_owner_lets_go(runtime):
    fill(runtime, N_CTX - 16)
    runtime.seq_cp(0, 1, 0, 10)
    runtime.seq_rm(0)
    assert (runtime.pos_max(0), runtime.pos_max(1)) == (-1, 9)
    assert_free(runtime, N_CTX - 10)


def test_a_range_can_be_removed_and_the_others_keep_it(runtime):
    fill(runtime, 30)
    runtime.seq_cp(0, 1)
    kept = runtime.state_get(1)
    runtime.seq_rm(0, 20, -1)
    runtime.seq_rm(0, 0, 5)
    assert (runtime.pos_min(0), runtime.pos_max(0)) == (5, 19)
    np.testing.assert_array_equal(kept, runtime.state_get(1))


def test_what_two_sequences_share_they_continue_apart(runtime, words):
    expected = runtime.decode(words, 0, 0, logits=True, split=(100,))
    runtime.clear()
    runtime.decode(words[:100], 0, 0)
    runtime.seq_cp(0, 1)
    assert divergence(expected, runtime.decode(words[100:], 100, 1, logits=True)).bit_identical
    runtime.seq_rm(1)
    assert divergence(expected, runtime.decode(words[100:], 100, 0, logits=True)).bit_identical


@pytest.mark.parametrize("seq", [-1, OPTIONS.n_seq_max, 10**6])
def test_sequences_that_do_not_exist_are_refused_by_every_operation(runtime, seq):
    fill(runtime, 4)
    blob = runtime.state_get(0)
    for call in (lambda: runtime.seq_rm(seq), lambda: runtime.seq_cp(0, seq), lambda: runtime.seq_cp(seq, 0),
                 lambda: runtime.seq_add(seq, 0, -1, 1), lambda: runtime.state_get(seq),
                 lambda: runtime.state_set(seq, blob), lambda: runtime.decode(TOKENS[:1], 0, seq),
                 lambda: runtime.pos_min(seq), lambda: runtime.pos_max(seq)):
        with pytest.raises(RuntimeFailure, match=f"sequence {seq} does not exist; n_seq_max is 4"):
            call()
    np.testing.assert_array_equal(blob, runtime.state_get(0))


def test_without_a_unified_cache_copies_are_refused_before_llama_cpp_aborts(smollm2):
    with Runtime(smollm2, dataclasses.replace(OPTIONS, kv_unified=False)) as streams:
        streams.decode(TOKENS[:6], 0, 0)
        for begin, end in ((2, 4), (-1, -1)):
            with pytest.raises(RuntimeFailure, match="kv_unified=true"):
                streams.seq_cp(0, 1, begin, end)
        assert (streams.pos_max(0), streams.pos_max(1)) == (5, -1)


def test_this_model_can_shift_and_its_positions_follow(runtime):
    assert runtime.can_shift()
    fill(runtime, 10)
    runtime.seq_add(0, 4, -1, 7)
    runtime.decode(TOKENS[:1], 17, 0)
    assert (runtime.pos_min(0), runtime.pos_max(0)) == (0, 17)


def test_a_saved_state_continues_like_the_original(runtime):
    runtime.decode(TOKENS, 0, 0)
    blob = runtime.state_get(0)
    expected = runtime.decode(TOKENS[:7], len(TOKENS), 0, logits=True)
    runtime.clear()
    runtime.state_set(3, blob)
    assert (runtime.pos_min(3), runtime.pos_max(3)) == (0, len(TOKENS) - 1)
    runtime.seq_cp(3, 0)
    runtime.seq_rm(3)
    measured = runtime.decode(TOKENS[:7], len(TOKENS), 0, logits=True)
    assert divergence(expected, measured).bit_identical


def test_a_restore_replaces_what_the_sequence_held(runtime):
    fill(runtime, 10, 0)
    blob = runtime.state_get(0)
    fill(runtime, 25, 1)
    runtime.state_set(1, blob)
    assert (runtime.pos_min(1), runtime.pos_max(1)) == (0, 9)


def test_after_a_restore_logits_are_right_only_once_a_token_is_decoded(runtime, words):
    """Logits are the context's, not the sequence's: until the next decode they are the last one's."""
    runtime.decode(words[:-1], 0, 0)
    expected = runtime.decode(words[-1:], len(words) - 1, 0, logits=True)
    blob = runtime.state_get(0)
    runtime.clear()
    other = runtime.decode(TOKENS[:40], 0, 1, logits=True)
    runtime.state_set(0, blob)
    assert divergence(other, runtime.logits()).bit_identical
    assert divergence(expected, runtime.logits()).kl_nats > 0.5, "stale logits must not pass for the restored ones"
    runtime.seq_rm(0, len(words) - 1, -1)
    again = runtime.decode(words[-1:], len(words) - 1, 0, logits=True)
    found = divergence(expected, again)
    assert found.top1 and found.kl_nats < 0.01, "equal up to the order of cells"


def test_logits_are_refused_when_the_decode_asked_for_none(runtime):
    runtime.decode(TOKENS[:4], 0, 0)
    with pytest.raises(RuntimeFailure, match="asked for none"):
        runtime.logits()


def test_a_restore_without_room_is_an_error_and_leaves_no_sequence(runtime):
    runtime.decode(np.tile(TOKENS, 3)[:150], 0, 0)
    blob = runtime.state_get(0)
    with pytest.raises(RuntimeFailure, match="not restored"):
        runtime.state_set(1, blob)
    assert runtime.pos_max(1) == -1 and runtime.pos_max(0) == 149


def test_a_failed_restore_empties_only_its_sequence(runtime):
    fill(runtime, 150, 0)
    blob = runtime.state_get(0)
    fill(runtime, 5, 1)
    with pytest.raises(RuntimeFailure, match="is there room in 256 cells"):
        runtime.state_set(1, blob)
    assert (runtime.pos_max(1), runtime.pos_max(0)) == (-1, 149)
    np.testing.assert_array_equal(blob, runtime.state_get(0))


def test_a_restore_that_reports_success_without_effect_is_an_error(runtime, monkeypatch):
    fill(runtime, 5)
    blob = runtime.state_get(0)

    class SuccessWithoutEffect:
        """A context whose restore returns all bytes as read and restores nothing."""

        def state_set(self, seq, address, size):
            return size

    monkeypatch.setattr(runtime, "_context", SuccessWithoutEffect())
    with pytest.raises(RuntimeFailure, match="sequence 1 was not restored"):
        runtime.state_set(1, blob)


def test_a_state_of_the_other_v_layout_is_refused(smollm2, runtime):
    with Runtime(smollm2, dataclasses.replace(OPTIONS, flash_attention=False)) as transposed:
        fill(transposed, 4)
        blob = transposed.state_get(0)
    with pytest.raises(RuntimeFailure, match="not restored"):
        runtime.state_set(1, blob)
    assert runtime.pos_max(1) == -1


N_CELLS = 4
# Magic, stream and cell counts; each cell's sequence count; V layout, layer count, first layer's type and row bytes.
# Not here: sequence ids, which a restore ignores, and positions, of which any value could be meant.
STRUCTURE = [*range(4), *range(8, 16), *(16 + 12 * cell + byte for cell in range(N_CELLS) for byte in range(4, 8)),
             *range(16 + 12 * N_CELLS, 16 + 12 * N_CELLS + 20)]


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_state_with_any_damaged_structure_byte_is_refused(runtime, mask):
    fill(runtime, N_CELLS)
    blob = runtime.state_get(0)
    for at in STRUCTURE:
        damaged = blob.copy()
        damaged[at] ^= mask
        with pytest.raises(RuntimeFailure, match="kv state|not restored"):
            runtime.state_set(1, damaged)
        assert runtime.pos_max(1) == -1, f"byte {at}"
    np.testing.assert_array_equal(blob, runtime.state_get(0))


@pytest.mark.parametrize("damage", ["cut", "type", "stride"])
def test_a_damaged_state_is_refused(runtime, damage):
    runtime.decode(TOKENS[:4], 0, 0)
    blob = runtime.state_get(0)
    if damage == "cut":
        blob = blob[:-1].copy()
    elif damage == "type":
        blob = blob.astype(np.int8)
    else:
        blob = np.repeat(blob, 2)[::2]
    with pytest.raises(RuntimeFailure, match="kv state|uint8"):
        runtime.state_set(1, blob)
    assert runtime.pos_max(1) == -1


def test_a_blob_that_is_no_state_leaves_the_sequence_and_one_of_negative_positions_is_none(runtime):
    fill(runtime, 4)
    before = runtime.state_get(0)
    negative = before.copy()
    negative[16:20] = 0xFF
    for blob, message in ((before[:-1].copy(), "cut off"), (negative, "holds position -1")):
        with pytest.raises(RuntimeFailure, match=message):
            runtime.state_set(0, blob)
        np.testing.assert_array_equal(before, runtime.state_get(0))


def test_an_empty_state_empties_the_sequence(runtime):
    empty = runtime.state_get(2)
    fill(runtime, 4)
    runtime.state_set(0, empty)
    assert runtime.pos_max(0) == -1


def test_files_that_are_no_model_are_named(tmp_path):
    with pytest.raises(RuntimeFailure, match="is not a file"):
        Model(tmp_path / "missing.gguf")
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(RuntimeFailure, match="not a GGUF file"):
        Model(tmp_path / "text.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(RuntimeFailure, match="cannot load"):
        Model(tmp_path / "broken.gguf")


@pytest.mark.parametrize("change, message", [({"n_seq_max": 1}, "n_seq_max"), ({"kv_type_k": "f17"}, "kv_type_k")])
def test_impossible_options_are_refused(smollm2, change, message):
    with pytest.raises(RuntimeFailure, match=message):
        Runtime(smollm2, ContextOptions(**({"n_ctx": 256} | change)))


@pytest.mark.parametrize("close", [True, False], ids=["closed", "left open"])
def test_llama_cpp_writes_to_its_log_and_not_to_the_terminal(smollm2, tmp_path, close):
    code = ("import sys\nimport numpy as np\nfrom nexus.runtime import ContextOptions, Model, Runtime, log_to\n"
            "log_to(sys.argv[2])\nmodel = Model(sys.argv[1], 'ab' * 32)\n"
            "runtime = Runtime(model, ContextOptions(n_ctx=256))\n"
            "runtime.decode(np.array([5, 6], dtype=np.int32), 0, 0)\n")
    if close:
        code += "runtime.close()\nmodel.close()\n"
    log = tmp_path / "folder" / "llama.log"
    done = subprocess.run([sys.executable, "-c", code, str(smollm2.path), str(log)], cwd=ROOT, capture_output=True,
                          text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "llama" in log.read_text(errors="replace")


# --- decode_scattered


def scattered(runtime, tokens, positions, seqs):
    runtime.decode_scattered(*(np.asarray(array, dtype=np.int32) for array in (tokens, positions, seqs)))


def two_sequences(runtime, words):
    """Two contexts of 40 and 25 tokens that share their first 20."""
    runtime.clear()
    runtime.decode(words[:20], 0, 0)
    runtime.seq_cp(0, 1)
    runtime.decode(words[20:40], 20, 0)
    runtime.decode(words[60:65], 20, 1)


def test_scattered_tokens_equal_those_of_separate_calls(runtime, words):
    logits = {}
    for way in ("separate", "scattered", "swapped"):
        two_sequences(runtime, words)
        if way == "scattered":
            scattered(runtime, words[[70, 80]], [40, 25], [0, 1])
        else:
            first, second = words[[70]], words[[80]]
            if way == "swapped":
                first, second = second, first
            runtime.decode(first, 40, 0)
            runtime.decode(second, 25, 1)
        assert (runtime.pos_max(0), runtime.pos_max(1)) == (40, 25)
        logits[way] = [runtime.decode(words[90:91], 41, 0, logits=True), runtime.decode(words[90:91], 26, 1, logits=True)]
    for separate, together, swapped in zip(*logits.values()):
        found = divergence(separate, together)
        assert found.top1 and found.kl_nats < 0.01
        assert divergence(separate, swapped).kl_nats > 2 * found.kl_nats, "other tokens would be noticed"


def test_a_scattered_run_of_one_sequence_is_an_ordinary_decode(runtime, words):
    expected = runtime.decode(words[:30], 0, 0, logits=True, split=(20, 9))
    runtime.clear()
    runtime.decode(words[:20], 0, 0)
    scattered(runtime, words[20:29], range(20, 29), [0] * 9)
    found = divergence(expected, runtime.decode(words[29:30], 29, 0, logits=True))
    assert found.top1 and found.kl_nats < 0.01


def test_scattered_arrays_of_another_type_and_stride_are_read_as_ids(runtime, words):
    two_sequences(runtime, words)
    runtime.decode_scattered(words[[70, 70, 80]][::2].astype(np.int64), np.array([40, 25]), np.array([0, 1], np.uint8))
    assert (runtime.pos_max(0), runtime.pos_max(1)) == (40, 25)


@pytest.mark.parametrize(("n_tokens", "n_positions", "n_seqs"), [
    (2, 1, 2), (2, 2, 1), (1, 2, 2), (OPTIONS.n_batch + 1,) * 3])
def test_scattered_arrays_of_other_lengths_or_beyond_a_batch_are_refused(runtime, n_tokens, n_positions, n_seqs):
    with pytest.raises(RuntimeFailure, match=f"{n_tokens} tokens, {n_positions} positions and {n_seqs} sequences; "
                                             "give as many of each, at most n_batch = 64"):
        scattered(runtime, TOKENS[:n_tokens], range(n_positions), [0] * n_seqs)
    assert runtime.pos_max(0) == -1


def test_a_whole_batch_of_scattered_tokens_is_taken(runtime):
    scattered(runtime, TOKENS[:OPTIONS.n_batch], range(OPTIONS.n_batch), [0] * OPTIONS.n_batch)
    assert runtime.pos_max(0) == OPTIONS.n_batch - 1


@pytest.fixture
def untouched(runtime, words, monkeypatch):
    """Sequences 0 and 1 of 40 and 25 tokens, 2 empty: unchanged afterwards, llama.cpp was asked to decode nothing."""
    two_sequences(runtime, words)
    before = [runtime.state_get(seq) for seq in range(OPTIONS.n_seq_max)]

    class Reached:
        def __init__(self, context):
            self.context = context

        def __getattr__(self, name):
            assert "decode" not in name, "llama.cpp was asked"
            return getattr(self.context, name)

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "_context", Reached(runtime.context))
        yield runtime
    for seq, blob in enumerate(before):
        np.testing.assert_array_equal(blob, runtime.state_get(seq))


@pytest.mark.parametrize(("tokens", "positions", "seqs", "message"), [
    ([], [], [], "no tokens"), ([5], [], [0], "no positions"), ([5], [40], [], "no sequences"),
    ([10**7], [40], [0], "token ids"), ([5, -1], [40, 41], [0, 0], "tokens hold -1 … 5"),
    ([2**32 + 5], [40], [0], "token ids"), ([5], [40], [2**32], "sequence 4294967296 does not exist"),
    ([5], [40], [OPTIONS.n_seq_max], "sequence 4 does not exist; n_seq_max is 4"),
    ([5, 6], [40, 0], [0, -1], "sequence -1"), ([5], [-1], [2], "position -1 is out of range"),
    ([5], [2**31], [2], "out of range"), ([5], [39], [0], "which ends at 39"),
    ([5], [41], [0], "position 41 does not continue sequence 0"),
    ([5, 6], [40, 40], [0, 1], "does not continue sequence 1"),
    ([5, 6], [40, 40], [0, 0], "position 40 follows 40 in sequence 0"), ([5, 6], [41, 40], [0, 0], "40 follows 41"),
    ([5, 6, 7], [40, 0, 42], [0, 2, 0], "42 follows 40 in sequence 0"), ([5, 6], [0, 2], [2, 2], "2 follows 0"),
    ([5, 6], np.array([0, 2**63 + 1], np.uint64), [2, 2], "follows 0"), ([5.0], [40], [0], "tokens are float64"),
    ([5], [40.0], [0], "positions are float64"), ([5], [40], [False], "sequences are bool"),
    ([[5]], [40], [0], "tokens have 2 dimensions"), ([5], [[40]], [0], "positions have 2"),
    ([5], [40], 0, "sequences have 0"),
])
def test_scattered_input_is_refused_before_llama_cpp_sees_it(untouched, tokens, positions, seqs, message):
    with pytest.raises(RuntimeFailure, match=f"decode_scattered: .*{message}|^{message}"):
        untouched.decode_scattered(tokens, positions, seqs)


def test_scattered_tokens_of_mixed_sequences_continue_each_or_begin_it_anywhere(runtime, words):
    two_sequences(runtime, words)
    scattered(runtime, words[70:76], [25, 40, 7, 26, 41, 8], [1, 0, 2, 1, 0, 2])
    assert [(runtime.pos_min(seq), runtime.pos_max(seq)) for seq in (0, 1, 2)] == [(0, 41), (0, 26), (7, 8)]


def test_scattered_decodes_apply_a_pending_shift(runtime):
    fill(runtime, 10)
    runtime.seq_add(0, 4, -1, 7)
    scattered(runtime, [5], [17], [0])
    assert len(runtime.state_get(0)), "a pending shift would be refused"


def test_scattered_tokens_without_room_are_an_error_and_change_nothing(runtime):
    fill(runtime, N_CTX - 1)
    with pytest.raises(RuntimeFailure, match="is there room in 256 cells"):
        scattered(runtime, TOKENS[:2], [0, 0], [1, 2])
    assert [runtime.pos_max(seq) for seq in (0, 1, 2)] == [N_CTX - 2, -1, -1]

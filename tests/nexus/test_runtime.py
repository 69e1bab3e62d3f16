"""The runtime on SmolLM2: what it refuses, and what it leaves behind."""
from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from nexus.config import ROOT
from nexus.fidelity import divergence
from nexus.runtime import ContextOptions, Model, Runtime, RuntimeFailure

pytestmark = pytest.mark.integration
TOKENS = np.random.default_rng(1).integers(100, 20000, 96).astype(np.int32)


@pytest.fixture(scope="module")
def runtime(smollm2):
    with Runtime(smollm2, ContextOptions(n_ctx=256, n_batch=64, n_seq_max=4)) as runtime:
        yield runtime


@pytest.fixture(autouse=True)
def empty(runtime):
    runtime.clear()


@pytest.mark.parametrize("text", ["plain words", "größer, 工具を選ぶ 🛠️", "<|im_start|>user\nhi<|im_end|>\n"])
def test_tokens_give_the_text_back(smollm2, text):
    assert smollm2.detokenize(smollm2.tokenize(text)) == text


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


@pytest.mark.parametrize("tokens, pos, seq, message", [
    (TOKENS[:0], 0, 0, "no tokens"), ([-1], 0, 0, "token ids"), ([10**7], 0, 0, "token ids"),
    (TOKENS[:3], 0, 9, "sequence 9"), (TOKENS[:3], 0, -1, "sequence -1"), (TOKENS[:3], 7, 0, "does not continue"),
    (TOKENS[:3], 3, 0, "does not continue"),
])
def test_refused_input_changes_nothing(runtime, tokens, pos, seq, message):
    runtime.decode(TOKENS[:5], 0, 0)
    before = runtime.state_get(0)
    with pytest.raises(RuntimeFailure, match=message):
        runtime.decode(np.asarray(tokens, dtype=np.int32), pos, seq)
    np.testing.assert_array_equal(before, runtime.state_get(0))


def test_a_decode_that_does_not_fit_leaves_the_sequence_as_it_was(runtime):
    runtime.decode(np.tile(TOKENS, 3)[:200], 0, 0)
    before = runtime.state_get(0)
    with pytest.raises(RuntimeFailure, match="no room"):
        runtime.decode(TOKENS, 200, 0)
    np.testing.assert_array_equal(before, runtime.state_get(0))


def test_copied_sequences_share_cells(runtime):
    runtime.decode(np.tile(TOKENS, 3)[:200], 0, 0)
    runtime.seq_cp(0, 1)
    runtime.seq_cp(0, 2)
    runtime.decode(TOKENS[:50], 200, 1)
    assert [runtime.pos_max(seq) for seq in (0, 1, 2)] == [199, 249, 199]
    runtime.seq_rm(0)
    assert runtime.pos_max(0) == -1 and runtime.pos_max(2) == 199


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
    with pytest.raises(Exception, match="kv state|uint8"):
        runtime.state_set(1, blob)
    assert runtime.pos_max(1) == -1


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


def test_llama_cpp_writes_to_its_log_and_not_to_the_terminal(smollm2, tmp_path):
    code = ("import sys\nfrom nexus.runtime import ContextOptions, Model, Runtime, log_to\n"
            "log_to(sys.argv[2])\nmodel = Model(sys.argv[1], 'ab' * 32)\n"
            "Runtime(model, ContextOptions(n_ctx=256)).close()\nmodel.close()\n")
    log = tmp_path / "folder" / "llama.log"
    done = subprocess.run([sys.executable, "-c", code, str(smollm2.path), str(log)], cwd=ROOT, capture_output=True,
                          text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "llama" in log.read_text(errors="replace")

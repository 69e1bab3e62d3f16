import dataclasses
import hashlib

import numpy as np
import pytest

from nexus.rope import Rope, RopeError, rope_of


def meta_of(**values):
    return lambda key: values.get(key.split(".", 1)[1].replace(".", "_"), "")


def test_frequencies_follow_the_definition():
    rope = rope_of(meta_of(rope_freq_base="1000000.0"), "qwen2", 2, 64)
    assert rope.layout == "neox" and rope.n_rot == 64 and rope.scaling == "none"
    assert rope.frequencies[0] == 1.0
    assert rope.frequencies[31] == pytest.approx(1e6 ** (-62 / 64))


def test_local_layers_have_their_own_base_from_the_file_or_the_architecture_and_keep_it():
    meta = meta_of(rope_freq_base="1000000.0", rope_scaling_type="linear", rope_scaling_factor="8")
    gemma = rope_of(meta, "gemma3", 2, 256, base=5e5, freq_scale=0.5, n_swa=512)
    assert (gemma.base, gemma.base_swa, gemma.freq_scale_swa) == (5e5, 1e4, 1.0)
    np.testing.assert_allclose(gemma.frequencies_swa, 1e4 ** (-2 * np.arange(128) / 256))
    assert rope_of(meta_of(rope_freq_base_swa="20000.0"), "gemma3", 2, 256, n_swa=512).base_swa == 2e4
    other = rope_of(meta, "gemma2", 2, 256, base=5e5, freq_scale=0.5, n_swa=512)
    assert (other.base_swa, other.freq_scale_swa) == (1e6, 0.125)


def test_one_cache_models_keep_their_hash_and_two_cache_models_hash_both_bases():
    plain = rope_of(meta_of(rope_freq_base="1000000.0"), "qwen2", 2, 64)
    digest = hashlib.sha256(plain.frequencies.tobytes()).digest()
    assert plain.base_swa is None and plain.frequency_hash == int.from_bytes(digest[:8], "little")
    np.testing.assert_array_equal(plain.frequencies_swa, plain.frequencies)
    hashes = {dataclasses.replace(plain, base_swa=base).frequency_hash for base in (None, 1e4, 2e4, 1e6)}
    assert len(hashes) == 4


def test_linear_scaling_from_the_file_and_from_the_context():
    scaled = rope_of(meta_of(rope_scaling_type="linear", rope_scaling_factor="4"), "llama", 0, 64)
    assert (scaled.scaling, scaled.freq_scale) == ("linear", 0.25)
    assert scaled.frequencies[0] == 0.25
    override = rope_of(meta_of(), "llama", 0, 64, freq_scale=0.5)
    assert (override.scaling, override.freq_scale) == ("linear", 0.5)
    assert override.frequency_hash != rope_of(meta_of(), "llama", 0, 64).frequency_hash


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    rope = Rope("neox", 1e6, 128, "yarn", 0.25, n_ctx_orig=32768)
    plain = Rope("neox", 1e6, 128, "none", 1.0)
    ratio = rope.frequencies / plain.frequencies
    assert ratio[0] == pytest.approx(1.0) and ratio[-1] == pytest.approx(0.25)
    assert np.all(np.diff(ratio) <= 1e-12)


@pytest.mark.parametrize("code, name", [(8, "M-RoPE"), (40, "interleaved"), (-1, "no RoPE"), (99, "type 99")])
def test_other_kinds_are_refused_by_name(code, name):
    with pytest.raises(RopeError, match=name):
        rope_of(meta_of(), "qwen2vl", code, 64)


def test_longrope_is_refused():
    with pytest.raises(RopeError, match="longrope"):
        rope_of(meta_of(rope_scaling_type="longrope"), "phi3", 2, 96)

"""Toys: tiny GGUF files with the architecture of a model and random weights. None of them says anything sensible.

They stand for their architecture where it decides what can be spliced: in the table of layouts, and in the proof that
soft-capped attention over transposed V survives a splice. No fidelity of a real model follows from them.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

WIDTH, N_HEAD, HEAD_DIM, N_FF = 64, 2, 32, 96
TOKENS = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))
GEMMA2_LAYERS, GEMMA2_WINDOW = 4, 16
MAMBA_INNER, MAMBA_STATE, MAMBA_CONV, MAMBA_RANK = 2 * WIDTH, 8, 4, 4

# It reports every file that it writes.
logging.getLogger("gguf").setLevel(logging.WARNING)


class _Toy:
    """A GGUF file in the making: a vocabulary of bytes, and tensors drawn one after the other from one seed."""

    def __init__(self, path: Path, arch: str, n_layer: int, seed: int):
        self.rng = np.random.default_rng(seed)
        self.writer = writer = gguf.GGUFWriter(path, arch)
        writer.add_context_length(4096)
        writer.add_embedding_length(WIDTH)
        writer.add_block_count(n_layer)
        writer.add_layer_norm_rms_eps(1e-6)
        kind = gguf.TokenType
        writer.add_tokenizer_model("llama")
        writer.add_token_list(TOKENS)
        writer.add_token_scores([0.0] * len(TOKENS))
        writer.add_token_types([kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    def attention(self) -> None:
        """Declare the heads: one of keys and values for all of queries."""
        self.writer.add_feed_forward_length(N_FF)
        self.writer.add_head_count(N_HEAD)
        self.writer.add_head_count_kv(1)

    def add(self, name: str, *shape: int) -> None:
        """A tensor of random weights, outermost dimension first."""
        # Strong enough that attention is far from even and soft-capping bends it.
        values = (self.rng.normal(0, 2 / np.sqrt(shape[-1]), shape) if len(shape) == 2
                  else self.rng.uniform(0.5, 1.5, shape))
        self.writer.add_tensor(name, values.astype(np.float32))

    def add_layer(self, layer: int, norms: tuple[str, ...], biases: tuple[str, ...] = ()) -> None:
        """Norms, attention and a gated feed-forward network."""
        for norm in norms:
            self.add(f"blk.{layer}.{norm}.weight", WIDTH)
        for name, rows, cols in (("attn_q", N_HEAD * HEAD_DIM, WIDTH), ("attn_k", HEAD_DIM, WIDTH),
                                 ("attn_v", HEAD_DIM, WIDTH), ("attn_output", WIDTH, N_HEAD * HEAD_DIM),
                                 ("ffn_gate", N_FF, WIDTH), ("ffn_up", N_FF, WIDTH), ("ffn_down", WIDTH, N_FF)):
            self.add(f"blk.{layer}.{name}.weight", rows, cols)
            if name in biases:
                self.add(f"blk.{layer}.{name}.bias", rows)

    def write(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def write_toy_gemma2(path: Path, seed: int = 0) -> Path:
    """A toy of Gemma 2: soft-capped attention, layers that alternate between a window of 16 tokens and all."""
    toy = _Toy(path, "gemma2", GEMMA2_LAYERS, seed)
    toy.attention()
    toy.writer.add_key_length(HEAD_DIM)
    toy.writer.add_value_length(HEAD_DIM)
    toy.writer.add_attn_logit_softcapping(50.0)
    toy.writer.add_final_logit_softcapping(30.0)
    toy.writer.add_sliding_window(GEMMA2_WINDOW)
    toy.add("token_embd.weight", len(TOKENS), WIDTH)
    toy.add("output_norm.weight", WIDTH)
    for layer in range(GEMMA2_LAYERS):
        toy.add_layer(layer, ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"))
    toy.write()
    return path


def write_toy_mamba(path: Path, seed: int = 0) -> Path:
    """A toy of Mamba: recurrent state instead of keys and values."""
    toy = _Toy(path, "mamba", 2, seed)
    toy.writer.add_feed_forward_length(0)
    toy.writer.add_head_count(0)
    toy.writer.add_ssm_conv_kernel(MAMBA_CONV)
    toy.writer.add_ssm_inner_size(MAMBA_INNER)
    toy.writer.add_ssm_state_size(MAMBA_STATE)
    toy.writer.add_ssm_time_step_rank(MAMBA_RANK)
    toy.add("token_embd.weight", len(TOKENS), WIDTH)
    toy.add("output_norm.weight", WIDTH)
    for layer in range(2):
        for name, *shape in (("attn_norm.weight", WIDTH), ("ssm_in.weight", 2 * MAMBA_INNER, WIDTH),
                             ("ssm_conv1d.weight", MAMBA_INNER, MAMBA_CONV), ("ssm_conv1d.bias", MAMBA_INNER),
                             ("ssm_x.weight", MAMBA_RANK + 2 * MAMBA_STATE, MAMBA_INNER),
                             ("ssm_dt.weight", MAMBA_INNER, MAMBA_RANK), ("ssm_dt.bias", MAMBA_INNER),
                             ("ssm_d", MAMBA_INNER), ("ssm_out.weight", WIDTH, MAMBA_INNER)):
            toy.add(f"blk.{layer}.{name}", *shape)
        # State is scaled by exp(a·Δ) per token, so that a positive entry would let it grow without bound.
        decay = -toy.rng.uniform(0.5, 1.5, (MAMBA_INNER, MAMBA_STATE))
        toy.writer.add_tensor(f"blk.{layer}.ssm_a", decay.astype(np.float32))
    toy.write()
    return path


def write_toy_qwen2vl(path: Path, seed: int = 0) -> Path:
    """A toy of Qwen2-VL: M-RoPE, whose positions have three dimensions."""
    toy = _Toy(path, "qwen2vl", 2, seed)
    toy.attention()
    toy.writer.add_rope_dimension_sections([4, 6, 6, 0])
    toy.add("token_embd.weight", len(TOKENS), WIDTH)
    toy.add("output_norm.weight", WIDTH)
    for layer in range(2):
        toy.add_layer(layer, ("attn_norm", "ffn_norm"), biases=("attn_q", "attn_k", "attn_v"))
    toy.write()
    return path


TOYS: dict[str, Callable[[Path], Path]] = {
    "toy-gemma2": write_toy_gemma2, "toy-mamba": write_toy_mamba, "toy-qwen2vl": write_toy_qwen2vl,
}

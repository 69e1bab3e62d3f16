"""A toy: a Gemma-2-shaped GGUF of random weights, for its soft-capping and short window. It says nothing sensible."""
from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

N_LAYER, WIDTH, N_HEAD, HEAD_DIM, N_FF, WINDOW = 4, 64, 2, 32, 96, 16


def write_toy_gemma2(path: Path, seed: int = 0) -> Path:
    """Writes the file: layers alternate between a window of 16 tokens and all, one KV head, 259 byte tokens."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "gemma2")
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(N_LAYER)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_attn_logit_softcapping(50.0)
    writer.add_final_logit_softcapping(30.0)
    writer.add_sliding_window(WINDOW)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kind = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def add(name: str, *shape: int) -> None:
        # Strong enough that attention is far from even and soft-capping bends it.
        values = rng.normal(0, 2 / np.sqrt(shape[-1]), shape) if len(shape) == 2 else rng.uniform(0.5, 1.5, shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    add("token_embd", len(tokens), WIDTH)
    add("output_norm", WIDTH)
    for layer in range(N_LAYER):
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            add(f"blk.{layer}.{norm}", WIDTH)
        for name, rows, cols in (("attn_q", N_HEAD * HEAD_DIM, WIDTH), ("attn_k", HEAD_DIM, WIDTH),
                                 ("attn_v", HEAD_DIM, WIDTH), ("attn_output", WIDTH, N_HEAD * HEAD_DIM),
                                 ("ffn_gate", N_FF, WIDTH), ("ffn_up", N_FF, WIDTH), ("ffn_down", WIDTH, N_FF)):
            add(f"blk.{layer}.{name}", rows, cols)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""What a model file says about rotary position embeddings, and the per-pair frequencies that follow from it."""
from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

LAYOUTS = {0: "normal", 2: "neox"}
LAYOUT_CODES = {name: code for code, name in ((0, "normal"), (1, "neox"))}
SCALING_CODES = {"none": 0, "linear": 1, "yarn": 2}
# llama.cpp's values for rope types that a one-dimensional delta cannot describe.
OTHER_TYPES = {-1: "no RoPE", 8: "M-RoPE", 24: "vision RoPE", 40: "interleaved M-RoPE"}

# (base, freq_scale) of sliding-window layers that llama.cpp's code sets for an architecture, its rope_freq_*_train_swa.
LOCAL_ROPE = {"gemma3": (10000.0, 1.0)}


class RopeError(ValueError):
    """The model's positions cannot be described here; the message names the field and its value."""


@dataclass(frozen=True)
class Rope:
    """Rotation of pair i at position m is m·θᵢ, θᵢ = base^(−2i/n_rot) before scaling (Su et al., RoFormer, eq. 15)."""

    layout: str
    """"normal" rotates dims (2i, 2i+1), "neox" rotates (i, i + n_rot/2)."""
    base: float
    n_rot: int
    """Dims of each head that rotate; the rest carry no position."""
    scaling: str
    """"none", "linear" or "yarn"."""
    freq_scale: float
    """Factor on positions; 1 without scaling, 1/s for a context stretched s times."""
    n_ctx_orig: int = 0
    """Context length before YaRN stretching, tokens."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    base_swa: float | None = None
    """Base of sliding-window layers; None without such layers."""
    freq_scale_swa: float = 1.0
    """`freq_scale` of sliding-window layers."""

    @property
    def frequencies(self) -> np.ndarray:
        """θᵢ in radians per position, float64[n_rot/2], with linear or YaRN scaling applied (Peng et al., YaRN, eq. 23)."""
        return self._frequencies(self.base, self.freq_scale)

    @property
    def frequencies_swa(self) -> np.ndarray:
        """`frequencies` of the sliding-window layers, float64[n_rot/2]; the same where the model has none."""
        if self.base_swa is None:
            return self.frequencies
        return self._frequencies(self.base_swa, self.freq_scale_swa)

    def _frequencies(self, base: float, freq_scale: float) -> np.ndarray:
        pairs = np.arange(self.n_rot // 2, dtype=np.float64)
        theta = base ** (-2.0 * pairs / self.n_rot)
        if self.scaling != "yarn":
            return theta * freq_scale

        def correction_dim(n_turns: float) -> float:
            return self.n_rot * np.log(self.n_ctx_orig / (n_turns * 2 * np.pi)) / (2 * np.log(base))

        low = max(0.0, np.floor(correction_dim(self.beta_fast)))
        high = min(self.n_rot - 1.0, np.ceil(correction_dim(self.beta_slow)))
        extrapolated = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
        return theta * freq_scale * (1 - extrapolated) + theta * extrapolated

    @property
    def frequency_hash(self) -> int:
        """First 8 bytes of the SHA-256 of the frequency table, global then local layers', as an unsigned integer."""
        table = self.frequencies
        if self.base_swa is not None:
            table = np.concatenate([table, self.frequencies_swa])
        return int.from_bytes(hashlib.sha256(table.astype("<f8").tobytes()).digest()[:8], "little")


def rope_of(meta: Callable[[str], str], arch: str, rope_type: int, head_dim: int,
            base: float = 0.0, freq_scale: float = 0.0, n_swa: int = 0) -> Rope:
    """Rope of a model from its GGUF metadata; `base` and `freq_scale` override it as llama.cpp's context options do.

    `n_swa` > 0 describes sliding-window layers too, which those options leave alone. What neither the file nor
    LOCAL_ROPE tells of them is taken to be as in the global layers, which most architectures do.
    Raises RopeError for kinds of RoPE whose keys one shift cannot move (M-RoPE, LongRoPE, none at all).
    """
    if rope_type not in LAYOUTS:
        raise RopeError(f"rope type: the model uses {OTHER_TYPES.get(rope_type, f'type {rope_type}')}; "
                        "only one-dimensional RoPE can be re-anchored")
    scaling = meta(f"{arch}.rope.scaling.type") or "linear"
    factor = float(meta(f"{arch}.rope.scaling.factor") or meta(f"{arch}.rope.scale_linear") or 0)
    trained_scale = 1.0 / factor if factor else 1.0
    scale = freq_scale or trained_scale
    if scaling == "linear" and scale == 1.0:
        scaling = "none"
    if scaling not in SCALING_CODES:
        raise RopeError(f"{arch}.rope.scaling.type is {scaling!r}; only none, linear and yarn can be re-anchored")
    trained_base = float(meta(f"{arch}.rope.freq_base") or 10000.0)
    local_base, local_scale = LOCAL_ROPE.get(arch, (trained_base, trained_scale))
    return Rope(
        layout=LAYOUTS[rope_type],
        base=base or trained_base,
        n_rot=int(meta(f"{arch}.rope.dimension_count") or head_dim),
        scaling=scaling,
        freq_scale=scale,
        n_ctx_orig=int(meta(f"{arch}.rope.scaling.original_context_length") or meta(f"{arch}.context_length") or 0),
        beta_fast=float(meta(f"{arch}.rope.scaling.yarn_beta_fast") or 32.0),
        beta_slow=float(meta(f"{arch}.rope.scaling.yarn_beta_slow") or 1.0),
        base_swa=float(meta(f"{arch}.rope.freq_base_swa") or local_base) if n_swa > 0 else None,
        freq_scale_swa=local_scale if n_swa > 0 else 1.0,
    )

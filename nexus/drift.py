"""How far a spliced block's keys lie from a full prefill's, per attention head, and what could foretell it without one.

Arrays are per (layer, KV head), layers in the order of the saved state. Keys and values are in the model's own units.
A new predictor is one function of `Known` and its line in PREDICTORS.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata, spearmanr

# Tokens at the start of a text that attract attention whatever they say (Xiao et al., StreamingLLM).
SINK_TOKENS = 4


def heads(rows: np.ndarray, n_head: int) -> np.ndarray:
    """Rows of a cache by head: float32[n_layers, n_tokens, n_head, head_dim] of [n_layers, n_tokens, n_head · head_dim].

    Raises ValueError for rows that do not divide into `n_head` heads.
    """
    if rows.ndim != 3 or n_head < 1 or rows.shape[2] % n_head:
        raise ValueError(f"rows of shape {rows.shape} are not [n_layers, n_tokens, width] with {n_head} heads in a width")
    return rows.reshape(*rows.shape[:2], n_head, -1).astype(np.float32)


def key_drift(true_keys: np.ndarray, spliced_keys: np.ndarray, n_head: int) -> np.ndarray:
    """Drift per (layer, KV head), float64[n_layers, n_head], in units of a key's elements.

    drift[l, h] = mean over the block's tokens t of ‖K_prefill[l, t, h] − K_spliced[l, t, h]‖₂: the norm is over the
    head's dims, and both keys are rotated at the same positions, so that the rotation drops out of the norm. Zero
    means equal keys. Both sides are float16[n_layers, n_tokens, n_head · head_dim]. Raises ValueError for two shapes
    and for no tokens.
    """
    if true_keys.shape != spliced_keys.shape or 0 in true_keys.shape:
        raise ValueError(f"keys of shapes {true_keys.shape} and {spliced_keys.shape}: give one block, both ways")
    difference = heads(true_keys, n_head) - heads(spliced_keys, n_head)
    return _norms(difference).mean(axis=1)


def unrotated(keys: np.ndarray, positions: np.ndarray, n_head: int, layout: str, frequencies: np.ndarray) -> np.ndarray:
    """Keys as they were before RoPE, float32[n_layers, n_tokens, n_head, head_dim]: pair i is turned by −position · θᵢ.

    keys         rotated, [n_layers, n_tokens, n_head · head_dim]
    positions    of the tokens, int[n_tokens]
    layout       "normal" pairs dims (2i, 2i+1), "neox" (i, i + n_rot/2); dims from n_rot on do not rotate
    frequencies  θᵢ in radians per position, float64[n_rot/2], or [n_layers, n_rot/2] where layers differ

    Keys of a cache are F16: what comes back is exact to half an ulp of each pair. Raises ValueError for another layout.
    """
    if layout not in ("normal", "neox"):
        raise ValueError(f"RoPE layout {layout!r} is unknown; use normal or neox")
    out = heads(keys, n_head)
    frequencies = np.atleast_2d(np.asarray(frequencies, dtype=np.float64))
    half = frequencies.shape[1]
    # [n_layers or 1, n_tokens, 1, n_rot/2]; angles are formed in double, where position · θ is exact enough.
    angles = np.asarray(positions, dtype=np.float64)[None, :, None, None] * frequencies[:, None, None, :]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    if layout == "normal":
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    x, y = out[..., first].copy(), out[..., second].copy()
    out[..., first] = x * cos + y * sin
    out[..., second] = y * cos - x * sin
    return out


@dataclass(frozen=True)
class Known:
    """What is known of a splice before any of the block is computed again, float32[n_layers, n_tokens, n_head, head_dim].

    Keys are unrotated unless the name says otherwise: a key's rotation tells where a token stands, not what it is.
    """

    context_keys: np.ndarray
    """Of all tokens before the block: system prompt and conversation."""
    context_keys_rotated: np.ndarray
    """The same as they lie in the cache."""
    context_values: np.ndarray
    left_keys: np.ndarray
    """Of the left context that the block was compiled behind."""
    left_values: np.ndarray
    block_keys: np.ndarray
    """Of the compiled block."""


def context_k_variance(known: Known) -> np.ndarray:
    """The paper's proxy: variance of the head's unrotated keys over the context's tokens, summed over the head's dims.

    = mean over tokens of the squared distance to the mean key; units of a key's element, squared.
    """
    return _variance(known.context_keys)


def context_k_variance_rotated(known: Known) -> np.ndarray:
    """As `context_k_variance`, of the keys as they lie in the cache, where positions add to the variance.

    The paper does not say which of the two it means.
    """
    return _variance(known.context_keys_rotated)


def sink_key_norm(known: Known) -> np.ndarray:
    """The compiled block's own attention sink: mean norm of its first 4 keys over the mean norm of its other keys.

    Without unit; 1 for a block of one token. At least one key is left for the denominator.
    """
    norms = _norms(known.block_keys)
    n_first = min(SINK_TOKENS, norms.shape[1] - 1)
    if n_first == 0:
        return np.ones_like(norms[:, 0])
    return norms[:, :n_first].mean(axis=1) / norms[:, n_first:].mean(axis=1)


def context_shift(known: Known) -> np.ndarray:
    """Distance of the context's mean unrotated key from that of the compile-time left context; units of a key."""
    return _norms(_mean_token(known.context_keys) - _mean_token(known.left_keys))


def context_value_shift(known: Known) -> np.ndarray:
    """Distance of the context's mean value from that of the compile-time left context; units of a value.

    Values are what attention carries from the context into the block's tokens.
    """
    return _norms(_mean_token(known.context_values) - _mean_token(known.left_values))


def block_key_norm(known: Known) -> np.ndarray:
    """Mean norm of the compiled block's keys; units of a key. A head with larger keys has more to drift."""
    return _norms(known.block_keys).mean(axis=1)


def block_k_variance(known: Known) -> np.ndarray:
    """Variance of the compiled block's own unrotated keys over its tokens, summed over the head's dims.

    How far a head's keys move with content at all; needs no look at the context.
    """
    return _variance(known.block_keys)


def layer_depth(known: Known) -> np.ndarray:
    """The layer's index over the number of layers, 0 to below 1: a baseline that looks at neither context nor block."""
    n_layers, _, n_head, _ = known.block_keys.shape
    return np.repeat(np.arange(n_layers, dtype=np.float64)[:, None] / n_layers, n_head, axis=1)


PREDICTORS: dict[str, Callable[[Known], np.ndarray]] = {
    function.__name__: function
    for function in (context_k_variance, context_k_variance_rotated, sink_key_norm, context_shift, context_value_shift,
                     block_key_norm, block_k_variance, layer_depth)
}


def spearman(predicted: np.ndarray, drift: np.ndarray) -> float | None:
    """Spearman's rank correlation over all layers × heads, −1 to 1; None where a side is constant and has no ranks.

    Raises ValueError for different shapes and for numbers that are not finite.
    """
    _check_sides(predicted, drift)
    sides = np.ravel(predicted), np.ravel(drift)
    if any(side.size < 2 or side.min() == side.max() for side in sides):
        return None
    return float(spearmanr(*sides).statistic)


def spearman_within_layer(predicted: np.ndarray, drift: np.ndarray) -> float | None:
    """Spearman's rank correlation with the layers' effect taken out, −1 to 1; both sides [n_layers, n_head].

    Each side is ranked over all layers × heads (equal numbers share their mean rank), and each layer's mean rank is
    subtracted; ρ is Pearson's correlation of what is left: the partial rank correlation given the layer, where layer is
    a category. Heads of one layer count the more, the further apart they are among all.

    None where a side says nothing within any layer: one head per layer, or a function of the layer alone. Raises
    ValueError as `spearman`.
    """
    _check_sides(predicted, drift)
    ranks = (rankdata(side).reshape(side.shape) for side in (predicted, drift))
    # Ranks are halves of whole numbers: in a layer of equal ones the difference from their mean is exactly 0.
    x, y = (side - side.mean(axis=1, keepdims=True) for side in ranks)
    if not (x.any() and y.any()):
        return None
    return float(np.clip((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()), -1, 1))


def _check_sides(predicted: np.ndarray, drift: np.ndarray) -> None:
    if predicted.shape != drift.shape:
        raise ValueError(f"a predictor of shape {predicted.shape} against a drift of shape {drift.shape}")
    for name, side in (("predictor", predicted), ("drift", drift)):
        if not np.isfinite(side).all():
            raise ValueError(f"{name}: {np.count_nonzero(~np.isfinite(side))} of {side.size} numbers are not finite")


def _norms(vectors: np.ndarray) -> np.ndarray:
    """L2 norms over the last axis, float64."""
    return np.sqrt(np.einsum("...d,...d->...", vectors, vectors, dtype=np.float64))


def _mean_token(rows: np.ndarray) -> np.ndarray:
    return rows.mean(axis=1, dtype=np.float64)


def _variance(rows: np.ndarray) -> np.ndarray:
    return rows.var(axis=1, dtype=np.float64).sum(axis=-1)

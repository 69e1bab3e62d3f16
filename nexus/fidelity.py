"""How far one next-token distribution lies from another."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import log_softmax


@dataclass(frozen=True)
class Divergence:
    """Distance of measured logits from reference logits."""

    kl_nats: float
    """D_KL(p₀ ‖ p) over the full vocabulary, nats."""
    top1: bool
    """Whether both put the most weight on the same token."""
    bit_identical: bool
    """Whether every logit has the same bits."""


def divergence(reference: np.ndarray, measured: np.ndarray) -> Divergence:
    """Divergence of `measured` from `reference`, both float[n_vocab] logits; computed in float64.

    Raises ValueError for different shapes or for logits that are not finite.
    """
    if reference.shape != measured.shape or reference.ndim != 1:
        raise ValueError(f"logits must be two vectors of one length, got shapes {reference.shape} and {measured.shape}")
    if not (np.isfinite(reference).all() and np.isfinite(measured).all()):
        raise ValueError("logits are not finite; the decode that made them is broken")
    log_p0 = log_softmax(reference.astype(np.float64))
    log_p = log_softmax(measured.astype(np.float64))
    kl = float(np.sum(np.exp(log_p0) * (log_p0 - log_p)))
    return Divergence(
        # Rounding can leave a sum of some 1e-17 below zero; the divergence itself cannot be negative.
        kl_nats=max(kl, 0.0),
        top1=bool(np.argmax(reference) == np.argmax(measured)),
        bit_identical=bool(np.array_equal(reference.view(np.uint8), measured.view(np.uint8))),
    )

"""Several tools in one context, each compiled alone, spliced one behind the other and repaired.

A tool behind others stands deeper than the conversation alone would put it: an arm that depends on depth, such as the
published schedule or the calibrated policy, is asked anew for each tool.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nexus.repair import Arm, Place, place_repaired
from nexus.splice import Resident, Splicer


@dataclass(frozen=True)
class CompiledTool:
    """One tool's block, ready to be placed, and its token ids."""

    resident: Resident
    tokens: np.ndarray
    """int32[n_tokens]"""


def place_tools(splicer: Splicer, tools: Sequence[CompiledTool], position: int, seq: int,
                arm_at: Callable[[int], Arm], *, n_past: int, seed: int = 0) -> int:
    """How many tokens were recomputed, after the tools stand in `seq` from `position` on, in their order.

    position   what the sequence ends before: it must continue it
    arm_at     the repair of a block behind so many tokens of context
    n_past     the context before the first tool, as `arm_at` counts it (without the system prompt)

    Each tool is repaired before the next is placed: what a later one's tokens see is what an agent would have there.
    Raises RepairError, SpliceRefused or RuntimeFailure, with the sequence cut back to what stood before the tools.
    """
    runtime, begin, recomputed = splicer.runtime, position, 0
    try:
        for tool in tools:
            arm = arm_at(n_past + position - begin)
            place = Place(splicer, tool.resident, tool.tokens, position, seq, seed=seed)
            chosen = arm.select(place)
            place_repaired(place, chosen)
            position, recomputed = position + len(tool.tokens), recomputed + len(chosen)
    except Exception:
        runtime.seq_rm(seq, begin, -1)
        raise
    return recomputed


def place_unrotated(splicer: Splicer, tools: Sequence[CompiledTool], position: int, seq: int) -> int:
    """0, after the tools stand in `seq` with keys still at the rotation of their compile position: a control."""
    for tool in tools:
        splicer.place(tool.resident, position, seq, reanchor=False)
        position += len(tool.tokens)
    return 0

"""What decides how much of a spliced block is repaired at a depth: the published schedule, or a calibrated table.

Both answer `arm(n_past)` and `compiled_behind(n_past)`. The calibrated policy is the default (`default_policy`): it
takes, per depth, the cheapest arm of a ladder down to which all kept to a stated divergence on a calibration set, and
prefills the block where none did and outside of the measured depths.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from nexus import artifact, stats
from nexus.repair import Arm, Place, RepairError, arm_of, place_repaired


class Policy(Protocol):
    """Chooses an arm from the depth of the context."""

    def arm(self, n_past: int) -> Arm:
        """The arm for a block behind `n_past` tokens."""

    def compiled_behind(self, n_past: int) -> str | None:
        """What a block must be compiled behind (nexus/ensemble.py) for that arm to hold; None for anything."""


def schedule_pct(n_past: int, max_splice_pos: int = 256, recompute_pct: float = 5.0,
                 recompute_full_mult: float = 4.0) -> float:
    """R(n), share to recompute in percent (M6): R_base up to P, then linear to 100 at K·P.

    R(n) = R_base + (n − P) / (P·(K − 1)) · (100 − R_base), clamped to 100. Raises RepairError for P < 1, K ≤ 1, a share
    outside of 0 … 100 or a negative depth.
    """
    if n_past < 0 or max_splice_pos < 1 or not recompute_full_mult > 1 or not 0 <= recompute_pct <= 100:
        raise RepairError(f"schedule: n_past={n_past}, max_splice_pos={max_splice_pos}, recompute_pct={recompute_pct}, "
                          f"recompute_full_mult={recompute_full_mult}; depth ≥ 0, P ≥ 1, 0 ≤ R_base ≤ 100 and K > 1")
    if n_past <= max_splice_pos:
        return recompute_pct
    slope = (100.0 - recompute_pct) / (max_splice_pos * (recompute_full_mult - 1))
    return min(100.0, recompute_pct + (n_past - max_splice_pos) * slope)


@dataclass(frozen=True)
class Schedule:
    """The published policy: the last R(n) percent of the block are decoded again."""

    max_splice_pos: int = 256
    recompute_pct: float = 5.0
    recompute_full_mult: float = 4.0
    enable_deep_splice: bool = True
    """False prefills every block behind P."""

    def pct(self, n_past: int) -> float:
        """Share recomputed at this depth, percent."""
        if not self.enable_deep_splice and n_past > self.max_splice_pos:
            return 100.0
        return schedule_pct(n_past, self.max_splice_pos, self.recompute_pct, self.recompute_full_mult)

    def arm(self, n_past: int) -> Arm:
        pct = self.pct(n_past)
        # Not through a name: rounding the share to text may add a token.
        return arm_of("full") if pct == 100.0 else Arm(f"suffix-{pct:g}", (("suffix", pct, True),))

    def compiled_behind(self, n_past: int) -> None:
        """None: the published schedule does not say what it was measured behind."""
        return None


@dataclass(frozen=True)
class Rung:
    """An arm at one depth with what was measured of it on the calibration set."""

    arm: str
    dkl_nats: tuple[float, ...]
    """Divergence of each calibration case."""


@dataclass(frozen=True)
class Choice:
    """The arm taken at one depth."""

    n_past: int
    arm: str
    compiled_behind: str
    dkl_upper_nats: float | None
    """Upper confidence bound on the mean divergence; None for `full`, which needs none."""


def upper_bound(dkl_nats: Sequence[float], seed: int, level: float) -> float | None:
    """One-sided upper confidence bound on the mean, nats; None where the samples do not allow one.

    Raises RepairError for a level that is not above ½: there is no such interval.
    """
    if not 0.5 < level < 1:
        raise RepairError(f"level is {level}; an upper confidence bound needs one between 0.5 and 1, such as 0.95")
    # The upper end of a two-sided interval at 2·level − 1 leaves 1 − level above it.
    return stats.mean(dkl_nats, seed, 2 * level - 1).ci_high


def calibrate(ladder: Sequence[Rung], epsilon_nats: float, seed: int, level: float = 0.95) -> tuple[str, float | None]:
    """(arm, its upper bound on the mean divergence in nats) for one depth; ("full", None) where no rung may be taken.

    `ladder` is ordered from cheap to dear before anything is measured. Rungs are tested from the dearest down, each by
    whether its upper bound is at most ε, until one fails; the last that passed is taken. As far as one bound holds, this
    fixed sequence keeps the chance that the taken arm's mean exceeds ε to at most 1 − level, however many rungs there
    are (Angelopoulos et al., "Learn then Test", 2021); taking the cheapest that passes would not.
    """
    taken: tuple[str, float | None] = ("full", None)
    for rung in reversed(ladder):
        upper = upper_bound(rung.dkl_nats, seed, level)
        if upper is None or upper > epsilon_nats:
            break
        taken = rung.arm, upper
    return taken


@dataclass(frozen=True)
class Calibrated:
    """The arm calibrated for the next deeper measured depth; before the shallowest and behind the deepest, a prefill.

    That a depth's arm also holds a little before it, down to the next shallower measured depth, is an assumption: the
    bound was checked at the measured depths only.
    """

    choices: tuple[Choice, ...]

    @classmethod
    def read(cls, path: Path | str, model_sha256: str | None = None) -> Calibrated:
        """The policy of a `calibrated_repair.json` artifact, for the model with this hash where one is given.

        Raises RepairError for another model's artifact; ArtifactError, FileNotFoundError.
        """
        measured = artifact.read(path)
        if measured["experiment"] != "calibrated_repair":
            raise RepairError(f"{path}: an artifact of {measured['experiment']}; a policy is read from "
                              "calibrated_repair.json")
        found = measured["tuple"]["model_sha256"]
        if model_sha256 not in (None, found):
            raise RepairError(f"{path}: calibrated for the model {found[:12]}, not {model_sha256[:12]}; measure "
                              "calibrated_repair with this model")
        rows = [row for row in measured["rows"] if row["set"] == "calibration" and row["chosen"]]
        return cls(tuple(Choice(*(row[key] for key in ("n_past", "arm", "compiled_behind", "dkl_upper_nats")))
                         for row in rows))

    def choice(self, n_past: int) -> Choice | None:
        """What was calibrated for the next deeper measured depth; None before the shallowest and behind the deepest."""
        if n_past < 0:
            raise RepairError(f"n_past is {n_past}; a depth is not negative")
        if n_past < min((choice.n_past for choice in self.choices), default=0):
            return None
        return min((choice for choice in self.choices if choice.n_past >= n_past), key=lambda choice: choice.n_past,
                   default=None)

    def arm(self, n_past: int) -> Arm:
        choice = self.choice(n_past)
        return arm_of(choice.arm if choice else "full")

    def compiled_behind(self, n_past: int) -> str | None:
        """What the arm was calibrated for; None where the block is prefilled, whatever it was compiled behind."""
        choice = self.choice(n_past)
        return None if choice is None or choice.arm == "full" else choice.compiled_behind


def default_policy(path: Path | str, model_sha256: str) -> Calibrated:
    """The calibrated policy of this artifact; where it was not measured, one that prefills every block."""
    try:
        return Calibrated.read(path, model_sha256)
    except FileNotFoundError:
        return Calibrated(())


def splice_with(policy: Policy, place: Place, n_past: int,
                then: np.ndarray | None = None) -> tuple[np.ndarray | None, int]:
    """(logits behind `then` or None, tokens recomputed) after the block was placed and repaired as the policy says.

    Raises RepairError, before anything changes, where the policy was calibrated for blocks compiled behind another text
    than this one, and whatever `place_repaired` raises.
    """
    needed = policy.compiled_behind(n_past)
    if needed not in (None, place.compiled_behind):
        raise RepairError(f"the block was compiled behind {place.compiled_behind!r}, the policy at depth {n_past} was "
                          f"calibrated for {needed!r}; make such blocks: nexus compile --behind {needed}")
    chosen = policy.arm(n_past).select(place)
    return place_repaired(place, chosen, then), len(chosen)

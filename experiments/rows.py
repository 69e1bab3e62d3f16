"""Artifact rows of the repair experiments, computed from their samples. Nothing here measures."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from nexus import stats, tables
from nexus.stats import Estimate

Samples = Sequence[dict]
# Arms of `deep_splice_ttft` that decode other tokens than block and query.
OTHER_WORK = ("engine-shift", "group-cache", "group-cache-rebuilt", "prefix-reuse")
# `probe_tokens` counts the layers that a probe runs through. It stops behind the attention of the next one, whose Q, K,
# V and attention are 0.11 (256 tokens) to 0.26 (2048) of a layer's multiplications in Qwen 0.5B, and more in SmolLM2.
PROBE_LAYERS = 1 + 1 / 6
CHOICE_KEYS = ("arm", "n_tools", "depth", "compiled_behind")


def grouped(samples: Iterable[dict], *keys: str) -> dict[tuple, list[dict]]:
    """Samples by the values of `keys`, groups and samples in the order of appearance."""
    groups: dict[tuple, list[dict]] = {}
    for sample in samples:
        groups.setdefault(tuple(sample[key] for key in keys), []).append(sample)
    return groups


def fidelity(samples: Samples, seed: int, level: float) -> dict[str, Estimate]:
    """Mean divergence (nats) with a bootstrap interval and top-1 agreement with a Wilson interval."""
    return {"dkl_nats": stats.mean([s["dkl_nats"] for s in samples], seed, level),
            "top1": stats.wilson(sum(s["top1"] for s in samples), len(samples), level)}


def latency(samples: Samples, prefills: Samples, seed: int, level: float) -> dict[str, Estimate]:
    """Medians of splice and prefill (ms), their ratio, what the token counts allow, and how near that comes.

    `prefills` hold the same cases as `samples`, in the same order. `latency_per_ideal` is the splice's time over the
    prefill's time scaled by the share of tokens decoded: 1 means that a token costs what it costs in a prefill.
    """
    splice, prefill = [s["ttft_ms"] for s in samples], [s["ttft_ms"] for s in prefills]
    ideal = [decoded_share(s) for s in samples]
    return {
        "prefill_ms": stats.median(prefill, seed, level), "splice_ms": stats.median(splice, seed, level),
        "speedup": stats.ratio_of_medians(prefill, splice, seed, level, paired=True),
        "ideal_speedup": stats.ratio_of_medians(prefill, [p * i for p, i in zip(prefill, ideal)], seed, level,
                                                paired=True),
        "latency_per_ideal": stats.ratio_of_medians(splice, [p * i for p, i in zip(prefill, ideal)], seed, level,
                                                    paired=True),
    }


def without_one(prefill_ms: Sequence[float], splice_ms: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Smallest and largest ratio of medians when any one pair is left out; no numbers for fewer than three.

    Whether more trials could change a verdict: where both are on the same side of it, no single trial decides.
    """
    if len(splice_ms) < 3:
        return None, None
    ratios = [float(np.median(np.delete(prefill_ms, i)) / np.median(np.delete(splice_ms, i)))
              for i in range(len(splice_ms))]
    return min(ratios), max(ratios)


def decoded_share(sample: dict) -> float:
    """Tokens that the arm decodes over those that a prefill does; a probe of some layers counts as its share."""
    resident, probe = sample.get("context_tokens", 0), PROBE_LAYERS * sample.get("probe_tokens", 0.0)
    decoded = resident + sample["recomputed"] + probe + sample["query_tokens"]
    return decoded / (resident + sample["block_tokens"] + sample["query_tokens"])


def repair_frontier(samples: Samples, seed: int, level: float) -> list[dict]:
    """One row per arm, share, depth, probe and what the block was compiled behind.

    `latency_per_ideal_all_depths` is the median over all depths of the arm: what one depth's few pairs leave to chance.
    """
    floors = grouped((s for s in samples if s["arm"] == "noise_floor"), "n_past", "probe")
    prefill_ms = {(s["n_past"], s["case"]): s["ttft_ms"] for s in samples
                  if s["arm"] == "noise_floor" and s["probe"] == "query"}
    arm_keys = ("arm", "recompute_pct", "compiled_behind")
    pooled = {group: stats.median([s["ttft_ms"] / (prefill_ms[s["n_past"], s["case"]] * decoded_share(s))
                                   for s in members], seed, level)
              for group, members in grouped((s for s in samples if s["probe"] == "query"), *arm_keys).items()}
    table = []
    keys = ("arm", "recompute_pct", "n_past", "probe", "compiled_behind")
    for group, members in grouped(samples, *keys).items():
        row = dict(zip(keys, group)) | fidelity(members, seed, level)
        prefills = floors[row["n_past"], row["probe"]]
        row |= latency(members, prefills, seed, level)
        row["latency_per_ideal_all_depths"] = pooled[tuple(row[key] for key in arm_keys)]
        row["recomputed_tokens"] = stats.mean([s["recomputed"] for s in members], seed, level)
        if row["recompute_pct"] is None:
            row["recompute_pct"] = float(np.mean([100 * s["recomputed"] / s["block_tokens"] for s in members]))
        table.append(row)
    return table


def rope_boundary_gate(samples: Samples, seed: int, level: float) -> list[dict]:
    """One row per depth, arm and probe."""
    keys = ("n_past", "arm", "recompute_pct", "probe", "faithful")
    return [dict(zip(keys, group)) | fidelity(members, seed, level) | {
        "cells_per_position": stats.mean([s["cells_per_position"] for s in members], seed, level),
        "ttft_ms": stats.median([s["ttft_ms"] for s in members], seed, level),
    } for group, members in grouped(samples, *keys).items()]


def deep_splice_ttft(samples: Samples, seed: int, level: float) -> list[dict]:
    """One row per depth, protocol, arm and curve; both probes beside the latency."""
    prefills = grouped((s for s in samples if s["arm"] == "prefill" and s["probe"] == "query"), "n_past", "protocol")
    keys = ("n_past", "curve_k", "arm", "protocol", "compiled_behind")
    table = []
    for group, members in grouped((s for s in samples if s["arm"] != "prefill"), *keys).items():
        row = dict(zip(keys, group))
        query = [s for s in members if s["probe"] == "query"]
        row["r_pct"] = float(np.mean([s["r_pct"] for s in query]))
        beside = {s["trial"]: s for s in prefills[row["n_past"], row["protocol"]]}
        paired = [beside[s["trial"]] for s in query]
        row |= latency(query, paired, seed, level)
        row["speedup_without_one_low"], row["speedup_without_one_high"] = without_one(
            [s["ttft_ms"] for s in paired], [s["ttft_ms"] for s in query])
        if row["arm"] in OTHER_WORK:
            row |= {"ideal_speedup": None, "latency_per_ideal": None}
        if row["arm"] == "group-cache":
            row["r_pct"] = 0.0
        row |= {"dkl_nats": None, "top1": None, "dkl_block_end_nats": None, "top1_block_end": None}
        if "dkl_nats" in query[0]:
            row |= fidelity(query, seed, level)
            end = fidelity([s for s in members if s["probe"] == "block_end"], seed, level)
            row |= {"dkl_block_end_nats": end["dkl_nats"], "top1_block_end": end["top1"]}
        row["recomputed_tokens"] = stats.mean([s["recomputed"] for s in query], seed, level)
        table.append(row)
    return table


def calibrated_repair(calibration: Samples, test: Samples, taken: Mapping[int, str], seed: int, level: float,
                      epsilon_nats: float) -> list[dict]:
    """One row per set, depth and arm; `chosen` marks the arm `taken` by the policy at this depth."""
    table = []
    keys = ("n_past", "set", "arm", "compiled_behind")
    query = [s for s in (*calibration, *test) if s["probe"] == "query"]
    prefills = grouped((s for s in query if s["arm"] == "full"), "n_past", "set")
    for group, members in grouped(query, *keys).items():
        row = dict(zip(keys, group)) | {"epsilon_nats": epsilon_nats}
        row["chosen"] = row["arm"] == taken[row["n_past"]]
        row["recompute_pct"] = float(np.mean([100 * s["recomputed"] / s["block_tokens"] for s in members]))
        floors = prefills[row["n_past"], row["set"]]
        row |= fidelity(members, seed, level) | latency(members, floors, seed, level)
        for key in ("ideal_speedup", "latency_per_ideal"):
            del row[key]
        # The upper end of a two-sided interval at 2·level − 1 leaves 1 − level above it.
        row["dkl_upper_nats"] = stats.mean([s["dkl_nats"] for s in members], seed, 2 * level - 1).ci_high
        above = sum(s["dkl_nats"] > epsilon_nats for s in members)
        row["violation_rate"] = stats.wilson(above, len(members), level)
        row["noise_floor_nats"] = stats.mean([s["dkl_nats"] for s in floors], seed, level)
        table.append(row)
    return table


def layouts(samples: Samples, seed: int, level: float) -> list[dict]:
    """One row per model, V layout, setting, depth and arm: the fidelity of what was spliced, or why it was refused."""
    keys = ("model", "v_layout", "setting", "n_past", "arm")
    table = []
    for group, members in grouped(samples, *keys).items():
        refusals = [s["message"] for s in members if s["status"] == "refused"]
        row = dict(zip(keys, group)) | {"status": "refused" if refusals else "spliced", "message": None}
        if refusals:
            row |= {"message": refusals[0], "dkl_nats": None, "top1": None, "bit_identical": None}
        else:
            identical = sum(s["bit_identical"] for s in members)
            row |= fidelity(members, seed, level) | {"bit_identical": stats.wilson(identical, len(members), level)}
        table.append(row)
    return table


def spliced_choice(samples: Samples, seed: int, level: float) -> list[dict]:
    """One row per arm, number of tools, depth, what was compiled behind, and reading; paired with `full` by query."""
    choices = grouped((s for s in samples if s["part"] == "choice"), *CHOICE_KEYS, "reading")
    times = grouped((s for s in samples if s["part"] == "time"), *CHOICE_KEYS)
    table = []
    for (arm, n_tools, depth, behind, reading), members in choices.items():
        full = {s["case"]: s["correct"] for s in choices["full", n_tools, depth, None, reading]}
        timed = times.get((arm, n_tools, depth, behind), [])
        row = dict(zip((*CHOICE_KEYS, "reading"), (arm, n_tools, depth, behind, reading)))
        row["accuracy"] = _share(members, "correct", level)
        for name in ("no_call", "unknown_tool"):
            row[f"{name}_rate"] = _share(members, name, level) if reading == "free" else None
        row["ttft_ms"] = stats.median([s["ttft_ms"] for s in timed], seed, level) if timed else None
        places = [s["place_ms"] for s in timed if s["place_ms"] is not None]
        row["place_ms"] = stats.median(places, seed, level) if places else None
        row |= {"speedup": None, "p_value": None, "only_here": None, "only_full": None, "dkl_nats": None, "top1": None,
                "bit_identical": None}
        row["recompute_pct"] = float(np.mean([100 * s["recomputed"] / s["tools_tokens"] for s in members]))
        table.append(row)
        if arm == "full":
            continue
        row["dkl_nats"] = stats.mean([s["dkl_nats"] for s in members], seed, level)
        row["top1"] = _share(members, "top1", level)
        if arm == "identity":
            row["bit_identical"] = _share(members, "bit_identical", level)
        here = sum(s["correct"] and not full[s["case"]] for s in members)
        there = sum(full[s["case"]] and not s["correct"] for s in members)
        row |= {"only_here": here, "only_full": there, "p_value": stats.mcnemar(here, there)}
        beside = {s["trial"]: s["ttft_ms"] for s in times.get(("full", n_tools, depth, None), [])}
        if timed:
            row["speedup"] = stats.ratio_of_medians([beside[s["trial"]] for s in timed],
                                                    [s["ttft_ms"] for s in timed], seed, level, paired=True)
    return table


def _share(members: Samples, key: str, level: float) -> Estimate:
    return stats.wilson(sum(s[key] for s in members), len(members), level)


def best_within(table: list[dict], most_pct: float) -> dict[str, dict[str, float]]:
    """Per depth, what `nexus.tables.best_within` chooses behind the query, as metrics."""
    best = {}
    for (n_past,), members in grouped((row for row in table if row["probe"] == "query"), "n_past").items():
        plain = [{key: item.row() if isinstance(item, Estimate) else item for key, item in row.items()}
                 for row in members]
        if row := tables.best_within(plain, most_pct):
            best[f"best.{n_past}"] = {"recompute_pct": row["recompute_pct"],
                                      **{name: row[name]["value"] for name in ("dkl_nats", "top1", "speedup")}}
    return best

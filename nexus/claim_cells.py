"""What each published claim is tested on: measured numbers of the artifacts beside the published ones."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nexus.routing_tables import AT_SCALE, PAPER_SYSTEM
from nexus.tables import PAPER_PREDICTOR, Row, at, number, value_of
from nexus.verdicts import COMPUTED, Artifacts, Cell, interval

Published = Mapping[str, Any]
Cells = Callable[[Artifacts, Published], Sequence[Cell]]
PROBES = {"query": "behind the query", "block_end": "right behind the block"}
# The published gains at moderate depth, and where the description says that it is moderate.
MODERATE_SPEEDUP, MODERATE_TOKENS = (1.1, 1.7), 512
# R is printed with one decimal.
R_ROUNDING_PCT = 0.05
# Models of `layouts` that have no per-token keys, or not one rotation for each.
UNSPLICEABLE = ("remote", "toy-mamba", "toy-qwen2vl")


def drift(probe: str, metric: str, anchor: bool = False) -> Cells:
    """Cells of a bare splice: at offset 0 beside the noise floor, elsewhere beside the published band; or its top-1."""
    def cells(artifacts: Artifacts, published: Published) -> list[Cell]:
        said, rows = published["dkl_sweep"], at(artifacts["dkl_sweep"]["rows"], probe=probe)
        found = []
        for row in sorted(at(rows, arm="bare"), key=lambda row: row["offset"]):
            if (row["offset"] == 0) != anchor or row["offset"] > said["offset_max"]:
                continue
            target, shown = (said["top1"], None) if metric == "top1" else (tuple(said["dkl_nats_band"]), None)
            if anchor and metric != "top1":
                target, shown = _floor(at(rows, arm="noise_floor", offset=0))
            found.append(Cell(_tokens(row["offset"]), target, row[metric], shown=shown))
        return found
    return cells


def scattered(artifacts: Artifacts, published: Published) -> list[Cell]:
    said = published["rope_boundary_gate"]
    return [Cell(f"{what}, {PROBES[row['probe']]}", said["dkl_nats"], row["dkl_nats"])
            for what, row, _ in _faithful_scattered(artifacts, said["n_past"])]


def corrupts(artifacts: Artifacts, published: Published) -> list[Cell]:
    """Scattered recompute above the bare splice of the same experiment, depth and probe."""
    found = []
    for what, row, bare in _faithful_scattered(artifacts, published["rope_boundary_gate"]["n_past"]):
        if bare is not None and (value := value_of(bare["dkl_nats"])) is not None:
            found.append(Cell(f"{what}, {PROBES[row['probe']]}", (value, math.inf), row["dkl_nats"],
                              shown=f"above {number(value)} nats (bare)"))
    return found


def _faithful_scattered(artifacts: Artifacts, n_past: int) -> list[tuple[str, Row, Row | None]]:
    """(what it is, row of a faithful scattered recompute, row of the bare splice beside it) at a depth.

    Of the frontier a random sample alone, of the gate one behind the first tokens, which are recomputed, too.
    """
    gate = at(artifacts["rope_boundary_gate"]["rows"], n_past=n_past)
    found = [(f"{row['arm']} (the head, too)", row, _one(gate, arm="none", probe=row["probe"]))
             for row in at(gate, faithful=True) if "random" in row["arm"]]
    frontier = at(artifacts["repair_frontier"]["rows"], n_past=n_past)
    return found + [(f"{row['arm']}-{row['recompute_pct']:g}", row,
                     _one(frontier, arm="none", probe=row["probe"], compiled_behind=row["compiled_behind"]))
                    for row in at(frontier, arm="random")]


def below_target(artifacts: Artifacts, published: Published) -> list[Cell]:
    target = published["gating_nogo"]["target_spearman_rho"]
    readings = {PAPER_PREDICTOR: "un-rotated keys", f"{PAPER_PREDICTOR}_rotated": "keys as in the cache"}
    return [Cell(f"{_place(row)}, {readings[row['predictor']]}", (-math.inf, target), row["spearman_rho"])
            for row in artifacts["gating_nogo"]["rows"] if row["predictor"] in readings]


def printed_rho(artifacts: Artifacts, published: Published) -> list[Cell]:
    rows = at(artifacts["gating_nogo"]["rows"], predictor=PAPER_PREDICTOR)
    found = []
    for said in published["gating_nogo"]["rows"]:
        row = _one(rows, n_past=said["n_past"], context=said["context"])
        found.append(Cell(_place(said), said["spearman_rho"], _metric(row, "spearman_rho")))
    return found


def schedule(artifacts: Artifacts, published: Published) -> list[Cell]:
    found = []
    for said, row in _scheduled(artifacts, published):
        share = None if row is None else row["r_pct"]
        metric = None
        if share is not None:
            metric = {"value": share, "ci_low": None, "ci_high": None, "n": 1, "method": COMPUTED}
        found.append(Cell(_curve(said), (said["r_pct"] - R_ROUNDING_PCT, said["r_pct"] + R_ROUNDING_PCT), metric,
                          shown=f"{said['r_pct']:g}"))
    return found


def speedups(artifacts: Artifacts, published: Published) -> list[Cell]:
    return [Cell(_curve(said), said["speedup"], _metric(row, "speedup"))
            for said, row in _scheduled(artifacts, published)]


def moderate(artifacts: Artifacts, published: Published) -> list[Cell]:
    return [Cell(_curve(said), MODERATE_SPEEDUP, _metric(row, "speedup"))
            for said, row in _scheduled(artifacts, published) if said["n_past"] <= MODERATE_TOKENS]


def never_regress(probe: str, metric: str) -> Cells:
    def cells(artifacts: Artifacts, published: Published) -> list[Cell]:
        floors, found = at(artifacts["repair_frontier"]["rows"], arm="noise_floor", probe=probe), []
        for said, row in _scheduled(artifacts, published, "warm"):
            target, shown = _floor(at(floors, n_past=said["n_past"]))
            found.append(Cell(_curve(said), target, _metric(row, metric), shown=shown))
        return found
    return cells


def scheduled_top1(metric: str) -> Cells:
    return lambda artifacts, published: [Cell(_curve(said), 1.0, _metric(row, metric))
                                         for said, row in _scheduled(artifacts, published, "warm")]


def _scheduled(artifacts: Artifacts, published: Published, protocol: str = "cold") -> list[tuple[Row, Row | None]]:
    """(published row, measured row) of Table III; of the other protocol where this one was not measured."""
    rows = [row for row in artifacts["deep_splice_ttft"]["rows"] if row["curve_k"] is not None]
    pairs = []
    for said in published["deep_splice_ttft"]["rows"]:
        here = at(rows, curve_k=said["curve_k"], n_past=said["n_past"])
        found = at(here, protocol=protocol) or (here if protocol == "warm" else [])
        pairs.append((said, found[0] if found else None))
    return pairs


def accuracies(system: Callable[[Mapping[str, Any]], str]) -> Cells:
    """Of the system that `system` names, which gets the artifact's configuration."""
    def cells(artifacts: Artifacts, published: Published) -> list[Cell]:
        artifact = artifacts["routing_accuracy_n250"]
        rows = at(artifact["rows"], system=system(artifact["config"]))
        return [Cell(f"N = {size}", said, _metric(_one(rows, n_tools=int(size)), "accuracy"))
                for size, said in published["routing_accuracy_n250"]["accuracy"].items()]
    return cells


def flat(artifacts: Artifacts, published: Published) -> list[Cell]:
    return _against_fewest(artifacts, "accuracy", 100, "%")


def choice_time(artifacts: Artifacts, published: Published) -> list[Cell]:
    return _against_fewest(artifacts, "choice_ms", 1, "ms")


def _against_fewest(artifacts: Artifacts, name: str, scale: float, unit: str) -> list[Cell]:
    rows = sorted(at(artifacts["routing_accuracy_n250"]["rows"], system=PAPER_SYSTEM), key=lambda row: row["n_tools"])
    last = _one(rows, n_tools=AT_SCALE)
    ends = interval(rows[0][name]) if rows else None
    if ends is None or last is None or rows[0]["n_tools"] == AT_SCALE:
        return []
    return [Cell(f"N = {AT_SCALE}", ends, last[name],
                 shown=f"as at N = {rows[0]['n_tools']}: {scale * ends[0]:.3g} to {scale * ends[1]:.3g}")]


def concat(artifacts: Artifacts, published: Published) -> list[Cell]:
    rows = at(artifacts["routing_accuracy_n250"]["rows"], system="concat_all")
    return [Cell(f"N = {size}", said, _metric(_one(rows, n_tools=int(size)), "accuracy"))
            for size, said in published["routing_accuracy_n250"]["concat_all_accuracy"].items() if said != "overflow"]


def overflow(artifacts: Artifacts, published: Published) -> list[Cell]:
    artifact = artifacts["routing_accuracy_n250"]
    window = f"in {artifact['config']['routing_accuracy_n250']['n_ctx']} tokens"
    found = []
    for size, said in published["routing_accuracy_n250"]["concat_all_accuracy"].items():
        if said == "overflow":
            row = _one(artifact["rows"], n_tools=int(size), system="concat_all")
            status = None if row is None else "overflow" if row["status"] == "overflow" else "fits"
            found.append(Cell(f"N = {size}", said, measured=status, shown=status and f"{status} ({window})"))
    return found


def recall(k: int) -> Cells:
    def cells(artifacts: Artifacts, published: Published) -> list[Cell]:
        row = _one(artifacts["routing_accuracy_n250"]["rows"], n_tools=AT_SCALE, system=PAPER_SYSTEM)
        return [Cell(f"N = {AT_SCALE}", published["routing_accuracy_n250"][f"slb_top{k}_recall_{AT_SCALE}"],
                     _metric(row, f"top{k}_recall"))]
    return cells


def scan_in_situ(artifacts: Artifacts, published: Published) -> list[Cell]:
    row = _one(artifacts["routing_accuracy_n250"]["rows"], n_tools=AT_SCALE, system=PAPER_SYSTEM)
    return [Cell(f"N = {AT_SCALE}", published["routing_accuracy_n250"]["scan_in_situ_us"], _metric(row, "scan_us"))]


def scan_alone(artifacts: Artifacts, published: Published) -> list[Cell]:
    said = published["slb_latency"]
    return [Cell(f"{row['n_vectors']} × {row['dim']}", said["scan_us"], row["p50_us"])
            for row in at(artifacts["slb_latency"]["rows"], n_vectors=said["n_vectors"], impl="nexus in situ")]


def gate_number(name: str, queries: str) -> Cells:
    return lambda artifacts, published: [
        Cell(f"{queries} queries", published["calibration"][name],
             _metric(_one(artifacts["calibration"]["rows"], kind="gate", set=queries, system=PAPER_SYSTEM), name))]


def sidecar(metrics: Mapping[str, str], published: Callable[[Mapping[str, Any]], float]) -> Cells:
    """Cells of the sidecar's metrics, whose labels are the values of `metrics`."""
    def cells(artifacts: Artifacts, said: Published) -> list[Cell]:
        of = {row["metric"]: row["value"] for row in artifacts["sidecar_accuracy"]["rows"]}
        return [Cell(label, published(said["sidecar_accuracy"]), of.get(metric)) for metric, label in metrics.items()]
    return cells


def copies(artifacts: Artifacts, published: Published) -> list[Cell]:
    return [Cell("lengths as in the traces" if row["n_tokens"] is None else _tokens(row["n_tokens"]),
                 published["l0_radix"]["copy_us_p50"], row["copy_us"])
            for row in at(artifacts["l0_radix"]["rows"], part="copy")]


def hit_rate(artifacts: Artifacts, published: Published) -> list[Cell]:
    rows = artifacts["l0_radix"]["rows"]
    slots = artifacts["l0_radix"]["config"]["l0_radix"]["n_slots"]
    return [Cell(f"simulated agents, {slots} slots", published["l0_radix"]["hit_rate"], row["hit_rate"])
            for row in at(rows, part="trace", arm="nexus")]


def transposed(artifacts: Artifacts, published: Published) -> list[Cell]:
    """A bare splice at the compile position, of every model in its own setting, with V transposed."""
    rows = at(artifacts["layouts"]["rows"], v_layout="transposed", setting="default", status="spliced", n_past=0)
    found = []
    for row in at(rows, arm="none"):
        target, shown = _floor(at(rows, arm="noise_floor", model=row["model"]))
        found.append(Cell(row["model"], target, row["dkl_nats"], shown=shown))
    return found


def refused(artifacts: Artifacts, published: Published) -> list[Cell]:
    """Models whose keys cannot be re-anchored, and whether each was refused."""
    status = {(row["model"], row["setting"]): row["status"] for row in artifacts["layouts"]["rows"]}
    return [Cell(model, "refused", measured=said) for (model, _), said in status.items() if model in UNSPLICEABLE]


def _floor(rows: Sequence[Row]) -> tuple[tuple[float, float], str]:
    """The published ≈ 0 as a range: from exactly 0 to the upper end of the noise floor's interval."""
    ends = interval(rows[0]["dkl_nats"]) if rows else None
    return ((0.0, 0.0), "0 (no floor measured)") if ends is None else ((0.0, ends[1]), f"≈ 0 (floor: {ends[1]:.3g})")


def _one(rows: Sequence[Row], **keys: Any) -> Row | None:
    return next(iter(at(rows, **keys)), None)


def _metric(row: Row | None, name: str) -> Any:
    return None if row is None else row.get(name)


def _tokens(count: int) -> str:
    return f"{count} tokens"


def _place(row: Row) -> str:
    return f"{row['n_past']} tokens, {row['context']} topic"


def _curve(said: Row) -> str:
    return f"K = {said['curve_k']:g}, {said['n_past']} tokens"

"""A run's results in a few lines, from its metrics files; nothing is measured or recomputed."""

import json
from pathlib import Path
from typing import Any

from nexus.tables import MOST_PCT


def summary(folder: Path) -> str:
    """Readable lines about the run in `folder` (`results/<run>`); '' where it has no metrics yet."""
    parts = []
    if sweep := _metrics(folder, "dkl_sweep"):
        parts.append(_divergence(sweep))
    if costs := _metrics(folder, "splice_cost"):
        parts.append(_costs(costs))
    if best := _by_depth(_metrics(folder, "repair_frontier"), "best."):
        title = f"Best repair of at most {MOST_PCT:g} % of a block, read behind the query, context resident"
        parts.append(_repairs(title, best, {"top1": "same top-1 %"}))
    if policy := _by_depth(_metrics(folder, "calibrated_repair")):
        parts.append(_repairs("Calibrated policy on held-out tools, queries and conversation", policy,
                              {"violation_rate": "violations %"}))
    if choices := _choices(_metrics(folder, "routing_accuracy_n250")):
        parts.append(choices)
    return "\n".join(parts)


def _metrics(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    try:
        return json.loads((folder / "metrics" / f"{name}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def _divergence(sweep: dict[str, dict[str, Any]]) -> str:
    """One line per arm and probe, one column per offset; keys are `<arm>.<probe>.<offset>`."""
    cells = {tuple(key.rsplit(".", 2)): values.get("dkl_nats") for key, values in sweep.items()}
    offsets = sorted({int(offset) for _, _, offset in cells})
    lines = ["Divergence from full prefill, mean in nats, by offset in tokens"]
    lines.append(f"  {'arm':<17} {'probe':<9}" + "".join(f"{offset:>9}" for offset in offsets))
    for arm, probe in dict.fromkeys((arm, probe) for arm, probe, _ in cells):
        values = (cells.get((arm, probe, str(offset))) for offset in offsets)
        lines.append(f"  {arm:<17} {probe:<9}" + "".join(f"{_number(value):>9}" for value in values))
    return "\n".join(lines)


def _costs(costs: dict[str, dict[str, Any]]) -> str:
    """One line per V layout and cache size, for contiguous cells; keys are `<layout>.<cells>.<n_ctx>.<n_tokens>`."""
    rows = [(*key.split("."), values) for key, values in costs.items()]
    length = min((int(row[3]) for row in rows), key=lambda n_tokens: (abs(n_tokens - 200), n_tokens))
    lines = [f"Splice of a {length}-token block, contiguous cells, medians"]
    lines.append(f"  {'V layout':<11} {'n_ctx':>6} {'splice µs':>10} {'/ memcpy':>9} {'engine shift / splice':>22}")
    for layout, cells, n_ctx, n_tokens, values in rows:
        if cells == "contiguous" and int(n_tokens) == length:
            lines.append(
                f"  {layout:<11} {n_ctx:>6} {_number(values.get('total_us')):>10} "
                f"{_number(values.get('total_per_memcpy')):>9} {_number(values.get('engine_shift_per_total')):>22}"
            )
    return "\n".join(lines)


def _choices(choices: dict[str, dict[str, Any]]) -> str:
    """One line per system, one column per number of tools; keys are `<system>.<N>`; '' for none."""
    shares = {tuple(key.rsplit(".", 1)): values.get("accuracy") for key, values in choices.items()
              if key.rpartition(".")[2].isdigit() and "." in key}
    if not shares:
        return ""
    sizes = sorted({int(size) for _, size in shares})
    lines = ["Right tool chosen, %, by number of tools; - does not fit the configured window"]
    lines.append(f"  {'system':<14}" + "".join(f"{size:>7}" for size in sizes))
    for system in dict.fromkeys(system for system, _ in shares):
        told = (shares.get((system, str(size))) for size in sizes)
        lines.append(f"  {system:<14}" + "".join(f"{_percent(None if share is None else 100 * share):>7}"
                                                 for share in told))
    return "\n".join(lines)


def _by_depth(metrics: dict[str, dict[str, Any]], prefix: str = "") -> dict[int, dict[str, Any]]:
    """The metrics under the keys `<prefix><n_past>`, by ascending depth in tokens."""
    depths = {key.removeprefix(prefix): values for key, values in metrics.items() if key.startswith(prefix)}
    return {int(depth): depths[depth] for depth in sorted(filter(str.isdigit, depths), key=int)}


def _repairs(title: str, by_depth: dict[int, dict[str, Any]], shares: dict[str, str]) -> str:
    """One line per depth: what is recomputed, the mean divergence, `shares` (0 to 1, shown in percent) and speed-up."""
    lines = [title, f"  {'n_past':>6} {'recomputed %':>13} {'KL nats':>8}"
                    + "".join(f" {label:>13}" for label in shares.values()) + f" {'speed-up':>9}"]
    for depth, values in by_depth.items():
        percent = (values.get(name) for name in shares)
        lines.append(f"  {depth:>6} {_percent(values.get('recompute_pct')):>13} {_number(values.get('dkl_nats')):>8}"
                     + "".join(f" {_percent(None if share is None else 100 * share):>13}" for share in percent)
                     + f" {_number(values.get('speedup')):>9}")
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.4f}"

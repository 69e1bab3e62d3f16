"""Figures drawn from stored artifacts; no model is loaded. Equal artifacts give equal bytes."""
from __future__ import annotations

import io
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from nexus.canonical import write_atomically

# Markers and line styles carry the meaning, so that colour (a palette safe for colour-blind readers) may be lost.
STYLES = {
    "bare": {"label": "bare splice", "color": "#0072B2", "marker": "o", "linestyle": "-"},
    "bare-no-reanchor": {"label": "splice, keys not re-anchored", "color": "#D55E00", "marker": "s", "linestyle": "--"},
    "noise_floor": {"label": "noise floor (full prefill, other batches)", "color": "#555555", "marker": "x",
                    "linestyle": ":"},
}
PROBE_TITLES = {"query": "behind the user's query", "block_end": "right behind the block"}
# Below this the axis is linear, so that exact zeros can be shown.
LINEAR_BELOW_NATS = 1e-4
RC = {
    "svg.hashsalt": "nexus", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 100,
}


def figure1(artifact: dict, published: dict) -> Figure:
    """Divergence against offset with intervals, one panel per probe, over the published band (Figure 1)."""
    rows = artifact["rows"]
    offsets = sorted({row["offset"] for row in rows})
    places = {offset: i for i, offset in enumerate(offsets)}
    probes = [probe for probe in PROBE_TITLES if any(row["probe"] == probe for row in rows)]
    claims = published["dkl_sweep"]
    low, high = claims["dkl_nats_band"]
    with matplotlib.rc_context(RC):
        figure, panels = plt.subplots(1, len(probes), figsize=(4.6 * len(probes), 3.9), sharey=True, squeeze=False)
        for panel, probe in zip(panels[0], probes):
            band = panel.axhspan(low, high, facecolor="#E8E8E8", edgecolor="#999999", hatch="////", linewidth=0,
                                 label=f"published band ({low}–{high}, 14B model)")
            band.set_zorder(0)
            if claims["repair_start"] in places:
                panel.axvline(places[claims["repair_start"]], color="#333333", linewidth=0.8, linestyle=(0, (6, 4)),
                              label=f"published repair start (P = {claims['repair_start']})")
            for arm, style in STYLES.items():
                cells = sorted((row for row in rows if row["arm"] == arm and row["probe"] == probe),
                               key=lambda row: row["offset"])
                if cells:
                    _curve(panel, [places[row["offset"]] for row in cells], [row["dkl_nats"] for row in cells], style)
            panel.set_title(f"Read {PROBE_TITLES[probe]}", loc="left", fontsize=10)
            panel.set_yscale("symlog", linthresh=LINEAR_BELOW_NATS, linscale=0.5)
            panel.set_xticks(range(len(offsets)), [str(offset) for offset in offsets])
            panel.set_xlabel("distance from the compile position (tokens)")
            panel.grid(axis="y", color="#DDDDDD", linewidth=0.5)
            panel.set_axisbelow(True)
        tops = [row["dkl_nats"]["ci_high"] or row["dkl_nats"]["value"] for row in rows]
        panels[0][0].set_ylim(-2e-5, 2 * max(*tops, high))
        panels[0][0].set_ylabel(r"$D_{\mathrm{KL}}$(full prefill ‖ spliced), nats")
        handles, labels = panels[0][0].get_legend_handles_labels()
        n = max(row["dkl_nats"]["n"] for row in rows)
        figure.suptitle(f"A block moved away from where it was compiled: {artifact['tuple']['model']}, "
                        f"mean of {n} queries, 95 % bootstrap intervals", fontsize=10, x=0.01, ha="left")
        figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=8)
        figure.tight_layout(rect=(0, 0.12, 1, 1.0))
    return figure


def _curve(panel, xs: list[int], metrics: list[dict], style: dict) -> None:
    values = [metric["value"] for metric in metrics]
    # A metric without an interval (identical samples) is drawn as a bare point.
    below = [metric["value"] - (metric["ci_low"] if metric["ci_low"] is not None else metric["value"])
             for metric in metrics]
    above = [(metric["ci_high"] if metric["ci_high"] is not None else metric["value"]) - metric["value"]
             for metric in metrics]
    panel.errorbar(xs, values, yerr=[below, above], capsize=3, linewidth=1.4, markersize=5, elinewidth=1, **style)


def save(figure: Figure, path: Path) -> list[Path]:
    """The written files, `path` with the endings .svg and .png; no date and no version in them."""
    written = []
    with matplotlib.rc_context(RC):
        for ending, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=ending, dpi=200, metadata=metadata)
            target = path.with_suffix(f".{ending}")
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, buffer.getvalue())
            written.append(target)
    plt.close(figure)
    return written

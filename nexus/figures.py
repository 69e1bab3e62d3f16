"""Figures drawn from stored artifacts; no model is loaded. Equal artifacts give equal bytes."""
from __future__ import annotations

import io
import re
from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import Bbox

from nexus.canonical import write_atomically
from nexus.tables import KL_BAR_NATS, at, distinct, front, level_text, methods, placed, value_of

# Markers and line styles carry the meaning, so that colour (a palette safe for colour-blind readers) may be lost.
STYLES = {
    "bare": {"label": "bare splice", "color": "#0072B2", "marker": "o", "linestyle": "-"},
    "bare-no-reanchor": {"label": "splice, keys not re-anchored", "color": "#D55E00", "marker": "s", "linestyle": "--"},
    "noise_floor": {"label": "noise floor (full prefill, other batches)", "color": "#555555", "marker": "x",
                    "linestyle": ":"},
}
PROBE_TITLES = {"query": "behind the user's query", "block_end": "right behind the block"}
PROTOCOL_TITLES = {"cold": "Cold: context, block and query", "warm": "Warm: the context is resident"}
READING_TITLES = {"automaton": "names alone allowed", "free": "free text"}
# Where there are more curves, arms or fills than styles, these begin again: nothing is left out.
CURVE_STYLES = (
    {"color": "#0072B2", "marker": "o", "linestyle": "-"}, {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    {"color": "#56B4E9", "marker": "p", "linestyle": (0, (3, 3))},
)
OTHER_STYLES = (
    {"color": "#009E73", "marker": "^", "linestyle": "-."}, {"color": "#CC79A7", "marker": "D", "linestyle": ":"},
    {"color": "#555555", "marker": "v", "linestyle": (0, (8, 2))},
    {"color": "#E69F00", "marker": "P", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
    {"color": "#000000", "marker": "*", "linestyle": (0, (1, 3))},
    {"color": "#882255", "marker": "X", "linestyle": (0, (6, 2, 2, 2))},
)
# Behind the two above, where there are more arms than they have styles.
MORE_STYLES = (
    {"color": "#117733", "marker": "<", "linestyle": (0, (2, 4))},
    {"color": "#AA4499", "marker": ">", "linestyle": "-"},
    {"color": "#999933", "marker": "h", "linestyle": "--"}, {"color": "#332288", "marker": "d", "linestyle": "-."},
    {"color": "#CC6677", "marker": "8", "linestyle": ":"}, {"color": "#44AA99", "marker": "H", "linestyle": "-"},
)
ALL_STYLES = (*CURVE_STYLES, *OTHER_STYLES, *MORE_STYLES)
FAMILY_STYLES = {
    "none": {"color": "#000000", "marker": "*"}, "head": {"color": "#0072B2", "marker": "o"},
    "suffix": {"color": "#D55E00", "marker": "s"}, "head+suffix": {"color": "#CC79A7", "marker": "D"},
    "random": {"color": "#777777", "marker": "v"}, "blend": {"color": "#009E73", "marker": "^"},
    "head+blend": {"color": "#56B4E9", "marker": "X"}, "oracle": {"color": "#E69F00", "marker": "P"},
    "full": {"color": "#000000", "marker": ">"},
}
# A marker's fill says what the block was compiled behind, in the order of the artifact.
FILLS = ("full", "none", "left", "bottom", "right", "top")
# Where a label may stand about its point, in the order of preference: first between the interval bars.
LABEL_PLACES = ((1, 1), (1, -1), (-1, 1), (-1, -1), (1, 0), (-1, 0), (0, 1), (0, -1))
# Below this the axis is linear, so that exact zeros can be shown.
LINEAR_BELOW_NATS = 1e-4
RC = {
    "svg.hashsalt": "nexus", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 100, "pdf.fonttype": 42,
}
# Nothing in a file may tell when, or with which version, it was made.
METADATA = {
    "svg": {"Date": None, "Creator": None}, "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
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
                        f"mean of {n} queries, {level_text(artifact)} bootstrap intervals", fontsize=10, x=0.01,
                        ha="left")
        figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=8)
        figure.tight_layout(rect=(0, 0.12, 1, 1.0))
    return figure


def figure4(artifact: dict, published: dict) -> Figure:
    """Speed-up over prefill against depth with intervals, a panel per protocol: schedules and the best other arms."""
    rows, claims = artifact["rows"], published["deep_splice_ttft"]
    depths = sorted({row["n_past"] for row in [*rows, *claims["rows"]]})
    places = {n_past: i for i, n_past in enumerate(depths)}
    curves = sorted({row["curve_k"] for row in rows if row["curve_k"] is not None})
    protocols = [protocol for protocol in PROTOCOL_TITLES if at(rows, protocol=protocol)]
    handles = {}
    with matplotlib.rc_context(RC):
        figure, panels = plt.subplots(1, len(protocols), figsize=(max(7.5, 4.8 * len(protocols)), 4.7), squeeze=False)
        for panel, protocol in zip(panels[0], protocols):
            here = at(rows, protocol=protocol)
            panel.axhline(1, color="#333333", linewidth=0.8)
            drawn = [(f"schedule R(n), K = {curve:g}", {"curve_k": curve}, style)
                     for curve, style in zip(curves, cycle(CURVE_STYLES))]
            if protocol == "warm":
                drawn += [(arm, {"curve_k": None, "arm": arm}, style)
                          for arm, style in zip(_best_others(here), cycle(OTHER_STYLES))]
            for i, (name, keys, style) in enumerate(drawn):
                cells = [row for row in at(here, **keys) if value_of(row["speedup"]) is not None]
                if cells:
                    # Curves stand a little apart, so that equal values do not hide each other.
                    shift = 0.05 * (i - (len(drawn) - 1) / 2)
                    label = name + _divergence_range(at(rows, **keys))
                    handles[label] = _speedups(panel, places, shift, cells, {**style, "label": label})
            if protocol == claims["protocol"]:
                for curve, style in zip(curves, cycle(CURVE_STYLES)):
                    cells = [row | {"speedup": {"value": row["speedup"], "ci_low": row["ci"][0],
                                                "ci_high": row["ci"][1]}}
                             for row in at(claims["rows"], curve_k=curve)]
                    if cells:
                        label = f"published, K = {curve:g} (14B model, other machine)"
                        hollow = {**style, "linestyle": "none", "markerfacecolor": "white", "label": label}
                        handles[label] = _speedups(panel, places, 0.2, cells, hollow)
            panel.set_title(PROTOCOL_TITLES[protocol], loc="left", fontsize=10)
            _plain_log(panel.yaxis, "y")
            panel.set_xticks(range(len(depths)), [str(n_past) for n_past in depths])
            panel.set_xlim(-0.4, len(depths) - 0.6)
            panel.set_xlabel("depth of the context (tokens)")
            panel.grid(axis="y", color="#DDDDDD", linewidth=0.5)
            panel.set_axisbelow(True)
        panels[0][0].set_ylabel("speed-up (prefill time / splice time)")
        figure.suptitle(f"Time to first token of a spliced and repaired block: {artifact['tuple']['model']}, medians, "
                        f"{level_text(artifact)} intervals", fontsize=10, x=0.01, ha="left")
        _legend_below(figure, handles, ncols=2)
    return figure


def frontier(artifact: dict) -> Figure:
    """Divergence behind the query against warm speed-up of every arm, a panel per depth, each with its Pareto front."""
    rows = at(artifact["rows"], probe="query")
    depths = sorted(n_past for (n_past,) in distinct(rows, "n_past"))
    fills = dict(zip((behind for (behind,) in distinct(methods(rows), "compiled_behind")), cycle(FILLS)))
    handles = {}
    across = min(2, len(depths))
    down = -(-len(depths) // across)
    with matplotlib.rc_context(RC):
        figure, panels = plt.subplots(down, across, figsize=(max(8.5, 6 * across), 4.2 * down + 1), squeeze=False,
                                      sharex=True, sharey=True)
        for panel in panels.flat[len(depths):]:
            panel.set_visible(False)
        for panel, n_past in zip(panels.flat, depths):
            here = at(rows, n_past=n_past)
            for row in _arms(here):
                fill = fills.get(row["compiled_behind"], "full")
                _arm_point(panel, row, {**FAMILY_STYLES[_family(row)], "fillstyle": fill})
            leading = front(methods(here))
            steps = panel.step([row["speedup"]["value"] for row in leading],
                               [row["dkl_nats"]["value"] for row in leading], where="pre", color="#AAAAAA",
                               linewidth=2, zorder=1)
            handles["Pareto front"] = steps[0]
            for floor in at(here, arm="noise_floor"):
                if value_of(floor["dkl_nats"]) is not None:
                    handles["noise floor (prefill, other batches)"] = panel.axhline(
                        floor["dkl_nats"]["value"], color="#555555", linewidth=1.2, linestyle=":")
            handles[f"{KL_BAR_NATS:g} nats"] = panel.axhline(KL_BAR_NATS, color="#D55E00", linewidth=1,
                                                             linestyle="--")
            panel.set_title(f"{n_past} tokens of context", loc="left", fontsize=10)
            panel.grid(color="#EEEEEE", linewidth=0.5)
            panel.set_axisbelow(True)
        first = panels[0][0]
        if not _arms(rows):
            # Nothing to scale by: an axis that starts at 0 could not become logarithmic.
            first.set_xlim(1, 10)
        _plain_log(first.xaxis, "x")
        ends = [KL_BAR_NATS, *(end for row in placed(rows) for end in _ends(row["dkl_nats"]))]
        if min(ends) > 0:
            first.set_yscale("log")
            first.set_ylim(min(ends) / 2, 2 * max(ends))
        else:
            # An exact zero, such as a prefill's where batches are split alike, has its place below the decades.
            first.set_yscale("symlog", linthresh=LINEAR_BELOW_NATS, linscale=0.5)
            first.set_ylim(-3e-5, 2 * max(ends))
        for panel in panels[:, 0]:
            panel.set_ylabel(r"$D_{\mathrm{KL}}$(full prefill ‖ repaired), nats")
        # The last of each column, which is not the last row's where panels are left over.
        for panel in panels.flat[max(0, len(depths) - across):len(depths)]:
            panel.tick_params(labelbottom=True)
            panel.set_xlabel("speed-up, context resident (prefill time / splice time)")
        figure.suptitle(f"What recomputing a part of a block buys: {artifact['tuple']['model']}\n"
                        f"read behind the query, {level_text(artifact)} intervals; numbers are shares recomputed, %",
                        fontsize=10, x=0.01, ha="left")
        for family in (family for family in FAMILY_STYLES if family in map(_family, _arms(rows))):
            label = "oracle (control: knows the answer)" if family == "oracle" else family
            handles[label] = Line2D([], [], linestyle="none", **FAMILY_STYLES[family])
        for behind, fill in fills.items():
            handles[f"compiled behind {behind}"] = Line2D([], [], linestyle="none", color="#333333", marker="o",
                                                          markerfacecoloralt="white", fillstyle=fill)
        _legend_below(figure, handles, ncols=2 + across)
        # Last, because labels avoid each other in the final layout.
        for panel, n_past in zip(panels.flat, depths):
            if points := _arms(at(rows, n_past=n_past)):
                _label_shares(panel, points)
    return figure


def figure5(artifact: dict, published: dict) -> Figure:
    """Accuracy of choosing the right tool against the number of tools, with intervals (Figure 5)."""
    rows, claims = artifact["rows"], published["routing_accuracy_n250"]
    sizes = sorted({row["n_tools"] for row in rows})
    places = {n_tools: i for i, n_tools in enumerate(sizes)}
    default = artifact["config"]["routing"]["system"]
    handles = {}
    with matplotlib.rc_context(RC):
        figure, panel = plt.subplots(figsize=(8, 5.2))
        systems = [system for (system,) in distinct(rows, "system")]
        filled = (*CURVE_STYLES, *OTHER_STYLES)
        # More systems than styles: in the second round markers are hollow.
        styles = dict(zip(systems, cycle((*filled, *({**style, "markerfacecolor": "white"} for style in filled)))))
        for i, system in enumerate(systems):
            cells = sorted((row for row in at(rows, system=system) if value_of(row["accuracy"]) is not None),
                           key=lambda row: row["n_tools"])
            overflowing = _overflowing(at(rows, system=system))
            # Without any point, too: what overflows at every size is told in the legend.
            if cells or overflowing:
                # Curves stand a little apart, so that equal values do not hide each other.
                shift = 0.06 * (i - (len(systems) - 1) / 2)
                label = system + (" (default)" if system == default else "") + overflowing
                handles[label] = _curve(panel, [places[row["n_tools"]] + shift for row in cells],
                                        [_in_percent(row["accuracy"]) for row in cells], {**styles[system]})
        said = [(places[int(n)], 100 * share) for n, share in claims["accuracy"].items() if int(n) in places]
        if said:
            handles["published (slb+gate; other model, queries and tools)"] = panel.plot(
                *zip(*said), linestyle="none", marker="_", markersize=22, color="#333333")[0]
        panel.set_xticks(range(len(sizes)), [str(n_tools) for n_tools in sizes])
        panel.set_xlim(-0.5, len(sizes) - 0.5)
        panel.set_ylim(0, 102)
        panel.set_xlabel("tools to choose from")
        panel.set_ylabel("right tool chosen, %")
        panel.grid(axis="y", color="#DDDDDD", linewidth=0.5)
        panel.set_axisbelow(True)
        n = max((row["accuracy"]["n"] for row in rows if row["accuracy"]), default=0)
        figure.suptitle(f"Choosing among more tools: {n} queries, each asked at every size, {level_text(artifact)} "
                        f"Wilson intervals\nbaselines read schemas with {artifact['tuple']['model']} in a window of "
                        f"{artifact['config']['routing_accuracy_n250']['n_ctx']} tokens", fontsize=10,
                        x=0.01, ha="left")
        _legend_below(figure, handles, ncols=2)
    return figure


def spliced_choice(artifact: dict) -> Figure:
    """Right tool chosen from spliced tools, and what it costs.

    Above against the time to the first token, a panel per reading for one number of tools at one depth; below, arms
    that are measured at other points, too, against the number of tools and against the depth.
    """
    rows, middle = artifact["rows"], artifact["config"]["spliced_choice"]
    n_tools, depth = middle["at_n_tools"], middle["at_depth"]
    readings = [reading for reading in READING_TITLES if at(rows, reading=reading)]
    styles = dict(zip((arm for (arm,) in distinct(rows, "arm")), cycle(ALL_STYLES)))
    fills = dict(zip((name for (name,) in distinct(rows, "compiled_behind") if name is not None), cycle(FILLS)))
    handles = {}
    with matplotlib.rc_context(RC):
        figure, (above, below) = plt.subplots(2, 2, figsize=(10, 8.6), sharey=True)
        for panel in above[len(readings):]:
            panel.set_visible(False)
        for panel, reading in zip(above, readings):
            here = at(rows, reading=reading, n_tools=n_tools, depth=depth)
            for row in at(here, arm="full"):
                low, high = _ends(_in_percent(row["accuracy"]))
                handles["interval of the full prefill"] = panel.axhspan(low, high, color="#E4E4E4", linewidth=0,
                                                                        zorder=0)
            for row in here:
                if None not in (value_of(row["accuracy"]), value_of(row["ttft_ms"])):
                    mark = {name: styles[row["arm"]][name] for name in ("color", "marker")}
                    _choice_point(panel, row, mark | {"fillstyle": fills.get(row["compiled_behind"], "full")})
            _plain_log(panel.xaxis, "x", (1, 2, 5))
            panel.set_xlabel("time to the first token, ms")
            panel.set_title(f"{n_tools} tools behind {depth} tokens, {READING_TITLES[reading]}", loc="left", fontsize=9)
        for panel, axis, others, label in ((below[0], "n_tools", {"depth": depth}, "tools in the context"),
                                           (below[1], "depth", {"n_tools": n_tools}, "tokens before the tools")):
            here = at(rows, reading=readings[0], **others)
            places = {place: i for i, place in enumerate(sorted({row[axis] for row in here}))}
            curves = [key for key in distinct(here, "arm", "compiled_behind")
                      if len(at(here, arm=key[0], compiled_behind=key[1])) > 1]
            for i, (arm, behind) in enumerate(curves):
                cells = [row for row in sorted(at(here, arm=arm, compiled_behind=behind), key=lambda row: row[axis])
                         if value_of(row["accuracy"]) is not None]
                shift = 0.06 * (i - (len(curves) - 1) / 2)
                xs, shares = zip(*((places[row[axis]] + shift, _in_percent(row["accuracy"])) for row in cells))
                _curve(panel, xs, shares,
                       styles[arm] | {"fillstyle": fills.get(behind, "full"), "markerfacecoloralt": "white"})
            panel.set_xticks(range(len(places)), [str(place) for place in places])
            panel.set_xlabel(label)
            told = ", ".join(f"{value} {'tokens' if name == 'depth' else 'tools'}" for name, value in others.items())
            panel.set_title(f"{told}, {READING_TITLES[readings[0]]}", loc="left", fontsize=9)
        for panel in (*above, *below):
            panel.grid(color="#EEEEEE", linewidth=0.5)
            panel.set_axisbelow(True)
        for panel in (above[0], below[0]):
            panel.set_ylim(-2, 102)
            panel.set_ylabel("right tool chosen, %")
        handles |= {arm: Line2D([], [], **style) for arm, style in styles.items()}
        handles |= {f"compiled behind {'nothing' if name == 'start' else name}":
                    Line2D([], [], linestyle="none", color="#333333", marker="o", markerfacecoloralt="white",
                           fillstyle=fill) for name, fill in fills.items()}
        n = max((row["accuracy"]["n"] for row in rows if row["accuracy"]), default=0)
        figure.suptitle(f"Choosing among tools that are placed in the context: {artifact['tuple']['model']}, "
                        f"{n} queries, {level_text(artifact)} intervals", fontsize=10, x=0.01, ha="left")
        _legend_below(figure, handles, ncols=4)
    return figure


def _overflowing(rows: list[dict]) -> str:
    sizes = [str(row["n_tools"]) for row in rows if row["status"] == "overflow"]
    return f" (overflow at {', '.join(sizes)})" if sizes else ""


def _in_percent(metric: dict) -> dict:
    return {name: None if metric[name] is None else 100 * metric[name] for name in ("value", "ci_low", "ci_high")}


def _best_others(rows: list[dict]) -> list[str]:
    """Arms without a schedule that no other such arm beats in both mean speed-up and mean divergence."""
    means = []
    for (arm,) in distinct(at(rows, curve_k=None), "arm"):
        if cells := placed(at(rows, curve_k=None, arm=arm)):
            means.append({"arm": arm} | {key: {"value": sum(row[key]["value"] for row in cells) / len(cells)}
                                         for key in ("speedup", "dkl_nats")})
    return [row["arm"] for row in front(means)]


def _divergence_range(rows: list[dict]) -> str:
    """What the speed costs, for the legend: the least and the largest mean divergence of the rows."""
    values = [value_of(row["dkl_nats"]) for row in rows if value_of(row["dkl_nats"]) is not None]
    ends = dict.fromkeys(f"{end(values):.2g}" for end in (min, max)) if values else ()
    return f" (KL {' to '.join(ends)} nats)" if ends else ""


def _speedups(panel, places: dict[int, int], shift: float, rows: list[dict], style: dict):
    rows = sorted(rows, key=lambda row: row["n_past"])
    return _curve(panel, [places[row["n_past"]] + shift for row in rows], [row["speedup"] for row in rows], style)


def _curve(panel, xs: list[float], metrics: list[dict], style: dict):
    """The drawn errorbar container."""
    return panel.errorbar(xs, [metric["value"] for metric in metrics], yerr=_reach(metrics), capsize=3, linewidth=1.4,
                          markersize=5, elinewidth=1, **style)


def _reach(metrics: list[dict]) -> list[list[float]]:
    """How far the intervals reach below and above; 0 without one (identical samples), which draws a bare point."""
    ends = [_ends(metric) for metric in metrics]
    return [[metric["value"] - low for metric, (low, _) in zip(metrics, ends)],
            [high - metric["value"] for metric, (_, high) in zip(metrics, ends)]]


def _ends(metric: dict) -> tuple[float, float]:
    """The bounds of the metric's interval; its value twice without one."""
    return (metric["value"],) * 2 if metric["ci_low"] is None else (metric["ci_low"], metric["ci_high"])


def _arms(rows: list[dict]) -> list[dict]:
    """The rows that are drawn as points: all that were placed but the noise floor, which is a line."""
    return placed(row for row in rows if _family(row) in FAMILY_STYLES)


def _family(row: dict) -> str:
    """The family of a row's arm, which may carry an amount: `head` of `head-16`."""
    return re.sub(r"-[\d.]+%?", "", row["arm"])


def _arm_point(panel, row: dict, style: dict) -> None:
    speedup, dkl = row["speedup"], row["dkl_nats"]
    panel.errorbar([speedup["value"]], [dkl["value"]], xerr=_reach([speedup]), yerr=_reach([dkl]), linestyle="none",
                   markersize=6, elinewidth=0.6, markerfacecoloralt="white", **style)


def _choice_point(panel, row: dict, style: dict):
    time, share = row["ttft_ms"], _in_percent(row["accuracy"])
    return panel.errorbar([time["value"]], [share["value"]], xerr=_reach([time]), yerr=_reach([share]),
                          linestyle="none", markersize=6, elinewidth=0.6, markerfacecoloralt="white", **style)


def _label_shares(panel, rows: list[dict]) -> None:
    """Write each point's share beside it, where no marker and no other label is; a point in a crowd goes without."""
    figure = panel.figure
    pixels = figure.dpi / 72
    points = panel.transData.transform([(row["speedup"]["value"], row["dkl_nats"]["value"]) for row in rows])
    taken = [Bbox.from_bounds(x - 3 * pixels, y - 3 * pixels, 6 * pixels, 6 * pixels) for x, y in points]
    for row, (x, y) in zip(rows, points):
        text = f"{row['recompute_pct']:.3g}"
        width, height = 4 * len(text), 5.5
        for dx, dy in LABEL_PLACES:
            gap = 3.2 if dx and dy else 5
            left, bottom = dx * (width / 2 + gap) - width / 2, dy * (height / 2 + gap) - height / 2
            box = Bbox.from_bounds(x + left * pixels, y + bottom * pixels, width * pixels, height * pixels)
            if not any(box.overlaps(other) for other in taken):
                taken.append(box)
                panel.annotate(text, (row["speedup"]["value"], row["dkl_nats"]["value"]), (left, bottom),
                               textcoords="offset points", fontsize=6, color="#333333")
                break


def _plain_log(axis, name: str, ticks: tuple[float, ...] = (1, 1.2, 1.5, 2, 3, 5, 7)) -> None:
    """A logarithmic axis ("x" or "y") with plain numbers, also where it spans less than a decade."""
    getattr(axis.axes, f"set_{name}scale")("log")
    axis.set_major_locator(LogLocator(subs=ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _legend_below(figure: Figure, handles: dict, ncols: int) -> None:
    """Lay the figure out above a legend as high as its lines."""
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=ncols, frameon=False, fontsize=8,
                  handlelength=3.5)
    room = (0.17 * -(-len(handles) // ncols) + 0.15) / figure.get_figheight()
    figure.tight_layout(rect=(0, room, 1, 1))


def save(figure: Figure, path: Path) -> list[Path]:
    """The written files, `path` with the endings .svg, .png and .pdf; no date and no version in them."""
    written = []
    with matplotlib.rc_context(RC):
        for ending, metadata in METADATA.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format=ending, dpi=200, metadata=metadata)
            target = path.with_suffix(f".{ending}")
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, buffer.getvalue())
            written.append(target)
    plt.close(figure)
    return written


def svg(figure: Figure) -> str:
    """The figure as SVG text, the bytes that `save` writes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(RC):
        figure.savefig(buffer, format="svg", dpi=200, metadata=METADATA["svg"])
    plt.close(figure)
    return buffer.getvalue().decode("utf-8")

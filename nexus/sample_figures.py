"""Figures of samples, for notebooks: every measurement is a mark, where the figures of a run show means and intervals.

Each function returns the figure, drawn from data frames of `nexus.results`.
"""
from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nexus.figures import LINEAR_BELOW_NATS, PROBE_TITLES, RC, STYLES

CONTEXTS = {"on": {"label": "conversation on the tool's subject", "color": "#0072B2", "marker": "o"},
            "off": {"label": "conversation on another subject", "color": "#D55E00", "marker": "s"}}
DRIFTS = {"max_drift": "the head that drifts most", "mean_drift": "mean over all heads"}
WORDINGS = {"own": "own: the tool's words", "paraphrase": "paraphrase: no word of its name"}
RIGHT, WRONG, ABSENT = "#E4EEF5", "#C44E00", "#FFFFFF"


def key_drift(gating: pd.DataFrame, run: str) -> Figure:
    """How far re-anchored keys lie from those of a full prefill, against depth; one mark per tool, a line of medians.

    `gating` are the samples of `gating_nogo`, which have the drift once per predictor. Each panel has an axis of its
    own.
    """
    drift = gating.drop_duplicates(["n_past", "context", "case"])
    depths = sorted(drift["n_past"].unique())
    with plt.rc_context(RC):
        figure, panels = plt.subplots(1, len(DRIFTS), figsize=(9.2, 3.8))
        for panel, (column, title) in zip(panels, DRIFTS.items()):
            for i, (context, style) in enumerate(CONTEXTS.items()):
                here = drift[drift["context"] == context]
                if here.empty:
                    continue
                places = here["n_past"].map(depths.index) + 0.24 * (i - 0.5)
                panel.plot(places, here[column], linestyle="none", markersize=4, alpha=0.55, markeredgewidth=0,
                           color=style["color"], marker=style["marker"])
                medians = here.groupby("n_past")[column].median()
                panel.plot([depths.index(n_past) + 0.24 * (i - 0.5) for n_past in medians.index], medians,
                           linewidth=1.6, markersize=8, markerfacecolor="white", **style)
            panel.set_title(title, loc="left", fontsize=10)
            panel.set_ylim(0, 1.08 * drift[column].max())
            panel.set_xticks(range(len(depths)), [str(n_past) for n_past in depths])
            panel.set_xlim(-0.5, len(depths) - 0.5)
            panel.set_xlabel("depth of the context (tokens)")
            panel.grid(axis="y", color="#DDDDDD", linewidth=0.5)
            panel.set_axisbelow(True)
        panels[0].set_ylabel("drift of keys (L2, model's own unit)")
        figure.suptitle(f"Keys of a moved and re-anchored block against a full prefill: {run}, "
                        f"{drift['case'].nunique()} tools", fontsize=10, x=0.01, ha="left")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False, fontsize=8)
        figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def reanchoring(sweep: pd.DataFrame, run: str) -> Figure:
    """Divergence against the distance moved, keys re-anchored or not; a thin line per tool, a thick one of medians.

    `sweep` are the samples of `dkl_sweep`; one panel per probe. Below 1e-4 nats the axis is linear, so that exact zeros
    show.
    """
    offsets = sorted(sweep["offset"].unique())
    probes = [probe for probe in PROBE_TITLES if probe in set(sweep["probe"])]
    handles = {}
    with plt.rc_context(RC):
        figure, panels = plt.subplots(1, len(probes), figsize=(4.6 * len(probes), 3.9), sharey=True, squeeze=False)
        for panel, probe in zip(panels[0], probes):
            for arm, style in STYLES.items():
                here = sweep[(sweep["probe"] == probe) & (sweep["arm"] == arm)].sort_values("offset")
                if here.empty:
                    continue
                for _, one in here.groupby("case"):
                    panel.plot(one["offset"].map(offsets.index), one["dkl_nats"], color=style["color"], linewidth=0.6,
                               alpha=0.35)
                medians = here.groupby("offset")["dkl_nats"].median()
                handles[style["label"]] = panel.plot([offsets.index(offset) for offset in medians.index], medians,
                                                     linewidth=2, markersize=5, **style)[0]
            panel.set_title(f"Read {PROBE_TITLES[probe]}", loc="left", fontsize=10)
            panel.set_yscale("symlog", linthresh=LINEAR_BELOW_NATS, linscale=0.5)
            panel.set_xticks(range(len(offsets)), [str(offset) for offset in offsets])
            panel.set_xlabel("distance from the compile position (tokens)")
            panel.grid(axis="y", color="#DDDDDD", linewidth=0.5)
            panel.set_axisbelow(True)
        panels[0][0].set_ylim(-2e-5, 2 * sweep["dkl_nats"].max())
        panels[0][0].set_ylabel(r"$D_{\mathrm{KL}}$(full prefill ‖ spliced), nats")
        figure.suptitle(f"What re-anchoring mends, and what it leaves: {run}, {sweep['case'].nunique()} tools, "
                        "thick lines are medians", fontsize=10, x=0.01, ha="left")
        figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=3, frameon=False, fontsize=8)
        figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def error_map(choices: pd.DataFrame, n_tools: int, run: str) -> Figure:
    """Which query fails under which system among `n_tools`: queries by difficulty, systems by errors, fewest on top.

    `choices` are `results.routing_choices`. One panel per wording. Systems that fit no query are left out.
    Raises ValueError for a number of tools that the run does not have.
    """
    asked = choices[(choices["n_tools"] == n_tools) & (choices["status"] == "ok")]
    if asked.empty:
        known = ", ".join(str(n) for n in sorted(choices["n_tools"].unique()))
        raise ValueError(f"n_tools {n_tools} is not in this run; it has {known}")
    asked = asked.assign(right=asked["right"].astype(float), wording=asked["wording"].fillna("own"))
    systems = asked.groupby("system")["right"].mean().sort_values(ascending=False, kind="stable").index
    wordings = [wording for wording in WORDINGS if wording in set(asked["wording"])]
    widths = [asked.loc[asked["wording"] == wording, "case"].nunique() for wording in wordings]
    with plt.rc_context(RC):
        figure, panels = plt.subplots(1, len(wordings), figsize=(10.5, 1.5 + 0.24 * len(systems)), sharey=True,
                                      squeeze=False, width_ratios=widths)
        for panel, wording in zip(panels[0], wordings):
            grid = asked[asked["wording"] == wording].pivot(index="system", columns="case", values="right")
            grid = grid.reindex(systems)
            grid = grid[grid.mean().sort_values(ascending=False, kind="stable").index]
            # 0 is wrong, 1 right; what was not asked stays white.
            panel.pcolormesh(grid.to_numpy(), cmap=ListedColormap([WRONG, RIGHT]), vmin=0, vmax=1, edgecolors=ABSENT,
                             linewidth=0.7)
            panel.set_title(WORDINGS[wording], loc="left", fontsize=9)
            panel.set_xticks([])
            panel.set_xlabel(f"{grid.shape[1]} queries, hardest on the right")
            panel.tick_params(length=0)
            for side in panel.spines.values():
                side.set_visible(False)
        panels[0][0].invert_yaxis()
        errors = asked.groupby("system")["right"].agg(lambda right: int((1 - right).sum()))
        panels[0][0].set_yticks([i + 0.5 for i in range(len(systems))],
                                [f"{system}  {errors[system]}" for system in systems])
        figure.suptitle(f"Which query fails under which system, {n_tools} tools: {run}; numbers count errors",
                        fontsize=10, x=0.01, ha="left")
        figure.legend([Patch(color=WRONG), Patch(color=RIGHT)], ["wrong tool", "right tool"], loc="lower right",
                      ncols=2, frameon=False, fontsize=8)
        figure.tight_layout(rect=(0, 0.02, 1, 1))
    return figure

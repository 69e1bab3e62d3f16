"""Figures 2 and 3, which show mechanisms and no data: drawn from code, so that they say what this code does."""
from __future__ import annotations

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from nexus.figures import RC, plt

ROUTING, SPLICING, NEUTRAL = "#0072B2", "#D55E00", "#333333"
FILLS = {ROUTING: "#E3F0F8", SPLICING: "#FBEADF", NEUTRAL: "#F2F2F2"}
Box = tuple[float, float, float, float]
Point = tuple[float, float]


def figure2() -> Figure:
    """The way of a request: routing by retrieval below, placing a compiled block above."""
    with matplotlib.rc_context(RC):
        figure, panel = _canvas(9.4, 4.6, "The way of a request: what depends on the context's depth, and what not")
        query = _box(panel, 0.2, 1.75, 1.3, 0.8, "user's query")
        context = _box(panel, 0.2, 3.35, 1.3, 0.8, "context,\nn tokens deep")
        anchor = _box(panel, 2.3, 3.35, 1.75, 0.8, "block moved to n,\nkeys re-rotated", SPLICING)
        bare = _box(panel, 4.75, 3.75, 1.95, 0.6, "n ≤ P = 256:\nbare splice", SPLICING)
        repair = _box(panel, 4.75, 2.85, 1.95, 0.6, "deeper: R(n) of the\nblock decoded again", SPLICING)
        text = _box(panel, 7.4, 3.3, 1.8, 0.8, "schema in the\ncache (or prefilled)", SPLICING)
        embed = _box(panel, 2.0, 1.75, 1.15, 0.8, "embedding,\nINT8", ROUTING)
        scan = _box(panel, 3.45, 1.75, 1.15, 0.8, "scan of all\ntools", ROUTING)
        gate = _box(panel, 4.95, 1.75, 1.3, 0.8, "margin of the\nfirst two > τ?", ROUTING)
        cross = _box(panel, 4.95, 0.45, 1.3, 0.7, "cross-encoder", ROUTING)
        tool = _box(panel, 6.7, 1.75, 0.8, 0.8, "tool", ROUTING)
        call = _box(panel, 7.95, 1.55, 1.25, 1.2, "arguments from\na signature,\nunder a\ngrammar", ROUTING)
        for start, end in ((query, embed), (embed, scan), (scan, gate), (tool, call)):
            _arrow(panel, _right(start), _left(end), ROUTING)
        _arrow(panel, _right(gate), _left(tool), ROUTING, "yes")
        _arrow(panel, _below(gate), _above(cross), ROUTING, "no")
        _arrow(panel, _right(cross), _below(tool), ROUTING, bend=0.25)
        for start, end in ((context, anchor), (anchor, bare), (anchor, repair), (bare, text), (repair, text)):
            _arrow(panel, _right(start), _left(end), SPLICING, dashed=True)
        panel.text(0.2, 4.3, "Placing a block (§ IV): its cost and its fidelity depend on the depth n", color=SPLICING)
        panel.text(0.2, 0.1, "Routing (§ V): depends on query and registry, never on the context", color=ROUTING)
    return figure


def figure3() -> Figure:
    """How a compiled block gets into the cache: mapped, copied with rotated keys, and its end decoded again."""
    with matplotlib.rc_context(RC):
        figure, panel = _canvas(8.7, 4.3, "From a block file into the cache, and what the published repair decodes")
        panel.text(0.2, 4.05, "block file (.atb), mapped without a copy", fontsize=9, color=NEUTRAL)
        header = _box(panel, 0.2, 3.1, 1.5, 0.75, "header, 128 bytes:\nanchor m₀, RoPE,\nmodel, checksums",
                      fontsize=7)
        keys = _box(panel, 2.1, 3.1, 3.0, 0.75, "keys, F16", ROUTING)
        values = _box(panel, 5.4, 3.1, 3.0, 0.75, "values, F16", ROUTING)
        check = _box(panel, 0.2, 1.85, 1.5, 0.8, "equal to the live\nmodel's? else refused,\nthe field named",
                     fontsize=7)
        _arrow(panel, _below(header), _above(check), NEUTRAL)
        turn = _box(panel, 2.1, 1.95, 3.0, 0.6, "every pair rotated by (n − m₀)·θᵢ", ROUTING)
        order = _box(panel, 5.4, 1.95, 3.0, 0.6, "rows as they are, or transposed", ROUTING)
        for start, end in ((keys, turn), (values, order)):
            _arrow(panel, _below(start), _above(end), ROUTING)
        panel.text(0.2, 1.38, "live cache", fontsize=9, color=NEUTRAL)
        _cells(panel, 0.2, 0.55, 11, 0.3, NEUTRAL)
        _cells(panel, 3.55, 0.55, 9, 0.3, ROUTING)
        _cells(panel, 6.3, 0.55, 3, 0.3, SPLICING)
        _cells(panel, 7.3, 0.55, 4, 0.3, NEUTRAL)
        _arrow(panel, _below(turn), (4.2, 1.02), ROUTING)
        _arrow(panel, _below(order), (5.6, 1.02), ROUTING)
        panel.text(1.85, 0.25, "context, n tokens", ha="center", fontsize=8)
        panel.text(4.9, 0.25, "block of S tokens", ha="center", fontsize=8, color=ROUTING)
        panel.text(6.75, 0.25, "⌈S·R/100⌉ again", ha="center", fontsize=8, color=SPLICING)
        panel.text(7.95, 0.25, "query", ha="center", fontsize=8)
    return figure


def _canvas(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    figure, panel = plt.subplots(figsize=(width, height))
    panel.set_xlim(0, width)
    panel.set_ylim(0, height)
    panel.axis("off")
    figure.subplots_adjust(left=0, right=1, bottom=0, top=0.93)
    figure.suptitle(title, fontsize=10, x=0.02, ha="left")
    return figure, panel


def _box(panel: Axes, x: float, y: float, width: float, height: float, text: str, colour: str = NEUTRAL,
         fontsize: float = 8) -> Box:
    panel.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08", linewidth=1.2,
                                   edgecolor=colour, facecolor=FILLS[colour]))
    panel.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=fontsize)
    return x, y, width, height


def _cells(panel: Axes, x: float, y: float, count: int, size: float, colour: str) -> None:
    for i in range(count):
        panel.add_patch(Rectangle((x + i * size, y), size, 1.5 * size, linewidth=0.8, edgecolor=colour,
                                  facecolor=FILLS[colour]))


def _arrow(panel: Axes, start: Point, end: Point, colour: str, label: str = "", dashed: bool = False,
           bend: float = 0.0) -> None:
    panel.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, linewidth=1.3, color=colour,
                                    linestyle="--" if dashed else "-", shrinkA=1, shrinkB=1,
                                    connectionstyle=f"arc3,rad={bend}"))
    if label:
        down = start[0] == end[0]
        panel.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.06, f" {label}" if down else label,
                   ha="left" if down else "center", fontsize=8, color=colour)


def _left(box: Box) -> Point:
    return box[0], box[1] + box[3] / 2


def _right(box: Box) -> Point:
    return box[0] + box[2], box[1] + box[3] / 2


def _above(box: Box) -> Point:
    return box[0] + box[2] / 2, box[1] + box[3]


def _below(box: Box) -> Point:
    return box[0] + box[2] / 2, box[1]

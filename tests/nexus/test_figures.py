"""Figures from a synthetic artifact: complete, and the same bytes twice."""
from __future__ import annotations

import json

from nexus import figures
from nexus.config import ROOT

PUBLISHED = json.loads((ROOT / "results" / "published.json").read_text())


def metric(value, low, high):
    return {"value": value, "ci_low": low, "ci_high": high, "n": 5, "method": "synthetic", "level": 0.95}


def synthetic(arms=tuple(figures.STYLES)):
    return {"tuple": {"model": "synthetic"}, "rows": [
        {"offset": offset, "arm": arm, "probe": probe,
         "dkl_nats": metric(0.0, None, None) if offset == 0 else metric(0.01 * offset, 0.005 * offset, 0.02 * offset)}
        for offset in (0, 64, 256) for arm in arms for probe in figures.PROBE_TITLES]}


def test_figure_1_has_the_same_bytes_twice(tmp_path):
    for folder in ("a", "b"):
        figures.save(figures.figure1(synthetic(), PUBLISHED), tmp_path / folder / "figure1")
    for ending in ("svg", "png"):
        first = (tmp_path / "a" / f"figure1.{ending}").read_bytes()
        assert first == (tmp_path / "b" / f"figure1.{ending}").read_bytes() and len(first) > 1000


def test_figure_1_names_every_arm_the_band_and_the_probes(tmp_path):
    svg, _ = figures.save(figures.figure1(synthetic(), PUBLISHED), tmp_path / "figure1")
    text = svg.read_text()
    for label in [*(style["label"] for style in figures.STYLES.values()), *figures.PROBE_TITLES.values(),
                  "published band", "P = 256"]:
        assert label in text


def test_curves_are_told_apart_without_colour():
    styles = figures.STYLES.values()
    assert len({style["marker"] for style in styles}) == len({style["linestyle"] for style in styles}) == len(styles)


def test_every_interval_lies_inside_the_axes():
    figure = figures.figure1(synthetic(), PUBLISHED)
    top = max(row["dkl_nats"]["ci_high"] or 0 for row in synthetic()["rows"])
    assert all(axes.get_ylim()[0] <= 0 and axes.get_ylim()[1] >= top for axes in figure.axes)


def test_a_run_without_some_arm_is_drawn(tmp_path):
    svg, _ = figures.save(figures.figure1(synthetic(arms=("bare",)), PUBLISHED), tmp_path / "figure1")
    assert "noise floor" not in svg.read_text()

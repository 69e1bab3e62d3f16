"""Figures from a synthetic artifact: complete, and the same bytes twice."""
from __future__ import annotations

import copy
import json

import pytest

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
    svg = (tmp_path / "a" / "figure1.svg").read_text()
    assert "<dc:date>" not in svg and "Matplotlib v" not in svg


def test_a_changed_value_changes_the_figure(tmp_path):
    artifact = synthetic()
    drawn = [path.read_bytes() for path in figures.save(figures.figure1(artifact, PUBLISHED), tmp_path / "a")]
    artifact["rows"][-1]["dkl_nats"]["value"] *= 1.1
    changed = [path.read_bytes() for path in figures.save(figures.figure1(artifact, PUBLISHED), tmp_path / "b")]
    assert all(one != other for one, other in zip(drawn, changed))


def test_drawing_does_not_change_the_artifact():
    artifact = synthetic()
    before = copy.deepcopy(artifact)
    figures.figure1(artifact, PUBLISHED)
    assert artifact == before


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


@pytest.mark.parametrize("value", [0.0, 0.3])
def test_values_without_an_interval_are_drawn_as_bare_points(tmp_path, value):
    artifact = synthetic()
    for row in artifact["rows"]:
        row["dkl_nats"] = metric(value, None, None)
    figure = figures.figure1(artifact, PUBLISHED)
    for panel in figure.axes:
        assert len(panel.containers) == len(figures.STYLES)
        for container in panel.containers:
            line, _, (bars,) = container
            assert list(line.get_ydata()) == [value] * 3
            assert all(low[1] == high[1] == value for low, high in bars.get_segments())
    assert len(figures.save(figure, tmp_path / "figure1")) == 2


def test_intervals_reach_from_bound_to_bound():
    panel = figures.figure1(synthetic(arms=("bare",)), PUBLISHED).axes[0]
    (_, _, (bars,)), = panel.containers
    spans = [(low[1], high[1]) for low, high in bars.get_segments()]
    assert spans == [(0, 0), pytest.approx((0.32, 1.28)), pytest.approx((1.28, 5.12))]


def test_a_run_with_one_probe_and_one_offset_is_drawn(tmp_path):
    artifact = synthetic()
    artifact["rows"] = [row for row in artifact["rows"] if row["probe"] == "query" and row["offset"] == 64]
    svg, _ = figures.save(figures.figure1(artifact, PUBLISHED), tmp_path / "figure1")
    text = svg.read_text()
    assert figures.PROBE_TITLES["query"] in text and figures.PROBE_TITLES["block_end"] not in text
    assert "P = 256" not in text, "an offset that was not measured has no place on the axis"

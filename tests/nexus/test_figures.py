"""Figures from a synthetic artifact: complete, and the same bytes twice."""
from __future__ import annotations

import copy
import json

import pytest
import repair_artifacts
import routing_artifacts
from experiments import figures as experiment
from nexus import figures
from nexus.config import ROOT, compose, validate
from nexus.tables import MissingArtifact


@pytest.fixture(autouse=True)
def no_figure_is_left_open():
    yield
    figures.plt.close("all")


PUBLISHED = json.loads((ROOT / "results" / "published.json").read_text())
REPAIR_FIGURES = {
    "figure4": (repair_artifacts.ttft, lambda made: figures.figure4(made, PUBLISHED)),
    "frontier": (repair_artifacts.frontier, figures.frontier),
}


def metric(value, low, high, level=0.95):
    return {"value": value, "ci_low": low, "ci_high": high, "n": 5, "method": "synthetic", "level": level}


def synthetic(arms=tuple(figures.STYLES)):
    return {"tuple": {"model": "synthetic"}, "rows": [
        {"offset": offset, "arm": arm, "probe": probe,
         "dkl_nats": metric(0.0, None, None) if offset == 0 else metric(0.01 * offset, 0.005 * offset, 0.02 * offset)}
        for offset in (0, 64, 256) for arm in arms for probe in figures.PROBE_TITLES]}


def test_figure_1_has_the_same_bytes_twice(tmp_path):
    for folder in ("a", "b"):
        figures.save(figures.figure1(synthetic(), PUBLISHED), tmp_path / folder / "figure1")
    for ending in ("svg", "png", "pdf"):
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
    svg, *_ = figures.save(figures.figure1(synthetic(), PUBLISHED), tmp_path / "figure1")
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
    svg, *_ = figures.save(figures.figure1(synthetic(arms=("bare",)), PUBLISHED), tmp_path / "figure1")
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
    assert len(figures.save(figure, tmp_path / "figure1")) == 3


def test_intervals_reach_from_bound_to_bound():
    panel = figures.figure1(synthetic(arms=("bare",)), PUBLISHED).axes[0]
    (_, _, (bars,)), = panel.containers
    spans = [(low[1], high[1]) for low, high in bars.get_segments()]
    assert spans == [(0, 0), pytest.approx((0.32, 1.28)), pytest.approx((1.28, 5.12))]


def test_a_run_with_one_probe_and_one_offset_is_drawn(tmp_path):
    artifact = synthetic()
    artifact["rows"] = [row for row in artifact["rows"] if row["probe"] == "query" and row["offset"] == 64]
    svg, *_ = figures.save(figures.figure1(artifact, PUBLISHED), tmp_path / "figure1")
    text = svg.read_text()
    assert figures.PROBE_TITLES["query"] in text and figures.PROBE_TITLES["block_end"] not in text
    assert "P = 256" not in text, "an offset that was not measured has no place on the axis"


def legend_of(figure):
    legend, = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def lines_at(panel, y):
    """The horizontal lines across a panel at this height."""
    return [line for line in panel.lines if list(line.get_xdata()) == [0, 1] and list(line.get_ydata()) == [y, y]]


def test_figure_1_takes_the_level_from_the_artifact():
    artifact = synthetic()
    for row in artifact["rows"]:
        row["dkl_nats"]["level"] = 0.8
    assert "80 % bootstrap intervals" in figures.figure1(artifact, PUBLISHED).get_suptitle()


@pytest.mark.parametrize("name", REPAIR_FIGURES)
def test_repair_figures_have_the_same_bytes_twice_and_leave_the_artifact_alone(name, tmp_path):
    make, draw = REPAIR_FIGURES[name]
    made = make(depths=(256, 1024), level=0.9)
    before = copy.deepcopy(made)
    first, second = (figures.save(draw(made), tmp_path / folder / name) for folder in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second] and made == before
    assert "90 % intervals" in first[0].read_text()


@pytest.mark.parametrize("name", REPAIR_FIGURES)
def test_repair_figures_of_one_row_and_of_nothing_measured_are_drawn(name, tmp_path):
    make, draw = REPAIR_FIGURES[name]
    made = make(depths=(256,))
    made["rows"] = made["rows"][:1]
    assert len(figures.save(draw(made), tmp_path / "one")) == 3
    made["rows"][0] |= {"dkl_nats": None, "speedup": None}
    assert len(figures.save(draw(made), tmp_path / "none")) == 3


def test_figure_4_draws_schedules_published_markers_and_the_best_others():
    figure = figures.figure4(repair_artifacts.ttft(), PUBLISHED)
    cold, warm = figure.axes
    assert lines_at(cold, 1) and lines_at(warm, 1)
    drawn = {panel: {container.get_label(): container for container in panel.containers} for panel in (cold, warm)}
    assert list(drawn[cold]) == ["schedule R(n), K = 4 (KL 0 to 0.08 nats)",
                                 "schedule R(n), K = 16 (KL 0.0081 to 0.08 nats)",
                                 "published, K = 4 (14B model, other machine)",
                                 "published, K = 16 (14B model, other machine)"]
    # The engine's shift is slower than head-4 and further from prefill.
    assert [label.split(" (")[0] for label in drawn[warm]][2:] == ["head-10%", "head-4", "none", "group-cache"]
    assert sorted(legend_of(figure)) == sorted({**drawn[cold], **drawn[warm]})
    published, _, (bars,) = drawn[cold]["published, K = 4 (14B model, other machine)"]
    assert list(published.get_ydata()) == [1.63, 1.24, 0.98, 1.00] and published.get_markerfacecolor() == "white"
    assert [(low[1], high[1]) for low, high in bars.get_segments()] == [
        pytest.approx(ci) for ci in ((1.62, 1.67), (1.23, 1.25), (0.97, 1.00), (0.99, 1.00))]


def test_figure_4_draws_more_schedules_and_arms_than_there_are_styles():
    made = repair_artifacts.ttft()
    curves = [2.0, 4.0, 8.0, 16.0, 32.0]
    arms = [f"head-{i}" for i in range(len(figures.OTHER_STYLES) + 2)]
    made["rows"] = [
        *(repair_artifacts.ttft_row("suffix-R(n)", n_past, "warm", 2.0 + curve, 0.01, curve)
          for n_past in (256, 512) for curve in curves),
        # Each is faster and further from the prefill than the last, so that none is beaten.
        *(repair_artifacts.ttft_row(arm, n_past, "warm", 3.0 + i, 0.01 * (i + 1))
          for n_past in (256, 512) for i, arm in enumerate(arms))]
    panel, = figures.figure4(made, PUBLISHED).axes
    drawn = {container.get_label().split(" (KL")[0] for container in panel.containers}
    assert drawn == {f"schedule R(n), K = {curve:g}" for curve in curves} | set(arms)


def test_the_frontier_names_more_origins_than_there_are_fills():
    origins = [f"preamble-{i + 1}" for i in range(len(figures.FILLS) + 2)]
    rows = [repair_artifacts.repair_row("head", 10.0, 256, 0.01 * (i + 1), 4.0 + i, behind)
            for i, behind in enumerate(origins)]
    named = legend_of(figures.frontier(repair_artifacts.artifact("repair_frontier", rows)))
    assert {f"compiled behind {behind}" for behind in origins} <= set(named)


def test_figure_4_of_one_protocol_has_one_panel():
    made = repair_artifacts.ttft()
    made["rows"] = [row for row in made["rows"] if row["protocol"] == "warm"]
    figure = figures.figure4(made, PUBLISHED)
    assert len(figure.axes) == 1 and not any("published" in label for label in legend_of(figure))


def test_the_frontier_has_a_panel_per_depth_with_floor_bar_and_front():
    made = repair_artifacts.frontier()
    figure = figures.frontier(made)
    assert [panel.get_title("left") for panel in figure.axes] == [f"{n} tokens of context"
                                                                  for n in (256, 512, 1024, 2048)]
    for panel in figure.axes:
        (floor,), (bar,) = lines_at(panel, 0.0015), lines_at(panel, 0.02)
        assert (floor.get_linestyle(), bar.get_linestyle()) == (":", "--")
        front, = (line for line in panel.lines if line.get_drawstyle() == "steps-pre")
        assert list(front.get_xdata()) == sorted(front.get_xdata())
        assert list(front.get_ydata()) == sorted(front.get_ydata()) and front.get_ydata()[0] == 0
        low, high = panel.get_ylim()
        assert low < 0 and high > max(row["dkl_nats"]["ci_high"] or 0 for row in made["rows"])


def test_the_frontier_leaves_oracle_and_other_probe_out_of_the_front():
    rows = [repair_artifacts.repair_row("head", 10.0, 256, 0.01, 4.0),
            repair_artifacts.repair_row("oracle", 10.0, 256, 0.001, 9.0),
            repair_artifacts.repair_row("none", 0.0, 256, 0.0001, 9.0, probe="block_end")]
    figure = figures.frontier(repair_artifacts.artifact("repair_frontier", rows))
    panel, = figure.axes
    assert panel.get_yscale() == "log" and panel.get_ylim() == pytest.approx((0.0005 / 2, 0.02 * 2)), "no zero to show"
    front, = (line for line in panel.lines if line.get_drawstyle() == "steps-pre")
    assert list(front.get_xdata()) == [4.0]
    assert [text.get_text() for text in panel.texts] == ["10", "10"], "each point has its share"
    assert [name for name in legend_of(figure) if name in figures.FAMILY_STYLES or "oracle" in name] == [
        "head", "oracle (control: knows the answer)"]


def test_families_are_told_apart_by_marker_and_origins_by_fill():
    markers = [style["marker"] for style in figures.FAMILY_STYLES.values()]
    assert len(set(markers)) == len(markers) and len(set(figures.FILLS)) == len(figures.FILLS)
    styles = [*figures.CURVE_STYLES, *figures.OTHER_STYLES]
    assert len({style["marker"] for style in styles}) == len({style["linestyle"] for style in styles}) == len(styles)


def test_shares_in_a_crowd_do_not_write_over_each_other():
    figure = figures.frontier(repair_artifacts.frontier(depths=(256,)))
    renderer = figure.canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in figure.axes[0].texts]
    assert len(boxes) > 20
    assert not [1 for i, box in enumerate(boxes) for other in boxes[:i] if box.shrunk(0.7, 0.7).overlaps(
        other.shrunk(0.7, 0.7))]


def test_the_experiment_draws_all_or_nothing(tmp_path):
    cfg = validate(compose(["profile=quick"]))
    with pytest.raises(MissingArtifact, match="dkl_sweep.json is missing.*experiments.dkl_sweep .*profile=quick"):
        experiment.run(cfg, tmp_path)
    assert not list(tmp_path.iterdir())


def figure5(**choices):
    return figures.figure5(routing_artifacts.accuracy(**choices), PUBLISHED)


def test_figure_5_has_the_same_bytes_twice_and_leaves_the_artifact_alone(tmp_path):
    made = routing_artifacts.accuracy(level=0.9)
    before = copy.deepcopy(made)
    first, second = (figures.save(figures.figure5(made, PUBLISHED), tmp_path / folder / "figure5") for folder in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second] and made == before
    made["rows"][0]["accuracy"]["value"] -= 0.05
    assert figures.save(figures.figure5(made, PUBLISHED), tmp_path / "c" / "figure5")[0].read_bytes() != (
        first[0].read_bytes())
    text = first[0].read_text()
    assert "100 queries, each asked at every size, 90 % Wilson intervals" in text and "with synthetic" in text


def test_figure_5_names_every_system_the_default_and_what_overflows():
    told = legend_of(figure5())
    assert told == ["slb", "slb-no-name", "bm25", "hybrid", "slb+gate", "hybrid+gate (default)",
                    "concat_all (overflow at 100, 250)", "rag_mcp",
                    "published (slb+gate; other model, queries and tools)"]


def test_figure_5_draws_every_size_and_no_point_where_schemas_overflow():
    figure = figure5()
    panel, = figure.axes
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["10", "50", "100", "250"]
    drawn = dict(zip(legend_of(figure), panel.containers))
    default, _, (bars,) = drawn["hybrid+gate (default)"]
    assert list(default.get_ydata()) == pytest.approx([96, 95, 95, 94])
    assert len(bars.get_segments()) == 4
    low, high = bars.get_segments()[-1][:, 1]
    assert (low, high) == (pytest.approx(87.5, abs=0.1), pytest.approx(97.2, abs=0.1))
    baseline, _, _ = drawn["concat_all (overflow at 100, 250)"]
    assert list(baseline.get_ydata()) == pytest.approx([97, 97])
    assert [round(x) for x in baseline.get_xdata()] == [0, 1]


def test_figure_5_sets_equal_curves_apart_and_tells_them_apart_without_colour():
    same = dict.fromkeys(routing_artifacts.ROUTED, (0.9, 0.9))
    panel, = figure5(systems=same).axes
    lines = [container[0] for container in panel.containers]
    assert len({line.get_xdata()[0] for line in lines}) == len(lines) == len(same)
    assert len({(line.get_marker(), str(line.get_linestyle())) for line in lines}) == len(lines)
    assert all(abs(line.get_xdata()[i] - i) < 0.5 for line in lines for i in range(4)), "nearest to its own size"


def test_figure_5_marks_the_published_shares_at_the_sizes_that_were_measured():
    for sizes, shares in (((10, 50, 100, 250), [92, 90, 89, 89]), ((10, 50, 313), [92, 90])):
        panel, = figure5(sizes=sizes).axes
        said, = (line for line in panel.lines if line.get_marker() == "_" and line.get_markersize() == 22)
        assert list(said.get_ydata()) == pytest.approx(shares)
    assert "published" not in "".join(legend_of(figure5(sizes=(313,))))


def test_figure_5_tells_of_a_system_that_overflows_everywhere():
    told = legend_of(figure5(sizes=(100, 250)))
    assert "concat_all (overflow at 100, 250)" in told and len(told) == 9


def test_figure_5_of_one_row_and_of_nothing_measured_is_drawn(tmp_path):
    made = routing_artifacts.accuracy(sizes=(10,))
    made["rows"] = made["rows"][:1]
    assert len(figures.save(figures.figure5(made, PUBLISHED), tmp_path / "one")) == 3
    made["rows"][0]["accuracy"] = None
    assert "0 queries" in figures.save(figures.figure5(made, PUBLISHED), tmp_path / "none")[0].read_text()


def test_every_interval_of_figure_5_lies_inside_the_axes():
    panel, = figure5(systems={"slb": (1.0, 0.0)}).axes
    low, high = panel.get_ylim()
    segments = [segment for *_, (bars,) in panel.containers for segment in bars.get_segments()]
    assert len(segments) == 4 and all(low <= bottom[1] <= top[1] <= high for bottom, top in segments)


CHOICE_ARMS = {"full": None, "noise_floor": None, "group": None, "identity": "start", "bare": "system",
               "bare-no-reanchor": "system", "head-1": "system", "head-4": "start", "head-16": "system",
               "suffix-R(n)": "system", "blend-10": "preamble-256", "calibrated": "ensemble-4x256"}


def choice(arms=CHOICE_ARMS, points=((1, 256), (5, 256), (10, 256), (5, 0), (5, 1024)),
           readings=("automaton", "free")):
    """Every arm at the middle point, three of them elsewhere; later arms are slower and better."""
    rows = []
    for n_tools, depth in points:
        for reading in readings:
            for i, (arm, behind) in enumerate(arms.items()):
                if (n_tools, depth) != (5, 256) and arm not in ("full", "bare", "calibrated"):
                    continue
                time = 80.0 * (1 + i) if arm != "noise_floor" else None
                rows.append({
                    "arm": arm, "n_tools": n_tools, "depth": depth, "compiled_behind": behind, "reading": reading,
                    "accuracy": routing_artifacts.share(0.95 - 0.03 * i - 0.02 * n_tools, 60),
                    "ttft_ms": time and metric(time, 0.9 * time, 1.1 * time)})
    return repair_artifacts.artifact("spliced_choice", rows) | {
        "config": {"spliced_choice": {"at_n_tools": 5, "at_depth": 256}}}


def test_the_figure_of_choices_has_every_timed_arm_and_the_same_bytes_twice(tmp_path):
    made = choice()
    first, second = (figures.save(figures.spliced_choice(made), tmp_path / folder / "choice") for folder in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    drawn = figures.spliced_choice(made)
    assert {*CHOICE_ARMS, "interval of the full prefill", "compiled behind nothing", "compiled behind system"} <= set(
        legend_of(drawn))
    above, below = drawn.axes[:2], drawn.axes[2:]
    for panel, reading in zip(above, ("automaton", "free")):
        found = {line.get_xdata()[0]: line.get_ydata()[0] for line, *_ in panel.containers}
        assert found == {row["ttft_ms"]["value"]: pytest.approx(100 * row["accuracy"]["value"]) for row in made["rows"]
                         if row["reading"] == reading and (row["n_tools"], row["depth"]) == (5, 256) and row["ttft_ms"]}
    assert [len(panel.containers) for panel in below] == [3, 3]
    assert [[label.get_text() for label in panel.get_xticklabels()] for panel in below] == [
        ["1", "5", "10"], ["0", "256", "1024"]]


def test_choices_at_one_point_and_by_one_reading_are_drawn(tmp_path):
    drawn = figures.spliced_choice(choice(points=((5, 256),), readings=("automaton",)))
    assert [panel.get_visible() for panel in drawn.axes] == [True, False, True, True]
    assert [len(panel.containers) for panel in drawn.axes[2:]] == [0, 0]
    assert len(figures.save(drawn, tmp_path / "one")) == 3


def test_arms_of_choices_are_told_apart_without_colour():
    markers = [style["marker"] for style in figures.ALL_STYLES]
    assert len(set(markers)) == len(markers) >= len(CHOICE_ARMS)

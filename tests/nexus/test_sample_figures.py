"""Figures of samples: every sample is drawn, medians are medians, and what does not fit is left out or refused."""
from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from nexus import sample_figures
from nexus.figures import STYLES


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def gating(contexts=("on", "off")):
    return pd.DataFrame([
        {"n_past": n_past, "context": context, "case": f"{i}", "predictor": predictor,
         "max_drift": 10.0 + i + n_past / 256, "mean_drift": 2.0 + i}
        for n_past in (256, 1024) for context in contexts for i in range(3) for predictor in ("one", "another")])


def sweep():
    return pd.DataFrame([
        {"offset": offset, "arm": arm, "probe": probe, "case": f"{i}",
         "dkl_nats": 0.0 if offset == 0 else scale * (1 + i)}
        for offset in (0, 16, 64) for arm, scale in (("bare", 0.1), ("bare-no-reanchor", 5.0), ("noise_floor", 0.001))
        for probe in ("query", "block_end") for i in range(3)])


def choices():
    right = {"good": (True, True, True), "bad": (True, False, False)}
    rows = [{"n_tools": 50, "system": system, "case": f"{wording}-{i}", "right": answer, "status": "ok",
             "wording": wording}
            for system, answers in right.items() for wording in ("own", "paraphrase")
            for i, answer in enumerate(answers)]
    rows.append({"n_tools": 50, "system": "concat_all", "case": "own-0", "right": None, "status": "overflow",
                 "wording": "own"})
    return pd.DataFrame(rows)


def test_key_drift_shows_each_tool_once_and_the_median():
    figure = sample_figures.key_drift(gating(), "a-run")
    worst, mean = figure.axes
    clouds = [line for line in worst.lines if line.get_linestyle() == "None"]
    assert [len(line.get_xdata()) for line in clouds] == [6, 6], "drift stands once per predictor, but is drawn once"
    medians = [line for line in worst.lines if line.get_linestyle() == "-"]
    assert np.allclose(medians[0].get_ydata(), [12.0, 15.0])
    assert np.allclose([line for line in mean.lines if line.get_linestyle() == "-"][0].get_ydata(), [3.0, 3.0])
    assert "a-run, 3 tools" in figure.get_suptitle()


def test_key_drift_of_one_context():
    figure = sample_figures.key_drift(gating(("on",)), "a-run")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [sample_figures.CONTEXTS["on"]["label"]]


def test_reanchoring_has_a_line_per_tool_and_exact_zeros_within_the_axis():
    figure = sample_figures.reanchoring(sweep(), "a-run")
    assert len(figure.axes) == 2 and all(len(panel.lines) == 3 * (3 + 1) for panel in figure.axes)
    thick = [line for line in figure.axes[0].lines if line.get_linewidth() == 2]
    assert np.allclose(thick[0].get_ydata(), [0, 0.2, 0.2]) and np.allclose(thick[1].get_ydata(), [0, 10, 10])
    assert figure.axes[0].get_ylim()[0] < 0 and figure.axes[0].get_ylim()[1] > 15
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [STYLES[arm]["label"] for arm in STYLES]


def test_error_map_has_the_best_system_on_top_and_the_hardest_query_on_the_right():
    figure = sample_figures.error_map(choices(), 50, "a-run")
    own, paraphrase = figure.axes
    assert [label.get_text() for label in own.get_yticklabels()] == ["good  0", "bad  4"], "what overflows is left out"
    grid = own.collections[0].get_array().reshape(2, 3)
    assert grid.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert own.yaxis_inverted() and paraphrase.get_title(loc="left") == sample_figures.WORDINGS["paraphrase"]


def test_error_map_of_queries_without_a_wording_has_one_panel():
    assert len(sample_figures.error_map(choices().assign(wording=None), 50, "a-run").axes) == 1


def test_error_map_refuses_a_number_of_tools_that_was_not_asked():
    with pytest.raises(ValueError, match="n_tools 49 is not in this run; it has 50"):
        sample_figures.error_map(choices(), 49, "a-run")

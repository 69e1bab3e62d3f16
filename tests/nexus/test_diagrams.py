"""Figures 2 and 3: complete, and the same bytes twice in every form."""
from __future__ import annotations

import pytest

from nexus import diagrams, figures


@pytest.mark.parametrize(("name", "words"), [
    ("figure2", ["user's query", "scan of all", "cross-encoder", "bare splice", "R(n)", "arguments from", "P = 256"]),
    ("figure3", ["header, 128 bytes", "keys, F16", "values, F16", "transposed", "block of S tokens", "S·R/100"])])
def test_a_diagram_has_the_same_bytes_twice_and_names_its_parts(tmp_path, name, words):
    first, second = (figures.save(getattr(diagrams, name)(), tmp_path / folder / name) for folder in ("a", "b"))
    assert [path.suffix for path in first] == [".svg", ".png", ".pdf"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    text = first[0].read_text(encoding="utf-8")
    assert [word for word in words if word not in text] == []
    assert figures.svg(getattr(diagrams, name)()) == text


@pytest.mark.parametrize("draw", [diagrams.figure2, diagrams.figure3])
def test_no_box_leaves_the_drawing_and_no_text_leaves_its_box(draw):
    figure = draw()
    panel, = figure.axes
    renderer = figure.canvas.get_renderer()
    boxes = [patch.get_window_extent(renderer) for patch in panel.patches if hasattr(patch, "get_boxstyle")]
    whole = panel.get_window_extent(renderer)
    assert len(boxes) >= 6
    for box in boxes:
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1 and whole.y0 <= box.y0 < box.y1 <= whole.y1
    centred = [text for text in panel.texts if text.get_va() == "center"]
    assert len(centred) == len(boxes)
    for text, box in zip(centred, boxes):
        extent = text.get_window_extent(renderer)
        assert box.x0 <= extent.x0 and extent.x1 <= box.x1, text.get_text()
        assert box.y0 <= extent.y0 and extent.y1 <= box.y1, text.get_text()

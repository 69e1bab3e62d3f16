"""Documents in Markdown: read and written without loss."""
from __future__ import annotations

import pytest

from nexus.config import ROOT
from nexus.document import Heading, Paragraph, Points, Span, Table, blocks, markdown, spans

STORED = sorted(ROOT.glob("results/*/tables/*.md"))


@pytest.mark.parametrize("path", STORED, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_stored_tables_are_read_and_written_without_loss(path):
    text = path.read_text(encoding="utf-8")
    assert markdown(blocks(text)) == text
    assert any(isinstance(block, Table) for block in blocks(text))


def test_every_kind_of_block():
    text = "# Title\n\nA paragraph\nof two lines.\n\n- one\n- two\n\n| a | b |\n|---|---|\n| 1 \\| 2 | `x` |\n"
    assert blocks(text) == [Heading(1, "Title"), Paragraph("A paragraph\nof two lines."), Points(("one", "two")),
                            Table(("a", "b"), (("1 | 2", "`x`"),))]
    assert markdown(blocks(text)) == text


def test_a_table_without_lines_and_cells_without_text():
    assert blocks("| a |  |\n|---|---|\n") == [Table(("a", ""), ())]
    assert blocks("| a | b |\n|---|---|\n|  | – |\n")[0].lines == (("", "–"),)


def test_a_line_with_another_number_of_cells_is_refused():
    with pytest.raises(ValueError, match="1 cells, its heading 2"):
        blocks("| a | b |\n|---|---|\n| 1 |\n")


@pytest.mark.parametrize(("text", "expected"), [
    ("", [Span("text", "")]), ("plain", [Span("text", "plain")]),
    ("a `b_c` d", [Span("text", "a "), Span("code", "b_c"), Span("text", " d")]),
    ("**ours**", [Span("strong", "ours")]),
    ("[paper](https://example.org/a_b)", [Span("link", "paper", "https://example.org/a_b")]),
    ("0.1 [0.05, 0.2] (n = 3)", [Span("text", "0.1 [0.05, 0.2] (n = 3)")]),
    ("`**no**`", [Span("code", "**no**")]), ("a ` b", [Span("text", "a ` b")]),
])
def test_pieces_of_a_text(text, expected):
    assert spans(text) == expected

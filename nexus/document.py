"""The one form of a table with the text around it, which is stored as Markdown and rendered to LaTeX and HTML.

The subset of Markdown that `nexus/tables.py` and its siblings write: headings, paragraphs, lists of points, tables, and
`code`, **strong** and [links](to) inside of them. `markdown(blocks(text))` gives the text back.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nexus import tables

_CELL_BREAK = re.compile(r"(?<!\\)\|")
_SPAN = re.compile(r"`(?P<code>[^`]+)`|\*\*(?P<strong>[^*]+)\*\*|\[(?P<text>[^\]]+)\]\((?P<link>[^)\s]+)\)")


@dataclass(frozen=True)
class Heading:
    level: int
    """1 for the title."""
    text: str


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Points:
    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


Block = Heading | Paragraph | Points | Table


@dataclass(frozen=True)
class Span:
    """A piece of text that looks alike: kind "text", "code", "strong" or "link" (to `target`)."""

    kind: str
    text: str
    target: str = ""


def blocks(text: str) -> list[Block]:
    """The blocks of a Markdown document. Raises ValueError for a table whose line has another number of cells."""
    return [_block(part.split("\n")) for part in re.split(r"\n{2,}", text.strip("\n")) if part]


def markdown(parts: Iterable[Block]) -> str:
    """The document in Markdown, which ends with a newline."""
    return tables.document(*map(_text, parts))


def spans(text: str) -> list[Span]:
    """The text in pieces, in order."""
    found, end = [], 0
    for match in _SPAN.finditer(text):
        if match.start() > end:
            found.append(Span("text", text[end:match.start()]))
        kind = match.lastgroup or ""
        found.append(Span("link", match["text"], match["link"]) if kind == "link" else Span(kind, match[kind]))
        end = match.end()
    return [*found, Span("text", text[end:])] if end < len(text) or not found else found


def _block(lines: Sequence[str]) -> Block:
    first = lines[0]
    if found := re.fullmatch(r"(#{1,6}) (.*)", first):
        return Heading(len(found[1]), found[2])
    if first.startswith("|") and len(lines) > 1 and re.fullmatch(r"\|(---\|)+", lines[1]):
        columns = _cells(first)
        rows = tuple(_cells(line) for line in lines[2:])
        wrong = next((row for row in rows if len(row) != len(columns)), None)
        if wrong is not None:
            raise ValueError(f"table line {wrong} has {len(wrong)} cells, its heading {len(columns)}")
        return Table(columns, rows)
    if all(line.startswith("- ") for line in lines):
        return Points(tuple(line[2:] for line in lines))
    return Paragraph("\n".join(lines))


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip().replace("\\|", "|") for cell in _CELL_BREAK.split(line)[1:-1])


def _text(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {text}"
        case Points(items):
            return "\n".join(f"- {item}" for item in items)
        case Table(columns, lines):
            return tables.markdown(columns, lines)
        case Paragraph(text):
            return text

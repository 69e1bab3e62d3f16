"""Pieces of a self-contained HTML page: documents, tables, figures; nothing in them is fetched from anywhere."""
from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from nexus.document import Block, Heading, Paragraph, Points, Table, spans

# Longer tables are folded.
FOLDED_ROWS = 24
SHORT_CELL, LONG_CELL = 34, 60


def inline(text: str) -> str:
    """The text with code, strong parts and links marked up and everything else escaped."""
    return "".join(_span(span.kind, escape(span.text), escape(span.target)) for span in spans(text))


def document(blocks: Iterable[Block], first_level: int, label: str) -> str:
    """The blocks, the title as a heading of `first_level`; `label` names the tables that no heading names."""
    parts = []
    for block in blocks:
        match block:
            case Heading(level, text):
                depth = min(6, first_level + level - 1)
                parts.append(f"<h{depth}>{inline(text)}</h{depth}>")
                label = text
            case Points(items):
                parts.append("<ul>" + "".join(f"<li>{inline(item)}</li>" for item in items) + "</ul>")
            case Table(columns, lines):
                parts.append(table(columns, [[inline(cell) for cell in line] for line in lines], label))
            case Paragraph(text):
                parts.append(f"<p>{inline(text)}</p>")
    return "\n".join(parts)


def table(columns: Sequence[str], lines: Sequence[Sequence[str]], label: str, kind: str = "",
          may_fold: bool = True) -> str:
    """A table in a box that scrolls, folded where it is long and may be.

    `lines` are HTML, the first cell of each its heading.
    """
    head = "".join(f'<th scope="col">{inline(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(_cell(i, cell) for i, cell in enumerate(line))}</tr>\n" for line in lines)
    name = escape(re.sub(r"[`*]", "", label), quote=True)
    box = (f'<div class="scroll" role="region" aria-label="{name}" tabindex="0"><table{_class(kind)}>\n'
           f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>")
    return box if len(lines) <= FOLDED_ROWS or not may_fold else folded(f"{inline(label)} ({len(lines)} rows)", box)


def folded(summary: str, content: str) -> str:
    """Content that opens on demand; both are HTML."""
    return f"<details><summary>{summary}</summary>\n{content}\n</details>"


def figure(svg: str, key: str, title: str, description: str, caption: str) -> str:
    """A drawing by matplotlib as part of the page: ids of its own (they begin with `key`), title and description."""
    body = svg[svg.index("<svg"):]
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{key}-\1"', body)
    body = re.sub(r'href="#([^"]+)"', rf'href="#{key}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{key}-\1)", body)
    opening, _, content = body.partition(">")
    box = re.search(r'viewBox="[^"]+"', opening)
    if box is None:
        raise ValueError(f"{key}: the drawing has no viewBox")
    return (f'<figure id="{key}"><div class="scroll drawing" role="region" aria-label="{escape(title)}" tabindex="0">'
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box[0]} role="img" '
            f'aria-labelledby="{key}-title {key}-desc" style="stroke-linejoin:round;stroke-linecap:butt">'
            f'<title id="{key}-title">{escape(title)}</title><desc id="{key}-desc">{escape(description)}</desc>'
            f"{content.strip()}</div><figcaption>{inline(caption)}</figcaption></figure>")


def command(text: str) -> str:
    """A command line to copy."""
    return f"<pre><code>{escape(text)}</code></pre>"


def page(title: str, style: str, content: str) -> str:
    """The whole page."""
    return (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
            f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{content}\n</body>\n</html>\n")


def _span(kind: str, text: str, target: str) -> str:
    match kind:
        case "code":
            return f"<code>{text}</code>"
        case "strong":
            return f"<strong>{text}</strong>"
        case "link" if re.match(r"https?:", target):
            return f'<a href="{target}" rel="noreferrer">{text}</a>'
    return text


def _cell(index: int, content: str) -> str:
    length = len(re.sub(r"<[^>]+>", "", content))
    size = _class("short" if length <= SHORT_CELL else "long" if length > LONG_CELL else "")
    return f'<th scope="row"{size}>{content}</th>' if index == 0 else f"<td{size}>{content}</td>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""

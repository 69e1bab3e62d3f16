"""A document (nexus/document.py) in LaTeX, to be read in with `\\input`: tables with `booktabs` rules over pages.

What the surrounding document needs is PREAMBLE, any engine. Everything else in a text is escaped.
"""
from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from nexus import document
from nexus.canonical import write_atomically
from nexus.document import Block, Heading, Paragraph, Points, Span, Table, spans

PREAMBLE = "\\usepackage[T1]{fontenc}\n\\usepackage{array,booktabs,longtable}\n"
SECTIONS = ("section", "subsection", "subsubsection", "paragraph")
# A column with a longer cell than this breaks its lines, at this share of the text's width.
LONG_CELL = 40
LONG_CELL_WIDTH = 0.3
_ASCII = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}",
}
_SYMBOLS = {
    "–": "--", "—": "---", "…": r"\ldots{}", "“": "``", "”": "''", "‘": "`", "’": "'", "·": r"$\cdot$",
    "×": r"$\times$",
    "−": "$-$", "±": r"$\pm$", "≤": r"$\leq$", "≥": r"$\geq$", "≈": r"$\approx$", "≠": r"$\neq$", "∞": r"$\infty$",
    "→": r"$\rightarrow$", "←": r"$\leftarrow$", "‖": r"$\Vert$", "½": r"$\frac{1}{2}$", "∩": r"$\cap$", "§": r"\S{}",
    "Δ": r"$\Delta$", "α": r"$\alpha$", "β": r"$\beta$", "ε": r"$\varepsilon$", "θ": r"$\theta$", "ρ": r"$\rho$",
    "τ": r"$\tau$", "µ": r"$\mu$", "μ": r"$\mu$", "†": r"\dag{}", "°": r"$^\circ$", "²": "$^2$", "✓": "+", "✗": "x",
    "\N{NO-BREAK SPACE}": "~", "\N{NARROW NO-BREAK SPACE}": r"\,",
}
_ESCAPES = str.maketrans(_ASCII | _SYMBOLS)


def escaped(text: str) -> str:
    """The text with everything that LaTeX would read as a command made literal.

    Latin letters stay; a character that T1 fonts do not have becomes its code point, such as [U+4E2D].
    """
    return "".join(char if _is_plain(char) else _named(char) for char in text.translate(_ESCAPES))


def latex(blocks: Iterable[Block]) -> str:
    """The document as a fragment, which begins by naming what it needs and ends with a newline."""
    needs = "".join(f"% needs {line}\n" for line in PREAMBLE.splitlines())
    return needs + "\n" + "\n\n".join(map(_block, blocks)) + "\n"


def write(folder: Path, name: str, text: str) -> list[Path]:
    """Paths of `<name>.md` and `<name>.tex`, after both hold the document that is `text` in Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.md", folder / f"{name}.tex"]
    write_atomically(paths[0], text)
    write_atomically(paths[1], latex(document.blocks(text)))
    return paths


def _block(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"\\{SECTIONS[min(level, len(SECTIONS)) - 1]}*{{{_inline(text)}}}"
        case Points(items):
            return "\\begin{itemize}\n" + "".join(f"  \\item {_inline(item)}\n" for item in items) + "\\end{itemize}"
        case Table():
            return _table(block)
        case Paragraph(text):
            return _inline(text)


def _table(table: Table) -> str:
    def line(cells: Iterable[str]) -> str:
        # A bracket behind a line break would be read as its option.
        return " & ".join(f"{{}}{_inline(cell)}" if cell.startswith("[") else _inline(cell) for cell in cells) + r" \\"

    longest = [max(map(len, column)) for column in zip(table.columns, *table.lines)]
    wide = f">{{\\raggedright\\arraybackslash}}p{{{LONG_CELL_WIDTH}\\linewidth}}"
    form = "".join(wide if length > LONG_CELL else "l" for length in longest)
    head = line(table.columns)
    return "\n".join([
        r"{\scriptsize\setlength{\tabcolsep}{3pt}", rf"\begin{{longtable}}{{@{{}}{form}@{{}}}}", r"\toprule", head,
        r"\midrule", r"\endfirsthead", r"\toprule", head, r"\midrule", r"\endhead", r"\bottomrule", r"\endfoot",
        *map(line, table.lines), r"\end{longtable}}"])


def _inline(text: str) -> str:
    return "".join(map(_span, spans(text)))


def _span(span: Span) -> str:
    text = escaped(span.text)
    match span.kind:
        case "code":
            return rf"\texttt{{{text}}}"
        case "strong":
            return rf"\textbf{{{text}}}"
        case "link" if re.match(r"[a-z]+:", span.target):
            return rf"{text} (\texttt{{{escaped(span.target)}}})"
    return text


def _is_plain(char: str) -> bool:
    # Latin-1 letters and Latin Extended-A, which the encoding T1 has; ASCII, and the line breaks of a paragraph.
    return " " <= char <= "~" or char == "\n" or "\u00c0" <= char <= "\u017e"


def _named(char: str) -> str:
    return f"[U+{ord(char):04X}]"

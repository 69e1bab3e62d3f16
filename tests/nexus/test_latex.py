"""Documents in LaTeX: escaped, balanced, and read by a TeX engine where one is installed."""
from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexus.config import ROOT
from nexus.document import Heading, Paragraph, Points, Table, blocks
from nexus.latex import PREAMBLE, escaped, latex

STORED = sorted(ROOT.glob("results/*/tables/*.md"))
ODD = [Heading(1, "a_b & 50 % {x} $y$ #1 ~ ^ \\cmd <>|\"`"), Heading(7, "deep"),
       Paragraph("中 é ž ρ τ “q” ½ `a_b{` **b%** [x](https://example.org/a_b%20) [y](there)\nsecond line"),
       Points(("one & two", "[three]")),
       Table(("a|b", "[c]"), (("[1, 2]", "x\\y"), ("é" * 50, "–"), ("", "")))]


def engine():
    return next(filter(None, map(shutil.which, ("pdflatex", "lualatex", "xelatex", "tectonic"))), None)


@pytest.mark.parametrize(("text", "expected"), [
    ("a_b & 5 % of {x} $1 #2", r"a\_b \& 5 \% of \{x\} \$1 \#2"), ("\\input{x}", r"\textbackslash{}input\{x\}"),
    ("ρ ≤ 0.4 – 3 × µs", r"$\rho$ $\leq$ 0.4 -- 3 $\times$ $\mu$s"), ("é ž", "é ž"), ("中", "[U+4E2D]"),
    ("\x00\u202e", "[U+0000][U+202E]"),
])
def test_text_is_escaped(text, expected):
    assert escaped(text) == expected


@given(st.text())
def test_no_text_can_begin_a_command_of_its_own_or_leave_a_brace_open(text):
    found = escaped(text)
    without = re.sub(r"\\[{}$&#%_,]|\\[A-Za-z]+(\{\}|\{[12]\}\{[12]\})?|\^\\circ|\^2", "", found)
    assert not re.search(r"[\\{}&#%_^]", without)
    assert without.count("$") % 2 == 0
    assert all(" " <= char <= "~" or char == "\n" or "\u00c0" <= char <= "\u017e" for char in found)


@pytest.mark.parametrize("path", STORED, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_stored_tables_keep_every_line_and_every_cell(path):
    document = blocks(path.read_text(encoding="utf-8"))
    text = latex(document)
    stored = [block for block in document if isinstance(block, Table)]
    bodies = re.findall(r"\\endfoot\n(.*?)\\end\{longtable\}", text, re.DOTALL)
    assert len(bodies) == len(stored) == text.count(r"\begin{longtable}")
    for table, body in zip(stored, bodies):
        lines = body.rstrip("\n").split("\n") if body else []
        assert len(lines) == len(table.lines)
        assert all(line.endswith(r" \\") for line in lines)
        assert {len(re.findall(r"(?<!\\)&", line)) for line in lines} <= {len(table.columns) - 1}
    assert not re.search(r"\[U\+", text), "every symbol of the tables has a form in LaTeX"
    for rule in ("toprule", "midrule", "bottomrule"):
        assert rf"\{rule}" in text


def test_a_fragment_says_what_it_needs_and_does_not_change():
    text = latex(ODD)
    assert all(f"% needs {line}" in text for line in PREAMBLE.splitlines())
    assert text == latex(ODD) and text.endswith("\n")


@pytest.mark.skipif(engine() is None, reason="no TeX engine is installed")
def test_a_tex_engine_reads_it(tmp_path):
    stored = [path for path in STORED if path.parts[-3] == "smollm2-135m"]
    texts = [latex(ODD), *(latex(blocks(path.read_text(encoding="utf-8"))) for path in stored if path.stem != "table4")]
    (tmp_path / "all.tex").write_text("\\documentclass[landscape]{article}\n" + PREAMBLE + "\\begin{document}\n"
                                      + "".join(texts) + "\\end{document}\n", encoding="utf-8")
    done = subprocess.run([engine(), "-interaction=nonstopmode", "-halt-on-error", "all.tex"], cwd=tmp_path,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout.decode("utf-8", "replace")[-2000:]
    assert (tmp_path / "all.pdf").stat().st_size > 1000

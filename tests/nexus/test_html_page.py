"""Pieces of the page: nothing of a text becomes markup, ids are unique, tables name their rows and columns."""
from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from nexus import html_page
from nexus.document import blocks

SVG = ('<?xml version="1.0"?>\n<!DOCTYPE svg>\n'
       '<svg xmlns:xlink="http://www.w3.org/1999/xlink" width="9pt" viewBox="0 0 9 9">'
       '<metadata>x</metadata><defs><style type="text/css">*{a: b}</style><clipPath id="p"/></defs>'
       '<g id="a" clip-path="url(#p)"><use xlink:href="#a"/></g></svg>\n')


@pytest.mark.parametrize(("text", "expected"), [
    ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
    ("a `b<c` **d&e**", "a <code>b&lt;c</code> <strong>d&amp;e</strong>"),
    ("[x](javascript:alert)", "x"), ("[x](tables/a.md)", "x"),
    ("[x](https://example.org/?a=\"b\")", '<a href="https://example.org/?a=&quot;b&quot;" rel="noreferrer">x</a>'),
])
def test_text_is_escaped(text, expected):
    assert html_page.inline(text) == expected


def test_a_table_says_which_cells_are_headings():
    text = html_page.table(["a", "b<"], [["1", "2"], ["3", "<b>4</b>"]], "`name` \"x\"")
    assert text.count('scope="col"') == 2 and text.count('scope="row"') == 2
    assert 'aria-label="name &quot;x&quot;"' in text and 'tabindex="0"' in text
    assert "b&lt;" in text and "<b>4</b>" in text and "<details>" not in text


def test_a_long_table_is_folded_and_says_how_long_it_is():
    text = html_page.table(["a"], [["x"]] * (html_page.FOLDED_ROWS + 1), "all")
    assert text.startswith(f"<details><summary>all ({html_page.FOLDED_ROWS + 1} rows)</summary>")


def test_headings_continue_those_around_them():
    text = html_page.document(blocks("# One\n\n## Two\n\n- a\n\ntext\n\n| a |\n|---|\n| 1 |\n"), 4, "label")
    assert "<h4>One</h4>" in text and "<h5>Two</h5>" in text and 'aria-label="Two"' in text and "<li>a</li>" in text


def test_a_drawing_has_a_title_a_description_and_ids_of_its_own():
    text = html_page.figure(SVG, "key", "A <title>", "What it & shows", "caption")
    assert 'role="img" aria-labelledby="key-title key-desc"' in text
    assert '<title id="key-title">A &lt;title&gt;</title><desc id="key-desc">What it &amp; shows</desc>' in text
    assert 'id="key-a"' in text and "url(#key-p)" in text and 'xlink:href="#key-a"' in text
    assert "<style" not in text and "<metadata" not in text and "<?xml" not in text and "9pt" not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_a_drawing_without_a_size_is_refused():
    with pytest.raises(ValueError, match="key: the drawing has no viewBox"):
        html_page.figure("<svg width='1'></svg>", "key", "t", "d", "c")


def test_the_page_is_whole_and_its_title_escaped():
    class Tags(HTMLParser):
        open: list[str] = []

        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "link"):
                self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    text = html_page.page("a < b", "p { }", "<p>x</p>")
    parser = Tags()
    parser.feed(text)
    assert parser.open == [] and "<title>a &lt; b</title>" in text and 'lang="en"' in text and "viewport" in text

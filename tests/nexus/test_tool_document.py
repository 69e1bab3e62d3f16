"""The text of a tool for retrieval."""
from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexus.registry import Tool
from nexus.tool_document import description_text, document_text, lexical_text, name_words


@pytest.mark.parametrize("name, words", [
    ("create_pull_request", "create pull request"),
    ("createPullRequest", "create Pull Request"),
    ("getHTTPStatus", "get HTTP Status"),
    ("list-open.issues/v2", "list open issues v2"),
    ("__init__", "init"),
    ("filter-query", "filter query"),
    ("$and", "and"),
    ("工具_検索", "工具 検索"),
    ("a" * 45, "a" * 45),
    ("🔥", "🔥"),
    ("___", "___"),
])
def test_name_words(name, words):
    assert name_words(name) == words


@given(st.text(min_size=1))
def test_name_words_lose_only_separators(name):
    words = name_words(name)
    if words == name:
        return
    assert "" not in words.split(" ")
    assert re.sub(r"[\W_]", "", words) == re.sub(r"[\W_]", "", name)
    assert name_words(words) == words


def test_document_is_name_and_description():
    tool = Tool("hub", "close_issue", "Close an issue.\n\n  Says why.\t", {})
    assert document_text(tool) == "close issue. Close an issue. Says why."


@pytest.mark.parametrize("description", ["", " \n"])
def test_document_without_description_is_the_name(description):
    assert document_text(Tool(None, "closeIssue", description, {})) == "close Issue"


def test_document_does_not_depend_on_server_or_schema():
    schema = {"type": "object", "properties": {"from": {"type": "string"}}}
    assert document_text(Tool("a", "x", "Does x.", schema)) == document_text(Tool("b", "x", "Does x.", {}))


@given(st.text(min_size=1).filter(str.strip), st.text())
def test_document_is_one_line(name, description):
    text = document_text(Tool(None, name, description, {}))
    assert text
    assert description.split() == [] or text.endswith(" ".join(description.split()))


def test_word_matching_also_reads_parameters_and_their_values():
    schema = {"type": "object", "properties": {
        "issueNumber": {"type": "integer", "description": "unread"},
        "state": {"enum": ["open", "not_planned", None, 3]},
        "$and": True,
    }}
    assert lexical_text(Tool("s", "close_it", "Closes.", schema)) == (
        "close it. Closes. issue Number state open not planned and")
    for odd in ({}, {"properties": []}, {"properties": {"a": {"enum": "x"}}}):
        assert lexical_text(Tool("s", "close_it", "", odd)).startswith("close it")


def test_a_description_alone_leaves_the_name_out():
    assert description_text(Tool("s", "close_it", "Shuts\n a door.", {})) == "Shuts a door."
    assert description_text(Tool("s", "close_it", " ", {})) == "close it"

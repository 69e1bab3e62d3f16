"""The text of one tool for retrieval: what embedders, BM25 and the cross-encoder read of it."""
from __future__ import annotations

import re

from nexus.registry import Tool

# Where a name's words meet: separators, a change from lower to upper case, the end of an abbreviation (HTTPServer).
BORDER = re.compile(r"[^\w]+|_+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def name_words(name: str) -> str:
    """A tool's or parameter's name as words, separated by one space: "getHTTPStatus" and "get_http-status" alike.

    Case is kept; a name that has nothing but separators comes back as it is.
    """
    return " ".join(word for word in BORDER.split(name) if word) or name


def document_text(tool: Tool) -> str:
    """The words of the tool's name, a full stop, its description with white space folded.

    A tool without a description gives its name's words alone. The server is not part of it: a tool is found by what
    it does, not by where it lives.
    """
    description = " ".join(tool.description.split())
    return f"{name_words(tool.name)}. {description}" if description else name_words(tool.name)


def description_text(tool: Tool) -> str:
    """The tool's description alone, white space folded; its name's words where it has none. For measuring names."""
    return " ".join(tool.description.split()) or name_words(tool.name)


def lexical_text(tool: Tool) -> str:
    """`document_text` and the words of the parameters' names and enumerated values, for word matching.

    A query says what it wants done and to what; the second is often a parameter's name and seldom in the description.
    """
    parameters = tool.input_schema.get("properties")
    said = []
    for name, schema in (parameters.items() if isinstance(parameters, dict) else ()):
        values = schema.get("enum") if isinstance(schema, dict) else None
        said += [name, *(value for value in (values if isinstance(values, list) else ()) if isinstance(value, str))]
    return " ".join([document_text(tool), *map(name_words, said)])

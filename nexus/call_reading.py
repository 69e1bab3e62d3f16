"""Reads which tool a model calls: the name under the automaton of offered names, or whatever it writes by itself.

Both are readers of `nexus.branches`, behind the same prompt. A model that calls by itself writes the opening that the
automaton's reading puts there, so that what they share is decoded once.
"""
from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from nexus.branches import Reader
from nexus.name_automaton import NameAutomaton, Vocabulary
from nexus.runtime import Model

# A call in whatever form the model was trained on is an object that begins with "name".
_CALL = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")')
# A small model may repeat a tool's schema instead, where such an object is the value of "function": it calls nothing.
_SCHEMA = re.compile(r'"function"\s*:\s*\{')


@dataclass(frozen=True)
class FreeCall:
    """What the model wrote by itself, up to the name that it calls."""

    text: str
    name: str | None
    """The name in the first call; None where there is none."""
    n_tokens: int


def forced_name(opening: np.ndarray, automaton: NameAutomaton) -> Reader:
    """Reader of the offered name that is chosen greedily behind `opening` (int32[n]) under the automaton."""
    state, written = automaton.start(), opening.tolist()
    while (name := automaton.decided(state)) is None:
        token = automaton.best((yield written), state)
        state = automaton.advance(state, token)
        written = [*written, token]
    return name


def free_call(vocabulary: Vocabulary, stops: Collection[int], max_tokens: int) -> Reader:
    """Reader of what the model writes greedily (`FreeCall`), until a call's name is complete or none is to be expected.

    That is where it stops (`stops`: ids of the tokens that end an answer), has written `max_tokens`, or repeats the
    schema of a tool.
    """
    written: list[int] = []
    text, name = "", None
    while len(written) < max_tokens and name is None and not _SCHEMA.search(text):
        token = int(np.argmax((yield written)))
        if token in stops:
            break
        written = [*written, token]
        text = b"".join(vocabulary.pieces[token] for token in written).decode("utf-8", "replace")
        name = called_name(text)
    return FreeCall(text, name, len(written))


def called_name(text: str) -> str | None:
    """The name in the first call of an answer; None where it holds none, or first repeats the schema of a tool."""
    found, schema = _CALL.search(text), _SCHEMA.search(text)
    if not found or (schema and schema.start() < found.start()):
        return None
    try:
        return json.loads(found[1]) or None
    except ValueError:
        # An escape that JSON does not have.
        return found[1][1:-1]


def end_tokens(model: Model) -> frozenset[int]:
    """Ids of the tokens with which the model ends an answer."""
    vocabulary = model.native.vocab()
    return frozenset(token for token in range(model.n_vocab) if model.gbl.llama_vocab_is_eog(vocabulary, token))

"""What counts as a call, and both readings on scripted logits."""
from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexus.call_reading import called_name, forced_name, free_call
from nexus.name_automaton import NameAutomaton, Vocabulary

ECHO = '{"type":"function","function":{"name":"list_issues","description":"Lists"'


@pytest.mark.parametrize(("text", "name"), [
    ('<tool_call>\n{"name": "list_issues", "arguments"', "list_issues"),
    ('Sure:\n```json\n{\n  "name" : "list_issues"', "list_issues"),
    ('{"name": "quoted \\"name\\""', 'quoted "name"'),
    ('{"name": "bad \\q"', "bad \\q"),
    ('{"name": ""', None),
    ('{"name": "list_iss', None),
    ('{"arguments": {"name": "Ann"}}', "Ann"),
    ('My name is "x".', None),
    ("", None),
    (f"You may call this tool:\n{ECHO}", None),
    (f'{ECHO}}}}} {{"name": "later"', None),
    (f'{{"name": "first"}} {ECHO}', "first"),
])
def test_a_call_is_an_object_that_begins_with_its_name_and_a_repeated_schema_is_none(text, name):
    assert called_name(text) == name


@given(st.text(min_size=1))
def test_every_name_that_json_writes_is_read_back(name):
    assert called_name(f'{{"name": {json.dumps(name)}') == name


class Script:
    """Logits that prefer the scripted tokens, one after the other, whatever was asked for before."""

    def __init__(self, reader, script: list[int], n_tokens: int):
        self.asked: list[list[int]] = []
        try:
            question = next(reader)
            for token in script:
                self.asked.append(question)
                logits = np.zeros(n_tokens, np.float32)
                logits[token] = 1
                question = reader.send(logits)
            raise AssertionError(f"the reader wants more than {len(script)} tokens")
        except StopIteration as end:
            self.found = end.value


PIECES = [b"", b'{"name": "', b"ab", b"ac", b'", ', b"hm ", b'"function":{', b"\xc3", b"\xa9"]
STOP = 0


def free(script: list[int], max_tokens: int = 9) -> Script:
    return Script(free_call(Vocabulary(PIECES), {STOP}, max_tokens), script, len(PIECES))


def test_a_free_call_ends_with_its_name():
    read = free([1, 2, 4])
    assert (read.found.name, read.found.n_tokens, read.found.text) == ("ab", 3, '{"name": "ab", ')
    assert read.asked == [[], [1], [1, 2]]


@pytest.mark.parametrize(("script", "n_tokens"), [
    ([5, STOP], 1), ([STOP], 0), ([5, 5, 5], 3), ([5, 6], 2),
])
def test_an_answer_without_a_call_ends_where_it_stops_is_long_enough_or_repeats_a_schema(script, n_tokens):
    read = free(script, max_tokens=3)
    assert (read.found.name, read.found.n_tokens) == (None, n_tokens)


def test_a_name_may_be_cut_within_a_character():
    assert free([1, 7, 8, 4]).found.name == "é"


def test_the_forced_name_begins_behind_the_opening_and_is_an_offered_one():
    automaton = NameAutomaton(["ab", "ac"], Vocabulary(PIECES))
    read = Script(forced_name(np.array([1]), automaton), [3], len(PIECES))
    assert read.found == "ac"
    assert read.asked == [[1]]
    # Its favourite is no name, so that the best of the allowed ones counts.
    assert Script(forced_name(np.array([1]), automaton), [5], len(PIECES)).found == "ab"


def test_a_single_name_needs_no_logits():
    assert Script(forced_name(np.array([1]), NameAutomaton(["ab"], Vocabulary(PIECES))), [], len(PIECES)).found == "ab"

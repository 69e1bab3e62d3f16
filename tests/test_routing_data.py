"""The committed routing queries: well formed, balanced, and no query of one file is nearly one of another."""
from __future__ import annotations

import itertools
import json
import re
from collections import Counter

import pytest

from nexus.config import compose, validate
from nexus.lexical import words
from nexus.pipeline import ROOT
from nexus.routing_workload import KEYS

PATHS = {name: ROOT / path for name, path in validate(compose([])).workload.routing.model_dump().items()}
FILES = {name: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
         for name, path in PATHS.items()}
# Tokens that two queries share over those that either has: from here on they count as one query.
SAME = 0.6


def tokens(query):
    return frozenset(re.findall(r"\w+", query.lower()))


def identity(case):
    return case.get("server"), case["tool"]


def too_near(some, others):
    """Pairs of (id, id) whose queries are nearly one."""
    pairs = itertools.product([(case["id"], tokens(case["query"])) for case in some],
                              [(case["id"], tokens(case["query"])) for case in others])
    return [(one, other) for (one, a), (other, b) in pairs if len(a & b) >= SAME * len(a | b)]


def test_there_are_four_files():
    assert list(FILES) == ["evaluation", "adversarial", "development", "training"]


@pytest.mark.parametrize("name", FILES)
def test_every_line_is_well_formed(name):
    for case in FILES[name]:
        assert not set(case) - set(KEYS), case["id"]
        assert isinstance(case["id"], str) and case["id"].strip() and case["query"].strip() == case["query"] != ""
        if case["tool"] is None:
            assert not [key for key in ("server", "also", "args", "confusable") if case.get(key)], case["id"]
            continue
        assert all(isinstance(text, str) and text for text in identity(case)), case["id"]
        also = case.get("also", [])
        assert isinstance(also, list) and all(set(entry) == {"server", "tool"} for entry in also), case["id"]
        accepted = [identity(case), *map(identity, also)]
        assert len(set(accepted)) == len(accepted), f"{case['id']}: a tool is named twice"
        if "confusable" in case:
            assert set(case["confusable"]) == {"server", "tool"}
            assert identity(case["confusable"]) not in accepted, f"{case['id']}: the confusable tool is right"
        args = case.get("args", {})
        assert isinstance(args, dict) and all(isinstance(key, str) and key for key in args), case["id"]


def test_ids_are_unique_over_all_files():
    counts = Counter(case["id"] for cases in FILES.values() for case in cases)
    assert [id_ for id_, n in counts.items() if n > 1] == []


@pytest.mark.parametrize("name", FILES)
def test_no_query_stands_twice_in_a_file(name):
    counts = Counter(" ".join(case["query"].lower().split()) for case in FILES[name])
    assert [query for query, n in counts.items() if n > 1] == []


@pytest.mark.parametrize(("name", "other"), list(itertools.combinations(FILES, 2)))
def test_no_query_of_one_file_is_nearly_one_of_another(name, other):
    assert too_near(FILES[name], FILES[other]) == []


def test_nearness_is_found():
    def case(id_, query):
        return {"id": id_, "query": query}

    some = [case("a", "Which teams am I a member of?"), case("b", "list tags")]
    assert too_near(some, [case("c", "of which TEAMS am I a member"), case("d", "list all tags"),
                           case("e", "list the old tags")]) == [("a", "c"), ("b", "d")]


def test_the_evaluation_covers_many_tools_and_half_of_it_is_paraphrased():
    cases = FILES["evaluation"]
    assert len(cases) == 100 and len({identity(case) for case in cases}) >= 40
    assert Counter(case["wording"] for case in cases) == {"own": 50, "paraphrase": 50}


def test_no_paraphrase_shares_a_stem_with_its_tools_name():
    shared = {case["id"]: found for case in FILES["evaluation"] if case["wording"] == "paraphrase"
              if (found := set(words(case["query"])) & set(words(case["tool"])))}
    assert shared == {}


def test_own_words_are_the_tools():
    shares = [bool(set(words(case["query"])) & set(words(case["tool"]))) for case in FILES["evaluation"]
              if case["wording"] == "own"]
    assert all(shares)


def test_evaluation_and_adversarial_queries_have_an_answer_and_its_arguments():
    for case in FILES["evaluation"] + FILES["adversarial"]:
        assert case["tool"] is not None and "args" in case, case["id"]


def test_every_adversarial_query_has_a_confusable_tool_that_is_not_the_right_one():
    cases = FILES["adversarial"]
    assert len(cases) == 60 and len({identity(case) for case in cases}) == 60
    assert all(identity(case["confusable"]) != identity(case) for case in cases)


@pytest.mark.parametrize(("name", "n"), [("development", 10), ("training", 60)])
def test_some_queries_have_no_answer(name, n):
    assert sum(case["tool"] is None for case in FILES[name]) == n < len(FILES[name]) / 2

"""The committed argument cases: fair, balanced, and no query nearly one that something was trained or tuned on."""
from __future__ import annotations

import itertools
import json
import re
from collections import Counter

import pytest

from nexus.argument_cases import KEYS, is_placeholder, load_argument_cases
from nexus.config import compose, validate
from nexus.listing import listing_path, load_listing
from nexus.pipeline import ROOT

CFG = validate(compose([]))


def lines(path):
    return [json.loads(line) for line in (ROOT / path).read_text(encoding="utf-8").splitlines() if line.strip()]


CASES, COREFERENCE = lines(CFG.sidecar_accuracy.cases), lines(CFG.sidecar_accuracy.coreference)
ROUTING = [case for path in CFG.workload.routing.model_dump().values() for case in lines(path)]
# Tokens that two queries share over those that either has: from here on they count as one query.
SAME = 0.6
BULKY = 600


def tokens(query):
    return frozenset(re.findall(r"\w+", query.lower()))


def too_near(some, others):
    """Pairs of queries that are nearly one."""
    return [(one["query"], other["query"]) for one, other in itertools.product(some, others)
            if len(tokens(one["query"]) & tokens(other["query"]))
            >= SAME * len(tokens(one["query"]) | tokens(other["query"]))]


def accepted(case, name):
    value = case["arguments"][name]
    return value if isinstance(value, list) else [value]


def test_thirty_cases_specify_fifty_arguments_over_many_tools_and_servers():
    assert len(CASES) == 30 and sum(len(case["arguments"]) for case in CASES) == 50
    assert len({(case["server"], case["tool"]) for case in CASES}) >= 20
    assert len({case["server"] for case in CASES}) >= 4
    kinds = Counter(type(accepted(case, name)[0]) for case in CASES for name in case["arguments"])
    assert set(kinds) == {str, int, bool, list}


def test_twenty_cases_have_a_conversation_and_half_of_them_a_bulky_result():
    assert len(COREFERENCE) == 20
    assert all(case["history"] and case["history"][0]["role"] == "user" for case in COREFERENCE)
    # The user speaks twice: once in the history, once with the query.
    assert all(sum(turn["role"] == "user" for turn in case["history"]) == 1 for case in COREFERENCE)
    assert all(case["history"][-1]["role"] == "assistant" for case in COREFERENCE)
    bulky = [case for case in COREFERENCE
             if any(turn["role"] == "tool" and len(turn["content"]) >= BULKY for turn in case["history"])]
    assert len(bulky) >= 10


def test_ids_are_unique_and_keys_known():
    counts = Counter(case["id"] for case in CASES + COREFERENCE + ROUTING)
    assert [id_ for id_, n in counts.items() if n > 1] == []
    assert all(set(case) <= set(KEYS) for case in CASES + COREFERENCE)


@pytest.mark.parametrize("cases", [CASES, COREFERENCE], ids=["cases", "coreference"])
def test_no_query_is_nearly_one_of_the_routing_data(cases):
    assert too_near(cases, ROUTING) == []


def test_no_query_stands_twice():
    assert [pair for pair in too_near(CASES + COREFERENCE, CASES + COREFERENCE) if pair[0] != pair[1]] == []
    assert len({case["query"] for case in CASES + COREFERENCE}) == len(CASES) + len(COREFERENCE)


def test_nearness_is_found():
    assert too_near([CASES[0]], [{"query": CASES[0]["query"].upper() + " Please."}])
    assert not too_near([CASES[0]], [CASES[1]])


def test_what_comes_from_history_stands_there_and_not_in_the_query():
    for case in COREFERENCE:
        said = "\n".join(turn["content"] for turn in case["history"])
        assert case["from_history"], case["id"]
        for name in case["from_history"]:
            values = [str(value) for value in accepted(case, name)]
            assert any(value in said for value in values), (case["id"], name)
            assert not any(value in case["query"] for value in values), (case["id"], name)


def test_plain_cases_have_no_history_and_say_their_names_and_numbers():
    for case in CASES:
        assert not case.get("history") and not case.get("from_history")
        for name in case["arguments"]:
            flat = [item for value in accepted(case, name) for item in (value if isinstance(value, list) else [value])]
            # A word of the schema may be said in another form ("acknowledge", "included"); all else is copied.
            copied = [value for value in flat if not isinstance(value, bool) and not str(value).isalpha()]
            assert not copied or any(str(value) in case["query"] for value in copied), (case["id"], name)


def test_no_accepted_value_is_a_placeholder():
    texts = [(value, name) for case in CASES + COREFERENCE for name in case["arguments"]
             for value in accepted(case, name) if isinstance(value, str)]
    assert [pair for pair in texts if is_placeholder(*pair)] == []


def test_every_case_fits_the_schemas_of_the_real_registry():
    paths = [listing_path(CFG.registry), *sorted((ROOT / CFG.results_folder).glob("*/registry.json"))]
    if not (there := [path for path in paths if path.is_file()]):
        pytest.skip("the registry is not collected here: dvc repro registry")
    tools = {tool.identity: tool for tool in load_listing(CFG.registry, there[0]).tools}
    for path in (CFG.sidecar_accuracy.cases, CFG.sidecar_accuracy.coreference):
        for case in load_argument_cases(ROOT / path, list(tools.values())):
            # Without them a call cannot be made at all, and a value would have to be made up.
            assert set(tools[case.tool].input_schema.get("required", [])) <= set(case.arguments), case.id

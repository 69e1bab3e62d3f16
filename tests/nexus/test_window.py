"""The pruned window: what of a conversation is kept under a budget."""
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexus.window import CUT, WindowError, prune, surrogate


def words(message):
    """A stand-in for a tokeniser: words of the content and 3 for the frame."""
    return len(message["content"].split()) + 3


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def tool(content, name="look_up"):
    return {"role": "tool", "name": name, "content": content}


REPOSITORY = json.dumps({
    "id": 88120, "node_id": "R_" + "x" * 90, "private": False, "archived": None, "full_name": "harbour/tide-tables",
    "owner": {"login": "harbour", "followers_href": "https://tides.example/" + "f" * 100},
    "description": "Tables of tides for all ports, computed anew every month. " * 8, "default_branch": "trunk",
    "topics": ["tides", "ports"], "size": 1801}, indent=2)
PAGES = [user("Which repository has the tide tables?"), tool(REPOSITORY, "get_repository"),
         assistant("It is harbour/tide-tables."), user("And who maintains it?"), assistant("The harbour team.")]


def test_a_short_conversation_stays_as_it_is():
    history = [user("Hello."), assistant("Hello!"), tool("42", "count")]
    assert prune(history, 100, 2, 40, words) == history
    assert prune([], 100, 2, 40, words) == []


def test_a_bulky_result_is_replaced_in_recent_turns_too_and_its_names_stay():
    window = prune(PAGES, 400, 2, 160, words)
    assert [item for item in window if item["role"] != "tool"] == [item for item in PAGES if item["role"] != "tool"]
    [result] = [item for item in window if item["role"] == "tool"]
    assert result["name"] == "get_repository" and len(result["content"]) <= 160
    assert result["content"].startswith(f"[{len(REPOSITORY)} characters] id: 88120, ")
    for named in ("full_name: harbour/tide-tables", "default_branch: trunk", "owner.login: harbour"):
        assert named in result["content"]
    assert "xxx" not in result["content"]


def test_the_surrogate_of_a_list_names_its_items():
    issues = json.dumps([{"number": 30 + i, "title": f"Pump {i} leaks", "body": "Water everywhere. " * 20}
                         for i in range(3)])
    assert surrogate(tool(issues), 130) == (f"[{len(issues)} characters] [0].number: 30, [0].title: Pump 0 leaks, "
                                            "[1].number: 31, [1].title: Pump 1 leaks, [2].number: 32")


def test_the_surrogate_of_a_text_names_what_it_referred_to():
    log = ("Deploying the tide service to the northern harbour.\n" + "Waiting for the pump to answer.\n" * 30
           + "See https://tides.example/runs/771 and PUMP-12; commit 0f3a9bc on release/2.4 of harbour/tides, #88.")
    short = surrogate(tool(log), 240)
    assert len(short) <= 240 and short.startswith("Deploying the tide service to the northern harbour.")
    for named in ("https://tides.example/runs/771", "PUMP-12", "0f3a9bc", "release/2.4", "harbour/tides", "#88"):
        assert named in short
    assert len(surrogate(tool("a " * 300), 50)) <= 50


def test_older_turns_are_shortened_and_the_oldest_dropped():
    history = [user("first " * 30), assistant("one"), user("second " * 30), assistant("two"), user("third " * 30),
               assistant("three")]
    window = prune(history, 10_000, 1, 60, words)
    assert [item["role"] for item in window] == [item["role"] for item in history]
    assert window[-2:] == history[-2:]
    assert all(len(window[i]["content"]) <= 60 and CUT in window[i]["content"] for i in (0, 2))
    dropped = prune(history, 45, 1, 60, words)
    assert dropped[-2:] == history[-2:] and len(dropped) < len(history)
    assert dropped == window[-len(dropped):]


def test_no_turn_is_recent_when_none_is_asked_for_but_the_newest_question_stays_whole():
    history = [user("old " * 30), assistant("told " * 30), user("new " * 30), assistant("answered " * 30)]
    window = prune(history, 10_000, 0, 60, words)
    assert window[2] == history[2]
    assert all(len(window[i]["content"]) <= 60 for i in (0, 1, 3))


def test_the_newest_question_comes_before_later_answers_and_is_cut_where_it_must():
    history = [user("please open the gate of the northern harbour"), assistant("opening " * 40)]
    assert prune(history, 12, 2, 30, words) == [history[0]]
    [cut] = prune(history, 7, 2, 30, words)
    assert cut["content"].startswith("please open the") and cut["content"].endswith(CUT) and words(cut) <= 7
    assert prune(history, 3, 2, 30, words) == []


@pytest.mark.parametrize("history, said", [
    (["text"], "history item 0: not an object"),
    ([user("a"), {"role": "system", "content": "b"}], "history item 1: role is 'system'; give one of user, assistant"),
    ([{"role": "user"}], "history item 0: content is NoneType; give a text"),
    ([{"role": "tool", "content": "a", "name": 3}], "history item 0: name is int; give a text"),
])
def test_what_is_no_history_is_told(history, said):
    with pytest.raises(WindowError, match=said):
        prune(history, 100, 2, 40, words)


@pytest.mark.parametrize("options, field", [((-1, 2, 40), "budget_tokens"), ((9, -1, 40), "recent_turns"),
                                            ((9, 2, 0), "surrogate_chars")])
def test_what_is_no_option_is_told(options, field):
    with pytest.raises(WindowError, match=f"{field} is "):
        prune([user("a")], *options, words)


VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=100),
                      lambda inner: st.lists(inner, max_size=4)
                      | st.dictionaries(st.text(max_size=8), inner, max_size=4),
                      max_leaves=20)
CONTENTS = st.text(max_size=400) | VALUES.map(json.dumps) | st.sampled_from([REPOSITORY, "word " * 90])
MESSAGES = st.builds(lambda role, content: {"role": role, "content": content},
                     st.sampled_from(["user", "assistant", "tool"]), CONTENTS)
# Counts tokens in ways in which a part may take more than the whole, as with real tokenisers.
COUNTS = st.sampled_from([words, lambda m: len(m["content"].encode()) + 2, lambda m: len(m["content"]) % 7 + 1])


@settings(max_examples=300, deadline=None)
@given(st.lists(MESSAGES, max_size=8), st.integers(0, 400), st.integers(0, 4), st.integers(1, 120), COUNTS)
def test_properties_of_every_window(history, budget, recent, chars, count):
    window = prune(history, budget, recent, chars, count)
    assert sum(map(count, window)) <= budget
    assert window == prune(history, budget, recent, chars, count)
    # A subsequence: the order and the roles stay, and what is not verbatim is a surrogate, or the newest question cut.
    roles = iter(item["role"] for item in history)
    assert all(item["role"] in roles for item in window)
    sources = iter(history)
    for item in window:
        assert any(item["content"] == source["content"] or item["content"] == surrogate(source, chars)
                   or item["content"].endswith(CUT) and source["content"].startswith(item["content"][:-len(CUT)])
                   for source in sources)
    users = [item for item in history if item["role"] == "user"]
    if users and count(users[-1]) <= budget:
        assert users[-1] in window
    assert all(len(item["content"]) <= chars for item in window if item["role"] == "tool")
    everything = prune(history, 10**9, len(history), chars, count)
    assert [item for item in everything if item["role"] != "tool"] == [
        item for item in history if item["role"] != "tool"]
    assert len(everything) == len(history)


@pytest.mark.parametrize("text", ["Z" * 200_000, "a.b-c+" * 40_000, "x/" * 100_000, "~" * 200_000])
def test_a_long_word_takes_no_longer_than_a_text_of_its_length(text):
    start = time.process_time()
    short = surrogate({"role": "tool", "content": f"{text} see ops@example.org or /srv/logs"}, 400)
    assert time.process_time() - start < 5 and len(short) <= 400
    if len(set(text)) == 1:
        assert "ops@example.org" in short and "/srv/logs" in short

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexus.registry import Tool
from nexus.routing_workload import RoutingCase, load_cases, registry_around
from nexus.workload import WorkloadError


def tool(server, name):
    return Tool(server, name, "", {})


TOOLS = [tool("a", "read"), tool("a", "write"), tool("b", "read")]


def written(tmp_path, *lines):
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_cases_have_ids_servers_and_everything_that_is_right(tmp_path):
    path = written(
        tmp_path,
        {"query": "put it there", "tool": "write"},
        "",
        {"id": "x", "query": "get it", "server": "b", "tool": "read", "also": [{"server": "a", "tool": "read"}],
         "wording": "paraphrase", "args": {"n": 1}, "confusable": {"tool": "write"}},
        {"query": "sing a song", "tool": None},
    )
    first, second, none = load_cases(path, TOOLS)
    assert (first.id, first.tool) == ("line-1", ("a", "write"))
    assert (second.also, second.confusable, second.args) == ((("a", "read"),), ("a", "write"), {"n": 1})
    assert second.accepts(TOOLS[0]) and second.accepts(TOOLS[2]) and not second.accepts(TOOLS[1])
    assert not second.accepts(None)
    assert none.accepts(None) and not none.accepts(TOOLS[0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "found a list of 0"),
        ({"query": " ", "tool": "write"}, "'query' is a string"),
        ({"query": "q"}, "'tool' is missing"),
        ({"query": "q", "tool": 3}, "'tool' is a number"),
        ({"query": "q", "tool": "writ"}, "unknown tool 'writ'"),
        ({"query": "q", "tool": "read"}, "tool 'read' is ambiguous, the servers 'a', 'b'"),
        ({"query": "q", "tool": "write", "server": "b"}, "unknown tool 'write' of server 'b'; server 'a' has one"),
        ({"query": "q", "tool": "write", "server": 1}, "'server' is a number"),
        ({"query": "q", "tool": "write", "wording": "odd"}, "'wording' is 'odd'; use one of own, paraphrase"),
        ({"query": "q", "tool": "write", "args": []}, "'args' is a list of 0"),
        ({"query": "q", "tool": "write", "also": {}}, "'also' is an empty object"),
        ({"query": "q", "tool": "write", "also": ["read"]}, "'also' is a string"),
        ({"query": "q", "tool": "write", "answer": 1}, "unknown key 'answer'"),
        ({"query": "q", "tool": "write", "id": ""}, "'id' is a string"),
        ({"query": "q", "tool": "write", "confusable": "read"}, "'confusable' is a string"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    with pytest.raises(WorkloadError) as told:
        load_cases(written(tmp_path, line), TOOLS)
    assert message in str(told.value) and "line 1" in str(told.value)


@pytest.mark.parametrize("second", [{"id": "one", "query": "other", "tool": "write"},
                                    {"id": "two", "query": "Put  IT there", "tool": "write"}])
def test_ids_and_queries_are_used_once(tmp_path, second):
    with pytest.raises(WorkloadError, match="line 2: (id|query) .* is already used in line 1"):
        load_cases(written(tmp_path, {"id": "one", "query": "put it there", "tool": "write"}, second), TOOLS)


@given(st.integers(1, 60), st.data())
@settings(deadline=None)
def test_a_registry_holds_the_tool_and_is_nested_in_multiples(n_tools, data):
    order = [tool("s", str(i)) for i in range(n_tools)]
    at = data.draw(st.integers(0, n_tools - 1))
    n = data.draw(st.integers(1, n_tools))
    small = registry_around(order, order[at].identity, n)
    assert len(small) == n and order[at] in small
    multiple = n * data.draw(st.integers(1, 4))
    if multiple <= n_tools and at // multiple * multiple + multiple <= n_tools:
        assert set(small) <= set(registry_around(order, order[at].identity, multiple))


def test_impossible_registries_are_refused():
    with pytest.raises(WorkloadError, match="a registry of 4 tools is asked for and there are 3"):
        registry_around(TOOLS, ("a", "read"), 4)
    with pytest.raises(WorkloadError, match="tool 'gone' of server 'a' is not in the registry"):
        registry_around(TOOLS, ("a", "gone"), 2)


def test_a_case_is_hashable():
    assert len({RoutingCase("a", "q", None, args={"x": []}), RoutingCase("a", "q", None, args={})}) == 2

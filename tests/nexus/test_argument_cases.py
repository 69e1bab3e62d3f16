import json

import pytest

from nexus.argument_cases import PLACEHOLDERS, ArgumentCase, is_placeholder, load_argument_cases, same
from nexus.registry import Tool
from nexus.workload import WorkloadError

OPEN_TICKET = Tool("desk", "open_ticket", "", {
    "type": "object",
    "properties": {
        "project": {"type": "string"},
        "number": {"type": "number"},
        "urgent": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "state": {"type": "string", "enum": ["open", "unknown"], "default": "open"},
        "limit": {"type": "integer", "default": 10},
        "mode": {"$ref": "#/$defs/mode"},
        "extra": {"type": "object", "properties": {"owner": {"type": "string"}, "how": {"enum": ["none", "some"]}}},
        "note": True,
    },
    "required": ["project"],
    "$defs": {"mode": {"type": "string", "enum": ["fast", "slow"]}},
})
ALSO = Tool("desk", "new_ticket", "", {"properties": {"project": {"type": "string"}, "number": {"type": "number"}}})
TOOLS = [OPEN_TICKET, ALSO]


def case(arguments, **others):
    return ArgumentCase("c", "do it", OPEN_TICKET.identity, {name: (value,) for name, value in arguments.items()},
                        **others)


def written(tmp_path, *lines):
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def line(**changes):
    good = {"server": "desk", "tool": "open_ticket", "query": "open one in LOOM", "arguments": {"project": "LOOM"}}
    return good | changes


@pytest.mark.parametrize(("value", "other", "options"), [
    ("LOOM", " LOOM\n", {}), ("LOOM", "loom", {"any_case": True}), (7, 7.0, {}), (True, True, {}), (None, None, {}),
    (["a", "b"], ["a", "b"], {}), (["b", "a"], ["a", "b"], {"as_set": True}), (["a", "a"], ["a"], {"as_set": True}),
    (["B"], ["b"], {"any_case": True}), ({"k": [1]}, {"k": [1.0]}, {}),
])
def test_values_that_count_as_one(value, other, options):
    assert same(value, other, **options) and same(other, value, **options)


@pytest.mark.parametrize(("value", "other", "options"), [
    ("LOOM", "loom", {}), ("a b", "a  b", {}), (7, "7", {}), (1, True, {}), (0, False, {}), (7, 7.5, {}),
    (None, "", {}),
    (["a", "b"], ["b", "a"], {}), (["a"], ["a", "b"], {"as_set": True}), (["a"], ["a", "b"], {}), ("a", ["a"], {}),
    ({"k": 1}, {"k": 1, "l": 2}, {}), (None, False, {}),
])
def test_values_that_differ(value, other, options):
    assert not same(value, other, **options) and not same(other, value, **options)


def test_an_argument_is_right_with_any_accepted_value_and_wrong_when_absent():
    asked = ArgumentCase("c", "do it", OPEN_TICKET.identity, {"project": ("LOOM", "Loom project"), "number": (7,)})
    assert asked.right({"project": "Loom project", "number": 7.0, "urgent": True}) == {"project": True, "number": True}
    assert asked.right({"project": "loom"}) == {"project": False, "number": False}
    assert asked.right({}) == {"project": False, "number": False}


def test_case_and_order_are_forgiven_only_where_the_case_says_so():
    strict = case({"project": "LOOM", "tags": ["a", "b"]})
    lax = case({"project": "LOOM", "tags": ["a", "b"]}, any_case=frozenset({"project"}), as_set=frozenset({"tags"}))
    filled = {"project": "loom", "tags": ["b", "a"]}
    assert strict.right(filled) == {"project": False, "tags": False}
    assert lax.right(filled) == {"project": True, "tags": True}
    assert not lax.right({"project": "loom", "tags": ["B", "a"]})["tags"]


def test_unspecified_optional_arguments_are_those_that_change_something():
    asked = case({"urgent": True})
    filled = {"project": "made up", "urgent": False, "number": 3, "tags": [], "limit": 10, "state": "unknown",
              "note": None}
    assert asked.unspecified(filled, OPEN_TICKET) == ["number", "tags", "state"]
    assert asked.unspecified({"limit": 11, "state": "open"}, OPEN_TICKET) == ["limit"]
    assert asked.unspecified({}, OPEN_TICKET) == []


@pytest.mark.parametrize(("text", "name"), [
    *((text, "title") for text in sorted(PLACEHOLDERS)),
    ("STRING", "title"), (" 'string' ", "title"), ("TODO", "body"), ("<owner>", "title"), ("<your name here>", "title"),
    ("{repo}", "title"), ("{{ repo }}", "title"), ("${REPO}", "title"), ("[branch name]", "title"), ("%REPO%", "title"),
    ("__REPO__", "title"), ("your-repo", "title"), ("your_api_key", "title"), ("Your Page Title", "title"),
    ("insert your token", "title"), ("example-branch", "title"), ("sample_repo", "title"), ("Example issue", "title"),
    ("some text", "title"), ("jane@example.com", "title"), ("https://example.org/x", "title"),
    ("/path/to/repo", "repo_path"), ("Lorem ipsum dolor sit", "body"),
    ("owner", "owner"), ("Owner", "owner"), ("repo_path", "repo_path"), ("repo path", "repo_path"),
    ("repoId", "repo_id"),
    ("repo_name", "repo"), ("the owner name", "owner"), ("my repo", "repo"), ("Issue Key", "issue_key"),
    ("threadid", "threadID"), ("name", "name"), ("id", "id"),
])
def test_placeholders(text, name):
    assert is_placeholder(text, name)


@pytest.mark.parametrize(("text", "name"), [
    ("", "title"), ("   ", "title"), ("main", "branch"), ("Fix the example gallery", "title"),
    ("sample rates are off", "title"),
    ("Replace the placeholder image", "title"), ("strings", "topic"), ("todo-app", "repo"), ("null-safety", "branch"),
    ("{\"a\": 1}", "data"), ("{app=\"x\"}", "matcher"), ("<p>gone</p>", "body"), ("[\"a\", \"b\"]", "labels"),
    ("SELECT 1 WHERE a < b", "query"), ("owner", "role"), ("northlight", "owner"), ("repo-owner-tool", "repo"),
    ("/home/ines/rivulet", "repo_path"), ("examplar.com", "url"), ("Europe/Lisbon", "timezone"), ("14:30", "time"),
    ("the yourself album", "title"), ("anchor", "name"), ("idle", "id"), ("100%", "threshold"), ("Ownership", "owner"),
])
def test_no_placeholders(text, name):
    assert not is_placeholder(text, name)


def test_leaks_name_the_arguments_that_hold_a_placeholder_at_any_depth():
    asked = case({"number": 7})
    filled = {"project": "your-project", "tags": ["fine", "TODO"], "extra": {"owner": "owner", "how": "some"},
              "number": 7}
    assert asked.leaks(filled, OPEN_TICKET) == ["project", "tags", "extra"]
    clean = {"project": "LOOM", "tags": ["fine"], "extra": {"owner": "ines"}, "urgent": True}
    assert asked.leaks(clean, OPEN_TICKET) == []


def test_an_accepted_value_and_one_of_the_schema_do_not_leak():
    assert case({"project": "example"}).leaks({"project": "example"}, OPEN_TICKET) == []
    assert case({"project": "LOOM"}).leaks({"project": "example"}, OPEN_TICKET) == ["project"]
    filled = {"state": "unknown", "extra": {"how": "none"}}
    assert case({"project": "LOOM"}).leaks(filled, OPEN_TICKET) == []
    # Legal in one field is not legal in another.
    assert case({"project": "LOOM"}).leaks({"project": "unknown", "extra": {"owner": "unknown"}}, OPEN_TICKET) == \
        ["project", "extra"]


def test_cases_are_read_with_everything_they_say(tmp_path):
    history = [{"role": "user", "content": "Open LOOM"}, {"role": "tool", "name": "get", "content": "{}"}]
    path = written(tmp_path, line(), "", line(
        id="x", also=[{"server": "desk", "tool": "new_ticket"}], history=history, from_history=["project"],
        arguments={"project": ["LOOM", "loom"], "number": 3}, any_case=["project"]))
    first, second = load_argument_cases(path, TOOLS)
    assert (first.id, first.tool, first.arguments) == ("line-1", ("desk", "open_ticket"), {"project": ("LOOM",)})
    assert first.history == () and first.from_history == ()
    assert second.arguments == {"project": ("LOOM", "loom"), "number": (3,)}
    assert second.history == tuple(history) and second.from_history == ("project",)
    assert second.any_case == {"project"} and second.as_set == frozenset()
    assert second.accepts(OPEN_TICKET) and second.accepts(ALSO) and not first.accepts(ALSO) and not first.accepts(None)


def test_a_list_argument_is_a_list_among_alternatives(tmp_path):
    path = written(tmp_path, line(arguments={"tags": [["a", "b"]]}, as_set=["tags"]))
    assert load_argument_cases(path, TOOLS)[0].right({"tags": ["b", "a"]}) == {"tags": True}
    with pytest.raises(WorkloadError, match="a list is one of alternatives"):
        load_argument_cases(written(tmp_path, line(arguments={"tags": ["a", "b"]})), TOOLS)


def test_a_tool_must_be_in_the_registry(tmp_path):
    with pytest.raises(WorkloadError, match="line 1: unknown tool 'close_ticket' of server 'desk'"):
        load_argument_cases(written(tmp_path, line(tool="close_ticket")), TOOLS)


@pytest.mark.parametrize(("bad", "message"), [
    ("{", "not JSON"),
    ([], "an empty list|a list of 0"),
    (line(args={}), "unknown key 'args'"),
    (line(query=" "), "'query' is a string; it must be a string that is not blank"),
    (line(server=None), "'server' is null"),
    (line(arguments={}), "'arguments' is an empty object"),
    (line(arguments=["project"]), "'arguments' is a list"),
    (line(arguments={"projekt": "LOOM"}), "'open_ticket' has no argument 'projekt'; it has project, number"),
    (line(arguments={"project": []}), "'project' has no accepted value"),
    (line(arguments={"number": "7"}), "'number': '7' does not fit the schema of 'open_ticket'"),
    (line(arguments={"mode": "medium"}), "'mode': 'medium' does not fit"),
    (line(id=" "), "'id' is a string"),
    (line(also=[{"tool": "new_ticket"}]), "'also' holds an object"),
    (line(also=[{"server": "desk", "tool": "gone"}]), "unknown tool 'gone'"),
    (line(also=[{"server": "desk", "tool": "new_ticket"}], arguments={"urgent": True}),
     "'new_ticket' has no argument 'urgent'"),
    (line(any_case="project"), "'any_case' is a string; it must be a list"),
    (line(as_set=["tags"]), "'as_set' names 'tags'; it must name arguments: project"),
    (line(from_history=["project"]), "'from_history' names arguments of no history"),
    (line(history=[{"role": "system", "content": "x"}]), "'history' holds an object"),
    (line(history=[{"role": "user", "content": 1}]), "'history' holds an object"),
    (line(history=["Hello"]), "'history' holds a string"),
])
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path, bad, message):
    path = written(tmp_path, line(id="good"), bad)
    with pytest.raises(WorkloadError, match=f"cases.jsonl, line 2: .*({message})"):
        load_argument_cases(path, TOOLS)


def test_an_id_is_used_once(tmp_path):
    with pytest.raises(WorkloadError, match="line 2: id 'x' is already used in line 1"):
        load_argument_cases(written(tmp_path, line(id="x"), line(id="x")), TOOLS)

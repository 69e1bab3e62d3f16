import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexus.registry import Problem, RegistryError, Tool, load_registry, tool_text


def entry(name="open_gate", description="Open a gate.", schema=None, **extra):
    return {"name": name, "description": description, "inputSchema": {} if schema is None else schema, **extra}


@pytest.fixture
def load(tmp_path):
    def load(content):
        path = tmp_path / "tools.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return load_registry(path)
    return load


def test_three_forms_give_the_same_tools(load):
    entries = [entry("open_gate"), entry("close_gate", schema={"type": "object"})]
    plain = load({"tools": entries})
    assert plain.tools == [Tool(None, "open_gate", "Open a gate.", {}),
                           Tool(None, "close_gate", "Open a gate.", {"type": "object"})]
    assert plain.problems == []
    assert load({"jsonrpc": "2.0", "id": 1, "result": {"tools": entries}}) == plain
    assert load(entries) == plain


@pytest.mark.parametrize("schema", [
    {},
    {"$schema": "http://json-schema.org/draft-07/schema#"},
    {"type": "object"},
    {"anyOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]},
    {"type": "object", "properties": {name: {"type": "string"} for name in ("from", "filter-query", "$and", "名前")}},
])
def test_schema_quirks_load_and_keep_the_schema(load, schema):
    [tool] = load([entry(schema=schema)]).tools
    assert tool.input_schema == schema
    assert json.loads(tool_text(tool))["function"]["parameters"] == schema


@pytest.mark.parametrize("missing", [{"description": ""}, {"description": None}, {}])
def test_a_description_may_be_missing(load, missing):
    [tool] = load([{"name": "t", "inputSchema": {}, **missing}]).tools
    assert tool.description == ""
    assert '"description":""' in tool_text(tool)


def test_long_and_cjk_names_load(load):
    name = "a" * 45
    assert [tool.name for tool in load([entry(name), entry("查询潮位", "查询一个港口的潮位。")]).tools] == [name, "查询潮位"]


def test_one_name_on_two_servers_is_two_tools(load):
    tools = load([entry(server="north"), entry(server="south"), entry()]).tools
    assert [tool.identity for tool in tools] == [("north", "open_gate"), ("south", "open_gate"), (None, "open_gate")]
    assert len(set(tools)) == 3
    assert len({tool_text(tool) for tool in tools}) == 1


@pytest.mark.parametrize("extra, where", [
    ({}, "'open_gate';"),
    ({"server": "north"}, "'open_gate' of server 'north';"),
])
def test_one_identity_twice_is_an_error_that_names_both_places(load, extra, where):
    with pytest.raises(RegistryError) as error:
        load([entry(**extra), entry("other"), entry(description="Another text.", **extra)])
    assert "entries 0 and 2" in str(error.value)
    assert where in str(error.value)


@pytest.mark.parametrize("broken, name, reason", [
    ("open_gate", None, "the entry is a string"),
    (None, None, "the entry is null"),
    ({"description": "d", "inputSchema": {}}, None, '"name" is missing'),
    (entry(name=""), None, '"name" is empty'),
    (entry(name=7), None, '"name" is a number'),
    (entry("x", schema=[1, 2]), "x", '"inputSchema" is a list of 2'),
    (entry("x", schema=True), "x", '"inputSchema" is a boolean'),
    ({"name": "x", "inputSchema": None}, "x", '"inputSchema" is null'),
    ({"name": "x"}, "x", '"inputSchema" is missing'),
    (entry("x", description=["d"]), "x", '"description" is a list of 1'),
    (entry("x", server=3), "x", '"server" is a number'),
    (entry("x", description="half \ud83d"), "x", "lone surrogate"),
    (entry("x", schema={"title": "\udc00"}), "x", "lone surrogate"),
    (entry("x", server="\udc00"), "x", "lone surrogate"),
    (entry("x\udc00"), r"x\udc00", "lone surrogate"),
])
def test_a_broken_entry_loses_only_itself(load, broken, name, reason):
    registry = load({"tools": [entry("first"), broken, entry("last")]})
    assert [tool.name for tool in registry.tools] == ["first", "last"]
    [problem] = registry.problems
    assert isinstance(problem, Problem)
    assert (problem.index, problem.name) == (1, name)
    assert reason in problem.reason


@pytest.mark.parametrize("content, finding", [
    ("", "the file is empty"),
    (" \n", "the file is empty"),
    ("{", "not JSON"),
    ('[{"name": "t", "inputSchema": {"default": NaN}}]', "NaN is not JSON"),
    ("[" * 200_000, "nested too deeply"),
    ("{}", "found an empty object"),
    ('"tools"', "found a string"),
    ("3", "found a number"),
    ({"error": {"code": -32601}, "id": 1}, "found an object with the keys 'error', 'id'"),
    ({"result": {"prompts": []}}, "found an object with the keys 'result'"),
    ({"tools": {"open_gate": {}}}, "found an object with the keys 'tools'"),
    ({"tools": []}, "the list of tools is empty"),
    ([], "the list of tools is empty"),
    ([1, {"name": "t"}], "none of the 2 entries is a tool (entry 0: the entry is a number"),
])
def test_a_bad_file_names_path_finding_and_remedy(load, content, finding):
    with pytest.raises(RegistryError) as error:
        load(content)
    message = str(error.value)
    assert "tools.json: " in message
    assert finding in message
    assert "; give " in message or "; mend " in message


def test_unreadable_files_are_registry_errors(tmp_path):
    with pytest.raises(RegistryError, match=r"absent\.json: No such file.*; give a tools/list result"):
        load_registry(tmp_path / "absent.json")
    with pytest.raises(RegistryError, match="Is a directory"):
        load_registry(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'["\xe9"]')
    with pytest.raises(RegistryError, match="byte 2 is not UTF-8"):
        load_registry(tmp_path / "latin.json")


def test_a_byte_order_mark_is_no_content(tmp_path):
    (tmp_path / "bom.json").write_text(json.dumps([entry()]), encoding="utf-8-sig")
    assert load_registry(tmp_path / "bom.json").tools[0].name == "open_gate"


def test_tool_text_is_compact_ordered_and_unescaped():
    tool = Tool("s", "t", "水位 é", {"type": "object", "required": ["b"], "properties": {"b": {}, "a": {}}})
    assert tool_text(tool) == ('{"type":"function","function":{"name":"t","description":"水位 é","parameters":'
                               '{"type":"object","required":["b"],"properties":{"b":{},"a":{}}}}}')


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8)


@given(TEXT, TEXT, st.dictionaries(TEXT, JSON, max_size=4))
def test_tool_text_gives_back_every_tool_and_the_order_of_its_keys(name, description, schema):
    function = json.loads(tool_text(Tool(None, name, description, schema)))["function"]
    assert function == {"name": name, "description": description, "parameters": schema}
    assert list(function["parameters"]) == list(schema)

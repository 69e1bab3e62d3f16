import json
import statistics
from pathlib import Path

import jsonschema
import pytest

from nexus.registry import RegistryError, load_registry, tool_text
from nexus.workload import Case, WorkloadError, load_conversation, load_workload, select

DATA = Path(__file__).parents[2] / "experiments" / "data"
CONVERSATIONS = ("conversation.json", "conversation_offtopic.json")
# JSON schemas take about 4.7 characters per Qwen token, prose with logs about 4.
CHARACTERS_PER_SCHEMA_TOKEN = 4.7
CHARACTERS_PER_PROSE_TOKEN = 4.0
SHINGLE_WORDS = 12


@pytest.fixture(scope="module")
def workload():
    return load_workload(DATA / "github_style_tools.json", DATA / "github_style_queries.jsonl", DATA / CONVERSATIONS[0])


def test_every_tool_has_one_case(workload):
    assert len(workload.tools) == 24
    assert [case.tool for case in workload.cases] == [tool.name for tool in workload.tools]
    assert load_registry(DATA / "github_style_tools.json").problems == []


def test_schemas_are_valid_and_describe_every_parameter(workload):
    for tool in workload.tools:
        jsonschema.Draft202012Validator.check_schema(tool.input_schema)
        assert set(tool.input_schema["required"]) <= set(tool.input_schema["properties"]), tool.name
        assert all(described(schema) for schema in tool.input_schema["properties"].values()), tool.name


def described(schema):
    return "description" in schema or all(map(described, schema["properties"].values()))


def test_defaults_are_valid_values(workload):
    with_default = [schema for tool in workload.tools for schema in subschemas(tool.input_schema)
                    if "default" in schema]
    assert len(with_default) > 20
    for schema in with_default:
        jsonschema.validate(schema["default"], schema)


def subschemas(schema):
    yield schema
    for inner in [*schema.get("properties", {}).values(), *filter(None, [schema.get("items")])]:
        yield from subschemas(inner)


def test_arguments_fit_the_schema_of_their_tool(workload):
    schemas = {tool.name: tool.input_schema for tool in workload.tools}
    for case in workload.cases:
        schema = schemas[case.tool]
        # Most of the schemas allow additional properties, where a misspelt argument would pass unseen.
        assert set(case.args) <= set(schema["properties"]), case.id
        jsonschema.validate(case.args, schema, format_checker=jsonschema.FormatChecker())


def test_schema_texts_are_of_the_intended_sizes(workload):
    tokens = [len(tool_text(tool)) / CHARACTERS_PER_SCHEMA_TOKEN for tool in workload.tools]
    assert min(tokens) >= 90
    assert max(tokens) <= 420
    assert 170 <= statistics.median(tokens) <= 230


def test_queries_are_unique_and_of_the_intended_sizes(workload):
    queries = [case.query for case in workload.cases]
    assert len(set(queries)) == len(queries)
    assert all(60 <= len(query) <= 180 for query in queries)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations_are_long_and_never_repeat_themselves(name):
    turns = load_conversation(DATA / name)
    text = "\n".join(turn["content"] for turn in turns)
    assert len(text) / CHARACTERS_PER_PROSE_TOKEN >= 2600
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
    words = text.split()
    shingles = [tuple(words[i:i + SHINGLE_WORDS]) for i in range(len(words) - SHINGLE_WORDS + 1)]
    assert len(set(shingles)) == len(shingles)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations_give_no_tool_away(workload, name):
    text = (DATA / name).read_text(encoding="utf-8")
    assert [tool.name for tool in workload.tools if tool.name in text] == []


TOOLS = [{"name": name, "inputSchema": schema} for name, schema in (("open_gate", {}), ("close_gate", {}), ("bent", 1))]
CASE = {"id": "1", "tool": "open_gate", "query": "Open it."}
TURNS = [{"role": "user", "content": "Hello."}]


@pytest.fixture
def load(tmp_path):
    def load(queries, tools=TOOLS, turns=TURNS):
        texts = {"tools.json": tools, "queries.jsonl": queries, "turns.json": turns}
        for name, content in texts.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name).write_text(text, encoding="utf-8")
        return load_workload(*(tmp_path / name for name in texts))
    return load


def test_cases_keep_file_order_and_blank_lines_do_not_count(load):
    second = {"id": "2", "tool": "close_gate", "query": "Close\u2028it.", "args": {"at": 3}}
    workload = load(json.dumps(CASE) + "\n\n" + json.dumps(second, ensure_ascii=False) + "\n")
    assert workload.cases == [Case("1", "open_gate", "Open it.", None),
                              Case("2", "close_gate", "Close\u2028it.", {"at": 3})]
    assert workload.conversation == TURNS
    assert [tool.name for tool in workload.tools] == ["open_gate", "close_gate"]


@pytest.mark.parametrize("line, finding", [
    ("{", "not JSON"),
    ("[1]", "found a list of 1"),
    ({**CASE, "id": "2", "arg": {}}, "unknown key 'arg', did you mean 'args'?"),
    ({"id": "2", "tool": "open_gate"}, "'query' is missing"),
    ({**CASE, "id": 2}, "'id' is a number"),
    ({**CASE, "id": "2", "query": " "}, "'query' is a string; it must be a string that is not blank"),
    ({**CASE, "id": "2", "args": [1]}, "'args' is a list of 1"),
    ({**CASE, "id": "2", "tool": "open_gates"}, "unknown tool 'open_gates', did you mean 'open_gate'?"),
    ({**CASE, "id": "2", "tool": "zzz"}, "unknown tool 'zzz'; name a tool"),
    ({**CASE, "id": "2", "tool": "bent"}, "tool 'bent' was left out of the registry: \"inputSchema\" is a number"),
    (CASE, "id '1' is already used in line 1"),
])
def test_a_bad_line_is_named_with_its_file(load, line, finding):
    with pytest.raises(WorkloadError) as error:
        load(json.dumps(CASE) + "\n\n" + (line if isinstance(line, str) else json.dumps(line)))
    assert "queries.jsonl, line 3: " in str(error.value)
    assert finding in str(error.value)


def test_a_name_on_two_servers_cannot_be_a_case(load):
    tools = [{"server": server, "name": "open_gate", "inputSchema": {}} for server in ("north", "south")]
    with pytest.raises(WorkloadError, match="'open_gate' is ambiguous, the servers 'north', 'south'"):
        load(json.dumps(CASE), tools=tools)


@pytest.mark.parametrize("queries", ["", "\n \n"])
def test_no_query_is_an_error(load, queries):
    with pytest.raises(WorkloadError, match=r"queries\.jsonl: the file is empty; give one JSON object per line"):
        load(queries)


@pytest.mark.parametrize("turns, finding", [
    ("", "the file is empty"),
    ("{", "not JSON"),
    ([], "found a list of 0"),
    ({"role": "user", "content": "x"}, "found an object with the keys 'role', 'content'"),
    ([*TURNS, "x"], "turn 1 is a string"),
    ([*TURNS, {"role": "assistant"}], "turn 1 is an object with the keys 'role'"),
    ([{"role": "tool", "content": "x"}], "turn 0 has the role 'tool'; use one of user, assistant"),
    ([{"role": "user", "content": ""}], "turn 0 has no text"),
    ([{"role": "user", "content": None}], "turn 0 has no text"),
])
def test_a_bad_conversation_names_the_turn(load, turns, finding):
    with pytest.raises(WorkloadError) as error:
        load(json.dumps(CASE), turns=turns)
    assert "turns.json: " in str(error.value)
    assert finding in str(error.value)


def test_missing_files_are_named(load, tmp_path):
    load(json.dumps(CASE))
    tools, queries, turns = (tmp_path / name for name in ("tools.json", "queries.jsonl", "turns.json"))
    absent = tmp_path / "absent"
    with pytest.raises(RegistryError, match="absent: No such file"):
        load_workload(absent, queries, turns)
    for paths in ((tools, absent, turns), (tools, queries, absent)):
        with pytest.raises(WorkloadError, match="absent: No such file"):
            load_workload(*paths)


def test_select_takes_the_first_in_file_order(workload):
    assert select(workload.cases, 3) == workload.cases[:3]
    assert select(workload.cases, 24) == workload.cases


@pytest.mark.parametrize("n", [25, 0, -1])
def test_select_refuses_what_is_not_there_and_names_both_numbers(workload, n):
    with pytest.raises(WorkloadError, match=f"^{n} cases are asked for and the workload has 24; ask for 1 to 24"):
        select(workload.cases, n)

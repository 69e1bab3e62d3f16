"""`nexus call`: what it prints, whom it asks before it runs a tool, and every error in one line."""
import json
import os
import pty
import sys

import pytest
import toy_mcp

from nexus import call_command, cli, config
from nexus.agent import Turn
from nexus.arguments import Filled
from nexus.call_command import HistoryError, load_history, named_tool
from nexus.registry import Tool
from nexus.runtime import ContextOptions, Runtime
from nexus.schema_grammar import Relaxation
from nexus.signature import Signature
from nexus.tool_call import CallRefused, run_call

ENTRIES = [{"server": "toy", "name": "read_gauge", "description": "Read the water level of a harbour.",
            "inputSchema": {"type": "object", "properties": {"harbour": {"enum": ["north", "south"]}},
                            "required": ["harbour"]}},
           {"server": "toy", "name": "open_gate", "description": "Open the flood gate.",
            "inputSchema": {"type": "object", "properties": {"width": {"type": "integer", "minimum": 1, "maximum": 9}},
                            "required": ["width"]}},
           {"server": "other", "name": "open_gate", "description": "Open a garden gate.", "inputSchema": {}}]
TOOLS = [Tool(entry["server"], entry["name"], entry["description"], entry["inputSchema"]) for entry in ENTRIES]

# Reading is read-only, opening is not; whatever is called is written down.
TOY = toy_mcp.server("""
    tools = [{"name": "read_gauge", "inputSchema": {}, "annotations": {"readOnlyHint": True}},
             {"name": "open_gate", "inputSchema": {}}]

    def answer(method, params):
        if method == "tools/list":
            return {"tools": tools}
        open(sys.argv[1], "a").write(json.dumps(params["arguments"]) + "\\n")
        failed = params["arguments"].get("width") == 9
        return {"content": [{"type": "text", "text": "stuck" if failed else "2.4 m\\u001b[2J"}], "isError": failed}

    serve(answer)
""")


@pytest.fixture
def nexus(capsys, monkeypatch, tmp_path):
    """A function that runs `nexus call`; (status, output, errors). The registry has one server, the toy."""
    script = tmp_path / "toy.py"
    script.write_text(TOY, encoding="utf-8")
    compose = config.compose

    def composed(overrides=()):
        data = compose([f"results_folder={tmp_path / 'results'}", "routing.system=bm25", *overrides])
        data["registry"] = {"name": "toys", "path": None, "servers": [
            {"name": "toy", "command": [sys.executable, str(script), str(tmp_path / "calls")]}]}
        return data

    monkeypatch.setattr(config, "compose", composed)
    monkeypatch.setattr(call_command, "run_call", lambda *args: run_call(*args, tmp_path / "servers"))
    for name in ("NEXUS_DEBUG", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments):
        capsys.readouterr()
        status = cli.main(["call", *map(str, arguments)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def registry(tmp_path):
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(ENTRIES), encoding="utf-8")
    return path


@pytest.fixture
def answered(monkeypatch):
    """Lets the model's turn be this one."""
    def answered(tool, problems=(), **arguments):
        filled = Filled(arguments, json.dumps(arguments), not problems, problems, 120, 7, 1,
                        (Relaxation("/properties/x", "not", "cannot be written"),), 10.0, 20.0)
        turn = Turn(None, tool, None if tool else "probably no tool fits", Signature("signature()", ()), filled, None)
        monkeypatch.setattr(call_command, "turn_of", lambda args, cfg, model: turn)
    return answered


@pytest.fixture
def terminal(monkeypatch):
    """Somebody at the terminal who has typed this."""
    opened = []

    def terminal(typed):
        own, theirs = pty.openpty()
        opened.extend((own, theirs))
        os.write(own, typed.encode())
        monkeypatch.setattr(sys, "stdin", open(theirs, encoding="utf-8", closefd=False))

    yield terminal
    for descriptor in opened:
        os.close(descriptor)


def calls(tmp_path):
    path = tmp_path / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_call_as_json(nexus, answered, tmp_path):
    answered(TOOLS[0], harbour="Süd")
    status, out, err = nexus("How high is the water?")
    told = json.loads(out)
    assert (status, err) == (0, "") and "Süd" in out
    assert list(told)[:5] == ["server", "tool", "arguments", "valid", "problems"]
    assert told["server"] == "toy" and told["tool"] == "read_gauge" and told["arguments"] == {"harbour": "Süd"}
    assert told["valid"] is True and told["problems"] == [] and told["route_ms"] is None
    assert told["relaxed"] == [{"path": "/properties/x", "keyword": "not", "reason": "cannot be written"}]
    assert calls(tmp_path) == []


def test_without_a_tool_the_reason_and_status_1(nexus, answered, tmp_path):
    answered(None)
    status, out, err = nexus("anything", "--execute", "--yes")
    assert (status, err) == (1, "")
    assert json.loads(out) == {"server": None, "tool": None, "reason": "probably no tool fits"}


def test_a_read_only_tool_runs_unasked(nexus, answered, tmp_path):
    answered(TOOLS[0], harbour="north", depth=2.5)
    status, out, err = nexus("How high is the water?", "--execute")
    assert (status, err) == (0, "") and out.endswith("}\n2.4 m\x1b[2J\n")
    assert calls(tmp_path) == [{"harbour": "north", "depth": 2.5}]


def test_other_peoples_text_does_not_move_a_terminals_cursor(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert call_command._shown("a\tb\n\x1b[2Jc") == "a\tb\n\N{REPLACEMENT CHARACTER}[2Jc"


def test_without_a_terminal_another_tool_is_refused_unless_yes(nexus, answered, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", open(os.devnull, encoding="utf-8"))
    answered(TOOLS[1], width=3)
    status, out, err = nexus("Open it.", "--execute")
    assert status == 1 and json.loads(out)["tool"] == "open_gate"
    assert err == ("nexus: toy/open_gate was not run: it is not annotated read-only; say yes when asked, "
                   "or give --yes\n")
    assert calls(tmp_path) == []
    assert nexus("Open it.", "--execute", "--yes")[0] == 0
    assert calls(tmp_path) == [{"width": 3}]


@pytest.mark.parametrize("typed, runs", [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("yo\n", False)])
def test_at_a_terminal_another_tool_asks_and_no_is_the_default(typed, runs, nexus, answered, terminal, tmp_path):
    answered(TOOLS[1], width=3)
    terminal(typed)
    status, _, err = nexus("Open it.", "--execute")
    assert err.startswith('toy/open_gate is not annotated read-only. Run it with {"width": 3}? [y/N] ')
    assert status == (0 if runs else 1)
    assert calls(tmp_path) == ([{"width": 3}] if runs else [])


def test_a_tools_own_failure_is_status_1_with_its_text(nexus, answered):
    answered(TOOLS[1], width=9)
    status, out, err = nexus("Open it.", "--execute", "--yes")
    assert (status, err) == (1, "") and out.endswith("}\nstuck\n")


def test_what_the_schema_forbids_is_not_run(nexus, answered, tmp_path):
    answered(TOOLS[1], ("$.width: 12 is greater than the maximum of 9",), width=12)
    status, out, err = nexus("Open it.", "--execute", "--yes")
    assert status == 1 and json.loads(out)["valid"] is False
    assert err == ("nexus: open_gate was not run: its arguments do not match its schema ($.width: 12 is greater than "
                   "the maximum of 9); say more in the query\n")
    assert calls(tmp_path) == []


def test_a_tool_of_no_configured_server_is_not_run(nexus, answered):
    answered(TOOLS[2])
    status, _, err = nexus("Open it.", "--execute", "--yes")
    assert status == 1 and "server 'other' of tool 'open_gate' is not configured (there are: toy)" in err


# Histories


def test_a_history_is_a_list_or_lines(tmp_path):
    history = [{"role": "user", "content": "Wie hoch ist es?\u2028Und wo?"},
               {"role": "tool", "name": "read_gauge", "content": "2.4"}]
    path = tmp_path / "history"
    path.write_text(json.dumps(history, indent=1), encoding="utf-8")
    assert load_history(path) == history
    path.write_text("\n\n".join(json.dumps(each, ensure_ascii=False) for each in history), encoding="utf-8")
    assert load_history(path) == history
    path.write_text("[]")
    assert load_history(path) == []


@pytest.mark.parametrize("text, said", [
    ('{"role": "user", "content": "a"}\n\n{"role": "user"}', "history, line 3: content is NoneType; give a text"),
    ('{"role": "user", "content": "a"}\n{"role": "me", "content": "a"}', "history, line 2: role is 'me'; give one of"),
    ('{"role": "user", "content": "a"}\nnonsense', "history, line 2: not JSON: Expecting value"),
    ('[{"role": "user", "content": "a"}, "b"]', "history, item 2: not an object"),
    ("[1", "history: not JSON"),
    ("", "history: the file is empty; give a JSON list"),
    (r'[{"role": "user", "content": "a"}, {"role": "user", "content": "\ud800"}]',
     "history, item 2: content holds the lone surrogate '\\ud800'; remove it"),
    (r'{"role": "tool", "name": "\udfff", "content": "a"}', "history, line 1: name holds the lone surrogate '\\udfff'"),
])
def test_a_broken_history_is_told_with_line_and_field(text, said, tmp_path, nexus, registry):
    path = tmp_path / "history"
    path.write_text(text)
    with pytest.raises(HistoryError) as told:
        load_history(path)
    assert said in str(told.value)
    status, out, err = nexus("Open it.", "--history", path, "--registry", registry)
    assert (status, out) == (1, "") and said in err and err.count("\n") == 1


def test_a_history_that_is_not_there(tmp_path):
    with pytest.raises(HistoryError, match="nowhere: No such file"):
        load_history(tmp_path / "nowhere")


# Tools by name


def test_a_tool_is_named_with_its_server_or_alone_where_that_is_clear():
    assert named_tool("toy/open_gate", TOOLS) is TOOLS[1]
    assert named_tool("read_gauge", TOOLS) is TOOLS[0]
    with pytest.raises(CallRefused, match="--tool open_gate: several servers have it; there is toy/open_gate, other/"):
        named_tool("open_gate", TOOLS)
    with pytest.raises(CallRefused, match="--tool toy/read_gouge: no such tool; there is toy/read_gauge"):
        named_tool("toy/read_gouge", TOOLS)
    with pytest.raises(CallRefused, match="see `nexus route`"):
        named_tool("zzz", TOOLS)
    with pytest.raises(CallRefused, match="--tool is blank; give SERVER/NAME"):
        named_tool(" ", TOOLS)
    alone = Tool(None, "a/b", "", {})
    assert named_tool("a/b", [alone]) is alone
    with pytest.raises(CallRefused, match="--tool a/b: 2 tools of the registry are called so"):
        named_tool("a/b", [alone, Tool("a", "b", "", {})])


@pytest.mark.parametrize("arguments, said", [
    (["  "], "the query is blank; say what the tool shall do"),
    (["caf\udce9"], "the query is not UTF-8 at character 4; give it in UTF-8"),
    (["Open it.", "--tool", ""], "--tool is blank; give SERVER/NAME, or leave it out to look for a tool"),
    (["Open it.", "--model", ""], "--model '' is no name; give the path of a GGUF file or a name from conf/model"),
    (["Open it.", "--model", "a=b,c"], "--model 'a=b,c' is no name; give the path of a GGUF file or a name from"),
])
def test_what_cannot_be_meant_is_refused_before_anything_is_loaded(arguments, said, nexus, registry, monkeypatch):
    monkeypatch.setattr(call_command, "open_model", None)
    if "--tool" not in arguments:
        arguments = [*arguments, "--tool", "toy/open_gate"]
    status, out, err = nexus(*arguments, "--registry", registry)
    assert (status, out) == (1, "") and err.startswith(f"nexus: {said}") and err.count("\n") == 1


def test_names_in_an_error_do_not_move_a_terminals_cursor(nexus, tmp_path):
    path = tmp_path / "odd.json"
    path.write_text(json.dumps([ENTRIES[0] | {"name": "wipe\x1b[2J"}]))
    status, _, err = nexus("Open it.", "--registry", path, "--tool", "toy/wipe")
    assert status == 1 and "toy/wipe\N{REPLACEMENT CHARACTER}[2J" in err and "\x1b" not in err


def test_half_a_surrogate_pair_is_printed_as_its_escape(nexus, answered):
    answered(TOOLS[0], harbour="\ud800")
    status, out, err = nexus("How high is the water?")
    assert (status, err) == (0, "") and json.loads(out)["arguments"] == {"harbour": "\ud800"}


def test_without_standard_input_a_tool_is_refused(nexus, answered, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    answered(TOOLS[1], width=3)
    status, _, err = nexus("Open it.", "--execute")
    assert status == 1 and "toy/open_gate was not run" in err and calls(tmp_path) == []


# With a model


@pytest.fixture
def small_model(smollm2, monkeypatch):
    monkeypatch.setattr(call_command, "open_model", lambda spec: smollm2)
    monkeypatch.setattr(call_command, "Runtime", lambda model, options: Runtime(
        model, ContextOptions(n_ctx=1024, n_seq_max=2, n_threads=1)))


@pytest.mark.integration
def test_a_query_is_routed_filled_and_run(nexus, registry, small_model, tmp_path):
    history = tmp_path / "history.jsonl"
    history.write_text('{"role": "user", "content": "I am at the south harbour."}\n')
    status, out, err = nexus("What is the water level of this harbour?", "--registry", registry, "--history", history,
                             "--model", "smollm2-135m", "--execute")
    assert (status, err) == (0, "")
    told, end = json.JSONDecoder().raw_decode(out)
    assert told["server"] == "toy" and told["tool"] == "read_gauge" and told["valid"] and told["route_ms"] > 0
    assert told["arguments"]["harbour"] in ("north", "south") and out[end:] == "\n2.4 m\x1b[2J\n"
    assert calls(tmp_path) == [told["arguments"]]


@pytest.mark.integration
def test_a_named_tool_is_called_without_routing(nexus, registry, small_model):
    status, out, _ = nexus("Read it, 7 metres wide.", "--registry", registry, "--tool", "toy/open_gate")
    told = json.loads(out)
    assert status == 0 and told["tool"] == "open_gate" and told["route_ms"] is None
    assert 1 <= told["arguments"]["width"] <= 9 and told["signature"].startswith("open_gate(width")

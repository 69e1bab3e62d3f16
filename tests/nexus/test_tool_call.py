"""Calls are run on a small server written here, whose annotations are known, and on the real git and time servers."""
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import toy_mcp

from nexus.config import compose, validate
from nexus.mcp_server import MARK, ServerError
from nexus.registry import Tool
from nexus.registry_spec import ServerSpec
from nexus.tool_call import CallRefused, run_call, server_of

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = {"from": "Porto", "深": [1, 2.5, None], "deep": {"$and": [{"x": True}]}}

TOY = toy_mcp.server("""
    import time

    tools = [{"name": "read", "inputSchema": {}, "annotations": {"readOnlyHint": True}},
             {"name": "write", "inputSchema": {}, "annotations": {"readOnlyHint": False, "destructiveHint": False}},
             {"name": "unsaid", "inputSchema": {}}, {"name": "odd", "inputSchema": {}, "annotations": ["readOnlyHint"]},
             {"name": "yes", "inputSchema": {}, "annotations": {"readOnlyHint": "true"}},
             {"name": "fails", "inputSchema": {}, "annotations": {"readOnlyHint": True}},
             {"name": "mixed", "inputSchema": {}, "annotations": {"readOnlyHint": True}},
             {"name": "structured", "inputSchema": {}, "annotations": {"readOnlyHint": True}},
             {"name": "hangs", "inputSchema": {}, "annotations": {"readOnlyHint": True}},
             {"name": "dies", "inputSchema": {}, "annotations": {"readOnlyHint": True}}]

    def answer(method, params):
        if method == "tools/list":
            return {"tools": tools}
        open(sys.argv[1], "a").write(json.dumps(params) + "\\n")
        name = params["name"]
        if name == "hangs":
            time.sleep(600)
        if name == "dies":
            sys.stderr.write("out of paper\\n")
            sys.exit(3)
        if name == "mixed":
            return {"content": [
                {"type": "text", "text": "One."}, {"type": "image", "mimeType": "image/png", "data": "AA=="},
                {"type": "resource", "resource": {"uri": "file:///a", "text": "Two."}},
                {"type": "resource", "resource": {"uri": "file:///b", "blob": "AA=="}},
                {"type": "resource_link", "uri": "file:///c", "name": "c"}]}
        if name == "structured":
            return {"content": [], "structuredContent": {"n": 1}}
        return {"content": [{"type": "text", "text": "done " + name}], "isError": name == "fails"}

    serve(answer)
""")


@pytest.fixture
def toy(tmp_path):
    path = tmp_path / "toy.py"
    path.write_text(TOY, encoding="utf-8")
    return ServerSpec(name="toy", command=[sys.executable, str(path), str(tmp_path / "calls")], timeout_seconds=20)


@pytest.fixture
def folder(tmp_path):
    """Where a server's scratch files go; afterwards no process of a call is left."""
    folder = tmp_path / "servers"
    yield folder
    assert left(folder) == []


def left(folder):
    found = []
    for process in psutil.process_iter():
        try:
            if (process.environ().get(MARK) or "").startswith(str(folder.resolve())):
                found.append(process)
        except (psutil.Error, OSError):
            pass
    return found


def calls(tmp_path):
    path = tmp_path / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def never(question):
    raise AssertionError(question)


def test_a_read_only_tool_runs_unasked_and_gets_the_arguments_as_they_are(toy, folder, tmp_path):
    result = run_call(toy, "read", ARGUMENTS, never, folder)
    assert (result.text, result.is_error, result.read_only) == ("done read", False, True)
    assert calls(tmp_path) == [{"name": "read", "arguments": ARGUMENTS}]


@pytest.mark.parametrize("name", ["write", "unsaid", "odd", "yes"])
def test_anything_not_annotated_read_only_asks(name, toy, folder, tmp_path):
    asked = []
    with pytest.raises(CallRefused, match=f"toy/{name} was not run.*--yes"):
        run_call(toy, name, {"to": "\x1b[2J"}, lambda question: asked.append(question), folder)
    assert calls(tmp_path) == []
    [question] = asked
    assert f"toy/{name}" in question and "not annotated read-only" in question
    assert '{"to": "\\u001b[2J"}' in question and question.isprintable()
    result = run_call(toy, name, {}, lambda question: True, folder)
    assert (result.text, result.read_only) == (f"done {name}", False)


def test_a_tools_own_error_and_other_content(toy, folder):
    failed = run_call(toy, "fails", {}, never, folder)
    assert failed.is_error and failed.text == "done fails"
    assert run_call(toy, "mixed", {}, never, folder).text.splitlines() == [
        "One.", "[image image/png]", "Two.", "[resource file:///b]", "[resource_link file:///c]"]
    assert json.loads(run_call(toy, "structured", {}, never, folder).text) == {"n": 1}


def test_what_goes_wrong_is_told_with_the_server_and_the_remedy(toy, folder):
    slow = toy.model_copy(update={"timeout_seconds": 1.0})
    with pytest.raises(ServerError, match=r"toy: it has not answered the call within timeout_seconds \(1\)"):
        run_call(slow, "hangs", {}, never, folder)
    with pytest.raises(ServerError, match=r"it ended before it had answered the call \(it wrote: out of paper\)"):
        run_call(toy, "dies", {}, never, folder)
    with pytest.raises(ServerError, match="it lists no tool 'nothing', but 10 others; collect the registry again"):
        run_call(toy, "nothing", {}, never, folder)
    with pytest.raises(ServerError, match="there is no program 'no-such-program'"):
        run_call(ServerSpec(name="toy", command=["no-such-program"]), "read", {}, never, folder)
    gone = ServerSpec(name="toy", url="http://127.0.0.1:9/mcp", timeout_seconds=20)
    with pytest.raises(ServerError, match="check that it runs"):
        run_call(gone, "read", {}, never, folder)


def test_thinking_it_over_is_not_the_servers_time(toy, folder):
    slow = toy.model_copy(update={"timeout_seconds": 1.0})

    def think(question):
        time.sleep(1.5)
        return True

    assert run_call(slow, "write", {}, think, folder).text == "done write"


def test_what_the_question_raises_is_raised(toy, folder, tmp_path):
    def stop(question):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_call(toy, "write", {}, stop, folder)
    with pytest.raises(AssertionError, match="toy/write is not annotated"):
        run_call(toy, "write", {}, never, folder)
    assert calls(tmp_path) == []


@pytest.mark.parametrize("tool", ["hangs", "write"])
def test_ctrl_c_leaves_no_server(tool, toy, folder, tmp_path):
    """While the server works, and while the question waits for its answer."""
    program = textwrap.dedent("""
        import signal, sys, time
        from nexus.registry_spec import ServerSpec
        from nexus.tool_call import run_call
        signal.signal(signal.SIGINT, signal.default_int_handler)
        def ask(question):
            open(sys.argv[2], "a").write("asked")
            time.sleep(600)
        run_call(ServerSpec(name="toy", command=sys.argv[4:]), sys.argv[3], {}, ask, sys.argv[1])
        """)
    signs = tmp_path / "calls"
    running = subprocess.Popen([sys.executable, "-c", program, str(folder), str(signs), tool, *toy.command], cwd=ROOT,
                               stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not signs.exists() or not signs.read_text():
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.05)
        assert left(folder)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=30)
    finally:
        running.kill()
        running.wait()
    assert running.returncode != 0 and "KeyboardInterrupt" in said.splitlines()[-1]


def test_the_owner_of_a_tool(toy):
    other = ServerSpec(name="other", url="http://127.0.0.1:9/mcp")
    assert server_of(Tool("toy", "read", "", {}), [other, toy]) is toy
    with pytest.raises(CallRefused, match=r"'home' of tool 'read' is not configured \(there are: other, toy\)"):
        server_of(Tool("home", "read", "", {}), [other, toy])
    with pytest.raises(CallRefused, match="None"):
        server_of(Tool(None, "read", "", {}), [])


@pytest.mark.integration
def test_the_real_git_and_time_servers(tmp_path):
    """Installed from their locks where they are not yet. Neither needs a network to answer."""
    servers = {server.name: server for server in validate(compose()).registry.servers}
    repository = tmp_path / "repository"
    subprocess.run(["git", "init", "--quiet", "--initial-branch", "trunk", str(repository)], check=True)
    (repository / "new.txt").write_text("new\n")
    git = servers["git"].model_copy(update={"command": ["mcp-server-git", "--repository", str(repository)]})
    status = run_call(git, "git_status", {"repo_path": str(repository)}, lambda question: True)
    assert not status.is_error and "trunk" in status.text and "new.txt" in status.text
    with pytest.raises(CallRefused):
        run_call(git, "git_add", {"repo_path": str(repository), "files": ["new.txt"]}, lambda question: False)
    porcelain = ["git", "-C", str(repository), "status", "--porcelain"]
    assert subprocess.run(porcelain, capture_output=True, text=True).stdout == "?? new.txt\n"
    added = run_call(git, "git_add", {"repo_path": str(repository), "files": ["new.txt"]}, lambda question: True)
    assert not added.is_error
    assert subprocess.run(porcelain, capture_output=True, text=True).stdout == "A  new.txt\n"
    outside = run_call(git, "git_status", {"repo_path": os.sep}, lambda question: True)
    assert outside.is_error and "outside" in outside.text
    told = run_call(servers["time"], "convert_time", {"source_timezone": "UTC", "time": "09:30",
                                                      "target_timezone": "Asia/Kolkata"}, lambda question: True)
    assert "15:00" in told.text
    wrong = run_call(servers["time"], "get_current_time", {"timezone": "Nowhere/City"}, lambda question: True)
    assert wrong.is_error and "Nowhere/City" in wrong.text

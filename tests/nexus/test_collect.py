"""The registry is collected from small servers written here: over stdio with the SDK, over HTTP on this machine, and
by hand where the SDK's own server would not send what real servers do."""
import json
import logging
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import toy_mcp
import yaml

from nexus.collect import collect
from nexus.listing import write_listing
from nexus.locks import LockedError, exclusive
from nexus.mcp_server import MARK
from nexus.registry import Tool, load_registry
from nexus.registry_spec import RegistrySpec, ServerSpec

ROOT = Path(__file__).resolve().parents[2]

SDK_SERVER = """
import sys
import anyio
import mcp_types as types
from mcp.server.lowlevel import Server

TOOLS = [types.Tool(name=f"toy_{index:02d}", description=f"Toy {index}.",
                    input_schema={"type": "object", "required": ["b"],
                                  "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}})
         for index in (4, 0, 3, 1, 2)]

async def list_tools(context, params):
    start = int(params.cursor) if params is not None and params.cursor else 0
    following = start + 2
    return types.ListToolsResult(tools=TOOLS[start:following],
                                 next_cursor=str(following) if following < len(TOOLS) else None)

server = Server("toy", on_list_tools=list_tools)

async def stdio():
    from mcp.server.stdio import stdio_server
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())

if len(sys.argv) > 1:
    import uvicorn
    uvicorn.run(server.streamable_http_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
else:
    anyio.run(stdio)
"""

# Answers the handshake and then, page by page, exactly what the file of its argument holds.
BY_HAND = toy_mcp.server("""
    pages = json.load(open(sys.argv[1]))
    print("toy: welcome", flush=True)
    serve(lambda method, params: pages[int(params.get("cursor", 0))])
""")


def entry(name="open_gate", description="Open a gate.", schema=None, **extra):
    return {"name": name, "description": description, "inputSchema": {} if schema is None else schema, **extra}


def tool(server, name, schema=None):
    return Tool(server, name, f"{name}.", schema or {})


@pytest.fixture
def script(tmp_path):
    def script(text, *arguments):
        path = tmp_path / f"toy_{len(list(tmp_path.glob('toy_*.py')))}.py"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return [sys.executable, str(path), *map(str, arguments)]
    return script


@pytest.fixture
def listing(tmp_path, script):
    """A command of a server that lists these pages or, of one page, these entries."""
    def listing(*entries, pages=None):
        path = tmp_path / f"pages_{len(list(tmp_path.glob('pages_*.json')))}.json"
        path.write_text(json.dumps(pages or [{"tools": list(entries)}]), encoding="utf-8")
        return script(BY_HAND, path)
    return listing


@pytest.fixture
def collected(tmp_path):
    folder = tmp_path / "servers"

    def collected(*servers, **commands):
        specs = [*servers, *(ServerSpec(name=name, command=command) for name, command in commands.items())]
        try:
            return collect(RegistrySpec(name="toys", servers=specs), folder)
        finally:
            assert marked(folder) == []
    return collected


@pytest.fixture(autouse=True)
def no_leftovers(tmp_path):
    """A test that fails leaves no process behind either."""
    yield
    for process in marked(tmp_path / "servers"):
        process.kill()


def marked(folder):
    """Processes of a collection into the folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder.resolve()):
                found.append(process)
        except (psutil.Error, OSError):
            pass
    return found


# Collecting


def test_all_pages_are_followed_and_tools_come_by_name(collected, script):
    found = collected(toy=script(SDK_SERVER))
    assert found.failures == []
    assert [each.identity for each in found.tools] == [("toy", f"toy_{index:02d}") for index in range(5)]
    assert found.tools[3].description == "Toy 3."
    assert list(found.tools[3].input_schema) == ["properties", "required", "type"]
    assert list(found.tools[3].input_schema["properties"]) == ["b", "a"]


def test_a_server_by_url_lists_the_same(collected, script, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = subprocess.Popen(script(SDK_SERVER, port))
    try:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.05)
        by_url = collected(ServerSpec(name="toy", url=f"http://127.0.0.1:{port}/mcp"))
        elsewhere = collected(ServerSpec(name="toy", url=f"http://127.0.0.1:{port}/nothing"))
    finally:
        running.kill()
        running.wait()
    assert by_url == collected(toy=script(SDK_SERVER))
    assert elsewhere.tools == []
    assert f"127.0.0.1:{port}/nothing" in str(elsewhere.failures[0])
    [gone] = collected(ServerSpec(name="toy", url=f"http://127.0.0.1:{port}/mcp", timeout_seconds=20)).failures
    assert gone.server == "toy" and f":{port}/mcp" in gone.reason and "check that it runs" in gone.remedy


def test_quirks_of_real_listings_are_kept(collected, listing):
    schemas = [
        {}, {"$schema": "http://json-schema.org/draft-07/schema#"}, {"type": "object"},
        {"anyOf": [{"required": ["a"], "type": "object"}, {"required": ["b"], "type": "object"}]},
        {"properties": {name: {} for name in ("from", "filter-query", "$and", "名前")}, "type": "object"},
    ]
    entries = [entry(f"quirk_{index}", schema=schema) for index, schema in enumerate(schemas)]
    entries += [entry("a" * 45), entry("查询潮位", "查询一个港口的潮位。"), entry("silent", ""),
                {"name": "mute", "inputSchema": {}}]
    found = collected(toy=listing(*entries))
    assert found.failures == []
    by_name = {each.name: each for each in found.tools}
    assert [by_name[f"quirk_{index}"].input_schema for index in range(len(schemas))] == schemas
    assert list(by_name["quirk_4"].input_schema["properties"]) == ["from", "filter-query", "$and", "名前"]
    assert by_name["查询潮位"].description == "查询一个港口的潮位。"
    assert by_name["silent"].description == by_name["mute"].description == ""
    assert "a" * 45 in by_name


def test_a_broken_tool_does_not_lose_the_others(collected, listing):
    found = collected(toy=listing(entry("good"), entry("list", schema=["x"]), {"name": "none"}, "text", entry("")))
    assert [each.name for each in found.tools] == ["good"]
    assert {failure.tool for failure in found.failures} > {"list", "none"}
    assert len(found.failures) == 4 and {failure.server for failure in found.failures} == {"toy"}
    [bad] = [str(failure) for failure in found.failures if failure.tool == "list"]
    assert bad == ("toy, tool 'list': \"inputSchema\" is a list of 1; it must be an object; "
                   "report it to the server's maintainers")


def test_of_doubles_the_same_one_stays_in_any_order(collected, listing):
    doubles = [entry("twice", "One."), entry("twice", "Another."), entry("once")]
    found = collected(north=listing(*doubles), south=listing(*reversed(doubles)))
    assert [each.identity for each in found.tools] == [(server, name) for server in ("north", "south")
                                                       for name in ("once", "twice")]
    assert len({each.description for each in found.tools if each.name == "twice"}) == 1
    assert [(failure.server, failure.tool) for failure in found.failures] == [("north", "twice"), ("south", "twice")]


def test_a_broken_server_does_not_lose_the_others(collected, script, listing, tmp_path):
    crash = script("import sys; sys.stderr.write('no token given\\n'); sys.exit(3)")
    hang = script("import time; time.sleep(600)")
    found = collected(ServerSpec(name="hang", command=hang, timeout_seconds=1), crash=crash, toy=listing(entry()),
                      absent=["no-such-program"], tools=listing(),
                      loop=listing(pages=[{"tools": [], "nextCursor": "0"}]))
    assert [each.identity for each in found.tools] == [("toy", "open_gate")]
    assert [failure.server for failure in found.failures] == ["hang", "crash", "absent", "tools", "loop"]
    hung, crashed, absent, empty, looped = map(str, found.failures)
    assert "timeout_seconds (1)" in hung and "raise timeout_seconds" in hung
    assert "it ended before it had listed its tools (it wrote: no token given)" in crashed
    assert str(tmp_path / "servers" / "crash.log") in crashed
    assert "command: there is no program 'no-such-program'" in absent
    assert "the list of tools is empty" in empty
    assert "nextCursor '0'" in looped and "(1 lines on its standard output were no messages)" in looped


def test_what_outlives_its_server_is_ended(collected, script, listing, tmp_path):
    child = tmp_path / "child"
    stray = f"""
        import subprocess, sys
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        open({str(child)!r}, "w").write(str(started.pid))
        """
    # The child holds the server's output open: only the timeout ends the wait. `collected` looks for what is left.
    found = collected(ServerSpec(name="stray", command=script(stray), timeout_seconds=1), toy=listing(entry()))
    assert [failure.server for failure in found.failures] == ["stray"]
    assert not psutil.pid_exists(int(child.read_text()))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_collection_leaves_no_server(how, script, listing, tmp_path):
    folder, started = tmp_path / "servers", tmp_path / "started"
    # Deaf to the end of its input and to a polite request.
    deaf = script(f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                  f"open({str(started)!r}, 'w').close(); time.sleep(600)")
    # Tests that run in the background inherit an ignored SIGINT.
    program = ("import signal, sys\nfrom nexus.collect import collect\n"
               "from nexus.registry_spec import RegistrySpec, ServerSpec\n"
               "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
               "server = ServerSpec(name='deaf', command=sys.argv[2:])\n"
               "collect(RegistrySpec(name='toys', servers=[server]), sys.argv[1])")
    running = subprocess.Popen([sys.executable, "-c", program, str(folder), *deaf], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not started.exists():
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.05)
        running.send_signal(how)
        assert running.wait(timeout=30) != 0
    finally:
        running.kill()
        running.wait()
    if how == signal.SIGKILL:  # nothing can clean up then; the next collection does
        assert marked(folder)
        collect(RegistrySpec(name="toys", servers=[ServerSpec(name="toy", command=listing(entry()))]), folder)
    assert marked(folder) == []


def test_one_collection_at_a_time(collected, listing, tmp_path):
    with exclusive(tmp_path / "servers", "collect"), pytest.raises(LockedError, match="already"):
        collected(toy=listing(entry()))


def test_placeholders_and_environment(collected, script, monkeypatch):
    monkeypatch.setenv("TOY_TOKEN", "s3cret")
    monkeypatch.setenv("TOY_UNRELATED", "leaks")
    report = script("""
        import json, os, sys
        said = [sys.argv[1:], {name: os.environ.get(name) for name in ("KEY", "PYTHONHASHSEED", "TZ", "TOY_UNRELATED")}]
        for line in sys.stdin:
            message = json.loads(line)
            if "id" in message:
                tools = [{"name": "t", "description": json.dumps(said), "inputSchema": {}}]
                result = {"protocolVersion": "2025-06-18", "capabilities": {}, "tools": tools,
                          "serverInfo": {"name": "toy", "version": "1"}}
                print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
        """)
    command = [*report, "{repository}", "{env:TOY_TOKEN}", '{"a": {}}']
    found = collected(ServerSpec(name="toy", command=command, env={"KEY": "Bearer {env:TOY_TOKEN}"}))
    assert found.failures == []
    (repository, *others), seen = json.loads(found.tools[0].description)
    assert others == ["s3cret", '{"a": {}}']
    assert seen == {"KEY": "Bearer s3cret", "PYTHONHASHSEED": "0", "TZ": "UTC", "TOY_UNRELATED": None}
    assert subprocess.run(["git", "-C", repository, "status", "--short"], capture_output=True).stdout == b""
    assert (Path(repository) / ".git" / "HEAD").is_file()
    monkeypatch.delenv("TOY_TOKEN")
    [failure] = collected(ServerSpec(name="toy", command=command)).failures
    assert failure.reason == "the environment variable TOY_TOKEN is not set" and failure.remedy == "set TOY_TOKEN"


def test_a_lock_that_cannot_be_installed_is_that_servers_failure(collected, listing, tmp_path, monkeypatch):
    monkeypatch.setenv("UV_OFFLINE", "1")
    unhashed = tmp_path / "unhashed.txt"
    unhashed.write_text("mcp-server-time==2026.10.19\n")
    servers = [ServerSpec(name=name, requirements=str(path), command=["mcp-server-time"])
               for name, path in (("unhashed", unhashed), ("absent", tmp_path / "absent.txt"))]
    found = collected(*servers, toy=listing(entry()))
    assert [each.server for each in found.tools] == ["toy"]
    refused, absent = map(str, found.failures)
    assert "uv pip failed" in refused and "hash" in refused
    assert "absent.txt: No such file or directory" in absent


def test_an_environment_is_made_once_and_again_if_interrupted(collected, script, listing, tmp_path, monkeypatch):
    """With an empty lock the environment holds Python alone: enough to run a server from it."""
    monkeypatch.setenv("UV_OFFLINE", "1")
    lock = tmp_path / "empty.txt"
    lock.write_text("# nothing\n")
    [_, *arguments] = listing(entry())
    server = ServerSpec(name="toy", requirements=str(lock), command=["python", *arguments])
    assert collected(server).failures == []
    [venv] = (tmp_path / "servers").glob("toy-*")
    made = (venv / "pyvenv.cfg").stat().st_ino
    assert collected(server).failures == []
    assert (venv / "pyvenv.cfg").stat().st_ino == made
    (venv / "installed").unlink()
    (venv / "bin" / "python").unlink()
    assert len(collected(server).tools) == 1
    lock.write_text("# nothing else\n")
    assert len(collected(server).tools) == 1
    assert len(list((tmp_path / "servers").glob("toy-*"))) == 2


@pytest.mark.integration
@pytest.mark.slow
def test_real_servers_from_their_locks(tmp_path):
    spec = RegistrySpec.model_validate(yaml.safe_load((ROOT / "conf/registry/servers.yaml").read_text()), strict=True)
    spec = RegistrySpec(name="two", servers=[server for server in spec.servers if server.name in ("git", "time")])
    files = []
    for run in range(2):
        found = collect(spec, tmp_path / "servers")
        assert found.failures == []
        files.append(tmp_path / f"{run}.json")
        write_listing(files[-1], found.tools)
    assert [sum(each.server == server for each in found.tools) for server in ("git", "time")] == [12, 2]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert load_registry(files[0]).tools == found.tools
    assert marked(tmp_path / "servers") == []


def test_a_users_file_is_not_collected(tmp_path):
    with pytest.raises(ValueError, match="is a file"):
        collect(RegistrySpec(name="file", path="x.json"), tmp_path)


def test_the_configuration_does_not_load_the_sdk():
    """Every command that has a configuration would pay for it."""
    code = "import sys, nexus.collect; sys.exit('mcp' in sys.modules or 'anyio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_sdks_logger_is_left_as_it_was(collected, listing):
    before = logging.getLogger("mcp").handlers[:], logging.getLogger("mcp").propagate
    collected(toy=listing(entry()))
    assert (logging.getLogger("mcp").handlers[:], logging.getLogger("mcp").propagate) == before

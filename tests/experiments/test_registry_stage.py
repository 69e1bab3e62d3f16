"""The registry as a stage: from servers or from a file, in one form; what is left out is told."""
from __future__ import annotations

import json

import pytest

from experiments import registry as experiment
from nexus import config
from nexus.collect import Collected, Failure
from nexus.listing import load_listing
from nexus.registry import RegistryError, Tool

TOOLS = [Tool("b", "add", "Größe ändern 加", {"type": "object", "properties": {"z": {}, "a": {}}}),
         Tool("b", "sub", "", {}), Tool("a", "add", "Add.", {})]


@pytest.fixture
def servers(monkeypatch):
    """A function that says what collecting brings; returns the configuration of the servers."""
    cfg = config.validate(config.compose([]))

    def bring(tools, *failures):
        def collect(spec):
            assert spec is cfg.registry
            return Collected(list(tools), list(failures))

        monkeypatch.setattr(experiment, "collect", collect)
        return cfg

    return bring


def of_file(path):
    return config.validate(config.compose(["registry=file", f"registry.path={path}"]))


def metrics(out):
    return json.loads((out / "metrics" / "registry.json").read_text())


def test_what_servers_list_is_written_in_their_order_and_read_back(servers, tmp_path, capsys):
    cfg = servers(TOOLS)
    path = experiment.run(cfg, tmp_path)
    assert path == tmp_path / "registry.json"
    assert load_listing(cfg.registry, path).tools == TOOLS
    assert metrics(tmp_path) == {"tools": 3, "left_out": 0, "missing_servers": 7, "servers": {"b": 2, "a": 1}}
    assert "3 tools of 2 servers; 0 entries left out" in capsys.readouterr().out
    assert experiment.run(cfg, tmp_path / "again").read_bytes() == path.read_bytes()


def test_a_server_that_fails_is_told_and_does_not_lose_the_others(servers, tmp_path, capsys):
    cfg = servers(TOOLS[:1], Failure("a", None, "it ended with status 3", "see its log"),
                  Failure("b", "odd", "it has no name", "report it"))
    experiment.run(cfg, tmp_path)
    said = capsys.readouterr()
    assert "registry: left out: a: it ended with status 3; see its log\n" in said.err
    assert "registry: left out: b, tool 'odd': it has no name; report it\n" in said.err
    assert "1 tools of 1 servers; 2 entries left out" in said.out
    assert metrics(tmp_path) == {"tools": 1, "left_out": 2, "missing_servers": 7, "servers": {"b": 1}}


def test_without_any_tool_nothing_is_written(servers, tmp_path, capsys):
    cfg = servers([], Failure("a", None, "no such program", "install it"))
    with pytest.raises(RegistryError, match="registry servers: no tool was collected; mend what is reported above"):
        experiment.run(cfg, tmp_path / "out")
    assert "no such program" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_users_file_is_taken_in_the_same_form_and_no_server_is_asked(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(experiment, "collect", None)
    listing = tmp_path / "mine.json"
    listing.write_text(json.dumps({"tools": [{"inputSchema": {}, "name": "add"}, {"name": ""},
                                             {"name": "$and", "description": "加", "inputSchema": {}}]}))
    cfg = of_file(listing)
    path = experiment.run(cfg, tmp_path / "out")
    # The listing is what the stage wrote, whatever the file becomes.
    assert [(tool.server, tool.name, tool.description) for tool in load_listing(cfg.registry, path).tools] == [
        (None, "add", ""), (None, "$and", "加")]
    assert json.loads(path.read_text())[0] == {"server": None, "name": "add", "description": "", "inputSchema": {}}
    said = capsys.readouterr()
    assert said.err.startswith("registry: left out: entry 1 (None): ") and "1 entries left out" in said.out
    assert metrics(tmp_path / "out") == {"tools": 2, "left_out": 1, "missing_servers": 0, "servers": {"unnamed": 2}}


@pytest.mark.parametrize(("content", "message"), [
    (None, "No such file"), ("[]", "the list of tools is empty"),
    ('{"tools": [{}]}', "none of the 1 entries is a tool"),
    ("[", "not JSON")])
def test_a_file_that_is_no_registry_is_refused(tmp_path, content, message):
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RegistryError, match=message):
        experiment.run(of_file(path), tmp_path / "out")
    assert not (tmp_path / "out").exists()

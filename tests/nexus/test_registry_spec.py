"""What conf/registry may say."""

import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from nexus.registry_spec import RegistrySpec, ServerSpec

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("server, message", [
    ({"name": "toy"}, "command or url"),
    ({"name": "toy", "command": ["x"], "url": "http://127.0.0.1:1/mcp"}, "command or url"),
    ({"name": "toy", "url": "http://127.0.0.1:1/mcp", "env": {"A": "b"}}, "belong to a command"),
    ({"name": "toy", "url": "127.0.0.1:1"}, "url"),
    ({"name": "to/y", "command": ["x"]}, "name"),
    ({"name": "toy", "command": "x"}, "command"),
    ({"name": "toy", "command": []}, "command"),
    ({"name": "toy", "command": ["x"], "timeout_seconds": 0}, "timeout_seconds"),
    ({"name": "toy", "command": ["x"], "timout_seconds": 1}, "timout_seconds"),
])
def test_a_server_that_cannot_be_is_refused(server, message):
    with pytest.raises(ValidationError, match=message):
        ServerSpec.model_validate(server, strict=True)


def test_a_registry_has_one_source_and_each_server_once():
    server = {"name": "toy", "command": ["x"]}
    for data, message in (({"servers": []}, "path or servers"), ({"path": "x", "servers": [server]}, "path or servers"),
                          ({"servers": [server, server]}, "'toy' appears twice")):
        with pytest.raises(ValidationError, match=message):
            RegistrySpec.model_validate({"name": "toys"} | data, strict=True)


def test_the_committed_registry_is_pinned():
    spec = RegistrySpec.model_validate(yaml.safe_load((ROOT / "conf/registry/servers.yaml").read_text()), strict=True)
    assert spec.servers[0].name == "github" and len(spec.servers) == 7
    for server in spec.servers:
        lock = (ROOT / server.requirements).read_text()
        assert not re.search(r"://|--(index|extra-index|find-links|trusted-host)", lock)
        pins = re.split(r"\n(?=\S)", lock.strip())
        assert pins and all(re.match(r"\S+==\S+", pin) and "--hash=sha256:" in pin for pin in pins), server.name
    own = yaml.safe_load((ROOT / "conf/registry/file.yaml").read_text())
    assert own.pop("path") == "???"
    assert RegistrySpec.model_validate(own | {"path": "tools.json"}, strict=True).servers == []

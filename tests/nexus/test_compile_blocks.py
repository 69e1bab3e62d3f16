"""`nexus compile`: one valid block per tool, resumable, odd names and broken entries included."""
from __future__ import annotations

import argparse
import json

import pytest

from nexus import compile_blocks
from nexus.blocks import BlockFile
from nexus.compile_blocks import block_file_name, compile_registry
from nexus.config import compose, validate
from nexus.prompt import block_tokens, system_tokens
from nexus.registry import Tool
from nexus.runtime import ContextOptions, Runtime

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS = [Tool("one", "read", "Reads.", SCHEMA), Tool("two", "read", "Reads too.", SCHEMA),
         Tool("one", "道具/../etc", "Odd.", SCHEMA), Tool(None, "x" * 120, "Long.", SCHEMA)]


def test_file_names_are_legal_and_unique():
    names = [block_file_name(tool) for tool in TOOLS]
    assert len(set(names)) == len(names)
    assert all(name.isascii() and "/" not in name and ".." not in name and len(name) < 100 for name in names)
    assert block_file_name(Tool(None, "list_issues", "", {})) == "list_issues.atb"
    assert block_file_name(Tool("a", "b", "", {})) != block_file_name(Tool(None, "a_b", "", {}))


@pytest.mark.integration
def test_blocks_are_written_kept_and_repaired(smollm2, tmp_path):
    with Runtime(smollm2, ContextOptions(n_ctx=512)) as runtime:
        system = system_tokens(smollm2, "Be brief.")
        assert compile_registry(runtime, system, TOOLS, tmp_path) == (4, 0)
        files = {tool.identity: BlockFile(tmp_path / block_file_name(tool)) for tool in TOOLS}
        assert files["one", "read"].facts == {"server": "one", "tool": "read"}
        assert files["one", "read"].anchor == len(system)
        assert list(files["two", "read"].tokens) == list(block_tokens(smollm2, TOOLS[1]))
        assert compile_registry(runtime, system, TOOLS, tmp_path) == (0, 4)
        damaged = files["one", "read"].path
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert compile_registry(runtime, system, TOOLS, tmp_path) == (1, 3)
        assert damaged.read_bytes() == whole
        assert compile_registry(runtime, system[:-1], TOOLS[:1], tmp_path) == (1, 0), "another left context"


@pytest.mark.integration
def test_a_broken_entry_does_not_lose_the_others(tmp_path, capsys):
    registry = tmp_path / "tools.json"
    registry.write_text(json.dumps({"tools": [{"name": "good", "description": "d", "inputSchema": {}}, {"name": 3}]}))
    args = argparse.Namespace(registry=registry, out=tmp_path / "blocks")
    assert compile_blocks.run(args, validate(compose(["model=smollm2-135m"]))) == 1
    printed = capsys.readouterr()
    assert "1 blocks written" in printed.out and "left out: entry 1" in printed.err
    assert [path.name for path in (tmp_path / "blocks").iterdir()] == ["good.atb"]

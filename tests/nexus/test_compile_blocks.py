"""`nexus compile`: one valid block per tool, resumable, odd names and broken entries included."""
from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexus import compile_blocks
from nexus.blocks import BlockError, BlockFile, write_block
from nexus.blocks import compile_blocks as behind_one
from nexus.compile_blocks import block_file_name, compile_registry
from nexus.config import compose, validate
from nexus.ensemble import mean_block
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


@pytest.mark.parametrize("one, other", [
    (("a", "b"), (None, "a_b")), (("a", "b"), (None, "a/b")), (("a", "b/c"), ("a/b", "c")), (("", "x"), (None, "x")),
    ((None, "道具"), (None, "工具")), ((None, "x" * 120), (None, "x" * 121)), ((None, "readFile"), (None, "readfile")),
    ((None, "Read"), (None, "READ")), (("GitHub", "read"), ("github", "read")), ((None, "$and"), (None, "_and")),
])
def test_two_tools_never_share_a_file_even_where_case_does_not_count(one, other):
    """macOS takes Read.atb and read.atb for one file."""
    assert block_file_name(Tool(*one, "", {})).lower() != block_file_name(Tool(*other, "", {})).lower()


@given(st.lists(st.tuples(st.none() | st.text(max_size=6), st.text(min_size=1, max_size=90)), min_size=2, max_size=6,
                unique=True))
def test_any_names_give_legal_files_of_their_own(identities):
    names = [block_file_name(Tool(server, name, "", {})) for server, name in identities]
    assert len({name.lower() for name in names}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,89}\.atb", name) for name in names)


@pytest.mark.integration
def test_blocks_are_written_kept_and_repaired(smollm2, tmp_path):
    with Runtime(smollm2, ContextOptions(n_ctx=512)) as runtime:
        system = system_tokens(smollm2, "Be brief.")
        assert compile_registry(runtime, [system], TOOLS, tmp_path) == (4, 0)
        files = {tool.identity: BlockFile(tmp_path / block_file_name(tool)) for tool in TOOLS}
        facts = {"server": "one", "tool": "read", "compiled_behind": "system"}
        assert files["one", "read"].facts == facts
        assert files["one", "read"].anchor == len(system)
        assert list(files["two", "read"].tokens) == list(block_tokens(smollm2, TOOLS[1]))
        assert compile_registry(runtime, [system], TOOLS, tmp_path) == (0, 4)
        damaged = files["one", "read"].path
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert compile_registry(runtime, [system], TOOLS, tmp_path) == (1, 3)
        assert damaged.read_bytes() == whole
        assert compile_registry(runtime, [system[:-1]], TOOLS[:1], tmp_path) == (1, 0), "another left context"


@pytest.mark.integration
def test_only_what_is_missing_or_damaged_is_compiled_again(smollm2, tmp_path):
    tools = TOOLS[:3]
    with Runtime(smollm2, ContextOptions(n_ctx=512)) as runtime:
        system = system_tokens(smollm2, "Be brief.")
        compile_registry(runtime, [system], tools, tmp_path)
        paths = [tmp_path / block_file_name(tool) for tool in tools]
        whole = [path.read_bytes() for path in paths]
        for spoil in (lambda path: path.unlink(), lambda path: path.write_bytes(b"NEXUSATB"),
                      lambda path: path.write_bytes(whole[0])):
            times = [path.stat().st_mtime_ns for path in paths]
            spoil(paths[1])
            assert compile_registry(runtime, [system], tools, tmp_path) == (1, 2)
            assert [path.read_bytes() for path in paths] == whole
            assert [paths[i].stat().st_mtime_ns == times[i] for i in (0, 2)] == [True, True]
        changed = [Tool("one", "read", "Reads, differently.", SCHEMA), *tools[1:]]
        assert compile_registry(runtime, [system], changed, tmp_path) == (1, 2)


@pytest.mark.integration
def test_a_stopped_run_goes_on_where_it_was(smollm2, tmp_path, monkeypatch):
    with Runtime(smollm2, ContextOptions(n_ctx=512)) as runtime:
        system = system_tokens(smollm2, "Be brief.")
        written = []

        def stops_at_the_second(path, block, runtime):
            if written:
                raise KeyboardInterrupt
            written.append(path)
            write_block(path, block, runtime)

        with monkeypatch.context() as patch:
            patch.setattr(compile_blocks, "write_block", stops_at_the_second)
            with pytest.raises(KeyboardInterrupt):
                compile_registry(runtime, [system], TOOLS[:3], tmp_path)
        assert list(tmp_path.iterdir()) == written
        assert compile_registry(runtime, [system], TOOLS[:3], tmp_path) == (2, 1)


@pytest.mark.integration
def test_a_broken_entry_does_not_lose_the_others(tmp_path, capsys):
    registry = tmp_path / "tools.json"
    registry.write_text(json.dumps({"tools": [{"name": "good", "description": "d", "inputSchema": {}}, {"name": 3}]}))
    args = argparse.Namespace(registry=registry, out=tmp_path / "blocks", behind="system")
    cfg = validate(compose(["model=smollm2-135m"]))
    assert compile_blocks.run(args, cfg) == 1
    printed = capsys.readouterr()
    assert "1 blocks written" in printed.out and "left out: entry 1" in printed.err
    assert [path.name for path in (tmp_path / "blocks").iterdir()] == ["good.atb"]
    registry.write_text(json.dumps({"tools": [{"name": "good", "description": "d", "inputSchema": {}}]}))
    assert compile_blocks.run(args, cfg) == 0
    printed = capsys.readouterr()
    assert "0 blocks written, 1 already there" in printed.out and "left out" not in printed.err


@pytest.mark.integration
def test_blocks_of_an_ensemble_are_the_mean_over_its_texts_in_any_groups(smollm2, tmp_path, monkeypatch):
    monkeypatch.setattr(compile_blocks, "GROUP", 2)
    with Runtime(smollm2, ContextOptions(n_ctx=512)) as runtime:
        lefts = [system_tokens(smollm2, text) for text in ("Be brief.", "Be quick.")]
        assert len(lefts[0]) == len(lefts[1])
        assert compile_registry(runtime, lefts, TOOLS[:3], tmp_path, "ensemble-2x4") == (3, 0)
        assert compile_registry(runtime, lefts, TOOLS[:3], tmp_path, "ensemble-2x4") == (0, 3)
        tokens = [block_tokens(smollm2, tool) for tool in TOOLS[:3]]
        for tool, *members in zip(TOOLS, *(list(behind_one(runtime, left, tokens)) for left in lefts)):
            facts = {"server": tool.server, "tool": tool.name, "compiled_behind": "ensemble-2x4"}
            write_block(tmp_path / "expected", replace(mean_block(members), facts=facts), runtime)
            assert (tmp_path / block_file_name(tool)).read_bytes() == (tmp_path / "expected").read_bytes()
        assert compile_registry(runtime, lefts[::-1], TOOLS[:1], tmp_path, "ensemble-2x4") == (1, 0), "another hash"
        assert compile_registry(runtime, lefts[:1], TOOLS[:1], tmp_path) == (1, 0)


@pytest.mark.integration
def test_compiling_behind_a_name_takes_the_configured_texts(tmp_path):
    registry = tmp_path / "tools.json"
    registry.write_text(json.dumps({"tools": [{"name": "good", "description": "d", "inputSchema": {}}]}))
    cfg = validate(compose(["model=smollm2-135m"]))
    args = argparse.Namespace(registry=registry, out=tmp_path, behind="ensemble-2x32")
    assert compile_blocks.run(args, cfg) == 0
    found = BlockFile(tmp_path / "good.atb")
    assert found.facts["compiled_behind"] == "ensemble-2x32"
    args.behind = "ensemble-999x32"
    with pytest.raises(BlockError, match="needs 999 preambles"):
        compile_blocks.run(args, cfg)

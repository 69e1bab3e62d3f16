"""The listing as a file, and its order."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexus.canonical import canonical_json
from nexus.listing import listing_path, load_listing, ordered, write_listing
from nexus.registry import RegistryError, Tool
from nexus.registry_spec import RegistrySpec, ServerSpec


def tool(server, name, schema=None):
    return Tool(server, name, f"{name}.", schema or {})


def test_equal_tools_give_equal_bytes(tmp_path):
    one = {"type": "object", "properties": {"z": {"type": "object", "properties": {"properties": {"b": 1, "a": 2}}},
                                            "a": {"enum": ["y", "x"]}}, "$defs": {"q": {}, "p": {}}}
    other = {"$defs": {"p": {}, "q": {}}, "properties": {"z": {"properties": {"properties": {"a": 2, "b": 1}},
                                                                "type": "object"}, "a": {"enum": ["y", "x"]}},
             "type": "object"}
    for name, schema in (("one", one), ("other", other)):
        write_listing(tmp_path / "new" / name, [tool("north", "gate", schema), tool(None, "潮")])
    text = (tmp_path / "new" / "one").read_text(encoding="utf-8")
    assert text == (tmp_path / "new" / "other").read_text(encoding="utf-8")
    assert text.endswith("]\n") and "潮" in text
    [gate, _] = json.loads(text)
    assert list(gate) == ["server", "name", "description", "inputSchema"]
    assert list(gate["inputSchema"]["properties"]) == ["z", "a"]
    assert list(gate["inputSchema"]["$defs"]) == ["p", "q"]
    assert list(gate["inputSchema"]["properties"]["z"]["properties"]["properties"]) == ["a", "b"]


def test_the_order_of_properties_is_part_of_a_tool(tmp_path):
    for name, keys in (("one", "ab"), ("other", "ba")):
        write_listing(tmp_path / name, [tool("s", "t", {"properties": {key: {} for key in keys}})])
    assert (tmp_path / "one").read_bytes() != (tmp_path / "other").read_bytes()


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8"), max_size=4),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["properties", "type", "b", "a", "$defs"]), inner, max_size=4), max_leaves=12)


@given(st.dictionaries(st.sampled_from(["properties", "type", "$defs"]), JSON))
def test_a_written_schema_is_the_same_schema(tmp_path_factory, schema):
    path = tmp_path_factory.getbasetemp() / "same.json"
    write_listing(path, [tool("s", "t", schema)])
    [read] = json.loads(path.read_text(encoding="utf-8"))
    assert canonical_json(read["inputSchema"]) == canonical_json(schema)


def test_no_tools_and_no_json_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no tool was collected"):
        write_listing(tmp_path / "x", [])
    with pytest.raises(ValueError, match="inputSchema of t.*nan"):
        write_listing(tmp_path / "x", [tool("s", "t", {"default": float("nan")})])
    assert list(tmp_path.iterdir()) == []


def test_load_reads_what_was_collected_or_the_users_file(tmp_path):
    tools = [tool("north", "gate"), tool("south", "gate", {"type": "object"}), tool("south", "a" * 45)]
    write_listing(tmp_path / "listing.json", tools)
    servers = RegistrySpec(name="toys", servers=[ServerSpec(name="north", command=["x"])])
    assert load_listing(servers, tmp_path / "listing.json").tools == tools
    own = RegistrySpec(name="file", path=str(tmp_path / "listing.json"))
    assert load_listing(own).tools == load_listing(own, tmp_path / "elsewhere.json").tools == tools
    with pytest.raises(RegistryError, match="registry toys is not collected yet.*registry.path"):
        load_listing(servers, tmp_path / "absent.json")
    with pytest.raises(RegistryError, match="absent.json"):
        load_listing(RegistrySpec(name="file", path=str(tmp_path / "absent.json")))
    assert listing_path(servers).name == "toys.json"


TOOLS = [tool(server, f"{server}_{index}") for server, count in (("github", 20), ("south", 15), ("west", 10))
         for index in range(count)]


@given(st.integers(0, 2**32 - 1), st.randoms())
@settings(deadline=None)
def test_the_first_server_comes_first_and_the_seed_alone_decides(seed, random):
    order = ordered(TOOLS, seed)
    assert {each.identity for each in order} == {each.identity for each in TOOLS} and len(order) == len(TOOLS)
    assert {each.server for each in order[:20]} == {"github"}
    others = TOOLS[1:]
    random.shuffle(others)
    assert ordered([TOOLS[0], *others], seed) == order


def test_another_seed_gives_another_order_and_no_tool_moves_another():
    assert ordered(TOOLS, 1) != ordered(TOOLS, 2)
    without = ordered([each for each in TOOLS if each.name != "south_3"], 1)
    assert without == [each for each in ordered(TOOLS, 1) if each.name != "south_3"]

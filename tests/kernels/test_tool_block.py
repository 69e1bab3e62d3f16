"""The .atb file: reads back exactly, in place; any damaged byte, cut or foreign file is refused with a reason."""
from __future__ import annotations

import json
import os
import resource
import struct
from pathlib import Path

import cppyy
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

HEADER_BYTES = 128
ALIGNMENT = 2 << 20
FACTS = json.dumps({"tool": "create_issue", "note": "größer"}, ensure_ascii=False)
SHAPE = {"n_tokens": 3, "n_layers": 2, "n_head_kv": 1, "head_dim_k": 4, "head_dim_v": 6, "n_rot": 4}

# The file format, written down a second time: (field, struct code), in order, little endian, no padding.
LAYOUT = [("magic", "8s"), ("version", "H"), ("header_bytes", "H"), ("anchor", "i"), ("n_tokens", "I"),
          ("n_layers", "H"), ("n_head_kv", "H"), ("head_dim_k", "H"), ("head_dim_v", "H"), ("n_rot", "H"),
          ("rope_layout", "B"), ("rope_scaling_type", "B"), ("rope_base", "d"), ("rope_freq_scale", "d"),
          ("rope_freq_hash", "Q"), ("k_type", "H"), ("v_type", "H"), ("meta_bytes", "I"),
          ("model_fingerprint", "16s"), ("left_context_hash", "Q"), ("file_bytes", "Q"), ("meta_checksum", "Q"),
          ("k_checksum", "Q"), ("v_checksum", "Q"), ("header_checksum", "Q")]
STRUCT = struct.Struct("<" + "".join(code for _, code in LAYOUT))
OFFSETS = {name: struct.calcsize("<" + "".join(code for _, code in LAYOUT[:i])) for i, (name, _) in enumerate(LAYOUT)}


def header_of(k, **changes):
    header = k.ToolBlockHeader()
    fields = SHAPE | {"anchor": 17, "rope_layout": 1, "rope_base": 1e6, "rope_freq_scale": 1.0,
                      "rope_freq_hash": 2**63 + 5, "left_context_hash": 2**64 - 3} | changes
    for field, value in fields.items():
        setattr(header, field, value)
    for i in range(16):
        header.model_fingerprint[i] = 16 * i + 1
    return header


def content(shape=SHAPE, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens int32, K, V) with every bit pattern possible."""
    rng = np.random.default_rng(seed)
    width = {name: shape["n_head_kv"] * shape[name] for name in ("head_dim_k", "head_dim_v")}
    k, v = (rng.integers(0, 65536, (shape["n_layers"], shape["n_tokens"], n)).astype(np.uint16) for n in width.values())
    return rng.integers(-2**31, 2**31, shape["n_tokens"]).astype(np.int32), k, v


def write(k, path: Path, header=None, shape=SHAPE, facts: str = FACTS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, keys, values = content(shape)
    k.write_tool_block(os.fspath(path), header or header_of(k, **shape), tokens.ctypes.data, facts, keys.ctypes.data,
                       values.ctypes.data)
    return tokens, keys, values


def at(address: int, like: np.ndarray) -> np.ndarray:
    """What lies at an address, without a copy, with the type and shape of `like`."""
    raw = cppyy.ll.cast["uint8_t*"](address)
    raw.reshape((like.nbytes,))
    return np.frombuffer(raw, dtype=np.uint8, count=like.nbytes).view(like.dtype).reshape(like.shape)


@pytest.fixture(scope="module", autouse=True)
def low_level():
    import cppyy.ll  # noqa: F401  (makes cppyy.ll.cast available)


@pytest.fixture(scope="module")
def path(k, tmp_path_factory) -> Path:
    """One good block; tests restore the bytes that they change."""
    path = tmp_path_factory.mktemp("blocks") / "good.atb"
    write(k, path)
    return path


def refusal(k, path: Path) -> str:
    """Why the file is refused; fails the test when it is accepted."""
    with pytest.raises(Exception) as caught:
        k.ToolBlockFile(os.fspath(path))
    message = str(caught.value)
    assert isinstance(caught.value, cppyy.gbl.std.runtime_error), message
    assert f"block {path}" in message and "compile it again" in message
    return message


class Damage:
    """Changes single bytes of a file in place, and undoes it."""

    def __init__(self, path: Path):
        self.path, self.file = path, os.open(path, os.O_RDWR)

    def __enter__(self) -> Damage:
        return self

    def __exit__(self, *_) -> None:
        os.close(self.file)

    def refusal(self, k, offset: int, mask: int) -> str:
        good = os.pread(self.file, 1, offset)
        os.pwrite(self.file, bytes([good[0] ^ mask]), offset)
        try:
            return refusal(k, self.path)
        finally:
            os.pwrite(self.file, good, offset)


def sections() -> dict[str, range]:
    """Byte ranges of the small block's parts, computed from the format's description."""
    meta = HEADER_BYTES + 4 * SHAPE["n_tokens"] + len(FACTS.encode())
    k_bytes, v_bytes = (2 * SHAPE["n_layers"] * SHAPE["n_tokens"] * SHAPE[dim] for dim in ("head_dim_k", "head_dim_v"))
    return {"header": range(HEADER_BYTES), "meta": range(HEADER_BYTES, meta), "meta padding": range(meta, ALIGNMENT),
            "k": range(ALIGNMENT, ALIGNMENT + k_bytes), "k padding": range(ALIGNMENT + k_bytes, 2 * ALIGNMENT),
            "v": range(2 * ALIGNMENT, 2 * ALIGNMENT + v_bytes)}


def test_file_has_the_documented_layout(k, path):
    raw = path.read_bytes()
    tokens, keys, values = content()
    assert STRUCT.size == HEADER_BYTES == int(cppyy.sizeof(k.ToolBlockHeader))
    fields = dict(zip((name for name, _ in LAYOUT), STRUCT.unpack_from(raw)))
    assert fields["magic"] == b"NEXUSATB" and fields["version"] == 1 and fields["header_bytes"] == 128
    assert {name: fields[name] for name in SHAPE} == SHAPE
    assert (fields["anchor"], fields["rope_layout"], fields["rope_scaling_type"]) == (17, 1, 0)
    assert (fields["rope_base"], fields["rope_freq_scale"]) == (1e6, 1.0)
    assert (fields["rope_freq_hash"], fields["left_context_hash"]) == (2**63 + 5, 2**64 - 3)
    assert fields["model_fingerprint"] == bytes(16 * i + 1 for i in range(16))
    assert (fields["k_type"], fields["v_type"]) == (1, 1)
    part = sections()
    assert fields["file_bytes"] == len(raw) == part["v"].stop
    meta = tokens.tobytes() + FACTS.encode()
    assert fields["meta_bytes"] == len(meta) and raw[HEADER_BYTES:HEADER_BYTES + len(meta)] == meta
    assert raw[part["k"].start:part["k"].stop] == keys.tobytes()
    assert raw[part["v"].start:part["v"].stop] == values.tobytes()
    assert not any(raw[part["meta padding"].start:part["meta padding"].stop])
    assert not any(raw[part["k padding"].start:part["k padding"].stop])


def test_padding_takes_no_disk_space(path):
    assert path.stat().st_blocks * 512 < 256 * 1024 < path.stat().st_size


@settings(max_examples=20)
@given(shape=st.fixed_dictionaries({name: st.integers(1, 9) for name in SHAPE if name != "n_rot"}),
       facts=st.text(max_size=50))
def test_reads_back_exactly(k, tmp_path_factory, shape, facts):
    facts = json.dumps(facts)
    shape = shape | {"n_rot": shape["head_dim_k"] // 2 * 2}
    path = tmp_path_factory.mktemp("block") / "a.atb"
    tokens, keys, values = write(k, path, shape=shape, facts=facts)
    block = k.ToolBlockFile(os.fspath(path))
    header = block.header()
    assert {name: int(getattr(header, name)) for name in shape} == shape
    assert int(header.anchor) == 17 and int(header.left_context_hash) == 2**64 - 3
    assert str(block.meta_json()) == facts
    assert list(block.tokens()) == tokens.tolist()
    for address, wanted in ((block.tokens_addr(), tokens), (block.k_addr(), keys), (block.v_addr(), values)):
        np.testing.assert_array_equal(at(address, wanted), wanted)


def test_a_block_larger_than_one_alignment_step_reads_back(k, tmp_path):
    shape = SHAPE | {"n_tokens": 700, "n_layers": 3, "n_head_kv": 4, "head_dim_k": 160, "head_dim_v": 128}
    tokens, keys, values = write(k, tmp_path / "large.atb", shape=shape)
    assert keys.nbytes > ALIGNMENT
    block = k.ToolBlockFile(os.fspath(tmp_path / "large.atb"))
    assert (int(block.v_addr()) - int(block.k_addr())) % ALIGNMENT == 0
    np.testing.assert_array_equal(at(block.k_addr(), keys), keys)
    np.testing.assert_array_equal(at(block.v_addr(), values), values)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="/proc/self/maps exists on Linux only")
def test_keys_are_read_in_place_from_the_mapped_file(k, path):
    def mappings() -> list[tuple[int, int, str]]:
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        return [(*(int(part, 16) for part in words[0].split("-")), words[1]) for words in lines
                if words[-1] == os.fspath(path)]

    block = k.ToolBlockFile(os.fspath(path))
    (start, stop, permissions), = mappings()
    assert permissions == "r--p"
    page = os.sysconf("SC_PAGE_SIZE")
    for address in (int(block.k_addr()), int(block.v_addr())):
        assert start < address < stop and address % page == 0 and (address - start) % ALIGNMENT == 0
    assert int(block.tokens_addr()) == start + HEADER_BYTES
    block.__destruct__()
    assert mappings() == []


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xff, 0x10])
def test_every_changed_header_byte_is_refused(k, path, mask):
    with Damage(path) as damage:
        for offset in range(HEADER_BYTES):
            damage.refusal(k, offset, mask)
    k.ToolBlockFile(os.fspath(path))


def test_every_changed_byte_of_meta_keys_and_values_is_refused_by_name(k, path):
    with Damage(path) as damage:
        for name in ("meta", "k", "v"):
            for offset in sections()[name]:
                assert f"{name}_checksum is " in damage.refusal(k, offset, 1 << offset % 8)
    k.ToolBlockFile(os.fspath(path))


def test_changed_padding_is_refused_by_name(k, path):
    rng = np.random.default_rng(0)
    with Damage(path) as damage:
        for name in ("meta padding", "k padding"):
            part = sections()[name]
            offsets = [part.start, part.start + 1, part.stop - 1, *rng.integers(part.start, part.stop, 40).tolist()]
            for offset in offsets:
                assert f"{name.split()[0]}_checksum is " in damage.refusal(k, offset, 0x40)
    k.ToolBlockFile(os.fspath(path))


def resealed(k, raw: bytes, field: str, value) -> bytes:
    """The file with one header field changed and the header's checksum made right again."""
    code = dict(LAYOUT)[field]
    header = bytearray(raw[:HEADER_BYTES])
    struct.pack_into("<" + code, header, OFFSETS[field], value)
    address = np.frombuffer(header, dtype=np.uint8)
    checksum = k.checksum64(cppyy.ll.cast["void*"](address.ctypes.data), 120, 0)
    struct.pack_into("<Q", header, 120, int(checksum))
    return bytes(header) + raw[HEADER_BYTES:]


@pytest.mark.parametrize(("field", "value", "message"), [
    ("version", 2, "version is 2, expected 1"),
    ("header_bytes", 256, "header_bytes is 256, expected 128"),
    ("n_tokens", 0, "n_tokens is 0, expected at least 1"),
    ("n_tokens", 4, "file_bytes is "),
    ("n_tokens", 2**32 - 1, "meta_bytes "),
    ("n_layers", 0, "n_layers is 0"),
    ("n_layers", 1, "file_bytes is "),
    ("n_head_kv", 0, "n_head_kv is 0"),
    ("head_dim_k", 0, "head_dim_k is 0"),
    ("head_dim_v", 0, "head_dim_v is 0"),
    ("head_dim_v", 7, "file_bytes is "),
    ("n_rot", 3, "n_rot is 3"),
    ("n_rot", 6, "n_rot is 6"),
    ("rope_layout", 2, "rope_layout is 2"),
    ("rope_scaling_type", 3, "rope_scaling_type is 3"),
    ("k_type", 0, "k_type is 0, expected 1 (F16)"),
    ("v_type", 8, "v_type is 8, expected 1 (F16)"),
    ("meta_bytes", 11, "meta_bytes 11"),
    ("meta_bytes", 2**32 - 1, "meta_bytes 4294967295"),
    ("file_bytes", 1, "file_bytes is "),
    ("meta_checksum", 0, "meta_checksum is "),
    ("k_checksum", 0, "k_checksum is "),
    ("v_checksum", 0, "v_checksum is "),
])
def test_a_wrong_field_is_refused_even_under_a_right_checksum(k, path, tmp_path, field, value, message):
    target = tmp_path / "resealed.atb"
    raw = path.read_bytes()
    target.write_bytes(resealed(k, raw, "anchor", 99))
    assert int(k.ToolBlockFile(os.fspath(target)).header().anchor) == 99  # resealing as such is right
    target.write_bytes(resealed(k, raw, field, value))
    assert message in refusal(k, target)


def test_counts_whose_product_overflows_are_refused(k, path, tmp_path):
    """65536 · 2^32 · … wraps to a small number of bytes, which would fit any file."""
    raw, target = path.read_bytes(), tmp_path / "huge.atb"
    for field, value in (("n_layers", 2**15), ("n_head_kv", 2**15), ("head_dim_k", 2**15), ("head_dim_v", 2**15),
                         ("n_tokens", 2**31)):
        raw = resealed(k, raw, field, value)
    target.write_bytes(raw)
    assert "K or V would exceed" in refusal(k, target)


def test_every_truncation_is_refused(k, path, tmp_path):
    raw = path.read_bytes()
    target = tmp_path / "cut.atb"
    target.write_bytes(raw)
    edges = [edge for part in sections().values() for edge in (part.start, part.stop)]
    boundaries = [edge + step for edge in edges for step in (-1, 0, 1)]
    rng = np.random.default_rng(1)
    lengths = {*range(0, 140), *boundaries, *rng.integers(0, len(raw), 60).tolist()} & set(range(len(raw)))
    for length in sorted(lengths, reverse=True):
        os.truncate(target, length)
        message = refusal(k, target)
        assert ("too few for a header" if length < HEADER_BYTES else "file_bytes is ") in message


def test_an_appended_byte_is_refused(k, path, tmp_path):
    target = tmp_path / "longer.atb"
    for extra in (b"\0", b"x", bytes(ALIGNMENT)):
        target.write_bytes(path.read_bytes() + extra)
        assert "file_bytes is " in refusal(k, target)


def test_what_is_no_block_is_refused_with_the_reason(k, tmp_path):
    (tmp_path / "empty.atb").touch()
    (tmp_path / "folder.atb").mkdir()
    (tmp_path / "text.atb").write_text("not a block" * 100)
    os.mkfifo(tmp_path / "pipe.atb")
    for name, reason in (("empty", "has 0 bytes"), ("folder", "is not a regular file"),
                         ("text", "magic is not NEXUSATB"), ("pipe", "is not a regular file"),
                         ("missing", "cannot be opened: No such file")):
        assert reason in refusal(k, tmp_path / f"{name}.atb")


@pytest.mark.parametrize(("field", "value", "message"), [
    ("n_tokens", 0, "n_tokens is 0"), ("n_layers", 0, "n_layers is 0"), ("n_rot", 3, "n_rot is 3"),
    ("rope_layout", 2, "rope_layout is 2"), ("k_type", 2, "k_type is 2"),
])
def test_writing_refuses_impossible_fields_and_leaves_nothing(k, tmp_path, field, value, message):
    with pytest.raises(Exception) as caught:
        k.write_tool_block(os.fspath(tmp_path / "a.atb"), header_of(k, **{field: value}), 0, FACTS, 0, 0)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_failed_writes_leave_nothing_and_keep_what_was_there(k, tmp_path):
    with pytest.raises(Exception, match="cannot be written: No such file"):
        write(k, tmp_path / "missing" / "a.atb")
    (tmp_path / "folder.atb").mkdir()
    with pytest.raises(Exception, match="cannot be written: Is a directory"):
        write(k, tmp_path / "folder.atb")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder.atb"]


def test_a_folder_that_may_not_be_written_is_refused_and_keeps_its_block(k, path, tmp_path):
    """Root may write anywhere, so it steps down; nobody else may enter pytest's folders."""
    write(k, tmp_path / "a.atb")
    root = os.geteuid() == 0
    tmp_path.chmod(0o500)
    try:
        if root:
            os.seteuid(65534)
        with pytest.raises(Exception, match="cannot be written: Permission denied"):
            write(k, tmp_path / "a.atb", shape=SHAPE | {"n_tokens": 5})
    finally:
        if root:
            os.seteuid(0)
        tmp_path.chmod(0o700)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.atb"]
    assert (tmp_path / "a.atb").read_bytes() == path.read_bytes()


def test_a_write_that_fails_halfway_leaves_the_old_block_alone(k, path, tmp_path):
    """A limit on file sizes stands for a full disk: the header and the keys still fit, the values do not."""
    target = tmp_path / "a.atb"
    write(k, target)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * ALIGNMENT, limits[1]))
    try:
        with pytest.raises(Exception, match="cannot be written: File too large"):
            write(k, target, shape=SHAPE | {"n_tokens": 5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.atb"]
    assert target.read_bytes() == path.read_bytes()


def test_writing_replaces_a_block_without_touching_its_readers(k, tmp_path):
    path = tmp_path / "a.atb"
    tokens, keys, _ = write(k, path)
    reader = k.ToolBlockFile(os.fspath(path))
    write(k, path, shape=SHAPE | {"n_tokens": 5})
    np.testing.assert_array_equal(at(reader.k_addr(), keys), keys)
    newer = k.ToolBlockFile(os.fspath(path))
    assert (int(reader.header().n_tokens), int(newer.header().n_tokens)) == (3, 5)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.atb"]


def test_same_input_gives_the_same_bytes(k, path, tmp_path):
    write(k, tmp_path / "again.atb")
    assert (tmp_path / "again.atb").read_bytes() == path.read_bytes()


# Model-dependent fields: (value in the block, value in the model, as it is shown for both).
DIFFERENCES = [
    ("n_layers", 3, "3", "2"), ("n_head_kv", 2, "2", "1"), ("head_dim_k", 8, "8", "4"), ("head_dim_v", 8, "8", "6"),
    ("n_rot", 2, "2", "4"), ("rope_layout", 0, "0", "1"), ("rope_scaling_type", 2, "2", "0"),
    ("rope_base", 1000000.0000000001, "1000000.0000000001", "1000000"), ("rope_freq_scale", 0.25, "0.25", "1"),
    ("rope_freq_scale", float("nan"), "nan", "1"), ("rope_freq_hash", 6, "6", str(2**63 + 5)),
    ("k_type", 8, "8", "1"), ("v_type", 8, "8", "1"),
]
BLOCK_FIELDS = ["anchor", "n_tokens", "left_context_hash", "meta_bytes", "meta_checksum", "k_checksum", "v_checksum",
                "header_checksum", "file_bytes"]
FORMAT_FIELDS = ["magic", "version", "header_bytes"]  # the reader checks these against its own constants


@pytest.mark.parametrize(("field", "value", "in_block", "in_model"), DIFFERENCES)
def test_a_model_dependent_field_that_differs_is_named_with_both_values(k, field, value, in_block, in_model):
    assert (str(k.header_mismatch(header_of(k, **{field: value}), header_of(k)))
            == f"{field} is {in_block} in the block and {in_model} in the model")
    assert (str(k.header_mismatch(header_of(k), header_of(k, **{field: value})))
            == f"{field} is {in_model} in the block and {in_block} in the model")


def test_every_header_field_belongs_to_the_model_the_block_or_the_format():
    model_fields = {"model_fingerprint", *(difference[0] for difference in DIFFERENCES)}
    assert sorted([*model_fields, *BLOCK_FIELDS, *FORMAT_FIELDS]) == sorted(name for name, _ in LAYOUT)


@pytest.mark.parametrize("byte", range(16))
def test_another_model_file_is_named_first(k, byte):
    block = header_of(k, n_layers=9)
    block.model_fingerprint[byte] ^= 0x40
    message = str(k.header_mismatch(block, header_of(k)))
    assert message.startswith("model_fingerprint is ") and message.endswith("011121314151... in the model")


@pytest.mark.parametrize("field", BLOCK_FIELDS)
def test_fields_that_belong_to_the_block_do_not_mismatch(k, field):
    assert str(k.header_mismatch(header_of(k, **{field: 12}), header_of(k))) == ""


@given(data=st.binary(min_size=1, max_size=300), where=st.integers(0, 299), mask=st.integers(1, 255))
def test_checksum_sees_any_changed_byte_and_the_length(k, data, where, mask):
    def checksum(raw: bytes) -> int:
        array = np.frombuffer(raw, dtype=np.uint8)
        return int(k.checksum64(cppyy.ll.cast["void*"](array.ctypes.data), len(raw), 0))

    changed = bytearray(data)
    changed[where % len(data)] ^= mask
    assert checksum(bytes(changed)) != checksum(data)
    assert checksum(data + b"\0") != checksum(data)
    assert checksum(data) == checksum(bytes(data))

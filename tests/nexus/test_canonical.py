import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nexus.canonical import canonical_json, plain, sha256_of, write_atomically

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(JSON)
def test_canonical_json_loses_nothing(value):
    assert json.loads(canonical_json(value)) == value


@given(st.dictionaries(st.text(), st.integers(), min_size=2))
def test_order_of_keys_changes_no_hash(value):
    assert sha256_of(dict(reversed(value.items()))) == sha256_of(value)


def test_known_text():
    assert canonical_json({"b": (1, 0.1), "a": "é", "c": 1e-7}) == '{"a":"é","b":[1,0.1],"c":1e-07}'


def test_numpy_and_omegaconf_become_plain():
    value = plain({"i": np.int32(3), "f": np.float32(0.1), "b": np.bool_(True), "s": np.str_("x"), "a": np.arange(2)})
    assert value == {"i": 3, "f": 0.10000000149011612, "b": True, "s": "x", "a": [0, 1]}
    assert [type(item) for item in value.values()] == [int, float, bool, str, list]
    config = OmegaConf.create({"a": {"b": [1, "${c}"]}, "c": 2})
    assert plain(config) == {"a": {"b": [1, 2]}, "c": 2}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, {"b": math.nan}]}, r"value\.a\[1\]\.b is nan"),
        ({"a": np.float32("inf")}, r"value\.a is inf"),
        (np.array([1, -np.inf]), r"value\[1\] is -inf"),
        ({"a": {1: 2}}, r"value\.a has the key 1"),
        ({"a": b"bytes"}, r"value\.a is a bytes"),
        ({"a": {1, 2}}, r"value\.a is a set"),
    ],
)
def test_what_json_cannot_hold_is_named(value, message):
    with pytest.raises(ValueError, match=message):
        plain(value)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "file.json"
    write_atomically(path, "old\n")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800\n")
    assert path.read_bytes() == b"old\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_of_the_old_file_never_sees_a_mixture(tmp_path):
    path = tmp_path / "file.json"
    write_atomically(path, "old\n")
    with path.open() as reader:
        write_atomically(path, "new\n")
        assert reader.read() == "old\n"
    assert path.read_bytes() == b"new\n"

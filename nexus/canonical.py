"""Canonical JSON and atomic files: equal data gives equal bytes, and a reader sees a whole file or none."""

import hashlib
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def plain(value: Any, where: str = "value") -> Any:
    """The value as dict, list, str, int, float, bool or None; numpy scalars and arrays become Python's own.

    Raises ValueError for NaN, infinities, keys that are not strings and types without a JSON form, naming the place.
    """
    if isinstance(value, np.generic):
        value = value.item()
    elif isinstance(value, np.ndarray):
        value = value.tolist()
    match value:
        case None | bool():
            return value
        case str():
            return str(value)
        case int():
            return int(value)
        case float():
            if not math.isfinite(value):
                raise ValueError(f"{where} is {value}: JSON has no such number; use null for what was not measured")
            return float(value)
        case Mapping():
            return {_key(key, where): plain(item, f"{where}.{key}") for key, item in value.items()}
        case Sequence() if not isinstance(value, (bytes, bytearray, memoryview)):
            return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ValueError(f"{where} is a {type(value).__name__}: JSON has no such type; convert it first")


def canonical_json(value: Any, where: str = "value") -> str:
    """The one JSON text of the value: sorted keys, no spaces, floats by repr. Errors: see `plain`."""
    return json.dumps(
        plain(value, where), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def sha256_of(value: Any, where: str = "value") -> str:
    """SHA-256 (64 hex digits) of the value's canonical JSON."""
    return hashlib.sha256(canonical_json(value, where).encode()).hexdigest()


def write_atomically(path: Path, content: str | bytes) -> None:
    """None, after `path` holds exactly `content` (text as UTF-8): written beside it under a hidden name, synced to disk, then renamed.

    A process that dies on the way leaves the old file, or none. Raises OSError when the folder cannot be written.
    """
    # A name per call: two writers of one path must not share a file that the first of them renames into view.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with partial.open("xb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{where} has the key {key!r}: JSON keys are strings; quote it")
    return str(key)

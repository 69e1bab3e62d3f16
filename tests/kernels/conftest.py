"""The compiled kernels, and property tests without a time limit per example (the first one compiles call wrappers)."""
from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest
from hypothesis import settings

from nexus import native

settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

DEBIAN_PACKAGES = {"g++": "g++", "clang++": "clang", "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
                   "qemu-aarch64-static": "qemu-user-static", "qemu-x86_64-static": "qemu-user-static"}


@pytest.fixture(scope="session")
def k():
    """The C++ namespace `nexus`."""
    return native.kernels()


@pytest.fixture(scope="session")
def need_programs() -> Callable[..., None]:
    """A function that skips the test where one of the named programs is missing.

    Where the environment sets CI it fails the test instead, so that no path goes untested unnoticed.
    """
    def need(*programs: str) -> None:
        missing = sorted({DEBIAN_PACKAGES[name] for name in programs if shutil.which(name) is None})
        if missing:
            reason = f"{' and '.join(programs)} are needed: install {' and '.join(missing)}"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)

    return need

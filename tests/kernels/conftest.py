"""The compiled kernels, and property tests without a time limit per example (the first one compiles call wrappers)."""
from __future__ import annotations

import pytest
from hypothesis import settings

from nexus import native

settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")


@pytest.fixture(scope="session")
def k():
    """The C++ namespace `nexus`."""
    return native.kernels()

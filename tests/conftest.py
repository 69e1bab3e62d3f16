"""Real models for integration tests: fetched and verified once, loaded once per session."""
from __future__ import annotations

import pytest

from nexus.config import compose, validate
from nexus.model_tuple import open_model
from nexus.runtime import Model


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """SmolLM2-135M: "normal" RoPE layout, small enough for every integration test."""
    return open_model(validate(compose(["model=smollm2-135m"])).model)

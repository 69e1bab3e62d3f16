"""Real models for integration tests: fetched and verified once, loaded once per session."""
from __future__ import annotations

import pytest

from nexus.config import compose, validate
from nexus.model_tuple import open_model
from nexus.runtime import Model


@pytest.fixture(scope="session", autouse=True)
def locks_of_their_own(tmp_path_factory):
    """Tests take times only to see that they can be taken: no measurement refuses them, nor they one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEXUS_LOCKS", str(tmp_path_factory.mktemp("locks")))
        yield


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """SmolLM2-135M: "normal" RoPE layout, small enough for every integration test."""
    return open_model(validate(compose(["model=smollm2-135m"])).model)


@pytest.fixture(scope="session")
def gemma3() -> Model:
    """Gemma 3 270M: sliding-window attention of 512 tokens, two caches, two RoPE bases."""
    return open_model(validate(compose(["model=gemma3-270m"])).model)

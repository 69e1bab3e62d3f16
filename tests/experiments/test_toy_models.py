"""The toys: each loads in llama.cpp, is what it stands for, and is the same file every time."""
from __future__ import annotations

import numpy as np
import pytest

from experiments.toy_models import GEMMA2_LAYERS, GEMMA2_WINDOW, TOKENS, TOYS
from nexus.runtime import ContextOptions, Model, Runtime

NEOX, MROPE, NO_ROPE = 2, 8, -1
FACTS = {
    "toy-gemma2": {"arch": "gemma2", "rope_type": NEOX, "is_recurrent": False, "n_swa": GEMMA2_WINDOW,
                   "n_layer": GEMMA2_LAYERS},
    "toy-mamba": {"arch": "mamba", "rope_type": NO_ROPE, "is_recurrent": True, "n_swa": 0},
    "toy-qwen2vl": {"arch": "qwen2vl", "rope_type": MROPE, "is_recurrent": False, "n_swa": 0},
}


def test_every_toy_is_named_as_one_and_has_facts():
    assert set(TOYS) == set(FACTS) and all(name.startswith("toy-") for name in TOYS)


@pytest.mark.integration
@pytest.mark.parametrize("name", TOYS)
def test_a_toy_loads_and_is_what_it_stands_for(tmp_path, name):
    model = Model(TOYS[name](tmp_path / "toy.gguf"))
    try:
        assert {field: getattr(model, field) for field in FACTS[name]} == FACTS[name]
        assert model.n_vocab == len(TOKENS) and not model.is_hybrid
        with Runtime(model, ContextOptions(n_ctx=512, n_seq_max=4, n_threads=1)) as runtime:
            logits = runtime.decode(np.arange(3, 40, dtype=np.int32), 0, 0, logits=True)
        assert np.isfinite(logits).all() and logits.std() > 0
    finally:
        model.close()


@pytest.mark.parametrize("name", TOYS)
def test_a_toy_is_the_same_file_every_time(tmp_path, name):
    first, second = (TOYS[name](tmp_path / f"{i}.gguf").read_bytes() for i in range(2))
    assert first == second

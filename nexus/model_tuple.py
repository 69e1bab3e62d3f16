"""The model under test, ready to run: weights verified, loaded, and its facts held against its config file."""
from __future__ import annotations

from nexus import native
from nexus.runtime import ContextOptions, Model, log_to
from nexus.weights import ModelSpec, ensure

LOG_FILE = native.ROOT / ".nexus" / "llama.log"


class ModelFactsError(RuntimeError):
    """The file is not what conf/model says; the message names the field and both values."""


def open_model(spec: ModelSpec) -> Model:
    """The loaded model of a config. Fetches and verifies the weights first; llama.cpp's messages go to a file.

    Raises WeightsError, RuntimeFailure, or ModelFactsError where RoPE facts of the config differ from the file's.
    """
    weights = ensure(spec)
    log_to(LOG_FILE)
    model = Model(weights.path, weights.sha256)
    check_facts(model, spec)
    return model


def check_facts(model: Model, spec: ModelSpec) -> None:
    """Compare the config's facts with the file's own; facts that the config leaves null are not compared."""
    expected = {"n_ctx_train": spec.n_ctx_train}
    found = {"n_ctx_train": model.n_ctx_train}
    if spec.rope is not None:
        rope = model.rope()
        for field in ("layout", "base", "n_rot", "scaling", "base_swa"):
            expected[f"rope.{field}"] = getattr(spec.rope, field)
            found[f"rope.{field}"] = getattr(rope, field)
    for field, value in expected.items():
        if value is not None and value != found[field]:
            raise ModelFactsError(f"model.{field} is {value!r} in conf/model/{spec.name}.yaml but {found[field]!r} "
                                  f"in {model.path.name}; mend the config file or use the right weights")


def context_options(runtime, **overrides) -> ContextOptions:
    """Context options from the config section `runtime`, with single fields replaced."""
    values = {field: getattr(runtime, field)
              for field in ("n_ctx", "n_batch", "n_seq_max", "n_threads", "flash_attention")}
    return ContextOptions(**(values | overrides))


def tuple_of(model: Model, spec: ModelSpec) -> dict:
    """The artifact's `tuple`: which model, which bytes, which llama.cpp. No embedder takes part in splicing."""
    from importlib.metadata import version

    return {"model": spec.name, "model_sha256": model.sha256, "embedder": None,
            "llama_cpp": f"llama-cpp-python {version('llama-cpp-python')}"}

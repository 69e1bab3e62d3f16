"""Facts of conf/model against the file's own."""
from __future__ import annotations

import pytest

from nexus.config import compose, validate
from nexus.model_tuple import ModelFactsError, check_facts, context_options, open_model, tuple_of

pytestmark = pytest.mark.integration
SPEC = validate(compose(["model=smollm2-135m"])).model


def test_right_facts_and_absent_facts_pass(smollm2):
    check_facts(smollm2, SPEC)
    check_facts(smollm2, SPEC.model_copy(update={"rope": None, "n_ctx_train": None}))


@pytest.mark.parametrize("field, value", [("layout", "neox"), ("base", 10000.0), ("n_rot", 32), ("scaling", "yarn"),
                                          ("base_swa", 1e4)])
def test_a_wrong_rope_fact_is_named_with_both_values(smollm2, field, value):
    spec = SPEC.model_copy(update={"rope": SPEC.rope.model_copy(update={field: value})})
    with pytest.raises(ModelFactsError, match=rf"model\.rope\.{field} is {value!r}.*but {getattr(SPEC.rope, field)!r}"):
        check_facts(smollm2, spec)


def test_a_wrong_context_length_is_named(smollm2):
    with pytest.raises(ModelFactsError, match="n_ctx_train is 1"):
        check_facts(smollm2, SPEC.model_copy(update={"n_ctx_train": 1}))


def test_tuple_and_options_follow_the_config(smollm2):
    assert tuple_of(smollm2, SPEC)["model_sha256"] == SPEC.sha256
    cfg = validate(compose(["runtime.n_batch=128", "runtime.flash_attention=true"]))
    options = context_options(cfg.runtime, n_ctx=777)
    assert (options.n_batch, options.n_ctx, options.flash_attention) == (128, 777, True)


def test_a_users_own_file_passes_and_is_recorded_by_its_hash(smollm2):
    spec = validate(compose(["model=local", f"model.path='{smollm2.path}'"])).model
    assert (spec.sha256, spec.n_ctx_train, spec.rope) == (None, None, None)
    model = open_model(spec)
    try:
        facts = tuple_of(model, spec)
        assert (facts["model"], facts["model_sha256"]) == ("local", SPEC.sha256)
        assert facts["llama_cpp"].startswith("llama-cpp-python ")
        assert model.rope() == smollm2.rope()
    finally:
        model.close()


def test_facts_are_checked_before_a_model_is_handed_out():
    spec = SPEC.model_copy(update={"rope": SPEC.rope.model_copy(update={"base": 10000.0})})
    with pytest.raises(ModelFactsError, match=r"conf/model/smollm2-135m\.yaml"):
        open_model(spec)

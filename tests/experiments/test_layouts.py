"""What is spliced and what is refused: rows from synthetic samples, and a tiny real table with SmolLM2 and the toys."""
from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from experiments import layouts, rows
from experiments.toy_models import write_toy_gemma2
from nexus import artifact, config
from nexus.fidelity import Divergence
from nexus.repair import RepairError
from nexus.runtime import ContextOptions, Model

EXPERIMENT = layouts
TINY = ["model=smollm2-135m", "profile=quick", "runtime.n_threads=1", "runtime.n_ctx=1024", "runtime.n_seq_max=8",
        "dkl_sweep.offsets=[0]", "layouts.also=[]", "layouts.n_past=[0,64]", "layouts.n_cases=1"]
MODEL = "smollm2-135m"
MESSAGES = {
    ("row", "kv_type_k=q8_0"): "KV type: K is q8_0 and V is f16; ",
    ("row", "kv_type_v=q8_0"): "KV type: K is f16 and V is q8_0; ",
    ("row", "kv_unified=false"): "kv_unified is false: ",
    ("transposed", "kv_type_k=q8_0"): "KV type: K is q8_0 and V is f16; ",
    ("transposed", "kv_unified=false"): "kv_unified is false: ",
}


def tiny(*overrides):
    return config.validate(config.compose([*TINY, *overrides]))


@pytest.fixture(scope="module")
def path(folder):
    """The artifact of a tiny run, its rows as measured."""
    path = layouts.run(tiny(), folder / "out")
    artifact.read(path)
    return path


@pytest.fixture(scope="module")
def table(path):
    return artifact.read(path)["rows"]


def row_of(table, **keys):
    found, = (row for row in table if all(row[key] == value for key, value in keys.items()))
    return found


def test_rows_hold_the_fidelity_of_what_was_spliced_and_the_reason_of_what_was_not():
    keys = {"model": "m", "v_layout": "row", "setting": "default", "arm": "none"}
    samples = [layouts.spliced(Divergence(kl, top1, same), **keys, n_past=n_past, case=case)
               for n_past, case, kl, top1, same in ((0, "a", 0.0, True, True), (0, "b", 0.0, True, True),
                                                    (64, "a", 0.1, True, False), (64, "b", 0.3, False, False))]
    samples += [layouts.refused("says why", **keys | {"setting": "swa_full=false"}, n_past=0, case="a")]
    identity, deep, refused = rows.layouts(samples, 1, 0.95)
    assert identity["status"] == deep["status"] == "spliced" and identity["message"] is None
    assert identity["bit_identical"].value == 1 and identity["bit_identical"].ci_low < 0.5
    assert identity["dkl_nats"].value == 0 and identity["dkl_nats"].n == 2
    assert deep["dkl_nats"].value == pytest.approx(0.2) and deep["n_past"] == 64
    assert deep["top1"].value == 0.5 and deep["bit_identical"].value == 0
    assert refused == {**keys, "setting": "swa_full=false", "n_past": 0, "status": "refused", "message": "says why",
                       "dkl_nats": None, "top1": None, "bit_identical": None}


def test_a_group_with_one_refused_case_is_refused():
    keys = {"model": "m", "v_layout": "row", "setting": "default", "n_past": 0, "arm": "random-10"}
    samples = [layouts.spliced(Divergence(0.1, True, False), **keys, case="a"),
               layouts.refused("longer than the window", **keys, case="b")]
    row, = rows.layouts(samples, 1, 0.95)
    assert (row["status"], row["message"], row["dkl_nats"]) == ("refused", "longer than the window", None)


def test_every_model_comes_once_even_while_hydra_is_at_work():
    cfg = tiny("layouts.also=[smollm2-135m,gemma3-270m]")
    assert [spec.name for spec in layouts.specs_of(cfg)] == [MODEL, "gemma3-270m"]
    with initialize_config_dir(str(config.CONF), version_base="1.3"):
        assert [spec.name for spec in layouts.specs_of(cfg)] == [MODEL, "gemma3-270m"]
        assert GlobalHydra.instance().is_initialized()
    same = cfg.model_copy(update={"model": cfg.model.model_copy(update={"name": "local"})})
    assert [spec.name for spec in layouts.specs_of(same)] == ["local", "gemma3-270m"], "the same weights twice"
    with pytest.raises(config.ConfigError, match="gemma3-270m"):
        layouts.specs_of(tiny("layouts.also=[gemma-270m]"))


def test_cells_of_one_bench_lie_together_and_quantised_v_is_tried_in_rows_only():
    cfg = tiny("layouts.also=[gemma3-270m]")
    found = [cell.inputs for cell in layouts.Layouts(cfg, layouts.specs_of(cfg)).cells({"experiment": "layouts"})]
    order = list(dict.fromkeys((cell["model"], cell["v_layout"]) for cell in found))
    assert [(cell["model"], cell["v_layout"]) for cell in found] == sorted(
        ((cell["model"], cell["v_layout"]) for cell in found), key=order.index)
    assert {cell["v_layout"] for cell in found if cell["setting"] == "kv_type_v=q8_0"} == {"row"}
    assert len({cell.get("also_sha256") for cell in found}) == 3


def test_an_arm_that_cannot_choose_and_a_model_that_cannot_splice_are_refused(monkeypatch):
    def repaired(case_id, behind, arm, values):
        if arm.name == "blend-10":
            raise RepairError("arm blend: not available")
        return reading

    reading = SimpleNamespace(logits={"query": np.arange(4, dtype=np.float32)})
    bench = SimpleNamespace(enter=lambda n_past: None, reference=lambda case_id: (reading, None), repaired=repaired,
                            prefilled=lambda case_id: reading)
    table = layouts.Layouts(tiny("layouts.arms=[none,blend-10]"), [])
    monkeypatch.setattr(table, "bench", lambda name, v_layout: bench)
    samples = table.default("m", "row", 0, "case")
    assert [(s["arm"], s["status"], s["message"]) for s in samples] == [
        ("none", "spliced", None), ("blend-10", "refused", "arm blend: not available"), ("noise_floor", "spliced", None)]
    monkeypatch.setattr(table, "bench", lambda name, v_layout: "recurrent")
    assert {(s["status"], s["message"]) for s in table.default("m", "row", 0, "case")} == {("refused", "recurrent")}


@pytest.mark.integration
def test_a_context_is_refused_with_the_reason_of_whoever_refuses(tmp_path):
    model = Model(write_toy_gemma2(tmp_path / "toy.gguf"))
    try:
        options = {"n_ctx": 512, "n_seq_max": 4, "n_threads": 1}
        assert layouts.refusal(model, ContextOptions(**options)) is None
        assert "window of 16 tokens" in layouts.refusal(model, ContextOptions(**options, swa_full=False))
        assert layouts.refusal(model, ContextOptions(**options, flash_attention=False, kv_type_v="q8_0")) == (
            "llama.cpp cannot make a context with these options; its log says why")
    finally:
        model.close()


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("v_layout", layouts.FLASH_ATTENTION)
def test_where_a_block_was_compiled_every_logit_has_the_bits_of_a_prefill(table, v_layout):
    for model, setting in ((MODEL, "default"), (MODEL, "rope_freq_scale=0.5"), ("toy-gemma2", "default")):
        row = row_of(table, model=model, v_layout=v_layout, setting=setting, n_past=0, arm="none")
        assert row["status"] == "spliced" and row["bit_identical"]["value"] == 1 and row["dkl_nats"]["value"] == 0
    moved = row_of(table, model=MODEL, v_layout=v_layout, setting="default", n_past=64, arm="none")
    assert moved["bit_identical"]["value"] == 0 and 0 < moved["dkl_nats"]["value"] < 1


@pytest.mark.integration
@pytest.mark.slow
def test_the_table_has_every_arm_depth_and_refusal(path, table):
    own = [row for row in table if row["model"] == MODEL]
    for v_layout in layouts.FLASH_ATTENTION:
        assert [(row["n_past"], row["arm"]) for row in own
                if row["v_layout"] == v_layout and row["setting"] == "default"] == [
            (n_past, arm) for n_past in (0, 64) for arm in ("none", "head-16", "noise_floor")]
    refusals = {(row["v_layout"], row["setting"]): row["message"] for row in own if row["status"] == "refused"}
    assert refusals.keys() == MESSAGES.keys()
    for key, message in refusals.items():
        assert message.startswith(MESSAGES[key])
    assert not any(row["setting"] == "swa_full=false" for row in own), "SmolLM2 has no window"
    for model, message in (("toy-mamba", "recurrent state"), ("toy-qwen2vl", "M-RoPE"), ("remote", "text interface")):
        row = row_of(table, model=model)
        assert row["status"] == "refused" and message in row["message"] and row["bit_identical"] is None
    assert not any("/" in (row["message"] or "") for row in table), "a path of this machine"
    assert len(artifact.read_samples(path)) == len(table)
    metrics = json.loads((path.parent / "metrics" / "layouts.json").read_text())
    assert metrics[f"{MODEL}.row.none.0"] == metrics["toy-gemma2.transposed.none.0"] == 0
    assert len(metrics) == 2 * 2 * 3 + 2


@pytest.mark.integration
@pytest.mark.slow
def test_a_second_run_measures_nothing_and_writes_the_same(path, monkeypatch):
    def measured(*_):
        raise AssertionError("a cell was measured again")

    monkeypatch.setattr(layouts.Layouts, "measure", measured)
    first = artifact.read(path), artifact.read_samples(path)
    layouts.run(tiny(), path.parent)
    # Provenance aside: the repository may be committed to meanwhile.
    for key in ("rows", "config", "tuple"):
        assert artifact.read(path)[key] == first[0][key]
    assert artifact.read_samples(path) == first[1]

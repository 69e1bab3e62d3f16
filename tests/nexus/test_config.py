"""The gate for configurations: every file composes, everything else is refused with its key named."""

import copy
import re

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nexus.config import CONF, EXPERIMENTS, ROOM_TOKENS, Config, ConfigError
from nexus.config import compose, from_hydra, load_params, params_text, validate
from nexus.repair import arm_of

CHOICES = [
    f"{'+points@_global_' if folder.name == 'points' else folder.name}={file.stem}"
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name != "hydra"
    for file in sorted(folder.glob("*.yaml"))
]
DEFAULTS = compose()
WITH_DEPTHS = [name for name, section in DEFAULTS.items() if isinstance(section, dict) and "n_past" in section]
WITH_ARMS = ["repair_frontier", "deep_splice_ttft", "layouts"]


def leaves(data, prefix=()):
    for key, value in data.items():
        if isinstance(value, dict):
            yield from leaves(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def replaced(path, value):
    data = copy.deepcopy(DEFAULTS)
    *parents, last = path
    section = data
    for key in parents:
        section = section[key]
    section[last] = value
    return data


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if not choice.endswith(("=local", "=file"))])
def test_every_file_composes(choice: str):
    assert validate(compose([choice])).run_name


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice.startswith("profile=")])
def test_only_the_full_profile_owns_the_models_folder(choice: str):
    cfg = validate(compose([choice]))
    profile = choice.removeprefix("profile=")
    assert cfg.profile_name == profile
    assert cfg.run_name == (cfg.model.name if profile == "full" else f"{cfg.model.name}.{profile}")


def test_another_profile_may_not_take_the_folder():
    with pytest.raises(ConfigError, match="belongs to the profile full"):
        validate(compose(["profile=quick", f"run_name={DEFAULTS['model']['name']}"]))


@pytest.mark.parametrize(
    "override, message",
    [
        ("dkl_sweep.n_case=3", "dkl_sweep.n_case: unknown key; did you mean dkl_sweep.n_cases?"),
        ("+sed=3", "sed: unknown key; did you mean seed?"),
        ("+runtime.n_thread=3", "runtime.n_thread: unknown key; did you mean runtime.n_threads?"),
        ("dkl_sweep.n_cases=many", "dkl_sweep.n_cases: 'many' is not allowed; input should be a valid integer"),
        ("dkl_sweep.n_cases=3.0", "dkl_sweep.n_cases: 3.0 is not allowed"),
        ("dkl_sweep.n_cases=0", "dkl_sweep.n_cases: 0 is not allowed; input should be greater than or equal to 1"),
        ("dkl_sweep.n_cases='3'", "dkl_sweep.n_cases: '3' is not allowed"),
        ("dkl_sweep.n_cases=true", "dkl_sweep.n_cases: True is not allowed"),
        ("dkl_sweep.n_cases=null", "dkl_sweep.n_cases: None is not allowed"),
        ("dkl_sweep.offsets=16", "dkl_sweep.offsets: 16 is not allowed"),
        ("dkl_sweep.offsets=[]", "dkl_sweep.offsets: [] is not allowed"),
        ("dkl_sweep.offsets=[-1]", "dkl_sweep.offsets.0: -1 is not allowed"),
        ("dkl_sweep.offsets=[16,0]", "dkl_sweep.offsets: [16, 0] is not allowed; the items must ascend, each once"),
        ("dkl_sweep.offsets=[0,0]", "dkl_sweep.offsets: [0, 0] is not allowed"),
        ("dkl_sweep.offsets=[0,4000]", "dkl_sweep.offsets: 4000 and 512 tokens of room do not fit runtime.n_ctx"),
        ("dkl_sweep.arms=[bare,bear]", "dkl_sweep.arms.1: 'bear' is not allowed"),
        ("dkl_sweep.arms=[bare,bare]", "dkl_sweep.arms: ['bare', 'bare'] is not allowed; every item may appear once"),
        ("dkl_sweep.floor_n_batch=512", "dkl_sweep.floor_n_batch: 512 splits nothing otherwise"),
        ("splice_cost.n_tokens=[800]", "splice_cost.n_tokens: two blocks of 800 tokens do not fit"),
        ("runtime.n_threads=0", "runtime.n_threads: 0 is not allowed"),
        ("runtime.n_batch=8192", "runtime.n_batch: 8192 is more than runtime.n_ctx"),
        ("statistics.level=1", "statistics.level: 1 is not allowed"),
        ("statistics.level=0.5", "statistics.level: 0.5 is not allowed; input should be greater than 0.5"),
        ("calibrated_repair.n_calibration=1", "calibrated_repair.n_calibration: 1 is not allowed"),
        ("seed=-1", "seed: -1 is not allowed"),
        ("run_name=a/b", "run_name: 'a/b' is not allowed"),
        ("run_name=..", "run_name: '..' is not allowed"),
        ("run_name=${nowhere}", "run_name: Interpolation key 'nowhere' not found"),
        ("seed=???", "seed: Missing mandatory value: seed"),
        ("repair.compiled_behind=systems", "repair.compiled_behind: 'systems' is not allowed"),
        ("repair.compiled_behind=ensemble-0x256", "repair.compiled_behind: 'ensemble-0x256' is not allowed"),
        ("repair.compiled_behind=[system]", "repair.compiled_behind: ['system'] is not allowed"),
        ("repair.epsilon_nats=0.0", "repair.epsilon_nats: 0.0 is not allowed"),
        ("repair.recompute_full_mult=1.0", "repair.recompute_full_mult: 1.0 is not allowed"),
        ("repair_frontier.compiled_behind=[preamble]", "repair_frontier.compiled_behind.0: 'preamble' is not allowed"),
        ("repair_frontier.families=[tail]", "repair_frontier.families.0: 'tail' is not allowed"),
        ("repair_frontier.lead_families=[tail]", "repair_frontier.lead_families.0: 'tail' is not allowed"),
        ("repair_frontier.shares_pct=[100.0]", "repair_frontier.shares_pct.0: 100.0 is not allowed"),
        ("rope_boundary_gate.recompute_pct=0.0", "rope_boundary_gate.recompute_pct: 0.0 is not allowed"),
        ("deep_splice_ttft.curves=[1.0]", "deep_splice_ttft.curves.0: 1.0 is not allowed"),
        ("deep_splice_ttft.trials_cold=0", "deep_splice_ttft.trials_cold: 0 is not allowed"),
        ("gating_nogo.contexts=[near]", "gating_nogo.contexts.0: 'near' is not allowed"),
        ("calibrated_repair.n_tests=3", "calibrated_repair.n_tests: unknown key; did you mean calibrated_repair.n_test"),
        ("calibrated_repair.ladder=[]", "calibrated_repair.ladder: [] is not allowed"),
        ("calibrated_repair.ladder=[none,oracle-10]", "calibrated_repair.ladder: 'oracle-10' needs the answer"),
        ("calibrated_repair.n_past=[8000]", "calibrated_repair.n_past: 8000 and"),
        ("repair_frontier.arms=[none]", "repair_frontier.arms: 'none' is measured always"),
        ("layouts.also=[a/b]", "layouts.also.0: 'a/b' is not allowed"),
        ("~workload.held_out_tools", "workload.held_out_tools: missing; it is in the chosen file of conf/workload, and"),
        ("~seed", "seed: missing; it is in conf/config.yaml, and `make params` writes params.yaml anew"),
        ("workload.preambles=''", "workload.preambles: '' is not allowed"),
        ("+points@_global_=smollm2", "points: no choice 'smollm2'; did you mean smollm2-135m?"),
        ("profile=quik", "profile: no choice 'quik'; did you mean quick?; there are "),
        ("nonsense", "override 'nonsense' cannot be read: missing EQUAL at '<EOF>'; write key=value, with quotes around"),
        ("seed=1=[", "override 'seed=1=[' cannot be read: mismatched input '=' expecting <EOF>; write key=value, with"),
        ("'open", "override \"'open\" cannot be read; write key=value, with quotes around a value that holds other"),
        ("runtime.n_ctx=9999999999", "runtime.n_ctx: 9999999999 is not allowed; input should be less than or equal to"),
        ("splice_cost.n_threads=513", "splice_cost.n_threads: 513 is not allowed; input should be less than or equal"),
    ],
)
def test_refused(override: str, message: str):
    with pytest.raises(ConfigError) as error:
        validate(compose([override]))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("section", WITH_DEPTHS)
def test_a_depth_without_room_is_refused(section: str):
    deepest = DEFAULTS["runtime"]["n_ctx"] - ROOM_TOKENS
    assert validate(compose([f"{section}.n_past=[{deepest}]"]))
    with pytest.raises(ConfigError) as error:
        validate(compose([f"{section}.n_past=[{deepest + 1}]"]))
    assert str(error.value).startswith(f"{section}.n_past: {deepest + 1} and {ROOM_TOKENS} tokens of room do not fit ")


@pytest.mark.parametrize("section", WITH_ARMS)
@pytest.mark.parametrize("name", ["tail-5", "head", "head-", "head-4+", "suffix-5%", "none+head-4", " none"])
def test_an_unknown_arm_is_refused(section: str, name: str):
    with pytest.raises(ConfigError) as error:
        validate(replaced((section, "arms"), ["none", name]))
    assert str(error.value).startswith(f"{section}.arms.1: {name!r} is not allowed")


@pytest.mark.parametrize("name", ["none", "full", "head-16", "head-10%", "suffix-2.5", "suffix-100", "head-5%+blend-5"])
def test_an_allowed_arm_is_one_that_the_repair_code_knows(name: str):
    assert validate(replaced(("deep_splice_ttft", "arms"), [name])).deep_splice_ttft.arms == [name]
    assert arm_of(name).name == name


@pytest.mark.parametrize(("section", "key"), [("repair_frontier", "arms"), ("deep_splice_ttft", "arms"),
                                              ("layouts", "arms"), ("calibrated_repair", "ladder")])
@pytest.mark.parametrize("name", ["oracle-10", "head-4+oracle-5"])
def test_the_oracle_is_no_method(section: str, key: str, name: str):
    with pytest.raises(ConfigError, match=rf"{section}\.{key}: '{re.escape(name)}' needs the answer"):
        validate(replaced((section, key), [name]))


@pytest.mark.parametrize("name", ["suffix-101", "head-200%", "blend-100.5"])
def test_more_than_the_whole_block_is_refused(name: str):
    with pytest.raises(ConfigError, match=r"deep_splice_ttft\.arms\.0: "):
        validate(replaced(("deep_splice_ttft", "arms"), [name]))


def test_every_problem_gets_a_line():
    with pytest.raises(ConfigError) as error:
        validate(compose(["seed=a", "dkl_sweep.n_cases=b", "+c=d"]))
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == ["seed", "dkl_sweep.n_cases", "c"]


def test_whole_number_is_allowed_for_a_float_only():
    assert validate(replaced(("expected_minutes",), 3)).expected_minutes == 3


@given(st.sampled_from([path for path, value in leaves(DEFAULTS) if type(value) in (int, bool) and path[0] != "model"]),
       st.one_of(st.text(), st.floats(), st.none(), st.lists(st.integers()), st.dictionaries(st.text(), st.text())))
def test_nothing_is_coerced(path, value):
    if path == ("expected_minutes",):
        return
    with pytest.raises(ConfigError):
        validate(replaced(path, value))


@given(st.sampled_from([path for path, _ in leaves(DEFAULTS) if path[0] not in ("model", "workload", "registry")]))
@settings(deadline=None)
def test_a_missing_key_is_named(path):
    data = copy.deepcopy(DEFAULTS)
    *parents, last = path
    section = data
    for key in parents:
        section = section[key]
    del section[last]
    with pytest.raises(ConfigError, match=f"^{'.'.join(path)}: missing"):
        validate(data)


def test_every_field_says_what_it_means():
    def sections(model):
        yield model
        for field in model.model_fields.values():
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                if field.annotation.__module__ == Config.__module__:
                    yield from sections(field.annotation)

    for section in sections(Config):
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


def test_hash_depends_on_what_is_measured_and_on_nothing_else():
    cfg = validate(DEFAULTS)

    def changed(*overrides):
        return validate(compose(overrides))

    assert len(cfg.sha256("dkl_sweep")) == 64
    assert cfg.sha256("dkl_sweep") != cfg.sha256("splice_cost")
    for override in ("force=true", "results_folder=elsewhere", "run_name=other", "splice_cost.repetitions=7",
                     "model.path=/somewhere/else.gguf"):
        assert changed(override).sha256("dkl_sweep") == cfg.sha256("dkl_sweep"), override
    for override in ("seed=1", "dkl_sweep.n_cases=7", "runtime.n_threads=1", "statistics.level=0.9",
                     "workload.system_prompt=Hello", f"model.sha256={'0' * 64}"):
        assert changed(override).sha256("dkl_sweep") != cfg.sha256("dkl_sweep"), override


def test_what_another_section_decides_is_a_part_of_the_experiments_config():
    cfg = validate(DEFAULTS)
    repairs = {"repair", "repair_frontier", "calibrated_repair"}

    def stated(experiment):
        return repairs & cfg.resolved(experiment).keys()

    assert stated("calibrated_repair") == {"repair", "calibrated_repair"}
    assert stated("deep_splice_ttft") == stated("spliced_choice") == {"repair"}
    assert stated("repair_frontier") == {"repair_frontier"}
    for name in set(EXPERIMENTS) - repairs - {"deep_splice_ttft", "spliced_choice"}:
        assert stated(name) == set() and name in cfg.resolved(name)
    changed = validate(compose(["repair.epsilon_nats=0.5"]))
    assert {name for name in EXPERIMENTS if changed.sha256(name) != cfg.sha256(name)} == {
        "repair", "calibrated_repair", "deep_splice_ttft", "spliced_choice"}


def test_a_value_is_found_by_its_key():
    cfg = validate(replaced(("workload", "preambles"), "mine.json"))
    assert cfg.key_of("mine.json") == "workload.preambles"
    with pytest.raises(KeyError):
        cfg.key_of("not there")


def test_hash_is_the_artifacts():
    from nexus.artifact import config_sha256

    cfg = validate(DEFAULTS)
    assert cfg.sha256("dkl_sweep") == config_sha256(cfg.resolved("dkl_sweep"))


def test_all_ways_in_agree(tmp_path):
    (tmp_path / "params.yaml").write_text(params_text(["profile=quick"]))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = hydra_compose("config", ["profile=quick"])
    assert load_params(tmp_path / "params.yaml") == from_hydra(composed) == validate(compose(["profile=quick"]))


@pytest.mark.parametrize("text", ["", "- a\n", "seed: [\n", "just text"])
def test_unreadable_params(tmp_path, text: str):
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="params.yaml"):
        load_params(path)


def test_params_hold_no_machine_facts():
    text = params_text()
    assert OmegaConf.to_container(OmegaConf.create(text)) == DEFAULTS
    assert "oc.env" not in text and str(CONF.parent) not in text

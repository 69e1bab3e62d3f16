"""A user's own case as a configuration: names, texts, sizes that shrink and what is skipped with a reason."""
from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

import pytest

from nexus import artifact, own_tuple, run_folder
from nexus.config import ROOT, Config, ConfigError, compose, load_params, validate
from nexus.model_probe import ModelFacts
from nexus.own_tuple import OwnTuple
from nexus.registry import RegistryError, load_registry
from nexus.reproduce import overrides_for
from nexus.routing_workload import load_cases
from nexus.workload import WorkloadError, load_workload

NAMES = ("find_recipe", "add_recipe", "delete_recipe", "rate_recipe", "list_pantry", "add_to_pantry")
ABLE = ModelFacts(n_ctx_train=8192, system_tokens=30, query_tokens=40, conversation_tokens=9000,
                  block_tokens=dict.fromkeys(NAMES, 90))


@pytest.fixture
def own(tmp_path: Path) -> OwnTuple:
    """Six tools, ten queries with a tool and two without."""
    tools = [{"name": name, "description": f"To {name.replace('_', ' ')}.", "inputSchema": {"type": "object"}}
             for name in NAMES]
    queries = [{"query": f"query {i} for {name}", "tool": name} for i, name in enumerate([*NAMES, *NAMES[:4]])]
    queries += [{"query": f"nothing {i}", "tool": None} for i in range(2)]
    (tmp_path / "my tools.json").write_text(json.dumps({"tools": tools}))
    write(tmp_path / "asked.jsonl", queries)
    return OwnTuple("smollm2-135m", tmp_path / "my tools.json", tmp_path / "asked.jsonl")


def write(path: Path, lines: list) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def composed(own: OwnTuple, profile: str = "laptop") -> dict:
    return compose([*overrides_for(own.model, profile), *own_tuple.overrides(own, profile)])


@functools.cache
def base(profile: str) -> dict:
    """Composed once: it takes longer than all else here."""
    return compose(["model=smollm2-135m", f"profile={profile}"])


def fitted(own: OwnTuple, tmp_path: Path, facts: ModelFacts, profile: str = "laptop") -> tuple[Config, dict, list]:
    values = copy.deepcopy(base(profile)) | {"run_name": f"{own.name}.{profile}"}
    if own.registry is not None:
        values["registry"] = {"name": "file", "path": str(own.registry), "servers": []}
    own_tuple.write_inputs(own, values, tmp_path / "inputs")
    skipped, changed = own_tuple.fit(values, own, facts)
    own_tuple.write_params(values, tmp_path / "params.yaml")
    return load_params(tmp_path / "params.yaml"), skipped, changed


def test_names_are_safe_and_tell_other_files_apart(tmp_path: Path):
    mine = OwnTuple("/models/Mein Modell (v2).gguf", tmp_path / "a" / "tools.json", tmp_path / "q.jsonl")
    other = OwnTuple("/models/Mein Modell (v2).gguf", tmp_path / "b" / "tools.json", tmp_path / "q.jsonl")
    assert mine.name.startswith("own-Mein-Modell-v2-tools-q-")
    assert mine.name != other.name and mine.name == OwnTuple(mine.model, mine.registry, mine.queries).name
    long = OwnTuple(f"/{'x' * 200}.gguf", Path(f"/{'ü' * 50}.json"), Path(f"/{'q' * 90}.jsonl"))
    assert len(f"{long.name}.laptop") <= 120 and long.name.isascii()
    assert OwnTuple(None, None, tmp_path / "q.jsonl").name.startswith("own-qwen2.5-coder-0.5b-q-")


def test_a_link_keeps_its_own_name(tmp_path: Path):
    (tmp_path / "0a1b2c").touch()
    link = tmp_path / "My Model.gguf"
    link.symlink_to(tmp_path / "0a1b2c")
    assert OwnTuple(str(link), None, None).name.startswith("own-My-Model-")
    assert overrides_for(str(link), None)[-1] == "model.name='local-My-Model'"


def test_configuration_names_the_files_and_a_run_that_git_ignores(own: OwnTuple):
    cfg = validate(composed(own))
    assert cfg.registry.path == str(own.registry) and cfg.workload.path == str(own.queries)
    assert cfg.run_name == f"{own.name}.laptop"
    assert f"results/{own_tuple.PREFIX}-*/" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("missing, said", [
    ({"queries": None}, "your tools need queries.*QUERIES=queries.jsonl"),
    ({"queries": Path("/none/q.jsonl")}, "queries: /none/q.jsonl is not a file; give one JSON object per line"),
    ({"registry": Path("/none/t.json")}, "registry: /none/t.json is not a file"),
])
def test_missing_files_are_one_clear_line(own: OwnTuple, missing: dict, said: str):
    with pytest.raises(ConfigError, match=said):
        own_tuple.overrides(OwnTuple(**(vars(own) | missing)), "quick")


@pytest.mark.parametrize("lines, said", [
    (["{"], "line 1: not JSON"),
    ([{"query": "a", "tool": "find_recipe"}, {"query": "b"}], "line 2: 'tool' is missing; name the right tool"),
    ([{"query": "a", "tool": "find_recipes"}], "line 1: .*find_recipes"),
    ([{"query": "a", "tool": "find_recipe"}], "1 queries name a tool; give at least 2"),
    ([], "the file is empty"),
])
def test_unusable_queries_name_line_and_remedy(own: OwnTuple, tmp_path: Path, lines: list, said: str):
    own.queries.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    with pytest.raises(WorkloadError, match=said):
        own_tuple.write_inputs(own, copy.deepcopy(base("laptop")), tmp_path / "inputs")


def test_unusable_registry_names_the_file(own: OwnTuple, tmp_path: Path):
    own.registry.write_text("[]")
    with pytest.raises(RegistryError, match="my tools.json: the list of tools is empty"):
        own_tuple.write_inputs(own, copy.deepcopy(base("laptop")), tmp_path / "inputs")


def test_texts_of_all_experiments_come_from_the_files(own: OwnTuple, tmp_path: Path):
    cfg, skipped, _ = fitted(own, tmp_path, ABLE)
    tools, routing = load_registry(own.registry).tools, cfg.workload.routing
    evaluation = load_cases(ROOT / routing.evaluation, tools)
    adversarial = load_cases(ROOT / routing.adversarial, tools)
    assert len(evaluation) == 7 and len(adversarial) == 3
    assert not {case.query for case in evaluation} & {case.query for case in adversarial}
    assert [case.id for case in evaluation][:3] == ["line-1", "line-2", "line-4"]
    for which in (routing.development, routing.training):
        answered = [case.tool is not None for case in load_cases(ROOT / which, tools)]
        assert any(answered) and not all(answered)
    workload = load_workload(*(ROOT / path for path in (cfg.workload.tools, cfg.workload.queries,
                                                        cfg.workload.conversation)))
    assert {tool.name for tool in workload.tools} == set(NAMES)
    assert [case.tool for case in workload.cases] == [*NAMES, *NAMES[:4]]
    assert set(skipped) == {"sidecar_accuracy"}


def test_without_queries_that_nothing_answers_the_projects_stand_for_them(own: OwnTuple, tmp_path: Path):
    lines = [line for line in map(json.loads, own.queries.read_text().splitlines()) if line["tool"]]
    write(own.queries, lines)
    cfg, _, _ = fitted(own, tmp_path, ABLE)
    training = load_cases(ROOT / cfg.workload.routing.training, load_registry(own.registry).tools)
    assert sum(case.tool is None for case in training) >= 10


def test_sizes_shrink_to_what_there_is(own: OwnTuple, tmp_path: Path):
    cfg, _, changed = fitted(own, tmp_path, ABLE, profile="full")
    for name in ("dkl_sweep", "rope_boundary_gate", "repair_frontier", "gating_nogo"):
        assert getattr(cfg, name).n_cases == 10
    assert (cfg.calibrated_repair.n_calibration, cfg.layouts.n_cases, cfg.layouts.also) == (10, 5, [])
    assert cfg.routing_accuracy_n250.n_tools == [6]
    assert "dkl_sweep.n_cases: 12 → 10" in changed and "layouts.also: [gemma3-270m] → []" in changed


def test_a_short_context_drops_depths_and_skips_what_has_none_left(own: OwnTuple, tmp_path: Path):
    facts = ModelFacts(**(vars(ABLE) | {"n_ctx_train": 1024}))
    cfg, skipped, _ = fitted(own, tmp_path, facts, profile="full")
    assert cfg.runtime.n_ctx == 1024
    assert cfg.dkl_sweep.offsets[-1] == 512 and cfg.repair_frontier.n_past == [256, 512]
    cfg, skipped, _ = fitted(own, tmp_path, ModelFacts(**(vars(ABLE) | {"n_ctx_train": 700})), profile="full")
    assert "smallest depth is 256 tokens" in skipped["repair_frontier"] and "dkl_sweep" not in skipped


def test_large_schemas_are_no_blocks_and_none_left_is_a_reason(own: OwnTuple, tmp_path: Path):
    blocks = ABLE.block_tokens | {"find_recipe": 5000}
    cfg, skipped, _ = fitted(own, tmp_path, ModelFacts(**(vars(ABLE) | {"block_tokens": blocks})), profile="full")
    workload = load_workload(*(ROOT / path for path in (cfg.workload.tools, cfg.workload.queries,
                                                        cfg.workload.conversation)))
    assert "find_recipe" not in {case.tool for case in workload.cases} and cfg.dkl_sweep.n_cases == 8
    huge = ModelFacts(**(vars(ABLE) | {"block_tokens": dict.fromkeys(NAMES, 5000)}))
    _, skipped, _ = fitted(own, tmp_path, huge)
    assert "the smallest schema has 5000 tokens" in skipped["dkl_sweep"] and "routing_accuracy_n250" not in skipped


def test_recurrent_memory_skips_splicing_and_every_cut_and_is_the_table_of_layouts(own: OwnTuple, tmp_path: Path):
    facts = ModelFacts(**(vars(ABLE) | {"keeps_tokens": False, "refusal": "memory type: mamba keeps recurrent state"}))
    cfg, skipped, _ = fitted(own, tmp_path, facts)
    assert {"dkl_sweep", "deep_splice_ttft", "constrain_cost", "l0_radix"} <= set(skipped)
    assert not {"layouts", "routing_accuracy_n250", "calibration", "slb_latency"} & set(skipped)
    assert "recurrent state" in skipped["dkl_sweep"] and cfg.routing_accuracy_n250.baselines == []


def test_a_model_without_a_template_is_spliced_and_not_asked(own: OwnTuple, tmp_path: Path):
    cfg, skipped, _ = fitted(own, tmp_path, ModelFacts(**(vars(ABLE) | {"has_template": False})))
    assert "dkl_sweep" not in skipped and "chat template" in skipped["sidecar_accuracy"]
    assert cfg.routing_accuracy_n250.baselines == []


def test_a_model_that_cannot_be_loaded_leaves_what_needs_none(own: OwnTuple, tmp_path: Path):
    _, skipped, _ = fitted(own, tmp_path, ModelFacts(problem="not a GGUF file"))
    left = set(artifact.experiments()) - set(skipped)
    assert left == {"slb_latency", "calibration", "routing_generalisation", "block_allocator"}
    assert set(skipped.values()) == {"not a GGUF file"}


def test_a_model_alone_keeps_the_projects_tools(tmp_path: Path):
    gguf = tmp_path / "mine.gguf"
    gguf.touch()
    own = OwnTuple(str(gguf), None, None)
    cfg, skipped, _ = fitted(own, tmp_path, ABLE)
    assert skipped == {} and cfg.registry.path is None
    assert cfg.workload == validate(compose()).workload


def test_weights_larger_than_memory_are_told_before_they_are_loaded():
    assert own_tuple.memory_problem(10**6) is None
    assert "10000000.0 GB" in own_tuple.memory_problem(10**16)


def test_reasons_are_kept_and_no_file_stands_for_none(tmp_path: Path):
    own_tuple.write_skipped({"b": "why", "a": "weil – so"}, tmp_path)
    assert json.loads((tmp_path / "skipped.json").read_text(encoding="utf-8")) == {"a": "weil – so", "b": "why"}
    assert run_folder.read_skipped(tmp_path) == {"a": "weil – so", "b": "why"}
    own_tuple.write_skipped({}, tmp_path)
    assert run_folder.read_skipped(tmp_path) == {} and list(tmp_path.iterdir()) == []


def test_what_an_experiment_refuses_is_no_failure():
    from nexus.prompt import PromptError
    from nexus.splice import SpliceRefused
    from nexus.tables import MissingArtifact

    assert own_tuple.reason_of(PromptError("no message")) == "no message"
    assert own_tuple.reason_of(SpliceRefused("no keys")) == "no keys"
    missing = MissingArtifact(f"{ROOT}/results/own/a.json is missing; make it with: python -m experiments.a")
    assert own_tuple.reason_of(missing) == "results/own/a.json is missing"
    for failure in (OSError("disk is full"), MemoryError(), KeyError("x")):
        assert own_tuple.reason_of(failure) is None

"""Every YAML of conf/ composes into a valid configuration."""
from __future__ import annotations

import pytest

from nexus.config import CONF, ConfigError, compose, validate

MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml") if path.stem != "local")
PROFILES = sorted(path.stem for path in (CONF / "profile").glob("*.yaml"))
WORKLOADS = sorted(path.stem for path in (CONF / "workload").glob("*.yaml") if path.stem != "file")
EMBEDDERS = sorted(path.stem for path in (CONF / "embedder").glob("*.yaml"))
POINTS = sorted(path.stem for path in (CONF / "points").glob("*.yaml"))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_choice_composes(model, profile, workload):
    cfg = validate(compose([f"model={model}", f"profile={profile}", f"workload={workload}"]))
    assert cfg.model.name == model
    assert cfg.run_name == (model if profile == "full" else f"{model}.{profile}")


def test_points_are_of_models_and_change_what_is_measured():
    assert set(POINTS) < set(MODELS)
    for model in POINTS:
        chosen, without = (validate(compose([f"model={model}", *more])) for more in ((), ("~points@_global_",)))
        assert chosen.spliced_choice.n_tools == [5] != without.spliced_choice.n_tools


def test_a_profile_overrides_the_points_of_a_model():
    quick = [validate(compose([f"model={model}", "profile=quick"])) for model in (*POINTS, "qwen2.5-coder-0.5b")]
    assert all(cfg.spliced_choice == quick[0].spliced_choice for cfg in quick)


def test_all_files_are_covered():
    covered = {CONF / "config.yaml"}
    covered |= {CONF / "model" / f"{name}.yaml" for name in [*MODELS, "local"]}
    covered |= {CONF / "profile" / f"{name}.yaml" for name in PROFILES}
    covered |= {CONF / "workload" / f"{name}.yaml" for name in [*WORKLOADS, "file"]}
    covered |= {CONF / "embedder" / f"{name}.yaml" for name in EMBEDDERS}
    covered |= {CONF / "registry" / f"{name}.yaml" for name in ("servers", "file")}
    covered |= {CONF / "points" / f"{name}.yaml" for name in POINTS}
    # Hydra's own logging choices are composed by every run above.
    assert {path for path in CONF.rglob("*.yaml") if "hydra" not in path.parts} == covered


@pytest.mark.parametrize("embedder", EMBEDDERS)
def test_every_embedder_composes(embedder):
    assert validate(compose([f"embedder={embedder}"])).embedder.name == embedder


@pytest.mark.parametrize("group", ["registry", "workload"])
def test_your_own_tools_and_queries_need_a_path_and_nothing_else(group):
    with pytest.raises(ConfigError, match=rf"^{group}\.path: Missing mandatory value"):
        validate(compose([f"{group}=file"]))
    cfg = validate(compose([f"{group}=file", f"{group}.path=/somewhere/file"]))
    assert getattr(cfg, group).path == "/somewhere/file"
    if group == "workload":
        assert cfg.workload.routing.evaluation == "/somewhere/file"
    else:
        assert cfg.registry.servers == []


@pytest.mark.parametrize("server", [{"name": "mine", "command": ["my-server"]},
                                    {"name": "mine", "url": "http://127.0.0.1:1/mcp"}])
def test_your_own_server_takes_a_name_and_a_way_in(server):
    values = compose()
    values["registry"]["servers"].append(server)
    assert validate(values).registry.servers[-1].name == "mine"


@pytest.mark.parametrize("profile", PROFILES)
def test_a_users_own_file_needs_its_path_and_nothing_else(profile):
    with pytest.raises(ConfigError, match=r"^model\.path: "):
        validate(compose(["model=local", f"profile={profile}"]))
    cfg = validate(compose(["model=local", f"profile={profile}", "model.path=/somewhere/model.gguf"]))
    assert (cfg.model.path, cfg.model.sha256, cfg.model.rope) == ("/somewhere/model.gguf", None, None)
    assert cfg.run_name == ("local" if profile == "full" else f"local.{profile}")


@pytest.mark.parametrize("model", MODELS)
def test_pinned_models_name_their_bytes_their_licence_and_a_carrier(model):
    spec = validate(compose([f"model={model}"])).model
    assert len(spec.sha256) == 64 and spec.size_bytes > 0 and spec.licence and spec.carriers
    assert spec.path is None, "a path of one machine is no fact of a model"


def test_no_two_models_are_the_same_bytes():
    hashes = [validate(compose([f"model={model}"])).model.sha256 for model in MODELS]
    assert len(set(hashes)) == len(hashes)


def test_the_quick_profile_measures_less_and_never_owns_the_committed_folder():
    full, quick = (validate(compose([f"profile={profile}"])) for profile in ("full", "quick"))
    assert set(quick.dkl_sweep.offsets) < set(full.dkl_sweep.offsets)
    assert quick.dkl_sweep.n_cases < full.dkl_sweep.n_cases
    for name in ("rope_boundary_gate", "repair_frontier", "deep_splice_ttft", "gating_nogo", "layouts"):
        assert set(getattr(quick, name).n_past) < set(getattr(full, name).n_past)
    assert full.run_name == full.model.name != quick.run_name
    with pytest.raises(ConfigError, match="run_name"):
        validate(compose(["profile=quick", f"run_name={full.model.name}"]))

"""Every YAML of conf/ composes into a valid configuration."""
from __future__ import annotations

import pytest

from nexus.config import CONF, ConfigError, compose, validate

MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml") if path.stem != "local")
PROFILES = sorted(path.stem for path in (CONF / "profile").glob("*.yaml"))
WORKLOADS = sorted(path.stem for path in (CONF / "workload").glob("*.yaml"))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_choice_composes(model, profile, workload):
    cfg = validate(compose([f"model={model}", f"profile={profile}", f"workload={workload}"]))
    assert cfg.model.name == model
    assert cfg.run_name == (model if profile == "full" else f"{model}.{profile}")


def test_all_files_are_covered():
    covered = {CONF / "config.yaml"}
    covered |= {CONF / "model" / f"{name}.yaml" for name in [*MODELS, "local"]}
    covered |= {CONF / "profile" / f"{name}.yaml" for name in PROFILES}
    covered |= {CONF / "workload" / f"{name}.yaml" for name in WORKLOADS}
    # Hydra's own logging choices are composed by every run above.
    assert {path for path in CONF.rglob("*.yaml") if "hydra" not in path.parts} == covered


def test_a_users_own_file_needs_its_path():
    with pytest.raises(ConfigError, match=r"model\.path"):
        validate(compose(["model=local"]))
    cfg = validate(compose(["model=local", "model.path=/somewhere/model.gguf"]))
    assert cfg.model.sha256 is None and cfg.model.rope is None

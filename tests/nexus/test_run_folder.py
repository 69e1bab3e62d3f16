"""What a run's name tells, and what is made where experiments were skipped."""
from __future__ import annotations

import pytest

from nexus.run_folder import SKIPPED, made, profile_of
from nexus.tables import MissingArtifact


@pytest.mark.parametrize("name, profile", [("smollm2-135m", "full"), ("smollm2-135m.quick", "quick"),
                                           ("qwen2.5-coder-0.5b", "full"), ("own-a.b-1234.laptop", "laptop")])
def test_the_name_tells_the_profile(name, profile):
    assert profile_of(name) == profile


def test_what_lacks_an_artifact_is_left_out_only_where_experiments_were_skipped(tmp_path):
    def lacking():
        raise MissingArtifact("dkl_sweep is missing")

    makers = {"first": lambda: 1, "second": lacking, "third": lambda: 3}
    with pytest.raises(MissingArtifact, match="dkl_sweep"):
        made(makers, tmp_path)
    (tmp_path / SKIPPED).write_text("{}")
    assert made(makers, tmp_path) == {"first": 1, "third": 3}

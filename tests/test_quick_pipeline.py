"""The whole pipeline for real, once: SmolLM2 with the profile `quick`, through DVC, in a copy of the repository."""
from __future__ import annotations

import time
from pathlib import Path

import pytest

from nexus import artifact
from repository_copy import make_copy

RUN = "smollm2-135m.quick"


@pytest.mark.integration
@pytest.mark.slow
def test_quick_pipeline_measures_draws_and_then_has_nothing_to_do(tmp_path: Path):
    copy = make_copy(tmp_path / "repository", real=True)
    choices = ("--model", "smollm2-135m", "--profile", "quick")
    first = copy.python("nexus", "repro", *choices, timeout=900)
    assert first.returncode == 0, first.stdout + first.stderr

    results = copy.path / "results" / RUN
    sweep, cost = (artifact.read(results / f"{name}.json") for name in ("dkl_sweep", "splice_cost"))
    identity = [row for row in sweep["rows"] if row["offset"] == 0 and row["arm"] == "bare"]
    assert len(identity) == 2 and all(row["dkl_nats"]["value"] == 0 for row in identity)
    assert all(row["total_us"]["value"] > 0 for row in cost["rows"])
    assert "published band" in (results / "figures" / "figure1.svg").read_text()
    assert (results / "figures" / "figure1.png").stat().st_size > 10_000
    # A run that git ignores leaves nothing behind in the files that git knows.
    assert copy.git("status", "--porcelain") == ""

    start = time.monotonic()
    second = copy.python("nexus", "repro", *choices)
    assert "nothing to do" in second.stdout, second.stdout + second.stderr
    assert time.monotonic() - start < 10

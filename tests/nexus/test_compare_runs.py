"""How the intervals of two runs compare."""
from __future__ import annotations

from pathlib import Path

import pytest

from nexus import artifact, compare_runs
from nexus.compare_runs import compare
from nexus.config import ROOT
from nexus.stats import Estimate


def estimate(value: float, half: float) -> Estimate:
    return Estimate(value, value - half, value + half, 5, "toy", 0.95)


def run(folder: Path, rows: list[tuple[int, Estimate, Estimate]]) -> Path:
    """A run of toy with one artifact: (offset, divergence, top-1)."""
    committed = artifact.read(ROOT / "results" / "smollm2-135m" / "dkl_sweep.json")
    folder.mkdir()
    artifact.write(folder / "dkl_sweep.json", experiment="dkl_sweep", tuple_=committed["tuple"],
                   config=committed["config"], samples=[{"toy": 1}], provenance=committed["provenance"],
                   rows=[{"offset": offset, "arm": "bare", "probe": "query", "dkl_nats": dkl, "top1": top1}
                         for offset, dkl, top1 in rows])
    return folder


def test_rows_with_equal_keys_are_compared(tmp_path: Path):
    none = Estimate(None, None, None, 0, "no-samples", 0.95)
    mine = run(tmp_path / "mine", [(0, estimate(0.5, 0.4), estimate(0.9, 0.04)), (16, estimate(0.5, 0.2), none),
                                   (64, estimate(9.0, 1.0), estimate(0.5, 0.1)), (99, none, none)])
    other = run(tmp_path / "other", [(0, estimate(0.6, 0.1), estimate(0.9, 0.02)), (16, estimate(0.9, 0.2), none),
                                     (64, estimate(1.0, 1.0), estimate(0.5, 0.1)), (128, none, none)])
    (found,) = compare(mine, other)
    # At 16 the intervals just touch; at 64 one metric's do not overlap.
    assert (found.n_rows, found.n_overlapping) == (3, 2)
    assert (found.n_intervals, found.n_intervals_overlapping) == (5, 4)
    assert found.widest == pytest.approx(4) and found.widest_of == "dkl_nats of 0, bare, query"
    assert found.typical == pytest.approx(1)


def test_an_interval_without_width_on_the_other_side_has_no_ratio(tmp_path: Path):
    mine = run(tmp_path / "mine", [(0, estimate(0.5, 0.4), estimate(0.9, 0.04))])
    other = run(tmp_path / "other", [(0, estimate(0.5, 0.0), estimate(0.9, 0.0))])
    (found,) = compare(mine, other)
    assert found.n_overlapping == 1 and found.widest is None and found.typical is None
    assert compare_runs.MISSING in compare_runs.markdown([found], "mine", "other")


def test_what_is_written_has_every_common_artifact_and_the_terminal_the_same_rows(tmp_path: Path):
    committed = ROOT / "results" / "smollm2-135m"
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("dkl_sweep", "gating_nogo"):
        (mine / f"{name}.json").write_bytes((committed / f"{name}.json").read_bytes())
    told = compare_runs.write(mine, committed)
    assert told.splitlines()[0].startswith("Beside the committed results of smollm2-135m")
    assert [line.split()[0] for line in told.splitlines()[2:]] == ["dkl_sweep", "gating_nogo"]
    document = (mine / compare_runs.COMPARED).read_text(encoding="utf-8")
    assert document.count("| 100 % |") >= 2 and "1×" in document


def test_nothing_in_common_is_told_in_no_words(tmp_path: Path):
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
    assert compare(tmp_path / "mine", tmp_path / "other") == []
    assert compare_runs.write(tmp_path / "mine", tmp_path / "other") == ""

"""The report of a run, and the one over all committed runs, written from artifacts. Loads no model."""
from __future__ import annotations

from pathlib import Path

from nexus import report
from nexus.config import ROOT, Config
from nexus.pipeline import experiment_main
from nexus.run_folder import COMMITTED_PROFILE

NAME = "report"


def run(cfg: Config, out: Path) -> Path:
    """Path of `<out>/report.html`; the verdicts are in `<out>/tables`, too.

    A run of a model of conf/model with the full profile is part of results/report.html, which is written again.
    """
    loaded = report.load(out)
    report.write_verdicts(loaded)
    path = report.write([loaded], out / report.NAME, out.name)
    results = ROOT / cfg.results_folder
    if cfg.profile_name == COMMITTED_PROFILE and out == results / cfg.model.name:
        report.write(report.committed(results), results / report.NAME, "all committed runs")
    return path


if __name__ == "__main__":
    experiment_main(NAME, run)

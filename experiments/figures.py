"""All figures of a run, drawn from its artifacts. Loads no model."""
from __future__ import annotations

from pathlib import Path

from nexus import diagrams, figures, run_folder, tables
from nexus.config import Config
from nexus.pipeline import experiment_main

NAME = "figures"


def run(cfg: Config, out: Path) -> Path:
    """Path of the figure folder, `<out>/figures`. Nothing is written where an artifact is missing, unless the run tells
    in `skipped.json` that it skipped some: then what can be drawn is.
    """
    published = tables.published()
    makers = {
        "figure1": lambda: figures.figure1(tables.stored(cfg, out, "dkl_sweep"), published),
        "figure2": diagrams.figure2,
        "figure3": diagrams.figure3,
        "figure4": lambda: figures.figure4(tables.stored(cfg, out, "deep_splice_ttft"), published),
        "figure5": lambda: figures.figure5(tables.stored(cfg, out, "routing_accuracy_n250"), published),
        "frontier": lambda: figures.frontier(tables.stored(cfg, out, "repair_frontier")),
    }
    folder = out / "figures"
    for name, figure in run_folder.made(makers, out).items():
        figures.save(figure, folder / name)
    return folder


if __name__ == "__main__":
    experiment_main(NAME, run)

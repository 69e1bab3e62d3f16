"""All figures of a run, drawn from its artifacts. Loads no model."""
from __future__ import annotations

from pathlib import Path

from nexus import diagrams, figures, tables
from nexus.config import Config
from nexus.pipeline import experiment_main

NAME = "figures"


def run(cfg: Config, out: Path) -> Path:
    """Path of the figure folder, `<out>/figures`. Nothing is written where an artifact is missing."""
    published = tables.published()
    drawn = {
        "figure1": figures.figure1(tables.stored(cfg, out, "dkl_sweep"), published),
        "figure2": diagrams.figure2(),
        "figure3": diagrams.figure3(),
        "figure4": figures.figure4(tables.stored(cfg, out, "deep_splice_ttft"), published),
        "figure5": figures.figure5(tables.stored(cfg, out, "routing_accuracy_n250"), published),
        "frontier": figures.frontier(tables.stored(cfg, out, "repair_frontier")),
    }
    folder = out / "figures"
    for name, figure in drawn.items():
        figures.save(figure, folder / name)
    return folder


if __name__ == "__main__":
    experiment_main(NAME, run)

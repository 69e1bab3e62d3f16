"""All figures of a run, drawn from its artifacts. Loads no model."""
from __future__ import annotations

from pathlib import Path

from nexus import diagrams, figures, tables
from nexus.config import Config
from nexus.pipeline import experiment_main

NAME = "figures"
# What a user's own run could not do, with the reason (nexus/own_tuple.py).
SKIPPED = "skipped.json"


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
    drawn = {}
    for name, make in makers.items():
        try:
            drawn[name] = make()
        except tables.MissingArtifact:
            if not (out / SKIPPED).is_file():
                raise
    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        figures.save(figure, folder / name)
    return folder


if __name__ == "__main__":
    experiment_main(NAME, run)

"""All figures of a run, drawn from its artifacts. Loads no model."""
from __future__ import annotations

import json
from pathlib import Path

from nexus import artifact, figures
from nexus.config import ROOT, Config
from nexus.pipeline import experiment_main

NAME = "figures"
PUBLISHED = ROOT / "results" / "published.json"


def run(cfg: Config, out: Path) -> Path:
    """Path of the figure folder, `<out>/figures`."""
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    folder = out / "figures"
    figures.save(figures.figure1(artifact.read(out / "dkl_sweep.json"), published), folder / "figure1")
    return folder


if __name__ == "__main__":
    experiment_main(NAME, run)

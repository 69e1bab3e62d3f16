"""All tables of a run, in Markdown and LaTeX, written from its artifacts. Loads no model."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nexus import argument_tables, latex, peer_table, routing_tables, run_folder, tables
from nexus.config import Config
from nexus.pipeline import experiment_main

NAME = "tables"


def run(cfg: Config, out: Path) -> Path:
    """Path of the table folder, `<out>/tables`. Nothing is written where an artifact is missing, unless the run tells in
    `skipped.json` that it skipped some: then what can be made is.
    """
    published = tables.published()
    makers: dict[str, Callable[[], str]] = {
        "table1": lambda: peer_table.table1(out),
        "table2": lambda: tables.table2(tables.stored(cfg, out, "gating_nogo"), published),
        "table3": lambda: tables.table3(tables.stored(cfg, out, "deep_splice_ttft"), published),
        "frontier": lambda: tables.frontier(tables.stored(cfg, out, "repair_frontier")),
        "repair_policy": lambda: tables.repair_policy(tables.stored(cfg, out, "calibrated_repair")),
        "layouts": lambda: tables.layouts(tables.stored(cfg, out, "layouts")),
        "table4": lambda: tables.document(
            routing_tables.table4(
                tables.stored(cfg, out, "routing_accuracy_n250"), tables.stored(cfg, out, "calibration"),
                tables.stored(cfg, out, "slb_latency"), published),
            *run_folder.made({"rest": lambda: argument_tables.table4_rest(
                tables.stored(cfg, out, "sidecar_accuracy"), tables.stored(cfg, out, "l0_radix"), published)},
                out).values()),
        "arguments": lambda: argument_tables.arguments(tables.stored(cfg, out, "sidecar_accuracy"),
                                                       tables.stored(cfg, out, "constrain_cost")),
        "serving": lambda: argument_tables.serving(tables.stored(cfg, out, "l0_radix"),
                                                   tables.stored(cfg, out, "block_allocator")),
        "generalisation": lambda: routing_tables.generalisation(tables.stored(cfg, out, "routing_generalisation")),
        "scan": lambda: routing_tables.scan(tables.stored(cfg, out, "slb_latency")),
    }
    folder = out / "tables"
    for name, text in run_folder.made(makers, out).items():
        latex.write(folder, name, text)
    return folder


if __name__ == "__main__":
    experiment_main(NAME, run)

"""All tables of a run, in Markdown and LaTeX, written from its artifacts. Loads no model."""
from __future__ import annotations

from pathlib import Path

from nexus import argument_tables, document, latex, peer_table, routing_tables, tables
from nexus.canonical import write_atomically
from nexus.config import Config
from nexus.pipeline import experiment_main

NAME = "tables"


def run(cfg: Config, out: Path) -> Path:
    """Path of the table folder, `<out>/tables`. Nothing is written where an artifact is missing."""
    published = tables.published()
    sidecar, radix = tables.stored(cfg, out, "sidecar_accuracy"), tables.stored(cfg, out, "l0_radix")
    texts = {
        "table1": peer_table.table1(out),
        "table2": tables.table2(tables.stored(cfg, out, "gating_nogo"), published),
        "table3": tables.table3(tables.stored(cfg, out, "deep_splice_ttft"), published),
        "frontier": tables.frontier(tables.stored(cfg, out, "repair_frontier")),
        "repair_policy": tables.repair_policy(tables.stored(cfg, out, "calibrated_repair")),
        "layouts": tables.layouts(tables.stored(cfg, out, "layouts")),
        "table4": tables.document(
            routing_tables.table4(
                tables.stored(cfg, out, "routing_accuracy_n250"), tables.stored(cfg, out, "calibration"),
                tables.stored(cfg, out, "slb_latency"), published),
            argument_tables.table4_rest(sidecar, radix, published)),
        "arguments": argument_tables.arguments(sidecar, tables.stored(cfg, out, "constrain_cost")),
        "serving": argument_tables.serving(radix, tables.stored(cfg, out, "block_allocator")),
        "generalisation": routing_tables.generalisation(tables.stored(cfg, out, "routing_generalisation")),
        "scan": routing_tables.scan(tables.stored(cfg, out, "slb_latency")),
    }
    folder = out / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomically(folder / f"{name}.md", text)
        write_atomically(folder / f"{name}.tex", latex.latex(document.blocks(text)))
    return folder


if __name__ == "__main__":
    experiment_main(NAME, run)

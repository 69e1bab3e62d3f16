"""Figure 1: divergence of a bare splice from a full prefill against the distance that the block was moved.

For each offset the context is the system prompt and `offset` tokens of conversation; the block was compiled right
behind the system prompt. Arms, each against a full prefill with the same batch split:

bare              keys re-anchored to the new position, nothing recomputed
bare-no-reanchor  the control: positions moved, keys left at the anchor's rotation
noise_floor       a full prefill of the same tokens in other batches: what the arithmetic alone does

Two probes: `block_end`, the distribution right behind the block (its last token is decoded again, because logits do
not survive a splice), and `query`, the distribution behind the user's query. Offset 0 is the identity control.
"""
from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.compiled import compiled_blocks
from nexus import stats
from nexus.blocks import block_split
from nexus.cells import Cell
from nexus.config import ROOT, Config
from nexus.fidelity import divergence
from nexus.model_tuple import context_options, open_model, tuple_of
from nexus.pipeline import cell_inputs, experiment_main, measure_cells, write_results
from nexus.prompt import block_tokens, conversation_tokens, query_tokens, system_tokens
from nexus.runtime import Runtime
from nexus.splice import Splicer
from nexus.workload import load_workload, select

NAME = "dkl_sweep"
PROBES = ("query", "block_end")
CONTEXT, WORK = 0, 1


class Sweep:
    """The contexts and blocks of one model; measures one (offset, case) at a time."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.model = open_model(cfg.model)
        workload = load_workload(ROOT / cfg.workload.tools, ROOT / cfg.workload.queries,
                                 ROOT / cfg.workload.conversation)
        self.cases = select(workload.cases, cfg.dkl_sweep.n_cases)
        self.conversation = workload.conversation
        self.system = system_tokens(self.model, cfg.workload.system_prompt)
        tools = {tool.name: tool for tool in workload.tools}
        self.blocks = {case.id: block_tokens(self.model, tools[case.tool]) for case in self.cases}
        self.queries = {case.id: query_tokens(self.model, case.query) for case in self.cases}
        self.runtime = Runtime(self.model, context_options(cfg.runtime))
        self.floor = Runtime(self.model, context_options(cfg.runtime, n_batch=cfg.dkl_sweep.floor_n_batch))
        self.splicer = Splicer(self.runtime)
        self.resident = {
            case_id: self.splicer.hold(block)
            for case_id, block in compiled_blocks(self.runtime, [self.system], self.blocks).items()
        }
        self.context_offset = None

    def enter_context(self, offset: int) -> None:
        """Decode system prompt and conversation once per offset, in both runtimes, from an empty cache."""
        if self.context_offset == offset:
            return
        context = np.concatenate([self.system, conversation_tokens(self.model, self.conversation, offset)])
        for runtime in (self.runtime, self.floor):
            runtime.clear()
            runtime.decode(context, 0, CONTEXT, split=(len(self.system),) if runtime is self.runtime else ())
        self.context_offset = offset

    def measure(self, cell: Cell) -> list[dict]:
        """Samples of one (offset, case): one row per arm and probe."""
        offset, case_id = cell.inputs["offset"], cell.inputs["case"]
        self.enter_context(offset)
        position = len(self.system) + offset
        block, query, resident = self.blocks[case_id], self.queries[case_id], self.resident[case_id]
        reference = self.prefilled(self.runtime, block, query, position, block_split(len(block)))
        tool = next(case.tool for case in self.cases if case.id == case_id)
        samples = []
        for arm in self.cfg.dkl_sweep.arms:
            if arm == "noise_floor":
                measured = self.prefilled(self.floor, block, query, position, ())
            else:
                measured = self.spliced(resident, block, query, position, reanchor=arm == "bare")
            for probe in PROBES:
                found = divergence(reference[probe], measured[probe])
                samples.append({"offset": offset, "arm": arm, "probe": probe, "case": case_id, "tool": tool,
                                "block_tokens": len(block), "query_tokens": len(query), "dkl_nats": found.kl_nats,
                                "top1": found.top1, "bit_identical": found.bit_identical})
        return samples

    def prefilled(self, runtime: Runtime, block, query, position: int, split) -> dict[str, np.ndarray]:
        """Logits at both probes after decoding block and query as text."""
        runtime.seq_cp(CONTEXT, WORK)
        try:
            block_end = runtime.decode(block, position, WORK, logits=True, split=split)
            return {"block_end": block_end,
                    "query": runtime.decode(query, position + len(block), WORK, logits=True)}
        finally:
            runtime.seq_rm(WORK)

    def spliced(self, resident, block, query, position: int, reanchor: bool) -> dict[str, np.ndarray]:
        """Logits at both probes after splicing the block; only `block_end` decodes its last token again."""
        runtime, end = self.runtime, position + len(block)
        logits = {}
        for probe in PROBES:
            runtime.seq_cp(CONTEXT, WORK)
            try:
                self.splicer.place(resident, position, WORK, reanchor=reanchor)
                if probe == "query":
                    logits[probe] = runtime.decode(query, end, WORK, logits=True)
                else:
                    runtime.seq_rm(WORK, end - 1, -1)
                    logits[probe] = runtime.decode(block[-1:], end - 1, WORK, logits=True)
            finally:
                runtime.seq_rm(WORK)
        return logits


def summarise(cfg: Config, samples: list[dict]) -> list[dict]:
    """Artifact rows: mean divergence with a bootstrap interval, agreement with a Wilson interval."""
    rows = []
    level = cfg.statistics.level
    for offset in cfg.dkl_sweep.offsets:
        for arm in cfg.dkl_sweep.arms:
            for probe in PROBES:
                cell = [s for s in samples if (s["offset"], s["arm"], s["probe"]) == (offset, arm, probe)]
                rows.append({
                    "offset": offset, "arm": arm, "probe": probe,
                    "dkl_nats": stats.mean([s["dkl_nats"] for s in cell], cfg.seed, level),
                    "top1": stats.wilson(sum(s["top1"] for s in cell), len(cell), level),
                    "bit_identical": stats.wilson(sum(s["bit_identical"] for s in cell), len(cell), level),
                })
    return rows


def run(cfg: Config, out: Path) -> Path:
    """Path of the written artifact, `<out>/dkl_sweep.json`; cells measured earlier are not measured again."""
    sweep = Sweep(cfg)
    inputs = cell_inputs(NAME, cfg, sweep.model.sha256)
    cells = [
        Cell({**inputs, "offset": offset, "case": case.id},
             # Attention over the context makes deep cells a little dearer than their token count.
             weight=(len(sweep.blocks[case.id]) + len(sweep.queries[case.id])) * (1 + offset / 4000),
             label=f"offset {offset}, {case.tool}")
        for offset in cfg.dkl_sweep.offsets for case in sweep.cases
    ]
    samples = measure_cells(cfg, cells, sweep.measure, "placement sweep")
    rows = summarise(cfg, samples)
    return write_results(
        NAME, cfg, out, tuple_=tuple_of(sweep.model, cfg.model), rows=rows, samples=samples, isa=sweep.splicer.isa,
        metrics={f"{row['arm']}.{row['probe']}.{row['offset']}": {"dkl_nats": row["dkl_nats"].value}
                 for row in rows if row["probe"] == "query"})


if __name__ == "__main__":
    experiment_main(NAME, run)

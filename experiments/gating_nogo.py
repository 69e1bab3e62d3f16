"""Table II: does anything that is known without a full prefill foretell how far a spliced block's keys drift?

The context is the system prompt and `n_past` tokens of conversation, on the tools' topic or off it; the block was
compiled right behind the system prompt and is re-anchored behind the context. Per (layer, KV head), the drift of its
keys from those of a full prefill with the same batch split is ranked against each predictor of nexus/drift.py. The
paper's is `context_k_variance`; its gate would need a mean rank correlation of 0.40. Ranks are over all layers, so that
knowing the layer is worth much; `spearman_rho_within_layer` is what is left of the correlation without it.
"""
from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.compiled import compiled_blocks
from nexus import stats
from nexus.blocks import block_split, read_cells
from nexus.cells import Cell
from nexus.config import ROOT, Config
from nexus.drift import PREDICTORS, Known, heads, key_drift, spearman, spearman_within_layer, unrotated
from nexus.model_tuple import context_options, open_model, tuple_of
from nexus.pipeline import cell_inputs, experiment_main, measure_cells, write_results
from nexus.prompt import block_tokens, conversation_tokens, system_tokens
from nexus.runtime import Runtime
from nexus.splice import Splicer
from nexus.tables import PAPER_PREDICTOR
from nexus.workload import load_conversation, load_workload, select

NAME = "gating_nogo"
CONTEXT, WORK = 0, 1
METRICS = ("max_drift", "mean_drift", "spearman_rho", "spearman_rho_within_layer")


class Study:
    """The contexts and blocks of one model; measures one (n_past, context, case) at a time."""

    def __init__(self, cfg: Config):
        self.model = open_model(cfg.model)
        workload = load_workload(ROOT / cfg.workload.tools, ROOT / cfg.workload.queries,
                                 ROOT / cfg.workload.conversation)
        self.cases = {case.id: case for case in select(workload.cases, cfg.gating_nogo.n_cases)}
        self.conversations = {"on": workload.conversation, "off": load_conversation(ROOT / cfg.workload.off_topic)}
        self.system = system_tokens(self.model, cfg.workload.system_prompt)
        tools = {tool.name: tool for tool in workload.tools}
        self.blocks = {case.id: block_tokens(self.model, tools[case.tool]) for case in self.cases.values()}
        self.runtime = Runtime(self.model, context_options(cfg.runtime))
        self.splicer = Splicer(self.runtime)
        self.resident = {
            case_id: self.splicer.hold(block)
            for case_id, block in compiled_blocks(self.runtime, [self.system], self.blocks).items()
        }
        self.entered = None

    def enter(self, n_past: int, context: str) -> None:
        """Decode system prompt and conversation from an empty cache and read their keys, once per (n_past, context)."""
        if self.entered == (n_past, context):
            return
        self.entered = None
        conversation = conversation_tokens(self.model, self.conversations[context], n_past)
        self.runtime.clear()
        self.runtime.decode(np.concatenate([self.system, conversation]), 0, CONTEXT, split=(len(self.system),))
        self.position = len(self.system) + n_past
        self.context_keys, self.context_values = read_cells(self.runtime, CONTEXT, 0, self.position)
        self.context_unrotated = self.without_rope(self.context_keys, 0)
        self.entered = n_past, context

    def true_keys(self, case_id: str) -> np.ndarray:
        """The block's keys after decoding it as text behind the context, float16[n_layers, n_tokens, width]."""
        runtime, block, begin = self.runtime, self.blocks[case_id], self.position
        runtime.seq_cp(CONTEXT, WORK)
        try:
            runtime.decode(block, begin, WORK, split=block_split(len(block)))
            return read_cells(runtime, WORK, begin, begin + len(block))[0]
        finally:
            runtime.seq_rm(WORK)

    def spliced_keys(self, case_id: str) -> np.ndarray:
        """The compiled block's keys, re-anchored behind the context: what a splice would put there."""
        resident = self.resident[case_id]
        resident.native.reanchor(self.position, True)
        return self.splicer.read(resident.blob(), resident.n_tokens)[0]

    def drift(self, case_id: str) -> np.ndarray:
        """Drift of the block behind the context entered last, float64[n_layers, n_head]."""
        return key_drift(self.true_keys(case_id), self.spliced_keys(case_id), self.model.n_head_kv)

    def known(self, case_id: str) -> Known:
        """All that a gate could look at. The block was compiled behind the system prompt, where the context begins."""
        n_left, n_head = len(self.system), self.model.n_head_kv
        values = heads(self.context_values, n_head)
        return Known(
            context_keys=self.context_unrotated, context_keys_rotated=heads(self.context_keys, n_head),
            context_values=values, left_keys=self.context_unrotated[:, :n_left], left_values=values[:, :n_left],
            block_keys=self.without_rope(self.spliced_keys(case_id), self.position),
        )

    def measure(self, cell: Cell) -> list[dict]:
        """Samples of one (n_past, context, case): one row per predictor."""
        n_past, context, case_id = (cell.inputs[name] for name in ("n_past", "context", "case"))
        self.enter(n_past, context)
        drift, known = self.drift(case_id), self.known(case_id)
        predicted = {name: predictor(known) for name, predictor in PREDICTORS.items()}
        return [{"n_past": n_past, "context": context, "predictor": name, "case": case_id,
                 "tool": self.cases[case_id].tool, "block_tokens": len(self.blocks[case_id]),
                 "max_drift": float(drift.max()), "mean_drift": float(drift.mean()),
                 "spearman_rho": spearman(values, drift),
                 "spearman_rho_within_layer": spearman_within_layer(values, drift)}
                for name, values in predicted.items()]

    def without_rope(self, keys: np.ndarray, begin: int) -> np.ndarray:
        return unrotated(keys, begin + np.arange(keys.shape[1]), self.model.n_head_kv, self.runtime.rope.layout,
                         self.splicer.layer_frequencies)


def summarise(cfg: Config, samples: list[dict]) -> list[dict]:
    """Artifact rows: means over the cases with bootstrap intervals; a case without a rank correlation is left out."""
    rows = []
    for n_past in cfg.gating_nogo.n_past:
        for context in cfg.gating_nogo.contexts:
            for predictor in PREDICTORS:
                key = n_past, context, predictor
                cell = [s for s in samples if (s["n_past"], s["context"], s["predictor"]) == key]
                rows.append({"n_past": n_past, "context": context, "predictor": predictor} | {
                    metric: stats.mean([s[metric] for s in cell if s[metric] is not None], cfg.seed,
                                       cfg.statistics.level)
                    for metric in METRICS})
    return rows


def headline(rows: list[dict]) -> dict[str, float | None]:
    """Mean rank correlation over the rows of each predictor; `mean_spearman_rho` is the paper's."""
    means = {}
    for predictor in PREDICTORS:
        found = [row["spearman_rho"].value for row in rows if row["predictor"] == predictor]
        found = [rho for rho in found if rho is not None]
        means[predictor] = float(np.mean(found)) if found else None
    return {"mean_spearman_rho": means[PAPER_PREDICTOR], **means}


def run(cfg: Config, out: Path) -> Path:
    """Path of the written artifact, `<out>/gating_nogo.json`; cells measured earlier are not measured again."""
    study = Study(cfg)
    inputs = cell_inputs(NAME, cfg, study.model.sha256)
    cells = [
        Cell({**inputs, "n_past": n_past, "context": context, "case": case.id},
             # Attention over the context, and reading it, make deep cells a little dearer than their token count.
             weight=len(study.blocks[case.id]) * (1 + n_past / 2000),
             label=f"n_past {n_past}, {context} topic, {case.tool}")
        for n_past in cfg.gating_nogo.n_past for context in cfg.gating_nogo.contexts for case in study.cases.values()
    ]
    samples = measure_cells(cfg, cells, study.measure, "key drift")
    rows = summarise(cfg, samples)
    return write_results(NAME, cfg, out, tuple_=tuple_of(study.model, cfg.model), rows=rows, samples=samples,
                         isa=study.splicer.isa, metrics=headline(rows))


if __name__ == "__main__":
    experiment_main(NAME, run)

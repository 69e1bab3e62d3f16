"""Contexts, blocks and queries of one model, shared by the repair experiments; measures one prefill or repair at a time.

Every measurement starts from the same resident context (system prompt and conversation), works in a sequence of its
own, and reads two probes: `query`, behind the user's query, and `block_end`, behind the block's last token, which is
decoded again by itself on every side.
"""
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.compiled import compiled_blocks
from nexus.blocks import block_split, read_cells
from nexus.config import ROOT, Config
from nexus.ensemble import left_contexts, load_preambles
from nexus.fidelity import divergence
from nexus.model_tuple import context_options
from nexus.prompt import block_tokens, conversation_tokens, query_tokens, system_tokens
from nexus.repair import Arm, Place, place_repaired
from nexus.runtime import Model, Runtime
from nexus.splice import Resident, Splicer
from nexus.workload import Workload, select

PROBES = ("query", "block_end")
CONTEXT, WORK = 0, 1


@dataclass(frozen=True)
class Reading:
    """Logits at both probes, and what it took to get the first of them."""

    logits: dict[str, np.ndarray]
    """Probe name to float32[n_vocab]."""
    ttft_ms: float
    """From the resident context to the logits behind the query, ms."""
    recomputed: int = 0
    """Tokens of the block that were decoded."""


class RepairBench:
    """One runtime with a resident context; blocks of `n_cases` tools, compiled behind each name in `behind`."""

    def __init__(self, cfg: Config, model: Model, workload: Workload, n_cases: int, behind: Sequence[str],
                 **context_overrides):
        self.cfg, self.model = cfg, model
        self.conversation = workload.conversation
        self.cases = select(workload.cases, n_cases)
        tools = {tool.name: tool for tool in workload.tools}
        self.system = system_tokens(model, cfg.workload.system_prompt)
        self.blocks = {case.id: block_tokens(model, tools[case.tool]) for case in self.cases}
        self.queries = {case.id: query_tokens(model, case.query) for case in self.cases}
        self.tools = {case.id: case.tool for case in self.cases}
        self.index = {case.id: i for i, case in enumerate(self.cases)}
        self.runtime = Runtime(model, context_options(cfg.runtime, **context_overrides))
        self.splicer = Splicer(self.runtime)
        self.behind = tuple(behind)
        preambles = load_preambles(ROOT / cfg.workload.preambles)
        lefts = {name: left_contexts(model, self.system, name, preambles) for name in behind}
        self.resident: dict[tuple[str, str], Resident] = {
            (name, case_id): self.splicer.hold(block)
            for name in behind
            for case_id, block in compiled_blocks(self.runtime, lefts[name], self.blocks).items()
        }
        self.n_past: int | None = None

    @property
    def position(self) -> int:
        """Where the block goes: behind system prompt and conversation."""
        return len(self.system) + self.n_past

    def enter(self, n_past: int) -> None:
        """Make system prompt and `n_past` tokens of conversation resident, from an empty cache."""
        if self.n_past != n_past:
            self.runtime.clear()
            self.runtime.decode(self.context(n_past), 0, CONTEXT, split=(len(self.system),))
            self.n_past = n_past

    def forget(self) -> None:
        """Empty the cache; the next `enter` decodes its context again."""
        self.runtime.clear()
        self.n_past = None

    def context(self, n_past: int) -> np.ndarray:
        """Token ids of system prompt and conversation, int32[len(system) + n_past]."""
        return np.concatenate([self.system, conversation_tokens(self.model, self.conversation, n_past)])

    def reference(self, case_id: str) -> tuple[Reading, np.ndarray]:
        """A full prefill with the split that every fidelity number is measured against, and its V.

        V is float16[n_layers, n_tokens, width] of the block's cells.
        """
        runtime, block = self.runtime, self.blocks[case_id]
        end = self.position + len(block)
        runtime.seq_cp(CONTEXT, WORK)
        try:
            start = time.perf_counter()
            block_end = runtime.decode(block, self.position, WORK, logits=True, split=block_split(len(block)))
            query = runtime.decode(self.queries[case_id], end, WORK, logits=True)
            ttft_ms = (time.perf_counter() - start) * 1e3
            values = read_cells(runtime, WORK, self.position, end)[1]
        finally:
            runtime.seq_rm(WORK)
        return Reading({"query": query, "block_end": block_end}, ttft_ms, len(block)), values

    def prefilled(self, case_id: str) -> Reading:
        """A prefill behind the resident context in one batch: how fast it is, and, by its split, the noise floor."""
        block = self.blocks[case_id]
        tokens = np.concatenate([block, self.queries[case_id]])
        self.runtime.seq_cp(CONTEXT, WORK)
        try:
            start = time.perf_counter()
            logits = self.runtime.decode(tokens, self.position, WORK, logits=True)
            ttft_ms = (time.perf_counter() - start) * 1e3
            return Reading({"query": logits, "block_end": self.block_end(block)}, ttft_ms, len(block))
        finally:
            self.runtime.seq_rm(WORK)

    def repaired(self, case_id: str, behind: str, arm: Arm, values: np.ndarray | None = None,
                 cold: bool = False) -> Reading:
        """The block spliced and repaired by `arm`; `values` are the reference's, for the oracle.

        `cold` begins with an empty cache and decodes the context, too, within the time.
        """
        place = self.place(case_id, behind, values)
        context = self.context(self.n_past)
        if cold:
            self.runtime.clear()
        else:
            self.runtime.seq_cp(CONTEXT, WORK)
        try:
            start = time.perf_counter()
            if cold:
                self.runtime.decode(context, 0, WORK)
            chosen = arm.select(place)
            logits = place_repaired(place, chosen, then=self.queries[case_id])
            ttft_ms = (time.perf_counter() - start) * 1e3
            return Reading({"query": logits, "block_end": self.block_end(place.tokens)}, ttft_ms, len(chosen))
        finally:
            self.runtime.seq_rm(WORK)

    def place(self, case_id: str, behind: str, values: np.ndarray | None = None) -> Place:
        """Where this case's block goes in WORK; the seed differs between cases and is the same in every run."""
        return Place(self.splicer, self.resident[behind, case_id], self.blocks[case_id], self.position, WORK,
                     seed=self.cfg.seed + self.index[case_id], true_values=values, compiled_behind=behind)

    def samples(self, case_id: str, reference: Reading, measured: Reading, **keys) -> list[dict]:
        """One row per probe: divergence from the reference, with the keys of the arm."""
        rows = []
        for probe in PROBES:
            found = divergence(reference.logits[probe], measured.logits[probe])
            rows.append({**keys, "n_past": self.n_past, "probe": probe, "case": case_id, "tool": self.tools[case_id],
                         "block_tokens": len(self.blocks[case_id]), "query_tokens": len(self.queries[case_id]),
                         "recomputed": measured.recomputed, "dkl_nats": found.kl_nats, "top1": found.top1,
                         "bit_identical": found.bit_identical, "ttft_ms": measured.ttft_ms})
        return rows

    def block_end(self, block: np.ndarray) -> np.ndarray:
        """Logits behind the block's last token, decoded again behind what WORK holds before it."""
        last = self.position + len(block) - 1
        self.runtime.seq_rm(WORK, last, -1)
        return self.runtime.decode(block[-1:], last, WORK, logits=True)

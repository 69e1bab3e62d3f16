"""Can a model choose from spliced tools? The tool that it calls among N, prefilled or each compiled alone and spliced.

Behind system prompt and conversation stand N tools and the user's query. Two readings of the choice: `automaton`, the
name under the automaton of the offered names behind the opening of a call, and `free`, what the model writes by itself,
so that no call at all is seen. Arms:

full                     a prefill; what every other arm is compared with, on the same queries
noise_floor              the same tokens, every tool in batches of its own
group                    system prompt and all tools are one prefix, the conversation stands behind it
bare, bare-no-reanchor   spliced one behind the other, with and without rotating the keys to their new positions
head-k, suffix-R(n), …   spliced, and repaired tool after tool (nexus/repair.py); R(n) is the published schedule
calibrated               repaired as the calibrated policy of this run says for the depth of each tool
identity                 depth 0: the first tool is spliced at its own anchor, the others are prefilled as in
                         noise_floor: every logit must have the same bits

All arms are measured at one point (N, depth), some along both axes. Times are warm (the conversation is resident, for
`group` the tools, too), of the first query of a set, arms in an order shuffled per set; `place_ms` is their part until
the last tool stands. With a single tool the automaton has nothing to choose, so that only the free reading is measured.
"""
from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from experiments import rows
from experiments.choice_bench import (ASK, CALIBRATED, FLOOR, FULL, GROUP, IDENTITY, PREFILLED, SYSTEM, WORK,
                                      ChoiceBench, ToolSet, Variant, points)
from nexus.branches import Branch, read_all
from nexus.call_reading import end_tokens, forced_name, free_call
from nexus.canonical import sha256_of
from nexus.cells import Cell
from nexus.config import Config
from nexus.fidelity import divergence
from nexus.model_tuple import tuple_of
from nexus.name_automaton import NameAutomaton, Vocabulary
from nexus.pipeline import cell_inputs, experiment_main, measure_cells, timed_cell_inputs, write_results
from nexus.registry import Tool
from nexus.routing_workload import RoutingCase

NAME = "spliced_choice"
AUTOMATON, FREE = "automaton", "free"


def variants(cfg: Config, n_tools: int, depth: int) -> list[Variant]:
    """What is measured at a point, prefills first."""
    section, averaged = cfg.spliced_choice, cfg.repair.compiled_behind
    main = section.at_n_tools, section.at_depth
    if (n_tools, depth) == main:
        spliced = [Variant(arm, behind) for behind in section.compiled_behind for arm in section.arms]
        spliced += [Variant(arm, averaged) for arm in section.averaged_arms]
        prefilled = PREFILLED
    else:
        spliced = [Variant(arm, SYSTEM if arm != CALIBRATED else averaged) for arm in section.axis_arms]
        prefilled = (FULL, GROUP)
    if depth == 0 and n_tools == main[0]:
        spliced.append(Variant(IDENTITY, SYSTEM))
    return list(dict.fromkeys([*(Variant(arm, None) for arm in prefilled), *spliced]))


class Bench:
    """Measures one variant on one set of tools at a time, and the times of all variants on one set."""

    def __init__(self, cfg: Config, out: Path):
        self.cfg, self.section = cfg, cfg.spliced_choice
        self.points = points(self.section)
        wanted = {variant.compiled_behind for point in self.points for variant in variants(cfg, *point)} - {None}
        self.bench = ChoiceBench(cfg, out, sorted(wanted))
        # A policy that was not calibrated prefills everything, which `full` is already.
        self.is_calibrated = bool(self.bench.policy.choices)
        self.vocabulary = Vocabulary.of(self.bench.model)
        self.stops = end_tokens(self.bench.model)
        self._reference: tuple[tuple, dict[str, np.ndarray]] | None = None
        self._warmed: tuple[int, int] | None = None

    def variants(self, n_tools: int, depth: int) -> list[Variant]:
        return [variant for variant in variants(self.cfg, n_tools, depth)
                if self.is_calibrated or variant.arm != CALIBRATED]

    def choice_cells(self) -> list[Cell]:
        """One cell per point, set and variant; those of one set stand side by side."""
        inputs = self._inputs(cell_inputs)
        cells = []
        for n_tools, depth in self.points:
            for index, set_ in enumerate(self.bench.sets(n_tools)):
                for variant in self.variants(n_tools, depth):
                    decoded = self.bench.n_tokens(set_) if variant.arm in PREFILLED else 90
                    decoded += depth if variant.arm == GROUP else 0
                    cells.append(Cell(self._point(inputs, n_tools, depth, index, set_) | self._arm(variant)
                                      | {"cases": [case.id for case in set_.cases]},
                                      weight=(decoded + 130 * len(set_.cases)) / 200,
                                      label=f"{n_tools} tools, depth {depth}, set {index}, {variant.arm}"))
        return cells

    def timed_cells(self) -> list[Cell]:
        """One cell per point and set, for as many sets as are timed; more trials than sets take sets again."""
        inputs = self._inputs(timed_cell_inputs)
        cells = []
        for n_tools, depth in self.points:
            sets = self.bench.sets(n_tools)
            for trial in range(self.section.n_timed):
                set_ = sets[trial % len(sets)]
                arms = [self._arm(variant) for variant in self.variants(n_tools, depth) if variant.arm != IDENTITY]
                cells.append(Cell(self._point(inputs, n_tools, depth, trial % len(sets), set_)
                                  | {"trial": trial, "arms": arms},
                                  weight=(3 * self.bench.n_tokens(set_) + depth + 120 * len(arms)) / 200,
                                  label=f"times: {n_tools} tools, depth {depth}, trial {trial}"))
        return cells

    def _inputs(self, of) -> dict:
        """What every cell depends on. How many queries, arms and points there are does not change a single one."""
        inputs = of(NAME, self.cfg, self.bench.model.sha256)
        inputs["config"]["spliced_choice"] = {"max_tokens": self.section.max_tokens}
        return inputs

    def _point(self, inputs: dict, n_tools: int, depth: int, index: int, set_: ToolSet) -> dict:
        names = self.bench.names(set_)
        texts = sha256_of([self.bench.tokens[name].tolist() for name in names])
        return {**inputs, "n_tools": n_tools, "depth": depth, "set": index, "tools": names, "tokens_sha256": texts}

    def _arm(self, variant: Variant) -> dict:
        policy = ([[choice.n_past, choice.arm] for choice in self.bench.policy.choices]
                  if variant.arm == CALIBRATED else None)
        return {"arm": variant.arm, "compiled_behind": variant.compiled_behind, "policy": policy}

    def choose(self, cell: Cell) -> list[dict]:
        """One sample per query of the set and reading."""
        variant, set_ = self._of(cell.inputs, cell.inputs)
        depth = cell.inputs["depth"]
        bench, is_reference = self.bench, variant.arm == FULL
        reference = {} if is_reference else self.reference(set_, depth, FLOOR if variant.arm == IDENTITY else FULL)
        samples = []
        with bench.entered(variant, set_, depth) as (position, recomputed):
            with self.asked(set_, position) as branches:
                readings = self.readings(set_, branches)
        for case, branch, read in zip(set_.cases, branches, readings, strict=True):
            found = divergence(reference.setdefault(case.id, branch.logits), branch.logits)
            facts = {"part": "choice", **{key: cell.inputs[key] for key in (*rows.CHOICE_KEYS, "set")},
                     "case": case.id, "wording": case.wording, "wanted": bench.label[case.tool],
                     "tools_tokens": bench.n_tokens(set_), "recomputed": recomputed, "dkl_nats": found.kl_nats,
                     "top1": found.top1, "bit_identical": found.bit_identical}
            samples += [facts | reading for reading in read]
        if is_reference:
            self._reference = self._key(set_, depth, FULL), reference
        return samples

    @contextlib.contextmanager
    def asked(self, set_: ToolSet, position: int) -> Iterator[list[Branch]]:
        """Each query of the set behind a copy of WORK, decoded by itself, for the length of the `with`."""
        runtime, branches = self.bench.runtime, []
        seqs = range(ASK, ASK + len(set_.cases))
        try:
            for seq, case in zip(seqs, set_.cases):
                query = self.bench.queries[case.id]
                runtime.seq_cp(WORK, seq)
                logits = runtime.decode(query, position, seq, logits=True)
                branches.append(Branch(seq, position + len(query), logits))
            yield branches
        finally:
            for seq in seqs:
                runtime.seq_rm(seq)

    def readings(self, set_: ToolSet, branches: list[Branch]) -> list[list[dict]]:
        """The readings of each query: free, and under the automaton where there is something to choose."""
        bench, runtime = self.bench, self.bench.runtime
        free = read_all(runtime, branches, [free_call(self.vocabulary, self.stops, self.section.max_tokens)
                                            for _ in branches])
        offered = dict(zip(bench.names(set_), set_.tools))
        read = [[self._reading(FREE, case, found.name, offered) | {"answer_tokens": found.n_tokens}]
                for case, found in zip(set_.cases, free)]
        if len(set_.tools) > 1:
            automaton = NameAutomaton(bench.names(set_), self.vocabulary)
            names = read_all(runtime, branches, [forced_name(bench.opening, automaton) for _ in branches])
            for readings, case, name in zip(read, set_.cases, names):
                readings.append(self._reading(AUTOMATON, case, name, offered) | {"answer_tokens": None})
        return read

    @staticmethod
    def _reading(reading: str, case: RoutingCase, name: str | None, offered: Mapping[str, Tool]) -> dict:
        tool = offered.get(name)
        return {"reading": reading, "correct": case.accepts(tool), "no_call": name is None,
                # Other words than an offered name are the model's own and may be other people's text.
                "unknown_tool": name is not None and tool is None, "chosen": name if tool else None}

    def reference(self, set_: ToolSet, depth: int, arm: str) -> dict[str, np.ndarray]:
        """Logits behind each query of the set after a prefill; kept until another is asked for."""
        key = self._key(set_, depth, arm)
        if self._reference is None or self._reference[0] != key:
            with self.bench.entered(Variant(arm, None), set_, depth) as (position, _):
                with self.asked(set_, position) as branches:
                    logits = {case.id: branch.logits for case, branch in zip(set_.cases, branches)}
            self._reference = key, logits
        return self._reference[1]

    def _key(self, set_: ToolSet, depth: int, arm: str) -> tuple:
        return depth, arm, tuple(self.bench.names(set_))

    def time(self, cell: Cell) -> list[dict]:
        """One sample per variant: the time from what is resident to the logits behind the set's first query."""
        inputs = cell.inputs
        n_tools, depth = inputs["n_tools"], inputs["depth"]
        listed = [self._of(inputs, arm) for arm in inputs["arms"]]
        if self._warmed != (n_tools, depth):
            for variant, set_ in listed:
                self.timed(variant, set_, depth)
            self._warmed = n_tools, depth
        samples = {}
        for i in np.random.default_rng([self.cfg.seed, n_tools, depth, inputs["trial"]]).permutation(len(listed)):
            variant, set_ = listed[i]
            place_ms, ttft_ms, recomputed = self.timed(variant, set_, depth)
            samples[i] = {"part": "time", "arm": variant.arm, "compiled_behind": variant.compiled_behind,
                          **{key: inputs[key] for key in ("n_tools", "depth", "set", "trial")},
                          "place_ms": place_ms, "ttft_ms": ttft_ms, "recomputed": recomputed,
                          "tools_tokens": self.bench.n_tokens(set_)}
        return [samples[i] for i in sorted(samples)]

    def timed(self, variant: Variant, set_: ToolSet, depth: int) -> tuple[float | None, float, int]:
        """(time until the tools stand, time to the first token, both ms; tokens of tools that were decoded).

        A prefill decodes tools and query in one call, as a server would, so that the first of them is None.
        """
        bench, runtime = self.bench, self.bench.runtime
        query, tools = bench.queries[set_.cases[0].id], np.concatenate(bench.texts(set_))
        if variant.arm not in PREFILLED:
            # At hand in the context's layout, as a server has them.
            bench.compiled(variant.compiled_behind, set_)
        with bench.context(variant, set_, depth) as position:
            place_ms, decoded = None, 0
            start = time.perf_counter()
            if variant.arm == FULL:
                runtime.decode(np.concatenate([tools, query]), position, WORK, logits=True)
                decoded = len(tools)
            else:
                if variant.arm != GROUP:
                    decoded = bench.place(variant, set_, position, depth)
                    position += len(tools)
                place_ms = (time.perf_counter() - start) * 1e3
                runtime.decode(query, position, WORK, logits=True)
            return place_ms, (time.perf_counter() - start) * 1e3, decoded

    def _of(self, point: Mapping, arm: Mapping) -> tuple[Variant, ToolSet]:
        return Variant(arm["arm"], arm["compiled_behind"]), self.bench.sets(point["n_tools"])[point["set"]]

    def close(self) -> None:
        self.bench.runtime.close()


def run(cfg: Config, out: Path) -> Path:
    """Path of the written artifact, `<out>/spliced_choice.json`; cells measured earlier are not measured again."""
    bench = Bench(cfg, out)
    try:
        samples = measure_cells(cfg, bench.choice_cells(), bench.choose, "spliced choice")
        samples += measure_cells(cfg, bench.timed_cells(), bench.time, "spliced choice, times")
    finally:
        bench.close()
    table = rows.spliced_choice(samples, cfg.seed, cfg.statistics.level)
    main = cfg.spliced_choice.at_n_tools, cfg.spliced_choice.at_depth
    metrics = {f"{row['arm']}.{row['compiled_behind'] or 'nothing'}.{row['reading']}":
               {"accuracy": row["accuracy"].value, "ttft_ms": row["ttft_ms"].value if row["ttft_ms"] else None}
               for row in table if (row["n_tools"], row["depth"]) == main}
    return write_results(NAME, cfg, out, tuple_=tuple_of(bench.bench.model, cfg.model), rows=table, samples=samples,
                         metrics=metrics, isa=bench.bench.splicer.isa)


if __name__ == "__main__":
    experiment_main(NAME, run)

"""Sets of tools in one context: prefilled, spliced and repaired, or as one cached prefix.

A set is N of the tools that the queries are about, in a seeded random order. The sets of one N share out all these
tools, and a query is asked among the set that holds its tool, so that queries of one set share its placement.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments.compiled import compiled_blocks
from nexus.block_arena import BlockArena
from nexus.blocks import BlockFile, block_split
from nexus.config import ROOT, Config, ConfigError
from nexus.ensemble import left_contexts, load_preambles
from nexus.in_context import call_instruction, call_opening, labels
from nexus.listing import load_listing
from nexus.model_tuple import context_options, open_model
from nexus.prompt import block_tokens, conversation_tokens, query_tokens, system_tokens
from nexus.registry import Tool
from nexus.repair import Arm, arm_of
from nexus.repair_policy import Schedule, default_policy
from nexus.routing_workload import RoutingCase, load_cases, registry_around
from nexus.runtime import Runtime
from nexus.splice import Splicer
from nexus.spliced_tools import CompiledTool, place_tools, place_unrotated
from nexus.workload import load_conversation

FULL, FLOOR, GROUP, IDENTITY = "full", "noise_floor", "group", "identity"
BARE, UNROTATED, SCHEDULE, CALIBRATED = "bare", "bare-no-reanchor", "suffix-R(n)", "calibrated"
# Nothing is spliced in these.
PREFILLED = (FULL, FLOOR, GROUP)
START, SYSTEM = "start", "system"
REMINDER = "Answer only with the call of one tool, in this form:"
# Queries stand in sequences from ASK on, at most so many at once.
MOST_CASES = 6
CONTEXT, WORK, ASK = 0, 1, 2


@dataclass(frozen=True)
class Variant:
    """An arm, and what its blocks were compiled behind; None where nothing is spliced."""

    arm: str
    compiled_behind: str | None


@dataclass(frozen=True)
class ToolSet:
    """Tools in the order of the context, and the queries that one of them answers."""

    tools: tuple[Tool, ...]
    cases: tuple[RoutingCase, ...]


class ChoiceBench:
    """One runtime, the tools' blocks in an arena, and the queries; `out` is the run's folder, which has the listing."""

    def __init__(self, cfg: Config, out: Path, behind: Sequence[str]):
        self.cfg, self.section = cfg, cfg.spliced_choice
        self.model = open_model(cfg.model)
        known = load_listing(cfg.registry, out / "registry.json").tools
        cases = [case for case in load_cases(ROOT / cfg.workload.routing.evaluation, known) if case.tool is not None]
        self.cases = cases[:self.section.n_queries]
        wanted = {case.tool for case in self.cases}
        self.pool = [tool for tool in known if tool.identity in wanted]
        self.label = {tool.identity: label for tool, label in zip(self.pool, labels(self.pool))}
        self.system = system_tokens(self.model, f"{cfg.workload.system_prompt}\n\n{call_instruction(self.model)}")
        self.opening = self.model.tokenize(call_opening(self.model))
        # The model must read the name that it is to write.
        self.tokens = {label: block_tokens(self.model, replace(tool, name=label))
                       for label, tool in zip(self.label.values(), self.pool)}
        # With the form again: as far back as the system prompt a small model does not heed it.
        form = call_instruction(self.model).partition("\n")[2]
        self.queries = {case.id: query_tokens(self.model, f"{case.query}\n\n{REMINDER}\n{form}") for case in self.cases}
        self.conversation = load_conversation(ROOT / cfg.workload.conversation)
        self._check_room()
        self.runtime = Runtime(self.model, context_options(cfg.runtime))
        self.splicer = Splicer(self.runtime)
        self.policy = default_policy(out / "calibrated_repair.json", self.model.sha256)
        self._compile(behind)
        self._depth: int | None = None
        # Names of the last set, and its tools by what they were compiled behind.
        self._held: tuple[list[str], dict[str, list[CompiledTool]]] = [], {}

    def sets(self, n_tools: int) -> list[ToolSet]:
        """The sets of `n_tools` tools (or all, where there are fewer) that hold the tool of a query."""
        order = [self.pool[i] for i in np.random.default_rng([self.cfg.seed, n_tools]).permutation(len(self.pool))]
        members: dict[tuple, list[RoutingCase]] = {}
        for case in self.cases:
            around = registry_around(order, case.tool, min(n_tools, len(order)))
            members.setdefault(tuple(tool.identity for tool in around), []).append(case)
        tools = {tool.identity: tool for tool in self.pool}
        return [ToolSet(tuple(tools[identity] for identity in group), tuple(cases[i:i + MOST_CASES]))
                for group, cases in members.items() for i in range(0, len(cases), MOST_CASES)]

    def names(self, set_: ToolSet) -> list[str]:
        """The names by which the tools are offered, in the order of the context."""
        return [self.label[tool.identity] for tool in set_.tools]

    def n_tokens(self, set_: ToolSet) -> int:
        """Tokens of all the set's tools."""
        return sum(map(len, self.texts(set_)))

    def texts(self, set_: ToolSet) -> list[np.ndarray]:
        """Token ids of each tool, int32[n] each, in the order of the context."""
        return [self.tokens[name] for name in self.names(set_)]

    def enter(self, depth: int) -> None:
        """Make system prompt and `depth` tokens of conversation what CONTEXT holds, and the cache hold nothing else."""
        if self._depth != depth:
            self._depth = None
            self.runtime.clear()
            self._decode(CONTEXT, self.system, self._turns(depth))
            self._depth = depth

    @contextlib.contextmanager
    def entered(self, variant: Variant, set_: ToolSet, depth: int) -> Iterator[tuple[int, int]]:
        """(position behind them, tokens of tools decoded) while WORK holds context and tools as the arm has them."""
        with self.context(variant, set_, depth) as position:
            recomputed = 0 if variant.arm == GROUP else self.place(variant, set_, position, depth)
            yield self.runtime.pos_max(WORK) + 1, recomputed

    @contextlib.contextmanager
    def context(self, variant: Variant, set_: ToolSet, depth: int) -> Iterator[int]:
        """The position behind what is resident before the arm does anything, in WORK for the length of the `with`.

        That is the conversation, and for `group` the tools before it, too, as in a prefix cache.
        """
        self.enter(depth)
        try:
            if variant.arm == GROUP:
                self._decode(WORK, self.system, np.concatenate(self.texts(set_)), self._turns(depth))
            else:
                self.runtime.seq_cp(CONTEXT, WORK)
            yield self.runtime.pos_max(WORK) + 1
        finally:
            self.runtime.seq_rm(WORK)

    def _decode(self, seq: int, *pieces: np.ndarray) -> None:
        pieces = [piece for piece in pieces if len(piece)]
        self.runtime.decode(np.concatenate(pieces), 0, seq, split=tuple(map(len, pieces)))

    def place(self, variant: Variant, set_: ToolSet, position: int, depth: int) -> int:
        """How many tokens were decoded, after the set's tools stand in WORK from `position` on, as the arm has them."""
        if variant.arm == FULL:
            self.runtime.decode(np.concatenate(self.texts(set_)), position, WORK)
            return self.n_tokens(set_)
        if variant.arm in (FLOOR, IDENTITY):
            return self._place_in_pieces(variant, set_, position)
        tools = self.compiled(variant.compiled_behind, set_)
        if variant.arm == UNROTATED:
            return place_unrotated(self.splicer, tools, position, WORK)
        return place_tools(self.splicer, tools, position, WORK, self._arm_at(variant.arm), n_past=depth,
                           seed=self.cfg.seed)

    def _place_in_pieces(self, variant: Variant, set_: ToolSet, position: int) -> int:
        """Every tool in batches of its own, as it was compiled; as identity control the first one is spliced."""
        decoded = 0
        for index, tokens in enumerate(self.texts(set_)):
            if variant.arm == IDENTITY and index == 0:
                self.splicer.place(self.compiled(variant.compiled_behind, set_)[0].resident, position, WORK)
            else:
                self.runtime.decode(tokens, position, WORK, split=block_split(len(tokens)))
                decoded += len(tokens)
            position += len(tokens)
        return decoded

    def compiled(self, behind: str, set_: ToolSet) -> list[CompiledTool]:
        """The set's tools ready to be placed: held in the context's layout, and rotated from the arena's originals."""
        names = self.names(set_)
        if self._held[0] != names:
            self._held = names, {}
        held = self._held[1]
        if behind not in held:
            held[behind] = [CompiledTool(self.splicer.hold(self.arena.view(self._handles[behind, name])),
                                         self.tokens[name]) for name in names]
        return held[behind]

    def _arm_at(self, name: str):
        if name == CALIBRATED:
            return self.policy.arm
        if name == SCHEDULE:
            repair = self.cfg.repair
            return Schedule(repair.max_splice_pos, repair.recompute_pct, repair.recompute_full_mult,
                            repair.enable_deep_splice).arm
        arm: Arm = arm_of("none" if name == BARE else name)
        return lambda n_past: arm

    def _turns(self, depth: int) -> np.ndarray:
        return conversation_tokens(self.model, self.conversation, depth)

    def _compile(self, behind: Sequence[str]) -> None:
        preambles = load_preambles(ROOT / self.cfg.workload.preambles)
        files: dict[tuple[str, str], BlockFile] = {}
        for name in behind:
            lefts = ([self.system[:0]] if name == START
                     else left_contexts(self.model, self.system, name, preambles))
            found: Mapping[str, BlockFile] = compiled_blocks(self.runtime, lefts, self.tokens)
            files |= {(name, label): file for label, file in found.items()}
        # What a block does not need of its power of two stays free, and the system gives pages to what is written only.
        largest = max((file.path.stat().st_size for file in files.values()), default=1)
        self.arena = BlockArena(1 << (2 * largest * max(1, len(files)) - 1).bit_length(), runtime=self.runtime)
        self._handles = {key: self.arena.put(file) for key, file in files.items()}

    def _check_room(self) -> None:
        section, cells = self.section, self.cfg.runtime.n_ctx
        answer = max(map(len, self.queries.values()), default=0) + len(self.opening) + section.max_tokens
        for n_tools, depth in points(section):
            sets, context = self.sets(n_tools), len(self.system) + depth
            prompt = context + max(map(self.n_tokens, sets))
            # `group` stands beside the conversation of the other arms.
            needed = context + prompt + answer * max(len(set_.cases) for set_ in sets)
            if needed > cells or prompt + answer > self.model.n_ctx_train:
                raise ConfigError(f"spliced_choice: {n_tools} tools behind {depth} tokens need {needed} cells and "
                                  f"runtime.n_ctx is {cells} (the model's own window {self.model.n_ctx_train}); lower "
                                  "spliced_choice.n_tools or depths, or raise runtime.n_ctx")


def points(section) -> list[tuple[int, int]]:
    """(number of tools, depth in tokens) of what is measured: the axes cross at the main point, which comes first."""
    main = section.at_n_tools, section.at_depth
    return list(dict.fromkeys([main, *((n_tools, main[1]) for n_tools in section.n_tools),
                               *((main[0], depth) for depth in section.depths)]))

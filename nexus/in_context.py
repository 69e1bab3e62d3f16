"""Baselines in which the model picks a tool from its prompt: every schema is prefilled, and the name is decoded.

Two systems are one call with other tools: concatenate-all gives the whole registry, RAG-MCP the K tools that retrieval
found. The name is chosen greedily under the automaton of the offered names, so an answer is always one of them.
"""
from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nexus.name_automaton import NameAutomaton, Vocabulary, spelling
from nexus.prompt import block_tokens, query_tokens, system_tokens
from nexus.registry import Tool
from nexus.runtime import Model, Runtime

CALL_BODY = '{"name": "'
CALL_EXAMPLE = '{"name": <function-name>, "arguments": <args-json-object>}'
# What the model's own template writes before and behind a call, by a mark that the template holds.
CALL_MARKS = {"<tool_call>": ("<tool_call>\n", "\n</tool_call>"), "[TOOL_CALLS]": ("[TOOL_CALLS][", "]")}


class InContextError(ValueError):
    """A choice cannot be made as asked; the message names the field, the value and the remedy."""


@dataclass(frozen=True)
class Choice:
    """Which tool the model picked from its prompt, and what that took."""

    tool: Tool | None
    """One of the offered tools; None only where the prompt overflows."""
    status: str
    """"ok", or "overflow": the prompt and a name do not fit the window, and nothing was decoded."""
    prompt_tokens: int
    """System prompt, all offered schemas, query and the opening of the call; also known on overflow."""
    resident_tokens: int
    """How many of them were in the cache when the time began."""
    ttft_ms: float | None
    """From the call, all tokens at hand, to the first token of the name. None on overflow."""
    decoded_tokens: int
    """Tokens of the name that were chosen, the first included. Ends as soon as one name is left."""
    names_considered: int


@dataclass(frozen=True)
class _Offer:
    """What is the same for each query over the same tools."""

    tools: tuple[Tool, ...]
    by_label: dict[str, Tool]
    prefix: np.ndarray
    automaton: NameAutomaton
    longest_name: int
    """Most tokens that a name and its terminator can take: their bytes."""


def labels(tools: Sequence[Tool]) -> list[str]:
    """The name by which each tool is offered and chosen, all different.

    That is its own name, or `server/name` for a name that several servers use (where one of them names no server, the
    bare name is its own). Raises InContextError for equal tools, and where labels still collide.
    """
    uses = Counter(tool.name for tool in tools)
    found = [f"{tool.server}/{tool.name}" if uses[tool.name] > 1 and tool.server is not None else tool.name
             for tool in tools]
    first: dict[str, Tool] = {}
    for tool, label in zip(tools, found):
        if label in first:
            raise InContextError(f"tools {first[label].identity} and {tool.identity} are both offered as {label!r}; "
                                 "offer each tool once, and rename a server where two tools read the same")
        first[label] = tool
    return found


def call_opening(model: Model) -> str:
    """How an answer that calls a tool begins, up to the quotation mark before the name.

    The family's mark of a call where the file's chat template has one, else a bare JSON object.
    """
    return _call_marks(model)[0] + CALL_BODY


def call_instruction(model: Model) -> str:
    """What tells the model how a call is written, in the form that `call_opening` begins.

    Without it a small model may take "name" for an argument of the tool, and rank words of the query first.
    """
    before, behind = _call_marks(model)
    return f"To call a tool, answer with a JSON object with its name and arguments:\n{before}{CALL_EXAMPLE}{behind}"


def _call_marks(model: Model) -> tuple[str, str]:
    template = model.native.chat_template()
    template = template if isinstance(template, str) else bytes(template).decode("utf-8", "replace")
    return next((around for mark, around in CALL_MARKS.items() if mark in template), ("", ""))


class InContextChooser:
    """Lets the model pick a tool by name from all offered schemas.

    The prompt is the system prompt with `instruction` below it, one message per tool, the user's query, the assistant's
    header and `call_opening`. System prompt and tools stay in sequence `prefix_seq` while consecutive queries offer the
    same tools in the same order; each query continues a copy of it in `work_seq`, which is empty again afterwards, also
    after an error. Other tools replace what follows the system prompt (all of it in models with a sliding window). Both
    sequences belong to the chooser until `forget`, which empties them; leaving a `with` block does the same.
    """

    def __init__(self, runtime: Runtime, system_prompt: str, *, instruction: str | None = None,
                 window: int | None = None, prefix_seq: int = 0, work_seq: int = 1,
                 vocabulary: Vocabulary | None = None):
        """`instruction`: how a call is written; None takes `call_instruction`, "" adds nothing to the system prompt.

        `window`: most tokens of prompt and name; None takes the smaller of n_ctx and the model's n_ctx_train.

        `vocabulary` saves sorting it again. Raises InContextError for a runtime or sequences that cannot be used.
        """
        options = runtime.options
        if not options.kv_unified:
            raise InContextError("kv_unified is false; the tools' cells are shared between sequences: set it to true")
        for field, seq in (("prefix_seq", prefix_seq), ("work_seq", work_seq)):
            if not 0 <= seq < runtime.scratch_seq:
                raise InContextError(f"{field} is {seq}; give 0 … {runtime.scratch_seq - 1}, or raise n_seq_max")
        if prefix_seq == work_seq:
            raise InContextError(f"prefix_seq and work_seq are both {work_seq}; give two sequences")
        if window is not None and not 0 < window <= options.n_ctx:
            raise InContextError(f"window is {window}; give 1 … n_ctx = {options.n_ctx}")
        self.runtime, self.model = runtime, runtime.model
        self.window = window or min(options.n_ctx, self.model.n_ctx_train)
        self._prefix_seq, self._work_seq = prefix_seq, work_seq
        self.vocabulary = vocabulary or Vocabulary.of(self.model)
        instruction = call_instruction(self.model) if instruction is None else instruction
        self._system = system_tokens(self.model, "\n\n".join(filter(None, (system_prompt, instruction))))
        self._opening = self.model.tokenize(call_opening(self.model))
        self._offer: _Offer | None = None
        self._resident = self._system[:0]

    def __enter__(self) -> InContextChooser:
        return self

    def __exit__(self, *_) -> None:
        self.forget()

    def forget(self) -> None:
        """Empty both sequences, so that the next choice prefills everything."""
        self._resident = self._system[:0]
        self.runtime.seq_rm(self._work_seq)
        self.runtime.seq_rm(self._prefix_seq)

    def prompt_tokens(self, tools: Sequence[Tool], query: str) -> int:
        """Tokens of the prompt of such a choice, without making it."""
        return len(self._offered(tools).prefix) + len(self._asked(query))

    def choose(self, tools: Sequence[Tool], query: str) -> Choice:
        """The model's choice among `tools` (the order of their schemas in the prompt) for one query.

        A prompt that does not fit the window is told by its status and not cut. Raises InContextError for no tools or
        equal ones, AutomatonError for a name that cannot be written, RuntimeFailure where llama.cpp fails.
        """
        offer, asked = self._offered(tools), self._asked(query)
        n_prompt, n_names = len(offer.prefix) + len(asked), len(offer.tools)
        if n_prompt + offer.longest_name > self.window:
            return Choice(None, "overflow", n_prompt, 0, None, 0, n_names)
        start = time.perf_counter()
        resident = self._reside(offer.prefix)
        try:
            self.runtime.seq_cp(self._prefix_seq, self._work_seq)
            logits = self.runtime.decode(asked, len(offer.prefix), self._work_seq, logits=True)
            token = offer.automaton.best(logits, offer.automaton.start())
            ttft_ms = (time.perf_counter() - start) * 1e3
            label, decoded = self._name(offer.automaton, token, n_prompt)
        finally:
            self.runtime.seq_rm(self._work_seq)
        return Choice(offer.by_label[label], "ok", n_prompt, resident, ttft_ms, decoded, n_names)

    def _name(self, automaton: NameAutomaton, token: int, pos: int) -> tuple[str, int]:
        """The name that begins with `token`, and how many tokens were chosen until it was the only one left."""
        state, chosen = automaton.advance(automaton.start(), token), 1
        while (label := automaton.decided(state)) is None:
            logits = self.runtime.decode(np.array([token]), pos + chosen - 1, self._work_seq, logits=True)
            token = automaton.best(logits, state)
            state, chosen = automaton.advance(state, token), chosen + 1
        return label, chosen

    def _reside(self, prefix: np.ndarray) -> int:
        """Make the prefix what `prefix_seq` holds; how many of its tokens were there already."""
        runtime, seq, n_system = self.runtime, self._prefix_seq, len(self._system)
        if runtime.pos_max(seq) != len(self._resident) - 1:
            # Someone cleared the context, or used the sequence.
            self.forget()
        if np.array_equal(self._resident, prefix):
            return len(prefix)
        # With a sliding window, cells of the system prompt may have been given away behind a longer prefix.
        kept = n_system if len(self._resident) and self.model.n_swa == 0 else 0
        self._resident = self._system[:0]
        try:
            runtime.seq_rm(seq, kept, -1)
            # The system prompt is always a batch of its own: what is kept of it does not change the tools' bits.
            runtime.decode(prefix[kept:], kept, seq, split=() if kept else (n_system,))
        except BaseException:
            self.forget()
            raise
        self._resident = prefix
        return kept

    def _asked(self, query: str) -> np.ndarray:
        return np.concatenate([query_tokens(self.model, query), self._opening])

    def _offered(self, tools: Sequence[Tool]) -> _Offer:
        tools = tuple(tools)
        if self._offer is None or self._offer.tools != tools:
            if not tools:
                raise InContextError("tools: the list is empty; offer at least one")
            names = labels(tools)
            # The model must read the name that it is to write.
            blocks = [block_tokens(self.model, replace(tool, name=name)) for tool, name in zip(tools, names)]
            self._offer = _Offer(tools, dict(zip(names, tools)), np.concatenate([self._system, *blocks]),
                                 NameAutomaton(names, self.vocabulary), max(len(spelling(name)) for name in names) + 1)
        return self._offer

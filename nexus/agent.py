"""One turn of an agent: the query is routed to a tool, and the tool's arguments are filled from its signature.

Everything that touches a runtime happens under its one re-entrant lock, so that turns of several threads give what
one thread would give. A model behind a text interface takes Path B: it is routed for locally, and gets the signature
and the pruned window as text.
"""
from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nexus.arguments import Filled, problems_of
from nexus.blocks import BlockError, block_split
from nexus.prompt import block_tokens
from nexus.registry import Tool, strict_json
from nexus.repair import Place, RepairError
from nexus.repair_policy import Policy, splice_with
from nexus.route import Route, Router
from nexus.runtime import Runtime
from nexus.sidecar import Schema, Sidecar, description, instructions, lock_of
from nexus.signature import Signature, rough_tokens, signature_of
from nexus.splice import Placement, Resident, Splicer, SpliceRefused
from nexus.window import prune

if TYPE_CHECKING:
    from nexus.config import Arguments

FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)


class AgentError(ValueError):
    """An agent cannot be made like this; the message names what and the remedy."""


class Remote(Protocol):
    """A model behind a text interface."""

    def complete(self, messages: list[dict[str, str]], schema: Mapping[str, Any]) -> str:
        """The arguments object as JSON text; `schema` is for services that constrain their answers."""


class Filler(Protocol):
    """What fills a tool's arguments: the sidecar, or Path B."""

    lock: threading.RLock

    def signature(self, tool: Tool) -> Signature: ...

    def fill(self, tool: Tool, query: str, history: Sequence[Mapping[str, Any]] = (),
             schema: Schema = "signature") -> Filled: ...


@dataclass(frozen=True)
class Turn:
    """What one turn came to."""

    route: Route | None
    """How the tool was found; None where it was given."""
    tool: Tool | None
    """None where the router found none or abstained: then nothing was filled."""
    reason: str | None
    """Why there is no tool."""
    signature: Signature | None
    filled: Filled | None
    placement: Placement | None
    """How the tool's block got into the main sequence; None without one."""

    @property
    def call(self) -> dict[str, Any] | None:
        """The call as plain data: {"server", "tool", "arguments", "valid", "problems"}; None without a tool."""
        if self.tool is None:
            return None
        return {"server": self.tool.server, "tool": self.tool.name, "arguments": self.filled.arguments,
                "valid": self.filled.valid, "problems": list(self.filled.problems)}


@dataclass(frozen=True)
class MainContext:
    """The live sequence of a conversation, behind which the tool's block is put, for the turns that follow.

    The block is spliced and repaired as the policy says. What is refused, and what has no block, is prefilled.
    """

    runtime: Runtime
    seq: int
    policy: Policy
    splicer: Splicer | None
    """None for a model that cannot be spliced."""
    resident: Callable[[Tool], Resident | None]
    """The tool's compiled block, held by `splicer`; None where there is none."""
    compiled_behind: str = "system"
    """What these blocks were compiled behind (nexus/ensemble.py)."""

    def place(self, tool: Tool) -> Placement:
        """How the tool's block came to stand behind the sequence. RuntimeFailure leaves the sequence as it was."""
        n_past, tokens = self.runtime.pos_max(self.seq) + 1, block_tokens(self.runtime.model, tool)
        try:
            if self.splicer is None:
                raise SpliceRefused("no splicer for this model")
            if self.policy.arm(n_past).name == "full":
                raise SpliceRefused(f"the policy prefills at depth {n_past}")
            block = self.resident(tool)
            if block is None:
                raise SpliceRefused("the tool has no compiled block")
            splice_with(self.policy, Place(self.splicer, block, tokens, n_past, self.seq,
                                           compiled_behind=self.compiled_behind), n_past)
            return Placement("splice", None)
        except (SpliceRefused, RepairError, BlockError) as refusal:
            self.runtime.decode(tokens, n_past, self.seq, split=block_split(len(tokens)))
            return Placement("prefill", str(refusal))


class PathB:
    """Fills arguments with a model behind a text interface."""

    def __init__(self, remote: Remote, options: Arguments, system_prompt: str,
                 count_tokens: Callable[[str], int] = rough_tokens):
        """`options` is the section `arguments` of the configuration; `count_tokens` counts for its budgets."""
        self.remote, self.options, self.system_prompt = remote, options, system_prompt
        self.count_tokens = count_tokens
        self.lock = lock_of(remote)

    def signature(self, tool: Tool) -> Signature:
        return signature_of(tool, self.options.signature_tokens, self.count_tokens,
                            described_tokens=self.options.described_tokens)

    def messages(self, tool: Tool, query: str, history: Sequence[Mapping[str, Any]] = (),
                 schema: Schema = "signature") -> list[dict[str, str]]:
        """What the model is sent: instructions with the tool, the pruned window, the query. Raises WindowError."""
        options = self.options
        window = prune(history, options.window_tokens, options.recent_turns, options.surrogate_chars,
                       lambda message: self.count_tokens(message["content"]))
        # An interface takes a tool's message only behind the model's own call, which the window may have dropped.
        said = [message if message["role"] != "tool" else
                {"role": "user", "content": f"Result of {message.get('name', 'the tool')}:\n{message['content']}"}
                for message in window]
        system = instructions(self.system_prompt) + description(tool, self.signature(tool), schema)
        return [{"role": "system", "content": f"{system}\n\nAnswer with the JSON object of the arguments of "
                                              f"{tool.name} and nothing else."},
                *({"role": message["role"], "content": message["content"]} for message in said),
                {"role": "user", "content": query}]

    def fill(self, tool: Tool, query: str, history: Sequence[Mapping[str, Any]] = (),
             schema: Schema = "signature") -> Filled:
        """The arguments that the model answered with, checked against the tool's schema; what it raises is raised.

        Token counts are those of `count_tokens`; there is no time of a first token but that of the whole answer.
        """
        with self.lock:
            messages = self.messages(tool, query, history, schema)
            begin = time.perf_counter()
            answer = self.remote.complete(messages, tool.input_schema)
            total_ms = (time.perf_counter() - begin) * 1e3
        arguments, problems = parsed(answer, tool.input_schema)
        return Filled(arguments, answer, not problems, problems,
                      sum(self.count_tokens(message["content"]) for message in messages), self.count_tokens(answer),
                      0, (), total_ms, total_ms)


def parsed(answer: str, schema: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(arguments, what is wrong with them) of a model's free answer; {} where it holds no JSON object."""
    fenced = FENCED.search(answer)
    try:
        value = strict_json(fenced[1] if fenced else answer)
    except ValueError as error:
        return {}, (f"the answer is no JSON: {error}",)
    if not isinstance(value, dict):
        return {}, (f"the answer is {json.dumps(value)[:40]} and no JSON object",)
    return value, problems_of(value, schema)


class Agent:
    """Routes queries and fills the arguments of the tools that they mean."""

    def __init__(self, router: Router, filler: Filler, *, main: MainContext | None = None):
        """`main` gets each tool's block. Raises AgentError where it belongs to another runtime than the sidecar."""
        if main is not None and not (isinstance(filler, Sidecar) and filler.runtime is main.runtime):
            raise AgentError("main: its runtime is not the sidecar's; give both one runtime, or leave it out for a "
                             "remote model")
        if main is not None and main.seq in (filler.seq, filler.head_seq):
            raise AgentError(f"main.seq is {main.seq}, which the sidecar uses; give the conversation its own sequence")
        self.router, self.filler, self.main = router, filler, main

    def turn(self, query: str, history: Sequence[Mapping[str, Any]] = (), tool: Tool | None = None) -> Turn:
        """The turn for one query; a given `tool` is not looked for. The query alone decides the route.

        Where no tool fits, the turn says why and nothing is filled. Whatever is raised, by the router, the window, the
        model, or Ctrl-C, leaves every sequence as it was.
        """
        with self.filler.lock:
            route = None
            if tool is None:
                # Encoders are not to be shared, and a router may serve several runtimes.
                with lock_of(self.router):
                    route = self.router.route(query)
                if route.tool is None:
                    return Turn(route, None, _reason(route, len(self.router.tools)), None, None, None)
                tool = route.tool
            placement = None
            end = None if self.main is None else self.main.runtime.pos_max(self.main.seq) + 1
            try:
                if self.main is not None:
                    placement = self.main.place(tool)
                filled = self.filler.fill(tool, query, history)
            except BaseException:
                if self.main is not None:
                    # An interrupted splice has left its cells there.
                    self.main.runtime.seq_rm(self.main.runtime.scratch_seq)
                    self.main.runtime.seq_rm(self.main.seq, end, -1)
                raise
            return Turn(route, tool, None, self.filler.signature(tool), filled, placement)


def _reason(route: Route, n_tools: int) -> str:
    if not route.candidates:
        return f"no tool of {n_tools} shares anything with the query"
    return f"probably no tool fits: the nearest has a cosine of {route.best_cosine:.2f}"

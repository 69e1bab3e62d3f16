"""Requests that agents send to one model: conversations that grow step by step, interleaved, branched and restarted.

Each of `n_sessions` users has `n_turns` turns, and holds one conversation at a time. All conversations begin with the
same system prompt and tools. A turn is the user's message and as many steps as the model calls tools; every step is one
request, whose prompt is everything so far: the call and the tool's result of the step before stand at its end. Then the
answer is part of the conversation. What makes prefixes hard to keep, by chances of `Traffic`:

switch      another conversation's request comes next, although the turn is not over; at its end any may come next
retry       the last call and result, or the user's message, are taken back and written anew: a branch
new         a user begins a turn in a conversation of its own
sub-agent   a call is answered by an agent with a system prompt of its own, its own steps, and a short report
compaction  a conversation that outgrows its window goes on with a summary in place of all but its last exchange

Lengths are log-normal around a median. Texts are cut from a list of token ids, such as a model's tokens of some prose.
The model's own output is not simulated: what it wrote comes back as part of the next prompt, and is new text there.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Kind = Literal["turn", "step", "retry", "subagent"]
# Of the logarithm of a length: one in twenty is 3.7 times the median or more. Longer than MOST medians is none.
SPREAD = 0.8
MOST = 8


class TraceError(ValueError):
    """A trace cannot be made of these parameters; the message names the parameter, the value and the remedy."""


@dataclass(frozen=True)
class Traffic:
    """How much of what agents do; medians in tokens, chances per occasion.

    The defaults are a few people at work with one local model and tools that read code and issues: one or two calls
    for most requests, results that outweigh what people write, one in ten things taken back, started over or delegated.
    """

    n_sessions: int = 6
    n_turns: int = 12
    system_tokens: int = 500
    """System prompt and tools, which begin every conversation; exact."""
    subagent_tokens: int = 250
    """The same of sub-agents; exact."""
    user_tokens: int = 40
    call_tokens: int = 30
    result_tokens: int = 150
    answer_tokens: int = 80
    summary_tokens: int = 200
    context_tokens: int = 4096
    """The longest prompt; exact."""
    p_call: float = 0.6
    """That a step calls a tool, and so another step follows: 2.5 requests in a turn, on average."""
    p_switch: float = 0.3
    p_retry: float = 0.1
    p_new: float = 0.1
    p_subagent: float = 0.1
    """Of a call."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.startswith("p_") and not 0 <= value < 1:
                raise TraceError(f"{name} is {value}; a chance is 0 or more, and below 1")
            if not name.startswith("p_") and value < 1:
                raise TraceError(f"{name} is {value}; give at least 1")
        longest = max(self.system_tokens, self.subagent_tokens)
        if longest >= self.context_tokens:
            raise TraceError(f"context_tokens is {self.context_tokens}; more than the {longest} tokens that begin "
                             "every prompt are needed")


@dataclass(frozen=True)
class Request:
    """One prompt, in the order of arrival."""

    session: int
    kind: Kind
    tokens: np.ndarray
    """int32[n]"""
    n_common: int
    """How many of them begin every prompt of this kind of agent."""


@dataclass
class _Conversation:
    session: int
    opening: np.ndarray
    turns_left: int = 0
    parts: list[np.ndarray] = field(default_factory=list)
    exchange: int = 0
    """Where the last exchange begins in `parts`."""
    in_turn: bool = False


def agent_trace(traffic: Traffic, source: np.ndarray, seed: int) -> list[Request]:
    """All requests of a trace. Equal arguments give equal requests.

    `source` are token ids, int32[n], to cut texts from. Raises TraceError for one that is too short for the openings.
    """
    return list(_Agents(traffic, source, seed).requests())


class _Agents:
    def __init__(self, traffic: Traffic, source: np.ndarray, seed: int):
        self.traffic, self.source = traffic, np.asarray(source, np.int32)
        longest = max(traffic.system_tokens, traffic.subagent_tokens)
        if len(self.source) <= longest:
            raise TraceError(f"source has {len(self.source)} tokens; more than {longest} are needed")
        self.rng = np.random.default_rng(seed)
        self.system, self.subsystem = self.cut(traffic.system_tokens), self.cut(traffic.subagent_tokens)

    def requests(self) -> Iterator[Request]:
        traffic, rng = self.traffic, self.rng
        conversations = [_Conversation(session, self.system, traffic.n_turns) for session in range(traffic.n_sessions)]
        current = None
        while waiting := [c for c in conversations if c.in_turn or c.turns_left]:
            if current is None or not current.in_turn or rng.random() < traffic.p_switch:
                current = waiting[rng.integers(len(waiting))]
            yield from self.step(current)

    def step(self, conversation: _Conversation) -> Iterator[Request]:
        """One request of a conversation, with its retry if there is one, and the sub-agent that it calls."""
        traffic, rng = self.traffic, self.rng
        kind: Kind = "step" if conversation.in_turn else "turn"
        if kind == "turn":
            conversation.turns_left -= 1
            conversation.in_turn = True
            if rng.random() < traffic.p_new:
                conversation.parts.clear()
            self.say(conversation, [traffic.user_tokens])
        yield self.request(conversation, kind)
        if rng.random() < traffic.p_retry:
            taken_back = conversation.parts[conversation.exchange:]
            del conversation.parts[conversation.exchange:]
            self.say(conversation, [len(part) for part in taken_back])
            yield self.request(conversation, "retry")
        if rng.random() >= traffic.p_call:
            conversation.parts.append(self.text(traffic.answer_tokens))
            conversation.in_turn = False
        elif rng.random() < traffic.p_subagent:
            yield from self.subagent(conversation.session)
            self.say(conversation, [traffic.call_tokens, traffic.answer_tokens])
        else:
            self.say(conversation, [traffic.call_tokens, traffic.result_tokens])

    def subagent(self, session: int) -> Iterator[Request]:
        """All requests of a sub-agent, which runs to its end before its caller goes on."""
        traffic = self.traffic
        conversation = _Conversation(session, self.subsystem)
        self.say(conversation, [traffic.user_tokens])
        yield self.request(conversation, "subagent")
        while self.rng.random() < traffic.p_call:
            self.say(conversation, [traffic.call_tokens, traffic.result_tokens])
            yield self.request(conversation, "subagent")

    def say(self, conversation: _Conversation, medians: list[int]) -> None:
        """Append one exchange."""
        conversation.exchange = len(conversation.parts)
        conversation.parts += [self.text(median) for median in medians]

    def request(self, conversation: _Conversation, kind: Kind) -> Request:
        room = self.traffic.context_tokens - len(conversation.opening)
        if sum(map(len, conversation.parts)) > room:
            conversation.parts[:conversation.exchange] = [self.text(self.traffic.summary_tokens)]
            conversation.exchange = 1
            # A window that is small beside its texts holds the last exchange in part.
            over = sum(map(len, conversation.parts)) - room
            for i, part in enumerate(conversation.parts):
                cut = min(max(over, 0), len(part) - 1)
                conversation.parts[i], over = part[:len(part) - cut], over - cut
        tokens = np.concatenate([conversation.opening, *conversation.parts])[:self.traffic.context_tokens]
        return Request(conversation.session, kind, tokens, len(conversation.opening))

    def text(self, median: int) -> np.ndarray:
        """A text around this length."""
        length = median * min(np.exp(SPREAD * self.rng.standard_normal()), MOST)
        return self.cut(int(np.clip(round(length), 1, len(self.source) - 1)))

    def cut(self, n_tokens: int) -> np.ndarray:
        begin = self.rng.integers(len(self.source) - n_tokens + 1)
        return self.source[begin:begin + n_tokens]

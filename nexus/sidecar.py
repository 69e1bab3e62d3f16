"""The sidecar: a tool's arguments, filled in a temporary sequence at position 0 that is gone afterwards.

The prompt is the system prompt with the tool's signature, the pruned window of the conversation, the query, and the
call as far as it is known: its opening with the tool's name, so that the model writes the arguments object alone. What
stands before the tool is the same for all calls and may be kept.
"""
from __future__ import annotations

import functools
import json
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nexus.arguments import Filled, fill
from nexus.in_context import call_opening
from nexus.name_automaton import pieces_of
from nexus.prompt import BLOCK_ROLES, TOOL_HEADING
from nexus.registry import Tool, tool_text
from nexus.runtime import Model, Runtime
from nexus.signature import Signature, signature_of
from nexus.window import prune

if TYPE_CHECKING:
    from nexus.config import Arguments
    from nexus.constrain import Grammar, Grammars, Walk
    from nexus.schema_grammar import Relaxation

Schema = Literal["signature", "full"]
INSTRUCTION = ("Call the tool with arguments taken from the request and the conversation. Give only the arguments that "
               "are stated there, with their exact values; leave out every optional argument that is not mentioned. "
               "Never make up a value.")
# Stands in for a text while the frame around it is asked from the chat template.
CONTENT = "nexus"
# What closes a call behind its arguments, see nexus/in_context.py.
CALL_ENDS = (b"}", b"}]")

_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_guard = threading.Lock()
# What the kept sequences of each runtime hold.
_heads: weakref.WeakKeyDictionary[Runtime, dict[int, np.ndarray]] = weakref.WeakKeyDictionary()


class SidecarError(ValueError):
    """Arguments cannot be filled as asked; the message names the field, the value and the remedy."""


def lock_of(shared: Any) -> threading.RLock:
    """The one re-entrant lock of an object that threads share, such as a Runtime: whoever uses it holds this."""
    with _guard:
        return _locks.setdefault(shared, threading.RLock())


def instructions(system_prompt: str) -> str:
    """What is the same for every call: the prompt, what is expected, and the heading of the tool."""
    return "\n\n".join(filter(None, (system_prompt, INSTRUCTION, TOOL_HEADING)))


def description(tool: Tool, signature: Signature, schema: Schema) -> str:
    """The tool as the model reads it: its signature, or its full schema. Raises SidecarError for another `schema`."""
    if schema not in ("signature", "full"):
        raise SidecarError(f"schema is {schema!r}; give \"signature\" or \"full\"")
    return signature.text if schema == "signature" else tool_text(tool)


class Closings:
    """Of a vocabulary, the tokens that close an object together with the call around it, such as `"}}`.

    The grammar is that of the object alone and refuses them. A model that would close the call there must not be led
    to its second choice, which is mostly a comma and an argument that nobody has asked for.
    """

    def __init__(self, pieces: Sequence[bytes]):
        """`pieces` are the bytes of each token, by id."""
        ids = {piece: token for token, piece in enumerate(pieces) if piece}
        pairs = [(token, ids[inner]) for token, piece in enumerate(pieces)
                 for outer in CALL_ENDS if piece.rstrip().endswith(b"}" + outer)
                 and (inner := piece.rstrip().removesuffix(outer)) in ids]
        self.tokens = np.array([token for token, _ in pairs], dtype=int)
        self.inner = np.array([inner for _, inner in pairs], dtype=int)

    def fold(self, logits: np.ndarray) -> None:
        """Add the probability of each such token to that of the token which closes the object alone, in place."""
        np.logaddexp.at(logits, self.inner, logits[self.tokens])


@dataclass(frozen=True)
class Enclosed:
    """A grammar whose object stands within a call, with the model's `Closings`."""

    grammar: Grammar
    closings: Closings

    @property
    def schema(self) -> Mapping[str, Any]:
        return self.grammar.schema

    @property
    def relaxed(self) -> tuple[Relaxation, ...]:
        return self.grammar.relaxed

    def start(self, max_tokens: int | None = None) -> EnclosedWalk:
        return EnclosedWalk(self.grammar.start(max_tokens), self.closings)


class EnclosedWalk:
    """As the grammar's own walk, but for `choose`."""

    def __init__(self, walk: Walk, closings: Closings):
        self._walk, self._closings = walk, closings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._walk, name)

    def choose(self, logits: np.ndarray) -> int:
        """The next token; changes `logits`."""
        self._closings.fold(logits)
        return self._walk.choose(logits)


class Sidecar:
    """Fills arguments on a shared runtime, in the sequence `seq` that nobody else uses.

    Holds the runtime's lock (`lock_of`) while it works; the sequence is empty whenever the lock is free.
    """

    def __init__(self, runtime: Runtime, grammars: Grammars, *, seq: int, options: Arguments, system_prompt: str,
                 head_seq: int | None = None):
        """`options` is the section `arguments` of the configuration.

        `head_seq`: a sequence that keeps what every prompt begins with, until `forget`; each call continues a copy that
        shares its cells. The result is the same to the bit. None decodes it anew for each call.

        Raises SidecarError for sequences that cannot be used.
        """
        for field, used in (("seq", seq), ("head_seq", head_seq)):
            if used is not None and not 0 <= used < runtime.scratch_seq:
                raise SidecarError(f"{field} is {used}; give 0 … {runtime.scratch_seq - 1}, or raise n_seq_max")
        if seq == head_seq:
            raise SidecarError(f"seq and head_seq are both {seq}; give two sequences")
        if head_seq is not None and not runtime.options.kv_unified:
            raise SidecarError("head_seq: kv_unified is false, so that cells cannot be shared; set it to true, or leave "
                               "head_seq out")
        self.runtime, self.grammars, self.seq, self.head_seq = runtime, grammars, seq, head_seq
        self.options, self.system_prompt = options, system_prompt
        self.lock = lock_of(runtime)
        self._signatures: dict[Tool, Signature] = {}

    @property
    def model(self) -> Model:
        return self.runtime.model

    def signature(self, tool: Tool) -> Signature:
        """The tool's signature within the budget, counted by the model's tokeniser; made once."""
        with self.lock:
            if tool not in self._signatures:
                self._signatures[tool] = signature_of(tool, self.options.signature_tokens,
                                                      lambda text: len(self.model.tokenize(text)),
                                                      described_tokens=self.options.described_tokens)
            return self._signatures[tool]

    def grammar(self, tool: Tool) -> Enclosed:
        """The grammar of the tool's arguments within a call. Raises what compiling a schema raises."""
        return Enclosed(self.grammars.compile(tool.input_schema), self._closings)

    def window(self, history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages of `history` that the prompt holds. Raises WindowError."""
        options = self.options
        return prune(history, options.window_tokens, options.recent_turns, options.surrogate_chars,
                     lambda message: len(self._message(message)))

    def prompt(self, tool: Tool, query: str, history: Sequence[Mapping[str, Any]] = (),
               schema: Schema = "signature") -> np.ndarray:
        """Token ids of the whole prompt, int32[n], up to where the arguments object begins."""
        head, closing = self._head
        named = f"{json.dumps(tool.name, ensure_ascii=False)[1:-1]}\", \"arguments\": "
        return np.concatenate([head, self._plain(description(tool, self.signature(tool), schema)), closing,
                               *(self._message(message) for message in self.window(history)),
                               self._message({"role": "user", "content": query}, open_assistant=True),
                               self._opening(named)])

    def begin(self, prompt: np.ndarray) -> tuple[np.ndarray, int]:
        """(token ids that are left to decode, the first one's position), after `seq` holds what comes before.

        For callers that decode a prompt themselves: they hold the lock, and remove the sequence afterwards.
        """
        runtime, (head, _) = self.runtime, self._head
        # An interrupt may have come just as the sequence was to be removed.
        runtime.seq_rm(self.seq)
        if self.head_seq is None:
            runtime.decode(head, 0, self.seq)
        else:
            self._keep(head)
            runtime.seq_cp(self.head_seq, self.seq)
        return prompt[len(head):], len(head)

    def fill(self, tool: Tool, query: str, history: Sequence[Mapping[str, Any]] = (),
             schema: Schema = "signature") -> Filled:
        """The arguments of one call. The sequence is empty afterwards, also after an error or Ctrl-C.

        `schema` "full" describes the tool by its whole schema, for comparison. Raises SidecarError for a prompt that
        does not fit, WindowError, and what compiling the schema and decoding raise.
        """
        with self.lock:
            grammar = self.grammar(tool)
            prompt = self.prompt(tool, query, history, schema)
            n_ctx = self.runtime.options.n_ctx
            if len(prompt) + self.options.max_tokens > n_ctx:
                raise SidecarError(f"the prompt has {len(prompt)} tokens, {self.options.max_tokens} are kept for the "
                                   f"arguments, and n_ctx is {n_ctx}; shorten the query or raise n_ctx")
            start = time.perf_counter()
            try:
                rest, pos = self.begin(prompt)
                begun_ms = (time.perf_counter() - start) * 1e3
                filled = fill(self.runtime, self.seq, rest, grammar, self.options.max_tokens, pos)
            finally:
                self.runtime.seq_rm(self.seq)
            return replace(filled, n_prompt_tokens=len(prompt), first_token_ms=begun_ms + filled.first_token_ms,
                           total_ms=begun_ms + filled.total_ms)

    def forget(self) -> None:
        """Empty `head_seq`, too."""
        with self.lock:
            if self.head_seq is not None:
                self.runtime.seq_rm(self.head_seq)

    def _keep(self, head: np.ndarray) -> None:
        """Make `head` what `head_seq` holds."""
        runtime, seq = self.runtime, self.head_seq
        kept = _heads.setdefault(runtime, {})
        # Another sidecar may have put its own there, and whoever clears a runtime asks nobody.
        if np.array_equal(kept.get(seq, ()), head) and runtime.pos_max(seq) == len(head) - 1:
            return
        kept.pop(seq, None)
        runtime.seq_rm(seq)
        try:
            runtime.decode(head, 0, seq)
        except BaseException:
            runtime.seq_rm(seq)
            raise
        kept[seq] = head

    @functools.cached_property
    def _closings(self) -> Closings:
        return Closings(pieces_of(self.model))

    @functools.cached_property
    def _head(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of the system message up to the tool, and of what closes the message behind it."""
        # Some templates print no system message of its own.
        role = next(role for role in BLOCK_ROLES if role == BLOCK_ROLES[-1] or
                    CONTENT in self.model.chat_message(role, CONTENT))
        before, _, behind = self.model.chat_message(role, CONTENT).rpartition(CONTENT)
        return (np.concatenate([self.model.tokenize(before, add_special=True),
                                self._plain(instructions(self.system_prompt))]), self.model.tokenize(behind))

    def _opening(self, named: str) -> np.ndarray:
        """Token ids of the call's opening and `named`, int32[n]: as one text, unless the tool's name holds a marker."""
        opening, plain = call_opening(self.model), self._plain(named)
        if np.array_equal(plain, self.model.tokenize(named)):
            return self.model.tokenize(opening + named)
        return np.concatenate([self.model.tokenize(opening), plain])

    def _message(self, message: Mapping[str, Any], open_assistant: bool = False) -> np.ndarray:
        """Token ids of one message, int32[n]."""
        role, content = message["role"], message["content"].strip()
        if role == "tool":
            # Not every template prints this role; none refuses a user's message.
            role, content = "user", f"Result of {message.get('name', 'the tool')}:\n{content}"
        before, _, behind = self.model.chat_message(role, CONTENT, open_assistant).rpartition(CONTENT)
        return np.concatenate([self.model.tokenize(before), self._plain(content), self.model.tokenize(behind)])

    def _plain(self, text: str) -> np.ndarray:
        """Token ids of text in which a marker is only characters: descriptions and results are other people's."""
        return self.model.tokenize(text, parse_special=False)

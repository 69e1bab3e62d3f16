"""The sidecar: a tool's arguments, filled in a temporary sequence at position 0 that is gone afterwards.

The prompt is the system prompt with the tool's signature, the pruned window of the conversation, the query, and the
call as far as it is known: its opening with the tool's name, so that the model writes the arguments object alone.
"""
from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nexus.arguments import Filled, fill
from nexus.in_context import call_opening
from nexus.prompt import TOOL_HEADING, system_tokens
from nexus.registry import Tool, tool_text
from nexus.runtime import Model, Runtime
from nexus.signature import Signature, signature_of
from nexus.window import prune

if TYPE_CHECKING:
    from nexus.config import Arguments
    from nexus.constrain import Grammars

Schema = Literal["signature", "full"]
INSTRUCTION = ("Call the tool with arguments taken from the request and the conversation. Give only the arguments that "
               "are stated there, with their exact values; leave out every optional argument that is not mentioned. "
               "Never make up a value.")
# Stands in for a text while the frame around it is asked from the chat template.
CONTENT = "nexus"

_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_guard = threading.Lock()


class SidecarError(ValueError):
    """Arguments cannot be filled as asked; the message names the field, the value and the remedy."""


def lock_of(shared: Any) -> threading.RLock:
    """The one re-entrant lock of an object that threads share, such as a Runtime: whoever uses it holds this."""
    with _guard:
        return _locks.setdefault(shared, threading.RLock())


def instructions(tool: Tool, signature: Signature, system_prompt: str, schema: Schema = "signature") -> str:
    """The system message: the prompt, what is expected, and the tool as its signature or as its full schema."""
    if schema not in ("signature", "full"):
        raise SidecarError(f"schema is {schema!r}; give \"signature\" or \"full\"")
    described = signature.text if schema == "signature" else tool_text(tool)
    return "\n\n".join(filter(None, (system_prompt, INSTRUCTION, TOOL_HEADING + described)))


class Sidecar:
    """Fills arguments on a shared runtime, in the sequence `seq` that nobody else uses.

    Holds the runtime's lock (`lock_of`) while it works; the sequence is empty whenever the lock is free.
    """

    def __init__(self, runtime: Runtime, grammars: Grammars, *, seq: int, options: Arguments, system_prompt: str):
        """`options` is the section `arguments` of the configuration. Raises SidecarError for a sequence not to use."""
        if not 0 <= seq < runtime.scratch_seq:
            raise SidecarError(f"seq is {seq}; give 0 … {runtime.scratch_seq - 1}, or raise n_seq_max")
        self.runtime, self.grammars, self.seq = runtime, grammars, seq
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
                                                      lambda text: len(self.model.tokenize(text)))
            return self._signatures[tool]

    def window(self, history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages of `history` that the prompt holds. Raises WindowError."""
        options = self.options
        return prune(history, options.window_tokens, options.recent_turns, options.surrogate_chars,
                     lambda message: len(self._message(message)))

    def prompt(self, tool: Tool, query: str, history: Sequence[Mapping[str, Any]] = (),
               schema: Schema = "signature") -> np.ndarray:
        """Token ids of the whole prompt, int32[n], up to where the arguments object begins."""
        system = instructions(tool, self.signature(tool), self.system_prompt, schema)
        opening = f"{call_opening(self.model)}{json.dumps(tool.name, ensure_ascii=False)[1:-1]}\", \"arguments\": "
        return np.concatenate([system_tokens(self.model, system),
                               *(self._message(message) for message in self.window(history)),
                               self._message({"role": "user", "content": query}, open_assistant=True),
                               self.model.tokenize(opening)])

    def fill(self, tool: Tool, query: str, history: Sequence[Mapping[str, Any]] = (),
             schema: Schema = "signature") -> Filled:
        """The arguments of one call. The sequence is empty afterwards, also after an error or Ctrl-C.

        `schema` "full" describes the tool by its whole schema, for comparison. Raises SidecarError for a prompt that
        does not fit, WindowError, and what compiling the schema and decoding raise.
        """
        with self.lock:
            grammar = self.grammars.compile(tool.input_schema)
            prompt = self.prompt(tool, query, history, schema)
            n_ctx = self.runtime.options.n_ctx
            if len(prompt) + self.options.max_tokens > n_ctx:
                raise SidecarError(f"the prompt has {len(prompt)} tokens, {self.options.max_tokens} are kept for the "
                                   f"arguments, and n_ctx is {n_ctx}; shorten the query or raise n_ctx")
            try:
                # An interrupt may have come just as the sequence was to be removed.
                self.runtime.seq_rm(self.seq)
                return fill(self.runtime, self.seq, prompt, grammar, self.options.max_tokens)
            finally:
                self.runtime.seq_rm(self.seq)

    def _message(self, message: Mapping[str, Any], open_assistant: bool = False) -> np.ndarray:
        """Token ids of one message, int32[n]. Its text cannot hold a marker: a tool's result is other people's."""
        role, content = message["role"], message["content"].strip()
        if role == "tool":
            # Not every template prints this role; none refuses a user's message.
            role, content = "user", f"Result of {message.get('name', 'the tool')}:\n{content}"
        before, _, behind = self.model.chat_message(role, CONTENT, open_assistant).rpartition(CONTENT)
        parts = [self.model.tokenize(before), self.model.tokenize(content, parse_special=False),
                 self.model.tokenize(behind)]
        return np.concatenate(parts)

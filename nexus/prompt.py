"""Pieces of a prompt as token ids: system prompt, conversation, tool block, query.

Each piece is tokenised by itself, so that a block has the same tokens wherever it is placed, and a full prefill and
a splice see the same sequence.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nexus.registry import Tool, tool_text
from nexus.runtime import Model

TOOL_HEADING = "You may call this tool:\n"
# Some templates fold a system message into the next user message and print nothing for it alone.
BLOCK_ROLES = ("system", "user")


class PromptError(ValueError):
    """A prompt cannot be built as asked; the message says why."""


def system_tokens(model: Model, text: str) -> np.ndarray:
    """Token ids of the system prompt, int32[n], with the begin-of-sequence token where the model wants one."""
    return model.tokenize(_first_rendered(model, text), add_special=True)


def block_tokens(model: Model, tool: Tool) -> np.ndarray:
    """Token ids of one tool's message: the text that is compiled, spliced or prefilled. int32[n]"""
    return model.tokenize(_first_rendered(model, TOOL_HEADING + tool_text(tool)))


def query_tokens(model: Model, query: str) -> np.ndarray:
    """Token ids of the user's query and the header after which the model answers, int32[n]."""
    return model.tokenize(model.chat_message("user", query, open_assistant=True))


def conversation_tokens(model: Model, turns: Sequence[dict], n_tokens: int) -> np.ndarray:
    """Exactly `n_tokens` token ids of conversation, int32[n_tokens], the last turn cut short but closed.

    `turns` are {"role", "content"} mappings. Raises PromptError when there is not enough text: nothing is repeated,
    because repeated text would make deep contexts easier than real ones.
    """
    if n_tokens == 0:
        return np.empty(0, dtype=np.int32)
    text = "".join(model.chat_message(turn["role"], turn["content"]) for turn in turns)
    tokens = model.tokenize(text)
    if len(tokens) < n_tokens:
        raise PromptError(f"the conversation has {len(tokens)} tokens for this model, {n_tokens} are needed; "
                          "lengthen the conversation file or lower the largest offset")
    closing = _turn_closing(model)
    if len(closing) >= n_tokens:
        return tokens[:n_tokens]
    return np.concatenate([tokens[:n_tokens - len(closing)], closing])


def _turn_closing(model: Model) -> np.ndarray:
    """What the template writes after an assistant's text."""
    marker = "nexus"
    return model.tokenize(model.chat_message("assistant", marker).split(marker)[-1])


def _first_rendered(model: Model, text: str) -> str:
    for role in BLOCK_ROLES:
        rendered = model.chat_message(role, text)
        if text.strip() in rendered:
            return rendered
    raise PromptError("the model's chat template prints neither a system nor a user message on its own")

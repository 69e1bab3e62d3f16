"""Prompt pieces: exact lengths, the same tokens wherever a block goes."""
from __future__ import annotations

import numpy as np
import pytest

from nexus.config import ROOT
from nexus.prompt import PromptError, block_tokens, conversation_tokens, query_tokens, system_tokens
from nexus.registry import Tool
from nexus.workload import load_conversation

TOOL = Tool(None, "list_branches", "Lists branches.", {"type": "object", "properties": {"repo": {"type": "string"}}})


class StubModel:
    """A stand-in whose template prints nothing for a system message; a token is a character."""

    def chat_message(self, role, content, open_assistant=False):
        return "" if role == "system" else f"<{role}>{content}</>" + ("<assistant>" if open_assistant else "")

    def tokenize(self, text, add_special=False, parse_special=True):
        return np.array([ord(character) for character in text], dtype=np.int32)


def test_a_template_without_system_messages_uses_the_user_role():
    text = "".join(map(chr, block_tokens(StubModel(), TOOL)))
    assert text.startswith("<user>") and "list_branches" in text
    assert "".join(map(chr, system_tokens(StubModel(), "Be brief."))) == "<user>Be brief.</>"


def test_a_template_that_prints_nothing_is_an_error():
    class Silent(StubModel):
        def chat_message(self, role, content, open_assistant=False):
            return ""

    with pytest.raises(PromptError, match="chat template"):
        block_tokens(Silent(), TOOL)


@pytest.mark.integration
@pytest.mark.parametrize("n_tokens", [0, 1, 2, 3, 16, 64, 257, 2048])
def test_conversations_have_exactly_the_length_asked_for(smollm2, n_tokens):
    turns = load_conversation(ROOT / "experiments" / "data" / "conversation.json")
    tokens = conversation_tokens(smollm2, turns, n_tokens)
    assert tokens.dtype == np.int32 and len(tokens) == n_tokens
    if n_tokens >= 16:
        assert smollm2.detokenize(tokens).endswith("<|im_end|>\n")


@pytest.mark.integration
def test_too_short_a_conversation_is_an_error_with_both_numbers(smollm2):
    with pytest.raises(PromptError, match=r"has \d+ tokens for this model, 500 are needed"):
        conversation_tokens(smollm2, [{"role": "user", "content": "short"}], 500)


@pytest.mark.integration
def test_pieces_join_to_the_text_of_the_whole(smollm2):
    pieces = np.concatenate([system_tokens(smollm2, "Be brief."), block_tokens(smollm2, TOOL),
                             query_tokens(smollm2, "Which branches are there?")])
    text = smollm2.detokenize(pieces)
    assert text.endswith("<|im_start|>user\nWhich branches are there?<|im_end|>\n<|im_start|>assistant\n")
    assert text.count("<|im_start|>") == 4 and '"list_branches"' in text

"""Prompt pieces: exact lengths, the same tokens wherever a block goes."""
from __future__ import annotations

import numpy as np
import pytest

from nexus.config import ROOT
from nexus.prompt import TOOL_HEADING, PromptError, block_tokens, conversation_tokens, query_tokens, system_tokens
from nexus.registry import Tool, tool_text
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
def test_conversations_have_exactly_the_length_asked_for_and_a_closed_turn(smollm2):
    turns = load_conversation(ROOT / "experiments" / "data" / "conversation.json")
    closing = smollm2.tokenize("<|im_end|>\n")
    longest = conversation_tokens(smollm2, turns, 2048)
    for n_tokens in [*range(40), 64, 255, 256, 257, 1000, 1024, 2047, 2048]:
        tokens = conversation_tokens(smollm2, turns, n_tokens)
        assert tokens.dtype == np.int32 and len(tokens) == n_tokens
        if n_tokens > len(closing):
            text_length = n_tokens - len(closing)
            np.testing.assert_array_equal(tokens[text_length:], closing)
            np.testing.assert_array_equal(tokens[:text_length], longest[:text_length])


@pytest.mark.integration
def test_the_whole_conversation_can_be_had_and_not_one_token_more(smollm2):
    turns = [{"role": "user", "content": "Hello there, 你好."}, {"role": "assistant", "content": "Good day."}]
    whole = smollm2.tokenize("".join(smollm2.chat_message(turn["role"], turn["content"]) for turn in turns))
    np.testing.assert_array_equal(conversation_tokens(smollm2, turns, len(whole)), whole)
    with pytest.raises(PromptError, match=rf"has {len(whole)} tokens for this model, {len(whole) + 1} are needed"):
        conversation_tokens(smollm2, turns, len(whole) + 1)


@pytest.mark.integration
@pytest.mark.parametrize("before", ["", "Be brief.", "A longer system prompt, with 漢字 and\n\ntrailing space "])
def test_a_tools_tokens_are_the_same_behind_any_text(smollm2, before):
    """A block is tokenised alone; in the text of the whole prompt its tokens must be the same ones."""
    block = block_tokens(smollm2, TOOL)
    left = smollm2.chat_message("system", before)
    whole = smollm2.tokenize(left + smollm2.chat_message("system", TOOL_HEADING + tool_text(TOOL))
                             + smollm2.chat_message("user", "Which?", open_assistant=True))
    np.testing.assert_array_equal(
        np.concatenate([smollm2.tokenize(left), block, query_tokens(smollm2, "Which?")]), whole)
    same = Tool("another server", TOOL.name, TOOL.description, dict(TOOL.input_schema))
    np.testing.assert_array_equal(block_tokens(smollm2, same), block)


@pytest.mark.integration
def test_an_empty_conversation_is_an_error_with_both_numbers(smollm2):
    with pytest.raises(PromptError, match="has 0 tokens for this model, 500 are needed"):
        conversation_tokens(smollm2, [], 500)


@pytest.mark.integration
def test_pieces_join_to_the_text_of_the_whole(smollm2):
    pieces = np.concatenate([system_tokens(smollm2, "Be brief."), block_tokens(smollm2, TOOL),
                             query_tokens(smollm2, "Which branches are there?")])
    text = smollm2.detokenize(pieces)
    assert text.endswith("<|im_start|>user\nWhich branches are there?<|im_end|>\n<|im_start|>assistant\n")
    assert text.count("<|im_start|>") == 4 and '"list_branches"' in text

"""What a block is compiled behind. A block that has seen several left contexts depends less on any of them.

system              the system prompt alone
preamble-256        the system prompt and a message of 256 tokens of neutral text
ensemble-4x256      the mean of four blocks, each behind the system prompt and a dialogue of 256 tokens made of another
                    text; the user has the last word in the first, the assistant in the second, and so on, since the
                    keys of a block depend much on whose turn it follows
"""
from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nexus.blocks import Block, BlockError, context_hash
from nexus.prompt import conversation_tokens
from nexus.runtime import Model

ROLES = ("user", "assistant")
# Of one turn of a dialogue.
SENTENCES = 3


def load_preambles(path: str | Path) -> list[str]:
    """The neutral texts of a JSON list. Raises BlockError when it is not one."""
    try:
        texts = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BlockError(f"preambles {path}: {error}; give a JSON list of texts") from None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise BlockError(f"preambles {path}: not a list of texts; give a JSON list of at least one")
    return texts


def parse_behind(behind: str) -> tuple[int, int]:
    """(texts, tokens of each) of a name; (0, 0) for the system prompt alone. BlockError for another name."""
    if behind == "system":
        return 0, 0
    found = re.fullmatch(r"preamble-([1-9]\d*)|ensemble-([1-9]\d*)x([1-9]\d*)", behind)
    if not found:
        raise BlockError(f"compiled_behind: {behind!r} is not system, preamble-<tokens> or ensemble-<texts>x<tokens>")
    return (1, int(found[1])) if found[1] else (int(found[2]), int(found[3]))


def left_contexts(model: Model, system: np.ndarray, behind: str, preambles: Sequence[str]) -> list[np.ndarray]:
    """The token ids that a block is compiled behind, one int32[n] per member of the ensemble, all of one length.

    Raises BlockError for another name, PromptError where a text is too short.
    """
    members, n_tokens = parse_behind(behind)
    if members == 0:
        return [system]
    if members > len(preambles):
        raise BlockError(f"compiled_behind: {behind} needs {members} preambles, there are {len(preambles)}; add texts")
    if behind.startswith("preamble"):
        turns = [[{"role": "user", "content": preambles[0]}]]
    else:
        turns = [_dialogue(model, text, n_tokens, ROLES[i % 2]) for i, text in enumerate(preambles[:members])]
    return [np.concatenate([system, conversation_tokens(model, each, n_tokens)]) for each in turns]


def _dialogue(model: Model, text: str, n_tokens: int, last: str) -> list[dict]:
    """Turns that share out the sentences of `text` and fill `n_tokens` tokens, the last by the role `last`."""
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())
    parts = [" ".join(sentences[i:i + SENTENCES]) for i in range(0, len(sentences), SENTENCES)]
    for first in range(len(ROLES)):
        turns = [{"role": ROLES[(first + i) % 2], "content": part} for i, part in enumerate(parts)]
        needed = next((i for i in range(1, len(turns) + 1) if _n_tokens(model, turns[:i]) >= n_tokens), len(turns))
        if turns[needed - 1]["role"] == last:
            break
    return turns[:needed]


def _n_tokens(model: Model, turns: Sequence[dict]) -> int:
    return len(model.tokenize("".join(model.chat_message(turn["role"], turn["content"]) for turn in turns)))


def mean_block(blocks: Sequence[Block]) -> Block:
    """One block with the mean of K and V over `blocks`, which hold the same tokens at the same anchor.

    Means are taken in float32 and rounded once to float16. Keys at one anchor share their rotation, so that their mean
    is the mean of the unrotated keys, rotated. Raises BlockError for different tokens or anchors.
    """
    first = blocks[0]
    if len(blocks) == 1:
        return first
    for other in blocks[1:]:
        if other.anchor != first.anchor or not np.array_equal(other.tokens, first.tokens):
            raise BlockError("an ensemble averages blocks of the same tokens at the same anchor; compile them alike")
    return Block(first.tokens, first.anchor, joint_hash([block.left_context_hash for block in blocks]),
                 *(np.mean([getattr(block, part) for block in blocks], axis=0, dtype=np.float32).astype(np.float16)
                   for part in ("k", "v")))


def joint_hash(hashes: Sequence[int]) -> int:
    """The `left_context_hash` of a mean of blocks from the members' own; a single one stays as it is."""
    if len(hashes) == 1:
        return hashes[0]
    return context_hash(np.array(hashes, dtype=np.uint64).view(np.int32))

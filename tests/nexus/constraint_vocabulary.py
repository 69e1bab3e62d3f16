"""A small vocabulary for grammars without a model: every byte, and pieces that run across JSON's marks."""
from __future__ import annotations

import json

import numpy as np

from nexus.constrain import Grammar, Grammars
from nexus.schema_grammar import Bounds

PIECES = [b"", *(bytes([byte]) for byte in range(256)), b'{"', b'":', b'","', b'":"', b'"}', b"},", b"]}", b"true",
          b"null", b" the", b"abc", b"12", b"[[", b"}}", "é".encode(), "漢".encode()]


def grammars(**bounds: int) -> Grammars:
    return Grammars(None, pieces=PIECES, eos_token=0, bounds=Bounds(**bounds))


def accepts(grammar: Grammar, value: object) -> bool:
    """Whether the grammar takes this value's JSON text, or the text itself, and is finished by it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    matcher = grammar.start().matcher
    tokens = grammar.grammars.tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_stopped()


def random_logits(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=len(PIECES)).astype(np.float32)

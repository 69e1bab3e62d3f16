"""The arguments of a call, decoded by the model under the tool's schema and checked against it."""
from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry

from nexus.constrain import Grammar
from nexus.runtime import Runtime
from nexus.schema_grammar import Relaxation

# For a schema that names no draft: the first whose rules it keeps.
DRAFTS = (Draft202012Validator, Draft7Validator, Draft4Validator)


@dataclass(frozen=True)
class Filled:
    """An arguments object and what it took."""

    arguments: dict[str, Any]
    text: str
    """As decoded: compact JSON."""
    valid: bool
    """Whether the tool's own schema allows it. False is possible only for fields that were relaxed."""
    problems: tuple[str, ...]
    """What the schema finds wrong, each with the field."""
    n_prompt_tokens: int
    n_tokens: int
    """Tokens of the object."""
    n_rejected: int
    """At how many of them the model's favourite was not allowed."""
    relaxed: tuple[Relaxation, ...]
    """What of the schema the grammar does not enforce."""
    first_token_ms: float
    """From the call, the prompt's tokens at hand, to the first token of the object."""
    total_ms: float
    """From the call to the finished object, checked."""


def fill(runtime: Runtime, seq: int, prompt: np.ndarray, grammar: Grammar, max_tokens: int, pos: int = 0) -> Filled:
    """The arguments that the model writes behind `prompt` (int32[n]), greedily under the grammar.

    The prompt is decoded into sequence `seq` from position `pos`, which must continue it; the sequence is left to the
    caller with prompt and object in it, but for the object's last token. Raises ConstrainError where no object fits
    `max_tokens`, RuntimeFailure where llama.cpp fails.
    """
    start = time.perf_counter()
    walk = grammar.start(max_tokens)
    logits = runtime.decode(prompt, pos, seq, logits=True)
    token = walk.choose(logits)
    first_token_ms = (time.perf_counter() - start) * 1e3
    end = pos + len(prompt)
    while not walk.finished:
        logits = runtime.decode(np.array([token]), end, seq, logits=True)
        token, end = walk.choose(logits), end + 1
    text = walk.text
    arguments = json.loads(text)
    problems = problems_of(arguments, grammar.schema)
    return Filled(arguments, text, not problems, problems, len(prompt), walk.n_chosen, walk.n_rejected, grammar.relaxed,
                  first_token_ms, (time.perf_counter() - start) * 1e3)


def problems_of(arguments: Any, schema: Mapping[str, Any]) -> tuple[str, ...]:
    """What the schema finds wrong with a value, each problem with the field; nothing for a value that it allows.

    The schema is read by the draft that it names, else by the latest whose rules it keeps. Formats are not checked:
    drafts leave that open. References out of the schema are not followed, and reported.
    """
    try:
        validator = _draft(schema)(schema, registry=Registry())
        errors = sorted(validator.iter_errors(arguments), key=lambda error: error.json_path)
        return tuple(f"{error.json_path}: {error.message}" for error in errors)
    except Exception as error:
        # jsonschema has no common class for what a broken schema can raise while it is applied.
        return (f"$: the schema cannot be applied: {type(error).__name__}: {error}",)


def _draft(schema: Mapping[str, Any]) -> type:
    if isinstance(schema, Mapping) and "$schema" in schema:
        return validator_for(schema, default=Draft202012Validator)
    for draft in DRAFTS:
        try:
            draft.check_schema(schema)
            return draft
        except SchemaError:
            continue
    return Draft202012Validator

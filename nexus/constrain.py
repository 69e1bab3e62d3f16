"""Decoding under a JSON schema: which token may come next, and that the text ends valid and in time.

The engine is llguidance on the model's own vocabulary. At each step the model's favourite token is tried first; the
mask over the vocabulary is made only when it is refused. Measured against llama.cpp's grammar in constrain_cost.json.

No text stays unfinished. Every text of a grammar ends (nexus/schema_grammar.py bounds all lengths), and a walk with a
budget keeps a way to its end in mind once the budget could run out: a token that leads too far from it is taken back.
"""
from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from nexus import native
from nexus.name_automaton import pieces_of
from nexus.runtime import Model
from nexus.schema_grammar import Bounds, Relaxation, SchemaGrammarError, schema_grammar

ENGINES = ("llguidance",)
# A schema from the wild must not take the machine: what it may cost to compile and per step (llguidance's units).
LIMITS = {"max_grammar_size": 200_000, "initial_lexer_fuel": 1_000_000, "max_lexer_states": 50_000,
          "step_lexer_fuel": 200_000, "step_max_items": 50_000}
# What is tried, in this order, to complete an unfinished text by little.
CLOSERS = (b"}", b"]")
OPENERS = (b",", b'"', b"0", b"1", b"t", b"n")
ESCAPED = re.compile(rb"\\.", re.DOTALL)


class ConstrainError(ValueError):
    """A schema, logits or a budget cannot be used; the message names which, the value and the remedy."""


@functools.cache
def _kernel():
    kernels = native.kernels()
    import cppyy

    cppyy.include("token_mask.hpp")
    return kernels


@functools.cache
def _tokenize_address() -> int:
    """Where llama_tokenize is: llguidance calls it itself."""
    gbl = native.llama()
    import cppyy

    cppyy.cppdef("namespace nexus { inline size_t tokenize_address() { return (size_t) &llama_tokenize; } }")
    return int(gbl.nexus.tokenize_address())


def tokenizer_of(model: Model) -> LLTokenizer:
    """The model's vocabulary as llguidance reads it, on llama.cpp's own tokeniser."""
    import cppyy

    # The marked ones are never part of a text.
    pieces = [piece or b"\xff<%d>" % token for token, piece in enumerate(pieces_of(model))]
    vocabulary = model.native.vocab()
    return LLTokenizer.from_llamacpp(
        tokens=pieces, vocab_ptr=cppyy.addressof(vocabulary), tokenize_fptr=_tokenize_address(),
        eos_token=max(0, int(model.gbl.llama_vocab_eos(vocabulary))))


class _Bytes:
    """A vocabulary without a tokeniser of its own, as llguidance wants one: texts are cut greedily."""

    def __init__(self, pieces: Sequence[bytes], eos_token: int):
        self.tokens, self.special_token_ids = list(pieces), [eos_token]
        self.eos_token_id, self.bos_token_id = eos_token, None
        self.longest_first = sorted((piece, token) for token, piece in enumerate(pieces) if piece)
        self.longest_first.sort(key=lambda found: -len(found[0]))

    def __call__(self, text: bytes | str) -> list[int]:
        rest, tokens = text.encode() if isinstance(text, str) else text, []
        while rest:
            piece, token = next((found for found in self.longest_first if rest.startswith(found[0])))
            tokens.append(token)
            rest = rest[len(piece):]
        return tokens


class Grammars:
    """Compiles schemas for a model's vocabulary; a schema that was compiled before is not compiled again."""

    def __init__(self, model: Model | None, *, engine: str = "llguidance", bounds: Bounds = Bounds(),
                 pieces: Sequence[bytes] | None = None, eos_token: int = 0):
        """`pieces`, with `model` None, are the bytes of each token of a vocabulary without a model."""
        if engine not in ENGINES:
            raise ConstrainError(f"engine is {engine!r}; use one of {', '.join(ENGINES)}")
        # The tokeniser calls into the model: it must not be freed before.
        self.model, self.bounds, self.limits = model, bounds, LLParserLimits(**LIMITS)
        if model is not None:
            self.pieces, self.tokenizer = pieces_of(model), tokenizer_of(model)
        elif pieces is not None:
            self.pieces, self.tokenizer = list(pieces), LLTokenizer(TokenizerWrapper(_Bytes(pieces, eos_token)))
        else:
            raise ConstrainError("model is None; give a model, or the pieces of a vocabulary")
        self._compiled: dict[str, Grammar] = {}
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile the kernel and touch the vocabulary now: the first rejected token would wait 15 ms for it."""
        walk = self.compile({"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}).start()
        logits = np.zeros(self.tokenizer.vocab_size, np.float32)
        for _ in range(8):
            logits[:] = 0
            logits[best_allowed(logits, walk.mask())] = 1
            walk.choose(logits)
        self._compiled.clear()

    def emptied(self) -> Grammars:
        """The same vocabulary and bounds with nothing compiled yet."""
        anew = copy.copy(self)
        anew._compiled = {}
        return anew

    def compile(self, schema: Mapping[str, Any]) -> Grammar:
        """The grammar of JSON objects that the schema allows. Raises ConstrainError for a schema without any."""
        try:
            # Not sorted: the order of properties is part of a schema.
            key = json.dumps(schema, separators=(",", ":"))
            if key not in self._compiled:
                self._compiled[key] = Grammar(self, schema)
            return self._compiled[key]
        except RecursionError:
            raise ConstrainError("schema: it is nested too deep; make it flatter") from None
        except UnicodeEncodeError as error:
            raise ConstrainError(f"schema: it holds the lone surrogate {error.object[error.start]!r}; "
                                 "remove it") from None

    def problem_of(self, lark: str) -> str:
        """llguidance's complaint about a grammar in one line, "" for none."""
        return complaint(self.matcher(lark))

    def matcher(self, lark: str) -> LLMatcher:
        return LLMatcher(self.tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=self.limits)


class Grammar:
    """One compiled schema. Each text under it is a walk of its own."""

    def __init__(self, grammars: Grammars, schema: Mapping[str, Any]):
        self.schema, self.grammars = schema, grammars
        try:
            written = schema_grammar(schema, grammars.bounds, grammars.problem_of)
        except SchemaGrammarError as error:
            raise ConstrainError(f"schema: {error}") from None
        self.lark, self.closing_bytes = written.lark, written.closing_bytes
        self.relaxed: tuple[Relaxation, ...] = written.relaxed
        self._matcher = grammars.matcher(written.lark)
        if problem := complaint(self._matcher):
            raise ConstrainError(f"schema: llguidance refuses its grammar: {problem}")
        tokenizer = grammars.tokenizer
        self.closers, self.openers, self.closing_quote = (
            [tokenizer.tokenize_bytes(text) for text in texts] for texts in (CLOSERS, OPENERS, (b'"',)))
        self.required_keys = [key.encode() for key in written.required_keys]

    def start(self, max_tokens: int | None = None) -> Walk:
        """A walk before the first token, which ends within `max_tokens` (None: within the grammar's own bounds).

        Raises ConstrainError for a budget in which no object can be written.
        """
        return Walk(self, self._matcher.deep_copy(), max_tokens)


class Walk:
    """One text under a grammar, token by token, until it is `finished`."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher, max_tokens: int | None = None):
        self.grammar, self.matcher = grammar, matcher
        self.n_chosen = 0
        """Tokens accepted."""
        self.n_rejected = 0
        """How often the model's favourite was refused."""
        self.n_steered = 0
        """How often the budget decided instead of the logits."""
        self.finished = False
        self._written: list[bytes] = []
        self._left = max_tokens
        # The tokens that complete the text; known only where the budget could run out.
        self._way: list[int] | None = None
        if max_tokens is not None and max_tokens <= grammar.closing_bytes:
            self._way = self.completion(max_tokens)
            if self._way is None:
                raise ConstrainError(f"max_tokens is {max_tokens}; no object of this schema is that short; raise it")

    @property
    def text(self) -> str:
        return b"".join(self._written).decode("utf-8", "replace")

    def choose(self, logits: np.ndarray) -> int:
        """The allowed token with the largest logit, accepted. `logits` are float32[n_vocab].

        Near the end of the budget it is the next token of a completion instead, where that token leads too far away.
        Raises ConstrainError once the walk is finished.
        """
        return self.take(int(logits.argmax()), logits)

    def take(self, favourite: int, logits: np.ndarray) -> int:
        """As `choose`, for a caller who knows the token with the largest logit already."""
        if self.finished:
            raise ConstrainError("the text is finished; nothing may follow")
        if np.isnan(logits[favourite]):
            raise ConstrainError(f"the logit of token {favourite} is not a number; decode again")
        token = favourite
        if not self.matcher.try_consume_tokens([token]):
            self.n_rejected += 1
            token = best_allowed(logits, self.mask())
            self._consume([token])
        if self._left is not None:
            token = self._within_budget(token)
        self._written.append(self.grammar.grammars.pieces[token])
        self.n_chosen += 1
        self.finished = self.matcher.is_stopped()
        if problem := complaint(self.matcher):
            raise ConstrainError(f"llguidance gave up behind {self.text[-40:]!r}: {problem}")
        return token

    def mask(self) -> np.ndarray:
        """Which tokens may follow, uint32[⌈n_vocab / 32⌉], one bit each."""
        mask = np.empty((self.grammar.grammars.tokenizer.vocab_size + 31) // 32, np.uint32)
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return mask

    def completion(self, most: int) -> list[int] | None:
        """Tokens, at most `most`, that finish the text soon; None where that many do not. Nothing is consumed."""
        tokens: list[int] = []
        matcher, tokenizer = self.matcher, self.grammar.grammars.tokenizer
        text = bytearray(b"".join(self._written))
        try:
            while not matcher.is_stopped() and len(tokens) <= most:
                forced = tokenizer.tokenize_bytes(matcher.compute_ff_bytes())
                added = forced[:matcher.try_consume_tokens(forced)] if forced else []
                added = added or self._step_towards_end(text)
                tokens += added
                text += b"".join(self.grammar.grammars.pieces[token] for token in added)
            return tokens if len(tokens) <= most else None
        finally:
            matcher.rollback(len(tokens))

    def _step_towards_end(self, text: bytes) -> list[int]:
        """One or more tokens, consumed, that finish what is open rather than open more. `text` is what stands there."""
        matcher, grammar, tokenizer = self.matcher, self.grammar, self.grammar.grammars.tokenizer
        opened = open_string(text)
        if opened is None:
            keys = grammar.required_keys if text.endswith((b"{", b",")) else ()
            attempts = [*grammar.closers, *map(tokenizer.tokenize_bytes, keys), *grammar.openers]
        else:
            # In a key, or in a value that begins like one: that cannot be closed as a key.
            keys = [key[len(opened):] for key in grammar.required_keys if key.startswith(opened)]
            attempts = [*map(tokenizer.tokenize_bytes, keys), *grammar.closing_quote]
        for attempt in attempts:
            taken = matcher.try_consume_tokens(attempt)
            if taken == len(attempt):
                return attempt
            matcher.rollback(taken)
        allowed = np.flatnonzero(np.unpackbits(self.mask().view(np.uint8), bitorder="little"))
        pieces, written = grammar.grammars.pieces, opened or b""
        # What is there already is tried last: of a pattern such as a URI's, a letter may be repeated for ever and only
        # the colon leads on.
        token = int(min(allowed, key=lambda found: (len(pieces[found]), written.count(pieces[found]), found)))
        self._consume([token])
        return [token]

    def _within_budget(self, token: int) -> int:
        """The token just consumed, or the next one on the way to the end where the budget forbids it."""
        self._left -= 1
        if self._way is None and self._left > self.grammar.closing_bytes:
            return token
        if self._way and token == self._way[0]:
            self._way = self._way[1:]
            return token
        way = self.completion(self._left)
        if way is None:
            self.matcher.rollback(1)
            known = self._way or self.completion(self._left + 1)
            if not known:
                raise ConstrainError(f"max_tokens: {self._left + 1} are left and the text needs more; raise it")
            token, way = known[0], known[1:]
            self.n_steered += 1
            self._consume([token])
        self._way = way
        return token

    def _consume(self, tokens: list[int]) -> None:
        if self.matcher.try_consume_tokens(tokens) != len(tokens):
            raise ConstrainError(f"llguidance refuses {tokens}, which it allowed: {complaint(self.matcher)}")


def best_allowed(logits: np.ndarray, mask: np.ndarray) -> int:
    """The token with the largest logit (float32[n_vocab]) among those of a mask (uint32), of equal ones the lowest.

    Raises ConstrainError where the mask allows none, and for an allowed logit that is not a number.
    """
    if logits.dtype != np.float32 or logits.shape[0] > 32 * len(mask) or not logits.flags.c_contiguous:
        raise ConstrainError(f"logits are {logits.dtype}{list(logits.shape)}; give at most {32 * len(mask)} contiguous "
                             "float32")
    token = int(_kernel().best_allowed(logits.ctypes.data, mask.ctypes.data, len(logits)))
    if token < 0:
        raise ConstrainError("the mask allows no token" if token == -1 else
                             "the logit of an allowed token is not a number; decode again")
    return token


def complaint(matcher: LLMatcher) -> str:
    """What a matcher says went wrong, in one line without the grammar; "" for nothing."""
    if not matcher.is_error():
        return ""
    text = re.split(r"\n\s*\d+ \| ", matcher.get_error())[0]
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", " ".join(text.split()))[:300]


def open_string(text: bytes) -> bytes | None:
    """The string within which JSON text is cut off, its quotation mark included; None where it ends outside of one."""
    marks = ESCAPED.sub(b"__", text)
    return bytes(text[marks.rfind(b'"'):]) if marks.count(b'"') % 2 else None

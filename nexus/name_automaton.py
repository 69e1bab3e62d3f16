"""Which tokens may come next while a model writes a tool's name: only those with which one of the names can result.

The automaton works on bytes, not on tokens: a radix trie over the names is intersected with the tokeniser's vocabulary
(kernels/name_trie.hpp). So a name may be cut into tokens in any way, within a UTF-8 character too, and its last token
may hold the terminator and run past it (`",` or `","`).
"""
from __future__ import annotations

import functools
import json
import operator
from collections import Counter
from collections.abc import Sequence

import numpy as np

from nexus import native
from nexus.native import describe
from nexus.runtime import Model


class AutomatonError(ValueError):
    """Names, a vocabulary, logits or a state cannot be used; the message names which, the value and the remedy."""


@functools.cache
def _kernel():
    kernels = native.kernels()
    import cppyy

    cppyy.include("name_trie.hpp")
    return kernels


@functools.cache
def _reader():
    gbl = native.llama()
    import cppyy

    cppyy.include("vocabulary_pieces.hpp")
    return gbl.nexus


def pieces_of(model: Model) -> list[bytes]:
    """The bytes of each token of a model, by id. Control tokens and others without text of their own are empty."""
    try:
        read = _reader().VocabularyPieces(model.native.vocab())
    except Exception as error:
        raise AutomatonError(f"vocabulary of {model.path}: {describe(error)}") from None
    # One byte more: there is no address of an empty array to hand over.
    joined, ends = np.empty(int(read.n_bytes()) + 1, np.uint8), np.empty(model.n_vocab, np.int64)
    read.copy(joined.ctypes.data, ends.ctypes.data)
    text, stops = joined.tobytes(), ends.tolist()
    return [text[begin:end] for begin, end in zip([0, *stops], stops)]


def spelling(name: str, terminator: bytes = b'"') -> bytes:
    """The bytes of a name as it is written before the terminator.

    Before a quotation mark that is what stands in a JSON string: `"`, `\\` and control characters are escaped, nothing
    else is, and no other spelling of the same name is offered. Before any other terminator a name stands as it is.
    Raises AutomatonError for a name that is empty, is not Unicode, or does not end at the terminator's first place.
    """
    if not isinstance(name, str) or not name:
        raise AutomatonError(f"name is {name!r}; give a string that is not empty")
    in_json = terminator == b'"'
    try:
        written = (json.dumps(name, ensure_ascii=False)[1:-1] if in_json else name).encode()
    except UnicodeEncodeError as cause:
        raise AutomatonError(f"name {name!r} holds the lone surrogate {cause.object[cause.start]!r}; "
                             "remove it") from cause
    if not in_json and (written + terminator).find(terminator) != len(written):
        raise AutomatonError(f"name {name!r} holds the terminator {terminator!r} or runs into it; its end could not be "
                             "told; take another terminator")
    return written


class Vocabulary:
    """A tokeniser's vocabulary, sorted for walks. Make it once for a model; automata share it."""

    def __init__(self, pieces: Sequence[bytes]):
        """`pieces` are the bytes of each token, by id; a token whose piece is empty is never allowed."""
        pieces = list(pieces)
        wrong = next((token for token, piece in enumerate(pieces) if not isinstance(piece, bytes)), None)
        if wrong is not None:
            raise AutomatonError(f"vocabulary: piece of token {wrong} is {pieces[wrong]!r}; give bytes")
        if not any(pieces):
            raise AutomatonError(f"vocabulary: none of the {len(pieces)} tokens has a piece; give their bytes")
        self.pieces, self.n_tokens = pieces, len(pieces)
        joined, ends = _joined(pieces)
        self.native = _kernel().SortedVocabulary(joined.ctypes.data, ends.ctypes.data, len(pieces))

    @classmethod
    def of(cls, model: Model) -> Vocabulary:
        """The vocabulary of a model."""
        return cls(pieces_of(model))


class NameAutomaton:
    """Token sets with which exactly the given names can be written, each followed by the terminator.

    A state is an integer, an offset in the trie; `start()` is before the first byte. Once a name is complete its state
    allows nothing more. What a token holds behind the terminator is not restricted; `tail` gives it. The sets are made
    at a state's first visit and kept.
    """

    def __init__(self, names: Sequence[str], vocabulary: Vocabulary | Sequence[bytes], terminator: bytes = b'"'):
        """Raises AutomatonError for no names, a name given twice, and one that the vocabulary cannot write."""
        self.names, self.terminator = tuple(names), terminator
        if not self.names:
            raise AutomatonError("names: the list is empty; give at least one")
        if not isinstance(terminator, bytes) or not terminator:
            raise AutomatonError(f"terminator is {terminator!r}; give at least one byte, it tells where a name ends")
        keys = [spelling(name, terminator) + terminator for name in self.names]
        name, count = Counter(self.names).most_common(1)[0]
        if count > 1:
            raise AutomatonError(f"name {name!r} is given {count} times; tell the tools apart, such as by server/name")
        self.vocabulary = vocabulary if isinstance(vocabulary, Vocabulary) else Vocabulary(vocabulary)
        joined, ends = _joined(keys)
        try:
            self._trie = _kernel().NameTrie(self.vocabulary.native, joined.ctypes.data, ends.ctypes.data, len(keys))
        except Exception as error:
            raise AutomatonError(describe(error)) from None
        missing = int(self._trie.unspellable())
        if missing >= 0:
            raise AutomatonError(f"name {self.names[missing]!r} cannot be written with this vocabulary; rename the "
                                 "tool or leave it out")

    @property
    def n_states(self) -> int:
        """How many states there are: the bytes of all edges of the trie, and the start."""
        return int(self._trie.n_states())

    def start(self) -> int:
        """The state before the first byte of a name."""
        return 0

    def allowed(self, state: int) -> np.ndarray:
        """Ids of the tokens that may follow, int32[n], ascending. Empty where a name is complete."""
        tokens = np.empty(self._call("n_allowed", state), np.int32)
        if len(tokens):
            self._call("copy_allowed", state, tokens.ctypes.data)
        return tokens

    def best(self, logits: np.ndarray, state: int) -> int:
        """The allowed token with the largest logit, of equal ones the lowest id. `logits` are float32[n_tokens].

        Raises AutomatonError where a name is complete, and for an allowed logit that is not a number.
        """
        token = self._call("best", self._address(logits), state)
        if token < 0:
            raise AutomatonError(f"state {state} completes {self.name(state)!r}; nothing may follow")
        return token

    def mask(self, logits: np.ndarray, state: int) -> np.ndarray:
        """Logits with minus infinity in place of every token that is not allowed, float32[n_tokens], a new array."""
        masked = np.empty(self.vocabulary.n_tokens, np.float32)
        self._call("mask", self._address(logits), state, masked.ctypes.data)
        return masked

    def advance(self, state: int, token: int) -> int:
        """The state behind a token. Raises AutomatonError for a token that is not allowed."""
        following = self._call("advance", state, token)
        if following < 0:
            raise AutomatonError(f"token {token} is not allowed in state {state}; take one of allowed({state})")
        return following

    def name(self, state: int) -> str | None:
        """The name that is complete in this state, its terminator included; None where none is."""
        return self._named("key", state)

    def decided(self, state: int) -> str | None:
        """The only name that is left in this state, complete or not; None where several are.

        Going on from here can give no other name, so a caller that wants just the choice can stop.
        """
        return self._named("only", state)

    def tail(self, state: int, token: int) -> bytes:
        """What `token`, if it completes a name from `state`, holds behind the terminator; else b""."""
        count = self._call("overrun", state, token)
        return self.vocabulary.pieces[token][-count:] if count else b""

    def _named(self, which: str, state: int) -> str | None:
        key = self._call(which, state)
        return None if key < 0 else self.names[key]

    def _call(self, method: str, *arguments: int) -> int | None:
        try:
            # numpy's integers, too; cppyy takes Python's only.
            return getattr(self._trie, method)(*map(operator.index, arguments))
        except Exception as error:
            raise AutomatonError(describe(error)) from None

    def _address(self, logits: np.ndarray) -> int:
        if not isinstance(logits, np.ndarray) or logits.dtype != np.float32 or not logits.flags.c_contiguous \
                or logits.shape != (self.vocabulary.n_tokens,):
            found = f"{logits.dtype}{list(logits.shape)}" if isinstance(logits, np.ndarray) else type(logits).__name__
            raise AutomatonError(f"logits are {found}; give a contiguous float32[{self.vocabulary.n_tokens}]")
        return logits.ctypes.data


def _joined(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """All texts one behind the other, uint8[n], and where each ends, int64[len(texts)]."""
    return np.frombuffer(b"".join(texts), np.uint8), np.cumsum([len(text) for text in texts], dtype=np.int64)


"""Text encoders through llama.cpp: unit vectors of texts, and scores of (query, document) pairs.

Every text is computed on its own, so its result does not depend on what else was asked for, before or together with
it: on one machine equal texts give equal bits, also with another number of threads.
"""
from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nexus import native
from nexus.native import describe

MEAN, CLS, LAST, RANK = 1, 2, 3, 4
POOLINGS = {0: "none", MEAN: "mean", CLS: "cls", LAST: "last", RANK: "rank"}


class EncoderError(RuntimeError):
    """The encoder cannot be opened or a text cannot be computed; the message names what and why."""


@functools.cache
def _namespace():
    """The C++ namespace `nexus` with the encoder compiled."""
    import cppyy

    gbl = native.llama()
    cppyy.include("encoder_session.hpp")
    if not gbl.nexus.llama_log_file():
        gbl.nexus.llama_log_to("")  # else llama.cpp's messages go to the terminal
    return gbl.nexus


def numerics() -> str:
    """The CPU features that llama.cpp computes with; with others the last bits of a vector may differ."""
    return native.llama().llama_print_system_info()


class _Session:
    """A model file opened as an encoder, not to be shared by threads. Usable in a `with` block."""

    def __init__(self, path: str | os.PathLike, n_threads: int, max_tokens: int, poolings: Sequence[int], use: str):
        self.path, self.n_threads, self.max_tokens = Path(path), n_threads, max_tokens
        if not self.path.is_file():
            raise EncoderError(f"encoder path {self.path} is not a file; give the path of a GGUF file")
        with self.path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise EncoderError(f"encoder path {self.path} is not a GGUF file (it does not begin with 'GGUF')")
        if n_threads < 1:
            raise EncoderError(f"n_threads is {n_threads}; give at least 1")
        try:
            self._native = _namespace().EncoderSession(os.fspath(self.path), max_tokens, n_threads)
        except Exception as error:
            raise EncoderError(f"{describe(error)} ({self.path})") from None
        self._close = weakref.finalize(self, self._native.close)
        found = int(self._native.pooling())
        if found not in poolings:
            self.close()
            raise EncoderError(f"{self.path} has {POOLINGS.get(found, found)} pooling, which is not for {use}; {use} "
                               f"takes {' or '.join(POOLINGS[pooling] for pooling in poolings)}")
        self.pooling = POOLINGS[found]
        self._out = np.empty(int(self._native.width()), dtype=np.float32)

    def close(self) -> None:
        """Free the model; a second call does nothing."""
        self._close()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def native(self):
        """The C++ EncoderSession. EncoderError once it is closed: llama.cpp would end the process."""
        if not self._close.alive:
            raise EncoderError(f"encoder {self.path} is closed; open it again")
        return self._native

    def _check(self, status: int) -> np.ndarray:
        if status != 0:
            raise EncoderError(f"encoder {self.path}: llama_encode returned {status}; is there enough memory?")
        return self._out


class Encoder(_Session):
    """An embedding model: texts to vectors of length 1.

    query_prefix, document_prefix   put before each text, for models trained with them
    max_tokens                      [CLS] and [SEP] included; a longer text is cut at its end, as the reference does

    llama.cpp's WordPiece differs from the published one in two places: it drops the spacing vowel signs of Indic
    scripts (category Mc), and it does not turn words of more than 100 characters into [UNK].
    """

    def __init__(self, path: str | os.PathLike, *, n_threads: int = 1, max_tokens: int = 256, query_prefix: str = "",
                 document_prefix: str = ""):
        super().__init__(path, n_threads, max_tokens, (MEAN, CLS, LAST), "an embedder")
        self.query_prefix, self.document_prefix = query_prefix, document_prefix

    @property
    def dim(self) -> int:
        """Elements of a vector."""
        return len(self._out)

    def embed_documents(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of the documents, float32[len(texts), dim], each of length 1. Raises EncoderError."""
        if isinstance(texts, str):
            raise EncoderError("embed_documents was given one str; give a list of texts")
        vectors = np.empty((len(texts), self.dim), dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            row[:] = self._embed(self.document_prefix + text)
        return vectors

    def embed_query(self, text: str) -> np.ndarray:
        """Vector of the query, float32[dim], of length 1. Raises EncoderError."""
        return self._embed(self.query_prefix + text)

    def _embed(self, text: str) -> np.ndarray:
        vector = self._check(self.native.embed(utf8(text), self._out.ctypes.data))
        norm = np.sqrt(np.dot(vector, vector))
        if not norm > 0:
            raise EncoderError(f"encoder {self.path} gave a vector of length {norm}; is the file damaged?")
        return vector / norm


class CrossEncoder(_Session):
    """A scorer of pairs: how well a document answers a query, read together as [CLS] query [SEP] document [SEP].

    max_tokens   of a pair, [CLS] and both [SEP] included; a longer pair loses tokens at the end of its longer text
    """

    def __init__(self, path: str | os.PathLike, n_threads: int = 1, max_tokens: int = 256):
        super().__init__(path, n_threads, max_tokens, (RANK,), "a cross-encoder")

    def score(self, query: str, documents: Sequence[str]) -> np.ndarray:
        """Scores of the documents, float32[len(documents)], logits: higher is better. Raises EncoderError."""
        if isinstance(documents, str):
            raise EncoderError("score was given one str as documents; give a list of texts")
        first = utf8(query)
        scores = np.empty(len(documents), dtype=np.float32)
        for index, document in enumerate(documents):
            # A score is the first of the model's outputs, of which it may have more.
            scores[index] = self._check(self.native.score(first, utf8(document), self._out.ctypes.data))[0]
        if not np.isfinite(scores).all():
            raise EncoderError(f"cross-encoder {self.path} gave a score that is no number; is the file damaged?")
        return scores


def utf8(text: str) -> bytes:
    """The text as UTF-8. A lone surrogate becomes U+FFFD, which the tokenizer drops."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()

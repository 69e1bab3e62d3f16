"""Vectors kept on disk by what they were computed from, so that a registry is embedded once and not in every run.

An entry's name is the SHA-256 of everything that determines the vector's bits: the embedder's bytes, llama.cpp's
version, the CPU features it uses, the length limit, and the text with its prefix. Its content is a check sum and the
vector; an entry that does not match its check sum is computed again.
"""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import numpy as np

from nexus import native
from nexus.canonical import sha256_of, write_atomically
from nexus.encoder import Encoder, numerics, utf8

FOLDER = native.ROOT / ".nexus" / "embeddings"


class EmbeddingCache:
    """An Encoder that looks on disk first; vectors are bit-identical to the encoder's own.

    embedder_sha256   of the encoder's file, as verified
    """

    def __init__(self, encoder: Encoder, embedder_sha256: str, folder: Path = FOLDER):
        self.encoder, self.folder = encoder, Path(folder)
        self.hits = self.misses = 0
        """Texts found on disk, and texts computed, since the cache was opened."""
        self._origin = {"embedder": embedder_sha256, "llama_cpp": version("llama-cpp-python"), "cpu": numerics(),
                        "max_tokens": encoder.max_tokens}

    @property
    def dim(self) -> int:
        return self.encoder.dim

    def embed_documents(self, texts: Sequence[str]) -> np.ndarray:
        """As Encoder.embed_documents. Raises OSError when the folder cannot be written."""
        vectors = np.empty((len(texts), self.dim), dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            row[:] = self._vector(self.encoder.document_prefix + text,
                                  lambda text=text: self.encoder.embed_documents([text])[0])
        return vectors

    def embed_query(self, text: str) -> np.ndarray:
        """As Encoder.embed_query. Raises OSError when the folder cannot be written."""
        return self._vector(self.encoder.query_prefix + text, lambda: self.encoder.embed_query(text))

    def path(self, text: str) -> Path:
        """Where the vector of a text, its prefix included, is or will be."""
        # As the encoder reads it: texts that differ only in lone surrogates are one.
        key = sha256_of(self._origin | {"text": utf8(text).decode()})
        return self.folder / key[:2] / f"{key}.f32"

    def _vector(self, text: str, compute) -> np.ndarray:
        path = self.path(text)
        with suppress(OSError):
            content = path.read_bytes()
            if len(content) == 32 + 4 * self.dim and content[:32] == _check_sum(path, content[32:]):
                self.hits += 1
                return np.frombuffer(content, dtype="<f4", offset=32).astype(np.float32)
        self.misses += 1
        vector = compute()
        payload = vector.astype("<f4").tobytes()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _check_sum(path, payload) + payload)
        return vector


def _check_sum(path: Path, payload: bytes) -> bytes:
    # With the name: an entry that was put under another one does not match.
    return hashlib.sha256(path.name.encode() + payload).digest()

"""A kept vector is the encoder's own, bit for bit; whatever else is found on disk is computed again."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bert_reference import toy_model

from nexus import embedding_cache
from nexus.embedding_cache import EmbeddingCache
from nexus.encoder import Encoder
from nexus.minilm import convert

SHA256 = "a" * 64
TEXTS = ["list issues", "open a file", "", "中文", "list \ud800 issues"]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    return convert(toy_model(folder), folder / "toy.gguf")


@pytest.fixture(scope="module")
def encoder(gguf: Path) -> Encoder:
    return Encoder(gguf, max_tokens=64, query_prefix="q: ", document_prefix="d: ")


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_vectors_are_computed_once_and_stay_the_same(encoder: Encoder, tmp_path: Path):
    expected = encoder.embed_documents(TEXTS)
    first = EmbeddingCache(encoder, SHA256, tmp_path)
    np.testing.assert_array_equal(first.embed_documents(TEXTS), expected)
    assert (first.hits, first.misses, first.dim) == (0, 5, 32)
    again = EmbeddingCache(encoder, SHA256, tmp_path)
    found = again.embed_documents(TEXTS)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.float32 and (again.hits, again.misses) == (5, 0)
    assert again.embed_documents([]).shape == (0, 32)


def test_queries_and_documents_are_different_texts(encoder: Encoder, tmp_path: Path):
    cache = EmbeddingCache(encoder, SHA256, tmp_path)
    for _ in range(2):
        np.testing.assert_array_equal(cache.embed_query("list"), encoder.embed_query("list"))
        np.testing.assert_array_equal(cache.embed_documents(["list"])[0], encoder.embed_documents(["list"])[0])
    assert (cache.hits, cache.misses) == (2, 2)


def test_a_found_vector_may_be_changed_by_its_owner(encoder: Encoder, tmp_path: Path):
    cache = EmbeddingCache(encoder, SHA256, tmp_path)
    for _ in range(3):
        vector = cache.embed_query("list")
        np.testing.assert_array_equal(vector, encoder.embed_query("list"))
        vector += 1


def test_whatever_determines_the_bits_is_in_the_name(encoder: Encoder, gguf: Path, tmp_path: Path, monkeypatch):
    EmbeddingCache(encoder, SHA256, tmp_path).embed_query("list")
    paths = {EmbeddingCache(encoder, sha256, tmp_path).path("list") for sha256 in (SHA256, "b" * 64)}
    with Encoder(gguf, max_tokens=63) as shorter:
        paths.add(EmbeddingCache(shorter, SHA256, tmp_path).path("list"))
    monkeypatch.setattr(embedding_cache, "version", lambda _: "0.0.0")
    paths.add(EmbeddingCache(encoder, SHA256, tmp_path).path("list"))
    monkeypatch.setattr(embedding_cache, "numerics", lambda: "CPU : NEON = 1")
    paths.add(EmbeddingCache(encoder, SHA256, tmp_path).path("list"))
    paths.add(EmbeddingCache(encoder, SHA256, tmp_path).path("lists"))
    assert len(paths) == 6


@pytest.mark.parametrize("damage", [
    lambda content: b"",
    lambda content: content[:-4],
    lambda content: content + b"\0\0\0\0",
    lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:],
    lambda content: bytes([content[0] ^ 1]) + content[1:],
])
def test_a_damaged_entry_is_computed_again(encoder: Encoder, tmp_path: Path, damage):
    cache = EmbeddingCache(encoder, SHA256, tmp_path)
    expected = cache.embed_query("list")
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    np.testing.assert_array_equal(cache.embed_query("list"), expected)
    assert (cache.hits, cache.misses) == (0, 2)
    assert path.read_bytes() == whole and files(tmp_path) == [path]


def test_an_entry_under_another_name_is_not_believed(encoder: Encoder, tmp_path: Path):
    cache = EmbeddingCache(encoder, SHA256, tmp_path)
    cache.embed_query("list")
    wrong, right = cache.path("q: list"), cache.path("q: open")
    right.parent.mkdir(exist_ok=True)
    right.write_bytes(wrong.read_bytes())
    np.testing.assert_array_equal(cache.embed_query("open"), encoder.embed_query("open"))


def test_an_unusable_folder_is_an_error(encoder: Encoder, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        EmbeddingCache(encoder, SHA256, tmp_path / "file").embed_query("list")

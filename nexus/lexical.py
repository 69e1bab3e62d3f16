"""BM25 over tool documents: the words of a query against the words of names, descriptions and parameters."""
from __future__ import annotations

import functools
import logging
import re
import unicodedata
from collections.abc import Sequence

import bm25s
import numpy as np
import snowballstemmer
from bm25s.stopwords import STOPWORDS_EN

# It reports every index that it builds.
logging.getLogger("bm25s").setLevel(logging.WARNING)
STOPWORDS = frozenset(STOPWORDS_EN)
# Runs of letters or of digits, a change from lower to upper case being a border: getUserInfo2 is get, user, info, 2.
# Any other letter, such as a CJK character, is a word of its own.
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_a-zA-Z]")


def words(text: str) -> list[str]:
    """The stems of a text's words in order: lower case, without accents, English stop words removed."""
    plain = "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
    return [_stem(word) for word in map(str.lower, WORD.findall(plain)) if word not in STOPWORDS]


class Lexical:
    """An index over documents. Scores are those of Robertson's BM25 (k1 = 1.5, b = 0.75, idf never negative)."""

    def __init__(self, documents: Sequence[str]):
        self.n = len(documents)
        corpus = [words(document) for document in documents]
        self._index = None
        # bm25s refuses a corpus without any word; such documents match nothing.
        if any(corpus):
            self._index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
            self._index.index(corpus, show_progress=False)

    def scores(self, query: str) -> np.ndarray:
        """BM25 of every document, float32[n]; all 0 where no word of the query is in any."""
        asked = words(query)
        if self._index is None or not asked:
            return np.zeros(self.n, dtype=np.float32)
        return np.asarray(self._index.get_scores(asked), dtype=np.float32)

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        """The `k` best documents that share a word with the query, as (id, score), ties by lowest id."""
        scores = self.scores(query)
        order = np.argsort(-scores, kind="stable")[:k]
        return [(int(i), float(scores[i])) for i in order if scores[i] > 0]


@functools.lru_cache(maxsize=1 << 16)
def _stem(word: str) -> str:
    return snowballstemmer.stemmer("english").stemWord(word)

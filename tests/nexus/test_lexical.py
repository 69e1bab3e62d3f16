import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexus.lexical import Lexical, words

TEXT = st.text(st.sampled_from("ab _-"), max_size=12)


@pytest.mark.parametrize(
    ("text", "stems"),
    [
        ("list_pull-requests", ["list", "pull", "request"]),
        ("getUserInfo2", ["get", "user", "info", "2"]),
        ("HTTPServer", ["http", "server"]),
        ("the repositories are closed", ["repositori", "close"]),
        ("Création", ["creation"]),
        ("按名称", ["按", "名", "称"]),
        ("", []),
    ],
)
def test_words_split_identifiers_and_drop_stop_words(text, stems):
    if text == "Création":
        # The stemmer's business; without its accent it is one word.
        assert words(text) == words("creation") and len(words(text)) == 1
    else:
        assert words(text) == stems


def test_scores_are_robertsons():
    documents = ["create issue", "list branch issue", "delete branch branch"]
    lengths, n = [2, 3, 3], 3
    idf = {word: math.log(1 + (n - df + 0.5) / (df + 0.5)) for word, df in {"branch": 2, "delete": 1}.items()}

    def expected(counts, length):
        norm = 1.5 * (1 - 0.75 + 0.75 * length / (sum(lengths) / n))
        return sum(idf[word] * count / (count + norm) for word, count in counts.items())

    scores = Lexical(documents).scores("delete branch")
    np.testing.assert_allclose(scores, [0, expected({"branch": 1}, 3), expected({"branch": 2, "delete": 1}, 3)],
                               rtol=1e-5)


def test_search_orders_by_score_then_index_and_leaves_out_what_shares_no_word():
    index = Lexical(["create issue", "create branch", "create branch", "list commits"])
    found = index.search("branch", 10)
    assert [i for i, _ in found] == [1, 2] and found[0][1] == found[1][1]
    assert [i for i, _ in index.search("create a branch", 1)] == [1]


@pytest.mark.parametrize("documents", [["", "  "], ["the"]])
def test_documents_without_words_match_nothing(documents):
    index = Lexical(documents)
    assert index.search("create branch", 3) == []
    assert index.scores("create branch").tolist() == [0] * len(documents)


@given(st.lists(TEXT, min_size=1, max_size=6), TEXT)
@settings(max_examples=60, deadline=None)
def test_only_documents_that_share_a_word_are_found(documents, query):
    found = Lexical(documents).search(query, len(documents))
    sharing = {i for i, document in enumerate(documents) if set(words(document)) & set(words(query))}
    assert {i for i, _ in found} == sharing
    assert found == sorted(found, key=lambda item: (-item[1], item[0]))

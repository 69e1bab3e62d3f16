import numpy as np
import pytest

from nexus.lexical import Lexical
from nexus.registry import Tool
from nexus.route import Dense, Fused, Gate, Linear, RouteError, Router, retriever_of


def tool(name, description=""):
    return Tool("s", name, description, {})


TOOLS = [tool("create_issue", "Open a bug report."), tool("list_branches"), tool("delete_branch"), tool("merge")]


class Listed:
    """A retriever that answers with a given list."""

    def __init__(self, *found):
        self.found = list(found)

    def search(self, query, k):
        return self.found[:k]


class ToyEncoder:
    """Embeds a text as the counts of four letters: a toy, made for these tests."""

    def embed_query(self, text):
        vector = np.array([text.count(letter) for letter in "abcd"], dtype=np.float32)
        return vector / max(1, np.linalg.norm(vector))


class ToyCrossEncoder:
    """Prefers the document that is longest, and remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def score(self, query, documents):
        self.asked.append(list(documents))
        return np.array([len(document) for document in documents], dtype=np.float32)


def dense():
    return Dense(ToyEncoder(), np.eye(4, dtype=np.float32))


def test_rank_fusion_adds_reciprocal_ranks_and_breaks_ties_by_index():
    fused = Fused(Listed((3, 9.0), (1, 8.0)), Listed((1, 0.4), (0, 0.3)))
    found = fused.search("q", 3)
    assert [index for index, _ in found] == [1, 3, 0]
    assert found[0][1] == pytest.approx(1 / 62 + 1 / 61) and found[2][1] == pytest.approx(1 / 62)
    assert [i for i, _ in Fused(Listed((2, 1.0)), Listed((1, 1.0))).search("q", 2)] == [1, 2]


class Scored:
    """A lexical index with given scores."""

    def __init__(self, *scores):
        self.given = np.array(scores, dtype=np.float32)

    def scores(self, query):
        return self.given


def test_a_weighted_sum_adds_lexical_scores_relative_to_the_largest():
    found = Linear(Listed((3, 0.5), (1, 0.45), (0, 0.1)), Scored(8.0, 4.0, 0.0, 1.0), 0.2).search("q", 2)
    assert [index for index, _ in found] == [1, 3]
    assert [score for _, score in found] == pytest.approx([0.45 + 0.2 * 0.5, 0.5 + 0.2 / 8])


def test_a_weighted_sum_without_a_common_word_is_the_dense_order_with_ties_by_index():
    found = Linear(Listed((2, 0.5), (1, 0.5), (0, 0.1)), Scored(0.0, 0.0, 0.0), 0.2).search("q", 3)
    assert found == [(1, 0.5), (2, 0.5), (0, 0.1)]


def test_a_clear_first_is_taken_without_the_cross_encoder():
    cross = ToyCrossEncoder()
    router = Router(TOOLS, Listed((1, 0.9), (0, 0.2), (2, 0.1)), gate=Gate(0.5, cross, 2))
    route = router.route("branches", top=2)
    assert route.tool == TOOLS[1] and not route.gate_fired and cross.asked == []
    assert route.margin == pytest.approx(0.7) and len(route.candidates) == 2


@pytest.mark.parametrize("second", [0.4, 0.9])
def test_a_margin_up_to_tau_asks_the_cross_encoder_about_the_first_few(second):
    cross = ToyCrossEncoder()
    router = Router(TOOLS, Listed((1, 0.9), (0, second), (2, 0.1)), gate=Gate(0.5, cross, 2))
    route = router.route("branches")
    assert route.gate_fired and cross.asked == [["list branches", "create issue. Open a bug report."]]
    assert [c.tool.name for c in route.candidates] == ["create_issue", "list_branches", "delete_branch"]
    assert [tool.name for tool in route.retrieved] == ["list_branches", "create_issue", "delete_branch"]
    assert [c.cross_score is None for c in route.candidates] == [False, False, True]


def test_one_or_no_candidate_fires_no_gate():
    gate = Gate(1.0, ToyCrossEncoder())
    alone = Router(TOOLS, Listed((2, 0.5)), gate=gate).route("q")
    assert alone.tool == TOOLS[2] and alone.margin is None and not alone.gate_fired
    nothing = Router(TOOLS, Listed(), gate=gate).route("q")
    assert nothing.tool is None and nothing.candidates == [] and not nothing.gate_fired


def test_dense_search_reports_time_and_cosine_and_abstains_below_a_threshold():
    part = dense()
    router = Router(TOOLS, part, part, abstain_below=0.9)
    sure = router.route("bbbb")
    assert sure.tool == TOOLS[1] and not sure.abstained and sure.best_cosine == pytest.approx(1, abs=0.02)
    assert sure.scan_us > 0 and sure.total_ms * 1e3 >= sure.scan_us
    torn = router.route("aabb")
    assert torn.abstained and torn.tool is None and torn.candidates[0].tool == TOOLS[0]


def test_systems_are_made_by_name():
    part = dense()
    assert retriever_of("slb+gate", TOOLS, part, 0.5) is part
    assert isinstance(retriever_of("bm25", TOOLS, None, 0.5), Lexical)
    hybrid = retriever_of("hybrid+gate", TOOLS, part, 0.5)
    assert isinstance(hybrid, Fused) and hybrid.parts[0] is part
    linear = retriever_of("linear-tuned+gate", TOOLS, part, 0.5)
    assert isinstance(linear, Linear) and linear.dense is part and linear.weight == 0.5
    assert [i for i, _ in retriever_of("bm25", TOOLS, None, 0.5).search("a bug in a branch", 4)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Router([], Listed()), "the registry has no tools"),
        (lambda: Router(TOOLS, Listed()).route(" \n"), "the query is blank"),
        (lambda: Router(TOOLS, Listed(), gate=Gate(0.1, None, 1)), "n_candidates is 1"),
        (lambda: Router(TOOLS, Listed(), abstain_below=0.1), "abstain_below compares cosines"),
        (lambda: retriever_of("sbl", TOOLS, None, 0.5), "system 'sbl' is unknown; use one of slb, slb-tuned"),
        (lambda: retriever_of("hybrid", TOOLS, None, 0.5), "system 'hybrid' needs the embeddings"),
    ],
)
def test_what_cannot_be_routed_is_refused(call, message):
    with pytest.raises(RouteError, match=message):
        call()

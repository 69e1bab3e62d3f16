"""Traces of agents: what they are meant to hold is in them, and the same arguments give the same requests."""
from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexus.agent_trace import MOST, Request, TraceError, Traffic, agent_trace

SOURCE = np.random.default_rng(0).integers(0, 50_000, 6000).astype(np.int32)
QUIET = Traffic(n_sessions=1, n_turns=6, p_retry=0, p_new=0, p_subagent=0, context_tokens=50_000)


def common(a: Request, b: Request) -> int:
    n = min(len(a.tokens), len(b.tokens))
    differ = np.flatnonzero(a.tokens[:n] != b.tokens[:n])
    return int(differ[0]) if len(differ) else n


def test_the_same_seed_gives_the_same_requests_and_another_one_others():
    first, again, other = (agent_trace(Traffic(), SOURCE, seed) for seed in (1, 1, 2))
    assert [(r.session, r.kind, r.n_common, r.tokens.tolist()) for r in first] == [
        (r.session, r.kind, r.n_common, r.tokens.tolist()) for r in again]
    assert [r.tokens.tolist() for r in first] != [r.tokens.tolist() for r in other]


def test_a_conversation_without_events_only_grows():
    requests = agent_trace(QUIET, SOURCE, 1)
    kinds = Counter(request.kind for request in requests)
    assert kinds["turn"] == 6 and kinds["step"] > 3 and set(kinds) == {"turn", "step"}
    for before, after in zip(requests, requests[1:]):
        assert common(before, after) == len(before.tokens) < len(after.tokens)


@pytest.mark.parametrize("traffic, kind", [(replace(QUIET, p_retry=0.5), "retry"),
                                           (replace(QUIET, p_subagent=0.5, n_turns=20), "subagent")])
def test_a_retry_branches_off_before_the_last_exchange_and_a_subagent_has_its_own_prompt(traffic, kind):
    requests = agent_trace(traffic, SOURCE, 3)
    found = [i for i, request in enumerate(requests) if request.kind == kind]
    assert len(found) > 3
    for i in found:
        request, before = requests[i], requests[i - 1]
        if kind == "retry":
            assert request.n_common <= common(request, before) < len(before.tokens)
        else:
            assert request.n_common == traffic.subagent_tokens
            # A sub-agent's first request shares nothing with its caller, the next ones begin with the one before.
            assert common(request, before) in ((0, len(before.tokens)) if before.kind == kind else (0,))


def test_a_new_conversation_keeps_the_system_prompt_alone():
    requests = agent_trace(replace(QUIET, n_turns=40, p_new=0.3), SOURCE, 2)
    fresh = [i for i, (a, b) in enumerate(zip(requests, requests[1:]), 1) if common(a, b) == QUIET.system_tokens]
    assert 5 < len(fresh) < 20 and all(requests[i].kind == "turn" for i in fresh)


def test_conversations_interleave_and_all_come_to_their_end():
    traffic = Traffic()
    requests = agent_trace(traffic, SOURCE, 4)
    turns = Counter(request.session for request in requests if request.kind == "turn")
    assert turns == {session: traffic.n_turns for session in range(traffic.n_sessions)}
    switches = sum(a.session != b.session for a, b in zip(requests, requests[1:]))
    assert 0.2 * len(requests) < switches < 0.8 * len(requests)
    assert all(np.array_equal(request.tokens[:500], requests[0].tokens[:500]) for request in requests
               if request.kind != "subagent")


def test_a_conversation_that_outgrows_its_window_goes_on_with_a_summary():
    requests = agent_trace(replace(QUIET, n_turns=40, context_tokens=1500), SOURCE, 5)
    lengths = [len(request.tokens) for request in requests]
    assert max(lengths) <= 1500
    compacted = [i for i, (a, b) in enumerate(zip(lengths, lengths[1:]), 1) if b < a]
    assert len(compacted) > 3
    for i in compacted:
        assert common(requests[i - 1], requests[i]) == QUIET.system_tokens


def test_lengths_scatter_around_their_medians():
    traffic = replace(QUIET, n_sessions=20, n_turns=1, p_call=0)
    lengths = [len(r.tokens) - r.n_common for seed in range(40) for r in agent_trace(traffic, SOURCE, seed)]
    assert len(lengths) == 800
    assert 36 <= np.median(lengths) <= 44 and max(lengths) <= MOST * 40
    assert np.percentile(lengths, 95) > 3 * 40


@given(seed=st.integers(0, 1000), context=st.integers(60, 400), system=st.integers(1, 59),
       chances=st.lists(st.floats(0, 0.9), min_size=5, max_size=5))
@settings(max_examples=60, deadline=None)
def test_every_prompt_has_text_behind_its_opening_and_fits_its_window(seed, context, system, chances):
    names = ("p_call", "p_switch", "p_retry", "p_new", "p_subagent")
    traffic = Traffic(n_sessions=2, n_turns=3, system_tokens=system, subagent_tokens=10, context_tokens=context,
                      **dict(zip(names, chances)))
    for request in agent_trace(traffic, SOURCE[:500], seed):
        assert request.n_common < len(request.tokens) <= context and request.tokens.dtype == np.int32


@pytest.mark.parametrize("change, message", [
    ({"p_retry": 1.0}, "p_retry is 1.0; a chance is 0 or more, and below 1"),
    ({"p_call": -0.1}, "p_call is -0.1"),
    ({"n_turns": 0}, "n_turns is 0; give at least 1"),
    ({"context_tokens": 500}, "context_tokens is 500; more than the 500 tokens"),
])
def test_parameters_that_make_no_trace_are_refused(change, message):
    with pytest.raises(TraceError, match=message):
        Traffic(**change)


def test_a_source_that_is_too_short_is_refused():
    with pytest.raises(TraceError, match="source has 500 tokens; more than 500 are needed"):
        agent_trace(Traffic(), SOURCE[:500], 0)

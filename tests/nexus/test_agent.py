"""The agent's turn: routing, arguments, the main sequence, Path B, and several threads on one runtime."""
import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from nexus.agent import Agent, AgentError, MainContext, PathB, parsed
from nexus.arguments import Filled
from nexus.blocks import block_split, compile_blocks
from nexus.config import Arguments
from nexus.constrain import Bounds, Grammars
from nexus.prompt import block_tokens, query_tokens, system_tokens
from nexus.registry import Tool
from nexus.repair import arm_of
from nexus.route import Route, RouteError, Router, retriever_of
from nexus.runtime import ContextOptions, Runtime
from nexus.sidecar import Sidecar, lock_of
from nexus.splice import Splicer
from nexus.window import WindowError

OPTIONS = Arguments(signature_tokens=48, described_tokens=24, window_tokens=120, recent_turns=1,
                    surrogate_chars=80, max_tokens=20, max_string_chars=12, max_items=2)


def tool(name, description, **properties):
    return Tool("home", name, description, {"type": "object", "properties": properties, "required": [*properties]})


LIGHT = tool("set_light", "Switch the light of a room.", room={"enum": ["kitchen", "attic", "garden"]})
SONG = tool("play_music", "Play a song loudly.", volume={"type": "integer", "minimum": 0, "maximum": 11})
TOOLS = [LIGHT, SONG]
QUERIES = ["Switch the light of the attic on.", "Play a song at volume 3.", "Switch the light of the garden off.",
           "Play a song at volume 9."]
HEAD = 3


class Recorded:
    """A filler that answers with what it was asked."""

    def __init__(self):
        self.lock, self.asked = threading.RLock(), []

    def signature(self, tool):
        return f"{tool.name}()"

    def fill(self, tool, query, history=(), schema="signature"):
        self.asked.append((tool, query, list(history)))
        return Filled({"room": "attic"}, '{"room":"attic"}', False, ("$: odd",), 9, 5, 1, (), 1.0, 2.0)


class Remote:
    """A model behind a text interface, that gives one answer."""

    def __init__(self, answer):
        self.answer, self.seen = answer, []

    def complete(self, messages, schema):
        self.seen.append((messages, schema))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def router():
    return Router(TOOLS, retriever_of("bm25", TOOLS, None, 0.0))


# Turns


def test_a_turn_routes_and_fills(router):
    filler, history = Recorded(), [{"role": "user", "content": "Hello."}]
    turn = Agent(router, filler).turn(QUERIES[0], history)
    assert turn.tool is LIGHT and turn.route.candidates[0].tool is LIGHT and turn.reason is None
    assert turn.signature == "set_light()" and turn.placement is None
    assert filler.asked == [(LIGHT, QUERIES[0], history)]
    assert turn.call == {"server": "home", "tool": "set_light", "arguments": {"room": "attic"}, "valid": False,
                         "problems": ["$: odd"]}


def test_a_given_tool_is_not_looked_for():
    turn = Agent(None, Recorded()).turn("anything", tool=SONG)
    assert turn.tool is SONG and turn.route is None and turn.call["tool"] == "play_music"


def test_without_a_fitting_tool_nothing_is_filled(router):
    filler = Recorded()
    turn = Agent(router, filler).turn("xylophone")
    assert (turn.tool, turn.filled, turn.call) == (None, None, None)
    assert turn.reason == "no tool of 2 shares anything with the query"
    far = Route(router.route(QUERIES[0]).candidates, TOOLS, 0.1, False, True, 0.123, 1.0, 1.0)

    class Unsure:
        tools = TOOLS

        def route(self, query):
            return far

    turn = Agent(Unsure(), filler).turn("anything")
    assert turn.tool is None and turn.reason == "probably no tool fits: the nearest has a cosine of 0.12"
    assert turn.route is far and filler.asked == []
    with pytest.raises(RouteError, match="the query is blank"):
        Agent(router, filler).turn(" ")


def test_a_turn_holds_the_locks_of_its_parts(router):
    """Others wait for the filler's lock, and for the router's, which may serve several runtimes."""
    filler, free = Recorded(), {}

    def try_locks():
        for name, lock in (("filler", filler.lock), ("router", lock_of(router))):
            free[name] = lock.acquire(blocking=False)
            if free[name]:
                lock.release()

    route = router.route

    def watched(query):
        other = threading.Thread(target=try_locks)
        other.start()
        other.join()
        return route(query)

    router.route = watched
    with filler.lock:  # re-entrant
        Agent(router, filler).turn(QUERIES[0])
    assert free == {"filler": False, "router": False}
    try_locks()
    assert free == {"filler": True, "router": True}


# Path B


def test_a_remote_model_gets_signature_window_and_query_as_text(router):
    remote = Remote('{"room": "attic"}')
    rooms = json.dumps([{"room": f"room {i}", "wiring": "copper " * 30} for i in range(9)])
    history = [{"role": "user", "content": "List the rooms."}, {"role": "tool", "name": "list_rooms", "content": rooms},
               {"role": "assistant", "content": "Nine rooms."}]
    turn = Agent(router, PathB(remote, OPTIONS, "You run a house.")).turn(QUERIES[0], history)
    assert turn.call == {"server": "home", "tool": "set_light", "arguments": {"room": "attic"}, "valid": True,
                         "problems": []}
    [(messages, schema)] = remote.seen
    assert schema is LIGHT.input_schema
    assert [message["role"] for message in messages] == ["system", "user", "user", "assistant", "user"]
    assert all(set(message) == {"role", "content"} for message in messages)
    assert messages[0]["content"].startswith("You run a house.") and turn.signature.text in messages[0]["content"]
    assert messages[1]["content"] == "List the rooms." and messages[-1]["content"] == QUERIES[0]
    assert messages[2]["content"].startswith(f"Result of list_rooms:\n[{len(rooms)} characters]")
    assert "copper" not in messages[2]["content"]


@pytest.mark.parametrize("answer, arguments, problem", [
    ('{"room": "attic"}', {"room": "attic"}, None),
    ('Gladly:\n```json\n{"room": "attic"}\n```\nDone.', {"room": "attic"}, None),
    ('{"room": "cellar"}', {"room": "cellar"}, "'cellar' is not one of"),
    ("{}", {}, "'room' is a required property"),
    ("The attic.", {}, "the answer is no JSON"),
    ('["attic"]', {}, 'the answer is ["attic"] and no JSON object'),
    ('{"room": NaN}', {}, "NaN is not JSON"),
])
def test_a_free_answer_is_read_and_held_against_the_schema(answer, arguments, problem):
    found, problems = parsed(answer, LIGHT.input_schema)
    assert found == arguments
    assert (problems == ()) if problem is None else problem in problems[0]
    filled = PathB(Remote(answer), OPTIONS, "").fill(LIGHT, QUERIES[0])
    assert (filled.arguments, filled.valid, filled.text) == (arguments, problem is None, answer)


def test_what_the_remote_model_raises_is_raised(router):
    agent = Agent(router, PathB(Remote(ConnectionError("no route")), OPTIONS, ""))
    with pytest.raises(ConnectionError, match="no route"):
        agent.turn(QUERIES[0])
    with pytest.raises(WindowError, match="history item 0: role is 'system'"):
        agent.turn(QUERIES[0], [{"role": "system", "content": "x"}])
    with lock_of(agent.filler.remote):
        pass


def test_a_main_sequence_needs_the_sidecars_runtime(router):
    main = MainContext(SimpleNamespace(), 0, None, None, None)
    with pytest.raises(AgentError, match="main: its runtime is not the sidecar's"):
        Agent(router, Recorded(), main=main)
    runtime = type("Shared", (), {"scratch_seq": 3})()
    sidecar = Sidecar(runtime, None, seq=1, options=OPTIONS, system_prompt="")
    with pytest.raises(AgentError, match="main.seq is 1, which the sidecar uses"):
        Agent(router, sidecar, main=MainContext(runtime, 1, None, None, None))


# On a model


@pytest.fixture(scope="module")
def grammars(smollm2):
    return Grammars(smollm2, bounds=Bounds(max_string_chars=12, max_items=2))


@pytest.fixture
def runtime(smollm2):
    with Runtime(smollm2, ContextOptions(n_ctx=1024, n_batch=256, n_seq_max=5, n_threads=1)) as runtime:
        yield runtime


def sidecar_of(runtime, grammars, head_seq=None):
    return Sidecar(runtime, grammars, seq=1, head_seq=head_seq, options=OPTIONS, system_prompt="")


def ends(runtime):
    return [runtime.pos_max(seq) for seq in range(runtime.options.n_seq_max)]


def recorded(runtime, monkeypatch):
    """Hashes of all logits that the runtime returns from now on, by thread."""
    seen, decode = {}, runtime.decode

    def hashed(*args, **kwargs):
        logits = decode(*args, **kwargs)
        if logits is not None:
            seen.setdefault(threading.get_ident(), []).append(hashlib.sha256(logits.tobytes()).hexdigest())
        return logits

    monkeypatch.setattr(runtime, "decode", hashed)
    return seen


def interleaved(runtime, grammars, router, monkeypatch, repetitions):
    """Four threads with an agent each, on one runtime, give what one thread gives: texts, tokens and all logits."""
    seen = recorded(runtime, monkeypatch)

    def turns(queries):
        agent, told = Agent(router, sidecar_of(runtime, grammars, HEAD)), []
        for query in queries:
            seen.pop(threading.get_ident(), None)
            turn = agent.turn(query)
            told.append((turn.tool.name, turn.filled.text, turn.filled.n_tokens, seen[threading.get_ident()]))
        return told

    pairs = [[query, QUERIES[i - 1]] for i, query in enumerate(QUERIES)]
    expected = [turns(pair) for pair in pairs]
    assert len({json.dumps(each) for told in expected for each in told}) == len(QUERIES)
    left = ends(runtime)
    assert [seq for seq, end in enumerate(left) if end >= 0] == [HEAD]
    with ThreadPoolExecutor(len(pairs)) as pool:
        for _ in range(repetitions):
            assert list(pool.map(turns, pairs)) == expected
            assert ends(runtime) == left


@pytest.mark.integration
def test_threads_give_what_one_thread_gives(runtime, grammars, router, monkeypatch):
    interleaved(runtime, grammars, router, monkeypatch, 1)


@pytest.mark.integration
@pytest.mark.slow
def test_threads_give_what_one_thread_gives_twenty_times(runtime, grammars, router, monkeypatch):
    interleaved(runtime, grammars, router, monkeypatch, 20)


@pytest.mark.integration
def test_an_error_in_one_thread_leaves_the_others_alone(runtime, grammars, router, monkeypatch):
    agent = Agent(router, sidecar_of(runtime, grammars))
    expected, decode = agent.turn(QUERIES[0]).filled.text, runtime.decode
    broken = threading.local()

    def sometimes(tokens, *args, **kwargs):
        logits = decode(tokens, *args, **kwargs)
        if getattr(broken, "here", False) and len(tokens) == 1:
            raise KeyboardInterrupt
        return logits

    monkeypatch.setattr(runtime, "decode", sometimes)

    def one(here):
        broken.here = here
        try:
            return agent.turn(QUERIES[0]).filled.text
        except KeyboardInterrupt:
            return "stopped"

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(one, [True, False] * 3))
    assert told == ["stopped", expected] * 3
    assert ends(runtime) == [-1] * 5


class Fixed:
    """A policy of one arm."""

    def __init__(self, name, behind="system"):
        self.name, self.behind = name, behind

    def arm(self, n_past):
        return arm_of(self.name)

    def compiled_behind(self, n_past):
        return self.behind


@pytest.fixture
def conversation(smollm2):
    return np.concatenate([system_tokens(smollm2, "You run a house."), query_tokens(smollm2, "Good morning, house!")])


@pytest.mark.integration
def test_the_tools_block_is_spliced_into_the_main_sequence_or_prefilled(runtime, smollm2, grammars, router,
                                                                        conversation):
    splicer, tokens = Splicer(runtime), block_tokens(smollm2, LIGHT)
    [block] = compile_blocks(runtime, system_tokens(smollm2, "You run a house."), [tokens])
    runtime.clear()
    resident = splicer.hold(block)

    def place(policy, splicer=splicer, resident=resident):
        runtime.clear()
        runtime.decode(conversation, 0, 0)
        main = MainContext(runtime, 0, policy, splicer, lambda tool: resident if tool is LIGHT else None)
        turn = Agent(router, sidecar_of(runtime, grammars), main=main).turn(QUERIES[0])
        assert ends(runtime) == [len(conversation) + len(tokens) - 1, -1, -1, -1, -1]
        logits = runtime.decode(query_tokens(smollm2, "Next."), len(conversation) + len(tokens), 0, logits=True)
        return turn.placement, turn.filled.text, logits

    placement, text, spliced = place(Fixed("head-4"))
    assert (placement.path, placement.reason) == ("splice", None)
    runtime.clear()
    runtime.decode(conversation, 0, 0)
    runtime.decode(tokens, len(conversation), 0, split=block_split(len(tokens)))
    true = runtime.decode(query_tokens(smollm2, "Next."), len(conversation) + len(tokens), 0, logits=True)
    assert not np.array_equal(spliced, true)
    for policy, changed, reason in [
        (Fixed("full"), {}, "the policy prefills at depth"),
        (Fixed("head-4", "ensemble-4x256"), {}, "compiled behind 'system'"),
        (Fixed("head-4"), {"splicer": None}, "no splicer"),
        (Fixed("head-4"), {"resident": None}, "the tool has no compiled block"),
    ]:
        placement, filled, logits = place(policy, **changed)
        assert placement.path == "prefill" and reason in placement.reason
        assert filled == text and np.array_equal(logits, true)


@pytest.mark.integration
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_takes_the_block_out_of_the_main_sequence(error, runtime, grammars, router, conversation, monkeypatch):
    runtime.decode(conversation, 0, 0)
    before = runtime.state_get(0)
    sidecar = sidecar_of(runtime, grammars)
    main = MainContext(runtime, 0, Fixed("full"), None, lambda tool: None)
    decode, placed = runtime.decode, []

    def broken(*args, **kwargs):
        if args[2] == sidecar.seq:
            placed.append(runtime.pos_max(0))
            raise error("no")
        return decode(*args, **kwargs)

    monkeypatch.setattr(runtime, "decode", broken)
    with pytest.raises(error):
        Agent(router, sidecar, main=main).turn(QUERIES[0])
    assert placed[0] > len(conversation) - 1
    assert ends(runtime) == [len(conversation) - 1, -1, -1, -1, -1]
    assert np.array_equal(runtime.state_get(0), before)

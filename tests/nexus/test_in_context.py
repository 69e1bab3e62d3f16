"""Choosing a tool from the prompt: forced names, told overflow, a shared prefix that changes nothing."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nexus.config import ROOT
from nexus.in_context import InContextChooser, InContextError, call_instruction, call_opening, labels
from nexus.name_automaton import AutomatonError, Vocabulary
from nexus.prompt import block_tokens, query_tokens, system_tokens
from nexus.registry import Tool, load_registry
from nexus.runtime import ContextOptions, Runtime, RuntimeFailure

SYSTEM = "You are a helpful assistant. Use the tools that you are given."
N_CTX = 1024
OPTIONS = ContextOptions(n_ctx=N_CTX, n_batch=128, n_seq_max=4, n_threads=1)
PREFIX, WORK = 0, 1


def tool(name, server=None, description=""):
    return Tool(server, name, description, {"type": "object", "properties": {"id": {"type": "string"}}})


TOOLS = [tool("get_weather", description="Weather forecast for a city."),
         tool("get_weather_history", description="Past weather of a city."),
         tool("send_mail", description="Sends an e-mail message.")]
QUERIES = ("Will it rain in Oslo tomorrow?", "Write Ann a mail that I am late.", "How warm was it last May?")


@pytest.mark.parametrize("tools, expected", [
    ([tool("a", "x"), tool("b", "x")], ["a", "b"]),
    ([tool("a", "x"), tool("a", "y"), tool("b", "y")], ["x/a", "y/a", "b"]),
    ([tool("a"), tool("a", "y")], ["a", "y/a"]),
])
def test_only_names_that_several_servers_use_are_offered_with_their_server(tools, expected):
    assert labels(tools) == expected


@pytest.mark.parametrize("tools", [[tool("a", "x"), tool("a", "x")], [tool("a"), tool("a")],
                                   [tool("x/a", "z"), tool("a", "x"), tool("a", "y")]])
def test_tools_that_would_be_offered_alike_are_refused(tools):
    with pytest.raises(InContextError, match="are both offered as .*offer each tool once"):
        labels(tools)


class Template:
    """A model whose file has this chat template."""

    def __init__(self, text):
        self.native, self.text = self, text

    def chat_template(self):
        return self.text


@pytest.mark.parametrize("template, opening, closing", [
    ("{% if tools %}<tool_call>\n{% endif %}<|im_start|>", '<tool_call>\n{"name": "', "}\n</tool_call>"),
    ("[INST]{% if tools %}[TOOL_CALLS]{% endif %}", '[TOOL_CALLS][{"name": "', "}]"),
    (b"<|im_start|>", '{"name": "', "object>}"),
    ("", '{"name": "', "object>}"),
])
def test_a_call_is_written_and_told_as_the_models_own_template_writes_it(template, opening, closing):
    model = Template(template)
    assert call_opening(model) == opening
    told = call_instruction(model)
    assert opening[:-1] + "<function-name>" in told and told.endswith(closing)


@pytest.fixture(scope="module")
def vocabulary(smollm2):
    return Vocabulary.of(smollm2)


@pytest.fixture(scope="module")
def runtime(smollm2):
    with Runtime(smollm2, OPTIONS) as runtime:
        yield runtime


@pytest.fixture
def chooser(runtime, vocabulary):
    runtime.clear()
    with InContextChooser(runtime, SYSTEM, vocabulary=vocabulary) as chooser:
        yield chooser
    assert [runtime.pos_max(seq) for seq in range(OPTIONS.n_seq_max)] == [-1] * OPTIONS.n_seq_max


@pytest.fixture
def logits(runtime, monkeypatch):
    """Every logits vector that the runtime computed, in turn."""
    found, decode = [], runtime.decode

    def recording(*args, **kwargs):
        result = decode(*args, **kwargs)
        if result is not None:
            found.append(result.copy())
        return result

    monkeypatch.setattr(runtime, "decode", recording)
    return found


def system_part(model):
    return system_tokens(model, f"{SYSTEM}\n\n{call_instruction(model)}")


def held(runtime):
    return [runtime.pos_max(seq) + 1 for seq in range(OPTIONS.n_seq_max)]


@pytest.mark.integration
def test_the_prompt_is_system_tools_query_and_opening_and_the_answer_is_the_best_name(smollm2, runtime, chooser):
    opening = smollm2.tokenize(call_opening(smollm2))
    blocks = [block_tokens(smollm2, each) for each in TOOLS]
    for query in QUERIES[:2]:
        prompt = np.concatenate([system_part(smollm2), *blocks, query_tokens(smollm2, query), opening])
        choice = chooser.choose(TOOLS, query)
        assert choice.status == "ok" and choice.tool in TOOLS and choice.names_considered == 3
        assert choice.prompt_tokens == chooser.prompt_tokens(TOOLS, query) == len(prompt)
        assert 0 < choice.ttft_ms
        # The same walk without the automaton: at each token every name's own bytes decide which pieces may follow.
        assert choice.tool.name == greedy_name(smollm2, runtime, chooser.vocabulary.pieces, prompt, TOOLS)


def greedy_name(model, runtime, pieces, prompt, tools):
    seq, written = 2, b""
    keys = {f'{each.name}"'.encode(): each.name for each in tools}
    try:
        logits = runtime.decode(prompt, 0, seq, logits=True)
        while not any(written.startswith(key) for key in keys):
            rests = [key[len(written):] for key in keys if key.startswith(written)]
            allowed = [token for token, piece in enumerate(pieces)
                       if piece and any(piece.startswith(rest) or rest.startswith(piece) for rest in rests)]
            token = allowed[int(np.argmax(logits[allowed]))]
            written += pieces[token]
            logits = runtime.decode(np.array([token]), runtime.pos_max(seq) + 1, seq, logits=True)
    finally:
        runtime.seq_rm(seq)
    return next(name for key, name in keys.items() if written.startswith(key))


@pytest.mark.integration
def test_a_shared_prefix_gives_the_same_bits_as_none(runtime, chooser, logits):
    shared = [chooser.choose(TOOLS, query) for query in QUERIES]
    shared_logits = list(logits)
    logits.clear()
    alone = []
    for query in QUERIES:
        runtime.clear()
        alone.append(chooser.choose(TOOLS, query))
    assert len(logits) == len(shared_logits) >= len(QUERIES)
    for ours, theirs in zip(shared_logits, logits):
        np.testing.assert_array_equal(ours, theirs)
    assert [c.tool for c in shared] == [c.tool for c in alone]
    n_prefix = len(chooser._offered(TOOLS).prefix)
    assert [c.resident_tokens for c in shared] == [0, n_prefix, n_prefix]
    assert [c.resident_tokens for c in alone] == [0, 0, 0]


@pytest.mark.integration
def test_other_tools_replace_those_before_them_and_give_the_same_bits_as_alone(smollm2, runtime, chooser, logits):
    chooser.choose(TOOLS, QUERIES[0])
    logits.clear()
    after = chooser.choose(TOOLS[1:], QUERIES[2])
    after_logits = list(logits)
    assert after.resident_tokens == len(system_part(smollm2))
    chooser.forget()
    runtime.clear()
    logits.clear()
    alone = chooser.choose(TOOLS[1:], QUERIES[2])
    assert alone.resident_tokens == 0 and alone.tool == after.tool and len(logits) == len(after_logits)
    for ours, theirs in zip(after_logits, logits):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.integration
def test_with_a_sliding_window_other_tools_begin_anew(smollm2, chooser, monkeypatch):
    monkeypatch.setattr(smollm2, "n_swa", 4096)
    assert [chooser.choose(tools, QUERIES[0]).resident_tokens for tools in (TOOLS[:1], TOOLS[1:2])] == [0, 0]
    assert chooser.choose(TOOLS[1:2], QUERIES[1]).resident_tokens > 0


@pytest.mark.integration
def test_an_empty_instruction_leaves_the_system_prompt_as_it_is(smollm2, runtime, vocabulary, chooser):
    plain = InContextChooser(runtime, SYSTEM, instruction="", vocabulary=vocabulary)
    assert chooser.prompt_tokens(TOOLS, QUERIES[0]) - plain.prompt_tokens(TOOLS, QUERIES[0]) \
        == len(system_part(smollm2)) - len(system_tokens(smollm2, SYSTEM)) > 0


@pytest.mark.integration
def test_one_name_left_needs_no_further_token(chooser):
    assert chooser.choose(TOOLS[2:], QUERIES[0]).decoded_tokens == 1
    far = [tool("abc_one"), tool("abc_two")]
    assert chooser.choose(far, QUERIES[0]).decoded_tokens >= 2


@pytest.mark.integration
def test_tools_of_one_name_are_told_apart_in_prompt_and_answer(smollm2, chooser):
    twins = [tool("search", "mail", "Search mail."), tool("search", "web", "Search the web.")]
    choice = chooser.choose(twins, "Find a recipe for bread on the internet.")
    assert choice.tool in twins
    prompt = smollm2.detokenize(chooser._offered(twins).prefix)
    assert '"name":"mail/search"' in prompt and '"name":"web/search"' in prompt


@pytest.mark.integration
def test_names_with_quotes_and_cjk_can_be_chosen(chooser):
    odd = [tool('say "hi"', description="Greets."), tool("工具を選ぶ", description="Picks a tool.")]
    assert chooser.choose(odd, "Say hello.").tool in odd


@pytest.mark.integration
def test_overflow_is_told_with_its_token_count_and_nothing_is_decoded(smollm2, runtime, chooser, logits):
    many = load_registry(ROOT / "experiments" / "data" / "github_style_tools.json").tools
    choice = chooser.choose(many, QUERIES[0])
    assert (choice.status, choice.tool, choice.ttft_ms, choice.decoded_tokens) == ("overflow", None, None, 0)
    expected = sum(map(len, (system_part(smollm2), *(block_tokens(smollm2, each) for each in many),
                             query_tokens(smollm2, QUERIES[0]), smollm2.tokenize(call_opening(smollm2)))))
    assert choice.prompt_tokens == expected > N_CTX and choice.names_considered == len(many)
    assert logits == [] and held(runtime) == [0, 0, 0, 0]


@pytest.mark.integration
def test_the_window_leaves_room_for_the_longest_name(runtime, vocabulary, chooser):
    needed = chooser.prompt_tokens(TOOLS, QUERIES[0]) + len('get_weather_history"')
    for window, status in ((needed, "ok"), (needed - 1, "overflow")):
        with InContextChooser(runtime, SYSTEM, window=window, vocabulary=vocabulary) as narrow:
            assert narrow.choose(TOOLS, QUERIES[0]).status == status


@pytest.mark.integration
def test_the_model_s_own_window_counts_where_it_is_smaller(smollm2, runtime, vocabulary, monkeypatch):
    assert InContextChooser(runtime, SYSTEM, vocabulary=vocabulary).window == N_CTX < smollm2.n_ctx_train
    monkeypatch.setattr(smollm2, "n_ctx_train", 100)
    assert InContextChooser(runtime, SYSTEM, vocabulary=vocabulary).window == 100


@pytest.mark.integration
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_failed_decode_leaves_no_copy_behind_and_the_next_choice_is_right(runtime, chooser, monkeypatch, at):
    expected = chooser.choose(TOOLS[:2], QUERIES[0])
    chooser.forget()
    decode, calls = runtime.decode, []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == at:
            raise RuntimeFailure("no room")
        return decode(*args, **kwargs)

    monkeypatch.setattr(runtime, "decode", failing)
    with pytest.raises(RuntimeFailure, match="no room"):
        chooser.choose(TOOLS[:2], QUERIES[0])
    n_prefix = 0 if at == 1 else len(chooser._offered(TOOLS[:2]).prefix)
    assert held(runtime) == [n_prefix, 0, 0, 0], "the tools may stay, the query may not"
    again = chooser.choose(TOOLS[:2], QUERIES[0])
    assert again.tool == expected.tool and again.resident_tokens == n_prefix


@pytest.mark.integration
def test_cells_held_by_another_sequence_are_an_error_that_leaves_nothing(smollm2, vocabulary):
    with Runtime(smollm2, replace(OPTIONS, n_ctx=512)) as crowded:
        crowded.decode(np.arange(100, 484), 0, 2)
        chooser = InContextChooser(crowded, SYSTEM, instruction="", vocabulary=vocabulary)
        assert chooser.prompt_tokens(TOOLS, QUERIES[0]) > 128
        with pytest.raises(RuntimeFailure, match="no room"):
            chooser.choose(TOOLS, QUERIES[0])
        assert held(crowded) == [0, 0, 384, 0]


@pytest.mark.integration
def test_a_context_cleared_by_someone_else_is_noticed(runtime, chooser):
    first = chooser.choose(TOOLS, QUERIES[0])
    runtime.clear()
    again = chooser.choose(TOOLS, QUERIES[0])
    assert again.resident_tokens == 0 and again.tool == first.tool


@pytest.mark.integration
def test_what_cannot_be_used_is_refused_before_anything_is_decoded(smollm2, runtime, vocabulary, chooser):
    for fields, message in (({"prefix_seq": 1}, "both 1; give two sequences"), ({"prefix_seq": -1}, "prefix_seq is -1"),
                            ({"work_seq": 3}, "work_seq is 3; give 0 … 2"),
                            ({"window": 0}, "window is 0; give 1 … n_ctx"),
                            ({"window": N_CTX + 1}, f"window is {N_CTX + 1}")):
        with pytest.raises(InContextError, match=message):
            InContextChooser(runtime, SYSTEM, vocabulary=vocabulary, **fields)
    with Runtime(smollm2, replace(OPTIONS, n_ctx=256, kv_unified=False)) as split:
        with pytest.raises(InContextError, match="kv_unified is false"):
            InContextChooser(split, SYSTEM, vocabulary=vocabulary)
    with pytest.raises(InContextError, match="tools: the list is empty"):
        chooser.choose([], QUERIES[0])
    with pytest.raises(InContextError, match="both offered as 'get_weather'"):
        chooser.choose([TOOLS[0], TOOLS[0]], QUERIES[0])
    # This model's vocabulary has no bytes for the unassigned planes.
    with pytest.raises(AutomatonError, match="cannot be written with this vocabulary"):
        chooser.choose([tool("a\U00040000")], QUERIES[0])
    assert held(runtime) == [0, 0, 0, 0]

"""The name trie against a reference that tries every token at every state, and within its buffers under sanitizers."""
from __future__ import annotations

import subprocess

import cppyy
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from nexus import native
from nexus.native import KERNELS

# Few bytes, so that pieces and keys meet often; on both sides of 0x80, so that the order of bytes matters.
ALPHABET = [b"a", b"b", b"\x7f", b"\x80", b"\xff", b'"']
texts = st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=6).map(b"".join)


def joined(items):
    return np.frombuffer(b"".join(items) + b"\0", np.uint8), np.cumsum([len(item) for item in items], dtype=np.int64)


class Trie:
    """The C++ classes over Python bytes, which hold the buffers alive."""

    def __init__(self, keys, pieces):
        native.kernels()
        cppyy.include("name_trie.hpp")
        self.pieces = pieces
        buffers = joined(pieces)
        self.vocabulary = cppyy.gbl.nexus.SortedVocabulary(*(buffer.ctypes.data for buffer in buffers), len(pieces))
        buffers = joined(keys)
        self.trie = cppyy.gbl.nexus.NameTrie(self.vocabulary, *(buffer.ctypes.data for buffer in buffers), len(keys))

    def allowed(self, state):
        tokens = np.full(self.trie.n_allowed(state) + 1, -7, np.int32)
        self.trie.copy_allowed(state, tokens.ctypes.data)
        assert tokens[-1] == -7
        return tokens[:-1].tolist()

    def states(self):
        """Every state that tokens lead to, with each of the texts written on the way there."""
        found, waiting = {0: b""}, [0]
        while waiting:
            state = waiting.pop()
            for token in self.allowed(state):
                following = self.trie.advance(state, token)
                if following not in found:
                    found[following] = found[state] + self.pieces[token]
                    waiting.append(following)
        return found


def prefix_free(keys):
    return not any(a != b and b.startswith(a) for a in keys for b in keys)


def spells(rest, pieces):
    """Whether tokens write the whole of `rest`, the last one perhaps more."""
    return rest == b"" or any(rest.startswith(piece) and spells(rest[len(piece):], pieces) or piece.startswith(rest)
                              for piece in pieces if piece)


def reference(written, keys, pieces):
    """Ids of the tokens behind which one of the keys can still be completed."""
    rests = [key[len(written):] for key in keys if key.startswith(written)]
    return [token for token, piece in enumerate(pieces) if piece and any(
        rest and (piece.startswith(rest) or rest.startswith(piece) and spells(rest[len(piece):], pieces))
        for rest in rests)]


@given(keys=st.lists(texts, min_size=1, max_size=6, unique=True).filter(prefix_free),
       pieces=st.lists(st.one_of(st.just(b""), texts), min_size=1, max_size=25),
       whole_bytes=st.booleans())
@example(keys=[b"abd"], pieces=[b"a", b"ab", b"bd"], whole_bytes=False)
@example(keys=[b'a"', b'ab"'], pieces=[b'a"b', b"a", b"b", b'"', b'b"""'], whole_bytes=False)
@settings(max_examples=200)
def test_allowed_tokens_are_those_with_which_a_key_can_be_completed(keys, pieces, whole_bytes):
    pieces = pieces + ALPHABET if whole_bytes else pieces
    assume(any(pieces))
    trie = Trie(keys, pieces)
    for state, written in trie.states().items():
        complete = [i for i, key in enumerate(keys) if written.startswith(key)]
        assert trie.trie.key(state) == (complete[0] if complete else -1)
        assert trie.allowed(state) == ([] if complete else reference(written, keys, pieces))
        left = complete or [i for i, key in enumerate(keys) if key.startswith(written)]
        assert trie.trie.only(state) == (left[0] if len(left) == 1 else -1)
    spelled = [spells(key, pieces) for key in keys]
    assert trie.trie.unspellable() == (-1 if all(spelled) else spelled.index(False))


@given(keys=st.lists(texts, min_size=1, max_size=6, unique=True).filter(prefix_free),
       pieces=st.lists(st.one_of(st.just(b""), texts), min_size=1, max_size=20))
def test_advance_takes_the_allowed_tokens_and_no_others(keys, pieces):
    pieces = pieces + ALPHABET
    trie = Trie(keys, pieces)
    for state, written in trie.states().items():
        taken = [token for token in range(len(pieces)) if trie.trie.advance(state, token) >= 0]
        assert taken == trie.allowed(state)
        assert [trie.trie.advance(state, token) for token in (-1, len(pieces), 2**31 - 1)] == [-1, -1, -1]
        for token in taken:
            text = written + pieces[token]
            done = [key for key in keys if text.startswith(key)]
            assert trie.trie.overrun(state, token) == (len(text) - len(done[0]) if done else 0)


@given(seed=st.integers(0, 2**32 - 1), infinite=st.booleans())
def test_best_and_mask_see_only_allowed_tokens_and_the_lowest_of_equal_ones(seed, infinite):
    pieces = [b"b", b"", b"a", b"ab", b"a", b'"x', b"c"]
    trie = Trie([b'ab"', b'a"'], pieces)
    logits = np.random.default_rng(seed).integers(-2, 3, len(pieces)).astype(np.float32)
    if infinite:
        logits[:] = -np.inf
    allowed = trie.allowed(0)
    assert allowed == [2, 3, 4]
    assert trie.trie.best(logits.ctypes.data, 0) == allowed[int(np.argmax(logits[allowed]))]
    masked = np.zeros(len(pieces) + 1, np.float32)
    trie.trie.mask(logits.ctypes.data, 0, masked.ctypes.data)
    expected = np.append(np.full(len(pieces), -np.inf), 0)
    expected[allowed] = logits[allowed]
    np.testing.assert_array_equal(masked, expected)


def test_a_logit_that_is_not_a_number_counts_where_its_token_is_allowed():
    trie = Trie([b'a"'], [b"b", b"a", b'"'])
    assert trie.trie.best(np.array([np.nan, 0, np.nan], np.float32).ctypes.data, 0) == 1
    with pytest.raises(Exception, match="logit of token 1 is not a number"):
        trie.trie.best(np.array([0, np.nan, 0], np.float32).ctypes.data, 0)


def test_edges_are_shared_so_there_is_a_state_per_byte_of_the_trie():
    trie = Trie([b'list_issues"', b'list_issue"', b'list_tags"', b'get_me"'], [bytes([byte]) for byte in range(256)])
    # The start, list_, issue, s", ", tags", get_me"
    assert trie.trie.n_states() == 1 + 5 + 5 + 2 + 1 + 5 + 7


@pytest.mark.parametrize("keys, message", [
    ([b"ab", b"abc"], "key 0 begins key 1"),
    ([b"abc", b"x", b"abc"], "key 0 begins key 2"),
    ([b"abc", b""], "key 1 is empty"),
    ([], "no keys"),
])
def test_keys_whose_end_could_not_be_told_are_refused(keys, message):
    with pytest.raises(Exception, match=message):
        Trie(keys, [b"a"])


@pytest.mark.parametrize("state", [-1, 3, 2**31 - 1])
@pytest.mark.parametrize("method, more", [("n_allowed", ()), ("best", None), ("advance", (0,)), ("overrun", (0,)),
                                          ("key", ()), ("only", ())])
def test_a_state_outside_of_the_trie_is_refused(state, method, more):
    trie = Trie([b'a"'], [b"a", b'"'])
    logits = np.zeros(2, np.float32)
    with pytest.raises(Exception, match=rf"state {state} is not in 0 \.\.\. 2"):
        if more is None:
            trie.trie.best(logits.ctypes.data, state)
        else:
            getattr(trie.trie, method)(state, *more)


PROGRAM = r"""
#include "name_trie.hpp"
#include <cstdio>
#include <random>

int main() {
    std::mt19937 random(1);
    const auto draw = [&](int n) { return (int) (random() % n); };
    long taken = 0, refused = 0, tokens = 0;
    for (int round = 0; round < 400; ++round) {
        // Heap blocks of exactly the sizes handed over, so that a read past one is seen.
        const auto make = [&](int n, bool empty, std::vector<char> & bytes, std::vector<int64_t> & ends) {
            for (int i = 0; i < n; ++i) {
                for (int length = draw(6) + !empty; length > 0; --length) {
                    bytes.push_back("ab\x80\xff\""[draw(5)]);
                }
                ends.push_back(bytes.size());
            }
            bytes.shrink_to_fit();
            ends.shrink_to_fit();
        };
        std::vector<char> pieces, keys;
        std::vector<int64_t> piece_ends, key_ends;
        const int n_pieces = 1 + draw(40), n_keys = 1 + draw(4);
        make(n_pieces, true, pieces, piece_ends);
        make(n_keys, false, keys, key_ends);
        nexus::SortedVocabulary vocabulary((size_t) pieces.data(), (size_t) piece_ends.data(), n_pieces);
        try {
            nexus::NameTrie trie(vocabulary, (size_t) keys.data(), (size_t) key_ends.data(), n_keys);
            ++taken;
            for (int state = 0; state < trie.n_states(); ++state) {
                std::vector<int32_t> out(trie.n_allowed(state));
                trie.copy_allowed(state, (size_t) out.data());
                std::vector<float> logits(n_pieces, 0.5f), masked(n_pieces);
                trie.mask((size_t) logits.data(), state, (size_t) masked.data());
                if (trie.best((size_t) logits.data(), state) != (out.empty() ? -1 : out[0])) {
                    return 1;
                }
                for (int token = -1; token <= n_pieces; ++token) {
                    tokens += trie.advance(state, token) >= 0;
                    trie.overrun(state, token);
                }
                trie.only(state);
            }
        } catch (const std::invalid_argument &) {
            ++refused;
        }
    }
    std::printf("taken=%d refused=%d tokens=%d\n", taken > 50, refused > 50, tokens > 1000);
}
"""


def test_random_tries_stay_in_their_buffers(need_programs, tmp_path):
    need_programs("g++")
    (tmp_path / "check.cpp").write_text(PROGRAM)
    subprocess.run(["g++", "-std=c++17", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
                    f"-I{KERNELS}", tmp_path / "check.cpp", "-o", tmp_path / "check"], check=True, timeout=120)
    run = subprocess.run([tmp_path / "check"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout == "taken=1 refused=1 tokens=1\n"


def test_the_headers_compile_alone_without_a_warning(need_programs, tmp_path):
    need_programs("g++")
    include = native.llama_library().parent.parent.parent / "include"
    for header in ("name_trie.hpp", "vocabulary_pieces.hpp"):
        source = tmp_path / f"{header}.cpp"
        source.write_text(f'#include "{header}"\n#include "{header}"\n')
        subprocess.run(["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{KERNELS}",
                        "-isystem", include, source], check=True, timeout=120)

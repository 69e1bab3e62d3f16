// Which tokens may come next while a model writes one of a set of names: a radix trie over the names, walked together
// with the vocabulary.
//
// A key is a name with its terminator, and no key begins another, so a key that is complete is the only one it can be.
// A state is an offset in the bytes of the trie's edges: state s lies behind byte s - 1, and 0 is the start. Following
// a token never lowers it. A token may cover the end of a key and run past it: whatever follows is not our business.
//
// Testing each of 151k pieces at each state would cost milliseconds. The pieces are sorted instead, so that all pieces
// with one beginning are neighbours: a range of them is a node of the vocabulary's own trie, and a step down is a
// binary search. The walk goes only where both tries go, and its result is kept per state.
//
// Addresses from Python arrive as size_t; the caller owns the memory and checks its type.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace nexus {

// Texts that lie one behind the other: text i ends at ends[i], int64[n].
inline std::vector<std::string_view> joined_texts(size_t bytes, size_t ends, int32_t n) {
    const char * data = reinterpret_cast<const char *>(bytes);
    const auto * stops = reinterpret_cast<const int64_t *>(ends);
    std::vector<std::string_view> texts(n);
    int64_t begin = 0;
    for (int32_t i = 0; i < n; ++i) {
        texts[i] = std::string_view(data + begin, stops[i] - begin);
        begin = stops[i];
    }
    return texts;
}

// The pieces of a vocabulary in byte order (equal ones by id). Tokens with an empty piece are in no range.
class SortedVocabulary {
  public:
    SortedVocabulary(size_t bytes, size_t ends, int32_t n) : rank_(n, -1) {
        const std::vector<std::string_view> pieces = joined_texts(bytes, ends, n);
        ids_.resize(n);
        std::iota(ids_.begin(), ids_.end(), 0);
        ids_.erase(std::remove_if(ids_.begin(), ids_.end(), [&](int32_t id) { return pieces[id].empty(); }),
                   ids_.end());
        // std::string_view compares bytes as unsigned, and a piece comes before those that it begins.
        std::stable_sort(ids_.begin(), ids_.end(), [&](int32_t a, int32_t b) { return pieces[a] < pieces[b]; });
        begins_.reserve(ids_.size() + 1);
        for (size_t rank = 0; rank < ids_.size(); ++rank) {
            rank_[ids_[rank]] = rank;
            begins_.push_back(sorted_.size());
            sorted_ += pieces[ids_[rank]];
        }
        begins_.push_back(sorted_.size());
        for (int byte = 0; byte < 256; ++byte) {
            const auto [lo, hi] = search(0, ids_.size(), 0, byte);
            first_[byte] = lo;
            first_[byte + 1] = hi;
            has_byte_[byte] = lo < hi && length(lo) == 1;
        }
    }

    int32_t n_tokens() const { return rank_.size(); }
    size_t n_ranks() const { return ids_.size(); }
    int32_t id(size_t rank) const { return ids_[rank]; }
    size_t length(size_t rank) const { return begins_[rank + 1] - begins_[rank]; }

    // Whether some token is this one byte.
    bool has_byte(uint8_t byte) const { return has_byte_[byte]; }

    // Empty for tokens that have no bytes and for ids outside of the vocabulary.
    std::string_view piece(int32_t token) const {
        if (token < 0 || token >= n_tokens() || rank_[token] < 0) {
            return {};
        }
        const size_t rank = rank_[token];
        return std::string_view(sorted_.data() + begins_[rank], length(rank));
    }

    // Of the ranks lo ... hi-1, which share `depth` bytes and are all longer: those with `byte` next, as [lo, hi).
    std::pair<size_t, size_t> range(size_t lo, size_t hi, size_t depth, uint8_t byte) const {
        return depth == 0 ? std::pair{first_[byte], first_[byte + 1]} : search(lo, hi, depth, byte);
    }

  private:
    std::pair<size_t, size_t> search(size_t lo, size_t hi, size_t depth, int byte) const {
        const auto next = [&](size_t rank) { return (int) (uint8_t) sorted_[begins_[rank] + depth]; };
        const auto first_not_below = [&](size_t from, int bound) {
            size_t to = hi;
            while (from < to) {
                const size_t middle = from + (to - from) / 2;
                if (next(middle) < bound) {
                    from = middle + 1;
                } else {
                    to = middle;
                }
            }
            return from;
        };
        const size_t begin = first_not_below(lo, byte);
        return {begin, first_not_below(begin, byte + 1)};
    }

    std::vector<int32_t> rank_;   // by token, -1 for an empty piece
    std::vector<int32_t> ids_;    // by rank
    std::vector<size_t> begins_;  // by rank, in sorted_
    std::string sorted_;
    std::array<size_t, 257> first_{};
    std::array<bool, 256> has_byte_{};
};

// Keeps a reference to the vocabulary, which must outlive it. Not for two threads at once: sets are kept as they arise.
class NameTrie {
  public:
    // Keys lie one behind the other (see joined_texts). Throws where one is empty, equals or begins another.
    NameTrie(const SortedVocabulary & vocabulary, size_t bytes, size_t ends, int32_t n) : vocabulary_(vocabulary) {
        const std::vector<std::string_view> keys = joined_texts(bytes, ends, n);
        if (n == 0) {
            throw std::invalid_argument("name trie: no keys");
        }
        size_t total = 0;
        for (const std::string_view key : keys) {
            total += key.size();
        }
        if (total >= (size_t) std::numeric_limits<int32_t>::max()) {
            throw std::invalid_argument("name trie: the keys have " + std::to_string(total) +
                                        " bytes; states are int32");
        }
        order_.resize(n);
        std::iota(order_.begin(), order_.end(), 0);
        std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) { return keys[a] < keys[b]; });
        node_at_.assign(1, -1);
        branch(keys, 0, n, 0);
        allowed_.resize(n_states());
        visited_.assign(n_states(), 0);
        find_dead_ends();
    }

    int32_t n_states() const { return node_at_.size(); }

    // Index of the first key that no sequence of tokens spells, -1 when every key can be spelled.
    int32_t unspellable() const { return unspellable_; }

    // Tokens that may follow, in ascending order. Empty where a key is complete.
    const std::vector<int32_t> & allowed(int32_t state) {
        check(state);
        if (!visited_[state]) {
            allowed_[state] = walk(state);
            visited_[state] = 1;
        }
        return allowed_[state];
    }

    int32_t n_allowed(int32_t state) { return allowed(state).size(); }

    void copy_allowed(int32_t state, size_t out) {
        const std::vector<int32_t> & tokens = allowed(state);
        std::copy(tokens.begin(), tokens.end(), reinterpret_cast<int32_t *>(out));
    }

    // The allowed token with the largest of logits float[n_tokens], the lowest id of equal ones; -1 if none is allowed.
    int32_t best(size_t logits, int32_t state) {
        const float * values = reinterpret_cast<const float *>(logits);
        int32_t found = -1;
        for (const int32_t token : allowed(state)) {
            if (values[token] != values[token]) {
                throw std::invalid_argument("logit of token " + std::to_string(token) + " is not a number");
            }
            if (found < 0 || values[token] > values[found]) {
                found = token;
            }
        }
        return found;
    }

    // Copies logits float[n_tokens] to `out`, minus infinity in place of every token that is not allowed.
    void mask(size_t logits, int32_t state, size_t out) {
        const float * values = reinterpret_cast<const float *>(logits);
        float * masked = reinterpret_cast<float *>(out);
        std::fill(masked, masked + vocabulary_.n_tokens(), -std::numeric_limits<float>::infinity());
        for (const int32_t token : allowed(state)) {
            masked[token] = values[token];
        }
    }

    // State behind the token, -1 where it is not allowed.
    int32_t advance(int32_t state, int32_t token) const {
        check(state);
        size_t used;
        return follow(state, vocabulary_.piece(token), used);
    }

    // How many of the token's last bytes lie behind the key that it completes; 0 where it completes none.
    int32_t overrun(int32_t state, int32_t token) const {
        check(state);
        const std::string_view piece = vocabulary_.piece(token);
        size_t used;
        return follow(state, piece, used) < 0 ? 0 : piece.size() - used;
    }

    // Index of the key that is complete, -1 where none is.
    int32_t key(int32_t state) const {
        check(state);
        return node_at_[state] < 0 ? -1 : nodes_[node_at_[state]].key;
    }

    // Index of the only key that is left, -1 where there are several.
    int32_t only(int32_t state) const {
        check(state);
        for (;; ++state) {
            if (node_at_[state] < 0) {
                continue;
            }
            const Node & node = nodes_[node_at_[state]];
            if (node.key >= 0 || node.children.size() != 1) {
                return node.key;
            }
            state = node.children[0];
        }
    }

  private:
    struct Node {
        int32_t key = -1;
        std::vector<int32_t> children;  // where each edge begins in bytes_, by first byte
    };

    // Adds what follows the first `depth` bytes, already in the trie, of the sorted keys lo ... hi-1.
    void branch(const std::vector<std::string_view> & keys, size_t lo, size_t hi, size_t depth) {
        const size_t node = nodes_.size();
        node_at_.back() = node;
        nodes_.emplace_back();
        if (keys[order_[lo]].size() == depth) {
            // The shortest comes first: where it ends, it begins all the others.
            if (hi - lo > 1 || depth == 0) {
                throw std::invalid_argument(depth == 0 ? "name trie: key " + std::to_string(order_[lo]) + " is empty"
                                                       : "name trie: key " + std::to_string(order_[lo]) +
                                                             " begins key " + std::to_string(order_[lo + 1]));
            }
            nodes_[node].key = order_[lo];
            return;
        }
        for (size_t begin = lo, end; begin < hi; begin = end) {
            const std::string_view first = keys[order_[begin]];
            for (end = begin + 1; end < hi && keys[order_[end]][depth] == first[depth]; ++end) {
            }
            // Of sorted keys, what the first and the last share is shared by all.
            const std::string_view last = keys[order_[end - 1]];
            size_t common = depth + 1;
            while (common < first.size() && common < last.size() && first[common] == last[common]) {
                ++common;
            }
            nodes_[node].children.push_back(bytes_.size());
            bytes_ += first.substr(depth, common - depth);
            node_at_.resize(bytes_.size() + 1, -1);
            branch(keys, begin, end, common);
        }
    }

    void check(int32_t state) const {
        if (state < 0 || state >= n_states()) {
            throw std::invalid_argument("state " + std::to_string(state) + " is not in 0 ... " +
                                        std::to_string(n_states() - 1));
        }
    }

    bool complete(int32_t state) const { return node_at_[state] >= 0 && nodes_[node_at_[state]].key >= 0; }

    int32_t next(int32_t state, char byte) const {
        if (node_at_[state] < 0) {
            return bytes_[state] == byte ? state + 1 : -1;
        }
        for (const int32_t edge : nodes_[node_at_[state]].children) {
            if (bytes_[edge] == byte) {
                return edge + 1;
            }
        }
        return -1;
    }

    int32_t follow(int32_t state, std::string_view piece, size_t & used) const {
        if (piece.empty() || complete(state)) {
            return -1;
        }
        for (used = 0; used < piece.size() && !complete(state); ++used) {
            state = next(state, piece[used]);
            if (state < 0) {
                return -1;
            }
        }
        return dead_.empty() || !dead_[state] ? state : -1;
    }

    std::vector<int32_t> walk(int32_t start) const {
        std::vector<int32_t> tokens;
        if (complete(start)) {
            return tokens;
        }
        struct Step {
            size_t lo, hi, depth;
            int32_t state;
        };
        std::vector<Step> steps{{0, vocabulary_.n_ranks(), 0, start}};
        while (!steps.empty()) {
            Step at = steps.back();
            steps.pop_back();
            const bool whole = complete(at.state);
            const bool open = dead_.empty() || !dead_[at.state];
            for (; at.lo < at.hi && (whole || vocabulary_.length(at.lo) == at.depth); ++at.lo) {
                if (open) {
                    tokens.push_back(vocabulary_.id(at.lo));
                }
            }
            if (at.lo == at.hi) {
                continue;
            }
            const auto descend = [&](int32_t edge) {
                const auto range = vocabulary_.range(at.lo, at.hi, at.depth, bytes_[edge]);
                if (range.first < range.second) {
                    steps.push_back({range.first, range.second, at.depth + 1, edge + 1});
                }
            };
            if (node_at_[at.state] < 0) {
                descend(at.state);
            } else {
                for (const int32_t edge : nodes_[node_at_[at.state]].children) {
                    descend(edge);
                }
            }
        }
        std::sort(tokens.begin(), tokens.end());
        return tokens;
    }

    // Where each byte of the keys is a token of its own, nothing can get stuck. Otherwise a token must not be allowed
    // whose rest no tokens spell: states are settled from the last to the first, as tokens only lead to later ones.
    void find_dead_ends() {
        if (std::all_of(bytes_.begin(), bytes_.end(), [&](char byte) { return vocabulary_.has_byte(byte); })) {
            return;
        }
        dead_.assign(n_states(), 0);
        for (int32_t state = n_states() - 1; state >= 0; --state) {
            dead_[state] = allowed(state).empty() && !complete(state);
        }
        std::vector<char> reached(n_states(), 0);
        reached[0] = 1;
        std::vector<char> spelled(order_.size(), 0);
        for (int32_t state = 0; state < n_states(); ++state) {
            if (!reached[state]) {
                continue;
            }
            if (complete(state)) {
                spelled[key(state)] = 1;
            }
            for (const int32_t token : allowed(state)) {
                reached[advance(state, token)] = 1;
            }
        }
        const auto missing = std::find(spelled.begin(), spelled.end(), 0);
        unspellable_ = missing == spelled.end() ? -1 : missing - spelled.begin();
    }

    const SortedVocabulary & vocabulary_;
    std::vector<int32_t> order_;    // keys in byte order
    std::string bytes_;             // of all edges, each edge's together
    std::vector<int32_t> node_at_;  // by state: the node where an edge ends, -1 inside of one
    std::vector<Node> nodes_;
    std::vector<std::vector<int32_t>> allowed_;  // by state, once visited
    std::vector<char> visited_;
    std::vector<char> dead_;  // by state; empty where there are no dead ends
    int32_t unspellable_ = -1;
};

}  // namespace nexus

// llama.cpp's own grammar as a measured peer, in the two ways in which it can be applied at a step.
//
// A sampler chain that begins with the grammar, as llama-cpp-python builds it, hands every vocabulary entry to it.
// Checking the likeliest token alone is enough where it is allowed; only else are more asked about.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "llama.h"

namespace nexus {

class EngineGrammar {
  public:
    // Throws where llama.cpp's parser refuses the grammar.
    EngineGrammar(const llama_vocab * vocab, const std::string & text) {
        grammar_ = llama_sampler_init_grammar(vocab, text.c_str(), "root");
        if (!grammar_) {
            throw std::runtime_error("llama.cpp's parser refuses the grammar");
        }
    }
    ~EngineGrammar() { llama_sampler_free(grammar_); }
    EngineGrammar(const EngineGrammar &) = delete;
    EngineGrammar & operator=(const EngineGrammar &) = delete;

    // Applies the grammar to all n_vocab candidates; `best` is then the allowed one with the largest logit.
    void apply_to_all(size_t logits, int32_t n_vocab) {
        const auto * row = reinterpret_cast<const float *>(logits);
        candidates_.resize(n_vocab);
        for (llama_token token = 0; token < n_vocab; ++token) {
            candidates_[token] = {token, row[token], 0.0f};
        }
        apply();
    }

    // Applies it to the likeliest token, then to the 64 likeliest, then to all, until one is allowed.
    void apply_to_likeliest(size_t logits, int32_t n_vocab, llama_token likeliest) {
        const auto * row = reinterpret_cast<const float *>(logits);
        candidates_.assign(1, {likeliest, row[likeliest], 0.0f});
        apply();
        if (best() >= 0) {
            return;
        }
        ids_.resize(n_vocab);
        for (llama_token token = 0; token < n_vocab; ++token) {
            ids_[token] = token;
        }
        const auto some = ids_.begin() + std::min(n_vocab, 64);
        std::nth_element(ids_.begin(), some - 1, ids_.end(), [row](llama_token a, llama_token b) {
            return row[a] > row[b] || (row[a] == row[b] && a < b);
        });
        candidates_.clear();
        for (auto id = ids_.begin(); id != some; ++id) {
            candidates_.push_back({*id, row[*id], 0.0f});
        }
        apply();
        if (best() < 0) {
            apply_to_all(logits, n_vocab);
        }
    }

    // Of the candidates last applied to: the allowed one with the largest logit, of equal ones the lowest id; else -1.
    llama_token best() const {
        const llama_token_data * found = nullptr;
        for (const auto & candidate : candidates_) {
            if (std::isinf(candidate.logit)) {
                continue;
            }
            if (!found || candidate.logit > found->logit ||
                (candidate.logit == found->logit && candidate.id < found->id)) {
                found = &candidate;
            }
        }
        return found ? found->id : -1;
    }

    // Advances by a token. False, and nothing changed, where the grammar does not allow it.
    bool accept(llama_token token) {
        candidates_.assign(1, {token, 0.0f, 0.0f});
        apply();
        if (best() < 0) {
            return false;
        }
        llama_sampler_accept(grammar_, token);
        return true;
    }

  private:
    void apply() {
        llama_token_data_array array{candidates_.data(), candidates_.size(), -1, false};
        llama_sampler_apply(grammar_, &array);
    }

    llama_sampler * grammar_ = nullptr;
    std::vector<llama_token_data> candidates_;
    std::vector<llama_token> ids_;
};

}  // namespace nexus

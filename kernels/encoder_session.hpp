// Owns a llama.cpp encoder (BERT and its kin): a text in, its pooled vector or score out. Public C API only.
//
// An encoder has no KV cache: every token of a text sees every other one, so a text is computed whole, in one call.
// Why one text per call: texts that share one change each other's results by up to 1e-4 of a unit vector (the matrix
// kernels sum in another order), and sharing saves nothing on a CPU. So a result depends on its own text alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "llama.h"
#include "llama_session.hpp"

namespace nexus {

class EncoderSession {
  public:
    // max_tokens: of one text or pair, [CLS] and [SEP] included.
    EncoderSession(const std::string & path, int32_t max_tokens, int32_t n_threads)
        : model_(path), max_tokens_(max_tokens) {
        if (llama_vocab_type(model_.vocab()) != LLAMA_VOCAB_TYPE_WPM) {
            throw std::runtime_error(path + " is no text encoder with [CLS] and [SEP]: its tokenizer is not WordPiece");
        }
        const int32_t n_positions = llama_model_n_ctx_train(model_.get());
        if (max_tokens < 5 || max_tokens > n_positions) {
            // llama.cpp ends the process on a position that the model does not have.
            throw std::runtime_error("max_tokens is " + std::to_string(max_tokens) + "; this model takes 5 to " +
                                     std::to_string(n_positions));
        }
        llama_context_params params = llama_context_default_params();
        params.n_ctx = max_tokens;
        params.n_batch = max_tokens;
        params.n_ubatch = max_tokens;
        params.n_seq_max = 1;
        params.n_threads = n_threads;
        params.n_threads_batch = n_threads;
        params.embeddings = true;
        params.no_perf = true;
        // Off: float32 attention is closer to the reference, and texts this short gain nothing by it.
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
        context_ = llama_init_from_model(model_.get(), params);
        if (!context_) {
            throw std::runtime_error("llama.cpp cannot make a context for " + path + "; its log says why");
        }
        positions_.resize(max_tokens);
        for (int32_t i = 0; i < max_tokens; ++i) {
            positions_[i] = i;
        }
        counts_.assign(max_tokens, 1);
        pointers_.assign(max_tokens, &seq_);
        flags_.assign(max_tokens, 1);
    }
    ~EncoderSession() { close(); }
    EncoderSession(const EncoderSession &) = delete;
    EncoderSession & operator=(const EncoderSession &) = delete;

    void close() {
        if (context_) {
            llama_free(context_);
            context_ = nullptr;
        }
        model_.close();
    }

    int32_t pooling() const { return llama_pooling_type(context_); }

    // Floats of one result: the embedding's length, with rank pooling the number of scores.
    int32_t width() const {
        return pooling() == LLAMA_POOLING_TYPE_RANK ? (int32_t) llama_model_n_cls_out(model_.get())
                                                    : llama_model_n_embd_out(model_.get());
    }

    // Tokens of a text without [CLS] and [SEP]; these two words in the text are read as plain text.
    std::vector<int32_t> tokenize(const std::string & text) const { return model_.tokenize(text, false, false); }

    // [CLS] text [SEP], the text's end cut away beyond max_tokens.
    std::vector<int32_t> text_tokens(const std::string & text) const {
        std::vector<int32_t> tokens = tokenize(text);
        tokens.resize(std::min<size_t>(tokens.size(), max_tokens_ - 2));
        return framed(tokens);
    }

    // [CLS] first [SEP] second [SEP]. Too long a pair loses tokens at the end of the longer text until both are equally
    // long, then of both: "longest first".
    std::vector<int32_t> pair_tokens(const std::string & first, const std::string & second) const {
        std::vector<int32_t> a = tokenize(first);
        std::vector<int32_t> b = tokenize(second);
        const size_t budget = max_tokens_ - 3;
        if (a.size() + b.size() > budget) {
            std::vector<int32_t> & shorter = a.size() <= b.size() ? a : b;
            std::vector<int32_t> & longer = a.size() <= b.size() ? b : a;
            shorter.resize(std::min(shorter.size(), budget / 2));
            longer.resize(budget - shorter.size());
        }
        a.push_back(llama_vocab_sep(model_.vocab()));
        a.insert(a.end(), b.begin(), b.end());
        return framed(a);
    }

    // Each writes its result to out, float[width]. They return llama_encode's status, 0 for success.
    int32_t embed(const std::string & text, size_t out) { return compute(text_tokens(text), out); }
    int32_t score(const std::string & first, const std::string & second, size_t out) {
        return compute(pair_tokens(first, second), out);
    }

  private:
    std::vector<int32_t> framed(std::vector<int32_t> tokens) const {
        tokens.insert(tokens.begin(), llama_vocab_bos(model_.vocab()));
        tokens.push_back(llama_vocab_sep(model_.vocab()));
        return tokens;
    }

    int32_t compute(std::vector<int32_t> tokens, size_t out) {
        llama_batch batch{};
        batch.n_tokens = tokens.size();
        batch.token = tokens.data();
        batch.pos = positions_.data();
        batch.n_seq_id = counts_.data();
        batch.seq_id = pointers_.data();
        batch.logits = flags_.data();
        if (const int32_t status = llama_encode(context_, batch)) {
            return status;
        }
        const float * row = llama_get_embeddings_seq(context_, seq_);
        if (!row) {
            return -1;
        }
        std::memcpy(reinterpret_cast<void *>(out), row, sizeof(float) * width());
        return 0;
    }

    LlamaModel model_;
    int32_t max_tokens_;
    llama_context * context_ = nullptr;
    llama_seq_id seq_ = 0;
    std::vector<llama_pos> positions_;
    std::vector<int32_t> counts_;
    std::vector<llama_seq_id *> pointers_;
    std::vector<int8_t> flags_;
};

}  // namespace nexus

// Thin ownership of a llama.cpp model and context, through its public C API only.
//
// Why C++ and not one cppyy call per API function: a decode needs a batch of parallel arrays, string queries need
// buffers, and the log callback must outlive Python. Everything here keeps those on one side of the language border.
// Addresses from Python arrive as size_t; the caller owns the memory and checks its type.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "llama.h"

namespace nexus {

inline std::FILE *& llama_log_file() {
    static std::FILE * file = nullptr;
    return file;
}

inline void llama_log_write(ggml_log_level, const char * text, void *) {
    if (std::FILE * file = llama_log_file()) {
        std::fputs(text, file);
        std::fflush(file);
    }
}

// Appends llama.cpp's messages to `path`; an empty path drops them. Nothing goes to the terminal either way.
inline void llama_log_to(const std::string & path) {
    std::FILE *& file = llama_log_file();
    if (file) {
        std::fclose(file);
        file = nullptr;
    }
    if (!path.empty()) {
        file = std::fopen(path.c_str(), "a");
        if (!file) {
            throw std::runtime_error("log file " + path + " cannot be opened for writing");
        }
    }
    llama_log_set(llama_log_write, nullptr);
}

class LlamaModel {
  public:
    explicit LlamaModel(const std::string & path) {
        llama_backend_init();
        llama_model_params params = llama_model_default_params();
        params.n_gpu_layers = 0;
        model_ = llama_model_load_from_file(path.c_str(), params);
        if (!model_) {
            throw std::runtime_error("llama.cpp cannot load " + path + "; its log says why");
        }
    }
    ~LlamaModel() { close(); }
    LlamaModel(const LlamaModel &) = delete;
    LlamaModel & operator=(const LlamaModel &) = delete;

    void close() {
        if (model_) {
            llama_model_free(model_);
            model_ = nullptr;
        }
    }

    llama_model * get() const { return model_; }
    const llama_vocab * vocab() const { return llama_model_get_vocab(model_); }

    // Value of a GGUF metadata key as text, or "" when the file does not have it.
    std::string meta(const std::string & key) const {
        std::vector<char> buffer(256);
        int32_t n = llama_model_meta_val_str(model_, key.c_str(), buffer.data(), buffer.size());
        if (n >= (int32_t) buffer.size()) {
            buffer.resize(n + 1);
            n = llama_model_meta_val_str(model_, key.c_str(), buffer.data(), buffer.size());
        }
        return n < 0 ? std::string() : std::string(buffer.data(), n);
    }

    std::string chat_template() const {
        const char * text = llama_model_chat_template(model_, nullptr);
        return text ? text : "";
    }

    // One message in the given chat template. Throws when the template is not one that llama.cpp knows.
    std::string chat_message(const std::string & name, const std::string & role, const std::string & content,
                             bool open_assistant) const {
        llama_chat_message message{role.c_str(), content.c_str()};
        std::vector<char> buffer(content.size() * 2 + 1024);
        int32_t n = llama_chat_apply_template(name.c_str(), &message, 1, open_assistant, buffer.data(), buffer.size());
        if (n > (int32_t) buffer.size()) {
            buffer.resize(n);
            n = llama_chat_apply_template(name.c_str(), &message, 1, open_assistant, buffer.data(), buffer.size());
        }
        if (n < 0) {
            throw std::runtime_error("chat template not known to llama.cpp");
        }
        return std::string(buffer.data(), n);
    }

    std::vector<int32_t> tokenize(const std::string & text, bool add_special, bool parse_special) const {
        std::vector<int32_t> tokens(text.size() + 8);
        int32_t n = llama_tokenize(vocab(), text.data(), text.size(), tokens.data(), tokens.size(), add_special,
                                   parse_special);
        if (n < 0) {
            tokens.resize(-n);
            n = llama_tokenize(vocab(), text.data(), text.size(), tokens.data(), tokens.size(), add_special,
                               parse_special);
        }
        if (n < 0) {
            throw std::runtime_error("llama_tokenize failed");
        }
        tokens.resize(n);
        return tokens;
    }

    std::string detokenize(size_t tokens, int32_t n_tokens) const {
        std::vector<char> buffer(n_tokens * 8 + 64);
        const auto * ids = reinterpret_cast<const llama_token *>(tokens);
        int32_t n = llama_detokenize(vocab(), ids, n_tokens, buffer.data(), buffer.size(), false, true);
        if (n < 0) {
            buffer.resize(-n);
            n = llama_detokenize(vocab(), ids, n_tokens, buffer.data(), buffer.size(), false, true);
        }
        return std::string(buffer.data(), n > 0 ? n : 0);
    }

  private:
    llama_model * model_ = nullptr;
};

struct LlamaContextOptions {
    uint32_t n_ctx = 4096;
    uint32_t n_batch = 512;
    uint32_t n_seq_max = 8;
    int32_t n_threads = 2;
    bool flash_attention = true;
    bool kv_unified = true;
    bool swa_full = true;
    int32_t type_k = GGML_TYPE_F16;
    int32_t type_v = GGML_TYPE_F16;
    float rope_freq_base = 0;
    float rope_freq_scale = 0;
};

class LlamaContext {
  public:
    LlamaContext(const LlamaModel & model, const LlamaContextOptions & options) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = options.n_ctx;
        params.n_batch = options.n_batch;
        // One split, not two: what the caller submits is what is computed.
        params.n_ubatch = options.n_batch;
        params.n_seq_max = options.n_seq_max;
        params.n_threads = options.n_threads;
        params.n_threads_batch = options.n_threads;
        params.flash_attn_type =
            options.flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        params.kv_unified = options.kv_unified;
        params.swa_full = options.swa_full;
        params.type_k = (ggml_type) options.type_k;
        params.type_v = (ggml_type) options.type_v;
        params.rope_freq_base = options.rope_freq_base;
        params.rope_freq_scale = options.rope_freq_scale;
        params.no_perf = true;
        params.cb_eval = stop_at_node;
        params.cb_eval_user_data = this;
        context_ = llama_init_from_model(model.get(), params);
        if (!context_) {
            throw std::runtime_error("llama.cpp cannot make a context with these options; its log says why");
        }
        n_vocab_ = llama_vocab_n_tokens(model.vocab());
        n_batch_ = options.n_batch;
    }
    ~LlamaContext() { close(); }
    LlamaContext(const LlamaContext &) = delete;
    LlamaContext & operator=(const LlamaContext &) = delete;

    void close() {
        if (context_) {
            llama_free(context_);
            context_ = nullptr;
        }
    }

    llama_context * get() const { return context_; }
    llama_memory_t memory() const { return llama_get_memory(context_); }

    // Decodes n tokens of one sequence at positions pos, pos+1, ... in batches of n_batch. Returns llama_decode's
    // status.
    int32_t decode(size_t tokens, int32_t n, int32_t pos, int32_t seq, bool want_logits) {
        const auto * ids = reinterpret_cast<const llama_token *>(tokens);
        positions_.resize(n_batch_);
        counts_.assign(n_batch_, 1);
        flags_.resize(n_batch_);
        seq_ = seq;
        pointers_.assign(n_batch_, &seq_);
        for (int32_t begin = 0; begin < n; begin += n_batch_) {
            const int32_t size = n - begin < n_batch_ ? n - begin : n_batch_;
            for (int32_t i = 0; i < size; ++i) {
                positions_[i] = pos + begin + i;
                flags_[i] = want_logits && begin + i == n - 1;
            }
            llama_batch batch{};
            batch.n_tokens = size;
            batch.token = const_cast<llama_token *>(ids + begin);
            batch.pos = positions_.data();
            batch.n_seq_id = counts_.data();
            batch.seq_id = pointers_.data();
            batch.logits = flags_.data();
            if (const int32_t status = llama_decode(context_, batch)) {
                return status;
            }
        }
        return 0;
    }

    // Decodes one batch of n tokens, at most n_batch, each at its own position of its own sequence; no logits.
    int32_t decode_scattered(size_t tokens, size_t positions, size_t seqs, int32_t n) {
        counts_.assign(n, 1);
        flags_.assign(n, 0);
        pointers_.resize(n);
        for (int32_t i = 0; i < n; ++i) {
            pointers_[i] = reinterpret_cast<llama_seq_id *>(seqs) + i;
        }
        llama_batch batch{};
        batch.n_tokens = n;
        batch.token = reinterpret_cast<llama_token *>(tokens);
        batch.pos = reinterpret_cast<llama_pos *>(positions);
        batch.n_seq_id = counts_.data();
        batch.seq_id = pointers_.data();
        batch.logits = flags_.data();
        return llama_decode(context_, batch);
    }

    // Later decodes end once the graph node of this name is computed; "" lets them run to their end again. What a
    // stopped decode writes to deeper layers' cells is not valid.
    void stop_after(const std::string & node) { stop_node_ = node; }

    // Copies the last decoded token's logits, float[n_vocab]. False when that decode asked for none.
    bool logits(size_t out) {
        const float * row = llama_get_logits_ith(context_, -1);
        if (!row) {
            return false;
        }
        std::memcpy(reinterpret_cast<void *>(out), row, sizeof(float) * n_vocab_);
        return true;
    }

    size_t state_size(int32_t seq) { return llama_state_seq_get_size(context_, seq); }
    size_t state_get(int32_t seq, size_t out, size_t size) {
        return llama_state_seq_get_data(context_, reinterpret_cast<uint8_t *>(out), size, seq);
    }
    size_t state_set(int32_t seq, size_t blob, size_t size) {
        return llama_state_seq_set_data(context_, reinterpret_cast<const uint8_t *>(blob), size, seq);
    }

  private:
    // llama.cpp asks before each node whether its data is wanted, and goes on after it only where that returns true.
    static bool stop_at_node(ggml_tensor * tensor, bool ask, void * self) {
        const std::string & node = static_cast<const LlamaContext *>(self)->stop_node_;
        return ask && !node.empty() && node == ggml_get_name(tensor);
    }

    llama_context * context_ = nullptr;
    std::string stop_node_;
    int32_t n_vocab_ = 0;
    int32_t n_batch_ = 0;
    llama_seq_id seq_ = 0;
    std::vector<llama_pos> positions_;
    std::vector<int32_t> counts_;
    std::vector<llama_seq_id *> pointers_;
    std::vector<int8_t> flags_;
};

}  // namespace nexus

// The bytes of every token of a vocabulary, through llama.cpp's public C API.
//
// llama_vocab_get_text is the file's raw form, in which byte-level vocabularies write one letter per byte and others a
// mark for the space; llama_token_to_piece gives the bytes that a token stands for. Control tokens have none.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "llama.h"

namespace nexus {

class VocabularyPieces {
  public:
    explicit VocabularyPieces(const llama_vocab * vocab) {
        std::string buffer(256, '\0');
        const int32_t n_tokens = llama_vocab_n_tokens(vocab);
        ends_.reserve(n_tokens);
        for (llama_token token = 0; token < n_tokens; ++token) {
            int32_t n = llama_token_to_piece(vocab, token, &buffer[0], buffer.size(), 0, false);
            if (n < 0) {
                buffer.resize(-n);
                n = llama_token_to_piece(vocab, token, &buffer[0], buffer.size(), 0, false);
            }
            if (n < 0) {
                throw std::runtime_error("llama_token_to_piece failed for token " + std::to_string(token));
            }
            bytes_.append(buffer, 0, n);
            ends_.push_back(bytes_.size());
        }
    }

    int64_t n_bytes() const { return bytes_.size(); }

    // Copies all pieces one behind the other, uint8[n_bytes], and where each ends, int64[n_tokens].
    void copy(size_t bytes, size_t ends) const {
        std::memcpy(reinterpret_cast<void *>(bytes), bytes_.data(), bytes_.size());
        std::memcpy(reinterpret_cast<void *>(ends), ends_.data(), ends_.size() * sizeof(int64_t));
    }

  private:
    std::string bytes_;
    std::vector<int64_t> ends_;
};

}  // namespace nexus

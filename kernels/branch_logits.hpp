// One decode of several sequences, with the logits behind each of them.
//
// A step of a few tokens is bound by the pass over the weights: sequences that are continued together share it.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "llama.h"

namespace nexus {

// Decodes n tokens, at most n_batch, each at its own position of its own sequence (int32[n] each), and copies the
// logits of those whose flag (int8[n]) is set to out, float[flags set][n_vocab], in the order of the batch. Returns
// llama_decode's status, or -1 where a row of logits is missing.
inline int32_t decode_branches(llama_context * context, size_t tokens, size_t positions, size_t seqs, size_t flags,
                               int32_t n, size_t out, int32_t n_vocab) {
    std::vector<int32_t> counts(n, 1);
    std::vector<llama_seq_id *> owners(n);
    for (int32_t i = 0; i < n; ++i) {
        owners[i] = reinterpret_cast<llama_seq_id *>(seqs) + i;
    }
    llama_batch batch{};
    batch.n_tokens = n;
    batch.token = reinterpret_cast<llama_token *>(tokens);
    batch.pos = reinterpret_cast<llama_pos *>(positions);
    batch.n_seq_id = counts.data();
    batch.seq_id = owners.data();
    batch.logits = reinterpret_cast<int8_t *>(flags);
    if (const int32_t status = llama_decode(context, batch)) {
        return status;
    }
    float * row = reinterpret_cast<float *>(out);
    for (int32_t i = 0; i < n; ++i) {
        if (batch.logits[i]) {
            const float * found = llama_get_logits_ith(context, i);
            if (!found) {
                return -1;
            }
            std::memcpy(row, found, sizeof(float) * n_vocab);
            row += n_vocab;
        }
    }
    return 0;
}

}  // namespace nexus

// The best token that a bit mask allows: bit t of the mask, little-endian words of 32, is token t.
//
// Why C++: with numpy the mask has to be unpacked to a byte per token first, which costs more than the search.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace nexus {

// Id of the allowed token with the largest logit, of equal ones the lowest; -1 where nothing is allowed, -2 where an
// allowed logit is not a number. `mask` has (n_tokens + 31) / 32 words.
inline int64_t best_allowed(size_t logits_address, size_t mask_address, int64_t n_tokens) {
    const auto * logits = reinterpret_cast<const float *>(logits_address);
    const auto * mask = reinterpret_cast<const uint32_t *>(mask_address);
    int64_t best = -1;
    float largest = 0;
    for (int64_t word = 0; word * 32 < n_tokens; ++word) {
        uint32_t bits = mask[word];
        while (bits) {
            const int64_t token = word * 32 + __builtin_ctz(bits);
            bits &= bits - 1;
            if (token >= n_tokens) {
                break;
            }
            const float logit = logits[token];
            if (std::isnan(logit)) {
                return -2;
            }
            if (best < 0 || logit > largest) {
                best = token;
                largest = logit;
            }
        }
    }
    return best;
}

}  // namespace nexus

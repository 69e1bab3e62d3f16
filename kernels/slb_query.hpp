// Quantises one float query to INT8: code = round(x * (127 / largest |x|)), ties to even, everything in float32, so
// that each version, and numpy, gives the same codes. The largest is found among the bit patterns without sign, which
// order like the values and put infinities and NaN at the top.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "slb_dot.hpp"

namespace nexus {

constexpr uint32_t kSlbMagnitudeBits = 0x7fffffff;

// 127 / largest, or 0 for a query of zeros, from the largest magnitude's bits.
inline float slb_inverse(uint32_t largest_bits) {
    if (largest_bits >= 0x7f800000) {
        throw std::invalid_argument("query holds NaN or infinity; give finite numbers");
    }
    float largest;
    std::memcpy(&largest, &largest_bits, sizeof(largest));
    if (largest != 0.0f && largest < 1e-30f) {
        throw std::invalid_argument("query has no magnitude of 1e-30 or more; scale it (embeddings have length 1)");
    }
    return largest == 0.0f ? 0.0f : 127.0f / largest;
}

inline uint32_t slb_largest_bits(const float * query, size_t begin, size_t end, uint32_t largest = 0) {
    for (size_t i = begin; i < end; ++i) {
        uint32_t bits;
        std::memcpy(&bits, query + i, sizeof(bits));
        largest = std::max(largest, bits & kSlbMagnitudeBits);
    }
    return largest;
}

inline void slb_round(const float * query, size_t begin, size_t end, float inverse, int8_t * codes) {
    for (size_t i = begin; i < end; ++i) {
        codes[i] = int8_t(std::nearbyint(query[i] * inverse));
    }
}

inline float slb_quantise_scalar(const float * query, size_t dim, int8_t * codes) {
    const float inverse = slb_inverse(slb_largest_bits(query, 0, dim));
    slb_round(query, 0, dim, inverse, codes);
    return inverse;
}

#if defined(__x86_64__)
NEXUS_SLB_AVX2
inline float slb_quantise_avx2(const float * query, size_t dim, int8_t * codes) {
    const size_t whole = dim / 8 * 8;
    const __m256i magnitude = _mm256_set1_epi32(int(kSlbMagnitudeBits));
    __m256i most = _mm256_setzero_si256();
    for (size_t i = 0; i < whole; i += 8) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(query + i));
        most = _mm256_max_epi32(most, _mm256_and_si256(bits, magnitude));
    }
    alignas(32) uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i *>(lanes), most);
    const uint32_t largest = *std::max_element(lanes, lanes + 8);
    const float inverse = slb_inverse(slb_largest_bits(query, whole, dim, largest));
    const __m256 factor = _mm256_set1_ps(inverse);
    for (size_t i = 0; i < whole; i += 8) {
        const __m256i rounded = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(query + i), factor));
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i *>(codes + i), _mm_packs_epi16(words, words));
    }
    slb_round(query, whole, dim, inverse, codes);
    return inverse;
}

NEXUS_SLB_AVX512VNNI
inline float slb_quantise_avx512(const float * query, size_t dim, int8_t * codes) {
    const __m512i magnitude = _mm512_set1_epi32(int(kSlbMagnitudeBits));
    const __mmask16 rest = __mmask16((1u << dim % 16) - 1);
    const size_t whole = dim / 16 * 16;
    __m512i most = _mm512_and_si512(_mm512_maskz_loadu_epi32(rest, query + whole), magnitude);
    for (size_t i = 0; i < whole; i += 16) {
        most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_loadu_si512(query + i), magnitude));
    }
    const float inverse = slb_inverse(uint32_t(_mm512_reduce_max_epi32(most)));
    const __m512 factor = _mm512_set1_ps(inverse);
    for (size_t i = 0; i < whole; i += 16) {
        const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(query + i), factor));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(codes + i), _mm512_cvtsepi32_epi8(rounded));
    }
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(rest, query + whole), factor));
    _mm512_mask_cvtsepi32_storeu_epi8(codes + whole, rest, rounded);
    return inverse;
}
#elif defined(__aarch64__)
inline float slb_quantise_neon(const float * query, size_t dim, int8_t * codes) {
    const size_t whole = dim / 8 * 8;
    uint32x4_t most = vdupq_n_u32(0);
    for (size_t i = 0; i < whole; i += 4) {
        most = vmaxq_u32(most, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(query + i)), vdupq_n_u32(kSlbMagnitudeBits)));
    }
    const float inverse = slb_inverse(slb_largest_bits(query, whole, dim, vmaxvq_u32(most)));
    for (size_t i = 0; i < whole; i += 8) {
        const int32x4_t first = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(query + i), inverse));
        const int32x4_t second = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(query + i + 4), inverse));
        vst1_s8(codes + i, vqmovn_s16(vcombine_s16(vqmovn_s32(first), vqmovn_s32(second))));
    }
    slb_round(query, whole, dim, inverse, codes);
    return inverse;
}
#endif

}  // namespace nexus

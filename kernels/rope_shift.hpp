// Re-anchoring: rotates stored F16 keys from the position where they were computed to the one where they are used.
//
// RoPE turns pair i of a key at position m by m*theta_i, so moving it by delta turns it by delta*theta_i more:
// (x0, x1) -> (x0 c - x1 s, x0 s + x1 c), c = cos(delta theta_i), s = sin(delta theta_i). Pairs are neighbours
// (2i, 2i+1) in the "normal" layout (0) and halves (i, i + n_rot/2) in the "NeoX" layout (1). Dims past n_rot carry no
// position and are copied.
//
// Error: float32 arithmetic on F16 inputs, rounded once to F16. Against exact arithmetic each result is within half an
// F16 ulp of the pair's magnitude plus 2^-22 of it (3 roundings and the table's, each 2^-24 of at most the magnitude);
// two versions differ by at most one such ulp (a fused multiply-add rounds once where the reference rounds twice). An
// ulp of the element would be the wrong measure: where the rotation cancels, it is arbitrarily small. Holds while the
// magnitude is finite in F16 (below 65504). The work is 3 flops per 2 bytes: memory-bound when vectorised.
//
// Addresses come from Python as size_t; the caller checks type, length and contiguity. src may equal dst.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu_features.hpp"
#include "f16.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__clang__)
#define NEXUS_SCALAR_LOOP _Pragma("clang loop vectorize(disable) interleave(disable)")
#define NEXUS_SCALAR_FUNCTION
#else
#define NEXUS_SCALAR_LOOP
#define NEXUS_SCALAR_FUNCTION __attribute__((optimize("no-tree-vectorize")))
#endif

namespace nexus {

constexpr size_t kMostRotated = 1024;

// One rotation for all rows: cos and sin per pair, and both spread to neighbours for the adjacent-pair layout.
struct RopeTable {
    size_t n_pairs;
    const float * cosine;
    const float * sine;
    float cosine2[kMostRotated];  // c0 c0 c1 c1 ...
    float sine2[kMostRotated];    // -s0 s0 -s1 s1 ...
};

inline void spread_table(RopeTable & table) {
    for (size_t i = 0; i < table.n_pairs; ++i) {
        table.cosine2[2 * i] = table.cosine2[2 * i + 1] = table.cosine[i];
        table.sine2[2 * i] = -table.sine[i];
        table.sine2[2 * i + 1] = table.sine[i];
    }
}

// Rotates pairs begin ... n_pairs-1 of one head: the reference, and what is left over after whole vectors.
NEXUS_SCALAR_FUNCTION
inline void rotate_pairs_scalar(const uint16_t * src, uint16_t * dst, const RopeTable & table, bool neox,
                                size_t begin) {
    const size_t step = neox ? 1 : 2, partner = neox ? table.n_pairs : 1;
    NEXUS_SCALAR_LOOP
    for (size_t i = begin; i < table.n_pairs; ++i) {
        const float x0 = f16_to_f32(src[i * step]), x1 = f16_to_f32(src[i * step + partner]);
        const float c = table.cosine[i], s = table.sine[i];
        dst[i * step] = f32_to_f16(x0 * c - x1 * s);
        dst[i * step + partner] = f32_to_f16(x0 * s + x1 * c);
    }
}

inline void rotate_head_scalar(const uint16_t * src, uint16_t * dst, const RopeTable & table, bool neox) {
    rotate_pairs_scalar(src, dst, table, neox, 0);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma,f16c"))) inline void rotate_head_avx2(const uint16_t * src, uint16_t * dst,
                                                                      const RopeTable & table, bool neox) {
    constexpr int kRound = _MM_FROUND_TO_NEAREST_INT;
    size_t i = 0;
    if (neox) {
        const size_t n = table.n_pairs;
        for (; i + 8 <= n; i += 8) {
            const __m256 x0 = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (src + i)));
            const __m256 x1 = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (src + n + i)));
            const __m256 c = _mm256_loadu_ps(table.cosine + i), s = _mm256_loadu_ps(table.sine + i);
            const __m256 y0 = _mm256_fmsub_ps(x0, c, _mm256_mul_ps(x1, s));
            const __m256 y1 = _mm256_fmadd_ps(x0, s, _mm256_mul_ps(x1, c));
            _mm_storeu_si128((__m128i *) (dst + i), _mm256_cvtps_ph(y0, kRound));
            _mm_storeu_si128((__m128i *) (dst + n + i), _mm256_cvtps_ph(y1, kRound));
        }
    } else {
        for (; i + 4 <= table.n_pairs; i += 4) {
            const __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (src + 2 * i)));
            const __m256 swapped = _mm256_permute_ps(x, 0xb1);
            const __m256 c = _mm256_loadu_ps(table.cosine2 + 2 * i), s = _mm256_loadu_ps(table.sine2 + 2 * i);
            const __m256 y = _mm256_fmadd_ps(x, c, _mm256_mul_ps(swapped, s));
            _mm_storeu_si128((__m128i *) (dst + 2 * i), _mm256_cvtps_ph(y, kRound));
        }
    }
    if (i < table.n_pairs) {
        rotate_pairs_scalar(src, dst, table, neox, i);
    }
}

__attribute__((target("avx512f,avx512bw,avx512vl"))) inline void rotate_head_avx512(const uint16_t * src,
                                                                                    uint16_t * dst,
                                                                                    const RopeTable & table,
                                                                                    bool neox) {
    constexpr int kRound = _MM_FROUND_TO_NEAREST_INT;
    size_t i = 0;
    if (neox) {
        const size_t n = table.n_pairs;
        for (; i + 16 <= n; i += 16) {
            const __m512 x0 = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) (src + i)));
            const __m512 x1 = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) (src + n + i)));
            const __m512 c = _mm512_loadu_ps(table.cosine + i), s = _mm512_loadu_ps(table.sine + i);
            const __m512 y0 = _mm512_fmsub_ps(x0, c, _mm512_mul_ps(x1, s));
            const __m512 y1 = _mm512_fmadd_ps(x0, s, _mm512_mul_ps(x1, c));
            _mm256_storeu_si256((__m256i *) (dst + i), _mm512_cvtps_ph(y0, kRound));
            _mm256_storeu_si256((__m256i *) (dst + n + i), _mm512_cvtps_ph(y1, kRound));
        }
    } else {
        for (; i + 8 <= table.n_pairs; i += 8) {
            const __m512 x = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) (src + 2 * i)));
            const __m512 swapped = _mm512_permute_ps(x, 0xb1);
            const __m512 c = _mm512_loadu_ps(table.cosine2 + 2 * i), s = _mm512_loadu_ps(table.sine2 + 2 * i);
            const __m512 y = _mm512_fmadd_ps(x, c, _mm512_mul_ps(swapped, s));
            _mm256_storeu_si256((__m256i *) (dst + 2 * i), _mm512_cvtps_ph(y, kRound));
        }
    }
    if (i < table.n_pairs) {
        rotate_pairs_scalar(src, dst, table, neox, i);
    }
}
#elif defined(__aarch64__)
inline float32x4_t load_f16x4(const uint16_t * at) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))); }
inline void store_f16x4(uint16_t * at, float32x4_t value) { vst1_u16(at, vreinterpret_u16_f16(vcvt_f16_f32(value))); }

inline void rotate_head_neon(const uint16_t * src, uint16_t * dst, const RopeTable & table, bool neox) {
    size_t i = 0;
    if (neox) {
        const size_t n = table.n_pairs;
        for (; i + 4 <= n; i += 4) {
            const float32x4_t x0 = load_f16x4(src + i), x1 = load_f16x4(src + n + i);
            const float32x4_t c = vld1q_f32(table.cosine + i), s = vld1q_f32(table.sine + i);
            store_f16x4(dst + i, vfmsq_f32(vmulq_f32(x0, c), x1, s));
            store_f16x4(dst + n + i, vfmaq_f32(vmulq_f32(x1, c), x0, s));
        }
    } else {
        for (; i + 2 <= table.n_pairs; i += 2) {
            const float32x4_t x = load_f16x4(src + 2 * i);
            const float32x4_t c = vld1q_f32(table.cosine2 + 2 * i), s = vld1q_f32(table.sine2 + 2 * i);
            store_f16x4(dst + 2 * i, vfmaq_f32(vmulq_f32(x, c), vrev64q_f32(x), s));
        }
    }
    if (i < table.n_pairs) {
        rotate_pairs_scalar(src, dst, table, neox, i);
    }
}
#endif

// Rows to rotate, each n_heads x head_dim halves of which the first 2*n_pairs of a head carry a position.
struct RopeRows {
    const uint8_t * src;
    uint8_t * dst;
    size_t n_rows, src_row_bytes, dst_row_bytes, n_heads, head_dim;
};

using RotateHead = void (*)(const uint16_t *, uint16_t *, const RopeTable &, bool);

// Inlined into a function of each instruction set, so that the head kernel is inlined too: a head is a few vectors long
// and a call per head would cost as much as its work.
template <RotateHead rotate>
__attribute__((always_inline)) inline void rotate_each_head(const RopeRows & rows, const RopeTable & table, bool neox) {
    const size_t n_rot = 2 * table.n_pairs, rest = (rows.head_dim - n_rot) * sizeof(uint16_t);
    for (size_t row = 0; row < rows.n_rows; ++row) {
        const auto * source = reinterpret_cast<const uint16_t *>(rows.src + row * rows.src_row_bytes);
        auto * target = reinterpret_cast<uint16_t *>(rows.dst + row * rows.dst_row_bytes);
        for (size_t head = 0; head < rows.n_heads; ++head, source += rows.head_dim, target += rows.head_dim) {
            rotate(source, target, table, neox);
            if (rest != 0 && source != target) {
                std::memcpy(target + n_rot, source + n_rot, rest);
            }
        }
    }
}

inline void rope_shift_scalar(const RopeRows & rows, const RopeTable & table, bool neox) {
    rotate_each_head<rotate_head_scalar>(rows, table, neox);
}
#if defined(__x86_64__)
__attribute__((target("avx2,fma,f16c"))) inline void rope_shift_avx2(const RopeRows & rows, const RopeTable & table,
                                                                     bool neox) {
    rotate_each_head<rotate_head_avx2>(rows, table, neox);
}

__attribute__((target("avx512f,avx512bw,avx512vl"))) inline void rope_shift_avx512(const RopeRows & rows,
                                                                                   const RopeTable & table,
                                                                                   bool neox) {
    rotate_each_head<rotate_head_avx512>(rows, table, neox);
}
#elif defined(__aarch64__)
inline void rope_shift_neon(const RopeRows & rows, const RopeTable & table, bool neox) {
    rotate_each_head<rotate_head_neon>(rows, table, neox);
}
#endif

inline void rope_shift_identity(const RopeRows & rows) {
    for (size_t row = 0; row < rows.n_rows; ++row) {
        std::memmove(rows.dst + row * rows.dst_row_bytes, rows.src + row * rows.src_row_bytes,
                     rows.n_heads * rows.head_dim * sizeof(uint16_t));
    }
}

// cos and sin of delta*theta_i, computed in double: float[n_pairs] each from frequencies double[n_pairs].
inline void rope_table(double delta, size_t frequencies, size_t n_pairs, size_t cosine, size_t sine) {
    for (size_t i = 0; i < n_pairs; ++i) {
        const double angle = delta * reinterpret_cast<const double *>(frequencies)[i];
        reinterpret_cast<float *>(cosine)[i] = float(std::cos(angle));
        reinterpret_cast<float *>(sine)[i] = float(std::sin(angle));
    }
}

// Whether every angle is exactly zero. Then keys are copied: x*1 - y*0 would lose the sign of a zero.
inline bool is_identity(const RopeTable & table) {
    for (size_t i = 0; i < table.n_pairs; ++i) {
        if (table.cosine[i] != 1.0f || table.sine[i] != 0.0f) {
            return false;
        }
    }
    return true;
}

inline void check_rope_shift(int isa, size_t src_row_bytes, size_t dst_row_bytes, size_t n_heads, size_t head_dim,
                             size_t n_rot, int layout) {
    const auto refuse = [](const std::string & what) { throw std::invalid_argument("rope_shift: " + what); };
    if (!isa_available(isa)) {
        refuse("isa " + std::to_string(isa) + " (" + isa_name(isa) + ") is not available on this CPU");
    }
    if (n_rot % 2 != 0 || n_rot > head_dim || n_rot > kMostRotated) {
        refuse("n_rot is " + std::to_string(n_rot) + "; it must be even, at most head_dim (" +
               std::to_string(head_dim) + ") and at most " + std::to_string(kMostRotated));
    }
    if (layout != 0 && layout != 1) {
        refuse("layout is " + std::to_string(layout) + "; use 0 (adjacent pairs) or 1 (halves)");
    }
    const size_t row = n_heads * head_dim * sizeof(uint16_t);
    if (src_row_bytes < row || dst_row_bytes < row) {
        refuse("a row of " + std::to_string(row) + " bytes does not fit strides of " + std::to_string(src_row_bytes) +
               " and " + std::to_string(dst_row_bytes));
    }
}

// Rotates n_layers blocks of rows; src_addrs and dst_addrs are uint64[n_layers] addresses of their first rows.
inline void rope_shift_layers(int isa, size_t src_addrs, size_t dst_addrs, size_t n_layers, size_t n_rows,
                              size_t src_row_bytes, size_t dst_row_bytes, size_t n_heads, size_t head_dim,
                              size_t n_rot, int layout, size_t cosine, size_t sine) {
    check_rope_shift(isa, src_row_bytes, dst_row_bytes, n_heads, head_dim, n_rot, layout);
    RopeTable table;
    table.n_pairs = n_rot / 2;
    table.cosine = reinterpret_cast<const float *>(cosine);
    table.sine = reinterpret_cast<const float *>(sine);
    spread_table(table);
    const bool identity = is_identity(table), neox = layout == 1;
    for (size_t layer = 0; layer < n_layers; ++layer) {
        const RopeRows rows = {
            reinterpret_cast<const uint8_t *>(reinterpret_cast<const uint64_t *>(src_addrs)[layer]),
            reinterpret_cast<uint8_t *>(reinterpret_cast<const uint64_t *>(dst_addrs)[layer]),
            n_rows, src_row_bytes, dst_row_bytes, n_heads, head_dim};
        if (identity) {
            rope_shift_identity(rows);
            continue;
        }
        switch (isa) {
#if defined(__x86_64__)
            case kAvx2: rope_shift_avx2(rows, table, neox); break;
            case kAvx512: rope_shift_avx512(rows, table, neox); break;
#elif defined(__aarch64__)
            case kNeon: rope_shift_neon(rows, table, neox); break;
#endif
            default: rope_shift_scalar(rows, table, neox);
        }
    }
}

// Rotates one block of rows, each n_heads x head_dim halves.
inline void rope_shift(int isa, size_t src, size_t dst, size_t n_rows, size_t src_row_bytes, size_t dst_row_bytes,
                       size_t n_heads, size_t head_dim, size_t n_rot, int layout, size_t cosine, size_t sine) {
    const uint64_t from = src, to = dst;
    rope_shift_layers(isa, size_t(&from), size_t(&to), 1, n_rows, src_row_bytes, dst_row_bytes, n_heads, head_dim,
                      n_rot, layout, cosine, sine);
}

}  // namespace nexus

// Products of one query with the 64 rows of a block (slb_layout.hpp), one version per instruction set, all exact.
//
// Each returns a mask of the rows whose product is above a threshold, and writes the 64 products only if there is any:
// after the first blocks of a scan that is rare, so what remains is loads and multiplications without a branch. `start`
// is the lanes' first value, -128 times the sum of the query: it undoes the table's bias. The query holds 4 n_groups
// bytes, zero past the last dim. Each byte of the table is read once and multiplied once: memory sets the
// pace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu_features.hpp"
#include "slb_layout.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define NEXUS_SLB_AVX2 __attribute__((target("avx2")))
#define NEXUS_SLB_AVX512VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#if defined(__APPLE__)
#define NEXUS_SLB_DOTPROD
#else
#define NEXUS_SLB_DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#if defined(__clang__)
#define NEXUS_SLB_SCALAR_LOOP _Pragma("clang loop vectorize(disable)")
#define NEXUS_SLB_SCALAR
#else
#define NEXUS_SLB_SCALAR_LOOP
#define NEXUS_SLB_SCALAR __attribute__((optimize("no-tree-vectorize")))
#endif

namespace nexus {

// Instruction sets of the scan, from the reference to the fastest of each architecture.
enum SlbIsa : int { kSlbScalar = 0, kSlbAvx2 = 1, kSlbAvx512Vnni = 2, kSlbNeon = 3, kSlbNeonDotprod = 4, kSlbIsas = 5 };

inline const char * slb_isa_name(int isa) {
    switch (isa) {
        case kSlbScalar: return "scalar";
        case kSlbAvx2: return "avx2";
        case kSlbAvx512Vnni: return "avx512vnni";
        case kSlbNeon: return "neon";
        case kSlbNeonDotprod: return "neon-dotprod";
        default: return "unknown";
    }
}

inline bool slb_isa_available(int isa) {
    const CpuFeatures & cpu = cpu_features();
    switch (isa) {
        case kSlbScalar: return true;
        case kSlbAvx2: return cpu.avx2;
        case kSlbAvx512Vnni: return cpu.avx512f && cpu.avx512bw && cpu.avx512vl && cpu.avx512vnni;
        case kSlbNeon: return cpu.neon;
        case kSlbNeonDotprod: return cpu.neon && cpu.dotprod;
        default: return false;
    }
}

inline int slb_best_isa() {
    for (const int isa : {kSlbAvx512Vnni, kSlbAvx2, kSlbNeonDotprod, kSlbNeon}) {
        if (slb_isa_available(isa)) {
            return isa;
        }
    }
    return kSlbScalar;
}

inline int32_t slb_four(const int8_t * query, size_t group) {
    int32_t four;
    std::memcpy(&four, query + group * kSlbGroup, sizeof(four));
    return four;
}

NEXUS_SLB_SCALAR
inline uint64_t slb_dot_scalar(const uint8_t * block, size_t n_groups, const int8_t * query, int32_t start,
                               int32_t threshold, int32_t * products) {
    uint64_t above = 0;
    for (size_t row = 0; row < kSlbRows; ++row) {
        int32_t sum = start;
        NEXUS_SLB_SCALAR_LOOP
        for (size_t group = 0; group < n_groups; ++group) {
            const uint8_t * codes = block + group * kSlbGroupBytes + row * kSlbGroup;
            const int8_t * factors = query + group * kSlbGroup;
            sum += codes[0] * factors[0] + codes[1] * factors[1] + codes[2] * factors[2] + codes[3] * factors[3];
        }
        products[row] = sum;
        above |= uint64_t(sum > threshold) << row;
    }
    return above;
}

#if defined(__x86_64__)
// One instruction multiplies 64 bytes and adds them by fours. Four vectors of sums hide its latency.
NEXUS_SLB_AVX512VNNI
inline uint64_t slb_dot_avx512vnni(const uint8_t * block, size_t n_groups, const int8_t * query, int32_t start,
                                   int32_t threshold, int32_t * products) {
    __m512i sum0 = _mm512_set1_epi32(start), sum1 = sum0, sum2 = sum0, sum3 = sum0;
    for (size_t group = 0; group < n_groups; ++group, block += kSlbGroupBytes) {
        const __m512i factors = _mm512_set1_epi32(slb_four(query, group));
        sum0 = _mm512_dpbusd_epi32(sum0, _mm512_loadu_si512(block), factors);
        sum1 = _mm512_dpbusd_epi32(sum1, _mm512_loadu_si512(block + 64), factors);
        sum2 = _mm512_dpbusd_epi32(sum2, _mm512_loadu_si512(block + 128), factors);
        sum3 = _mm512_dpbusd_epi32(sum3, _mm512_loadu_si512(block + 192), factors);
    }
    const __m512i limit = _mm512_set1_epi32(threshold);
    const uint64_t above = uint64_t(_mm512_cmpgt_epi32_mask(sum0, limit)) |
                           uint64_t(_mm512_cmpgt_epi32_mask(sum1, limit)) << 16 |
                           uint64_t(_mm512_cmpgt_epi32_mask(sum2, limit)) << 32 |
                           uint64_t(_mm512_cmpgt_epi32_mask(sum3, limit)) << 48;
    if (above != 0) {
        _mm512_storeu_si512(products, sum0);
        _mm512_storeu_si512(products + 16, sum1);
        _mm512_storeu_si512(products + 32, sum2);
        _mm512_storeu_si512(products + 48, sum3);
    }
    return above;
}

// The byte multiplication of AVX2 (maddubs) saturates at 16 bits. Bytes at even and at odd places, widened to 16 bits
// by a mask and a shift, go through the 16-bit one, which does not. The other exact way, a query split into two halves
// of 7 bits for maddubs, needs two more multiplications to widen its sums and was a tenth slower.
NEXUS_SLB_AVX2
inline uint64_t slb_dot_avx2(const uint8_t * block, size_t n_groups, const int8_t * query, int32_t start,
                             int32_t threshold, int32_t * products) {
    constexpr size_t kVectors = kSlbRows / 8;
    const __m256i low_bytes = _mm256_set1_epi16(0xff);
    __m256i sums[kVectors];
    for (__m256i & sum : sums) {
        sum = _mm256_set1_epi32(start);
    }
    for (size_t group = 0; group < n_groups; ++group, block += kSlbGroupBytes) {
        const __m256i factors = _mm256_set1_epi32(slb_four(query, group));
        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(factors, 8), 8), odd = _mm256_srai_epi16(factors, 8);
        for (size_t i = 0; i < kVectors; ++i) {
            const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(block) + i);
            const __m256i first = _mm256_madd_epi16(_mm256_and_si256(codes, low_bytes), even);
            const __m256i second = _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), odd);
            sums[i] = _mm256_add_epi32(sums[i], _mm256_add_epi32(first, second));
        }
    }
    const __m256i limit = _mm256_set1_epi32(threshold);
    uint64_t above = 0;
    for (size_t i = 0; i < kVectors; ++i) {
        const __m256i greater = _mm256_cmpgt_epi32(sums[i], limit);
        above |= uint64_t(uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(greater)))) << (8 * i);
    }
    if (above != 0) {
        for (size_t i = 0; i < kVectors; ++i) {
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(products) + i, sums[i]);
        }
    }
    return above;
}
#elif defined(__aarch64__)
// Whether any of 64 products, four to a vector, is above the threshold; then which ones, and the products.
inline uint64_t slb_above_neon(const int32x4_t * sums, int32_t threshold, int32_t * products) {
    int32x4_t most = sums[0];
    for (size_t i = 1; i < kSlbRows / 4; ++i) {
        most = vmaxq_s32(most, sums[i]);
    }
    if (vmaxvq_s32(most) <= threshold) {
        return 0;
    }
    uint64_t above = 0;
    for (size_t i = 0; i < kSlbRows / 4; ++i) {
        vst1q_s32(products + 4 * i, sums[i]);
    }
    for (size_t row = 0; row < kSlbRows; ++row) {
        above |= uint64_t(products[row] > threshold) << row;
    }
    return above;
}

// Arm multiplies signed bytes with signed ones: flipping the top bit back costs less than a bias, so `start` is not
// used.
NEXUS_SLB_DOTPROD
inline uint64_t slb_dot_neon_dotprod(const uint8_t * block, size_t n_groups, const int8_t * query, int32_t,
                                     int32_t threshold, int32_t * products) {
    constexpr size_t kVectors = kSlbRows / 4;
    const uint8x16_t top_bit = vdupq_n_u8(0x80);
    int32x4_t sums[kVectors];
    for (int32x4_t & sum : sums) {
        sum = vdupq_n_s32(0);
    }
    for (size_t group = 0; group < n_groups; ++group, block += kSlbGroupBytes) {
        const int8x16_t factors = vreinterpretq_s8_s32(vdupq_n_s32(slb_four(query, group)));
        for (size_t i = 0; i < kVectors; ++i) {
            const int8x16_t codes = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(block + 16 * i), top_bit));
            sums[i] = vdotq_s32(sums[i], codes, factors);
        }
    }
    return slb_above_neon(sums, threshold, products);
}

// Without the dot product: products of bytes in 16 bits, added in pairs to 32. Two products of -128 with -128 do not
// fit 16 bits together, so they are widened before they meet. 16 rows at a time, to keep all sums in registers.
inline uint64_t slb_dot_neon(const uint8_t * block, size_t n_groups, const int8_t * query, int32_t, int32_t threshold,
                             int32_t * products) {
    constexpr size_t kAtOnce = 4;
    const uint8x16_t top_bit = vdupq_n_u8(0x80);
    int32x4_t sums[kSlbRows / 4];
    for (size_t begin = 0; begin < kSlbRows / 4; begin += kAtOnce) {
        int32x4_t low[kAtOnce], high[kAtOnce];
        for (size_t i = 0; i < kAtOnce; ++i) {
            low[i] = high[i] = vdupq_n_s32(0);
        }
        const uint8_t * from = block + 16 * begin;
        for (size_t group = 0; group < n_groups; ++group, from += kSlbGroupBytes) {
            const int8x8_t factors = vreinterpret_s8_s32(vdup_n_s32(slb_four(query, group)));
            for (size_t i = 0; i < kAtOnce; ++i) {
                const int8x16_t codes = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(from + 16 * i), top_bit));
                low[i] = vpadalq_s16(low[i], vmull_s8(vget_low_s8(codes), factors));
                high[i] = vpadalq_s16(high[i], vmull_s8(vget_high_s8(codes), factors));
            }
        }
        for (size_t i = 0; i < kAtOnce; ++i) {
            sums[begin + i] = vpaddq_s32(low[i], high[i]);
        }
    }
    return slb_above_neon(sums, threshold, products);
}
#endif

}  // namespace nexus

// IEEE 754 half precision to float and back in plain integer arithmetic: the reference for the vector conversions,
// and what handles tails. Rounds to nearest, ties to even, like F16C, AVX-512 and NEON do.
#pragma once

#include <cstdint>
#include <cstring>

namespace nexus {

inline float f16_to_f32(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16;
    const uint32_t exponent = (half >> 10) & 0x1f;
    uint32_t mantissa = half & 0x3ff;
    uint32_t bits;
    if (exponent == 0x1f) {
        // A signalling NaN becomes a quiet one, as the hardware does it.
        bits = sign | 0x7f800000 | (mantissa << 13) | (mantissa ? 0x400000 : 0);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
    } else if (mantissa == 0) {
        bits = sign;
    } else {
        uint32_t shift = 0;
        while (!(mantissa & 0x400)) {
            mantissa <<= 1;
            ++shift;
        }
        bits = sign | ((113 - shift) << 23) | ((mantissa & 0x3ff) << 13);
    }
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

inline uint16_t f32_to_f16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        return sign | 0x7e00 | uint16_t((magnitude >> 13) & 0x3ff);
    }
    if (magnitude >= 0x477ff000) {  // rounds to 65536 or more
        return sign | 0x7c00;
    }
    uint32_t mantissa, dropped;
    if (magnitude >= 0x38800000) {  // normal
        mantissa = (magnitude - 0x38000000) >> 13;
        dropped = (magnitude << 19);
    } else if (magnitude >= 0x33000000) {  // subnormal
        const uint32_t shift = 126 - (magnitude >> 23);
        const uint64_t significand = uint64_t((magnitude & 0x7fffff) | 0x800000) << 32;
        mantissa = uint32_t(significand >> (32 + shift));
        const uint64_t rest = significand & ((uint64_t(1) << (32 + shift)) - 1);
        const uint64_t half = uint64_t(1) << (31 + shift);
        dropped = rest > half ? 0x80000001u : rest == half ? 0x80000000u : 0u;
    } else {
        return sign;
    }
    if (dropped > 0x80000000u || (dropped == 0x80000000u && (mantissa & 1))) {
        ++mantissa;  // may carry into the exponent, which is the right result
    }
    return sign | uint16_t(mantissa);
}

}  // namespace nexus

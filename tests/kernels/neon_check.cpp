// Runs the NEON key rotation against the scalar reference and float64, for test_neon.py under qemu-user.
// Prints one line per section with the worst error in F16 ulps of the pair's magnitude; exit status 1 on any failure.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kv_state.hpp"
#include "rope_shift.hpp"
#include "tool_block.hpp"

using namespace nexus;

static int failures = 0;

static void expect(bool holds, const char * what) {
    if (!holds) {
        std::printf("FAILED %s\n", what);
        ++failures;
    }
}

// xorshift: the same keys on every run.
static uint64_t random_state = 0x2545f4914f6cdd1dull;
static uint64_t random_bits() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

// A finite half below 2^14, so that no pair overflows; subnormals and signed zeros included.
static uint16_t random_half() {
    const uint64_t bits = random_bits();
    return uint16_t((bits & 0x8000) | ((bits >> 20) % (29u << 10)));
}

static double ulp_of(double magnitude) {
    return std::exp2(std::floor(std::log2(std::max(magnitude, std::exp2(-14.0)))) - 10);
}

struct Worst {
    double to_scalar = 0, to_double = 0;
};

static void check_shape(size_t n_rows, size_t n_heads, size_t head_dim, size_t n_rot, int layout, size_t gap,
                        double delta, Worst & worst) {
    const size_t half = n_rot / 2, width = n_heads * head_dim, src_width = width + gap, dst_width = width + 2 * gap;
    std::vector<double> theta(half + 1, 0.0);
    std::vector<float> cosine(half + 1), sine(half + 1);
    for (size_t i = 0; i < half; ++i) {
        theta[i] = std::pow(10000.0, -double(i) / double(half));
    }
    rope_table(delta, size_t(theta.data()), half, size_t(cosine.data()), size_t(sine.data()));
    std::vector<uint16_t> source(n_rows * src_width), neon(n_rows * dst_width, 0x5a5a), scalar(neon);
    for (uint16_t & half_bits : source) {
        half_bits = random_half();
    }
    const auto run = [&](int isa, const uint16_t * from, uint16_t * to, size_t to_width) {
        rope_shift(isa, size_t(from), size_t(to), n_rows, src_width * 2, to_width * 2, n_heads, head_dim, n_rot, layout,
                   size_t(cosine.data()), size_t(sine.data()));
    };
    run(kNeon, source.data(), neon.data(), dst_width);
    run(kScalar, source.data(), scalar.data(), dst_width);
    std::vector<uint16_t> in_place = source;
    run(kNeon, in_place.data(), in_place.data(), src_width);

    for (size_t row = 0; row < n_rows; ++row) {
        const uint16_t * gap_begin = neon.data() + row * dst_width + width;
        for (size_t i = 0; i < 2 * gap; ++i) {
            expect(gap_begin[i] == 0x5a5a, "bytes between rows stay as they were");
        }
        expect(std::memcmp(&in_place[row * src_width], &neon[row * dst_width], width * 2) == 0, "in place");
        for (size_t head = 0; head < n_heads; ++head) {
            const uint16_t * from = &source[row * src_width + head * head_dim];
            const uint16_t * a = &neon[row * dst_width + head * head_dim];
            const uint16_t * b = &scalar[row * dst_width + head * head_dim];
            expect(std::memcmp(a + n_rot, from + n_rot, (head_dim - n_rot) * 2) == 0, "unrotated dims are copied");
            for (size_t i = 0; i < half; ++i) {
                const size_t at0 = layout ? i : 2 * i, at1 = layout ? i + half : 2 * i + 1;
                const double x0 = f16_to_f32(from[at0]), x1 = f16_to_f32(from[at1]);
                const double c = std::cos(delta * theta[i]), s = std::sin(delta * theta[i]);
                const double ulp = ulp_of(std::hypot(x0, x1));
                const double n0 = f16_to_f32(a[at0]), n1 = f16_to_f32(a[at1]);
                worst.to_scalar = std::max({worst.to_scalar, std::fabs(n0 - f16_to_f32(b[at0])) / ulp,
                                            std::fabs(n1 - f16_to_f32(b[at1])) / ulp});
                worst.to_double = std::max({worst.to_double, std::fabs(n0 - (x0 * c - x1 * s)) / ulp,
                                            std::fabs(n1 - (x0 * s + x1 * c)) / ulp});
            }
        }
    }
}

static void check_identity() {
    std::vector<uint16_t> source(2 * 96), target(2 * 96);
    for (size_t i = 0; i < source.size(); ++i) {
        source[i] = i % 3 ? uint16_t(random_bits()) : 0x8000;
    }
    std::vector<float> cosine(48, 1.0f), sine(48, 0.0f);
    for (int layout = 0; layout < 2; ++layout) {
        rope_shift(kNeon, size_t(source.data()), size_t(target.data()), 2, 192, 192, 1, 96, 96, layout,
                   size_t(cosine.data()), size_t(sine.data()));
        expect(source == target, "delta 0 is the bit-exact identity");
    }
}

// The scalar conversions against the hardware's: every half, and the ties between all neighbours.
static void check_conversions() {
    for (uint32_t h = 0; h < 0x10000; ++h) {
        const uint16_t in[4] = {uint16_t(h), 0, 0, 0};
        const float wide = vgetq_lane_f32(load_f16x4(in), 0), ours = f16_to_f32(uint16_t(h));
        uint32_t hardware_bits, our_bits;
        std::memcpy(&hardware_bits, &wide, 4);
        std::memcpy(&our_bits, &ours, 4);
        expect(hardware_bits == our_bits, "f16_to_f32 equals the hardware");
    }
    for (uint32_t h = 0; h < 0x7c00; ++h) {
        const float low = f16_to_f32(uint16_t(h));
        const float high = h == 0x7bff ? 65536.0f : f16_to_f32(uint16_t(h + 1));
        const float tie = (low + high) / 2;
        for (const float value : {tie, std::nextafterf(tie, 0), std::nextafterf(tie, 1e9f), -tie}) {
            uint16_t hardware[4];
            store_f16x4(hardware, vdupq_n_f32(value));
            expect(hardware[0] == f32_to_f16(value), "f32_to_f16 equals the hardware");
        }
    }
}

int main() {
    const CpuFeatures & cpu = cpu_features();
    std::printf("features neon=%d dotprod=%d best=%s\n", cpu.neon, cpu.dotprod, isa_name(best_isa()));
    expect(best_isa() == kNeon, "NEON is chosen");
    expect(!isa_available(kAvx2) && !isa_available(kAvx512), "x86 versions are absent");
    Worst worst;
    size_t shapes = 0;
    for (int layout = 0; layout < 2; ++layout) {
        for (size_t half = 0; half <= 20; ++half) {  // every tail of both vector loops, several times
            for (const size_t rest : {0, 1, 5}) {
                if (half + rest == 0) {
                    continue;
                }
                for (const size_t heads : {1, 3}) {
                    for (const double delta : {1.0, -300.0, 32767.0}) {
                        check_shape(3, heads, 2 * half + rest, 2 * half, layout, rest, delta, worst);
                        ++shapes;
                    }
                }
            }
        }
        for (const size_t head_dim : {64, 80, 96, 128, 256}) {  // real models
            check_shape(20, 2, head_dim, head_dim, layout, 0, 219.0, worst);
            ++shapes;
        }
    }
    std::printf("rotation shapes=%zu worst_to_scalar=%.6f worst_to_float64=%.6f\n", shapes, worst.to_scalar,
                worst.to_double);
    expect(worst.to_scalar <= 1.0, "within one ulp of the scalar reference");
    expect(worst.to_double <= 0.5 + std::exp2(-11.0), "within half an ulp of float64");
    check_identity();
    check_conversions();
    std::printf("%s\n", failures ? "failed" : "passed");
    return failures ? 1 : 0;
}

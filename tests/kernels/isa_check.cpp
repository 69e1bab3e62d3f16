// Prints the features of this CPU, runs every rotation kernel that it has and names the best: for test_cpu_features.py
// under qemu-user. A half turn negates every key in every version: of interest is that each one runs, tails included.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "rope_shift.hpp"

int main() {
    const nexus::CpuFeatures & cpu = nexus::cpu_features();
    std::printf("avx2=%d fma=%d f16c=%d avx512=%d%d%d%d\n", cpu.avx2, cpu.fma, cpu.f16c, cpu.avx512f, cpu.avx512bw,
                cpu.avx512vl, cpu.avx512vnni);
    constexpr size_t kPairs = 21;
    const std::vector<float> cosine(kPairs, -1.0f), sine(kPairs, 0.0f);
    for (int isa = 0; isa < 4; ++isa) {
        if (!nexus::isa_available(isa)) {
            continue;
        }
        bool right = true;
        for (int layout = 0; layout < 2; ++layout) {
            std::vector<uint16_t> keys(2 * kPairs, 0x3c00);
            nexus::rope_shift(isa, size_t(keys.data()), size_t(keys.data()), 1, 4 * kPairs, 4 * kPairs, 1, 2 * kPairs,
                              2 * kPairs, layout, size_t(cosine.data()), size_t(sine.data()));
            right = right && keys == std::vector<uint16_t>(2 * kPairs, 0xbc00);
        }
        std::printf("%s %s\n", nexus::isa_name(isa), right ? "right" : "wrong");
    }
    std::printf("best %s\n", nexus::isa_name(nexus::best_isa()));
    return 0;
}

// What this CPU and operating system can run, asked at run time: one build of the kernels serves every machine.
// cling cannot link __builtin_cpu_supports, so cpuid and xgetbv are read directly.
#pragma once

#include <cstdint>
#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace nexus {

struct CpuFeatures {
    bool avx2 = false, fma = false, f16c = false;
    bool avx512f = false, avx512bw = false, avx512vl = false, avx512vnni = false;
    bool neon = false, dotprod = false;
};

inline CpuFeatures read_cpu_features() {
    CpuFeatures found;
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) {
        return found;  // no xgetbv: the operating system does not save wide registers
    }
    unsigned xcr0 = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    const bool ymm_saved = (xcr0 & 0x6) == 0x6;
    const bool zmm_saved = (xcr0 & 0xe6) == 0xe6;
    found.fma = ymm_saved && (c & (1u << 12));
    found.f16c = ymm_saved && (c & (1u << 29));
    unsigned b7 = 0, c7 = 0;
    if (__get_cpuid_count(7, 0, &a, &b7, &c7, &d)) {
        found.avx2 = ymm_saved && (b7 & (1u << 5));
        found.avx512f = zmm_saved && (b7 & (1u << 16));
        found.avx512bw = zmm_saved && (b7 & (1u << 30));
        found.avx512vl = zmm_saved && (b7 & (1u << 31));
        found.avx512vnni = zmm_saved && (c7 & (1u << 11));
    }
#elif defined(__aarch64__)
    found.neon = true;
#if defined(__linux__)
    found.dotprod = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    found.dotprod = true;  // every Apple CPU that runs a supported macOS has it
#endif
#endif
    return found;
}

inline const CpuFeatures & cpu_features() {
    static const CpuFeatures found = read_cpu_features();
    return found;
}

// Instruction sets of the key rotation kernels, from the reference to the widest.
enum Isa : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2, kNeon = 3 };

inline const char * isa_name(int isa) {
    switch (isa) {
        case kScalar: return "scalar";
        case kAvx2: return "avx2";
        case kAvx512: return "avx512";
        case kNeon: return "neon";
        default: return "unknown";
    }
}

inline bool isa_available(int isa) {
    const CpuFeatures & cpu = cpu_features();
    switch (isa) {
        case kScalar: return true;
        case kAvx2: return cpu.avx2 && cpu.fma && cpu.f16c;
        case kAvx512: return cpu.avx512f && cpu.avx512bw && cpu.avx512vl;
        case kNeon: return cpu.neon;
        default: return false;
    }
}

inline int best_isa() {
    for (const int isa : {kAvx512, kAvx2, kNeon}) {
        if (isa_available(isa)) {
            return isa;
        }
    }
    return kScalar;
}

}  // namespace nexus

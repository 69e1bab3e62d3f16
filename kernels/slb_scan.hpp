// The semantic lookaside buffer: an INT8 table of embeddings that is searched exactly, in one call from Python.
//
// A search quantises the query, scans every row and keeps the k best on the way, so no array of scores is ever written.
// What it costs is reading the table: slb_ceiling.hpp holds the same read without the work.
//
// Addresses come from Python as size_t; the caller checks type, length and contiguity. One table serves one caller at a
// time: query and results live in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "slb_dot.hpp"
#include "slb_layout.hpp"
#include "slb_query.hpp"
#include "slb_topk.hpp"

namespace nexus {

struct SlbHit {
    int64_t id;
    double score;
};

// Blocks first ... last-1 of a table, and the query.
struct SlbRange {
    const uint8_t * blocks;
    size_t first, last, n_rows, n_groups;
    const int8_t * query;
    int32_t start;
};

using SlbDot = uint64_t (*)(const uint8_t *, size_t, const int8_t *, int32_t, int32_t, int32_t *);

// Inlined into a function of each instruction set, so that the block kernel is inlined, too.
template <SlbDot dot>
__attribute__((always_inline)) inline void slb_scan_blocks(const SlbRange & range, SlbTopK & top) {
    alignas(64) int32_t products[kSlbRows];
    for (size_t block = range.first; block < range.last; ++block) {
        uint64_t above = dot(range.blocks + block * range.n_groups * kSlbGroupBytes, range.n_groups, range.query,
                             range.start, top.threshold(), products);
        const size_t begin = block * kSlbRows, rows = range.n_rows - begin;
        if (rows < kSlbRows) {
            above &= (uint64_t(1) << rows) - 1;
        }
        for (; above != 0; above &= above - 1) {
            const size_t row = size_t(__builtin_ctzll(above));
            // Ascending ids: an equal score that comes later never replaces an earlier one.
            if (products[row] > top.threshold()) {
                top.offer(products[row], uint32_t(begin + row));
            }
        }
    }
}

inline void slb_scan_scalar(const SlbRange & range, SlbTopK & top) { slb_scan_blocks<slb_dot_scalar>(range, top); }
#if defined(__x86_64__)
NEXUS_SLB_AVX2 inline void slb_scan_avx2(const SlbRange & range, SlbTopK & top) {
    slb_scan_blocks<slb_dot_avx2>(range, top);
}
NEXUS_SLB_AVX512VNNI inline void slb_scan_avx512vnni(const SlbRange & range, SlbTopK & top) {
    slb_scan_blocks<slb_dot_avx512vnni>(range, top);
}
#elif defined(__aarch64__)
inline void slb_scan_neon(const SlbRange & range, SlbTopK & top) { slb_scan_blocks<slb_dot_neon>(range, top); }
NEXUS_SLB_DOTPROD inline void slb_scan_neon_dotprod(const SlbRange & range, SlbTopK & top) {
    slb_scan_blocks<slb_dot_neon_dotprod>(range, top);
}
#endif

// What an instruction set scans and quantises with.
struct SlbKernels {
    void (*scan)(const SlbRange &, SlbTopK &);
    float (*quantise)(const float *, size_t, int8_t *);
};

inline SlbKernels slb_kernels(int isa) {
    switch (isa) {
#if defined(__x86_64__)
        case kSlbAvx2: return {slb_scan_avx2, slb_quantise_avx2};
        case kSlbAvx512Vnni: return {slb_scan_avx512vnni, slb_quantise_avx512};
#elif defined(__aarch64__)
        case kSlbNeon: return {slb_scan_neon, slb_quantise_neon};
        case kSlbNeonDotprod: return {slb_scan_neon_dotprod, slb_quantise_neon};
#endif
        default: return {slb_scan_scalar, slb_quantise_scalar};
    }
}

struct SlbFree {
    void operator()(uint8_t * memory) const { std::free(memory); }
};
using SlbMemory = std::unique_ptr<uint8_t[], SlbFree>;

// Uninitialised memory, in large pages if it is not tiny: these spare address translations, and prefetchers do not stop
// at every 4 KB.
inline SlbMemory slb_allocate(size_t bytes) {
    constexpr size_t kLine = 64, kLargePage = size_t(2) << 20, kTiny = size_t(64) << 10;
    const size_t unit = bytes < kTiny ? kLine : kLargePage;
    const size_t whole = bytes == 0 ? unit : (bytes + unit - 1) / unit * unit;
    void * memory = nullptr;
    if (posix_memalign(&memory, unit, whole) != 0) {
        throw std::bad_alloc();
    }
#if defined(__linux__)
    if (unit == kLargePage) {
        madvise(memory, whole, MADV_HUGEPAGE);  // a hint: without large pages the scan is right, too
    }
#endif
    return SlbMemory(static_cast<uint8_t *>(memory));
}

class SlbTable {
public:
    // A table of the int8 rows at codes, row_bytes apart; a code stands for code * scale.
    SlbTable(size_t codes, size_t n_rows, size_t dim, size_t row_bytes, double scale, int isa, size_t n_threads)
        : n_rows_(n_rows), dim_(dim), scale_(scale), kernels_(slb_kernels(isa)) {
        check(n_rows, dim, isa, n_threads);
        blocks_ = slb_allocate(n_bytes());
        slb_pack(reinterpret_cast<const int8_t *>(codes), n_rows, dim, row_bytes, blocks_.get());
        query_.assign(slb_groups(dim) * kSlbGroup, 0);
        tops_.resize(std::max<size_t>(1, std::min(n_threads, slb_blocks(n_rows))));
    }

    // The min(k, rows) best rows for float[dim] at query: written as SlbHit at hits, their count is returned.
    size_t search(size_t query, size_t k, size_t hits) {
        const float inverse = kernels_.quantise(reinterpret_cast<const float *>(query), dim_, query_.data());
        const double scale = inverse == 0.0f ? 0.0 : scale_ / double(inverse);
        const size_t count = find(k);
        auto * out = reinterpret_cast<SlbHit *>(hits);
        for (size_t i = 0; i < count; ++i) {
            out[i] = {int64_t(tops_[0].id(i)), double(tops_[0].score(i)) * scale};
        }
        return count;
    }

    // The same for int8[dim] at codes; written are int64 ids and the int32 products as they are.
    size_t scan(size_t codes, size_t k, size_t ids, size_t products) {
        std::memcpy(query_.data(), reinterpret_cast<const void *>(codes), dim_);
        const size_t count = find(k);
        for (size_t i = 0; i < count; ++i) {
            reinterpret_cast<int64_t *>(ids)[i] = int64_t(tops_[0].id(i));
            reinterpret_cast<int32_t *>(products)[i] = tops_[0].score(i);
        }
        return count;
    }

    // Quantises float[dim] at query to int8[dim] at codes; returns what a code stands for.
    double quantise(size_t query, size_t codes) const {
        const float inverse = kernels_.quantise(reinterpret_cast<const float *>(query), dim_,
                                                reinterpret_cast<int8_t *>(codes));
        return inverse == 0.0f ? 0.0 : 1.0 / double(inverse);
    }

    size_t address() const { return reinterpret_cast<size_t>(blocks_.get()); }
    size_t n_bytes() const { return slb_bytes(n_rows_, dim_); }
    size_t n_threads() const { return tops_.size(); }

private:
    static void check(size_t n_rows, size_t dim, int isa, size_t n_threads) {
        const auto refuse = [](const std::string & what) { throw std::invalid_argument("SlbTable: " + what); };
        if (!slb_isa_available(isa)) {
            refuse("isa " + std::to_string(isa) + " (" + slb_isa_name(isa) + ") is not available on this CPU");
        }
        if (dim == 0 || dim > kSlbMostDims) {
            refuse("dim is " + std::to_string(dim) + "; it must be 1 to " + std::to_string(kSlbMostDims));
        }
        if (n_rows > INT32_MAX) {
            refuse("n_rows is " + std::to_string(n_rows) + "; it must be below 2^31");
        }
        if (n_threads == 0) {
            refuse("n_threads is 0; it must be at least 1");
        }
    }

    // Leaves the best rows for query_ in tops_[0], in order; returns their count.
    size_t find(size_t k) {
        int32_t sum = 0;
        for (const int8_t code : query_) {
            sum += code;
        }
        const size_t n_blocks = slb_blocks(n_rows_), parts = tops_.size();
        for (SlbTopK & top : tops_) {
            top.reset(std::min(k, n_rows_));
        }
        const auto scan = [&](size_t part) {
            const SlbRange range = {blocks_.get(), n_blocks * part / parts, n_blocks * (part + 1) / parts, n_rows_,
                                    slb_groups(dim_), query_.data(), -128 * sum};
            kernels_.scan(range, tops_[part]);
        };
        if (parts == 1) {
            scan(0);
        } else {
            in_parallel(scan, parts);
            for (size_t part = 1; part < parts; ++part) {
                tops_[0].merge(tops_[part]);
            }
        }
        return tops_[0].finish();
    }

    template <typename Scan> static void in_parallel(const Scan & scan, size_t parts) {
        std::vector<std::thread> others;
        others.reserve(parts);
        for (size_t part = 1; part < parts; ++part) {
            try {
                others.emplace_back(scan, part);
            } catch (const std::system_error &) {
                scan(part);  // the system gives no more threads
            }
        }
        scan(0);
        for (std::thread & other : others) {
            other.join();
        }
    }

    size_t n_rows_, dim_;
    double scale_;
    SlbKernels kernels_;
    SlbMemory blocks_;
    std::vector<int8_t> query_;
    std::vector<SlbTopK> tops_;
};

}  // namespace nexus

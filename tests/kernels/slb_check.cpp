// Searches tables of many shapes with every instruction set that this CPU has and compares with a plain search over the
// rows as they came: for test_slb_scan.py, which runs it natively under the sanitizers and emulated as other CPUs.
// Buffers have exactly the right size, so that a read past the end shows. Prints one line per instruction set; exit
// status 1 on a failure.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <vector>

#include "slb_ceiling.hpp"
#include "slb_scan.hpp"

using namespace nexus;

// xorshift: the same codes on every run.
static uint64_t random_state = 0x2545f4914f6cdd1dull;
static uint64_t below(uint64_t limit) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % limit;
}

template <typename T> static size_t address(const std::vector<T> & values) {
    return reinterpret_cast<size_t>(values.data());
}

// Codes of one kind: anything, ties in plenty, or the ends of the range, which overflow 16 bits in pairs.
static std::vector<int8_t> random_codes(size_t count, int kind) {
    std::vector<int8_t> codes(count);
    for (int8_t & code : codes) {
        code = kind == 0 ? int8_t(below(256)) : kind == 1 ? int8_t(below(3)) : kind == 2 ? int8_t(-128)
                                                                           : below(2) ? int8_t(-128) : int8_t(127);
    }
    return codes;
}

static bool search_is_right(int isa, size_t n_rows, size_t dim, size_t k, size_t gap, size_t n_threads, int kind) {
    const size_t row_bytes = dim + gap;
    const auto codes = random_codes(n_rows == 0 ? 0 : (n_rows - 1) * row_bytes + dim, kind);
    const auto query = random_codes(dim, kind);
    std::vector<std::pair<int32_t, int64_t>> expected(n_rows);
    for (size_t row = 0; row < n_rows; ++row) {
        expected[row] = {-slb_dot_reference(codes.data() + row * row_bytes, query.data(), dim), int64_t(row)};
    }
    std::sort(expected.begin(), expected.end());
    SlbTable table(address(codes), n_rows, dim, row_bytes, 1.0, isa, n_threads);
    std::vector<int64_t> ids(std::min(k, n_rows));
    std::vector<int32_t> products(ids.size());
    if (table.scan(address(query), k, address(ids), address(products)) != ids.size()) {
        return false;
    }
    for (size_t i = 0; i < ids.size(); ++i) {
        if (ids[i] != expected[i].second || products[i] != -expected[i].first) {
            return false;
        }
    }
    return true;
}

static bool quantising_is_right(int isa, size_t dim) {
    std::vector<float> query(dim);
    for (float & x : query) {
        // Multiples of a quarter of a step: ties between two codes are frequent.
        x = float(int64_t(below(1017)) - 508) / 4.0f;
    }
    query[below(dim)] = below(2) ? -127.0f : 127.0f;
    std::vector<int8_t> codes(dim), expected(dim);
    const float inverse = slb_kernels(isa).quantise(query.data(), dim, codes.data());
    return inverse == slb_quantise_scalar(query.data(), dim, expected.data()) && codes == expected;
}

static bool refuses(int isa, std::vector<float> query) {
    std::vector<int8_t> codes(query.size());
    try {
        slb_kernels(isa).quantise(query.data(), query.size(), codes.data());
    } catch (const std::invalid_argument &) {
        return true;
    }
    return false;
}

int main() {
    int failures = 0;
    for (int isa = 0; isa < kSlbIsas; ++isa) {
        if (!slb_isa_available(isa)) {
            continue;
        }
        size_t searches = 0, wrong = 0;
        for (const size_t n_rows : {0, 1, 2, 63, 64, 65, 129, 200}) {
            for (const size_t dim : {1, 2, 3, 4, 5, 31, 33, 64, 100, 383}) {
                for (int kind = 0; kind < 4; ++kind) {
                    for (const size_t k : {0, 1, 5, 64, 65, 300}) {
                        wrong += !search_is_right(isa, n_rows, dim, k, below(4), 1 + below(3), kind);
                        ++searches;
                    }
                }
            }
        }
        size_t quantised = 0, badly = 0;
        for (size_t dim = 1; dim < 70; ++dim, ++quantised) {
            badly += !quantising_is_right(isa, dim);
        }
        const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
        for (size_t at = 0; at < 35; ++at) {
            std::vector<float> query(35, 1.0f);
            for (const float value : {nan, -nan, infinity, -infinity}) {
                query[at] = value;
                badly += !refuses(isa, query);
            }
        }
        badly += !refuses(isa, {1e-31f, 0.0f}) + refuses(isa, {0.0f, -0.0f}) + refuses(isa, {1e-30f});
        std::printf("%s searches=%zu wrong=%zu quantised=%zu badly=%zu\n", slb_isa_name(isa), searches, wrong,
                    quantised, badly);
        failures += wrong + badly != 0;
    }
    std::vector<uint8_t> buffer(5000, 0);
    for (const size_t at : {size_t(0), size_t(300), buffer.size() - 1}) {
        buffer[at] = 1;
        for (int reader = 0; reader < kSlbReaders; ++reader) {
            failures += slb_read(reader, address(buffer), buffer.size()) == 0;
        }
        buffer[at] = 0;
    }
    std::printf("best %s\n", slb_isa_name(slb_best_isa()));
    return failures ? 1 : 0;
}

// How the INT8 table of the lookaside scan lies in memory, and the plain dot product that every kernel must equal.
//
// Rows stand in blocks of 64; inside a block, four dims of all 64 rows follow each other ("a group", 256 bytes):
//     block[group][row][4], dim = 4 group + j
// A vector of 32-bit lanes then holds one row per lane: the query's four bytes are broadcast, sums stay in their lanes,
// and there is neither a horizontal sum nor a tail. Codes are stored as code XOR 0x80, which is code + 128 as unsigned
// byte: the form that x86 multiplies with signed ones. Missing dims and rows are code 0. The scan reads every byte
// once, in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace nexus {

constexpr size_t kSlbRows = 64;
constexpr size_t kSlbGroup = 4;
constexpr size_t kSlbGroupBytes = kSlbRows * kSlbGroup;
// Up to here every sum, biased or not, fits 32 bits: 65536 * 255 * 128 < 2^31.
constexpr size_t kSlbMostDims = 65536;

inline size_t slb_groups(size_t dim) { return (dim + kSlbGroup - 1) / kSlbGroup; }
inline size_t slb_blocks(size_t n_rows) { return (n_rows + kSlbRows - 1) / kSlbRows; }
inline size_t slb_bytes(size_t n_rows, size_t dim) { return slb_blocks(n_rows) * slb_groups(dim) * kSlbGroupBytes; }

// Writes int8 rows, row_bytes apart, into slb_bytes(n_rows, dim) bytes at blocks.
inline void slb_pack(const int8_t * codes, size_t n_rows, size_t dim, size_t row_bytes, uint8_t * blocks) {
    const size_t n_groups = slb_groups(dim);
    std::memset(blocks, 0x80, slb_bytes(n_rows, dim));
    for (size_t row = 0; row < n_rows; ++row) {
        uint8_t * to = blocks + row / kSlbRows * n_groups * kSlbGroupBytes + row % kSlbRows * kSlbGroup;
        const auto * from = reinterpret_cast<const uint8_t *>(codes) + row * row_bytes;
        for (size_t i = 0; i < dim; ++i) {
            to[i / kSlbGroup * kSlbGroupBytes + i % kSlbGroup] = from[i] ^ 0x80;
        }
    }
}

// The product of one row as it came and the query: what all kernels are compared with.
inline int32_t slb_dot_reference(const int8_t * row, const int8_t * query, size_t dim) {
    int32_t sum = 0;
    for (size_t i = 0; i < dim; ++i) {
        sum += int32_t(row[i]) * int32_t(query[i]);
    }
    return sum;
}

}  // namespace nexus

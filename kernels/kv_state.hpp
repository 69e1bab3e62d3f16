// Reader and writer of llama.cpp's per-sequence state, the public way to the keys and values of a sequence.
//
// The format belongs to one build of llama.cpp and is not promised: every length is checked against the others and
// against the blob's end, and the caller proves the round trip before it trusts it (nexus/splice.py).
//
//   u32 magic, i32 seq, then per cache (sliding-window models have two):
//     u32 n_stream, u32 n_cells, n_cells x (i32 pos, u32 n_seq, i32 seq), u32 v_trans, u32 n_layer,
//     K per layer: i32 type, u64 row_bytes, rows
//     V per layer: i32 type, u64 row_bytes, rows                                             (v_trans = 0)
//                  i32 type, u32 element_bytes, u32 n_embd, n_embd x n_cells elements        (v_trans = 1)
//   An empty cache ends after n_cells = 0.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace nexus {

constexpr int32_t kF16 = 1;
constexpr size_t kCellBytes = 12;
constexpr size_t kMostCaches = 2;
constexpr uint32_t kMostLayers = 4096;
constexpr uint64_t kMostRowBytes = uint64_t(1) << 26;

struct KvLayer {
    int32_t type = 0;
    uint64_t row_bytes = 0;  // of one cell
    size_t offset = 0;       // of the first row from the blob's start
};

struct KvCache {
    uint32_t n_cells = 0;
    size_t cells_offset = 0;
    bool v_trans = false;
    std::vector<KvLayer> k, v;
};

struct KvState {
    uint32_t magic = 0;
    int32_t seq = 0;
    std::vector<KvCache> caches;
};

class KvStateReader {
  public:
    KvStateReader(size_t addr, size_t size) : data_(reinterpret_cast<const uint8_t *>(addr)), size_(size) {}

    KvState read() {
        KvState state;
        state.magic = get<uint32_t>("magic");
        state.seq = get<int32_t>("seq");
        do {
            if (state.caches.size() == kMostCaches) {
                refuse("bytes follow the last cache; at most " + std::to_string(kMostCaches) + " are known",
                       at_);
            }
            state.caches.push_back(read_cache());
        } while (at_ < size_);
        return state;
    }

  private:
    // Names the first byte of the field that was read or sought last.
    [[noreturn]] void refuse(const std::string & what) const { refuse(what, field_); }

    [[noreturn]] void refuse(const std::string & what, size_t at) const {
        throw std::runtime_error("kv state: " + what + " at byte " + std::to_string(at) + " of " +
                                 std::to_string(size_));
    }

    template <typename T> T get(const std::string & field) {
        field_ = at_;
        if (size_ - at_ < sizeof(T)) {
            refuse(field + " is cut off");
        }
        T value;
        std::memcpy(&value, data_ + at_, sizeof(T));
        at_ += sizeof(T);
        return value;
    }

    size_t skip(uint64_t count, uint64_t each, const std::string & field) {
        field_ = at_;
        if (each != 0 && count > (size_ - at_) / each) {
            refuse(field + " is cut off");
        }
        at_ += count * each;
        return field_;
    }

    KvCache read_cache() {
        KvCache cache;
        const auto n_stream = get<uint32_t>("n_stream");
        if (n_stream != 1) {
            refuse("n_stream is " + std::to_string(n_stream) + ", not 1 (is the cache unified?)");
        }
        cache.n_cells = get<uint32_t>("n_cells");
        if (cache.n_cells == 0) {
            return cache;
        }
        cache.cells_offset = skip(cache.n_cells, kCellBytes, "cells");
        for (uint32_t i = 0; i < cache.n_cells; ++i) {
            const size_t at = cache.cells_offset + i * kCellBytes + 4;
            uint32_t n_seq;
            std::memcpy(&n_seq, data_ + at, sizeof(n_seq));
            if (n_seq != 1) {
                refuse("n_seq of cell " + std::to_string(i) + " is " + std::to_string(n_seq) + ", not 1", at);
            }
        }
        const auto v_trans = get<uint32_t>("v_trans");
        if (v_trans > 1) {
            refuse("v_trans is " + std::to_string(v_trans) + ", neither 0 nor 1");
        }
        cache.v_trans = v_trans == 1;
        const auto n_layer = get<uint32_t>("n_layer");
        if (n_layer == 0 || n_layer > kMostLayers) {
            refuse("n_layer is " + std::to_string(n_layer) + ", not in 1 ... " + std::to_string(kMostLayers));
        }
        for (uint32_t layer = 0; layer < n_layer; ++layer) {
            cache.k.push_back(read_rows(cache.n_cells, "K"));
        }
        for (uint32_t layer = 0; layer < n_layer; ++layer) {
            cache.v.push_back(cache.v_trans ? read_columns(cache.n_cells) : read_rows(cache.n_cells, "V"));
        }
        return cache;
    }

    uint64_t checked_row_bytes(uint64_t row_bytes, int32_t type, const std::string & name) const {
        if (row_bytes == 0 || row_bytes > kMostRowBytes || (type == kF16 && row_bytes % sizeof(uint16_t) != 0)) {
            refuse(name + " row bytes are " + std::to_string(row_bytes) + " for type " +
                   std::to_string(type));
        }
        return row_bytes;
    }

    KvLayer read_rows(uint32_t n_cells, const std::string & name) {
        KvLayer layer;
        layer.type = get<int32_t>(name + " type");
        layer.row_bytes = checked_row_bytes(get<uint64_t>(name + " row bytes"), layer.type, name);
        layer.offset = skip(n_cells, layer.row_bytes, name);
        return layer;
    }

    KvLayer read_columns(uint32_t n_cells) {
        KvLayer layer;
        layer.type = get<int32_t>("V type");
        const uint64_t element = get<uint32_t>("V element bytes");
        if (layer.type == kF16 && element != sizeof(uint16_t)) {
            refuse("V element bytes are " + std::to_string(element) + " for F16, not 2");
        }
        const uint64_t n_embd = get<uint32_t>("V width");
        layer.row_bytes = checked_row_bytes(element * n_embd, layer.type, "V");
        layer.offset = skip(n_cells, layer.row_bytes, "V");
        return layer;
    }

    const uint8_t * data_;
    size_t size_;
    size_t at_ = 0;
    size_t field_ = 0;
};

// Where everything lies in a state blob of `size` bytes. Throws std::runtime_error naming field, value and byte.
inline KvState parse_kv_state(size_t addr, size_t size) { return KvStateReader(addr, size).read(); }

// Moves every stored position by delta. Positions are never renumbered: masked cells may have left gaps.
// Throws std::runtime_error, before any position has changed, when one would leave 0 ... 2^31-1.
inline void shift_positions(size_t blob, const KvState & state, int32_t delta) {
    for (const bool write : {false, true}) {
        for (const KvCache & cache : state.caches) {
            for (uint32_t i = 0; i < cache.n_cells; ++i) {
                uint8_t * cell = reinterpret_cast<uint8_t *>(blob) + cache.cells_offset + i * kCellBytes;
                int32_t stored;
                std::memcpy(&stored, cell, sizeof(stored));
                const int64_t moved = int64_t(stored) + delta;
                if (moved < 0 || moved > INT32_MAX) {
                    throw std::runtime_error("kv state: position " + std::to_string(stored) + " of cell " +
                                             std::to_string(i) + " cannot move by " + std::to_string(delta));
                }
                stored = int32_t(moved);
                if (write) {
                    std::memcpy(cell, &stored, sizeof(stored));
                }
            }
        }
    }
}

// Transposes rows x cols uint16 in tiles, so that neither side is walked with a stride larger than a tile.
inline void transpose_u16(const uint16_t * source, uint16_t * target, size_t rows, size_t cols) {
    constexpr size_t kTile = 32;
    for (size_t r0 = 0; r0 < rows; r0 += kTile) {
        for (size_t c0 = 0; c0 < cols; c0 += kTile) {
            for (size_t c = c0; c < cols && c < c0 + kTile; ++c) {
                for (size_t r = r0; r < rows && r < r0 + kTile; ++r) {
                    target[c * rows + r] = source[r * cols + c];
                }
            }
        }
    }
}

// Bytes of a state with F16 keys and values of these row sizes. n_layer: of each cache, in state order.
inline size_t kv_state_size(const std::vector<uint32_t> & n_layer, uint32_t n_cells, size_t k_row_bytes,
                            size_t v_row_bytes, bool v_trans) {
    (void) v_trans;  // both V layouts have 12 bytes before a layer's data
    size_t size = 8;
    for (const uint32_t count : n_layer) {
        size += 8 + n_cells * kCellBytes + 8 + size_t(count) * (2 * 12 + n_cells * (k_row_bytes + v_row_bytes));
    }
    return size;
}

// Writes a state from F16 k, v [layers of all caches][n_cells][row] and positions int32[n_cells], the same cells in
// every cache; sequence id 0. n_layer: of each cache, in state order.
inline void write_kv_state(size_t out, size_t size, uint32_t magic, const std::vector<uint32_t> & n_layer,
                           uint32_t n_cells, size_t k_row_bytes, size_t v_row_bytes, bool v_trans, size_t positions,
                           size_t k, size_t v) {
    bool empty = n_layer.empty() || n_cells == 0;
    size_t n_layers = 0;
    for (const uint32_t count : n_layer) {
        empty = empty || count == 0;
        n_layers += count;
    }
    if (empty || size != kv_state_size(n_layer, n_cells, k_row_bytes, v_row_bytes, v_trans)) {
        throw std::invalid_argument("kv state: " + std::to_string(size) + " bytes do not fit " +
                                    std::to_string(n_layer.size()) + " caches with " + std::to_string(n_layers) +
                                    " layers of " + std::to_string(n_cells) + " cells");
    }
    if (k_row_bytes == 0 || v_row_bytes == 0 || k_row_bytes % sizeof(uint16_t) || v_row_bytes % sizeof(uint16_t)) {
        throw std::invalid_argument("kv state: rows of " + std::to_string(k_row_bytes) + " and " +
                                    std::to_string(v_row_bytes) + " bytes are not rows of F16");
    }
    uint8_t * at = reinterpret_cast<uint8_t *>(out);
    const auto put = [&at](auto value) {
        std::memcpy(at, &value, sizeof(value));
        at += sizeof(value);
    };
    put(magic);
    put(int32_t(0));
    const auto * keys = reinterpret_cast<const uint8_t *>(k), * values = reinterpret_cast<const uint8_t *>(v);
    const size_t k_bytes = n_cells * k_row_bytes, v_bytes = n_cells * v_row_bytes;
    for (const uint32_t count : n_layer) {
        put(uint32_t(1));
        put(n_cells);
        for (uint32_t i = 0; i < n_cells; ++i) {
            put(reinterpret_cast<const int32_t *>(positions)[i]);
            put(uint32_t(1));
            put(int32_t(0));
        }
        put(uint32_t(v_trans));
        put(count);
        for (uint32_t layer = 0; layer < count; ++layer, keys += k_bytes) {
            put(kF16);
            put(uint64_t(k_row_bytes));
            std::memcpy(at, keys, k_bytes);
            at += k_bytes;
        }
        for (uint32_t layer = 0; layer < count; ++layer, values += v_bytes) {
            put(kF16);
            if (v_trans) {
                const size_t n_embd = v_row_bytes / sizeof(uint16_t);
                put(uint32_t(sizeof(uint16_t)));
                put(uint32_t(n_embd));
                std::vector<uint16_t> columns(n_cells * n_embd);
                transpose_u16(reinterpret_cast<const uint16_t *>(values), columns.data(), n_cells, n_embd);
                std::memcpy(at, columns.data(), v_bytes);
            } else {
                put(uint64_t(v_row_bytes));
                std::memcpy(at, values, v_bytes);
            }
            at += v_bytes;
        }
    }
}

// Reads a parsed state into F16 k, v [layers of all caches, in state order][n_cells][row] and positions int32[n_cells].
// The byte sizes of the targets must be exactly what the state holds. Throws std::runtime_error otherwise, for other
// types, for rows of unequal width, and where caches hold different cells.
inline void read_kv_block(size_t blob, size_t blob_size, const KvState & state, size_t k, size_t k_size, size_t v,
                          size_t v_size, size_t positions, size_t positions_size) {
    const auto refuse = [](const std::string & what) { throw std::runtime_error("kv state: " + what); };
    const auto * bytes = reinterpret_cast<const uint8_t *>(blob);
    const KvCache & first = state.caches[0];
    const size_t n_cells = first.n_cells;
    if (positions_size != n_cells * sizeof(int32_t)) {
        refuse("it holds " + std::to_string(n_cells) + " cells, " + std::to_string(positions_size / sizeof(int32_t)) +
               " are expected");
    }
    for (const KvCache & cache : state.caches) {
        if (cache.n_cells != n_cells) {
            refuse("its caches hold " + std::to_string(n_cells) + " and " + std::to_string(cache.n_cells) +
                   " cells, not the same ones (were some outside of the sliding window?)");
        }
        if (cache.cells_offset > blob_size || n_cells * kCellBytes > blob_size - cache.cells_offset) {
            refuse("cells lie outside of the blob");
        }
        for (size_t i = 0; i < n_cells; ++i) {
            const uint8_t * cell = bytes + cache.cells_offset + i * kCellBytes;
            if (std::memcmp(cell, bytes + first.cells_offset + i * kCellBytes, sizeof(int32_t)) != 0) {
                refuse("cell " + std::to_string(i) + " has another position in each cache");
            }
        }
    }
    const auto check = [&](std::vector<KvLayer> KvCache::* layers_of, size_t target_size, const std::string & name) {
        size_t total = 0;
        for (const KvCache & cache : state.caches) {
            for (const KvLayer & layer : cache.*layers_of) {
                if (layer.type != kF16) {
                    refuse(name + " type is " + std::to_string(layer.type) + ", only F16 (1) is supported");
                }
                if (layer.row_bytes != (first.*layers_of)[0].row_bytes) {
                    refuse(name + " rows differ between layers: " + std::to_string((first.*layers_of)[0].row_bytes) +
                           " and " + std::to_string(layer.row_bytes) + " bytes");
                }
                if (layer.offset > blob_size || n_cells * layer.row_bytes > blob_size - layer.offset) {
                    refuse(name + " lies outside of the blob");
                }
                total += n_cells * layer.row_bytes;
            }
        }
        if (total != target_size) {
            refuse(name + " holds " + std::to_string(total) + " bytes, " + std::to_string(target_size) +
                   " are expected");
        }
    };
    check(&KvCache::k, k_size, "K");
    check(&KvCache::v, v_size, "V");
    for (size_t i = 0; i < n_cells; ++i) {
        std::memcpy(reinterpret_cast<int32_t *>(positions) + i, bytes + first.cells_offset + i * kCellBytes, 4);
    }
    auto * keys = reinterpret_cast<uint8_t *>(k), * values = reinterpret_cast<uint8_t *>(v);
    for (const KvCache & cache : state.caches) {
        for (const KvLayer & layer : cache.k) {
            std::memcpy(keys, bytes + layer.offset, n_cells * layer.row_bytes);
            keys += n_cells * layer.row_bytes;
        }
        for (const KvLayer & layer : cache.v) {
            if (cache.v_trans) {
                const size_t n_embd = layer.row_bytes / sizeof(uint16_t);
                std::vector<uint16_t> columns(n_embd * n_cells);
                std::memcpy(columns.data(), bytes + layer.offset, n_cells * layer.row_bytes);
                transpose_u16(columns.data(), reinterpret_cast<uint16_t *>(values), n_embd, n_cells);
            } else {
                std::memcpy(values, bytes + layer.offset, n_cells * layer.row_bytes);
            }
            values += n_cells * layer.row_bytes;
        }
    }
}

}  // namespace nexus

// Runs the kernels on buffers of exactly the right size and on damaged input, for test_memory.py, which builds this
// with the address and undefined-behaviour sanitizers: a read one byte too far, unseen in Python, ends it here.
// The argument is a folder for block files. Prints what was seen, so that a check that checks nothing shows.
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kv_state.hpp"
#include "rope_shift.hpp"
#include "tool_block.hpp"

using namespace nexus;

static std::mt19937_64 random_source(1);
static uint64_t below(uint64_t limit) { return random_source() % limit; }

template <typename T> std::vector<T> random_values(size_t count) {
    std::vector<T> values(count);
    for (T & value : values) {
        value = T(random_source());
    }
    return values;
}

template <typename T> size_t address(const std::vector<T> & values) { return reinterpret_cast<size_t>(values.data()); }

// Parses, reads and shifts one blob; whether the parser took it.
static bool use_state(const std::vector<uint8_t> & blob, std::vector<uint8_t> & k, std::vector<uint8_t> & v,
                      std::vector<int32_t> & positions) {
    KvState state;
    try {
        state = parse_kv_state(address(blob), blob.size());
    } catch (const std::runtime_error &) {
        return false;
    }
    try {
        read_kv_block(address(blob), blob.size(), state, address(k), k.size(), address(v), v.size(), address(positions),
                      positions.size() * sizeof(int32_t));
        shift_positions(address(blob), state, int32_t(random_source()));
    } catch (const std::runtime_error &) {
    }
    return true;
}

static void check_states() {
    size_t taken = 0, refused = 0, cut_taken = 0;
    for (int round = 0; round < 3000; ++round) {
        const uint32_t n_layers = uint32_t(1 + below(3)), n_cells = uint32_t(1 + below(4));
        const size_t k_row = 2 * (1 + below(5)), v_row = 2 * (1 + below(5));
        const bool v_trans = below(2) != 0;
        auto k = random_values<uint8_t>(n_layers * n_cells * k_row);
        auto v = random_values<uint8_t>(n_layers * n_cells * v_row);
        auto positions = random_values<int32_t>(n_cells);
        const std::vector<uint32_t> layers = n_layers > 1 && round % 2 ? std::vector<uint32_t>{1, n_layers - 1}
                                                                       : std::vector<uint32_t>{n_layers};
        std::vector<uint8_t> blob(kv_state_size(layers, n_cells, k_row, v_row, v_trans));
        write_kv_state(address(blob), blob.size(), 1, layers, n_cells, k_row, v_row, v_trans, address(positions),
                       address(k), address(v));
        if (round < 20) {
            const size_t first = kv_state_size({layers[0]}, n_cells, k_row, v_row, v_trans);
            for (size_t length = 0; length < blob.size(); ++length) {
                if (length == first) {
                    continue;  // ends between two caches: a whole state of one
                }
                const std::vector<uint8_t> cut(blob.begin(), blob.begin() + long(length));
                cut_taken += use_state(cut, k, v, positions);
            }
        }
        for (uint64_t damage = below(4); damage > 0; --damage) {
            blob[below(blob.size())] = uint8_t(below(3) ? below(8) : random_source());
        }
        ++(use_state(blob, k, v, positions) ? taken : refused);
    }
    std::printf("states taken=%d refused=%d cut_taken=%zu\n", taken > 100, refused > 100, cut_taken);
}

static void check_rotation() {
    for (int isa = 0; isa < 4; ++isa) {
        for (int round = 0; isa_available(isa) && round < 500; ++round) {
            const size_t head_dim = 1 + below(140), n_rot = 2 * below(head_dim / 2 + 1);
            const size_t n_heads = 1 + below(3), n_rows = 1 + below(3), row = n_heads * head_dim;
            const auto from = random_values<uint16_t>(n_rows * row);
            std::vector<uint16_t> to(from.size());
            const std::vector<float> cosine(n_rot / 2, 0.6f), sine(n_rot / 2, 0.8f);
            rope_shift(isa, address(from), address(to), n_rows, row * 2, row * 2, n_heads, head_dim, n_rot, round & 1,
                       address(cosine), address(sine));
        }
    }
    std::printf("rotation done\n");
}

static void check_conversions_and_checksum() {
    uint64_t all = 0;
    for (uint64_t bits = 0; bits < uint64_t(1) << 32; bits += 65521) {
        const uint32_t word = uint32_t(bits);
        float value;
        std::memcpy(&value, &word, sizeof(value));
        all += f32_to_f16(value);
    }
    for (size_t size = 0; size < 200; ++size) {
        const auto bytes = random_values<uint8_t>(size);
        all += checksum64(bytes.data(), bytes.size());
    }
    std::printf("conversions and checksum done=%d\n", all != 0);
}

// Headers with random fields under a right checksum: only the size checks stand between them and the end of the file.
static void check_blocks(const std::string & folder) {
    ToolBlockHeader header;
    header.n_tokens = 3;
    header.n_layers = 2;
    header.n_head_kv = 1;
    header.head_dim_k = 4;
    header.head_dim_v = 6;
    const auto tokens = random_values<int32_t>(3);
    const auto k = random_values<uint16_t>(24), v = random_values<uint16_t>(36);
    const std::string path = folder + "/checked.atb";
    write_tool_block(path, header, address(tokens), "{}", address(k), address(v));
    size_t taken = 0, refused = 0;
    for (int round = 0; round < 500; ++round) {
        ToolBlockHeader changed = ToolBlockFile(path).header();
        const ToolBlockHeader good = changed;
        for (uint64_t damage = below(4); damage > 0; --damage) {
            reinterpret_cast<uint8_t *>(&changed)[12 + below(108)] = uint8_t(below(3) ? below(8) : random_source());
        }
        changed.header_checksum = checksum64(&changed, offsetof(ToolBlockHeader, header_checksum));
        const auto put = [&path](const ToolBlockHeader & fields) {
            std::fstream(path, std::ios::in | std::ios::out | std::ios::binary)
                .write(reinterpret_cast<const char *>(&fields), sizeof(fields));
        };
        put(changed);
        try {
            const ToolBlockFile file(path);
            volatile size_t seen = file.tokens().size() + file.meta_json().size();
            (void) seen;
            ++taken;
        } catch (const std::runtime_error &) {
            ++refused;
        }
        put(good);
    }
    std::printf("blocks taken=%d refused=%d\n", taken > 100, refused > 100);
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        return 2;
    }
    check_states();
    check_rotation();
    check_conversions_and_checksum();
    check_blocks(argv[1]);
    return 0;
}

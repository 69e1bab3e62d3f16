// A buddy allocator over bitmaps that hands out offsets into memory that it does not own and never touches.
//
// An order-o block is 2^o units of min_block bytes at a multiple of its own size; one bitmap per order says which are
// free. Over each bitmap stand bitmaps of its words that are not zero, so the lowest free block is found by one
// find-first-set per level, and a word with a bit per order finds the smallest order that serves. Among equals the
// lowest address is taken: with one thread, the same requests get the same offsets.
//
// A request is placed like a block of the next power of two, but keeps only the units that it needs; those behind them
// are free at once. So less than one unit is lost to rounding, where plain buddies lose up to half of a block. Released
// units merge with their buddies as far as these are free: when everything is released, the free set is the first one.
//
// One mutex, held for the bookkeeping alone; no heap allocation after construction. Line is what mutex, hot state and
// bitmaps are aligned to. 128 bytes: Apple's cache line, and the pair of 64-byte lines that x86 fetches together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace nexus {

constexpr size_t kBuddyLine = 128;
constexpr size_t kBuddyNaturalLine = alignof(std::mutex) > alignof(uint64_t) ? alignof(std::mutex) : alignof(uint64_t);
constexpr uint32_t kBuddyMostUnits = uint32_t(1) << 24;
constexpr uint32_t kBuddyOrders = 25;
constexpr uint32_t kBuddyLevels = 4;  // 64^4 bits

// What allocate and release return instead of an offset and 0.
enum BuddyError : int64_t {
    kBuddyZeroSize = -1,
    kBuddyTooLarge = -2,  // larger than the largest block, however empty
    kBuddyNoRoom = -3,
    kBuddyForeign = -4,  // outside, or not at the start of a unit
    kBuddyNotHeld = -5,  // released already, or inside of an allocation
};

// Bits with a summary: bit i of a level says whether word i of the level below holds any.
struct BuddyBitmap {
    uint64_t * levels[kBuddyLevels];
    uint32_t n_levels;

    bool test(uint32_t bit) const { return levels[0][bit / 64] >> (bit % 64) & 1; }
    void set(uint32_t bit) {
        for (uint32_t level = 0; level < n_levels; ++level, bit /= 64) {
            uint64_t & word = levels[level][bit / 64];
            const bool known = word != 0;
            word |= uint64_t(1) << (bit % 64);
            if (known) {
                return;
            }
        }
    }
    // Whether no bit is left.
    bool clear(uint32_t bit) {
        for (uint32_t level = 0; level < n_levels; ++level, bit /= 64) {
            uint64_t & word = levels[level][bit / 64];
            word &= ~(uint64_t(1) << (bit % 64));
            if (word != 0) {
                return false;
            }
        }
        return true;
    }
    // The lowest bit; there must be one.
    uint32_t first() const {
        uint32_t bit = 0;
        for (uint32_t level = n_levels; level-- > 0;) {
            bit = bit * 64 + uint32_t(__builtin_ctzll(levels[level][bit]));
        }
        return bit;
    }
};

// Written by every request, under the mutex.
struct BuddyState {
    uint64_t orders;  // bit o: a block of order o is free
    size_t n_free;    // units
};

// Fixed at construction.
struct BuddyGeometry {
    size_t capacity, min_block;
    uint32_t unit_shift, n_units, max_order;
    uint32_t * held;  // by unit: how many units the allocation that begins here has, else 0
    BuddyBitmap bitmaps[kBuddyOrders];
    size_t slab_bytes;
    uint64_t * slab;
};

template <size_t Line> struct BuddyLayout {
    alignas(Line) std::mutex mutex;
    alignas(Line) BuddyState state;
    alignas(Line) BuddyGeometry geometry;
};

template <size_t Line> class alignas(Line) BasicBuddyAllocator {
  public:
    // Throws std::invalid_argument for sizes that it cannot manage.
    BasicBuddyAllocator(size_t capacity, size_t min_block) : all_() {
        if (min_block < kBuddyLine || (min_block & (min_block - 1)) != 0) {
            throw std::invalid_argument("min_block is " + std::to_string(min_block) +
                                        " bytes; give a power of two of at least " + std::to_string(kBuddyLine));
        }
        if (capacity == 0 || capacity % min_block != 0 || capacity / min_block > kBuddyMostUnits) {
            throw std::invalid_argument("capacity is " + std::to_string(capacity) + " bytes; give 1 to " +
                                        std::to_string(kBuddyMostUnits) + " times min_block (" +
                                        std::to_string(min_block) + ")");
        }
        BuddyGeometry & g = all_.geometry;
        g.capacity = capacity;
        g.min_block = min_block;
        g.unit_shift = uint32_t(__builtin_ctzll(min_block));
        g.n_units = uint32_t(capacity / min_block);
        g.max_order = floor_log2(g.n_units);
        const size_t held_at = lay_out(nullptr);
        g.slab_bytes = held_at + g.n_units * sizeof(uint32_t);
        g.slab = static_cast<uint64_t *>(::operator new(g.slab_bytes, std::align_val_t(Line)));
        std::memset(g.slab, 0, g.slab_bytes);
        lay_out(reinterpret_cast<uint8_t *>(g.slab));
        g.held = reinterpret_cast<uint32_t *>(reinterpret_cast<uint8_t *>(g.slab) + held_at);
        give_back(0, g.n_units);
        all_.state.n_free = g.n_units;
    }
    ~BasicBuddyAllocator() { ::operator delete(all_.geometry.slab, std::align_val_t(Line)); }
    BasicBuddyAllocator(const BasicBuddyAllocator &) = delete;
    BasicBuddyAllocator & operator=(const BasicBuddyAllocator &) = delete;

    // Offset of a block of at least `bytes` bytes, a multiple of its units rounded up to a power of two; or a
    // BuddyError, with nothing changed.
    int64_t allocate(size_t bytes) {
        const BuddyGeometry & g = all_.geometry;
        if (bytes == 0) {
            return kBuddyZeroSize;
        }
        if (bytes > largest()) {
            return kBuddyTooLarge;
        }
        const uint32_t n = uint32_t((bytes + g.min_block - 1) >> g.unit_shift);
        const uint32_t order = n > 1 ? floor_log2(n - 1) + 1 : 0;
        const std::lock_guard<std::mutex> lock(all_.mutex);
        const uint64_t serving = all_.state.orders >> order << order;
        if (serving == 0) {
            return kBuddyNoRoom;
        }
        const uint32_t found = uint32_t(__builtin_ctzll(serving));
        const uint32_t block = all_.geometry.bitmaps[found].first();
        take(found, block);
        const uint32_t unit = block << found;
        give_back(unit + n, unit + (uint32_t(1) << found));
        g.held[unit] = n;
        all_.state.n_free -= n;
        return int64_t(unit) << g.unit_shift;
    }

    // 0, after the block at `offset` is free again; or a BuddyError, with nothing changed.
    int64_t release(int64_t offset) {
        const BuddyGeometry & g = all_.geometry;
        if (offset < 0 || size_t(offset) >= g.capacity || size_t(offset) % g.min_block != 0) {
            return kBuddyForeign;
        }
        const uint32_t unit = uint32_t(size_t(offset) >> g.unit_shift);
        const std::lock_guard<std::mutex> lock(all_.mutex);
        const uint32_t n = g.held[unit];
        if (n == 0) {
            return kBuddyNotHeld;
        }
        g.held[unit] = 0;
        all_.state.n_free += n;
        give_back(unit, unit + n);
        return 0;
    }

    size_t capacity() const { return all_.geometry.capacity; }
    size_t min_block() const { return all_.geometry.min_block; }
    size_t largest() const { return all_.geometry.min_block << all_.geometry.max_order; }  // bytes of one request
    size_t free_bytes() {
        const std::lock_guard<std::mutex> lock(all_.mutex);
        return all_.state.n_free << all_.geometry.unit_shift;
    }
    size_t address() const { return reinterpret_cast<size_t>(this); }
    size_t bitmap_address(uint32_t order) const {
        return reinterpret_cast<size_t>(all_.geometry.bitmaps[order].levels[0]);
    }
    // Offset and bytes of every free block, in turn, by order and address. Allocates its result.
    std::vector<int64_t> free_blocks() {
        const BuddyGeometry & g = all_.geometry;
        std::vector<int64_t> found;
        const std::lock_guard<std::mutex> lock(all_.mutex);
        for (uint32_t order = 0; order <= g.max_order; ++order) {
            for (uint32_t block = 0; block < g.n_units >> order; ++block) {
                if (g.bitmaps[order].test(block)) {
                    found.push_back(int64_t(block) << (order + g.unit_shift));
                    found.push_back(int64_t(1) << (order + g.unit_shift));
                }
            }
        }
        return found;
    }

  private:
    static uint32_t floor_log2(uint32_t n) { return 31 - uint32_t(__builtin_clz(n)); }

    // Sets every bitmap's pointers into the slab, where there is one; the bytes that all of them need. Each order
    // begins on a line of its own.
    size_t lay_out(uint8_t * slab) {
        BuddyGeometry & g = all_.geometry;
        size_t at = 0;
        for (uint32_t order = 0; order <= g.max_order; ++order) {
            BuddyBitmap & bitmap = g.bitmaps[order];
            bitmap.n_levels = 0;
            for (size_t n = g.n_units >> order; bitmap.n_levels == 0 || n > 1;) {
                n = (n + 63) / 64;
                bitmap.levels[bitmap.n_levels++] = slab == nullptr ? nullptr : reinterpret_cast<uint64_t *>(slab + at);
                at += n * sizeof(uint64_t);
            }
            at = (at + Line - 1) / Line * Line;
        }
        return at;
    }

    void take(uint32_t order, uint32_t block) {
        if (all_.geometry.bitmaps[order].clear(block)) {
            all_.state.orders &= ~(uint64_t(1) << order);
        }
    }

    // Frees units begin ... end-1, as the fewest blocks, each merged with its buddy while that is free.
    void give_back(uint32_t begin, uint32_t end) {
        BuddyGeometry & g = all_.geometry;
        while (begin < end) {
            uint32_t order = floor_log2(end - begin);
            if (begin != 0) {
                order = std::min(order, uint32_t(__builtin_ctz(begin)));
            }
            const uint32_t next = begin + (uint32_t(1) << order);
            uint32_t block = begin >> order;
            while (order < g.max_order && (block ^ 1) < g.n_units >> order && g.bitmaps[order].test(block ^ 1)) {
                take(order, block ^ 1);
                block /= 2;
                ++order;
            }
            g.bitmaps[order].set(block);
            all_.state.orders |= uint64_t(1) << order;
            begin = next;
        }
    }

    BuddyLayout<Line> all_;
};

using BuddyAllocator = BasicBuddyAllocator<kBuddyLine>;
// The same without padding: what the padding is measured against.
using UnpaddedBuddyAllocator = BasicBuddyAllocator<kBuddyNaturalLine>;

static_assert(alignof(BuddyAllocator) % kBuddyLine == 0, "an allocator begins on a line of its own");
static_assert(sizeof(BuddyAllocator) % kBuddyLine == 0, "what follows an allocator begins on another line");
static_assert(offsetof(BuddyLayout<kBuddyLine>, mutex) % kBuddyLine == 0, "the mutex begins a line");
static_assert(offsetof(BuddyLayout<kBuddyLine>, state) >= kBuddyLine, "nothing else is on the mutex's line");
static_assert(offsetof(BuddyLayout<kBuddyLine>, state) % kBuddyLine == 0, "the hot state begins a line");
static_assert(offsetof(BuddyLayout<kBuddyLine>, geometry) - offsetof(BuddyLayout<kBuddyLine>, state) >= kBuddyLine,
              "what is only read is not on the line of what is written");
static_assert(offsetof(BuddyLayout<kBuddyNaturalLine>, state) == sizeof(std::mutex), "unpadded means without padding");

}  // namespace nexus

// Runs the buddy allocator for test_buddy_allocator.py, which builds this with the thread sanitizer and with the
// address and undefined-behaviour sanitizers. Blocks get real memory, and every thread writes its mark at both ends of
// each block that it holds: two blocks that overlap are a data race, and a mark that is not there any more.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "allocator_contention.hpp"

using namespace nexus;

static std::atomic<uint64_t> n_heap{0};

void * operator new(size_t size) {
    n_heap.fetch_add(1, std::memory_order_relaxed);
    if (void * memory = std::malloc(size)) {
        return memory;
    }
    throw std::bad_alloc();
}
void * operator new(size_t size, std::align_val_t alignment) {
    n_heap.fetch_add(1, std::memory_order_relaxed);
    void * memory = nullptr;
    if (posix_memalign(&memory, size_t(alignment), size) == 0) {
        return memory;
    }
    throw std::bad_alloc();
}
void operator delete(void * memory) noexcept { std::free(memory); }
void operator delete(void * memory, size_t) noexcept { std::free(memory); }
void operator delete(void * memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void * memory, size_t, std::align_val_t) noexcept { std::free(memory); }

constexpr size_t kUnit = 128;
constexpr uint32_t kThreads = 4;

struct Held {
    int64_t offset = -1;
    size_t bytes = 0;
};

// One thread's requests on the allocator it shares; the number of marks that others have overwritten.
template <typename Allocator>
static uint64_t use(Allocator & allocator, uint8_t * memory, uint32_t thread, size_t n_operations, uint64_t & n_served,
                    uint64_t & n_refused) {
    uint64_t random = 100 + thread, broken = 0;
    Held held[24];
    const auto release = [&](Held & block) {
        uint64_t first, last;
        std::memcpy(&first, memory + block.offset, sizeof(first));
        std::memcpy(&last, memory + block.offset + block.bytes - sizeof(last), sizeof(last));
        broken += first != thread + 1 || last != thread + 1;
        broken += allocator.release(block.offset) != 0;
        block.offset = -1;
    };
    for (size_t i = 0; i < n_operations; ++i) {
        Held & block = held[contention_random(random) % 24];
        if (block.offset >= 0) {
            release(block);
            continue;
        }
        block.bytes = 2 * sizeof(uint64_t) + contention_random(random) % (40 * kUnit);
        block.offset = allocator.allocate(block.bytes);
        if (block.offset < 0) {
            ++n_refused;
            continue;
        }
        ++n_served;
        const uint64_t mark = thread + 1;
        std::memcpy(memory + block.offset, &mark, sizeof(mark));
        std::memcpy(memory + block.offset + block.bytes - sizeof(mark), &mark, sizeof(mark));
    }
    for (Held & block : held) {
        if (block.offset >= 0) {
            release(block);
        }
    }
    return broken;
}

// n_units: small enough that requests are refused now and then.
template <typename Allocator> static void check_threads(const char * name, size_t n_units) {
    std::vector<uint8_t> memory(n_units * kUnit);
    Allocator allocator(memory.size(), kUnit);
    const std::vector<int64_t> at_first = allocator.free_blocks();
    int same = 0;
    uint64_t broken = 0, served = 0, refused = 0;
    for (int repetition = 0; repetition < 20; ++repetition) {
        uint64_t broken_of[kThreads] = {}, served_of[kThreads] = {}, refused_of[kThreads] = {};
        std::vector<std::thread> threads;
        for (uint32_t t = 0; t < kThreads; ++t) {
            threads.emplace_back([&, t] {
                broken_of[t] = use(allocator, memory.data(), t, 2000, served_of[t], refused_of[t]);
            });
        }
        for (std::thread & thread : threads) {
            thread.join();
        }
        for (uint32_t t = 0; t < kThreads; ++t) {
            broken += broken_of[t];
            served += served_of[t];
            refused += refused_of[t];
        }
        same += allocator.free_blocks() == at_first && allocator.free_bytes() == memory.size();
    }
    std::printf("%s units=%zu served=%d refused=%d broken=%llu same=%d\n", name, n_units, served > 10000, refused > 100,
                static_cast<unsigned long long>(broken), same);
}

static void check_heap() {
    std::vector<uint8_t> memory(1000 * kUnit);
    BuddyAllocator allocator(memory.size(), kUnit);
    uint64_t served = 0, refused = 0;
    const uint64_t before = n_heap;
    const uint64_t broken = use(allocator, memory.data(), 0, 20000, served, refused);
    const uint64_t allocated = n_heap - before;
    std::printf("heap allocations=%llu broken=%llu served=%d counted=%d\n", static_cast<unsigned long long>(allocated),
                static_cast<unsigned long long>(broken), served > 5000, before > 0);
}

static void check_contention() {
    int whole = 0, failed = 0;
    for (int32_t layout = 0; layout < 3; ++layout) {
        for (const bool shared : {false, true}) {
            for (const bool by_request : {false, true}) {
                const ContentionRun run = contend(layout, shared, 4, 2000, 1, by_request);
                whole += run.whole && run.operations_per_s > 0 && (run.p99_ns >= run.p50_ns);
                failed += run.n_failed != 0;
            }
        }
    }
    std::printf("contention whole=%d failed=%d\n", whole, failed);
}

int main() {
    check_threads<BuddyAllocator>("padded", 700);
    check_threads<UnpaddedBuddyAllocator>("unpadded", 700);
    check_threads<BuddyAllocator>("padded", 4096);
    check_heap();
    check_contention();
    return 0;
}

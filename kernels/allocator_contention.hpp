// Threads that contend for allocators: the same requests on the padded and the unpadded buddy allocator and on malloc.
//
// Every thread has a fixed private stream of requests: it holds up to 32 blocks of 1 to 64 units, of random sizes with
// a uniform logarithm, and each request fills or empties one of its places. After each it bumps a counter of its own.
// Counters and allocators stand in one array of seats {counter, allocator}; thread t bumps the counter of seat t+1.
//   one     all threads share the allocator of seat 0, and one of them bumps the counter beside it
//   own     thread t alone uses the allocator of seat t, and another bumps the counter beside it: no data is shared
// Every seat begins on a line. In the padded layout counter, mutex, hot state and bitmaps have lines of their own. In
// the unpadded one, which is the same template without any alignas, counter, mutex and hot state are the seat's first
// line: what another thread writes to the counter takes the line away from the thread that locks. Both layouts do the
// same work on the same requests. No memory is touched but the allocators' own.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include "buddy_allocator.hpp"

namespace nexus {

constexpr size_t kContentionUnit = size_t(64) << 10;
constexpr size_t kContentionCapacity = size_t(1) << 30;
constexpr uint32_t kContentionPlaces = 32;
constexpr uint32_t kContentionMostUnits = 64;
// 7 threads hold at most 224 blocks, each inside of one of the 256 aligned ranges of 64 units: there is always room.
constexpr uint32_t kContentionMostThreads = 7;

struct ContentionRun {
    double operations_per_s = 0;
    double p50_ns = 0, p99_ns = 0;  // of one request; 0 in a run that is not timed request by request
    uint64_t n_failed = 0;          // requests that were refused
    bool whole = false;             // whether every allocator is as empty as at first
};

struct ContentionRequest {
    uint8_t place, units;  // 0 units: release
};

inline uint64_t contention_random(uint64_t & state) {
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// 1 to 64 units: an octave, then a place in it.
inline uint32_t contention_units(uint64_t & random) {
    const uint32_t octave = uint32_t(contention_random(random) % 6);
    return (uint32_t(1) << octave) + 1 + uint32_t(contention_random(random) % (uint32_t(1) << octave)) -
           uint32_t(contention_random(random) % 2);
}

inline std::vector<ContentionRequest> contention_requests(size_t n_operations, uint64_t seed, uint32_t thread) {
    uint64_t random = seed * 0x2545f4914f6cdd1dull + thread;
    bool taken[kContentionPlaces] = {};
    std::vector<ContentionRequest> requests(n_operations);
    for (ContentionRequest & request : requests) {
        request.place = uint8_t(contention_random(random) % kContentionPlaces);
        taken[request.place] = !taken[request.place];
        request.units = taken[request.place] ? uint8_t(contention_units(random)) : uint8_t(0);
    }
    return requests;
}

template <size_t Line> struct BuddySeat {
    alignas(Line) std::atomic<uint64_t> served{0};
    BasicBuddyAllocator<Line> allocator{kContentionCapacity, kContentionUnit};

    int64_t allocate(size_t bytes) { return allocator.allocate(bytes); }
    bool release(int64_t block) { return allocator.release(block) == 0; }
    bool whole() {
        const int64_t everything = int64_t(kContentionCapacity);
        return allocator.free_blocks() == std::vector<int64_t>{0, everything};
    }
};
static_assert(offsetof(BuddyLayout<kBuddyNaturalLine>, state) + sizeof(BuddyState) <= kBuddyLine - sizeof(uint64_t),
              "an unpadded seat's counter, mutex and hot state are one line");

struct MallocSeat {
    alignas(kBuddyLine) std::atomic<uint64_t> served{0};

    int64_t allocate(size_t bytes) {
        void * block = std::aligned_alloc(kBuddyLine, bytes);
        return block == nullptr ? -1 : int64_t(reinterpret_cast<size_t>(block));
    }
    bool release(int64_t block) {
        std::free(reinterpret_cast<void *>(size_t(block)));
        return true;
    }
    bool whole() { return true; }
};

// Thread t stays on the t-th CPU that the process may use, in turn; elsewhere than on Linux the system decides.
inline void keep_on_cpu(uint32_t thread) {
#if defined(__linux__)
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
        return;
    }
    const int nth = int(thread) % CPU_COUNT(&allowed);
    for (int cpu = 0, seen = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &allowed) && seen++ == nth) {
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
            return;
        }
    }
#else
    (void) thread;
#endif
}

template <typename Seat> struct alignas(kBuddyLine) OwnLine {
    Seat seat;
};

inline double nth_of(std::vector<uint32_t> & values, double share) {
    const size_t at = std::min(values.size() - 1, size_t(share * double(values.size())));
    std::nth_element(values.begin(), values.begin() + long(at), values.end());
    return double(values[at]);
}

template <typename Seat>
ContentionRun contend_on(bool shared, uint32_t n_threads, size_t n_operations, uint64_t seed, bool by_request) {
    using Clock = std::chrono::steady_clock;
    if (n_threads == 0 || n_threads > kContentionMostThreads || n_operations == 0) {
        throw std::invalid_argument("n_threads is " + std::to_string(n_threads) + " and n_operations " +
                                    std::to_string(n_operations) + "; give 1 to " +
                                    std::to_string(kContentionMostThreads) + " threads and at least one operation");
    }
    const std::unique_ptr<OwnLine<Seat>[]> seats(new OwnLine<Seat>[n_threads]);
    std::vector<std::vector<ContentionRequest>> requests;
    std::vector<std::vector<uint32_t>> times(n_threads);
    for (uint32_t t = 0; t < n_threads; ++t) {
        requests.push_back(contention_requests(n_operations, seed, t));
        times[t].resize(by_request ? n_operations : 0);
    }
    std::vector<Clock::time_point> begin(n_threads), end(n_threads);
    std::atomic<uint32_t> waiting{n_threads};
    std::atomic<uint64_t> n_failed{0};
    const auto work = [&](uint32_t t) {
        keep_on_cpu(t);
        Seat & seat = seats[shared ? 0 : t].seat;
        std::atomic<uint64_t> & served = seats[(t + 1) % n_threads].seat.served;
        int64_t held[kContentionPlaces] = {};
        uint64_t failed = 0;
        const auto serve = [&](const ContentionRequest & request) {
            if (request.units == 0) {
                failed += !seat.release(held[request.place]);
            } else {
                held[request.place] = seat.allocate(request.units * kContentionUnit);
                failed += held[request.place] < 0;
            }
        };
        const auto count = [&served] {
            served.store(served.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        };
        waiting.fetch_sub(1);
        while (waiting.load() != 0) {
            std::this_thread::yield();
        }
        begin[t] = Clock::now();
        if (by_request) {
            for (size_t i = 0; i < n_operations; ++i) {
                const auto start = Clock::now();
                serve(requests[t][i]);
                times[t][i] = uint32_t(std::min<int64_t>(
                    UINT32_MAX, std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count()));
                count();
            }
        } else {
            for (const ContentionRequest & request : requests[t]) {
                serve(request);
                count();
            }
        }
        end[t] = Clock::now();
        bool taken[kContentionPlaces] = {};
        for (const ContentionRequest & request : requests[t]) {
            taken[request.place] = request.units != 0;
        }
        for (uint32_t place = 0; place < kContentionPlaces; ++place) {
            if (taken[place]) {
                failed += !seat.release(held[place]);
            }
        }
        n_failed += failed;
    };
    std::vector<std::thread> threads;
    for (uint32_t t = 0; t < n_threads; ++t) {
        threads.emplace_back(work, t);
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    ContentionRun run;
    const double seconds = std::chrono::duration<double>(*std::max_element(end.begin(), end.end()) -
                                                         *std::min_element(begin.begin(), begin.end())).count();
    run.operations_per_s = double(n_operations) * n_threads / seconds;
    if (by_request) {
        std::vector<uint32_t> all;
        for (const std::vector<uint32_t> & some : times) {
            all.insert(all.end(), some.begin(), some.end());
        }
        run.p50_ns = nth_of(all, 0.5);
        run.p99_ns = nth_of(all, 0.99);
    }
    run.n_failed = n_failed;
    run.whole = true;
    for (uint32_t t = 0; t < n_threads; ++t) {
        run.whole = run.whole && seats[t].seat.whole();
    }
    return run;
}

// layout: 0 padded, 1 unpadded, 2 malloc. Throws std::invalid_argument for sizes that it does not serve.
inline ContentionRun contend(int32_t layout, bool shared, uint32_t n_threads, size_t n_operations, uint64_t seed,
                             bool by_request) {
    switch (layout) {
        case 0: return contend_on<BuddySeat<kBuddyLine>>(shared, n_threads, n_operations, seed, by_request);
        case 1: return contend_on<BuddySeat<kBuddyNaturalLine>>(shared, n_threads, n_operations, seed, by_request);
        case 2: return contend_on<MallocSeat>(shared, n_threads, n_operations, seed, by_request);
        default: throw std::invalid_argument("layout is " + std::to_string(layout) + "; give 0, 1 or 2");
    }
}

// Nanoseconds of one allocation and one release of 2^order units by one thread, medians and 99th percentiles. The buddy
// allocator is empty before each: it splits from the largest block down and merges all the way up, its worst case.
struct OrderTimes {
    double allocate_p50_ns = 0, allocate_p99_ns = 0, free_p50_ns = 0, free_p99_ns = 0;
    uint64_t n_failed = 0;
};

template <typename Seat> OrderTimes order_times_on(uint32_t order, size_t n_operations) {
    using Clock = std::chrono::steady_clock;
    Seat seat;
    OrderTimes found;
    std::vector<uint32_t> allocate(n_operations), release(n_operations);
    const auto ns = [](Clock::time_point a, Clock::time_point b) {
        return uint32_t(std::min<int64_t>(UINT32_MAX,
                                          std::chrono::duration_cast<std::chrono::nanoseconds>(b - a).count()));
    };
    for (size_t i = 0; i < n_operations; ++i) {
        const auto t0 = Clock::now();
        const int64_t block = seat.allocate(kContentionUnit << order);
        const auto t1 = Clock::now();
        const bool released = seat.release(block);
        const auto t2 = Clock::now();
        found.n_failed += block < 0 || !released;
        allocate[i] = ns(t0, t1);
        release[i] = ns(t1, t2);
    }
    found.allocate_p50_ns = nth_of(allocate, 0.5);
    found.allocate_p99_ns = nth_of(allocate, 0.99);
    found.free_p50_ns = nth_of(release, 0.5);
    found.free_p99_ns = nth_of(release, 0.99);
    return found;
}

// Does nothing: what the clock itself adds to every time.
struct NoSeat {
    int64_t allocate(size_t) { return 0; }
    bool release(int64_t) { return true; }
};

// layout: 0 padded, 1 unpadded, 2 malloc, 3 nothing.
inline OrderTimes order_times(int32_t layout, uint32_t order, size_t n_operations) {
    if (order >= kBuddyOrders || (kContentionUnit << order) > kContentionCapacity || n_operations == 0) {
        throw std::invalid_argument("order is " + std::to_string(order) + " and n_operations " +
                                    std::to_string(n_operations) + "; give an order that fits and an operation");
    }
    switch (layout) {
        case 0: return order_times_on<BuddySeat<kBuddyLine>>(order, n_operations);
        case 1: return order_times_on<BuddySeat<kBuddyNaturalLine>>(order, n_operations);
        case 2: return order_times_on<MallocSeat>(order, n_operations);
        case 3: return order_times_on<NoSeat>(order, n_operations);
        default: throw std::invalid_argument("layout is " + std::to_string(layout) + "; give 0, 1, 2 or 3");
    }
}

}  // namespace nexus

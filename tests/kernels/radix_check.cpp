// Random prompts through a radix arena, for test_radix_arena.py, which builds this with the address and
// undefined-behaviour sanitizers. Every allocation is counted: none may happen behind the constructor.
#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>

#include "radix_arena.hpp"

static long allocations = 0;

void * operator new(size_t size) {
    ++allocations;
    if (void * memory = std::malloc(size ? size : 1)) {
        return memory;
    }
    throw std::bad_alloc();
}
void operator delete(void * memory) noexcept { std::free(memory); }
void operator delete(void * memory, size_t) noexcept { std::free(memory); }

int main() {
    std::mt19937 random(1);
    const auto draw = [&](int n) { return (int) (random() % n); };
    const int n_slots = 8, max_tokens = 300, longest = 120;
    // A heap block of exactly the right size, so that a read past it is seen.
    std::vector<std::vector<int32_t>> prompts(64);
    for (size_t i = 0; i < prompts.size(); ++i) {
        const std::vector<int32_t> & old = prompts[draw((int) i + 1)];
        prompts[i].assign(old.begin(), old.begin() + draw((int) old.size() + 1));
        for (int more = 1 + draw(40); more > 0 && prompts[i].size() < longest; --more) {
            prompts[i].push_back(draw(3));
        }
        prompts[i].shrink_to_fit();
    }
    nexus::RadixArena arena(n_slots, max_tokens, longest);
    const long at_construction = allocations;
    long placed = 0, in_place = 0, evicted = 0, twins = 0, cut = 0;
    for (int round = 0; round < 20000; ++round) {
        const std::vector<int32_t> & prompt = prompts[draw((int) prompts.size())];
        arena.match((size_t) prompt.data(), (int32_t) prompt.size());
        const nexus::RadixPlan & plan = arena.place((size_t) prompt.data(), (int32_t) prompt.size());
        ++placed;
        in_place += plan.in_place;
        evicted += plan.n_evicted;
        twins += plan.twin >= 0;
        cut += plan.evicts_rest;
        if (arena.n_cells() > max_tokens || arena.n_nodes() > 2 * n_slots - 1) {
            return 1;
        }
        if (draw(10) == 0) {
            arena.pin(plan.slot);
        }
        if (draw(2) == 0 || arena.n_pinned_cells() > max_tokens - longest) {
            for (int slot = 0; slot < n_slots; ++slot) {
                arena.release(slot);
            }
        }
        if (draw(20) == 0) {
            arena.evict(draw(n_slots));
        }
        if (draw(500) == 0) {
            arena.clear();
        }
    }
    if (allocations != at_construction) {
        std::printf("%ld allocations\n", allocations - at_construction);
        return 1;
    }
    // An exception is the one thing that may.
    try {
        arena.place((size_t) prompts[0].data(), longest + 1);
        return 1;
    } catch (const std::invalid_argument &) {
    }
    std::printf("counted=%d in_place=%d evicted=%d twins=%d cut=%d\n", at_construction > 0 && allocations > at_construction,
                in_place > 100, evicted > 100, twins > 100, cut > 100);
}

// Which tokens the KV cache still holds: a radix tree over the prompts of a fixed number of slots.
//
// A slot stands for one sequence of the KV cache and keeps the exact token ids of its prompt, so a match is a
// comparison of ids and never of hashes. In a unified cache, sequences that begin alike share the cells of what they have in
// common: that is why the tokens on the edges of the tree, counted once each, are the cells in use, and why a budget in
// cells can be kept without asking the cache.
//
// Edges hold no tokens. A node is the range [begin, end) of the prompt of any slot below it (`slot`), and is handed to
// another one when that slot goes. Slots end at ends of nodes, and a node with one child that is no slot's end is
// merged with it, so n slots need at most 2n - 1 nodes. Everything is sized at construction; nothing allocates
// afterwards but an exception.
//
// Policy: least recently placed first, pinned slots never. A slot that is placed on is used; the one that its prefix is
// copied from is not, since what it holds behind the prefix did not help. Evicting a slot frees the cells that no other
// slot shares.
//
// Addresses from Python arrive as size_t; the caller owns the memory and checks its type.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace nexus {

// What the caller has to do to the KV cache, in this order: if `in_place`, cut `slot` behind `n_reused`, else empty it
// and copy the first `n_reused` positions of `source` to it; empty the evicted slots; decode the rest into `slot`; if
// there is a `twin`, put its cell in place of the last token's.
struct RadixPlan {
    int32_t slot = -1;
    // Slot with the longest common prefix, -1 without any.
    int32_t source = -1;
    // Length of that prefix. All but the last token of a prompt can be reused: its logits are not kept.
    int32_t n_matched = 0;
    int32_t n_reused = 0;
    // Other slots that go, for want of a slot or of cells.
    int32_t n_evicted = 0;
    // Whether `slot` is `source`: it ends where the prompt goes on, or its rest is evicted.
    bool in_place = false;
    bool evicts_rest = false;
    // Another slot that holds the whole prompt, -1 without any. The last token, decoded once more, would take a second
    // cell.
    int32_t twin = -1;
};

class RadixArena {
  public:
    // n_slots prompts of at most slot_tokens tokens each, which take at most max_tokens cells together.
    RadixArena(int32_t n_slots, int32_t max_tokens, int32_t slot_tokens)
        : n_slots_(positive("n_slots", n_slots)), max_tokens_(positive("max_tokens", max_tokens)),
          slot_tokens_(positive("slot_tokens", slot_tokens)), tokens_((size_t) n_slots * slot_tokens), slots_(n_slots),
          nodes_((size_t) 2 * n_slots), free_nodes_(2 * (size_t) n_slots), evicted_(n_slots) {
        clear();
    }

    void clear() {
        slots_.assign(slots_.size(), Slot());
        nodes_[kRoot] = Node();
        n_free_ = 0;
        for (int32_t node = (int32_t) nodes_.size() - 1; node > kRoot; --node) {
            free_nodes_[n_free_++] = node;
        }
        clock_ = n_cells_ = n_pinned_ = 0;
    }

    int32_t n_slots() const { return n_slots_; }
    int32_t max_tokens() const { return max_tokens_; }
    // Cells that the resident prompts take.
    int64_t n_cells() const { return n_cells_; }
    // Those of pinned slots.
    int64_t n_pinned_cells() const { return n_pinned_; }
    int32_t n_nodes() const { return (int32_t) nodes_.size() - 1 - n_free_; }
    // Length of a slot's prompt, 0 for a free slot.
    int32_t length(int32_t slot) const { return at(slot).length; }
    bool pinned(int32_t slot) const { return at(slot).pinned; }
    // What the last prompt that was placed asks for.
    const RadixPlan & plan() const { return plan_; }
    int32_t evicted(int32_t i) const { return evicted_.at(i); }

    // Copies a slot's prompt, int32[length(slot)].
    void copy_tokens(int32_t slot, size_t out) const {
        std::memcpy(reinterpret_cast<void *>(out), text(slot), sizeof(int32_t) * at(slot).length);
    }

    // Length of the longest common prefix of a prompt, int32[n], with any slot's.
    int32_t match(size_t tokens, int32_t n) const { return find(reinterpret_cast<const int32_t *>(tokens), n).length; }

    // Makes room for a prompt, int32[n], and says what to do. Throws, and changes nothing, where it cannot fit beside
    // the pinned slots.
    const RadixPlan & place(size_t address, int32_t n) {
        const auto * tokens = reinterpret_cast<const int32_t *>(address);
        if (n < 1 || n > slot_tokens_) {
            throw std::invalid_argument("prompt of " + std::to_string(n) + " tokens; a slot holds 1 to " +
                                        std::to_string(slot_tokens_));
        }
        const Found found = find(tokens, n);
        const int64_t needed = n_pinned_ + n - found.pinned;
        if (needed > max_tokens_) {
            throw std::runtime_error("prompt of " + std::to_string(n) + " tokens needs " + std::to_string(needed) +
                                     " cells beside pinned ones; max_tokens is " + std::to_string(max_tokens_));
        }
        RadixPlan plan;
        plan.n_matched = found.length;
        plan.n_reused = std::min(found.length, n - 1);
        plan.source = found.length > 0 ? nodes_[found.node].slot : -1;
        plan.slot = continued(found);
        if (plan.slot >= 0) {
            plan.source = plan.slot;
        } else {
            plan.slot = free_slot();
        }
        if (plan.slot < 0) {
            plan.slot = oldest(-1);
            if (plan.slot < 0) {
                throw std::runtime_error("all " + std::to_string(n_slots_) + " slots are pinned; release one");
            }
            // What goes for want of a slot may be what the prefix is taken from: then it is cut.
            if (plan.slot != plan.source) {
                evicted_[plan.n_evicted++] = plan.slot;
            }
        }
        plan.in_place = plan.slot == plan.source;
        plan.evicts_rest = plan.in_place && slots_[plan.slot].length > found.length;
        remove(plan.slot);
        insert(plan.slot, tokens, n);
        while (n_cells_ > max_tokens_) {
            // There is one: pinned slots and this prompt fit.
            const int32_t slot = oldest(plan.slot);
            evicted_[plan.n_evicted++] = slot;
            remove(slot);
        }
        plan.twin = found.length == n ? other_through_end(plan.slot) : -1;
        plan_ = plan;
        return plan_;
    }

    // Forgets a slot's prompt, pinned or not.
    void evict(int32_t slot) {
        at(slot);
        release(slot);
        remove(slot);
    }

    // Keeps a slot until it is released. Once is enough.
    void pin(int32_t slot) {
        if (at(slot).length == 0) {
            throw std::invalid_argument("slot " + std::to_string(slot) + " is free; place a prompt first");
        }
        if (!slots_[slot].pinned) {
            slots_[slot].pinned = true;
            for (int32_t node = slots_[slot].node; node != kRoot; node = nodes_[node].parent) {
                if (nodes_[node].n_pinned++ == 0) {
                    n_pinned_ += nodes_[node].end - nodes_[node].begin;
                }
            }
        }
    }

    void release(int32_t slot) {
        if (at(slot).pinned) {
            slots_[slot].pinned = false;
            for (int32_t node = slots_[slot].node; node != kRoot; node = nodes_[node].parent) {
                if (--nodes_[node].n_pinned == 0) {
                    n_pinned_ -= nodes_[node].end - nodes_[node].begin;
                }
            }
        }
    }

  private:
    static constexpr int32_t kRoot = 0;
    // Tokens compared at a time.
    static constexpr int32_t kRun = 64;

    struct Slot {
        int32_t length = 0;
        int32_t node = kRoot;
        bool pinned = false;
        int64_t used = 0;
    };

    // Tokens [begin, end) of the prompts of n_slots slots. `first` is the token at begin.
    struct Node {
        int32_t parent = -1;
        int32_t child = -1;
        int32_t sibling = -1;
        int32_t begin = 0;
        int32_t end = 0;
        int32_t first = 0;
        int32_t slot = -1;
        int32_t n_slots = 0;
        int32_t n_pinned = 0;
        // Slots whose prompt ends here.
        int32_t n_ends = 0;
    };

    // Where the longest common prefix ends: `length` tokens, in `node`; `pinned` of them belong to pinned slots.
    struct Found {
        int32_t length = 0;
        int32_t node = kRoot;
        int32_t pinned = 0;
    };

    static int32_t positive(const char * name, int32_t value) {
        if (value < 1) {
            throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; give at least 1");
        }
        return value;
    }

    const Slot & at(int32_t slot) const {
        if (slot < 0 || slot >= n_slots_) {
            throw std::invalid_argument("slot " + std::to_string(slot) + " is not in 0 ... " +
                                        std::to_string(n_slots_ - 1));
        }
        return slots_[slot];
    }

    int32_t * text(int32_t slot) { return tokens_.data() + (size_t) slot * slot_tokens_; }
    const int32_t * text(int32_t slot) const { return tokens_.data() + (size_t) slot * slot_tokens_; }

    int32_t child_with(int32_t node, int32_t first) const {
        int32_t child = nodes_[node].child;
        while (child >= 0 && nodes_[child].first != first) {
            child = nodes_[child].sibling;
        }
        return child;
    }

    // How many tokens of a node's edge a prompt of n tokens goes along.
    int32_t along(const Node & node, const int32_t * tokens, int32_t n) const {
        const int32_t * edge = text(node.slot);
        const int32_t stop = std::min(node.end, n);
        int32_t at = node.begin;
        while (at < stop) {
            const int32_t run = std::min(kRun, stop - at);
            if (std::memcmp(edge + at, tokens + at, sizeof(int32_t) * run) != 0) {
                while (edge[at] == tokens[at]) {
                    ++at;
                }
                break;
            }
            at += run;
        }
        return at - node.begin;
    }

    Found find(const int32_t * tokens, int32_t n) const {
        Found found;
        while (found.length < n) {
            const int32_t child = child_with(found.node, tokens[found.length]);
            if (child < 0) {
                break;
            }
            found.node = child;
            found.length += along(nodes_[child], tokens, n);
            if (nodes_[child].n_pinned > 0) {
                found.pinned = found.length;
            }
            if (found.length < nodes_[child].end) {
                break;
            }
        }
        return found;
    }

    // An unpinned slot whose whole prompt is the prefix that was found, -1 without any.
    int32_t continued(const Found & found) const {
        if (found.length > 0 && nodes_[found.node].n_ends > 0 && nodes_[found.node].end == found.length) {
            for (int32_t slot = 0; slot < n_slots_; ++slot) {
                if (slots_[slot].node == found.node && !slots_[slot].pinned) {
                    return slot;
                }
            }
        }
        return -1;
    }

    int32_t free_slot() const {
        for (int32_t slot = 0; slot < n_slots_; ++slot) {
            if (slots_[slot].length == 0) {
                return slot;
            }
        }
        return -1;
    }

    // The unpinned slot that was placed on longest ago, -1 without any.
    int32_t oldest(int32_t but) const {
        int32_t found = -1;
        for (int32_t slot = 0; slot < n_slots_; ++slot) {
            if (slot != but && slots_[slot].length > 0 && !slots_[slot].pinned &&
                (found < 0 || slots_[slot].used < slots_[found].used)) {
                found = slot;
            }
        }
        return found;
    }

    int32_t slot_ending_at(int32_t node, int32_t but) const {
        for (int32_t slot = 0; slot < n_slots_; ++slot) {
            if (slot != but && slots_[slot].node == node) {
                return slot;
            }
        }
        return -1;
    }

    int32_t other_through_end(int32_t slot) const {
        const Node & end = nodes_[slots_[slot].node];
        return end.child >= 0 ? nodes_[end.child].slot : slot_ending_at(slots_[slot].node, slot);
    }

    int32_t & link_to(int32_t node) {
        int32_t * link = &nodes_[nodes_[node].parent].child;
        while (*link != node) {
            link = &nodes_[*link].sibling;
        }
        return *link;
    }

    int32_t new_node(int32_t parent, int32_t begin, int32_t end, int32_t slot) {
        const int32_t node = free_nodes_[--n_free_];
        nodes_[node] = Node();
        nodes_[node].parent = parent;
        nodes_[node].begin = begin;
        nodes_[node].end = end;
        nodes_[node].slot = slot;
        nodes_[node].first = text(slot)[begin];
        return node;
    }

    // Puts a node for the first `size` tokens of a node's edge above it, and returns it.
    int32_t split(int32_t node, int32_t size) {
        int32_t & link = link_to(node);
        Node & lower = nodes_[node];
        const int32_t middle = lower.begin + size;
        const int32_t upper = new_node(lower.parent, lower.begin, middle, lower.slot);
        nodes_[upper].sibling = lower.sibling;
        nodes_[upper].child = node;
        nodes_[upper].n_slots = lower.n_slots;
        nodes_[upper].n_pinned = lower.n_pinned;
        link = upper;
        lower.parent = upper;
        lower.sibling = -1;
        lower.begin = middle;
        lower.first = text(lower.slot)[middle];
        return upper;
    }

    void insert(int32_t slot, const int32_t * tokens, int32_t n) {
        std::memmove(text(slot), tokens, sizeof(int32_t) * n);
        int32_t node = kRoot;
        for (int32_t depth = 0; depth < n; depth = nodes_[node].end) {
            int32_t child = child_with(node, tokens[depth]);
            if (child < 0) {
                child = new_node(node, depth, n, slot);
                nodes_[child].sibling = nodes_[node].child;
                nodes_[node].child = child;
                n_cells_ += n - depth;
            } else {
                const int32_t size = along(nodes_[child], tokens, n);
                if (size < nodes_[child].end - nodes_[child].begin) {
                    child = split(child, size);
                }
            }
            node = child;
        }
        ++nodes_[node].n_ends;
        slots_[slot].length = n;
        slots_[slot].node = node;
        slots_[slot].used = ++clock_;
        for (; node != kRoot; node = nodes_[node].parent) {
            ++nodes_[node].n_slots;
        }
    }

    // Takes an unpinned slot out of the tree; nothing for a free one.
    void remove(int32_t slot) {
        int32_t node = slots_[slot].node;
        slots_[slot] = Slot();
        if (node != kRoot) {
            --nodes_[node].n_ends;
        }
        // Upwards: a node's children are right before it is.
        while (node != kRoot) {
            const int32_t parent = nodes_[node].parent;
            if (--nodes_[node].n_slots == 0) {
                n_cells_ -= nodes_[node].end - nodes_[node].begin;
                link_to(node) = nodes_[node].sibling;
                free_nodes_[n_free_++] = node;
            } else {
                const int32_t child = nodes_[node].child;
                if (nodes_[node].slot == slot) {
                    nodes_[node].slot = child >= 0 ? nodes_[child].slot : slot_ending_at(node, slot);
                }
                if (nodes_[node].n_ends == 0 && nodes_[child].sibling < 0) {
                    merge(node, child);
                }
            }
            node = parent;
        }
    }

    // Lets an only child take the place of its parent.
    void merge(int32_t node, int32_t child) {
        link_to(node) = child;
        nodes_[child].parent = nodes_[node].parent;
        nodes_[child].sibling = nodes_[node].sibling;
        nodes_[child].begin = nodes_[node].begin;
        nodes_[child].first = nodes_[node].first;
        free_nodes_[n_free_++] = node;
    }

    int32_t n_slots_;
    int32_t max_tokens_;
    int32_t slot_tokens_;
    std::vector<int32_t> tokens_;
    std::vector<Slot> slots_;
    std::vector<Node> nodes_;
    std::vector<int32_t> free_nodes_;
    std::vector<int32_t> evicted_;
    int32_t n_free_ = 0;
    int64_t clock_ = 0;
    int64_t n_cells_ = 0;
    int64_t n_pinned_ = 0;
    RadixPlan plan_;
};

}  // namespace nexus

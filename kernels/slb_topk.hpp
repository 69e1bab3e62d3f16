// The k best rows of a scan, in order: higher score first, lower id first among equals.
//
// An entry is one 64-bit key, score above complemented id, so that one comparison settles both. Few entries are kept
// sorted by insertion, which costs next to nothing once the threshold has risen; many are kept as a heap, worst on top.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace nexus {

class SlbTopK {
public:
    // Ready for a new scan that keeps k entries.
    void reset(size_t k) {
        keys_.resize(k);
        count_ = 0;
        threshold_ = k == 0 ? INT32_MAX : INT32_MIN;
    }

    // A row with a score above this one is worth offering. No product of codes is as low as the first value.
    int32_t threshold() const { return threshold_; }

    void offer(int32_t score, uint32_t id) { offer_key(int64_t(score) * kOne + (kOne - 1 - int64_t(id))); }

    // Everything that another one kept; ranges of rows scanned apart come together here.
    void merge(const SlbTopK & other) {
        for (size_t i = 0; i < other.count_; ++i) {
            offer_key(other.keys_[i]);
        }
    }

    // Puts the entries in order; after that only score and id may be called.
    size_t finish() {
        if (!sorted()) {
            std::sort(keys_.begin(), keys_.begin() + std::ptrdiff_t(count_), std::greater<int64_t>());
        }
        return count_;
    }
    int32_t score(size_t i) const { return score_of(keys_[i]); }
    uint32_t id(size_t i) const { return uint32_t(kOne - 1 - (keys_[i] & (kOne - 1))); }

private:
    static constexpr int64_t kOne = int64_t(1) << 32;
    static constexpr size_t kMostSorted = 64;

    static int32_t score_of(int64_t key) { return int32_t(key >> 32); }
    bool sorted() const { return keys_.size() <= kMostSorted; }

    void offer_key(int64_t key) {
        const size_t k = keys_.size();
        if (count_ == k && (k == 0 || key <= worst())) {
            return;
        }
        if (sorted()) {
            size_t i = count_ < k ? count_++ : k - 1;
            for (; i > 0 && keys_[i - 1] < key; --i) {
                keys_[i] = keys_[i - 1];
            }
            keys_[i] = key;
        } else {
            if (count_ == k) {
                std::pop_heap(keys_.begin(), keys_.end(), std::greater<int64_t>());
                --count_;
            }
            keys_[count_++] = key;
            std::push_heap(keys_.begin(), keys_.begin() + std::ptrdiff_t(count_), std::greater<int64_t>());
        }
        if (count_ == k) {
            threshold_ = score_of(worst());
        }
    }
    int64_t worst() const { return sorted() ? keys_[keys_.size() - 1] : keys_[0]; }

    std::vector<int64_t> keys_;
    size_t count_ = 0;
    int32_t threshold_ = INT32_MIN;
};

}  // namespace nexus

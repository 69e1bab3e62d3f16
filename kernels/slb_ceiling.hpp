// What the scan is held against: reading the same bytes without multiplying them, and a call that does nothing.
//
// A reader walks 1, 2 or 4 places of the buffer at once; which is fastest depends on the cache level and the machine's
// prefetchers, so all are measured and the best counts. What was read is combined by OR and returned, so that no
// compiler drops the loads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace nexus {

constexpr size_t kSlbStep = 256;  // bytes read at one place before the next

inline uint64_t slb_read_bytes(const uint8_t * buffer, size_t begin, size_t end) {
    uint64_t seen = 0;
    for (size_t i = begin; i < end; ++i) {
        seen |= buffer[i];
    }
    return seen;
}

// Words that the compiler turns into its widest vectors: as fast as explicit ones, where that was compared.
template <size_t places> inline uint64_t slb_read_words(const uint8_t * buffer, size_t n_bytes) {
    constexpr size_t kWords = kSlbStep / sizeof(uint64_t);
    const size_t part = n_bytes / (places * kSlbStep) * kSlbStep;
    uint64_t seen[kWords] = {};
    for (size_t i = 0; i < part; i += kSlbStep) {
        for (size_t place = 0; place < places; ++place) {
            uint64_t words[kWords];
            std::memcpy(words, buffer + place * part + i, kSlbStep);
            for (size_t word = 0; word < kWords; ++word) {
                seen[word] |= words[word];
            }
        }
    }
    uint64_t all = slb_read_bytes(buffer, places * part, n_bytes);
    for (const uint64_t word : seen) {
        all |= word;
    }
    return all;
}

constexpr int kSlbReaders = 3;

inline const char * slb_reader_name(int reader) {
    static const char * const names[kSlbReaders] = {"words-1", "words-2", "words-4"};
    return reader >= 0 && reader < kSlbReaders ? names[reader] : "unknown";
}

// The OR of n_bytes at address, read by one of the readers.
inline uint64_t slb_read(int reader, size_t address, size_t n_bytes) {
    const auto * buffer = reinterpret_cast<const uint8_t *>(address);
    switch (reader) {
        case 0: return slb_read_words<1>(buffer, n_bytes);
        case 1: return slb_read_words<2>(buffer, n_bytes);
        case 2: return slb_read_words<4>(buffer, n_bytes);
        default: return 0;
    }
}

// Takes what a search takes and does nothing: the cost of a call from Python.
inline size_t slb_nothing(size_t query, size_t k, size_t hits) { return (query | k | hits) == 0; }

}  // namespace nexus

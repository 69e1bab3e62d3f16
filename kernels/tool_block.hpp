// The .atb file: one tool's keys and values, compiled once, read in place through mmap.
//
//   0      header, 128 bytes
//   128    token ids int32[n_tokens], then facts as UTF-8 JSON; zeros up to the next 2 MiB
//   2 MiB  K, F16 [n_layers][n_tokens][n_head_kv * head_dim_k]; zeros up to the next 2 MiB
//   then   V, F16 [n_layers][n_tokens][n_head_kv * head_dim_v], to the end of the file
//
// 2 MiB alignment lets the system map keys and values with huge pages. Every byte of the file lies under one of four
// checksums, and a changed byte is certain to be seen, not just likely: each step of the checksum is a bijection of its
// state, so two inputs that differ in one word end in different states. The checksums guard against damage, not against
// somebody who writes a false file and its checksums; the size checks keep such a file from being read past its end.
// A file must not be cut while it is mapped: blocks are replaced by rename, never rewritten.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace nexus {

constexpr size_t kBlockAlignment = size_t(2) << 20;
constexpr size_t kMostTensorBytes = size_t(1) << 40;
constexpr uint16_t kBlockVersion = 1;
constexpr uint16_t kBlockF16 = 1;

// Eight interleaved lanes, each h = rotate((h ^ word) * odd): xor, multiplication by an odd number and rotation are
// bijections of 64-bit words, so one changed word changes its lane for good; the lanes are folded the same way.
inline uint64_t checksum64(const void * data, size_t size, uint64_t seed = 0) {
    constexpr uint64_t kOdd = 0x9e3779b97f4a7c15ull;
    constexpr size_t kLanes = 8, kStride = kLanes * sizeof(uint64_t);
    const auto step = [](uint64_t h, uint64_t word) {
        h = (h ^ word) * kOdd;
        return (h << 29) | (h >> 35);
    };
    uint64_t lanes[kLanes];
    for (size_t i = 0; i < kLanes; ++i) {
        lanes[i] = seed + i * kOdd + 1;
    }
    const auto * bytes = static_cast<const uint8_t *>(data);
    size_t at = 0;
    for (; at + kStride <= size; at += kStride) {
        uint64_t words[kLanes];
        std::memcpy(words, bytes + at, kStride);
        for (size_t i = 0; i < kLanes; ++i) {
            lanes[i] = step(lanes[i], words[i]);
        }
    }
    uint64_t folded = size;
    for (; at < size; at += sizeof(uint64_t)) {
        uint64_t word = 0;
        std::memcpy(&word, bytes + at, size - at < sizeof(word) ? size - at : sizeof(word));
        folded = step(folded, word);
    }
    for (const uint64_t lane : lanes) {
        folded = step(folded, lane);
    }
    return folded;
}

struct ToolBlockHeader {
    char magic[8] = {'N', 'E', 'X', 'U', 'S', 'A', 'T', 'B'};
    uint16_t version = kBlockVersion;
    uint16_t header_bytes = 128;
    int32_t anchor = 0;  // position of the first token when the block was compiled
    uint32_t n_tokens = 0;
    uint16_t n_layers = 0;
    uint16_t n_head_kv = 0;
    uint16_t head_dim_k = 0;
    uint16_t head_dim_v = 0;
    uint16_t n_rot = 0;
    uint8_t rope_layout = 0;        // 0 adjacent pairs ("normal"), 1 halves ("NeoX")
    uint8_t rope_scaling_type = 0;  // 0 none, 1 linear, 2 YaRN
    double rope_base = 0;
    double rope_freq_scale = 0;
    uint64_t rope_freq_hash = 0;  // of the whole frequency table
    uint16_t k_type = kBlockF16;
    uint16_t v_type = kBlockF16;
    uint32_t meta_bytes = 0;             // token ids and facts
    uint8_t model_fingerprint[16] = {};  // of the model file's SHA-256
    uint64_t left_context_hash = 0;      // of the tokens to the left when compiled
    uint64_t file_bytes = 0;             // so that a cut file is named as such
    uint64_t meta_checksum = 0;          // from byte 128 to K
    uint64_t k_checksum = 0;             // from K to V
    uint64_t v_checksum = 0;             // from V to the end
    uint64_t header_checksum = 0;        // of the 120 bytes before it
};
static_assert(std::is_trivially_copyable<ToolBlockHeader>::value, "the header is read and written as bytes");
static_assert(sizeof(ToolBlockHeader) == 128, "the header is 128 bytes");
static_assert(offsetof(ToolBlockHeader, anchor) == 12, "no padding before the anchor");
static_assert(offsetof(ToolBlockHeader, rope_base) == 32, "no padding before rope_base");
static_assert(offsetof(ToolBlockHeader, model_fingerprint) == 64, "no padding before the fingerprint");
static_assert(offsetof(ToolBlockHeader, header_checksum) == 120, "the header's own checksum comes last");

inline size_t block_aligned(size_t bytes) { return (bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment; }

// Bytes of K or V; SIZE_MAX when the product does not fit.
inline size_t block_tensor_bytes(const ToolBlockHeader & h, uint16_t head_dim) {
    size_t bytes = sizeof(uint16_t);
    for (const size_t count : {size_t(h.n_layers), size_t(h.n_tokens), size_t(h.n_head_kv), size_t(head_dim)}) {
        if (__builtin_mul_overflow(bytes, count, &bytes)) {
            return SIZE_MAX;
        }
    }
    return bytes;
}
inline size_t block_k_offset(const ToolBlockHeader & h) { return block_aligned(sizeof(h) + h.meta_bytes); }
inline size_t block_v_offset(const ToolBlockHeader & h) {
    return block_aligned(block_k_offset(h) + block_tensor_bytes(h, h.head_dim_k));
}
inline size_t block_file_bytes(const ToolBlockHeader & h) {
    return block_v_offset(h) + block_tensor_bytes(h, h.head_dim_v);
}

// "" or what is impossible about a header's own fields, so that neither writer nor reader computes with them.
inline std::string impossible_field(const ToolBlockHeader & h) {
    const auto found = [](const char * field, uint64_t value, const std::string & wanted) {
        return std::string(field) + " is " + std::to_string(value) + ", expected " + wanted;
    };
    if (h.n_tokens == 0) return found("n_tokens", h.n_tokens, "at least 1");
    if (h.n_layers == 0) return found("n_layers", h.n_layers, "at least 1");
    if (h.n_head_kv == 0) return found("n_head_kv", h.n_head_kv, "at least 1");
    if (h.head_dim_k == 0) return found("head_dim_k", h.head_dim_k, "at least 1");
    if (h.head_dim_v == 0) return found("head_dim_v", h.head_dim_v, "at least 1");
    if (h.n_rot % 2 != 0 || h.n_rot > h.head_dim_k) {
        return found("n_rot", h.n_rot, "an even number of at most head_dim_k = " + std::to_string(h.head_dim_k));
    }
    if (h.rope_layout > 1) return found("rope_layout", h.rope_layout, "0 (adjacent pairs) or 1 (halves)");
    if (h.rope_scaling_type > 2) return found("rope_scaling_type", h.rope_scaling_type, "0, 1 or 2");
    if (h.k_type != kBlockF16) return found("k_type", h.k_type, "1 (F16)");
    if (h.v_type != kBlockF16) return found("v_type", h.v_type, "1 (F16)");
    for (const uint16_t head_dim : {h.head_dim_k, h.head_dim_v}) {
        if (block_tensor_bytes(h, head_dim) > kMostTensorBytes) {
            return found("n_tokens", h.n_tokens,
                         "fewer: K or V would exceed " + std::to_string(kMostTensorBytes) + " bytes");
        }
    }
    return "";
}

// "" or the first field in which a block and the live model differ, with both values.
inline std::string header_mismatch(const ToolBlockHeader & block, const ToolBlockHeader & model) {
    const auto differ = [](const char * field, auto have, auto want) {
        const auto text = [](auto value) {
            if (std::is_integral<decltype(value)>::value) {
                return std::to_string(value);
            }
            char digits[32];  // all 17, or two different doubles could look alike
            std::snprintf(digits, sizeof(digits), "%.17g", double(value));
            return std::string(digits);
        };
        return std::string(field) + " is " + text(have) + " in the block and " + text(want) + " in the model";
    };
    if (std::memcmp(block.model_fingerprint, model.model_fingerprint, sizeof(block.model_fingerprint)) != 0) {
        const auto hex = [](const uint8_t * bytes) {
            std::string text;
            for (int i = 0; i < 6; ++i) {
                char two[3];
                std::snprintf(two, sizeof(two), "%02x", bytes[i]);
                text += two;
            }
            return text + "...";
        };
        return "model_fingerprint is " + hex(block.model_fingerprint) + " in the block and " +
               hex(model.model_fingerprint) + " in the model";
    }
#define NEXUS_COMPARE(field) \
    if (block.field != model.field) return differ(#field, block.field, model.field)
    NEXUS_COMPARE(n_layers);
    NEXUS_COMPARE(n_head_kv);
    NEXUS_COMPARE(head_dim_k);
    NEXUS_COMPARE(head_dim_v);
    NEXUS_COMPARE(n_rot);
    NEXUS_COMPARE(rope_layout);
    NEXUS_COMPARE(rope_scaling_type);
    NEXUS_COMPARE(rope_base);
    NEXUS_COMPARE(rope_freq_scale);
    NEXUS_COMPARE(rope_freq_hash);
    NEXUS_COMPARE(k_type);
    NEXUS_COMPARE(v_type);
#undef NEXUS_COMPARE
    return "";
}

// Read-only view of one block file. The constructor validates all of it; std::runtime_error names what is wrong.
class ToolBlockFile {
  public:
    explicit ToolBlockFile(const std::string & path) : path_(path) {
        const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (file < 0) {
            refuse(std::string("cannot be opened: ") + std::strerror(errno));
        }
        struct stat info {};
        if (::fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) {
            ::close(file);
            refuse("is not a regular file");
        }
        size_ = size_t(info.st_size);
        if (size_ < sizeof(ToolBlockHeader)) {
            ::close(file);
            refuse("has " + std::to_string(size_) + " bytes, too few for a header of 128");
        }
        void * mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
        ::close(file);
        if (mapped == MAP_FAILED) {
            refuse(std::string("cannot be mapped: ") + std::strerror(errno));
        }
        data_ = static_cast<const uint8_t *>(mapped);
        try {
            validate();
        } catch (...) {
            ::munmap(mapped, size_);
            throw;
        }
    }
    ~ToolBlockFile() { ::munmap(const_cast<uint8_t *>(data_), size_); }
    ToolBlockFile(const ToolBlockFile &) = delete;
    ToolBlockFile & operator=(const ToolBlockFile &) = delete;

    const ToolBlockHeader & header() const { return header_; }
    size_t tokens_addr() const { return size_t(data_) + sizeof(ToolBlockHeader); }
    size_t k_addr() const { return size_t(data_) + block_k_offset(header_); }
    size_t v_addr() const { return size_t(data_) + block_v_offset(header_); }
    std::vector<int32_t> tokens() const {
        std::vector<int32_t> ids(header_.n_tokens);
        std::memcpy(ids.data(), data_ + sizeof(ToolBlockHeader), ids.size() * sizeof(int32_t));
        return ids;
    }
    std::string meta_json() const {
        const size_t ids = header_.n_tokens * sizeof(int32_t);
        return std::string(reinterpret_cast<const char *>(data_) + sizeof(ToolBlockHeader) + ids,
                           header_.meta_bytes - ids);
    }

  private:
    [[noreturn]] void refuse(const std::string & what) const {
        throw std::runtime_error("block " + path_ + " " + what + "; compile it again");
    }

    void expect(const char * field, uint64_t found, uint64_t wanted) const {
        if (found != wanted) {
            refuse(std::string("is refused: ") + field + " is " + std::to_string(found) + ", expected " +
                   std::to_string(wanted));
        }
    }

    void validate() {
        std::memcpy(&header_, data_, sizeof(header_));
        const ToolBlockHeader fresh;
        if (std::memcmp(header_.magic, fresh.magic, sizeof(fresh.magic)) != 0) {
            refuse("is refused: magic is not NEXUSATB, so this is no block file");
        }
        expect("version", header_.version, kBlockVersion);
        expect("header_bytes", header_.header_bytes, sizeof(header_));
        expect("header_checksum", checksum64(data_, offsetof(ToolBlockHeader, header_checksum)),
               header_.header_checksum);
        const std::string impossible = impossible_field(header_);
        if (!impossible.empty()) {
            refuse("is refused: " + impossible);
        }
        if (header_.meta_bytes < header_.n_tokens * sizeof(int32_t) ||
            header_.meta_bytes > size_) {
            refuse("is refused: meta_bytes " + std::to_string(header_.meta_bytes) + " does not fit n_tokens " +
                   std::to_string(header_.n_tokens));
        }
        expect("file_bytes", size_, header_.file_bytes);
        expect("file_bytes", size_, block_file_bytes(header_));
        const size_t k = block_k_offset(header_), v = block_v_offset(header_);
        expect("meta_checksum", checksum64(data_ + sizeof(header_), k - sizeof(header_)), header_.meta_checksum);
        expect("k_checksum", checksum64(data_ + k, v - k), header_.k_checksum);
        expect("v_checksum", checksum64(data_ + v, size_ - v), header_.v_checksum);
    }

    std::string path_;
    const uint8_t * data_ = nullptr;
    size_t size_ = 0;
    ToolBlockHeader header_;
};

// Writes a block: to a temporary file in the same folder, synced, renamed. Counts, checksums and sizes in `fields`
// are filled in here; n_tokens, dims, RoPE facts, anchor and fingerprint are the caller's. Leaves nothing on failure.
inline void write_tool_block(const std::string & path, const ToolBlockHeader & fields, size_t tokens,
                             const std::string & facts, size_t k, size_t v) {
    ToolBlockHeader header = fields;
    const ToolBlockHeader fresh;
    std::memcpy(header.magic, fresh.magic, sizeof(fresh.magic));
    header.version = kBlockVersion;
    header.header_bytes = sizeof(header);
    const std::string impossible = impossible_field(header);
    if (!impossible.empty()) {
        throw std::invalid_argument("block " + path + " cannot be written: " + impossible);
    }
    const size_t meta_bytes = header.n_tokens * sizeof(int32_t) + facts.size();
    if (meta_bytes > UINT32_MAX) {
        throw std::invalid_argument("block " + path + " cannot be written: meta_bytes is " +
                                    std::to_string(meta_bytes) + ", expected less than 4 GiB");
    }
    header.meta_bytes = uint32_t(meta_bytes);
    const size_t k_bytes = block_tensor_bytes(header, header.head_dim_k);
    const size_t v_bytes = block_tensor_bytes(header, header.head_dim_v);
    const size_t k_offset = block_k_offset(header), v_offset = block_v_offset(header);

    header.file_bytes = block_file_bytes(header);
    std::vector<uint8_t> meta(k_offset - sizeof(header), 0);
    std::memcpy(meta.data(), reinterpret_cast<const void *>(tokens), header.n_tokens * sizeof(int32_t));
    std::memcpy(meta.data() + header.n_tokens * sizeof(int32_t), facts.data(), facts.size());
    std::vector<uint8_t> keys(v_offset - k_offset, 0);
    std::memcpy(keys.data(), reinterpret_cast<const void *>(k), k_bytes);
    header.meta_checksum = checksum64(meta.data(), meta.size());
    header.k_checksum = checksum64(keys.data(), keys.size());
    header.v_checksum = checksum64(reinterpret_cast<const void *>(v), v_bytes);
    header.header_checksum = checksum64(&header, offsetof(ToolBlockHeader, header_checksum));

    std::string partial = path + ".XXXXXX";
    const int file = ::mkstemp(&partial[0]);
    if (file < 0) {
        throw std::runtime_error("block " + path + " cannot be written: " + std::strerror(errno));
    }
    const auto put = [file](const void * data, size_t size, size_t offset) {
        const auto * bytes = static_cast<const char *>(data);
        while (size > 0) {
            const ssize_t written = ::pwrite(file, bytes, size, off_t(offset));
            if (written <= 0) {
                return false;
            }
            bytes += written;
            size -= size_t(written);
            offset += size_t(written);
        }
        return true;
    };
    // Padding is left as holes.
    const bool done = put(&header, sizeof(header), 0) && put(meta.data(), header.meta_bytes, sizeof(header)) &&
                      put(keys.data(), k_bytes, k_offset) &&
                      put(reinterpret_cast<const void *>(v), v_bytes, v_offset) && ::fchmod(file, 0644) == 0 &&
                      ::fsync(file) == 0;
    const int reason = errno;
    ::close(file);
    if (!done || std::rename(partial.c_str(), path.c_str()) != 0) {
        const int why = done ? errno : reason;
        ::unlink(partial.c_str());
        throw std::runtime_error("block " + path + " cannot be written: " + std::strerror(why));
    }
}

}  // namespace nexus

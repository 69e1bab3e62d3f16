// A tool block ready to be placed: one state blob in the live context's layout, kept for the life of the block.
//
// Placing it writes new positions, rotates the keys from their F16 originals straight into the blob, and hands the
// blob to llama.cpp: no copy of V, no allocation, and no rounding that accumulates over moves, because every move
// starts from the originals.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "kv_state.hpp"
#include "llama_session.hpp"
#include "rope_shift.hpp"

namespace nexus {

// Microseconds of one plain copy: the least that moving these bytes can cost.
inline double timed_copy_us(size_t target, size_t source, size_t bytes) {
    const auto start = std::chrono::steady_clock::now();
    std::memcpy(reinterpret_cast<void *>(target), reinterpret_cast<const void *>(source), bytes);
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

struct SpliceTimes {
    double reanchor_us = 0;
    double set_state_us = 0;
    double graft_us = 0;
    double total_us = 0;
};

class ResidentBlock {
  public:
    // n_layers: of each of the state's caches. k, v: F16 [layers of all caches][n_tokens][width], alive as long as this
    // object. frequencies: double[n_caches][n_rot / 2], since local and global layers may rotate at different bases.
    ResidentBlock(uint32_t magic, const std::vector<uint32_t> & n_layers, uint32_t n_tokens, uint32_t n_head_kv,
                  uint32_t head_dim_k, uint32_t head_dim_v, uint32_t n_rot, int32_t rope_layout, int32_t anchor,
                  bool v_trans, size_t k, size_t v, size_t frequencies, int32_t isa)
        : n_layers_(n_layers), n_tokens_(n_tokens), n_head_(n_head_kv), head_dim_(head_dim_k), n_rot_(n_rot),
          layout_(rope_layout), anchor_(anchor), isa_(isa),
          row_bytes_(size_t(n_head_kv) * head_dim_k * sizeof(uint16_t)) {
        const auto * theta = reinterpret_cast<const double *>(frequencies);
        frequencies_.assign(theta, theta + n_layers.size() * (n_rot / 2));
        cos_.resize(n_rot / 2);
        sin_.resize(n_rot / 2);
        std::vector<int32_t> positions(n_tokens);
        for (uint32_t i = 0; i < n_tokens; ++i) {
            positions[i] = anchor + int32_t(i);
        }
        const size_t v_row_bytes = size_t(n_head_kv) * head_dim_v * sizeof(uint16_t);
        blob_.resize(kv_state_size(n_layers, n_tokens, row_bytes_, v_row_bytes, v_trans));
        write_kv_state(size_t(blob_.data()), blob_.size(), magic, n_layers, n_tokens, row_bytes_, v_row_bytes, v_trans,
                       size_t(positions.data()), k, v);
        state_ = parse_kv_state(size_t(blob_.data()), blob_.size());
        for (const KvCache & cache : state_.caches) {
            for (const KvLayer & layer : cache.k) {
                sources_.push_back(k + sources_.size() * n_tokens * row_bytes_);
                targets_.push_back(size_t(blob_.data()) + layer.offset);
            }
        }
        placed_at_ = anchor;
    }

    ResidentBlock(const ResidentBlock &) = delete;
    ResidentBlock & operator=(const ResidentBlock &) = delete;

    uint32_t n_tokens() const { return n_tokens_; }
    int32_t anchor() const { return anchor_; }
    size_t blob_size() const { return blob_.size(); }
    void copy_blob(size_t out) const { std::memcpy(reinterpret_cast<void *>(out), blob_.data(), blob_.size()); }

    // Writes the blob for a block that begins at `position`. With reanchor = false keys keep the anchor's rotation
    // (a control: positions move, phases do not).
    void reanchor(int32_t position, bool reanchor_keys) {
        const double delta = reanchor_keys ? double(position) - anchor_ : 0.0;
        size_t begin = 0;
        for (size_t cache = 0; cache < n_layers_.size(); begin += n_layers_[cache++]) {
            if (delta == 0) {
                for (size_t layer = begin; layer < begin + n_layers_[cache]; ++layer) {
                    std::memcpy(reinterpret_cast<void *>(targets_[layer]),
                                reinterpret_cast<const void *>(sources_[layer]), row_bytes_ * n_tokens_);
                }
                continue;
            }
            rope_table(delta, size_t(frequencies_.data() + cache * cos_.size()), cos_.size(), size_t(cos_.data()),
                       size_t(sin_.data()));
            rope_shift_layers(isa_, size_t(sources_.data() + begin), size_t(targets_.data() + begin), n_layers_[cache],
                              n_tokens_, row_bytes_, row_bytes_, n_head_, head_dim_, n_rot_, layout_,
                              size_t(cos_.data()), size_t(sin_.data()));
        }
        shift_positions(size_t(blob_.data()), state_, position - placed_at_);
        placed_at_ = position;
    }

    // Restores the block into the empty sequence `scratch`, at positions position … position+n_tokens-1. Throws, with
    // `scratch` empty, when llama.cpp has no room.
    //
    // With sliding windows, llama.cpp may take cells of the local cache that are not free: those that one sequence
    // alone holds and whose token lies outside of the window of that sequence's next position (find_slot in
    // llama-kv-cache.cpp). The splice relies on this: such a cell is masked for all that its sequence decodes from its
    // end on, and cells inside the window or held by two sequences are never taken. So other sequences go on as if
    // nothing had happened; one that is then cut back by more than a few tokens may miss local cells. The same holds
    // for `scratch` while it alone holds a block longer than the window: copy its cells before anything is decoded.
    SpliceTimes load(LlamaContext & context, int32_t position, int32_t scratch, bool reanchor_keys) {
        const auto t0 = Clock::now();
        reanchor(position, reanchor_keys);
        const auto t1 = Clock::now();
        const size_t read = context.state_set(scratch, size_t(blob_.data()), blob_.size());
        llama_memory_t memory = context.memory();
        // A restore can report success and leave the sequence empty, so memory is asked.
        if (read != blob_.size() || llama_memory_seq_pos_min(memory, scratch) != position ||
            llama_memory_seq_pos_max(memory, scratch) != position + int32_t(n_tokens_) - 1) {
            llama_memory_seq_rm(memory, scratch, -1, -1);
            throw std::runtime_error("no room for a block of " + std::to_string(n_tokens_) + " tokens; raise n_ctx");
        }
        const auto t2 = Clock::now();
        return {us(t0, t1), us(t1, t2), 0, us(t0, t2)};
    }

    // Puts positions position … position+n_tokens-1 of `live` in place, replacing what the sequence held there.
    // `scratch` must be empty and is empty afterwards. Throws, with `live` unchanged, when llama.cpp has no room.
    SpliceTimes place(LlamaContext & context, int32_t position, int32_t live, int32_t scratch, bool reanchor_keys) {
        SpliceTimes times = load(context, position, scratch, reanchor_keys);
        const auto t0 = Clock::now();
        llama_memory_t memory = context.memory();
        llama_memory_seq_rm(memory, live, position, position + int32_t(n_tokens_));
        llama_memory_seq_cp(memory, scratch, live, -1, -1);
        llama_memory_seq_rm(memory, scratch, -1, -1);
        times.graft_us = us(t0, Clock::now());
        times.total_us += times.graft_us;
        return times;
    }

  private:
    using Clock = std::chrono::steady_clock;
    static double us(Clock::time_point a, Clock::time_point b) {
        return std::chrono::duration<double, std::micro>(b - a).count();
    }

    std::vector<uint32_t> n_layers_;
    uint32_t n_tokens_, n_head_, head_dim_, n_rot_;
    int32_t layout_, anchor_, isa_;
    size_t row_bytes_;
    int32_t placed_at_ = 0;
    std::vector<double> frequencies_;
    std::vector<float> cos_, sin_;
    std::vector<uint8_t> blob_;
    std::vector<uint64_t> sources_, targets_;
    KvState state_;
};

}  // namespace nexus

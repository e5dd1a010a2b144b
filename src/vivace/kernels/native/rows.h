// The rows of native calls that several steps are made of: their residuals, slots, entries and rotations, and the
// working space of a forward pass.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "embed.h"
#include "span.h"

EXPORT int64_t vivace_span_bytes(int64_t body, const Plan*, const Call*);
EXPORT void vivace_span(int64_t body, int64_t threads, const Plan*, const Call*);
EXPORT void vivace_greedy(int64_t body, int64_t threads, const Linear*, int64_t* tokens, float* values);
EXPORT void vivace_linear(int64_t body, int64_t threads, const Linear*);
EXPORT void vivace_attention(int64_t body, int64_t threads, const Attention*);

namespace {

// Writes a token's embedding as it enters the first layer: scaled, and with its position where positions are learned.
inline void embed_row(const Chain& chain, int64_t token, int64_t place, int64_t width, bf16* h) {
    embed_token(chain.rows, chain.embedding, token, width, h);
    if (chain.embedding_scale != 1)
        for (int64_t e = 0; e < width; ++e) h[e] = narrowed(widened(h[e]) * chain.embedding_scale);
    if (chain.positions == nullptr) return;
    const bf16* position = chain.positions + place * width;
    for (int64_t e = 0; e < width; ++e) h[e] = narrowed(widened(h[e]) + widened(position[e]));
}

// Whether the largest logit, before capping, is certainly the largest one after it.
inline bool is_certain(const Chain& chain, float logit) {
    return chain.softcap == 0 || std::abs(logit) < chain.certain;
}

inline bool is_end(const Chain& chain, int64_t token) {
    const int64_t* stop = chain.ends + chain.num_ends;
    return std::find(chain.ends, stop, token) != stop;
}

// A body with its index and the number of threads that it uses.
struct Worker {
    const Body& body;
    int64_t index, threads;

    // Applies a norm with the plan's eps and offset to some rows.
    void norm(const Plan& plan, const Gain& gain, const bf16* rows, bf16* x, int64_t count) const {
        const Norm all{rows, gain, x, count, plan.width, plan.norm_eps, plan.norm_offset};
        for (int64_t row = 0; row < count; ++row) body.norm(&all, 0, row);
    }

    void linear(const Linear& product) const { vivace_linear(index, threads, &product); }
    void greedy(const Linear& head, int64_t* tokens, float* values = nullptr) const {
        vivace_greedy(index, threads, &head, tokens, values);
    }
    void span(const Plan& plan, const Call& call) const { vivace_span(index, threads, &plan, &call); }
};

class Rows {
public:
    Rows(const Plan& plan, const Chain& chain, int64_t most) : rotated_(plan.rotated), chain_(chain) {
        for (auto* rows : {&h, &out}) rows->reset(new bf16[most * plan.width]);
        for (auto* rows : {&slot, &seen, &entry}) rows->resize(most);
        for (int64_t rope = 0; rope < chain.num_ropes; ++rope) {
            rotations_.emplace_back(new bf16[2 * most * rotated_]);
            cosines_.push_back(rotations_.back().get());
            sines_.push_back(rotations_.back().get() + most * rotated_);
        }
    }

    // Places row `at` of the call at an entry of a sequence.
    void seat(int64_t at, int64_t sequence, int64_t place) {
        slot[at] = chain_.slot[sequence], entry[at] = place, seen[at] = place + 1;
        const int64_t bytes = rotated_ * sizeof(bf16);
        for (int64_t rope = 0; rope < chain_.num_ropes; ++rope) {
            memcpy((bf16*)cosines_[rope] + at * rotated_, chain_.cosines[rope] + place * rotated_, bytes);
            memcpy((bf16*)sines_[rope] + at * rotated_, chain_.sines[rope] + place * rotated_, bytes);
        }
    }

    const bf16* cosines(int64_t rope, int64_t at) const { return cosines_[rope] + at * rotated_; }
    const bf16* sines(int64_t rope, int64_t at) const { return sines_[rope] + at * rotated_; }

    // A call from h to out whose first `writing` rows store keys and values; the caller sets the layers.
    Call call(int64_t rows, int64_t writing) const {
        Call c{};
        c.h = h.get(), c.out = out.get(), c.space = (uint8_t*)(((uintptr_t)space_.get() + 63) / 64 * 64);
        c.slot = slot.data(), c.seen = seen.data(), c.entry = entry.data();
        c.keys = chain_.keys, c.values = chain_.values, c.cosines = cosines_.data(), c.sines = sines_.data();
        c.places = chain_.places;
        c.rows = rows, c.num_write = c.num_feed = writing;
        return c;
    }

    // Allocates working space for a call, unless there is enough already.
    void make_room(const Plan& plan, const Call& largest) {
        const int64_t bytes = vivace_span_bytes(0, &plan, &largest) + 64;  // the same for all bodies for bfloat16
        if (bytes > num_bytes_) space_.reset(new uint8_t[num_bytes_ = bytes]);
    }

    std::unique_ptr<bf16[]> h, out;
    std::vector<int64_t> slot, seen, entry;

private:
    const int64_t rotated_;
    const Chain& chain_;
    std::vector<std::unique_ptr<bf16[]>> rotations_;
    std::vector<const bf16*> cosines_, sines_;
    std::unique_ptr<uint8_t[]> space_;
    int64_t num_bytes_ = 0;
};

}  // namespace

// The rows of native calls that several steps are made of: their residuals, slots, entries and rotations, and the
// working space of a forward pass.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
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
    // Runs the layers of a call, which may have deltas of further layers.
    void span(const Plan& plan, Call call) const {
        while (call.num_deltas > 0 && call.deltas[0].layer < call.start) ++call.deltas, --call.num_deltas;
        while (call.num_deltas > 0 && call.deltas[call.num_deltas - 1].layer >= call.stop) --call.num_deltas;
        vivace_span(index, threads, &plan, &call);
    }
};

// Deltas of two kinds of rows in one list, by layer, those of `first` before those of `then`.
inline std::vector<Delta> merged(const std::vector<Delta>& first, const std::vector<Delta>& then) {
    std::vector<Delta> all;
    std::merge(first.begin(), first.end(), then.begin(), then.end(), std::back_inserter(all),
               [](const Delta& one, const Delta& other) { return one.layer < other.layer; });
    return all;
}

class Rows {
public:
    Rows(const Plan& plan, const Chain& chain, int64_t most, int64_t tail_width = 0)
        : rotated_(plan.rotated), chain_(chain), tail_width_(tail_width) {
        for (int64_t t = 0; t < chain.num_worn; ++t) {
            Delta delta = chain.worn[t];
            const auto known = std::find(adapters_.begin(), adapters_.end(), delta.which);
            const size_t place = known - adapters_.begin();
            if (known == adapters_.end()) adapters_.push_back(delta.which), which_.emplace_back(most, -1);
            delta.which = which_[place].data();  // stays where it is when further vectors are added
            worn.push_back(delta);
        }
        for (auto* rows : {&h, &out}) rows->reset(new bf16[most * plan.width]);
        for (auto* rows : {&slot, &seen, &entry}) rows->resize(most);
        tail.assign(most * tail_width, -1);
        for (int64_t rope = 0; rope < chain.num_ropes; ++rope) {
            rotations_.emplace_back(new bf16[2 * most * rotated_]);
            cosines_.push_back(rotations_.back().get());
            sines_.push_back(rotations_.back().get() + most * rotated_);
        }
    }

    // Places row `at` of the call at an entry of a sequence.
    void seat(int64_t at, int64_t sequence, int64_t place) {
        slot[at] = chain_.slot[sequence], entry[at] = place, seen[at] = place + 1;
        for (size_t a = 0; a < adapters_.size(); ++a) which_[a][at] = adapters_[a][sequence];
        const int64_t bytes = rotated_ * sizeof(bf16);
        for (int64_t rope = 0; rope < chain_.num_ropes; ++rope) {
            memcpy((bf16*)cosines_[rope] + at * rotated_, chain_.cosines[rope] + place * rotated_, bytes);
            memcpy((bf16*)sines_[rope] + at * rotated_, chain_.sines[rope] + place * rotated_, bytes);
        }
    }

    // Lets row `at` be stored at another entry than its place, and read the first `first` entries and those of `path`.
    void branch(int64_t at, int64_t stored, int64_t first, const std::vector<int64_t>& path) {
        entry[at] = stored, seen[at] = first;
        int64_t* own = tail.data() + at * tail_width_;
        std::fill(own, own + tail_width_, (int64_t)-1);
        std::copy(path.begin(), path.end(), own);
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
        c.deltas = worn.data(), c.num_deltas = (int64_t)worn.size();
        c.rows = rows, c.num_write = c.num_feed = writing;
        if (tail_width_ > 0) c.tail = tail.data(), c.tail_width = tail_width_;
        return c;
    }

    // Allocates working space for a call, unless there is enough already.
    void make_room(const Plan& plan, const Call& largest) {
        const int64_t bytes = vivace_span_bytes(0, &plan, &largest) + 64;  // the same for all bodies for bfloat16
        if (bytes > num_bytes_) space_.reset(new uint8_t[num_bytes_ = bytes]);
    }

    std::unique_ptr<bf16[]> h, out;
    std::vector<int64_t> slot, seen, entry, tail;
    std::vector<Delta> worn;  // deltas of the rows' sequences, which every row has, by layer

private:
    const int64_t rotated_;
    const Chain& chain_;
    const int64_t tail_width_;
    std::vector<std::unique_ptr<bf16[]>> rotations_;
    std::vector<const bf16*> cosines_, sines_;
    std::vector<const int64_t*> adapters_;     // of each sequence, for each adapter
    std::vector<std::vector<int64_t>> which_;  // the same of each row
    std::unique_ptr<uint8_t[]> space_;
    int64_t num_bytes_ = 0;
};

}  // namespace

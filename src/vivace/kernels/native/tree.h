// Trees of guesses whose levels are guessed independently (decode/tree.py): the likeliest tokens of each depth, each below
// each token of the depth before.
#pragma once
#include "rows.h"

namespace {

// Where the guesses of a step come from: streams, or heads.
class Levels {
public:
    Levels(const Worker& worker, const Plan& plan, const Chain& chain, const int64_t* widths, int64_t depth)
        : worker_(worker), plan_(plan), chain_(chain), widths_(widths, widths + depth) {
        widest_ = *std::max_element(widths_.begin(), widths_.end());
        tokens_.resize(depth * widest_);
    }

    int64_t depth() const { return (int64_t)widths_.size(); }
    int64_t width(int64_t level) const { return widths_[level]; }
    int64_t token(int64_t level, int64_t place) const { return tokens_[level * widest_ + place]; }

protected:
    // Reads the likeliest tokens of levels first..first+rows-1 from their normed residuals, one row each.
    void read(const Matrix& head, const int64_t* ids, const bf16* x, int64_t first, int64_t rows) {
        int64_t* to = tokens_.data() + first * widest_;
        if (widest_ == 1) {
            worker_.greedy({head, x, nullptr, nullptr, rows}, to);
        } else {
            if (logits_ == nullptr) logits_.reset(new bf16[depth() * head.out]);
            worker_.linear({head, x, nullptr, logits_.get(), rows});
            for (int64_t row = 0; row < rows; ++row)
                likeliest(logits_.get() + row * head.out, head.out, widths_[first + row], to + row * widest_);
        }
        if (ids == nullptr) return;
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t k = 0; k < widths_[first + row]; ++k) to[row * widest_ + k] = ids[to[row * widest_ + k]];
    }

    const Worker& worker_;
    const Plan& plan_;
    const Chain& chain_;

private:
    // Writes the indices of the largest numbers, the largest first and the smallest index of equals.
    static void likeliest(const bf16* logits, int64_t count, int64_t wanted, int64_t* to) {
        std::vector<float> best;
        for (int64_t i = 0; i < count; ++i) {
            const float value = widened(logits[i]);
            if ((int64_t)best.size() == wanted && !(value > best.back())) continue;
            int64_t at = (int64_t)best.size();
            if (at == wanted) --at;
            else best.push_back(value);
            for (; at > 0 && best[at - 1] < value; --at) best[at] = best[at - 1], to[at] = to[at - 1];
            best[at] = value, to[at] = i;
        }
    }

    const std::vector<int64_t> widths_;
    int64_t widest_;
    std::vector<int64_t> tokens_;
    std::unique_ptr<bf16[]> logits_;
};

// The rows of a step: the root, then guesses level by level, parents first.
struct Tree {
    std::vector<int64_t> tokens, parent, depth;
    bool is_chain = true;

    void begin(int64_t root) {
        tokens.assign(1, root), parent.assign(1, -1), depth.assign(1, 0);
        is_chain = true;
    }

    void add(int64_t token, int64_t above) {
        is_chain = is_chain && above == (int64_t)tokens.size() - 1;
        tokens.push_back(token), parent.push_back(above), depth.push_back(depth[above] + 1);
    }

    // Adds every path through the levels, at most `limit` deep and none below an end-of-text token.
    void grow(const Levels& levels, int64_t limit, const Chain& chain) {
        int64_t first = 0;
        for (int64_t level = 0; level < std::min(limit, levels.depth()); ++level) {
            const int64_t stop = (int64_t)tokens.size();
            for (int64_t above = first; above < stop; ++above)
                for (int64_t k = 0; k < levels.width(level) && (above == 0 || !is_end(chain, tokens[above])); ++k)
                    add(levels.token(level, k), above);
            first = stop;
        }
    }

    int64_t size() const { return (int64_t)tokens.size(); }

    // Entries of the rows from the root to a row, if row i is stored at first + i.
    std::vector<int64_t> path(int64_t row, int64_t first) const {
        std::vector<int64_t> rows(depth[row] + 1);
        for (; row >= 0; row = parent[row]) rows[depth[row]] = first + row;
        return rows;
    }
};

// Moves the entries of kept rows, which are at `first` + path[i], one behind the other, in every layer.
inline void compact(const Plan& plan, const Chain& chain, int64_t first, const std::vector<int64_t>& path) {
    for (int64_t layer = 0; layer < plan.num_layers; ++layer) {
        const Places& places = chain.places[layer];
        const int64_t slot = chain.slot[0], shift = places.shift(slot);
        const int64_t bytes = plan.head_width * (places.key_scales == nullptr ? sizeof(bf16) : sizeof(int8_t));
        const auto move = [&](const void* stored, int64_t size, int64_t to, int64_t from) {
            memcpy((uint8_t*)stored + to * size, (const uint8_t*)stored + from * size, size);
        };
        for (int64_t i = 0; i < (int64_t)path.size(); ++i) {
            if (path[i] == i) continue;
            for (int64_t kv = 0; kv < plan.kv_heads; ++kv) {
                const int64_t from = kv * places.capacity + places.of(slot, first + path[i] - shift);
                const int64_t to = kv * places.capacity + places.of(slot, first + i - shift);
                move(chain.keys[layer], bytes, to, from), move(chain.values[layer], bytes, to, from);
                if (places.key_scales == nullptr) continue;
                move(places.key_scales, sizeof(EntryScale), to, from);
                move(places.value_scales, sizeof(EntryScale), to, from);
            }
        }
    }
}

}  // namespace

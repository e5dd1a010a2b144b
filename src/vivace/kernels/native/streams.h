// Stream rows that start from the last kept row (`attach: kept` in methods/multistream/drafter.py), for one sequence.
#pragma once
#include <cmath>

#include "rows.h"

namespace {

class StreamRun {
public:
    // `rows` are shared with the caller; each draft overwrites them.
    StreamRun(const Worker& worker, const Plan& plan, const Chain& chain, Streams& streams, Rows& rows, int64_t most)
        : worker_(worker), plan_(plan), chain_(chain), streams_(streams), rows_(rows), final_(streams.final),
          which_(most) {
        deltas_.assign(streams.deltas, streams.deltas + streams.num_deltas);
        for (Delta& delta : deltas_) delta.which = which_.data();
        deltas_ = merged(rows.worn, deltas_);
        x_.reset(new bf16[most * plan.width]);
        known_.reset(new bf16[2 * plan.width]);
        if (streams.has_feedback) offsets_.reset(new bf16[streams.feedback.out]);
        rows.make_room(*streams.plan, call(most));
    }

    // Writes at most `limit` guesses below the root, none below an end-of-text token; returns how many.
    int64_t guess(int64_t root, int64_t length, int64_t limit, int64_t* tokens) {
        const int64_t count = std::min(limit, streams_.count);
        if (count == 0) return 0;
        if (streams_.has_feedback) set_offsets(root, length);
        const float unit = size();
        for (int64_t row = 0; row < count; ++row) start(row, unit), rows_.seat(row, 0, length + row);
        worker_.span(*streams_.plan, call(count));
        worker_.norm(plan_, chain_.final_norm, rows_.out.get(), x_.get(), count);
        worker_.greedy({streams_.head, x_.get(), nullptr, nullptr, count}, tokens);
        if (streams_.ids != nullptr)
            for (int64_t row = 0; row < count; ++row) tokens[row] = streams_.ids[tokens[row]];
        for (int64_t row = 0; row + 1 < count; ++row)
            if (is_end(chain_, tokens[row])) return row + 1;
        return count;
    }

    // Sets the last kept row's residual where stream rows start, and after all layers.
    void follow(const bf16* entering, const bf16* final) {
        memcpy(streams_.entering, entering, plan_.width * sizeof(bf16));
        final_ = final;
    }

private:
    // Computes the offsets of the stream rows from the kept row's final residual and the root's embedding, both normed.
    void set_offsets(int64_t root, int64_t place) {
        const int64_t width = plan_.width;
        bf16 *known = known_.get(), *decided = rows_.out.get();
        embed_row(chain_, root, place, width, decided);
        worker_.norm(plan_, chain_.final_norm, final_, known, 1);
        const Norm even{decided, {streams_.ones, nullptr}, known + width, 1, width, streams_.embedding_eps, 0};
        worker_.body.norm(&even, 0, 0);
        worker_.linear({streams_.feedback, known, nullptr, offsets_.get(), 1});
    }

    // Root mean square of the residual that stream rows start from, which scales their offsets.
    float size() const {
        float sum = 0;
        for (int64_t e = 0; e < plan_.width; ++e) sum += widened(streams_.entering[e]) * widened(streams_.entering[e]);
        return widened(narrowed(std::sqrt(sum / (float)plan_.width)));
    }

    void start(int64_t row, float unit) {
        const int64_t width = plan_.width;
        bf16* h = rows_.h.get() + row * width;
        memcpy(h, streams_.entering, width * sizeof(bf16));
        if (streams_.embeddings != nullptr)
            for (int64_t e = 0; e < width; ++e)
                h[e] = narrowed(widened(h[e]) + widened(streams_.embeddings[row * width + e]));
        if (!streams_.has_feedback) return;
        for (int64_t e = 0; e < width; ++e) {
            const bf16 offset = narrowed(widened(offsets_[row * width + e]) * unit);
            h[e] = narrowed(widened(h[e]) + widened(offset));
        }
    }

    Call call(int64_t rows) const {
        Call c = rows_.call(rows, rows);
        c.start = streams_.insertion_layer, c.stop = plan_.num_layers;
        c.deltas = deltas_.data(), c.num_deltas = (int64_t)deltas_.size();
        return c;
    }

    const Worker& worker_;
    const Plan& plan_;
    const Chain& chain_;
    Streams& streams_;
    Rows& rows_;
    const bf16* final_;
    std::vector<Delta> deltas_;
    std::vector<int64_t> which_;  // zeros: the deltas apply to all rows
    std::unique_ptr<bf16[]> x_, known_, offsets_;
};

}  // namespace

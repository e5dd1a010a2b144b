// Stream rows, for one sequence (methods/multistream). They follow the last kept row through the upper layers
// (`attach: kept`), or ride beside every row while it is verified (`attach: every`).
#pragma once
#include <cmath>
#include <optional>

#include "tree.h"

namespace {

class StreamRun : public Levels {
public:
    // `rows` are shared with the caller; streams that follow overwrite them, streams that ride stand behind its rows.
    StreamRun(const Worker& worker, const Plan& plan, const Chain& chain, Streams& streams, const int64_t* widths,
              Rows& rows, int64_t most)
        : Levels(worker, plan, chain, widths, streams.count), streams_(streams), rows_(rows), final_(streams.final),
          which_(most * (streams.count + 1)) {
        if (streams.rides && streams.runs_behind) own_.emplace(plan, chain, most * streams.count, streams.count + most);
        deltas_.assign(streams.deltas, streams.deltas + streams.num_deltas);
        for (Delta& delta : deltas_) delta.which = which_.data();
        deltas_ = merged(behind().worn, deltas_);
        const int64_t many = streams.rides ? most : 1;
        x_.reset(new bf16[std::max(many, streams.count) * plan.width]);
        known_.reset(new bf16[2 * many * plan.width]);
        early_.reset(new bf16[many * plan.width]);
        if (streams.has_feedback) offsets_.reset(new bf16[many * streams.feedback.out]);
        if (streams.has_feedback && streams.rides)
            low_.reset(new bf16[many * streams.pruner_down.out]), expected_.resize(many);
        if (own_) own_->make_room(*streams.plan, call(*own_, most * streams.count));
        else rows.make_room(*streams.plan, call(rows, streams.rides ? most * (streams.count + 1) : streams.count));
    }

    bool rides() const { return streams_.rides; }

    // Guesses what follows the root; `place` is the root's position.
    void guess(int64_t root, int64_t place) {
        const bf16* left = streams_.left;
        const int64_t count = streams_.count;
        if (!rides()) {
            if (streams_.has_feedback) feed(root, place);
            start(streams_.entering, 0, rows_.h.get());
            std::fill(which_.begin(), which_.end(), 0);
            for (int64_t row = 0; row < count; ++row) rows_.seat(row, 0, place + row), rows_.branch(row, place + row, place + row + 1, {});
            worker_.span(*streams_.plan, call(rows_, count));
            left = rows_.out.get();
        }
        worker_.norm(plan_, chain_.final_norm, left, x_.get(), count);
        read(streams_.head, streams_.ids, x_.get(), 0, count);
    }

    // Runs the rows of a tree, which stand in h at the insertion layer, through the upper layers with their streams.
    void ride(const Tree& tree, int64_t length) {
        const int64_t rows = tree.size(), count = streams_.count, width = plan_.width;
        Rows& to = behind();
        const int64_t first = own_ ? 0 : rows;
        if (streams_.has_feedback) expect(tree, length);
        std::fill(which_.begin(), which_.begin() + first, (int64_t)-1);
        std::fill(which_.begin() + first, which_.begin() + first + rows * count, (int64_t)0);
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t free = length + rows + row * count, at = first + row * count;
            start(rows_.h.get() + row * width, row, to.h.get() + at * width);
            std::vector<int64_t> path = tree.is_chain ? std::vector<int64_t>() : tree.path(row, length);
            const int64_t seen = tree.is_chain ? length + row + 1 : length;
            for (int64_t j = 0; j < count; ++j) {
                path.push_back(free + j);
                to.seat(at + j, 0, length + tree.depth[row] + 1 + j);
                to.branch(at + j, free + j, seen, path);
            }
        }
        if (!own_) return worker_.span(*streams_.plan, call(rows_, rows * (count + 1)));
        Call main = rows_.call(rows, rows);
        main.start = streams_.insertion_layer, main.stop = plan_.num_layers;
        worker_.span(plan_, main);
        worker_.span(*streams_.plan, call(*own_, rows * count));
    }

    // Sets the last kept row, one of the `rows` of the pass: where its streams start and end, and its final residual.
    void follow(int64_t row, int64_t rows, const bf16* final) {
        const int64_t width = plan_.width, count = streams_.count;
        memcpy(streams_.entering, rows_.h.get() + row * width, width * sizeof(bf16));
        final_ = final;
        if (!rides()) return;
        const bf16* left = behind().out.get() + ((own_ ? 0 : rows) + row * count) * width;
        memcpy(streams_.left, left, count * width * sizeof(bf16));
    }

private:
    // The rows that streams stand in.
    Rows& behind() { return own_ ? *own_ : rows_; }

    // Computes offsets from the kept row's final residual and the root's embedding, both normed.
    void feed(int64_t root, int64_t place) {
        worker_.norm(plan_, chain_.final_norm, final_, known_.get(), 1);
        know(0, root, place);
        worker_.linear({streams_.feedback, known_.get(), nullptr, offsets_.get(), 1});
    }

    // Computes offsets of the streams of every row from the early exit where they start and its likeliest token.
    void expect(const Tree& tree, int64_t length) {
        const int64_t rows = tree.size(), width = plan_.width;
        const bf16* h = rows_.h.get();
        worker_.linear({streams_.pruner_down, h, nullptr, low_.get(), rows});
        worker_.linear({streams_.pruner_up, low_.get(), h, early_.get(), rows});
        worker_.norm(plan_, chain_.final_norm, early_.get(), x_.get(), rows);
        worker_.greedy({streams_.exit_head, x_.get(), nullptr, nullptr, rows}, expected_.data());
        for (int64_t row = 0; row < rows; ++row) {
            memcpy(known_.get() + 2 * row * width, x_.get() + row * width, width * sizeof(bf16));
            know(row, expected_[row], length + tree.depth[row] + 1);
        }
        worker_.linear({streams_.feedback, known_.get(), nullptr, offsets_.get(), rows});
    }

    // Writes the normed embedding of a token behind what else is known at a row.
    void know(int64_t row, int64_t token, int64_t place) {
        const int64_t width = plan_.width;
        bf16* decided = early_.get() + row * width;
        embed_row(chain_, token, place, width, decided);
        const Norm even{decided, {streams_.ones, nullptr}, known_.get() + (2 * row + 1) * width, 1, width,
                        streams_.embedding_eps, 0};
        worker_.body.norm(&even, 0, 0);
    }

    // Root mean square of the residual that stream rows start from, which scales their offsets.
    float size(const bf16* from) const {
        float sum = 0;
        for (int64_t e = 0; e < plan_.width; ++e) sum += widened(from[e]) * widened(from[e]);
        return widened(narrowed(std::sqrt(sum / (float)plan_.width)));
    }

    // Writes where the streams of a row start, given its residual and its place among the offsets.
    void start(const bf16* from, int64_t row, bf16* to) {
        const int64_t width = plan_.width;
        const float unit = size(from);
        for (int64_t j = 0; j < streams_.count; ++j) {
            bf16* h = to + j * width;
            memcpy(h, from, width * sizeof(bf16));
            if (streams_.embeddings != nullptr)
                for (int64_t e = 0; e < width; ++e)
                    h[e] = narrowed(widened(h[e]) + widened(streams_.embeddings[j * width + e]));
            if (!streams_.has_feedback) continue;
            const bf16* offsets = offsets_.get() + row * streams_.feedback.out + j * width;
            for (int64_t e = 0; e < width; ++e) {
                const bf16 offset = narrowed(widened(offsets[e]) * unit);
                h[e] = narrowed(widened(h[e]) + widened(offset));
            }
        }
    }

    Call call(const Rows& of, int64_t rows) const {
        Call c = of.call(rows, rows);
        c.start = streams_.insertion_layer, c.stop = plan_.num_layers;
        c.deltas = deltas_.data(), c.num_deltas = (int64_t)deltas_.size();
        return c;
    }

    Streams& streams_;
    Rows& rows_;
    std::optional<Rows> own_;  // of streams that read other weights than the rows beside which they ride
    const bf16* final_;
    std::vector<Delta> deltas_;
    std::vector<int64_t> which_, expected_;  // which_: 0 for rows that the deltas apply to, else -1
    std::unique_ptr<bf16[]> x_, known_, early_, low_, offsets_;
};

}  // namespace

// Several steps of self-speculation in one call, for one greedy sequence: draft tokens below the root with a chain or
// with stream rows, verify all rows with the whole model, keep the rows on the path that the model takes itself, and
// continue from its end. decode/session.py does the same step by step; decode/verify.py proves that the text is plain
// decoding's.
#pragma once
#include <chrono>
#include <optional>

#include "chain.h"
#include "streams.h"

namespace {

class SpeculationRun {
public:
    SpeculationRun(const Worker& worker, const Plan& drafting, const Plan& plan, const Chain& chain,
                   Speculation& speculation)
        : worker_(worker), drafting_(drafting), plan_(plan), chain_(chain), given_(chain), into_(speculation),
          rows_(plan, chain, chain.limit[0] + 1) {
        const int64_t most = chain.limit[0] + 1;
        x_.reset(new bf16[most * plan.width]);
        for (auto* rows : {&tokens_, &slots_, &nodes_, &parents_, &chosen_}) rows->resize(most);
        logits_.resize(most);
        if (into_.has_feedback) offsets_.reset(new bf16[into_.feedback.out]);
        rows_.make_room(plan, call(0, plan.num_layers, most));
        given_.tokens = tokens_.data(), given_.slots = slots_.data();
        given_.nodes = nodes_.data(), given_.parents = parents_.data();
        given_.hidden = chain.hidden == nullptr ? nullptr : rows_.h.get();
        given_.root = &root_, given_.length = &length_, given_.limit = &limit_;
        if (speculation.streams != nullptr)
            streams_.emplace(worker_, plan, chain_, *speculation.streams, rows_, most);
    }

    int64_t run() {
        root_ = chain_.root[0], length_ = chain_.length[0];
        int64_t step = 0, done = 0;
        for (; step < into_.steps && done < into_.room && !(step > 0 && is_end(chain_, root_)); ++step) {
            limit_ = std::min(chain_.limit[0], into_.room - done - 1);
            const int64_t rows = draft();
            const int64_t kept = verify(rows, done);
            into_.kept[step] = kept, into_.guessed[step] = rows - 1;
            done += kept, length_ += kept, root_ = chosen_[kept - 1];
            if (is_end(chain_, tokens_[kept - 1]) || !is_certain(chain_, logits_[kept - 1])) return step + 1;
            if (into_.has_feedback) set_offsets(into_.hidden + (done - 1) * plan_.width);
        }
        return step;
    }

private:
    // Drafts below the root; returns the number of rows, the root's included.
    int64_t draft() {
        const auto started = std::chrono::steady_clock::now();
        int64_t rows;
        if (streams_) {
            tokens_[0] = root_;
            rows = 1 + streams_->guess(root_, length_, limit_, tokens_.data() + 1);
        } else {
            rows = ChainRun(worker_, drafting_, given_).run();
        }
        into_.draft_ns += (std::chrono::steady_clock::now() - started) / std::chrono::nanoseconds(1);
        return rows;
    }

    // Runs the rows through the remaining layers (all of them, or those above the exit layer where the chain left its
    // residuals) and keeps those whose token the model chose; returns how many are kept.
    int64_t verify(int64_t rows, int64_t done) {
        const int64_t width = plan_.width;
        const bool is_handed = !streams_ && given_.hidden != nullptr;
        for (int64_t row = 0; row < rows; ++row) {
            if (!is_handed) embed_row(chain_, tokens_[row], length_ + row, width, rows_.h.get() + row * width);
            rows_.seat(row, 0, length_ + row);
        }
        int64_t start = is_handed ? chain_.exit_layer : 0;
        if (streams_) {  // the next streams start where they are inserted
            start = into_.streams->insertion_layer;
            worker_.span(plan_, call(0, start, rows));
            std::swap(rows_.h, rows_.out);
        }
        worker_.span(plan_, call(start, plan_.num_layers, rows));
        worker_.norm(plan_, chain_.final_norm, rows_.out.get(), x_.get(), rows);
        worker_.greedy({into_.head, x_.get(), nullptr, nullptr, rows}, chosen_.data(), logits_.data());
        int64_t kept = 1;
        while (kept < rows && tokens_[kept] == chosen_[kept - 1] && is_certain(chain_, logits_[kept - 1])) ++kept;
        memcpy(into_.tokens + done, tokens_.data(), kept * sizeof(int64_t));
        memcpy(into_.hidden + done * width, rows_.out.get(), kept * width * sizeof(bf16));
        if (streams_) streams_->follow(rows_.h.get() + (kept - 1) * width, into_.hidden + (done + kept - 1) * width);
        return kept;
    }

    // Computes the offsets of the next chain's draft rows from the last kept row's residual.
    void set_offsets(const bf16* last) {
        worker_.norm(plan_, chain_.final_norm, last, x_.get(), 1);
        worker_.linear({into_.feedback, x_.get(), nullptr, offsets_.get(), 1});
        given_.offsets = offsets_.get(), given_.num_offsets = into_.feedback.out / plan_.width;
    }

    Call call(int64_t start, int64_t stop, int64_t rows) const {
        Call c = rows_.call(rows, rows);
        c.start = start, c.stop = stop;
        return c;
    }

    const Worker& worker_;
    const Plan &drafting_, &plan_;
    const Chain& chain_;
    Chain given_;  // the chain of the current step
    Speculation& into_;
    Rows rows_;
    std::optional<StreamRun> streams_;
    int64_t root_ = 0, length_ = 0, limit_ = 0;
    std::unique_ptr<bf16[]> x_, offsets_;
    std::vector<int64_t> tokens_, slots_, nodes_, parents_, chosen_;
    std::vector<float> logits_;  // of the chosen tokens, before capping
};

}  // namespace

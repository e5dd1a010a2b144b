// Several steps of self-speculation in one call, for one sequence: draft tokens below the root with a chain, with
// stream rows or with heads, verify all rows with the whole model, keep the rows on the path that the model takes itself,
// and continue from its end. decode/session.py does the same step by step; decode/verify.py proves that the text is plain
// decoding's.
#pragma once
#include <chrono>
#include <optional>

#include "chain.h"
#include "heads.h"
#include "streams.h"

namespace {

class SpeculationRun {
public:
    SpeculationRun(const Worker& worker, const Plan& drafting, const Plan& plan, const Chain& chain,
                   Speculation& speculation)
        : worker_(worker), drafting_(drafting), plan_(plan), chain_(chain), given_(chain), into_(speculation),
          rows_(plan, chain, (1 + riding()) * (speculation.most + 1), tail_width()) {
        const int64_t most = into_.most + 1;
        x_.reset(new bf16[most * plan.width]);
        for (auto* rows : {&tokens_, &slots_, &nodes_, &parents_, &chosen_}) rows->resize(most);
        logits_.resize(most);
        if (chain.drawings != nullptr) {
            draws_.emplace(worker.body, chain.drawings[0]);
            scores_.reset(new bf16[most * into_.head.out]);
        }
        if (into_.has_feedback) offsets_.reset(new bf16[into_.feedback.out]);
        rows_.make_room(plan, call(0, plan.num_layers, most));
        given_.tokens = tokens_.data(), given_.slots = slots_.data();
        given_.nodes = nodes_.data(), given_.parents = parents_.data();
        given_.hidden = chain.hidden == nullptr ? nullptr : rows_.h.get();
        given_.root = &root_, given_.length = &length_, given_.limit = &limit_;
        if (into_.streams != nullptr) streams_.emplace(worker_, plan, chain_, *into_.streams, into_.widths, rows_, most);
        if (into_.heads != nullptr) heads_.emplace(worker_, plan, chain_, *into_.heads, into_.widths);
    }

    int64_t run() {
        root_ = chain_.root[0], length_ = chain_.length[0];
        int64_t step = 0, done = 0;
        for (; step < into_.steps && done < into_.room && !(step > 0 && is_end(chain_, root_)); ++step) {
            limit_ = std::min(chain_.limit[0], into_.room - done - 1);
            draft();
            const std::vector<int64_t> path = verify(done);
            const int64_t kept = (int64_t)path.size(), last = path.back();
            into_.kept[step] = kept, into_.guessed[step] = tree_.size() - 1;
            std::copy(tree_.depth.begin() + 1, tree_.depth.end(), into_.depths + step * into_.most);
            done += kept, length_ += kept, root_ = chosen_[last];
            if (root_ < 0 || is_end(chain_, tree_.tokens[last]) || !is_certain(chain_, logits_[last])) return step + 1;
            if (into_.has_feedback) set_offsets(into_.hidden + (done - 1) * plan_.width);
        }
        return step;
    }

private:
    int64_t riding() const { return into_.streams != nullptr && into_.streams->rides ? into_.streams->count : 0; }

    // Entries that a row reads one by one: the path above it, where a tree has several, and a stream's own.
    int64_t tail_width() const {
        const bool is_tree = into_.widths != nullptr && into_.most > chain_.limit[0];
        return is_tree ? chain_.limit[0] + 1 + riding() : riding();
    }

    // Drafts the tree below the root.
    void draft() {
        const auto started = std::chrono::steady_clock::now();
        tree_.begin(root_);
        if (streams_ && limit_ > 0) {
            streams_->guess(root_, length_);
            tree_.grow(*streams_, limit_, chain_);
        } else if (heads_) {
            heads_->guess();
            tree_.grow(*heads_, limit_, chain_);
        } else if (!streams_) {
            const int64_t rows = ChainRun(worker_, drafting_, given_).run();
            for (int64_t row = 1; row < rows; ++row) tree_.add(tokens_[row], row - 1);
        }
        into_.draft_ns += (std::chrono::steady_clock::now() - started) / std::chrono::nanoseconds(1);
    }

    // Seats the rows of the tree and writes what enters the first layer, unless a chain has left its residuals.
    void seat(bool is_handed) {
        for (int64_t row = 0; row < tree_.size(); ++row) {
            const int64_t place = length_ + tree_.depth[row];
            if (!is_handed) embed_row(chain_, tree_.tokens[row], place, plan_.width, rows_.h.get() + row * plan_.width);
            rows_.seat(row, 0, place);
            if (!tree_.is_chain) rows_.branch(row, length_ + row, length_, tree_.path(row, length_));
            else if (tail_width() > 0) rows_.branch(row, place, place + 1, {});
        }
    }

    // Runs the rows through the remaining layers (all of them, or those above the exit layer where the chain left its
    // residuals) and returns those whose token the model chose, from the root on.
    std::vector<int64_t> verify(int64_t done) {
        const int64_t width = plan_.width, rows = tree_.size();
        const bool is_handed = !streams_ && !heads_ && given_.hidden != nullptr;
        seat(is_handed);
        int64_t start = is_handed ? chain_.exit_layer : 0;
        if (streams_) {  // the next streams start where they are inserted
            start = into_.streams->insertion_layer;
            worker_.span(plan_, call(0, start, rows));
            std::swap(rows_.h, rows_.out);
        }
        if (streams_ && streams_->rides()) streams_->ride(tree_, length_);
        else worker_.span(plan_, call(start, plan_.num_layers, rows));
        worker_.norm(plan_, chain_.final_norm, rows_.out.get(), x_.get(), rows);
        if (draws_) worker_.linear({into_.head, x_.get(), nullptr, scores_.get(), rows});
        else worker_.greedy({into_.head, x_.get(), nullptr, nullptr, rows}, chosen_.data(), logits_.data());
        const std::vector<int64_t> path = accepted();
        const int64_t kept = (int64_t)path.size();
        for (int64_t i = 0; i < kept; ++i) {
            into_.tokens[done + i] = tree_.tokens[path[i]];
            memcpy(into_.hidden + (done + i) * width, rows_.out.get() + path[i] * width, width * sizeof(bf16));
        }
        if (!tree_.is_chain) compact(plan_, chain_, length_, path);
        const bf16* final = into_.hidden + (done + kept - 1) * width;
        if (streams_) streams_->follow(path.back(), rows, final);
        if (heads_) heads_->follow(final);
        return path;
    }

    // Chooses the token after a row of the path, where it is drawn; tokens after other rows are never asked for.
    void choose(int64_t row) {
        if (!draws_) return;
        const int64_t position = length_ + tree_.depth[row] + 1;
        chosen_[row] = draws_->draw(scores_.get() + row * into_.head.out, false, into_.head.out, nullptr, position).index;
    }

    // The rows from the root down, each the model's choice after the one above.
    std::vector<int64_t> accepted() {
        std::vector<int64_t> path{0};
        choose(0);
        for (int64_t row = 1; row < tree_.size(); ++row) {  // parents stand before their children, level by level
            const int64_t last = path.back();
            if (tree_.parent[row] == last && tree_.tokens[row] == chosen_[last] && is_certain(chain_, logits_[last])) {
                path.push_back(row);
                choose(row);
            }
        }
        return path;
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
    std::optional<HeadRun> heads_;
    std::optional<Draws> draws_;  // where tokens are drawn
    std::unique_ptr<bf16[]> scores_;  // logits of the rows, where tokens are drawn
    Tree tree_;
    int64_t root_ = 0, length_ = 0, limit_ = 0;
    std::unique_ptr<bf16[]> x_, offsets_;
    std::vector<int64_t> tokens_, slots_, nodes_, parents_, chosen_;
    std::vector<float> logits_;  // of the chosen tokens, before capping
};

}  // namespace

// Self-speculation without a way back to the caller: guesses below the root by a chain or by streams, all of the rows
// through the model, the path that the model takes itself, and again from where that ends. What decode/session.py does
// step by step for one greedy sequence (decode/verify.py says why the text is plain decoding's).
#pragma once
#include <chrono>
#include <cmath>

#include "chain.h"

namespace {

class SpeculationRun {
public:
    SpeculationRun(const Body& body, int64_t index, int64_t threads, const Plan& drafting, const Plan& plan,
                   const Chain& chain, Speculation& speculation)
        : body_(body), index_(index), threads_(threads), drafting_(drafting), plan_(plan), chain_(chain),
          given_(chain), into_(speculation), streams_(speculation.streams), most_(chain.limit[0] + 1) {
        for (auto* rows : {&h_, &out_, &x_}) rows->reset(new bf16[most_ * plan.width]);
        for (auto* rows : {&tokens_, &slots_, &nodes_, &parents_, &seen_, &entry_, &chosen_}) rows->resize(most_);
        for (int64_t rope = 0; rope < chain.num_ropes; ++rope) {
            rotations_.emplace_back(new bf16[2 * most_ * plan.rotated]);
            cosines_.push_back(rotations_.back().get());
            sines_.push_back(rotations_.back().get() + most_ * plan.rotated);
        }
        if (into_.has_feedback) offsets_.reset(new bf16[into_.feedback.out]);
        const Call largest = call(most_);
        space_.reset(new uint8_t[vivace_span_bytes(&plan, &largest) + 64]);
        given_.tokens = tokens_.data(), given_.slots = slots_.data();
        given_.nodes = nodes_.data(), given_.parents = parents_.data();
        given_.hidden = chain.hidden == nullptr ? nullptr : h_.get();
        given_.root = &root_, given_.length = &length_, given_.limit = &limit_;
        if (streams_ == nullptr) return;
        terms_.assign(streams_->terms, streams_->terms + streams_->num_terms);
        every_.resize(most_);
        for (Term& term : terms_) term.which = every_.data();
        known_.reset(new bf16[2 * plan.width]), final_ = streams_->final;
        if (streams_->has_feedback) offsets_.reset(new bf16[streams_->feedback.out]);
        Call streaming = call(most_);
        streaming.terms = terms_.data(), streaming.num_terms = streams_->num_terms, streaming.start = streams_->insertion;
        space_.reset(new uint8_t[std::max(vivace_span_bytes(&plan, &largest),
                                          vivace_span_bytes(streams_->plan, &streaming)) + 64]);
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
            if (is_end(chain_, tokens_[kept - 1])) return step + 1;
            if (into_.has_feedback) tell(into_.hidden + (done - 1) * plan_.width);
        }
        return step;
    }

private:
    int64_t draft() {
        const auto started = std::chrono::steady_clock::now();
        const int64_t rows =
            streams_ != nullptr ? follow() : ChainRun(body_, index_, threads_, drafting_, given_).run();
        into_.draft_ns += (std::chrono::steady_clock::now() - started) / std::chrono::nanoseconds(1);
        return rows;
    }

    // Streams of the last kept row guess what follows the root; returns how many rows the draft has.
    int64_t follow() {
        const int64_t width = plan_.width, count = std::min(limit_, streams_->count);
        tokens_[0] = root_;
        std::fill(slots_.begin(), slots_.end(), chain_.slot[0]);
        if (count == 0) return 1;
        const bf16* entering = streams_->entering;
        float size = 0;
        for (int64_t e = 0; e < width; ++e) size += widened(entering[e]) * widened(entering[e]);
        size = widened(narrowed(std::sqrt(size / (float)width)));
        if (streams_->has_feedback) {
            bf16 *known = known_.get(), *decided = out_.get();
            embed_row(chain_, root_, width, decided);
            const Norm told{final_, chain_.final_norm, known, 1, width, plan_.norm_eps, plan_.norm_offset};
            const Norm even{decided, streams_->ones, known + width, 1, width, streams_->mark_eps, 0};
            body_.norm(&told, 0, 0), body_.norm(&even, 0, 0);
            const Linear feedback{streams_->feedback, known, nullptr, offsets_.get(), 1};
            vivace_linear(index_, threads_, &feedback);
        }
        for (int64_t row = 0; row < count; ++row) {
            bf16* h = h_.get() + row * width;
            for (int64_t e = 0; e < width; ++e) {
                bf16 start = entering[e];
                if (streams_->marks != nullptr)
                    start = narrowed(widened(start) + widened(streams_->marks[row * width + e]));
                if (streams_->has_feedback) {
                    const bf16 offset = narrowed(widened(offsets_[row * width + e]) * size);
                    start = narrowed(widened(start) + widened(offset));
                }
                h[e] = start;
            }
        }
        seat(count);
        Call c = call(count);
        c.start = streams_->insertion, c.terms = terms_.data(), c.num_terms = streams_->num_terms;
        vivace_span(index_, threads_, streams_->plan, &c);
        norm(out_.get(), count);
        const Linear head{into_.head, x_.get(), nullptr, nullptr, count};
        vivace_greedy(index_, threads_, &head, tokens_.data() + 1);
        for (int64_t row = 1; row < count; ++row)
            if (is_end(chain_, tokens_[row])) return row + 1;
        return count + 1;
    }

    // Rows at the entries behind what is stored, one after the other.
    void seat(int64_t rows) {
        for (int64_t row = 0; row < rows; ++row) {
            entry_[row] = length_ + row, seen_[row] = entry_[row] + 1;
            for (int64_t rope = 0; rope < chain_.num_ropes; ++rope) {
                const int64_t size = plan_.rotated, bytes = size * sizeof(bf16);
                memcpy((bf16*)cosines_[rope] + row * size, chain_.cosines[rope] + entry_[row] * size, bytes);
                memcpy((bf16*)sines_[rope] + row * size, chain_.sines[rope] + entry_[row] * size, bytes);
            }
        }
    }

    // Rows to the top, from the gate on where the chain handed over what it computed; returns how many are kept.
    int64_t verify(int64_t rows, int64_t done) {
        const int64_t width = plan_.width;
        const bool is_handed = streams_ == nullptr && given_.hidden != nullptr;
        for (int64_t row = 0; row < rows && !is_handed; ++row)
            embed_row(chain_, tokens_[row], width, h_.get() + row * width);
        seat(rows);
        Call c = call(rows);
        if (streams_ != nullptr) {  // the next streams start where they are inserted
            c.stop = streams_->insertion;
            vivace_span(index_, threads_, &plan_, &c);
            std::swap(h_, out_);
            c = call(rows);
        }
        c.start = streams_ != nullptr ? streams_->insertion : is_handed ? chain_.gate : 0;
        vivace_span(index_, threads_, &plan_, &c);
        norm(out_.get(), rows);
        const Linear head{into_.head, x_.get(), nullptr, nullptr, rows};
        vivace_greedy(index_, threads_, &head, chosen_.data());
        int64_t kept = 1;
        while (kept < rows && tokens_[kept] == chosen_[kept - 1]) ++kept;
        memcpy(into_.tokens + done, tokens_.data(), kept * sizeof(int64_t));
        memcpy(into_.hidden + done * width, out_.get(), kept * width * sizeof(bf16));
        if (streams_ != nullptr) {
            memcpy(streams_->entering, h_.get() + (kept - 1) * width, width * sizeof(bf16));
            final_ = into_.hidden + (done + kept - 1) * width;
        }
        return kept;
    }

    // What the next chain's companions start from.
    void tell(const bf16* last) {
        norm(last, 1);
        const Linear feedback{into_.feedback, x_.get(), nullptr, offsets_.get(), 1};
        vivace_linear(index_, threads_, &feedback);
        given_.offsets = offsets_.get(), given_.num_offsets = into_.feedback.out / plan_.width;
    }

    void norm(const bf16* rows, int64_t count) {
        const Norm all{rows, chain_.final_norm, x_.get(), count, plan_.width, plan_.norm_eps, plan_.norm_offset};
        for (int64_t row = 0; row < count; ++row) body_.norm(&all, 0, row);
    }

    Call call(int64_t rows) const {
        Call c{};
        c.h = h_.get(), c.out = out_.get(), c.space = (uint8_t*)(((uintptr_t)space_.get() + 63) / 64 * 64);
        c.slot = slots_.data(), c.seen = seen_.data(), c.entry = entry_.data();
        c.keys = chain_.keys, c.values = chain_.values, c.cosines = cosines_.data(), c.sines = sines_.data();
        c.stop = plan_.num_layers, c.capacity = chain_.capacity;
        c.rows = c.num_write = c.num_feed = rows;
        return c;
    }

    const Body& body_;
    const int64_t index_, threads_;
    const Plan &drafting_, &plan_;
    const Chain& chain_;
    Chain given_;  // of the step
    Speculation& into_;
    Streams* streams_;
    const int64_t most_;
    int64_t root_ = 0, length_ = 0, limit_ = 0;
    std::unique_ptr<bf16[]> h_, out_, x_, offsets_, known_;
    const bf16* final_ = nullptr;
    std::vector<Term> terms_;
    std::vector<int64_t> every_;  // zeros: the terms of streams are for all of their rows
    std::unique_ptr<uint8_t[]> space_;
    std::vector<int64_t> tokens_, slots_, nodes_, parents_, seen_, entry_, chosen_;
    std::vector<std::unique_ptr<bf16[]>> rotations_;
    std::vector<const bf16*> cosines_, sines_;
};

}  // namespace

// A chain of drafts: what decode/shallow.py does depth by depth, for all depths and sequences in one call.
//
// At each depth the rows of the last guesses go up to the gate, writing keys and values; behind those that guess
// again rides a companion that reads. Before each of the first layers it may also read what a deep layer stored about
// the verified entries. The companion's residual at the gate, scaled, is read by the model's head. Without companions
// the rows' own residuals are read: with the gate at the top that is plain decoding, several tokens in one call.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "embed.h"
#include "span.h"

EXPORT int64_t vivace_span_bytes(const Plan*, const Call*);
EXPORT void vivace_span(int64_t body, int64_t threads, const Plan*, const Call*);
EXPORT void vivace_greedy(int64_t body, int64_t threads, const Linear*, int64_t* tokens);
EXPORT void vivace_linear(int64_t body, int64_t threads, const Linear*);
EXPORT void vivace_attention(int64_t body, int64_t threads, const Attention*);

namespace {

// The row of a token as it enters the first layer.
inline void embed_row(const Chain& chain, int64_t token, int64_t width, bf16* h) {
    embed_token(chain.rows, chain.embedding, token, width, h);
    if (chain.embedding_scale != 1)
        for (int64_t e = 0; e < width; ++e) h[e] = narrowed(widened(h[e]) * chain.embedding_scale);
}

inline bool is_end(const Chain& chain, int64_t token) {
    const int64_t* stop = chain.ends + chain.num_ends;
    return std::find(chain.ends, stop, token) != stop;
}

// What one depth's call needs, sized for every sequence with a companion.
class ChainRun {
public:
    ChainRun(const Body& body, int64_t index, int64_t threads, const Plan& plan, const Chain& chain)
        : body_(body), index_(index), threads_(threads), plan_(plan), chain_(chain), most_(2 * chain.sequences) {
        const int64_t width = plan.width;
        for (auto* rows : {&h_, &out_}) rows->reset(new bf16[most_ * width]);
        for (auto* rows : {&slot_, &seen_, &entry_, &which_}) rows->resize(most_);
        for (int64_t rope = 0; rope < chain.num_ropes; ++rope) {
            rotations_.emplace_back(new bf16[2 * most_ * plan.rotated]);
            cosines_.push_back(rotations_.back().get());
            sines_.push_back(rotations_.back().get() + most_ * plan.rotated);
        }
        terms_.assign(chain.terms, chain.terms + chain.num_terms);
        for (Term& term : terms_) term.which = which_.data();
        if (chain.num_reads > 0) {
            const int64_t queries = plan.heads * plan.head_width;
            for (auto* rows : {&q_, &a_}) rows->reset(new bf16[chain.sequences * queries]);
            x_.reset(new bf16[chain.sequences * width]);
            sums_.reset(new float[chain.sequences * queries]);
            verified_.resize(chain.sequences);
        }
        if (chain.min_confidence > 0) logits_.reset(new bf16[chain.sequences * chain.head.out]);
        const Call largest = call(most_, chain.sequences);
        space_.reset(new uint8_t[vivace_span_bytes(&plan, &largest) + 64]);
    }

    int64_t run() {
        std::vector<int64_t> fresh, growing;
        for (int64_t i = 0; i < chain_.sequences; ++i) fresh.push_back(add_row(i, chain_.root[i], 0, -1));
        for (int64_t depth = 0; !fresh.empty(); ++depth) {
            growing.clear();
            for (const int64_t row : fresh)
                if (depth < chain_.limit[sequence_[row]] && is_sure_[row]) growing.push_back(row);
            if (growing.empty() && chain_.hidden == nullptr) break;  // nobody asks for the last guesses' residuals
            climb(depth, fresh, is_alone() ? std::vector<int64_t>() : growing);
            fresh = guess(depth, fresh, growing);
        }
        return num_rows_;
    }

private:
    bool is_alone() const { return chain_.scale == nullptr; }

    int64_t add_row(int64_t sequence, int64_t token, int64_t node, int64_t parent, bool is_sure = true) {
        const int64_t row = num_rows_++;
        chain_.tokens[row] = token, chain_.slots[row] = chain_.slot[sequence];
        chain_.nodes[row] = node, chain_.parents[row] = parent;
        sequence_.push_back(sequence), is_sure_.push_back(is_sure);
        return row;
    }

    // Row `at` of the call: draft row `row` of some sequence, slow or its companion.
    void place(int64_t at, int64_t depth, int64_t row, bool is_companion) {
        const int64_t i = sequence_[row], width = plan_.width, entry = chain_.length[i] + depth;
        slot_[at] = chain_.slot[i], entry_[at] = entry, seen_[at] = entry + 1, which_[at] = is_companion ? 0 : -1;
        for (int64_t rope = 0; rope < chain_.num_ropes; ++rope) {
            const int64_t size = plan_.rotated, bytes = size * sizeof(bf16);
            memcpy((bf16*)cosines_[rope] + at * size, chain_.cosines[rope] + entry * size, bytes);
            memcpy((bf16*)sines_[rope] + at * size, chain_.sines[rope] + entry * size, bytes);
        }
        bf16* h = h_.get() + at * width;
        embed_row(chain_, chain_.tokens[row], width, h);
        if (!is_companion || chain_.num_offsets == 0) return;
        const int64_t which = i * chain_.num_offsets + (depth < chain_.num_offsets ? depth : chain_.num_offsets - 1);
        const bf16* offset = chain_.offsets + which * width;
        for (int64_t e = 0; e < width; ++e) h[e] = narrowed(widened(h[e]) + widened(offset[e]));
    }

    Call call(int64_t rows, int64_t writing) const {
        Call c{};
        c.h = h_.get(), c.out = out_.get(), c.space = (uint8_t*)(((uintptr_t)space_.get() + 63) / 64 * 64);
        c.slot = slot_.data(), c.seen = seen_.data(), c.entry = entry_.data();
        c.keys = chain_.keys, c.values = chain_.values, c.cosines = cosines_.data(), c.sines = sines_.data();
        c.terms = terms_.data(), c.num_terms = rows > writing ? chain_.num_terms : 0;
        c.stop = chain_.gate, c.capacity = chain_.capacity;
        c.rows = rows, c.num_write = writing, c.num_feed = chain_.is_fed ? rows : writing;
        return c;
    }

    // Companions in rows first.. of h read what a deep layer stored about the verified entries of their sequences.
    void read_deep(const DeepRead& read, int64_t first, const std::vector<int64_t>& growing) {
        const int64_t count = (int64_t)growing.size(), width = plan_.width, queries = plan_.heads * plan_.head_width;
        const Layer& layer = plan_.layers[read.layer];
        bf16* h = h_.get() + first * width;
        const Norm norm{h, read.gain, x_.get(), count, width, plan_.norm_eps, 0};
        for (int64_t row = 0; row < count; ++row) body_.norm(&norm, 0, row);
        const Linear query{read.query, x_.get(), nullptr, q_.get(), count};
        vivace_linear(index_, threads_, &query);
        for (int64_t row = 0; row < count; ++row) {
            const int64_t at = (first + row) * plan_.rotated;
            for (int64_t head = 0; head < plan_.heads; ++head)
                body_.rotate(q_.get() + row * queries + head * plan_.head_width, cosines_[layer.rope] + at,
                             sines_[layer.rope] + at, plan_.rotated);
            verified_[row] = chain_.length[sequence_[growing[row]]];
        }
        const Attention attention{q_.get(), chain_.keys[read.layer], chain_.values[read.layer], slot_.data() + first,
                                  verified_.data(), nullptr, a_.get(), sums_.get(), count, queries, plan_.heads,
                                  plan_.kv_heads, plan_.head_width, chain_.capacity, 0, layer.window, plan_.scale,
                                  plan_.softcap};
        vivace_attention(index_, threads_, &attention);
        for (int64_t row = 0; row < count; ++row)
            if (verified_[row] == 0) memset(a_.get() + row * queries, 0, queries * sizeof(bf16));
        const Linear output{read.output, a_.get(), h, h, count};
        vivace_linear(index_, threads_, &output);
    }

    // Rows of h through layers start..stop-1, into out.
    void pass(int64_t start, int64_t stop, int64_t rows, int64_t writing) {
        Call c = call(rows, writing);
        c.start = start, c.stop = stop;
        while (c.num_terms > 0 && c.terms[0].layer < start) ++c.terms, --c.num_terms;
        while (c.num_terms > 0 && c.terms[c.num_terms - 1].layer >= stop) --c.num_terms;
        vivace_span(index_, threads_, &plan_, &c);
    }

    // Fresh rows to the gate, with companions behind the growing ones.
    void climb(int64_t depth, const std::vector<int64_t>& fresh, const std::vector<int64_t>& growing) {
        const int64_t writing = (int64_t)fresh.size(), width = plan_.width;
        int64_t rows = 0, layer = 0;
        for (const int64_t row : fresh) place(rows++, depth, row, false);
        for (const int64_t row : growing) place(rows++, depth, row, true);
        for (; rows > writing && layer < chain_.num_reads; ++layer) {
            if (layer > 0) pass(layer - 1, layer, rows, writing), std::swap(h_, out_);
            read_deep(chain_.reads[layer], writing, growing);
        }
        pass(layer > 0 ? layer - 1 : 0, chain_.gate, rows, writing);
        if (chain_.hidden != nullptr)
            memcpy(chain_.hidden + fresh[0] * width, out_.get(), writing * width * sizeof(bf16));
    }

    // The next token below each growing row, from what stands for it in the last call's rows.
    std::vector<int64_t> guess(int64_t depth, const std::vector<int64_t>& fresh, const std::vector<int64_t>& growing) {
        const int64_t count = (int64_t)growing.size(), width = plan_.width;
        std::vector<int64_t> children;
        if (count == 0) return children;
        bf16* x = h_.get();
        for (int64_t i = 0; i < count; ++i) {
            const int64_t at = is_alone() ? growing[i] - fresh[0] : (int64_t)fresh.size() + i;
            bf16* p = out_.get() + at * width;
            if (!is_alone())
                for (int64_t e = 0; e < width; ++e) p[e] = narrowed(widened(p[e]) * widened(chain_.scale[e]));
            const Norm norm{p, chain_.final_norm, x + i * width, 1, width, plan_.norm_eps, plan_.norm_offset};
            body_.norm(&norm, 0, 0);
        }
        std::vector<int64_t> tokens((size_t)count);
        const Linear head{chain_.head, x, nullptr, logits_.get(), count};
        if (logits_ == nullptr) vivace_greedy(index_, threads_, &head, tokens.data());
        else vivace_linear(index_, threads_, &head);
        for (int64_t i = 0; i < count; ++i) {
            bool is_sure = true;
            if (logits_ != nullptr) {
                const bf16* logits = logits_.get() + i * chain_.head.out;
                is_sure = body_.likeliest(logits, chain_.head.out, &tokens[i]) >= chain_.min_confidence;
            }
            is_sure = is_sure && !is_end(chain_, tokens[i]);
            children.push_back(add_row(sequence_[growing[i]], tokens[i], depth + 1, growing[i], is_sure));
        }
        return children;
    }

    const Body& body_;
    const int64_t index_, threads_;
    const Plan& plan_;
    const Chain& chain_;
    const int64_t most_;
    int64_t num_rows_ = 0;
    std::vector<int64_t> sequence_;  // of each draft row
    std::vector<bool> is_sure_;
    std::unique_ptr<bf16[]> h_, out_, logits_, q_, a_, x_;
    std::unique_ptr<float[]> sums_;
    std::unique_ptr<uint8_t[]> space_;
    std::vector<int64_t> slot_, seen_, entry_, which_, verified_;
    std::vector<std::unique_ptr<bf16[]>> rotations_;
    std::vector<const bf16*> cosines_, sines_;
    std::vector<Term> terms_;
};

}  // namespace

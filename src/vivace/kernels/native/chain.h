// Chains of draft tokens for several sequences in one call; decode/shallow.py does the same depth by depth.
//
// At each depth the rows of the last guesses go through the layers below the exit layer and store keys and values.
// Beside each row that guesses again runs a draft row, which reads the same entries and stores none. Before each of the
// first layers it may also read the entries that a deep layer stored for verified positions. The model's head reads the
// draft row's residual at the exit layer, times a scale. Without draft rows the head reads the rows' own residuals;
// with the exit at the top that is plain decoding of several tokens in one call.
#pragma once
#include "drawing.h"
#include "rows.h"

namespace {

// One call of vivace_chain. Its buffers have room for a row and a draft row of every sequence.
class ChainRun {
public:
    ChainRun(const Worker& worker, const Plan& plan, const Chain& chain)
        : worker_(worker), plan_(plan), chain_(chain), rows_(plan, chain, 2 * chain.sequences) {
        const int64_t most = 2 * chain.sequences;
        which_.resize(most);
        deltas_.assign(chain.deltas, chain.deltas + chain.num_deltas);
        for (Delta& delta : deltas_) delta.which = which_.data();
        deltas_ = merged(rows_.worn, deltas_);
        if (chain.num_reads > 0) {
            const int64_t queries = plan.heads * plan.head_width;
            for (auto* rows : {&q_, &a_}) rows->reset(new bf16[chain.sequences * queries]);
            x_.reset(new bf16[chain.sequences * plan.width]);
            sums_.reset(new float[chain.sequences * queries]);
            verified_.resize(chain.sequences);
        }
        for (int64_t i = 0; chain.drawings != nullptr && i < chain.sequences; ++i)
            draws_.emplace_back(worker.body, chain.drawings[i]);
        if (chain.min_confidence > 0 || chain.drawings != nullptr) logits_.reset(new bf16[chain.sequences * chain.head.out]);
        rows_.make_room(plan, call(most, chain.sequences));
    }

    int64_t run() {
        std::vector<int64_t> fresh, growing;
        for (int64_t i = 0; i < chain_.sequences; ++i) fresh.push_back(add_row(i, chain_.root[i], 0, -1));
        for (int64_t depth = 0; !fresh.empty(); ++depth) {
            growing.clear();
            for (const int64_t row : fresh)
                if (depth < chain_.limit[sequence_[row]] && is_sure_[row]) growing.push_back(row);
            if (growing.empty() && chain_.hidden == nullptr) break;  // residuals of the last guesses are not wanted
            forward(depth, fresh, is_alone() ? std::vector<int64_t>() : growing);
            fresh = guess(depth, fresh, growing);
        }
        return num_rows_;
    }

private:
    bool is_alone() const { return chain_.scale == nullptr; }
    bool decides() const { return is_alone() && chain_.hidden != nullptr && chain_.exit_layer == plan_.num_layers; }

    bool draws(int64_t sequence) const { return chain_.drawings != nullptr && chain_.drawings[sequence].scale > 0; }

    int64_t add_row(int64_t sequence, int64_t token, int64_t node, int64_t parent, bool is_sure = true) {
        const int64_t row = num_rows_++;
        chain_.tokens[row] = token, chain_.slots[row] = chain_.slot[sequence];
        chain_.nodes[row] = node, chain_.parents[row] = parent;
        sequence_.push_back(sequence), is_sure_.push_back(is_sure);
        return row;
    }

    // Sets row `at` of the call to the token of row `row`, either the row itself or its draft row.
    void place(int64_t at, int64_t depth, int64_t row, bool is_draft) {
        const int64_t i = sequence_[row], width = plan_.width;
        rows_.seat(at, i, chain_.length[i] + depth);
        which_[at] = is_draft ? 0 : -1;
        bf16* h = rows_.h.get() + at * width;
        embed_row(chain_, chain_.tokens[row], chain_.length[i] + depth, width, h);
        if (!is_draft || chain_.num_offsets == 0) return;
        const int64_t which = i * chain_.num_offsets + (depth < chain_.num_offsets ? depth : chain_.num_offsets - 1);
        const bf16* offset = chain_.offsets + which * width;
        for (int64_t e = 0; e < width; ++e) h[e] = narrowed(widened(h[e]) + widened(offset[e]));
    }

    Call call(int64_t rows, int64_t writing) const {
        Call c = rows_.call(rows, writing);
        if (rows > writing) c.deltas = deltas_.data(), c.num_deltas = (int64_t)deltas_.size();
        c.stop = chain_.exit_layer;
        c.num_feed = chain_.is_fed ? rows : writing;
        return c;
    }

    // Adds to the draft rows, rows first.. of h, their attention to a deep layer's entries of verified positions.
    void read_deep(const DeepRead& read, int64_t first, const std::vector<int64_t>& growing) {
        const int64_t count = (int64_t)growing.size(), width = plan_.width, queries = plan_.heads * plan_.head_width;
        const Layer& layer = plan_.layers[read.layer];
        bf16* h = rows_.h.get() + first * width;
        const Norm norm{h, {read.gain, nullptr}, x_.get(), count, width, plan_.norm_eps, 0};
        for (int64_t row = 0; row < count; ++row) worker_.body.norm(&norm, 0, row);
        worker_.linear({read.query, x_.get(), nullptr, q_.get(), count});
        for (int64_t row = 0; row < count; ++row) {
            for (int64_t head = 0; head < plan_.heads && plan_.rotated > 0; ++head)
                worker_.body.rotate(q_.get() + row * queries + head * plan_.head_width,
                                    rows_.cosines(layer.rope, first + row), rows_.sines(layer.rope, first + row),
                                    plan_.rotated);
            verified_[row] = chain_.length[sequence_[growing[row]]];
        }
        const Attention attention{q_.get(), chain_.keys[read.layer], chain_.values[read.layer], chain_.places[read.layer],
                                  rows_.slot.data() + first, verified_.data(), nullptr, nullptr, a_.get(), sums_.get(),
                                  count, queries, plan_.heads, plan_.kv_heads, plan_.head_width, 0, 0, layer.window,
                                  plan_.scale, plan_.softcap};
        vivace_attention(worker_.index, worker_.threads, &attention);
        for (int64_t row = 0; row < count; ++row)
            if (verified_[row] == 0) memset(a_.get() + row * queries, 0, queries * sizeof(bf16));
        worker_.linear({read.output, a_.get(), h, h, count});
    }

    // Runs the rows of h through layers start..stop-1 into out, with the deltas of these layers.
    void pass(int64_t start, int64_t stop, int64_t rows, int64_t writing) {
        Call c = call(rows, writing);
        c.start = start, c.stop = stop;
        worker_.span(plan_, c);
    }

    // Runs the fresh rows to the exit layer, with draft rows beside the growing ones.
    void forward(int64_t depth, const std::vector<int64_t>& fresh, const std::vector<int64_t>& growing) {
        const int64_t writing = (int64_t)fresh.size(), width = plan_.width;
        int64_t rows = 0, layer = 0;
        for (const int64_t row : fresh) place(rows++, depth, row, false);
        for (const int64_t row : growing) place(rows++, depth, row, true);
        for (; rows > writing && layer < chain_.num_reads; ++layer) {
            if (layer > 0) pass(layer - 1, layer, rows, writing), std::swap(rows_.h, rows_.out);
            read_deep(chain_.reads[layer], writing, growing);
        }
        pass(layer > 0 ? layer - 1 : 0, chain_.exit_layer, rows, writing);
        if (chain_.hidden != nullptr)
            memcpy(chain_.hidden + fresh[0] * width, rows_.out.get(), writing * width * sizeof(bf16));
    }

    // Guesses the token below each growing row from the residual of its draft row, or its own where there is none.
    std::vector<int64_t> guess(int64_t depth, const std::vector<int64_t>& fresh, const std::vector<int64_t>& growing) {
        const int64_t count = (int64_t)growing.size(), width = plan_.width;
        std::vector<int64_t> children;
        if (count == 0) return children;
        bf16* x = rows_.h.get();
        for (int64_t i = 0; i < count; ++i) {
            const int64_t at = is_alone() ? growing[i] - fresh[0] : (int64_t)fresh.size() + i;
            bf16* p = rows_.out.get() + at * width;
            if (!is_alone())
                for (int64_t e = 0; e < width; ++e) p[e] = narrowed(widened(p[e]) * widened(chain_.scale[e]));
            worker_.norm(plan_, chain_.final_norm, p, x + i * width, 1);
        }
        std::vector<int64_t> tokens((size_t)count);
        std::vector<float> values((size_t)count);
        const Linear head{chain_.head, x, nullptr, logits_.get(), count};
        if (logits_ == nullptr) worker_.greedy(head, tokens.data(), values.data());
        else worker_.linear(head);
        for (int64_t i = 0; i < count; ++i) {
            bool is_sure = true;
            const bf16* logits = logits_ == nullptr ? nullptr : logits_.get() + i * chain_.head.out;
            const int64_t sequence = sequence_[growing[i]];
            if (draws(sequence)) {
                const int64_t position = chain_.length[sequence] + depth + 1;
                const Drawn drawn = draws_[sequence].draw(logits, false, chain_.head.out, chain_.ids, position);
                if (decides() && drawn.index < 0) continue;  // no token may come: the caller says why
                tokens[i] = std::max<int64_t>(drawn.index, 0);
                is_sure = drawn.confidence() >= chain_.min_confidence;
            } else if (logits_ != nullptr) {
                is_sure = worker_.body.likeliest(logits, chain_.head.out, chain_.softcap, &tokens[i]) >=
                          chain_.min_confidence;
            }
            if (chain_.ids != nullptr) tokens[i] = chain_.ids[tokens[i]];
            const bool ends = is_end(chain_, tokens[i]);
            // The caller reads this token from the last residual: no row for it.
            if (decides() && (ends || !is_certain(chain_, values[i]))) continue;
            is_sure = is_sure && !ends;
            children.push_back(add_row(sequence, tokens[i], depth + 1, growing[i], is_sure));
        }
        return children;
    }

    const Worker& worker_;
    const Plan& plan_;
    const Chain& chain_;
    Rows rows_;
    int64_t num_rows_ = 0;
    std::vector<int64_t> sequence_;  // sequence of each row
    std::vector<bool> is_sure_;
    std::unique_ptr<bf16[]> logits_, q_, a_, x_;
    std::unique_ptr<float[]> sums_;
    std::vector<int64_t> which_, verified_;
    std::vector<Draws> draws_;   // of each sequence, where tokens are drawn
    std::vector<Delta> deltas_;  // of calls with draft rows: what every row wears, and theirs
};

}  // namespace

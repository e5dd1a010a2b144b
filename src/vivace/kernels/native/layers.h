// What the items of each phase of a span compute (span.h).
#pragma once
#include "attention.h"

namespace {

// Calls use(first, count) for neighbouring rows, at most `most` of them, that have the same adapter of a delta.
template <class Use>
inline void for_runs(const Delta& t, int64_t rows, int64_t most, Use use) {
    for (int64_t row = 0, count; row < rows; row += count) {
        for (count = 1; row + count < rows && count < most && t.which[row + count] == t.which[row];) ++count;
        if (t.which[row] >= 0) use(row, count);
    }
}

// Multiplies the rows of a delta by its down factor, outputs of tiles first..stop-1: low = [silu] round(x down^T).
void lower(const Span& s, int64_t index, const bf16* x, int64_t rows, int64_t first, int64_t stop) {
    const Delta& t = s.call->deltas[index];
    const int64_t stride = even(t.rank);
    float sums[MAX_ROWS * LANES];
    for_runs(t, rows, MAX_ROWS, [&](int64_t row, int64_t count) {
        const Matrix down = down_of(t, t.which[row]);
        bf16* low = s.low[index] + row * stride;
        for (int64_t r = 0; r < count && stride > t.rank; ++r) low[r * stride + t.rank] = 0;
        for (int64_t tile = first; tile < stop; ++tile) {
            sum_rows(down, tile, x + row * t.in, t.in, count, sums);
            for (int64_t r = 0; r < count; ++r)
                for_lanes(tile, t.rank, [&](int64_t lane, int64_t n) {
                    Vec v = load(sums + r * LANES + lane);
                    if (t.site == SITE_MLP) v = activated(rounded(v), SILU);
                    store_some(low + r * stride + tile * LANES + lane, v, n);
                });
        }
    });
}

// y = round(y + round(up low)) for neighbouring rows that have the same adapter or none, outputs of tiles first..stop-1.
void raise(const Span& s, int64_t index, int64_t row, int64_t count, bf16* y, int64_t first, int64_t stop) {
    const Delta& t = s.call->deltas[index];
    if (t.which[row] < 0) return;
    project(up_of(t, t.which[row]), s.low[index] + row * even(t.rank), y, y, count, first, stop);
}

void raise(const Span& s, int64_t index, int64_t row, bf16* y) {
    raise(s, index, row, 1, y, 0, (s.call->deltas[index].out + LANES - 1) / LANES);
}

// Calls use(index, site) for the deltas of a layer, in the order of the call.
template <class Use>
inline void for_deltas(const Span& s, int64_t layer, Use use) {
    for (int64_t t = s.first_delta[layer]; t < s.first_delta[layer + 1]; ++t) use(t, s.call->deltas[t].site);
}

// The tiles first..stop-1 of a matrix that an item computes.
void split_range(int64_t item, const Matrix& m, int64_t threads, int64_t* first, int64_t* stop) {
    const int64_t each = tiles_per_item(m, threads), count = tiles(m);
    *first = item * each;
    *stop = *first + each < count ? *first + each : count;
}

// Computes an item of a phase beyond those of its projection: some outputs of the down factor of a delta whose input is
// ready in this phase.
void lower_nth(const Span& s, int64_t layer, Kind kind, int64_t item, const bf16* x) {
    for_deltas(s, layer, [&](int64_t t, int64_t site) {
        if (phase_of(site) != kind || item < 0) return;
        const Matrix down = down_of(s.call->deltas[t], 0);
        const int64_t count = items(down, s.threads);
        if (item < count) {
            const bool is_fed_only = site == SITE_GATE || site == SITE_UP || site == SITE_DOWN;
            int64_t first, stop;
            split_range(item, down, s.threads, &first, &stop);
            lower(s, t, x, is_fed_only ? s.call->num_feed : s.call->rows, first, stop);
        }
        item -= count;
    });
}

// Computes an item of a projection, or of a delta's down factor when the item is beyond the projection's.
void project_item(const Span& s, int64_t layer, Kind kind, int64_t item, const Matrix& m, const bf16* x, bf16* out,
                  int64_t rows) {
    const int64_t count = rows ? items(m, s.threads) : 0;
    if (item >= count) return lower_nth(s, layer, kind, item - count, x);
    int64_t first, stop;
    split_range(item, m, s.threads, &first, &stop);
    project(m, inputs(m, x, s.prepared), nullptr, out, rows, first, stop);
}

void norm_heads(bf16* x, const Gain& gain, int64_t heads, const Plan& p) {
    const int64_t all = heads * p.head_width, width = p.norms_heads_alone ? p.head_width : all;
    for (int64_t i = 0; i < all && gain.weight != nullptr; i += width)
        norm_row(x + i, gain, x + i, width, p.norm_eps, p.norm_offset);
}

void rotate_heads(const Span& s, int64_t layer, int64_t row, bf16* x, int64_t heads) {
    const int64_t rotated = s.plan->rotated, rope = s.layer(layer).rope;
    if (rotated == 0) return;
    const bf16 *cos = s.call->cosines[rope] + row * rotated, *sin = s.call->sines[rope] + row * rotated;
    for (int64_t i = 0; i < heads; ++i) rotate(x + i * s.plan->head_width, cos, sin, rotated);
}

// Adds the deltas of a row's queries, and applies QK-norm, limits and rotation to them.
void finish_queries(const Span& s, int64_t layer, int64_t row) {
    const Plan& p = *s.plan;
    const Layer& l = s.layer(layer);
    bf16* q = s.qkv + row * s.qkv_width();
    for_deltas(s, layer, [&](int64_t t, int64_t site) {
        if (site == SITE_Q) raise(s, t, row, q);
    });
    norm_heads(q, l.q_norm, p.heads, p);
    if (p.clip != 0) clip(q, s.query_width(), p.clip);
    rotate_heads(s, layer, row, q, p.heads);
}

// Does the same to a row's keys and values, and stores them if the row is a writing one.
void finish_entries(const Span& s, int64_t layer, int64_t row) {
    const Plan& p = *s.plan;
    const Call& c = *s.call;
    const Layer& l = s.layer(layer);
    bf16 *k = s.qkv + row * s.qkv_width() + s.query_width(), *v = k + s.key_width();
    for_deltas(s, layer, [&](int64_t t, int64_t site) {
        if (site == SITE_K || site == SITE_V) raise(s, t, row, site == SITE_K ? k : v);
    });
    norm_heads(k, l.k_norm, p.kv_heads, p);
    if (p.clip != 0) clip(k, 2 * s.key_width(), p.clip);
    rotate_heads(s, layer, row, k, p.kv_heads);
    if (row >= c.num_write) return;
    const Places& places = c.places[c.start + layer];
    const int64_t place = places.of(c.slot[row], c.entry[row] - places.shift(c.slot[row]));
    for (int64_t i = 0; i < p.kv_heads; ++i) {
        const int64_t number = i * places.capacity + place, at = number * p.head_width;
        if (places.key_scales != nullptr) {
            const bf16 *key = k + i * p.head_width, *value = v + i * p.head_width;
            int8_t *keys = (int8_t*)c.keys[c.start + layer] + at, *values = (int8_t*)c.values[c.start + layer] + at;
            narrow_entry(key, p.head_width, keys, (EntryScale*)places.key_scales + number);
            narrow_entry(value, p.head_width, values, (EntryScale*)places.value_scales + number);
            continue;
        }
        __builtin_memcpy((bf16*)c.keys[c.start + layer] + at, k + i * p.head_width, p.head_width * sizeof(bf16));
        __builtin_memcpy((bf16*)c.values[c.start + layer] + at, v + i * p.head_width, p.head_width * sizeof(bf16));
    }
}

void attend_item(const Span& s, int64_t layer, int64_t item) {
    const Plan& p = *s.plan;
    const Call& c = *s.call;
    const int64_t at = c.start + layer;
    const Attention a{s.qkv,  c.keys[at],     c.values[at], c.places[at], c.slot,       c.seen,
                      c.tail, c.index,        s.a,          s.sums,       c.rows,       s.qkv_width(),
                      p.heads, p.kv_heads,    p.head_width, c.tail_width, c.index_width, s.layer(layer).window,
                      p.scale, p.softcap,     p.bias,       p.bias_reach};
    attend_some(a, item);
}

// Attention of rows to the sources of their texts; the queries lie where those to the texts themselves lay.
void attend_source_item(const Span& s, int64_t layer, int64_t item) {
    const Plan& p = *s.plan;
    const Call& c = *s.call;
    const int64_t at = c.start + layer;
    const Attention a{s.qkv,   c.cross_keys[at], c.cross_values[at], c.cross_places[at], c.slot, c.cross_seen,
                      nullptr, nullptr,          s.a,                s.sums,             c.rows, s.query_width(),
                      p.heads, p.kv_heads,       p.head_width,       0,                  0,      0,
                      p.scale, p.softcap,        nullptr,            0};
    attend_some(a, item);
}

// Adds the deltas' up factors to the output of a half of a layer: some of the columns, all rows.
void raise_item(const Span& s, int64_t layer, bool is_feed, int64_t item) {
    const int64_t width = s.plan->width;
    const Matrix out{nullptr, nullptr, 0, width, TILES, nullptr, nullptr};
    int64_t first, stop;
    split_range(item, out, s.threads, &first, &stop);
    const int64_t start = first * LANES, end = stop * LANES < width ? stop * LANES : width;
    const int64_t rows = s.call->rows, fed = s.call->num_feed;
    for (int64_t row = fed; is_feed && row < rows; ++row)
        __builtin_memset(s.y + row * width + start, 0, (end - start) * sizeof(bf16));
    for (int64_t wanted = is_feed ? SITE_DOWN : SITE_O; wanted <= (is_feed ? SITE_MLP : SITE_O); ++wanted)
        for_deltas(s, layer, [&](int64_t t, int64_t site) {
            if (site != wanted) return;
            for_runs(s.call->deltas[t], site == SITE_DOWN ? fed : rows, rows, [&](int64_t row, int64_t count) {
                raise(s, t, row, count, s.y + row * width, first, stop);
            });
        });
}

// to = round(from + y), where y is normed before if there is a norm after it, or the sum is normed.
void add_normed(const Span& s, int64_t row, const Gain& after, const bf16* from, bf16* to) {
    const Plan& p = *s.plan;
    const int64_t width = p.width, at = row * width;
    bf16* y = s.y + at;
    if (after.weight != nullptr && !p.norms_sums) norm_row(y, after, y, width, p.norm_eps, p.norm_offset);
    for_width(width, [&](int64_t i, int64_t n) {
        store_some(to + at + i, add(load_some(from + at + i, n), load_some(y + i, n)), n);
    });
    if (after.weight != nullptr && p.norms_sums) norm_row(to + at, after, to + at, width, p.norm_eps, p.norm_offset);
}

// Adds a half of a layer to the residual; y is zero for a row that passed no feed-forward and has no deltas.
void finish_half(const Span& s, int64_t layer, int64_t row, bool is_feed, const bf16* from, bf16* to) {
    const int64_t width = s.plan->width;
    bf16* y = s.y + row * width;
    if (is_feed && row >= s.call->num_feed && !s.is_raised(layer, true)) __builtin_memset(y, 0, width * sizeof(bf16));
    add_normed(s, row, is_feed ? s.layer(layer).ffn_post_norm : s.layer(layer).attention_post_norm, from, to);
}

// Prepares the inputs of a half; without a norm before it, they are the residuals themselves.
void norm_into_x(const Span& s, int64_t row, const bf16* from, const Gain& gain, const Matrix& next) {
    const int64_t width = s.plan->width;
    if (gain.weight == nullptr) __builtin_memcpy(s.x + row * width, from + row * width, width * sizeof(bf16));
    else norm_row(from + row * width, gain, s.x + row * width, width, s.plan->norm_eps, s.plan->norm_offset);
    prepare(next, s.x, s.prepared, row);
}

// Computes an item of gate (if there is one) and up, together with the activation unless deltas are added before it.
void up_item(const Span& s, int64_t layer, int64_t item) {
    const Layer& l = s.layer(layer);
    const int64_t rows = s.call->num_feed;
    const int64_t count = rows ? items(l.up, s.threads) : 0, activation = s.plan->activation;
    int64_t first, stop;
    if (s.is_fused(layer)) {
        if (item >= count) return lower_nth(s, layer, UP, item - count, s.x);
        split_range(item, l.up, s.threads, &first, &stop);
        const bf16* x = inputs(l.up, s.x, s.prepared);
        if (!s.plan->is_gated) return project_activated(l.up, x, s.inner, rows, activation, first, stop);
        const Gated g{l.gate, l.up, x, s.inner, rows, activation};
        return project_gated(g, first, stop);
    }
    const int64_t gates = s.plan->is_gated ? count : 0;
    if (item < gates) return project_item(s, layer, UP, item, l.gate, s.x, s.gates, rows);
    project_item(s, layer, UP, item - gates, l.up, s.x, s.inner, rows);
}

// Adds the deltas of gate and up, and activates: a row, or some of its neurons where there are few rows.
void activate_item(const Span& s, int64_t layer, int64_t item) {
    const int64_t ffn = s.plan->ffn_width, count = (ffn + LANES - 1) / LANES, parts = s.activate_parts();
    const int64_t row = item / parts, part = item % parts;
    const int64_t first = count * part / parts, stop = count * (part + 1) / parts;
    bf16 *gates = s.gates + row * ffn, *ups = s.inner + row * ffn;
    for_deltas(s, layer, [&](int64_t t, int64_t site) {
        if (site == SITE_GATE || site == SITE_UP) raise(s, t, row, 1, site == SITE_GATE ? gates : ups, first, stop);
    });
    const int64_t start = first * LANES, end = stop * LANES < ffn ? stop * LANES : ffn;
    const bf16* up = s.plan->is_gated ? ups + start : nullptr;
    activate((up == nullptr ? ups : gates) + start, up, ups + start, end - start, s.plan->activation);
}

// Chooses the experts of all rows, and gives the rows of each expert neighbouring seats.
void choose_item(const Span& s, const Mixture& m) {
    const Routed& r = s.routed;
    const int64_t rows = s.call->num_feed, count = rows * m.top_k;
    choose_experts(r.logits, m.router.out, rows, m.top_k, m.normalises, r.chosen, r.weights);
    int64_t seat = 0, some = 0;
    for (int64_t expert = 0; expert < m.router.out; ++expert) {
        const int64_t first = seat;
        for (int64_t i = 0; i < count; ++i)
            if (r.chosen[i] == expert) r.row[seat] = i / m.top_k, r.seats[i] = seat++;
        if (seat > first) r.expert[some] = expert, r.first[some++] = first;
    }
    r.first[some] = seat, *r.count = some;
}

void gather_item(const Span& s, const Matrix& up, int64_t seat) {
    const int64_t width = row_stride(up);
    const bf16* from = inputs(up, s.x, s.prepared) + s.routed.row[seat] * width;
    __builtin_memcpy(s.routed.x + seat * width, from, width * sizeof(bf16));
}

// Computes an item of the experts' gate and up, or of their down; items of experts that no row takes are empty.
void expert_item(const Span& s, int64_t layer, Kind kind, int64_t item) {
    const Routed& r = s.routed;
    const Mixture& m = *s.layer(layer).mixture;
    const int64_t each = items(kind == UP ? m.experts->up : m.experts->down, s.threads), place = item / each;
    const int64_t most = s.most_experts(layer);
    if (place >= most) return lower_nth(s, layer, kind, item - most * each, s.x);
    if (place >= *r.count) return;
    const Expert& e = m.experts[r.expert[place]];
    const int64_t seat = r.first[place], rows = r.first[place + 1] - seat;
    int64_t first, stop;
    split_range(item % each, kind == UP ? e.up : e.down, s.threads, &first, &stop);
    if (kind == UP) {
        bf16* inner = s.inner + seat * e.up.out;
        return project_gated({e.gate, e.up, r.x + seat * row_stride(e.up), inner, rows, s.plan->activation}, first, stop);
    }
    const bf16* x = inputs(e.down, s.inner, s.prepared) + seat * row_stride(e.down);
    project(e.down, x, nullptr, r.parts + seat * e.down.out, rows, first, stop);
}

void mix_item(const Span& s, const Mixture& m, int64_t row) {
    const int64_t at = row * m.top_k, width = s.plan->width;
    mix_seats(s.routed.parts, s.routed.seats + at, s.routed.weights + at, m.top_k, width, s.y + row * width);
}

void begin_row(const Span& s, int64_t row) {
    const Call& c = *s.call;
    const Layer& l = s.layer(0);
    const int64_t width = s.plan->width;
    if (c.part == FED) return norm_into_x(s, row, c.h, l.ffn_norm, l.up);
    if (c.part == WHOLE || c.part == BEHIND)
        __builtin_memcpy(c.out + row * width, c.h + row * width, width * sizeof(bf16));
    if (c.part != BEHIND) norm_into_x(s, row, c.h, l.attention_norm, l.qkv);
}

void end_row(const Span& s, int64_t layer, int64_t row) {
    finish_half(s, layer, row, true, s.u, s.call->out);
    if (s.call->start + layer + 1 == s.call->stop) return;
    norm_into_x(s, row, s.call->out, s.layer(layer + 1).attention_norm, s.layer(layer + 1).qkv);
}

void span_item(const void* context, int64_t phase, int64_t item) {
    const Span& s = *(const Span*)context;
    if (phase == 0) return begin_row(s, item);
    const int64_t layer = (phase - 1) / NUM_KINDS, rows = s.call->rows;
    const Layer& l = s.layer(layer);
    switch ((Kind)((phase - 1) % NUM_KINDS)) {
        case QKV:
            return project_item(s, layer, QKV, item, l.qkv, s.x, s.qkv, rows);
        case HEADS:
            return item < rows ? finish_queries(s, layer, item) : finish_entries(s, layer, item - rows);
        case ATTEND:
            return attend_item(s, layer, item);
        case BEFORE_OUTPUT:
            return prepare(l.o, s.a, s.prepared, item);
        case OUTPUT:
            return project_item(s, layer, OUTPUT, item, l.o, s.a, s.y, rows);
        case AFTER_OUTPUT:
            return raise_item(s, layer, false, item);
        case CROSS:
            finish_half(s, layer, item, false, s.call->out, s.u);
            return norm_into_x(s, item, s.u, l.cross_norm, l.cross_q);
        case CROSS_QUERY:
            return project_item(s, layer, CROSS_QUERY, item, l.cross_q, s.x, s.qkv, rows);
        case CROSS_ATTEND:
            return attend_source_item(s, layer, item);
        case BEFORE_CROSS_OUTPUT:
            return prepare(l.cross_o, s.a, s.prepared, item);
        case CROSS_OUTPUT:
            return project_item(s, layer, CROSS_OUTPUT, item, l.cross_o, s.a, s.y, rows);
        case MIDDLE:
            if (s.plan->reads_sources) add_normed(s, item, l.cross_post_norm, s.u, s.u);
            else finish_half(s, layer, item, false, s.call->out, s.u);
            return norm_into_x(s, item, s.u, l.ffn_norm, l.mixture == nullptr ? l.up : l.mixture->experts->up);
        case ROUTE:
            return project_item(s, layer, ROUTE, item, l.mixture->router, s.x, s.routed.logits, s.call->num_feed);
        case CHOOSE:
            return choose_item(s, *l.mixture);
        case GATHER:
            return gather_item(s, l.mixture->experts->up, item);
        case UP:
            return l.mixture == nullptr ? up_item(s, layer, item) : expert_item(s, layer, UP, item);
        case ACTIVATE:
            return activate_item(s, layer, item);
        case BEFORE_DOWN:
            return prepare(l.mixture == nullptr ? l.down : l.mixture->experts->down, s.inner, s.prepared, item);
        case DOWN:
            if (l.mixture != nullptr) return expert_item(s, layer, DOWN, item);
            return project_item(s, layer, DOWN, item, l.down, s.inner, s.y, s.call->num_feed);
        case MIX:
            return mix_item(s, *l.mixture, item);
        case AFTER_DOWN:
            return raise_item(s, layer, true, item);
        case END:
            return end_row(s, layer, item);
        default:
            return;
    }
}

}  // namespace

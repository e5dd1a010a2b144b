// A span of layers as phases of independent items; entry.cpp prepares it, a body executes the items.
#pragma once
#include "abi.h"

enum Kind : int64_t {
    QKV, HEADS, ATTEND, BEFORE_OUTPUT, OUTPUT, AFTER_OUTPUT, CROSS, CROSS_QUERY, CROSS_ATTEND, BEFORE_CROSS_OUTPUT,
    CROSS_OUTPUT, MIDDLE, ROUTE, CHOOSE, GATHER, UP, ACTIVATE, BEFORE_DOWN, DOWN, MIX, AFTER_DOWN, END, NUM_KINDS
};

// Which experts the rows of a mixture take. A row that an expert takes is a seat; those of an expert are neighbours.
struct Routed {
    bf16 *logits, *weights;   // (rows, X) and (rows, top_k)
    int64_t* chosen;          // (rows, top_k) experts of each row, the likeliest first
    int64_t* seats;           // (rows, top_k) seat of each
    int64_t* row;             // (seats,)
    int64_t *expert, *first;  // experts that have seats, and their first seats; one more seat ends the list
    int64_t* count;           // (1,) how many experts have seats
    bf16 *x, *parts;          // (seats, .) inputs, quantized where the experts need it, and outputs
};

// Writes weights and indices of the experts of each row, the likeliest first (mixture.cpp).
void choose_experts(const bf16* logits, int64_t experts, int64_t rows, int64_t top_k, int64_t normalises,
                    int64_t* chosen, bf16* weights);

// out = sum_k weights[k] parts[seats[k]], in this order (mixture.cpp).
void mix_seats(const bf16* parts, const int64_t* seats, const bf16* weights, int64_t count, int64_t width, bf16* out);

// Phase 0 applies the first layer's norm to the rows; then every layer has NUM_KINDS phases.
struct Span {
    const Plan* plan;
    const Call* call;
    bf16 *x, *qkv, *a, *y, *u, *gates, *inner;  // (rows, .): normed, heads, attended, projected, between halves, ...
    bf16* prepared;                             // (rows, .): quantized inputs of the next projection
    float* sums;                                // (rows, H, D)
    Routed routed;
    bf16** low;                                 // for each delta: products with its down factor, (rows, even rank)
    const int64_t* first_delta;                  // first delta of each layer of the span, and one past the last
    int64_t threads;

    const Layer& layer(int64_t index) const { return plan->layers[call->start + index]; }
    int64_t num_seats(int64_t index) const { return call->num_feed * layer(index).mixture->top_k; }
    int64_t most_experts(int64_t index) const {  // that can have seats
        const int64_t experts = layer(index).mixture->router.out, seats = num_seats(index);
        return seats < experts ? seats : experts;
    }
    int64_t query_width() const { return plan->heads * plan->head_width; }
    int64_t key_width() const { return plan->kv_heads * plan->head_width; }
    int64_t qkv_width() const { return query_width() + 2 * key_width(); }
    bool has(int64_t index, int64_t site) const {
        for (int64_t t = first_delta[index]; t < first_delta[index + 1]; ++t)
            if (call->deltas[t].site == site) return true;
        return false;
    }
    // Whether deltas are added to the output of the attention (or feed-forward) half.
    bool is_raised(int64_t index, bool is_feed) const {
        return is_feed ? has(index, SITE_DOWN) || has(index, SITE_MLP) : has(index, SITE_O);
    }
    // Whether gate, up and activation are computed together: no deltas are added between projections and activation.
    bool is_fused(int64_t index) const { return !has(index, SITE_GATE) && !has(index, SITE_UP); }
    // Items into which the activation of a row is divided, so that few rows keep all threads busy.
    int64_t activate_parts() const { return call->num_feed < 2 * threads ? 2 * threads : 1; }
};

// The phase in which a site's input is ready, in which the down factors of its deltas are multiplied too.
inline Kind phase_of(int64_t site) {
    if (site <= SITE_V) return QKV;
    if (site == SITE_O) return OUTPUT;
    return site == SITE_DOWN ? DOWN : UP;
}

// From here on unnamed: what numbers are differs between the files that include this.
namespace {

inline int64_t tiles(const Matrix& m) { return (m.out + LANES - 1) / LANES; }

// Tiles of an item. There are about four items for each thread, so that a late thread costs little; an item has whole
// groups of four tiles where there are enough, and always for EXACT12, which is stored in groups.
inline int64_t tiles_per_item(const Matrix& m, int64_t threads) {
    if (threads <= 1) return tiles(m);
    const int64_t share = (tiles(m) + 4 * threads - 1) / (4 * threads);
    return share < 4 && m.format != EXACT12 ? 2 : (share + 3) / 4 * 4;
}
inline int64_t items(const Matrix& m, int64_t threads) {
    const int64_t each = tiles_per_item(m, threads);
    return (tiles(m) + each - 1) / each;
}
// Rows whose attention is one item for each key/value head, since neighbouring rows mostly read the same entries: rows of
// a draft, and more of them where a prompt has enough rows to keep all threads busy.
constexpr int64_t MOST_TOGETHER = 16;
inline int64_t rows_together(int64_t rows) { return rows < 8 * MOST_TOGETHER ? 4 : MOST_TOGETHER; }
inline int64_t attention_items(int64_t rows, int64_t kv_heads) {
    const int64_t together = rows_together(rows);
    return (rows + together - 1) / together * kv_heads;
}
inline int64_t even(int64_t n) { return n + (n & 1); }

// The down factor of a delta's adapter as a matrix.
inline Matrix down_of(const Delta& t, int64_t adapter) {
    return {t.down + adapter * t.rank * t.in, nullptr, t.in, t.rank, ROW_MAJOR, nullptr, nullptr};
}
// The up factor of a delta's adapter as a matrix, which is packed in tiles.
inline Matrix up_of(const Delta& t, int64_t adapter) {
    const int64_t size = (t.out + LANES - 1) / LANES * even(t.rank) * LANES;
    return {t.up + adapter * size, nullptr, t.rank, t.out, TILES, nullptr, nullptr};
}

// Weights of int8, q4, codes into integers and codes of files are multiplied as integers, so rows are quantized first. A
// quantized row takes prepared_width bfloat16 numbers, a whole number of cache lines.
inline bool is_grid(const Matrix& m) { return m.format == GRID4 || m.format == GRID8; }
inline bool is_low_bit(const Matrix& m) { return m.format == INT8 || m.format == Q4 || m.format >= LUT2_INTS; }
inline int64_t prepared_width(const Matrix& m) {
    if (!is_low_bit(m)) return 0;
    const int64_t groups = (m.in + INT_GROUP - 1) / INT_GROUP;
    if (is_grid(m)) return groups * INT_GROUP;  // sizeof(GridInputs) bytes for each group
    return (groups * (int64_t)(sizeof(float) + sizeof(int32_t) + INT_GROUP) + 63) / 64 * 32;
}
inline const bf16* inputs(const Matrix& m, const bf16* x, const bf16* prepared) { return is_low_bit(m) ? prepared : x; }

}  // namespace

// The arguments of a body's functions; they take a context, a phase and an item, as run_phases calls them.
struct LinearWork {
    const Linear* linear;
    int64_t threads;
    bf16* prepared;  // quantized rows, which phase 0 writes
};
struct GatedWork {
    const Gated* gated;
    int64_t threads;
    bf16* prepared;
};
struct GreedyWork {
    const Greedy* greedy;
    int64_t threads;
    bf16* prepared;
};
struct ScreenedWork {
    const Screened* screened;
    int64_t threads;
    bf16* prepared;
};
constexpr int64_t NEURONS = 64;   // neurons whose activations one item computes
constexpr int64_t COLUMNS = 512;  // columns of the output that one item adds to
struct Body {
    void (*linear)(const void*, int64_t, int64_t);
    void (*gated)(const void*, int64_t, int64_t);
    void (*greedy)(const void*, int64_t, int64_t);
    void (*screened)(const void*, int64_t, int64_t);
    void (*activate)(const void*, int64_t, int64_t);
    void (*norm)(const void*, int64_t, int64_t);
    void (*attention)(const void*, int64_t, int64_t);
    void (*span)(const void*, int64_t, int64_t);
    void (*quantise)(const void*, int64_t, int64_t);
    void (*cluster)(const void*, int64_t, int64_t);
    float (*likeliest)(const bf16*, int64_t, float, int64_t*);
    void (*rotate)(bf16*, const bf16*, const bf16*, int64_t);
    void (*perturb)(Perturbed*);
    void (*masses)(const Perturbed*, float, float*, float*);
    void (*neurons)(const void*, int64_t, int64_t);
    int64_t number_bytes;  // of the numbers that its tensors hold
};

extern const Body avx2_body;
extern const Body avx2vnni_body;
extern const Body avx512_body;
extern const Body avx2_float32_body;
extern const Body avx512_float32_body;
extern const Body* const amx_body;  // null where the compiler has no AMX

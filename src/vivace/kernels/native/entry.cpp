// The C functions that Python calls, the same for every body. This file is compiled for any x86-64 processor, so that
// the processor's features can be asked for before a body runs.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "speculate.h"
#include "pool.h"
#include "span.h"

namespace {

// The body with an index: 0 is AVX2, 1 AVX-512, 2 AVX2 without VNNI (for tests), 3 AMX, 4 and 5 AVX2 and AVX-512 for
// float32. Integer sums are exact, so 0 and 2 give the same bits.
const Body* body_of(int64_t index) {
    static const bool has_vnni = __builtin_cpu_supports("avxvnni");
    if (index == 3) return amx_body;
    if (index > 3) return index == 4 ? &avx2_float32_body : &avx512_float32_body;
    return index == 1 ? &avx512_body : index == 0 && has_vnni ? &avx2vnni_body : &avx2_body;
}

// Whether the processor has AMX for bfloat16 and eight bits.
bool has_amx() {
    unsigned a, b, c, d = 0;
    const unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & wanted) == wanted;
}

// Asks the system for the tile registers, once in a process. They are large (8 KiB), so Linux saves and restores them
// only for processes that asked.
bool is_granted_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool is_granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return is_granted;
#else
    return false;
#endif
}

// Items for the down factors of the deltas whose input is ready in a phase of a layer.
int64_t num_lower(const Span& s, int64_t layer, Kind kind) {
    int64_t count = 0;
    for (int64_t t = s.first_delta[layer]; t < s.first_delta[layer + 1]; ++t) {
        const Delta& delta = s.call->deltas[t];
        if (phase_of(delta.site) == kind) count += items(down_of(delta, 0), s.threads);
    }
    return count;
}

// Whether a part of a layer has a phase.
bool has_phase(int64_t part, Kind kind) {
    switch (part) {
        case PROJECTED:
            return kind <= HEADS;
        case BEHIND:
            return kind >= ATTEND;
        case ATTENDED:
            return kind <= OUTPUT;
        case FED:
            return kind >= UP && kind <= DOWN;
        default:
            return true;
    }
}

// Items of a phase of a layer; 0 where the phase has nothing to do.
int64_t num_items(const Span& s, int64_t layer, Kind kind) {
    const Call& c = *s.call;
    if (!has_phase(c.part, kind)) return 0;
    const Layer& l = s.layer(layer);
    const Matrix out{nullptr, nullptr, 0, s.plan->width, TILES, nullptr, nullptr};
    const int64_t fed = c.num_feed > 0, lower = num_lower(s, layer, kind);
    switch (kind) {
        case QKV:
            return items(l.qkv, s.threads) + lower;
        case HEADS:
            return 2 * c.rows;
        case ATTEND:
            return attention_items(c.rows, s.plan->kv_heads);
        case BEFORE_OUTPUT:
            return is_low_bit(l.o) ? c.rows : 0;
        case OUTPUT:
            return items(l.o, s.threads) + lower;
        case AFTER_OUTPUT:
        case AFTER_DOWN:
            return s.is_raised(layer, kind == AFTER_DOWN) ? items(out, s.threads) : 0;
        case CROSS:
            return s.plan->reads_sources ? c.rows : 0;
        case CROSS_QUERY:
            return s.plan->reads_sources ? items(l.cross_q, s.threads) : 0;
        case CROSS_ATTEND:
            return s.plan->reads_sources ? attention_items(c.rows, s.plan->kv_heads) : 0;
        case BEFORE_CROSS_OUTPUT:
            return s.plan->reads_sources && is_low_bit(l.cross_o) ? c.rows : 0;
        case CROSS_OUTPUT:
            return s.plan->reads_sources ? items(l.cross_o, s.threads) : 0;
        case ROUTE:
            return l.mixture == nullptr ? 0 : fed * items(l.mixture->router, s.threads);
        case CHOOSE:
            return l.mixture == nullptr ? 0 : fed;
        case GATHER:
            return l.mixture == nullptr ? 0 : s.num_seats(layer);
        case MIX:
            return l.mixture == nullptr ? 0 : c.num_feed;
        case UP:
            if (l.mixture != nullptr) return s.most_experts(layer) * items(l.mixture->experts->up, s.threads) + lower;
            return fed * items(l.up, s.threads) * (s.plan->is_gated && !s.is_fused(layer) ? 2 : 1) + lower;
        case ACTIVATE:
            return l.mixture != nullptr || s.is_fused(layer) ? 0 : c.num_feed * s.activate_parts();
        case BEFORE_DOWN:
            if (l.mixture != nullptr) return is_low_bit(l.mixture->experts->down) ? s.num_seats(layer) : 0;
            return is_low_bit(l.down) ? c.num_feed : 0;
        case DOWN:
            if (l.mixture != nullptr) return s.most_experts(layer) * items(l.mixture->experts->down, s.threads) + lower;
            return fed * items(l.down, s.threads) + lower;
        default:
            return c.rows;
    }
}

// Divides working space into buffers that are aligned to 64 bytes, a line of the cache and a vector; without any memory
// it only counts the bytes.
struct Space {
    uint8_t* at;
    int64_t number_bytes;  // of the numbers of the body that works there
    int64_t used = 0;
    uint8_t* take_bytes(int64_t bytes) {
        uint8_t* found = at == nullptr ? nullptr : at + used;
        used += (bytes + 63) / 64 * 64;
        return found;
    }
    bf16* take(int64_t count) { return (bf16*)take_bytes(count * number_bytes); }
    int64_t* take_integers(int64_t count) { return (int64_t*)take_bytes(count * (int64_t)sizeof(int64_t)); }
    float* take_floats(int64_t count) { return (float*)take_bytes(count * (int64_t)sizeof(float)); }
};

// Sets the buffers of a span in its working space; returns the bytes they take.
int64_t lay_out(Span& s, int64_t body, uint8_t* space, std::vector<bf16*>& low) {
    const Plan& p = *s.plan;
    const int64_t rows = s.call->rows;
    Space from{space, body_of(body)->number_bytes};
    s.sums = from.take_floats(rows * s.query_width());
    s.x = from.take(rows * p.width);
    s.qkv = s.call->heads != nullptr ? s.call->heads : from.take(rows * s.qkv_width());
    s.a = from.take(rows * s.query_width());
    s.y = s.call->part == ATTENDED || s.call->part == FED ? s.call->out : from.take(rows * p.width);
    s.u = from.take(rows * p.width);
    s.gates = from.take(rows * p.ffn_width);
    int64_t prepared = 0, inner = rows * p.ffn_width, seats = 0, experts = 0, wide = p.width;
    for (int64_t layer = 0; layer < s.call->stop - s.call->start; ++layer) {
        const Layer& l = s.layer(layer);
        for (const Matrix* m : {&l.qkv, &l.o, &l.up, &l.down}) prepared = std::max(prepared, rows * prepared_width(*m));
        if (p.reads_sources)
            for (const Matrix* m : {&l.cross_q, &l.cross_o}) prepared = std::max(prepared, rows * prepared_width(*m));
        if (l.mixture == nullptr) continue;
        const Expert& e = *l.mixture->experts;
        const int64_t here = s.num_seats(layer);
        inner = std::max(inner, here * e.up.out), seats = std::max(seats, here);
        experts = std::max(experts, l.mixture->router.out), wide = std::max(wide, prepared_width(e.up));
        prepared = std::max({prepared, rows * prepared_width(e.up), here * prepared_width(e.down)});
    }
    s.inner = from.take(inner);
    s.prepared = from.take(prepared);
    Routed& r = s.routed;
    r.logits = from.take(rows * experts);
    r.weights = from.take(seats);
    for (int64_t** of : {&r.chosen, &r.seats, &r.row, &r.expert}) *of = from.take_integers(seats);
    r.first = from.take_integers(seats + 1);
    r.count = from.take_integers(1);
    r.x = from.take(seats * wide);
    r.parts = from.take(seats * p.width);
    for (int64_t t = 0; t < s.call->num_deltas; ++t) low.push_back(from.take(rows * even(s.call->deltas[t].rank)));
    s.low = low.data();
    return from.used;
}

// A buffer for the quantized rows of a call, empty where the matrix takes bfloat16.
std::vector<bf16> room_for(const Matrix& m, int64_t rows) { return std::vector<bf16>((size_t)(rows * prepared_width(m))); }

// Runs the two phases of a product: quantize the rows where the weights need it, then multiply tiles.
void run_prepared(int64_t threads, const Matrix& m, int64_t rows, Item item, const void* work) {
    const int64_t counts[] = {is_low_bit(m) ? rows : 0, items(m, threads)};
    run_phases(threads, 2, counts, item, work);
}

// Computes `greedy` through the screen of its matrix.
void run_screened(int64_t body, int64_t threads, const Greedy& greedy) {
    const Matrix& m = greedy.linear.matrix;
    const int64_t count = items(m, threads), rows = greedy.linear.rows, width = tiles(m) * LANES;
    std::vector<bf16> prepared = room_for(m.screen->codes, rows);
    std::vector<float> norms((size_t)(2 * rows)), least((size_t)(count * rows));
    const std::unique_ptr<float[]> upper(new float[rows * width]);
    std::vector<int64_t> exact((size_t)count);
    const Screened screened{greedy, norms.data(), norms.data() + rows, upper.get(), least.data(), exact.data()};
    const ScreenedWork work{&screened, threads, prepared.data()};
    const int64_t counts[] = {rows, count, count};
    run_phases(threads, 3, counts, body_of(body)->screened, &work);
    m.screen->counts[0] += 1, m.screen->counts[1] += m.out;
    for (const int64_t some : exact) m.screen->counts[2] += some;
}

}  // namespace

EXPORT const char* vivace_sources() { return VIVACE_SOURCES; }

// Which bodies this processor can run: bit 0 AVX2, bit 1 AVX-512, bit 2 AMX.
EXPORT int64_t vivace_features() {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (!avx2) return 0;
    if (!avx512) return 1;
    return amx_body != nullptr && has_amx() && is_granted_tiles() ? 7 : 3;
}

EXPORT void vivace_linear(int64_t body, int64_t threads, const Linear* linear) {
    std::vector<bf16> prepared = room_for(linear->matrix, linear->rows);
    const LinearWork work{linear, threads, prepared.data()};
    run_prepared(threads, linear->matrix, linear->rows, body_of(body)->linear, &work);
}

EXPORT void vivace_gated(int64_t body, int64_t threads, const Gated* gated) {
    std::vector<bf16> prepared = room_for(gated->gate, gated->rows);
    const GatedWork work{gated, threads, prepared.data()};
    run_prepared(threads, gated->gate, gated->rows, body_of(body)->gated, &work);
}

// Finds the largest output of each row; `values` may be null.
EXPORT void vivace_greedy(int64_t body, int64_t threads, const Linear* linear, int64_t* tokens, float* values) {
    const int64_t count = items(linear->matrix, threads), rows = linear->rows;
    std::vector<float> best((size_t)(count * rows));
    std::vector<int64_t> index((size_t)(count * rows));
    const Greedy greedy{*linear, best.data(), index.data()};
    if (linear->matrix.screen != nullptr) {
        run_screened(body, threads, greedy);
    } else {
        std::vector<bf16> prepared = room_for(linear->matrix, rows);
        const GreedyWork work{&greedy, threads, prepared.data()};
        run_prepared(threads, linear->matrix, rows, body_of(body)->greedy, &work);
    }
    for (int64_t row = 0; row < rows; ++row) {
        int64_t winner = 0;
        for (int64_t chunk = 1; chunk < count; ++chunk)
            if (best[chunk * rows + row] > best[winner * rows + row]) winner = chunk;
        tokens[row] = index[winner * rows + row];
        if (values != nullptr) values[row] = best[winner * rows + row];
    }
}

// Draws the token at a position from a row of float32 logits; returns its index, -1 where no token may come.
EXPORT int64_t vivace_draw(int64_t body, const float* logits, int64_t count, const int64_t* ids, const Drawing* how,
                           int64_t position, float* margin) {
    const Drawn drawn = Draws(*body_of(body), *how).draw(logits, true, count, ids, position);
    *margin = drawn.margin;
    return drawn.index;
}

EXPORT void vivace_activate(int64_t body, const Activated* activated) { body_of(body)->activate(activated, 0, 0); }

EXPORT void vivace_neurons(int64_t body, int64_t threads, const Neurons* neurons) {
    const int64_t counts[] = {(neurons->count + NEURONS - 1) / NEURONS, (neurons->width + COLUMNS - 1) / COLUMNS};
    run_phases(threads, 2, counts, body_of(body)->neurons, neurons);
}

EXPORT void vivace_norm(int64_t body, const Norm* norm) {
    for (int64_t row = 0; row < norm->rows; ++row) body_of(body)->norm(norm, 0, row);
}

EXPORT void vivace_attention(int64_t body, int64_t threads, const Attention* attention) {
    const int64_t count = attention_items(attention->rows, attention->kv_heads);
    run_phases(threads, 1, &count, body_of(body)->attention, attention);
}

// Writes rows of an embedding in EXACT12_ROWS or INT8, (count, in).
EXPORT void vivace_rows(const Matrix* matrix, const int64_t* tokens, int64_t count, bf16* out) {
    for (int64_t i = 0; i < count; ++i) embed_token(*matrix, nullptr, tokens[i], matrix->in, out + i * matrix->in);
}

EXPORT void vivace_quantise(int64_t body, int64_t threads, const Quantised* quantised) {
    const int64_t count = (quantised->rows + LANES - 1) / LANES;
    run_phases(threads, 1, &count, body_of(body)->quantise, quantised);
}

EXPORT void vivace_cluster(int64_t body, int64_t threads, const Clustering* clustering) {
    run_phases(threads, 1, &clustering->tiles, body_of(body)->cluster, clustering);
}

// Returns the bytes of working space that a call needs.
EXPORT int64_t vivace_span_bytes(int64_t body, const Plan* plan, const Call* call) {
    Span s{};
    s.plan = plan, s.call = call;
    std::vector<bf16*> low;
    return lay_out(s, body, nullptr, low);
}

EXPORT void vivace_span(int64_t body, int64_t threads, const Plan* plan, const Call* call) {
    Span s{};
    s.plan = plan, s.call = call;
    std::vector<bf16*> low;
    lay_out(s, body, call->space, low);
    const int64_t layers = call->stop - call->start;
    std::vector<int64_t> first_delta((size_t)layers + 1, call->num_deltas);
    for (int64_t layer = layers - 1, t = call->num_deltas; layer >= 0; --layer) {
        while (t > 0 && call->deltas[t - 1].layer >= call->start + layer) --t;
        first_delta[layer] = t;
    }
    s.first_delta = first_delta.data();
    s.threads = threads;
    std::vector<int64_t> counts{call->rows};
    for (int64_t layer = 0; layer < layers; ++layer)
        for (int64_t kind = 0; kind < NUM_KINDS; ++kind) counts.push_back(num_items(s, layer, (Kind)kind));
    run_phases(threads, (int64_t)counts.size(), counts.data(), body_of(body)->span, &s);
}

// Drafts chains into the arrays that the struct points to; returns the number of rows, which are in the order of
// depths.
EXPORT int64_t vivace_chain(int64_t body, int64_t threads, const Plan* plan, const Chain* chain) {
    return ChainRun({*body_of(body), body, threads}, *plan, *chain).run();
}

// Drafts with one plan and verifies with another, several times; returns the number of steps that were made.
EXPORT int64_t vivace_speculate(int64_t body, int64_t threads, const Plan* drafting, const Plan* plan,
                                const Chain* chain, Speculation* speculation) {
    return SpeculationRun({*body_of(body), body, threads}, *drafting, *plan, *chain, *speculation).run();
}

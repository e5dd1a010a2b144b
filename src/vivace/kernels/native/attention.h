// Attention of single rows over the entries each of them sees, in the order of their ordinals.
//
// Softmax runs online over blocks of 64 ordinals (Milakov & Gimelshein 2018, arXiv:1805.02867), counted from the
// row's first visible one, so that a row's sums are grouped the same way wherever its entries are stored.
#pragma once
#include "linear.h"

namespace {

constexpr int64_t ENTRIES = 64;
constexpr int64_t MAX_GROUP = 128;  // query heads per key/value head (library.py refuses more)

// scores[j] = scale q.k[j]
inline void score(const bf16* q, const bf16* const* k, int64_t count, int64_t width, float scale, float* scores) {
    for (int64_t j = 0; j < count; j += 4) {
        const bf16* four[4];
        for (int64_t i = 0; i < 4; ++i) four[i] = k[j + i < count ? j + i : j];
        dot_block<1>(four, q, width, width, scores + j);
        for (int64_t i = j; i < j + 4; ++i) scores[i] *= scale;
    }
}

// sums = sums * keep + weights . values
inline void mix(float* sums, float keep, const float* weights, const bf16* const* v, int64_t count, int64_t width) {
    const Vec kept = broadcast(keep);
    int64_t i = 0;
    for (; i + 4 * WIDTH <= width; i += 4 * WIDTH) {
        Vec acc[4];
        for (int part = 0; part < 4; ++part) acc[part] = mul(load(sums + i + part * WIDTH), kept);
        for (int64_t j = 0; j < count; ++j) {
            const Vec w = broadcast(weights[j]);
            for (int part = 0; part < 4; ++part) acc[part] = fma(w, load(v[j] + i + part * WIDTH), acc[part]);
        }
        for (int part = 0; part < 4; ++part) store(sums + i + part * WIDTH, acc[part]);
    }
    for (; i < width; i += WIDTH) {
        const int64_t n = width - i < WIDTH ? width - i : WIDTH;
        Vec acc = mul(load(sums + i, n), kept);
        for (int64_t j = 0; j < count; ++j) acc = fma(broadcast(weights[j]), load_some(v[j] + i, n), acc);
        store(sums + i, acc, n);
    }
}

// Scores to weights exp(score - new maximum), in place; what earlier sums have to be multiplied by.
inline float soften(float* scores, int64_t count, float softcap, float* highest, float* total) {
    for (int64_t j = count; j < ENTRIES; ++j) scores[j] = -__builtin_inff();
    float top = *highest;
    if (softcap != 0)
        for (int64_t j = 0; j < ENTRIES; j += WIDTH) {
            const Vec capped = hyperbolic_tangent(div(load(scores + j), broadcast(softcap)));
            store(scores + j, mul(capped, broadcast(softcap)));
        }
    for (int64_t j = 0; j < count; ++j) top = scores[j] > top ? scores[j] : top;
    Vec sum = broadcast(0);
    for (int64_t j = 0; j < ENTRIES; j += WIDTH) {
        const Vec weight = exponential(sub(load(scores + j), broadcast(top)));
        store(scores + j, weight);
    }
    for (int64_t j = count; j < ENTRIES; ++j) scores[j] = 0;
    for (int64_t j = 0; j < ENTRIES; j += WIDTH) sum = add(sum, load(scores + j));
    float kept[WIDTH];
    store(kept, exponential(broadcast(*highest - top)));
    const float keep = *highest == -__builtin_inff() ? 0 : kept[0];
    *total = *total * keep + sum_of(sum);
    *highest = top;
    return keep;
}

// All query heads of key/value head `kv` for one row.
void attend(const Attention& a, int64_t row, int64_t kv) {
    const int64_t group = a.heads / a.kv_heads, width = a.width, seen = a.seen[row];
    const int64_t* tail = a.tail == nullptr ? nullptr : a.tail + row * a.tail_width;
    int64_t reach = seen;
    for (int64_t i = 0; tail != nullptr && i < a.tail_width && tail[i] >= 0; ++i) ++reach;
    const int64_t base = (a.slot[row] * a.kv_heads + kv) * a.capacity;
    const bf16* q = a.q + row * a.q_stride + kv * group * width;
    float* sums = a.sums + (row * a.heads + kv * group) * width;
    float highest[MAX_GROUP], total[MAX_GROUP];
    for (int64_t g = 0; g < group; ++g) highest[g] = -__builtin_inff(), total[g] = 0;
    for (int64_t i = 0; i < group * width; ++i) sums[i] = 0;
    const bf16 *k[ENTRIES], *v[ENTRIES];
    float scores[ENTRIES];
    for (int64_t first = a.window && reach > a.window ? reach - a.window : 0; first < reach; first += ENTRIES) {
        const int64_t count = reach - first < ENTRIES ? reach - first : ENTRIES;
        for (int64_t j = 0; j < count; ++j) {
            const int64_t entry = first + j < seen ? first + j : tail[first + j - seen];
            k[j] = a.keys + (base + entry) * width;
            v[j] = a.values + (base + entry) * width;
        }
        for (int64_t g = 0; g < group; ++g) {
            score(q + g * width, k, count, width, a.scale, scores);
            const float keep = soften(scores, count, a.softcap, &highest[g], &total[g]);
            mix(sums + g * width, keep, scores, v, count, width);
        }
    }
    bf16* out = a.out + (row * a.heads + kv * group) * width;
    for (int64_t g = 0; g < group; ++g)
        for_width(width, [&](int64_t i, int64_t n) {
            const Vec whole = n == WIDTH ? load(sums + g * width + i) : load(sums + g * width + i, n);
            store_some(out + g * width + i, div(whole, broadcast(total[g])), n);
        });
}

}  // namespace

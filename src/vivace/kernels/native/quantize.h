// Quantization of weights to Q4: for every 64 inputs the scale, of either sign, with the smallest squared error
// (search_q4 in kernels/low_bit.py).
#pragma once
#include "bfloat16.h"
#include "linear_q4.h"

namespace {

constexpr int64_t PARTS = INT_GROUP / WIDTH;  // vectors of a group
// Initial scales, relative to the one that maps the largest weight to the end of the table.
constexpr float RATIOS[] = {1.0f, -1.0f, 0.92f, -0.92f, 0.85f, -0.85f};

// The squared error of a scale, and the least-squares scale for the entries that it selects.
struct Trial {
    float lost, refit;
    Trial(const Vec* w, const Nearest& nearest, float scale) {
        const Vec inverse = broadcast(1.0f / scale), size = broadcast(scale);
        Vec errors = broadcast(0), products = broadcast(0), squares = broadcast(0);
        for (int64_t i = 0; i < PARTS; ++i) {
            const Vec entry = nearest.entry(mul(w[i], inverse)), error = sub(w[i], mul(size, entry));
            errors = fma(error, error, errors);
            products = fma(w[i], entry, products);
            squares = fma(entry, entry, squares);
        }
        lost = sum_of(errors);
        refit = sum_of(products) / sum_of(squares);
    }
};

float best_scale(const Vec* w, const Nearest& nearest, float most, float longest) {
    float best = most / longest, least = __builtin_inff();
    for (const float ratio : RATIOS) {
        float scale = ratio * most / longest;
        for (int again = 0; again < 2; ++again) {
            const Trial trial(w, nearest, scale);
            if (trial.lost < least) least = trial.lost, best = scale;
            if (!(trial.refit / scale > 1e-3f)) break;  // zero, of the other sign, or not a number
            scale = trial.refit;
        }
    }
    return best;
}

void quantise_row(const Quantised& q, int64_t row, const Nearest& nearest, float longest) {
    const int64_t groups = int_groups(q.in);
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t first = g * INT_GROUP;
        Vec w[PARTS], most = broadcast(0);
        for (int64_t i = 0; i < PARTS; ++i) {
            const int64_t at = first + i * WIDTH, left = q.in - at;
            w[i] = left <= 0 ? broadcast(0) : load_some(q.weight + row * q.in + at, left < WIDTH ? left : WIDTH);
            most = max(most, max(w[i], sub(broadcast(0), w[i])));
        }
        const float size = max_of(most);
        bf16* kept = q.scales + row * groups + g;
        const bool is_nothing = size < 1e-30f;
        store(kept, broadcast(is_nothing ? 0 : best_scale(w, nearest, size, longest)), 1);
        const Vec inverse = broadcast(is_nothing ? 0 : 1.0f / widened(*kept));
        for (int64_t i = 0; i < PARTS; ++i)
            store_bytes((int8_t*)q.codes + (row * groups + g) * INT_GROUP + i * WIDTH, nearest.place(mul(w[i], inverse)));
    }
}

// Quantizes rows 16 item .. 16 item + 15.
void quantise_item(const void* context, int64_t, int64_t item) {
    const Quantised& q = *(const Quantised*)context;
    const Nearest nearest(q.table);
    float longest = 0;
    for (int i = 0; i < 16; ++i) {
        const float size = q.table[i] < 0 ? -(float)q.table[i] : (float)q.table[i];
        longest = size > longest ? size : longest;
    }
    for (int64_t row = item * LANES; row < q.rows && row < (item + 1) * LANES; ++row)
        quantise_row(q, row, nearest, longest);
}

}  // namespace

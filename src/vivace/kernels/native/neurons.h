// A gated feed-forward over some neurons, whose weights (rows of gate and up, a column of down) are stored together.
#pragma once
#include "linear_bf16.h"

namespace {

// out[i] = round(x . matrix[which[i]]) for `count` neurons, four at a time; a block of fewer repeats its first.
inline void dot_neurons(const bf16* matrix, int64_t stride, const int64_t* which, int64_t count, const bf16* x,
                        int64_t width, bf16* out) {
    float sums[LANES];
    for (int64_t i = 0; i < count; i += 4) {
        const bf16* w[4];
        const int64_t some = count - i < 4 ? count - i : 4;
        for (int64_t o = 0; o < 4; ++o) w[o] = matrix + which[o < some ? i + o : i] * stride;
        dot_block<1>(w, x, width, width, sums);
        store(out + i, load(sums, some), some);
    }
}

inline bool is_zero_number(uint16_t x) { return (x & 0x7fff) == 0; }

// Whether ReLU makes zero of a number: not where it is none.
inline bool is_rectified(uint16_t x) { return x == 0 || (x >= 0x8000 && x <= 0xff80); }

// Computes the activations of NEURONS neurons from item * NEURONS on. The up projection of those that are known to be
// zero is skipped, and with ReLU that of all zero ones.
inline void activate_neurons(const Neurons& n, int64_t item) {
    const int64_t first = item * NEURONS, count = n.count - first < NEURONS ? n.count - first : NEURONS;
    int64_t every[NEURONS], active[NEURONS];
    for (int64_t i = 0; i < count; ++i) every[i] = first + i;
    for (int64_t r = 0; r < n.rows; ++r) {
        alignas(64) bf16 gates[NEURONS], taken[NEURONS], ups[NEURONS], products[NEURONS];
        const bf16* x = n.x + r * n.width;
        bf16* inner = n.inner + r * n.count + first;
        const bf16* known = n.known == nullptr ? nullptr : n.known + r * n.count + first;
        if (known == nullptr) dot_neurons(n.gate, n.stride, every, count, x, n.width, gates);
        int64_t some = 0;
        for (int64_t i = 0; i < count; ++i) {
            inner[i] = 0;
            if (known != nullptr) gates[i] = known[i];
            const bool is_zero = known != nullptr ? is_zero_number(gates[i])
                                                  : n.activation == RELU && is_rectified(gates[i]);
            if (is_zero) continue;
            taken[some] = gates[i];
            active[some++] = first + i;
        }
        dot_neurons(n.up, n.stride, active, some, x, n.width, ups);
        if (known == nullptr) activate(taken, ups, products, some, n.activation);
        for (int64_t i = 0; known != nullptr && i < some; ++i)
            products[i] = to_bfloat16(widened(taken[i]) * widened(ups[i]));
        for (int64_t i = 0; i < some; ++i) inner[active[i] - first] = products[i];
    }
}

// Adds the neurons' outputs to COLUMNS columns from item * COLUMNS on, in the order of the neurons. Four active neurons
// are added at a time, so that a column is loaded and stored once for four.
inline void add_neurons(const Neurons& n, int64_t item) {
    const int64_t first = item * COLUMNS, count = n.width - first < COLUMNS ? n.width - first : COLUMNS;
    for (int64_t r = 0; r < n.rows; ++r) {
        const bf16* inner = n.inner + r * n.count;
        float* out = n.out + r * n.width + first;
        for (int64_t i = 0; i < n.count;) {
            const bf16* down[4];
            Vec scale[4];
            int taken = 0;
            for (; i < n.count && taken < 4; ++i) {
                if (is_zero_number(inner[i])) continue;
                down[taken] = n.down + i * n.stride + first;
                scale[taken++] = broadcast(__builtin_bit_cast(float, (uint32_t)inner[i] << 16));
            }
            if (taken == 0) break;
            for (int t = taken; t < 4; ++t) down[t] = down[0], scale[t] = broadcast(0);
            for (int64_t c = 0; c < count; c += WIDTH) {
                const int64_t some = count - c < WIDTH ? count - c : WIDTH;
                Vec sum = some == WIDTH ? load(out + c) : load(out + c, some);
                for (int t = 0; t < 4; ++t) sum = fma(scale[t], load_some(down[t] + c, some), sum);
                if (some == WIDTH)
                    store(out + c, sum);
                else
                    store(out + c, sum, some);
            }
        }
    }
}

}  // namespace

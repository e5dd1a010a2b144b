// Exponentials, activations, norms and rotations. Results are rounded to bfloat16 where kernels/reference.py does.
//
// Rows of any width end with a vector that is loaded and stored in part, so every number goes through the same
// operations wherever it stands in a row.
#pragma once
#include "span.h"

namespace {

inline Vec load_some(const bf16* p, int64_t n) { return n == WIDTH ? load(p) : load(p, n); }
inline void store_some(bf16* p, Vec v, int64_t n) { n == WIDTH ? store(p, v) : store(p, v, n); }

// exp on [-87, 88], where 2^n is a normal float32, otherwise the value at the end of that range; relative error below
// 2e-7 (Cephes' polynomial).
inline Vec exponential(Vec x) {
    x = min(max(x, broadcast(-87.0f)), broadcast(88.0f));
    const Vec n = nearest(mul(x, broadcast(1.44269504088896341f)));
    x = fma(n, broadcast(-0.693359375f), x);
    x = fma(n, broadcast(2.12194440e-4f), x);
    Vec p = broadcast(1.9875691500e-4f);
    const float rest[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    for (const float c : rest) p = fma(p, x, broadcast(c));
    p = fma(mul(x, x), p, add(x, broadcast(1.0f)));
    return mul(p, power_of_two(n));
}

inline Vec sigmoid(Vec x) { return div(broadcast(1.0f), add(broadcast(1.0f), exponential(sub(broadcast(0), x)))); }

inline Vec hyperbolic_tangent(Vec x) {
    return sub(broadcast(1.0f), div(broadcast(2.0f), add(broadcast(1.0f), exponential(add(x, x)))));
}

// Cumulative normal distribution; the complementary error function is erfcc of Numerical Recipes.
inline Vec normal_area(Vec x) {
    const Vec z = mul(max(x, sub(broadcast(0), x)), broadcast(0.70710678118654752f));
    const Vec t = div(broadcast(1.0f), fma(broadcast(0.5f), z, broadcast(1.0f)));
    Vec p = broadcast(0.17087277f);
    const float rest[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                          0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
    for (const float c : rest) p = fma(p, t, broadcast(c));
    const Vec half = mul(broadcast(0.5f), mul(t, exponential(sub(p, mul(z, z)))));
    return where_negative(x, half, sub(broadcast(1.0f), half));
}

inline Vec activated(Vec x, int64_t kind) {
    switch (kind) {
        case SILU:
            return mul(x, sigmoid(x));
        case GELU_TANH: {  // 1 + tanh(u) = 2 sigmoid(2u)
            const Vec u = mul(x, fma(mul(x, x), broadcast(0.0356774081f), broadcast(0.7978845608f)));
            return mul(x, sigmoid(add(u, u)));
        }
        case GELU:
            return mul(x, normal_area(x));
        default:
            return max(broadcast(0), x);  // the second one where one of them is no number
    }
}

// Calls use(first component, number of components) for the vectors of a row; the last one may be shorter.
template <class Use>
inline void for_width(int64_t width, Use use) {
    int64_t i = 0;
    for (; i + WIDTH <= width; i += WIDTH) use(i, WIDTH);
    if (i < width) use(i, width - i);
}

// out = round(act(gate)) * up, or round(act(gate)) where `up` is null
void activate(const bf16* gate, const bf16* up, bf16* out, int64_t count, int64_t kind) {
    for_width(count, [&](int64_t i, int64_t n) {
        const Vec active = rounded(activated(load_some(gate + i, n), kind));
        store_some(out + i, up == nullptr ? active : mul(active, load_some(up + i, n)), n);
    });
}

// Limits numbers to [-most, most] in place, where `most` is a bfloat16 number.
void clip(bf16* x, int64_t count, float most) {
    for_width(count, [&](int64_t i, int64_t n) {
        store_some(x + i, min(max(load_some(x + i, n), broadcast(-most)), broadcast(most)), n);
    });
}

// Layer norm of one row, which is rounded once, at the end; `out` may be `x`.
void layer_norm_row(const bf16* x, const Gain& gain, bf16* out, int64_t width, float eps) {
    Vec sum = broadcast(0), squares = broadcast(0);
    for_width(width, [&](int64_t i, int64_t n) { sum = add(sum, load_some(x + i, n)); });
    const Vec mean = broadcast(sum_of(sum) / (float)width);
    for_width(width, [&](int64_t i, int64_t n) {
        float away[WIDTH];
        store(away, sub(load_some(x + i, n), mean));
        for (int64_t k = n; k < WIDTH; ++k) away[k] = 0;
        squares = fma(load(away), load(away), squares);
    });
    const Vec scale = broadcast(1.0f / __builtin_sqrtf(sum_of(squares) / (float)width + eps));
    for_width(width, [&](int64_t i, int64_t n) {
        const Vec y = mul(sub(load_some(x + i, n), mean), scale);
        store_some(out + i, fma(y, load_some(gain.weight + i, n), load_some(gain.bias + i, n)), n);
    });
}

// Norm of one row; `out` may be `x`. With an offset the weight of a root-mean-square norm is offset + weight and
// nothing is rounded between.
void norm_row(const bf16* x, const Gain& gain, bf16* out, int64_t width, float eps, float offset) {
    if (gain.bias != nullptr) return layer_norm_row(x, gain, out, width, eps);
    Vec squares = broadcast(0);
    for_width(width, [&](int64_t i, int64_t n) {
        const Vec v = load_some(x + i, n);
        squares = fma(v, v, squares);
    });
    const Vec scale = broadcast(1.0f / __builtin_sqrtf(sum_of(squares) / (float)width + eps));
    for_width(width, [&](int64_t i, int64_t n) {
        const Vec y = mul(load_some(x + i, n), scale), w = load_some(gain.weight + i, n);
        store_some(out + i, offset != 0 ? mul(y, add(broadcast(offset), w)) : mul(rounded(y), w), n);
    });
}

// Returns the probability of the largest logit and sets `index` to the first such logit; `softcap` is that of the
// logits, 0 for none.
float likeliest(const bf16* logits, int64_t count, float softcap, int64_t* index) {
    const auto capped = [&](Vec v) {
        return softcap == 0 ? v : mul(broadcast(softcap), hyperbolic_tangent(div(v, broadcast(softcap))));
    };
    float highest = -__builtin_inff();
    for_width(count, [&](int64_t i, int64_t n) {
        const Vec v = load_some(logits + i, n);
        if (!any_greater(v, highest)) return;
        float values[WIDTH];
        store(values, v);
        for (int64_t k = 0; k < n; ++k)
            if (values[k] > highest) highest = values[k], *index = i + k;
    });
    const Vec top = capped(broadcast(highest));
    Vec sum = broadcast(0);
    for_width(count, [&](int64_t i, int64_t n) {
        float weights[WIDTH];
        store(weights, exponential(sub(capped(load_some(logits + i, n)), top)));
        for (int64_t k = n; k < WIDTH; ++k) weights[k] = 0;
        sum = add(sum, load(weights));
    });
    return 1 / sum_of(sum);
}

// Applies the rotary embedding to the first `width` components in place; `sin` has its first half negated.
void rotate(bf16* x, const bf16* cos, const bf16* sin, int64_t width) {
    const int64_t half = width / 2;
    for_width(half, [&](int64_t i, int64_t n) {
        const Vec low = load_some(x + i, n), high = load_some(x + half + i, n);
        const Vec l = rounded(mul(low, load_some(cos + i, n)));
        const Vec h = rounded(mul(high, load_some(cos + half + i, n)));
        store_some(x + i, fma(high, load_some(sin + i, n), l), n);
        store_some(x + half + i, fma(low, load_some(sin + half + i, n), h), n);
    });
}

}  // namespace

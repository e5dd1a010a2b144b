// Draws the token of a row of logits as the largest of logit / temperature + noise (core/draws.py has the reasons, and
// the same in PyTorch). The noise depends on the text's key, the position and the token only.
#pragma once
#include "elementwise.h"

namespace {

constexpr int64_t PAIRS = 64;  // pairs of tokens whose random bits are made together

inline uint32_t turned(uint32_t x, int by) { return x << by | x >> (32 - by); }

// Threefry-2x32 with twenty rounds (Salmon et al. 2011): two words of random bits for each pair of tokens.
inline void threefry(uint64_t key, uint32_t position, const uint32_t* pair, uint32_t* first, uint32_t* second) {
    const uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32), k2 = k0 ^ k1 ^ 0x1BD11BDAu;
    for (int64_t i = 0; i < PAIRS; ++i) {
        uint32_t x = pair[i] + k0, y = position + k1;
        const auto mix = [&](int a, int b, int c, int d) {
            x += y, y = turned(y, a) ^ x;
            x += y, y = turned(y, b) ^ x;
            x += y, y = turned(y, c) ^ x;
            x += y, y = turned(y, d) ^ x;
        };
        mix(13, 15, 26, 6), x += k1, y += k2 + 1;
        mix(17, 29, 16, 24), x += k2, y += k0 + 2;
        mix(13, 15, 26, 6), x += k0, y += k1 + 3;
        mix(17, 29, 16, 24), x += k1, y += k2 + 4;
        mix(13, 15, 26, 6), x += k2, y += k0 + 5;
        first[i] = x, second[i] = y;
    }
}

// log x of a normal number (Cephes' polynomial), with a small relative error near one too.
inline float logarithm(float x) {
    int32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    bits -= 0x3f3504f3;  // the square root of a half
    const float exponent = (float)(bits >> 23);
    const int32_t mantissa = (bits & 0x7fffff) + 0x3f3504f3;
    float f;
    __builtin_memcpy(&f, &mantissa, sizeof f);
    f -= 1;
    const float square = f * f;
    float p = 7.0376836292e-2f;
    p = __builtin_fmaf(p, f, -1.1514610310e-1f);
    p = __builtin_fmaf(p, f, 1.1676998740e-1f);
    p = __builtin_fmaf(p, f, -1.2420140846e-1f);
    p = __builtin_fmaf(p, f, 1.4249322787e-1f);
    p = __builtin_fmaf(p, f, -1.6668057665e-1f);
    p = __builtin_fmaf(p, f, 2.0000714765e-1f);
    p = __builtin_fmaf(p, f, -2.4999993993e-1f);
    p = __builtin_fmaf(p, f, 3.3333331174e-1f);
    p = __builtin_fmaf(exponent, -2.12194440e-4f, p * (f * square));
    p = __builtin_fmaf(-0.5f, square, p);
    return __builtin_fmaf(exponent, 0.693359375f, f + p);
}

// A number with Gumbel's distribution from 31 of the bits: -log(-log(1 - u)), u in (0, 1). It is large where u is small,
// so small u keep their relative precision.
inline float gumbel(uint32_t bits) {
    int32_t whole = (int32_t)(bits >> 1);
    whole = whole < 0x7fffff80 ? whole : 0x7fffff80;  // u = 1 - 2^-24
    const float u = ((float)whole + 0.5f) * 0x1p-31f;
    const float rest = 1 - u;
    return -logarithm((u - (1 - rest)) - logarithm(rest));
}

template <class Number>
inline Vec read(const Number* p, int64_t n) { return n == WIDTH ? load(p) : load(p, n); }

// Writes logits times a scale, and finds the largest of them before the scale.
template <class Number>
float scaled(const Number* logits, int64_t count, float scale, float* scores) {
    float top = -__builtin_inff();
    for_width(count, [&](int64_t i, int64_t n) {
        const Vec v = read(logits + i, n);
        const Vec score = mul(v, broadcast(scale));
        n == WIDTH ? store(scores + i, score) : store(scores + i, score, n);
        if (!any_greater(v, top)) return;
        float values[WIDTH];
        store(values, v);
        for (int64_t k = 0; k < n; ++k)
            if (values[k] > top) top = values[k];
    });
    return top;
}

// Adds noise to the scores of 2 PAIRS tokens from `start` on, or to fewer at the end.
inline void add_noise(const Perturbed& p, int64_t start) {
    const int64_t some = p.count - start < 2 * PAIRS ? p.count - start : 2 * PAIRS;
    uint32_t pair[PAIRS], first[PAIRS], second[PAIRS];
    float noise[2 * PAIRS];
    if (p.ids == nullptr) {
        for (int64_t i = 0; i < PAIRS; ++i) pair[i] = (uint32_t)(start / 2 + i);
        threefry((uint64_t)p.key, (uint32_t)p.position, pair, first, second);
        for (int64_t i = 0; i < PAIRS; ++i) noise[2 * i] = gumbel(first[i]), noise[2 * i + 1] = gumbel(second[i]);
    } else {
        for (int64_t at = 0; at < 2 * PAIRS; at += PAIRS) {
            const int64_t left = some - at;
            for (int64_t i = 0; i < PAIRS; ++i) pair[i] = i < left ? (uint32_t)(p.ids[start + at + i] / 2) : 0;
            threefry((uint64_t)p.key, (uint32_t)p.position, pair, first, second);
            for (int64_t i = 0; i < PAIRS && i < left; ++i)
                if (p.ids[start + at + i] % 2 == 1) first[i] = second[i];
            for (int64_t i = 0; i < PAIRS; ++i) noise[at + i] = gumbel(first[i]);
        }
    }
    for (int64_t i = 0; i < some; ++i) p.scores[start + i] += noise[i];
}

// Computes the scores of a row, the index of the largest one (-1 where there is none) and the two largest.
void perturb(Perturbed* p) {
    p->top = p->is_float ? scaled((const float*)p->logits, p->count, p->scale, p->scores)
                         : scaled((const bf16*)p->logits, p->count, p->scale, p->scores);
    float best = -__builtin_inff(), second = best;
    int64_t index = -1;
    for (int64_t start = 0; start < p->count; start += 2 * PAIRS) {
        add_noise(*p, start);
        const int64_t stop = start + 2 * PAIRS < p->count ? start + 2 * PAIRS : p->count;
        for_width(stop - start, [&](int64_t i, int64_t n) {
            if (!any_greater(read(p->scores + start + i, n), second)) return;
            for (int64_t k = start + i; k < start + i + n; ++k) {
                const float score = p->scores[k];
                if (score > best) second = best, best = score, index = k;
                else if (score > second) second = score;
            }
        });
    }
    p->best = best, p->second = second, p->index = index;
}

// Sums exp((logit - top) scale) over all tokens and over those with logits above a bound.
template <class Number>
void add_masses(const Number* logits, const Perturbed& p, float above, float* total, float* over) {
    Vec all = broadcast(0), some = broadcast(0);
    const Vec none = broadcast(0);
    for_width(p.count, [&](int64_t i, int64_t n) {
        const Vec v = read(logits + i, n);
        float weights[WIDTH];
        store(weights, exponential(mul(sub(v, broadcast(p.top)), broadcast(p.scale))));
        for (int64_t k = n; k < WIDTH; ++k) weights[k] = 0;
        const Vec mass = load(weights);
        all = add(all, mass), some = add(some, where_negative(sub(broadcast(above), v), mass, none));
    });
    *total = sum_of(all), *over = sum_of(some);
}

void masses(const Perturbed* p, float above, float* total, float* over) {
    if (p->is_float) add_masses((const float*)p->logits, *p, above, total, over);
    else add_masses((const bf16*)p->logits, *p, above, total, over);
}

}  // namespace

// What the bodies for float32 have in place of bfloat16's part of simd_*.h: nothing is widened or rounded. Every sum is
// one chain of fused multiply-adds over the inputs in order.
#pragma once
#include "span.h"

namespace {

constexpr int64_t PARTS = LANES / WIDTH;  // vectors of a tile's sixteen outputs

inline Vec rounded(Vec a) { return a; }

// Weights that take 16 bits.
struct Float16 {
    uint16_t bits;
};
struct Bfloat16 {
    uint16_t bits;
};

#if defined(__AVX512F__)
inline __m512i words(__m256i halves) { return _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16); }
inline Vec load(const Float16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Vec load(const Bfloat16* p) { return _mm512_castsi512_ps(words(_mm256_loadu_si256((const __m256i*)p))); }
#else
inline __m256i words(__m128i halves) { return _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16); }
inline Vec load(const Float16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline Vec load(const Bfloat16* p) { return _mm256_castsi256_ps(words(_mm_loadu_si128((const __m128i*)p))); }
#endif
template <class W>
inline Vec load(const W* p, int64_t n) {
    W some[WIDTH] = {};
    for (int64_t i = 0; i < n; ++i) some[i] = p[i];
    return load(some);
}

// acc[i] + a[i] b[i]; with n only the first n numbers are read.
template <class W>
inline Vec dot(Vec acc, const float* a, const W* b) {
    return fma(load(a), load(b), acc);
}
template <class W>
inline Vec dot(Vec acc, const float* a, const W* b, int64_t n) {
    return fma(load(a, n), load(b, n), acc);
}

// The weights of one pair of inputs for the sixteen outputs of a tile.
struct Tile {
    Vec even[PARTS], odd[PARTS];
    Tile() = default;
    template <class W>
    explicit Tile(const W* p) {
#pragma GCC unroll 2
        for (int i = 0; i < PARTS; ++i) even[i] = load(p + i * WIDTH), odd[i] = load(p + LANES + i * WIDTH);
    }
};

// The weights of the first (0) or second (1) input of a pair for part `part` of a tile's sixteen outputs.
template <int WHICH, class W>
inline Vec half_of_pairs(const W* pair, int part) {
    return load(pair + WHICH * LANES + part * WIDTH);
}

// One pair of inputs of a row, repeated for sixteen outputs.
struct Inputs {
    Vec even, odd;
    explicit Inputs(const float* p) : even(broadcast(p[0])), odd(broadcast(p[1])) {}
};

// The sums of one row over the sixteen outputs of a tile.
struct Sums {
    Vec value[PARTS];
    Sums() {
        for (Vec& part : value) part = broadcast(0);
    }
    void step(const Tile& w, const Inputs& x) {
#pragma GCC unroll 2
        for (int i = 0; i < PARTS; ++i) value[i] = fma(w.odd[i], x.odd, fma(w.even[i], x.even, value[i]));
    }
    void put(float* p) const {
#pragma GCC unroll 2
        for (int i = 0; i < PARTS; ++i) store(p + i * WIDTH, value[i]);
    }
};

}  // namespace

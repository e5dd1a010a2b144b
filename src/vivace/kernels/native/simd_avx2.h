// Vector operations of the AVX2 body with FMA; simd_avx512.h describes each type. bfloat16 is widened to float32 by a
// shift, so products are summed even inputs first, then odd ones, in float32.
#pragma once
#include <immintrin.h>

#include "abi.h"

namespace {

// Of sixteen registers a sum of a tile takes two, a widened tile four and a pair of inputs two: 4 * 2 + 4 + 2 = 14.
constexpr int64_t WIDTH = 8;       // floats of a vector
constexpr int64_t WORD = 4 / sizeof(bf16);   // numbers in 32 bits
constexpr int64_t DOT_WIDTH = WIDTH * WORD;  // numbers of a dot product's step
constexpr int64_t MAX_ROWS = 4;    // rows of a block
constexpr int64_t MAX_SUMS = 4;    // tile sums in registers
constexpr int64_t LEAST_FETCHED = 2;  // rows for which weights are prefetched
constexpr int64_t STREAMED_INPUTS = 768;  // of row-major outputs that few rows read one after another
constexpr int64_t MAX_MIXED = 8;   // registers of attention's sums of values, beside values and weights
constexpr bool WIDENS = true;  // whether many rows are multiplied in float32 (linear_wide.h, attention_wide.h)

using Vec = __m256;

inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec nearest(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec power_of_two(Vec n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Vec where_negative(Vec x, Vec yes, Vec no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ));
}
inline bool any_greater(Vec a, float b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, broadcast(b), _CMP_GT_OQ)) != 0;
}
inline float sum_of(Vec a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float max_of(Vec a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

// out[i] = the sum of v[i] for four vectors; all are summed in the same order.
inline void sum_four(const Vec* v, float* out) {
    const Vec ab = add(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
    const Vec cd = add(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
    const Vec abcd = add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}

inline __m256i first(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
inline Vec load(const float* p, int64_t n) { return _mm256_maskload_ps(p, first(n)); }
inline void store(float* p, Vec a, int64_t n) { _mm256_maskstore_ps(p, first(n), a); }

// tile[p][i] = word p of rows[i] from number `at` on, for sixteen rows: a transposition of eight words.
inline void turn_words(const bf16* const* rows, int64_t at, bf16* tile) {
    for (int half = 0; half < 16; half += 8) {
        __m256i a[8], b[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_si256((const __m256i*)(rows[half + i] + at));
#pragma GCC unroll 4
        for (int i = 0; i < 8; i += 2) {
            b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 8; i += 4) {
            a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
            a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
            a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            bf16* to = tile + (c * LANES + half) * WORD;
            _mm256_storeu_si256((__m256i*)to, _mm256_permute2x128_si256(a[c], a[4 + c], 0x20));
            _mm256_storeu_si256((__m256i*)(to + 4 * LANES * WORD), _mm256_permute2x128_si256(a[c], a[4 + c], 0x31));
        }
    }
}

#if !defined(VIVACE_FLOAT32)  // else numbers_float32.h has what follows

inline Vec widen(__m128i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)); }
inline Vec load(const bf16* p) { return widen(_mm_loadu_si128((const __m128i*)p)); }
inline Vec load(const bf16* p, int64_t n) {
    alignas(16) bf16 some[8] = {};
    for (int64_t i = 0; i < n; ++i) some[i] = p[i];
    return widen(_mm_load_si128((const __m128i*)some));
}
// Rounds to the nearest bfloat16, ties to even; NaN stays NaN.
inline __m128i narrow(Vec a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const __m256i kept = _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), nan);
    const __m256i high = _mm256_srli_epi32(kept, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
inline void store(bf16* p, Vec a) { _mm_storeu_si128((__m128i*)p, narrow(a)); }
inline void store(bf16* p, Vec a, int64_t n) {
    alignas(16) bf16 some[8];
    _mm_store_si128((__m128i*)some, narrow(a));
    for (int64_t i = 0; i < n; ++i) p[i] = some[i];
}
inline Vec rounded(Vec a) { return widen(narrow(a)); }

inline Vec low(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline Vec high(__m256i pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000))); }

inline Vec dot(Vec acc, __m256i a, __m256i b) { return fma(high(a), high(b), fma(low(a), low(b), acc)); }
inline Vec dot(Vec acc, const bf16* a, const bf16* b) {
    return dot(acc, _mm256_loadu_si256((const __m256i*)a), _mm256_loadu_si256((const __m256i*)b));
}
inline Vec dot(Vec acc, const bf16* a, const bf16* b, int64_t n) {
    alignas(32) bf16 x[16] = {}, y[16] = {};
    for (int64_t i = 0; i < n; ++i) x[i] = a[i], y[i] = b[i];
    return dot(acc, x, y);
}

inline int32_t two(const bf16* p) {
    int32_t bits;
    __builtin_memcpy(&bits, p, 4);
    return bits;
}

// The even (0) or odd (1) inputs' weights of a pair for part `part` of a tile's sixteen outputs.
template <int WHICH>
inline Vec half_of_pairs(const bf16* pair, int part) {
    const __m256i both = _mm256_loadu_si256((const __m256i*)(pair + part * DOT_WIDTH));
    return WHICH == 0 ? low(both) : high(both);
}

struct Tile {
    Vec low0, high0, low1, high1;
    Tile() = default;
    explicit Tile(const bf16* p) {
        set(_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 16)));
    }
    void set(__m256i a, __m256i b) { low0 = low(a), high0 = high(a), low1 = low(b), high1 = high(b); }
};
// The dot products above with 32 weights in registers.
inline Vec dot(Vec acc, const bf16* a, const Vec& even, const Vec& odd) {
    const __m256i pairs = _mm256_loadu_si256((const __m256i*)a);
    return fma(high(pairs), odd, fma(low(pairs), even, acc));
}
inline Vec dot(Vec acc, const bf16* a, const Tile& w) {
    return dot(dot(acc, a, w.low0, w.high0), a + DOT_WIDTH, w.low1, w.high1);
}
inline Vec dot(Vec acc, const bf16* a, const Tile& w, int64_t n) {
    alignas(32) bf16 x[2 * DOT_WIDTH] = {};
    for (int64_t i = 0; i < n; ++i) x[i] = a[i];
    acc = dot(acc, x, w.low0, w.high0);
    return n > DOT_WIDTH ? dot(acc, x + DOT_WIDTH, w.low1, w.high1) : acc;
}
struct Inputs {
    Vec even, odd;
    explicit Inputs(const bf16* p) {
        const __m256i pair = _mm256_set1_epi32(two(p));
        even = low(pair), odd = high(pair);
    }
};
struct Sums {
    Vec value0 = _mm256_setzero_ps(), value1 = _mm256_setzero_ps();
    void step(const Tile& w, const Inputs& x) {
        value0 = fma(w.high0, x.odd, fma(w.low0, x.even, value0));
        value1 = fma(w.high1, x.odd, fma(w.low1, x.even, value1));
    }
    void put(float* p) const {
        _mm256_storeu_ps(p, value0);
        _mm256_storeu_ps(p + 8, value1);
    }
};

#endif

}  // namespace

// Vector operations of the AVX-512 body with BF16 dot products.
#pragma once
#include <immintrin.h>

#include "abi.h"

namespace {

constexpr int64_t WIDTH = 16;      // floats of a vector
constexpr int64_t WORD = 4 / sizeof(bf16);   // numbers in 32 bits
constexpr int64_t DOT_WIDTH = WIDTH * WORD;  // numbers of a dot product's step
// Of 32 registers a sum of a tile takes one: 12 rows over 2 tiles are 24 sums, beside 2 tiles and a pair of inputs; 6
// rows over 4 tiles are 24 sums, beside 4 tiles and a pair of inputs. A pair of inputs of a tile takes two registers in
// float32: 5 rows over 4 tiles are 20 sums, beside 8 for tiles.
#if defined(VIVACE_FLOAT32)
constexpr int64_t MAX_ROWS = 10;   // rows of a block
constexpr int64_t MAX_SUMS = 20;   // tile sums in registers
#else
constexpr int64_t MAX_ROWS = 12;
constexpr int64_t MAX_SUMS = 24;
#endif
constexpr int64_t LEAST_FETCHED = MAX_SUMS / 4 + 1;  // rows for which weights are prefetched
constexpr int64_t STREAMED_INPUTS = 2048;  // of row-major outputs that few rows read one after another
constexpr int64_t MAX_MIXED = 16;  // registers of attention's sums of values, beside values and weights
constexpr bool WIDENS = false;  // whether many rows are multiplied in float32 (linear_wide.h, attention_wide.h)

using Vec = __m512;

inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec nearest(Vec a) { return _mm512_roundscale_ps(a, 0); }
inline Vec power_of_two(Vec n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline Vec where_negative(Vec x, Vec yes, Vec no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), no, yes);
}
inline bool any_greater(Vec a, float b) { return _mm512_cmp_ps_mask(a, broadcast(b), _CMP_GT_OQ) != 0; }
inline float sum_of(Vec a) { return _mm512_reduce_add_ps(a); }
inline float max_of(Vec a) { return _mm512_reduce_max_ps(a); }

// out[i] = the sum of v[i] for four vectors; all are summed in the same order.
inline void sum_four(const Vec* v, float* out) {
    const Vec ab = add(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const Vec cd = add(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const Vec abcd = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
inline Vec load(const float* p, int64_t n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
inline void store(float* p, Vec a, int64_t n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a); }

// tile[p][i] = word p of rows[i] from number `at` on, for sixteen rows: a transposition of sixteen words.
inline void turn_words(const bf16* const* rows, int64_t at, bf16* tile) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + at);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const __m512i low0 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x44), high0 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xee);
        const __m512i low1 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x44);
        const __m512i high1 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xee);
        _mm512_storeu_si512(tile + c * LANES * WORD, _mm512_shuffle_i32x4(low0, low1, 0x88));
        _mm512_storeu_si512(tile + (4 + c) * LANES * WORD, _mm512_shuffle_i32x4(low0, low1, 0xdd));
        _mm512_storeu_si512(tile + (8 + c) * LANES * WORD, _mm512_shuffle_i32x4(high0, high1, 0x88));
        _mm512_storeu_si512(tile + (12 + c) * LANES * WORD, _mm512_shuffle_i32x4(high0, high1, 0xdd));
    }
}

#if !defined(VIVACE_FLOAT32)  // else numbers_float32.h has what follows

inline Vec widen(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }
inline Vec load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
inline Vec load(const bf16* p, int64_t n) { return widen(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p)); }
inline __m256i narrow(Vec a) { return (__m256i)_mm512_cvtneps_pbh(a); }
inline void store(bf16* p, Vec a) { _mm256_storeu_si256((__m256i*)p, narrow(a)); }
inline void store(bf16* p, Vec a, int64_t n) { _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), narrow(a)); }
inline Vec rounded(Vec a) { return widen(narrow(a)); }

// acc[i] + a[2i] b[2i] + a[2i+1] b[2i+1]; with n only the first n numbers are read.
inline Vec dot(Vec acc, const bf16* a, const bf16* b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_loadu_si512(b));
}
inline Vec dot(Vec acc, const bf16* a, const bf16* b, int64_t n) {
    const __mmask32 some = (__mmask32)((1ull << n) - 1);
    return _mm512_dpbf16_ps(
        acc, (__m512bh)_mm512_maskz_loadu_epi16(some, a), (__m512bh)_mm512_maskz_loadu_epi16(some, b));
}

inline int32_t two(const bf16* p) {
    int32_t bits;
    __builtin_memcpy(&bits, p, 4);
    return bits;
}

// The weights of one pair of inputs for the sixteen outputs of a tile.
struct Tile {
    __m512bh pair;
    Tile() = default;
    explicit Tile(const bf16* p) : pair((__m512bh)_mm512_loadu_si512(p)) {}
};
// The dot products above with 32 weights in a register.
inline Vec dot(Vec acc, const bf16* a, const Tile& w) {
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(a), w.pair);
}
inline Vec dot(Vec acc, const bf16* a, const Tile& w, int64_t n) {
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), a), w.pair);
}
// One pair of inputs of a row, repeated for sixteen outputs.
struct Inputs {
    __m512bh pair;
    explicit Inputs(const bf16* p) : pair((__m512bh)_mm512_set1_epi32(two(p))) {}
};
// The sums of one row over the sixteen outputs of a tile.
struct Sums {
    Vec value = _mm512_setzero_ps();
    void step(const Tile& w, const Inputs& x) { value = _mm512_dpbf16_ps(value, w.pair, x.pair); }
    void put(float* p) const { _mm512_storeu_ps(p, value); }
};

#endif

}  // namespace

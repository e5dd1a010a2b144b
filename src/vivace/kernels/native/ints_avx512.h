// Integers of a body: sixteen sums of products of eight-bit numbers, AVX-512 with VNNI.
#pragma once
#include "simd_avx512.h"

namespace {

constexpr int64_t MAX_LUT_SUMS = 12;  // tile sums held in registers beside tiles and entries
constexpr int64_t MAX_INT_ROWS = 12;  // rows whose sums fit the registers
#if defined(__AMX_TILE__)
constexpr int64_t MAX_INT_STREAMS = 8;  // sums of few rows over tiles read side by side, which such processors read faster
#else
constexpr int64_t MAX_INT_STREAMS = 0;
#endif
constexpr int64_t MAX_EXACT_SUMS = 24;  // tile sums held in registers beside tiles and upper bytes
constexpr int64_t MAX_EXACT_ROWS = 12;
constexpr int64_t MAX_EXACT_DOTS = 8;   // rows of row-major products

inline float max_of(Vec a) { return _mm512_reduce_max_ps(a); }

// Whole numbers -128..127 as bytes.
inline void store_bytes(int8_t* p, Vec whole) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(whole)));
}

// Four inputs' weights of each of sixteen outputs, 128 added: the dot product takes one factor without a sign.
struct Codes {
    __m512i bytes;
    Codes() = default;
    explicit Codes(const uint8_t* p) : bytes(_mm512_loadu_si512(p)) {}
};
struct Ints {
    Ints() = default;
    __m512i value;
    // `shift` is what takes the added 128 back: -128 times the sum of the row's inputs.
    explicit Ints(int32_t shift) : value(_mm512_set1_epi32(shift)) {}
    explicit Ints(__m512i sums) : value(sums) {}
    // Four neighbouring inputs of a row, for all sixteen outputs. Written out, since compilers move sums back and forth
    // around the intrinsic, and read inputs apart.
    void step(const Codes& w, const int8_t* x) {
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(value) : "v"(w.bytes), "m"(*(const int8_t(*)[4])x));
    }
    Vec part(int) const { return _mm512_cvtepi32_ps(value); }
};
// Sixteen bytes to choose from, and sixty-four chosen by the low and high halves of bytes.
struct Table {
    __m512i entries, mask = _mm512_set1_epi8(15);
    Table(const int8_t* p, int offset)  // what is added to a byte: 128, or nothing
        : entries(_mm512_broadcast_i32x4(_mm_xor_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi8((char)offset)))) {}
    void look_up(const uint8_t* p, Codes& low, Codes& high) const {
        const __m512i both = _mm512_loadu_si512(p);
        low.bytes = _mm512_shuffle_epi8(entries, _mm512_and_si512(both, mask));
        high.bytes = _mm512_shuffle_epi8(entries, _mm512_and_si512(_mm512_srli_epi16(both, 4), mask));
    }
};

// Sixteen bfloat16, and tiles of four pairs of inputs chosen by the four codes of each word.
struct Entries {
    __m512i twice;  // whatever a code's next bit is
    Entries() = default;
    explicit Entries(const bf16* p) : twice(_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p))) {}
    void choose(const uint8_t* p, Tile* tiles) const {
        const __m512i words = _mm512_loadu_si512(p);
        tiles[0].pair = (__m512bh)_mm512_permutexvar_epi16(words, twice);
        tiles[1].pair = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), twice);
        tiles[2].pair = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), twice);
        tiles[3].pair = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), twice);
    }
};

// Weights in twelve bits: their lower bytes as they are, and codes for sixteen upper ones. Two tiles lie side by side in
// 64 bytes, eight weights in turn, so that bytes interleave to whole weights.
struct UpperBytes {
    __m512i entries, mask = _mm512_set1_epi8(15);
    explicit UpperBytes(const uint8_t* p) : entries(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p))) {}
    // Two tiles whose codes are the low halves of bytes, or the high ones.
    template <bool IS_HIGH>
    void join(const uint8_t* lower, const uint8_t* codes, Tile* tiles) const {
        const __m512i both = _mm512_loadu_si512(codes), low = _mm512_loadu_si512(lower);
        const __m512i places = _mm512_and_si512(IS_HIGH ? _mm512_srli_epi16(both, 4) : both, mask);
        const __m512i upper = _mm512_shuffle_epi8(entries, places);
        tiles[0].pair = (__m512bh)_mm512_unpacklo_epi8(low, upper);
        tiles[1].pair = (__m512bh)_mm512_unpackhi_epi8(low, upper);
    }
};

// The entries of a rising table nearest to given numbers; a number in the middle goes down.
struct Nearest {
    Vec entries, middles;
    explicit Nearest(const int8_t* table) {
        float entry[16], middle[16];
        for (int i = 0; i < 16; ++i) entry[i] = table[i];
        for (int i = 0; i < 16; ++i) middle[i] = i == 15 ? __builtin_inff() : 0.5f * (entry[i] + entry[i + 1]);
        entries = load(entry), middles = load(middle);
    }
    __m512i search(Vec x) const {
        __m512i at = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int step = 8; step > 0; step /= 2) {
            const Vec middle = _mm512_permutexvar_ps(_mm512_add_epi32(at, _mm512_set1_epi32(step - 1)), middles);
            at = _mm512_mask_add_epi32(at, _mm512_cmp_ps_mask(x, middle, _CMP_GT_OQ), at, _mm512_set1_epi32(step));
        }
        return at;
    }
    Vec entry(Vec x) const { return _mm512_permutexvar_ps(search(x), entries); }
    Vec place(Vec x) const { return _mm512_cvtepi32_ps(search(x)); }
};

}  // namespace

// Integer and code operations of the AVX-512 body, with VNNI: products of eight-bit numbers, and codes decoded to
// weights.
//
// There are 32 registers of sixteen numbers, so a sum of a tile of sixteen outputs takes one.
#pragma once
#include "simd_avx512.h"

namespace {

constexpr int64_t MAX_LUT_SUMS = 12;  // sums in registers, beside decoded tiles and a codebook for each tile of outputs
constexpr int64_t MAX_INT_ROWS = 12;  // 12 registers of integer sums and 12 of totals, beside weights and a table
#if defined(__AMX_TILE__)
constexpr int64_t MAX_INT_STREAMS = 8;  // sums of few rows over tiles read side by side, faster on these processors
#else
constexpr int64_t MAX_INT_STREAMS = 0;  // tiles are read one after the other
#endif
constexpr int64_t MAX_EXACT_SUMS = 24;  // sums in registers, beside four tiles, inputs, upper bytes and a mask
constexpr int64_t MAX_EXACT_ROWS = 12;
constexpr int64_t MAX_EXACT_DOTS = 8;   // rows of row-major products, two outputs at a time: 16 sums

// Stores integers -128..127 as bytes.
inline void store_bytes(int8_t* p, Vec whole) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(whole)));
}

template <int BITS>
struct Bits {};

// 64 bytes of codes, as words of 16 bits; shifted also sets all bits to zero that are not among those of `mask`.
struct Words {
    __m512i bits;
    explicit Words(__m512i bits) : bits(bits) {}
    explicit Words(const uint8_t* p) : bits(_mm512_loadu_si512(p)) {}
    template <int SHIFT, int MASK = -1>
    Words shifted() const {
        const __m512i moved = SHIFT == 0 ? bits : _mm512_srli_epi16(bits, SHIFT);
        return Words(MASK == -1 ? moved : _mm512_and_si512(moved, _mm512_set1_epi16((int16_t)MASK)));
    }
    Words operator|(const Words& other) const { return Words(_mm512_or_si512(bits, other.bits)); }
};

// Weights of four inputs for each of sixteen outputs, plus 128: one factor of the dot product has no sign.
struct Codes {
    __m512i bytes;
    Codes() = default;
    explicit Codes(const uint8_t* p) : bytes(_mm512_loadu_si512(p)) {}
    explicit Codes(__m512i bytes) : bytes(bytes) {}
};
// Integer sums of one row for sixteen outputs, over a group of 64 inputs. With weights up to 255 and inputs up to 127
// they stay below 64 * 255 * 127 = 2,072,640 < 2^24, so they are exact as float32 too.
struct Ints {
    Ints() = default;
    __m512i value;
    // `shift` undoes the 128 that is added to weights: -128 times the sum of the group's inputs.
    explicit Ints(int32_t shift) : value(_mm512_set1_epi32(shift)) {}
    explicit Ints(__m512i sums) : value(sums) {}
    // Adds four neighbouring inputs of a row times their weights, for all sixteen outputs. In assembly, since compilers
    // copy sums around the intrinsic and load inputs by an instruction of their own.
    void step(const Codes& w, const int8_t* x) {
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(value) : "v"(w.bytes), "m"(*(const int8_t(*)[4])x));
    }
    Vec part(int) const { return _mm512_cvtepi32_ps(value); }
};
// Sixteen numbers of float16, and sixteen integers of a byte.
inline Vec load_halves(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Vec load_integers(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}

// A table of sixteen bytes, which is in every 128-bit lane of its register as the byte shuffle needs it; look_up
// decodes the low and the high halves of 64 bytes.
struct Table {
    __m512i entries, mask = _mm512_set1_epi8(15);
    Table(const int8_t* p, int offset)  // 128 or 0, which is added to each entry
        : entries(_mm512_broadcast_i32x4(_mm_xor_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi8((char)offset)))) {}
    // The entries that the lowest four bits of each byte select.
    Codes chosen(const Words& words) const {
        return Codes(_mm512_shuffle_epi8(entries, _mm512_and_si512(words.bits, mask)));
    }
    void look_up(const uint8_t* p, Codes& low, Codes& high) const {
        const __m512i both = _mm512_loadu_si512(p);
        low.bytes = _mm512_shuffle_epi8(entries, _mm512_and_si512(both, mask));
        high.bytes = _mm512_shuffle_epi8(entries, _mm512_and_si512(_mm512_srli_epi16(both, 4), mask));
    }
};

// A codebook of 2^BITS bfloat16 entries; choose decodes codes, the lowest bits of words, to a tile of one pair of inputs.
struct Entries {
    __m512i repeated;  // to 32 entries: vpermw selects by five bits, of which the upper ones belong to other codes
    Entries() = default;
    Entries(const bf16* p, Bits<4>) : repeated(_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p))) {}
    Entries(const bf16* p, Bits<3>) : repeated(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p))) {}
    Entries(const bf16* p, Bits<2>) : repeated(_mm512_broadcastq_epi64(_mm_loadl_epi64((const __m128i*)p))) {}
    void choose(const Words& words, Tile& tile) const {
        tile.pair = (__m512bh)_mm512_permutexvar_epi16(words.bits, repeated);
    }
};

// The sixteen upper bytes of weights in twelve bits. In 64 bytes of a plane eight weights of one tile and eight of
// another alternate, so that interleaving lower and upper bytes, which works on 128-bit lanes, gives the weights of
// either tile.
struct UpperBytes {
    __m512i entries, mask = _mm512_set1_epi8(15);
    explicit UpperBytes(const uint8_t* p) : entries(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p))) {}
    // Decodes two tiles whose codes are in the low halves of the bytes (IS_HIGH: in the high halves).
    template <bool IS_HIGH>
    void join(const uint8_t* lower, const uint8_t* codes, Tile* tiles) const {
        const __m512i both = _mm512_loadu_si512(codes), low = _mm512_loadu_si512(lower);
        const __m512i places = _mm512_and_si512(IS_HIGH ? _mm512_srli_epi16(both, 4) : both, mask);
        const __m512i upper = _mm512_shuffle_epi8(entries, places);
        tiles[0].pair = (__m512bh)_mm512_unpacklo_epi8(low, upper);
        tiles[1].pair = (__m512bh)_mm512_unpackhi_epi8(low, upper);
    }
};

// The entries of a rising table that are nearest to given numbers, found by bisection of the midpoints between entries;
// a number at a midpoint gets the lower entry.
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

// Integer and code operations of the AVX2 body, with VNNI where it is compiled for it; ints_avx512.h describes each
// type.
//
// A tile has sixteen outputs, so a sum of a tile takes two of the sixteen registers here.
#pragma once
#include "simd_avx2.h"

namespace {

constexpr int64_t MAX_LUT_SUMS = 2;     // 4 registers; widened tiles take the others, and memory
constexpr int64_t MAX_INT_ROWS = 4;     // 8 registers of integer sums, beside 2 of weights and 2 of inputs
constexpr int64_t MAX_INT_STREAMS = 0;  // tiles are read one after the other
constexpr int64_t MAX_EXACT_SUMS = 4;   // 8 registers, beside a widened tile (4) and a pair of inputs (2)
constexpr int64_t MAX_EXACT_ROWS = 2;
constexpr int64_t MAX_EXACT_DOTS = 2;

inline void store_bytes(int8_t* p, Vec whole) {
    const __m256i ints = _mm256_cvtps_epi32(whole);
    const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(ints), _mm256_extracti128_si256(ints, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(shorts, shorts));
}

struct Four {
    __m256i bytes;
    explicit Four(const int8_t* p) {
        int32_t bits;
        __builtin_memcpy(&bits, p, 4);
        bytes = _mm256_set1_epi32(bits);
    }
};

template <int BITS>
struct Bits {};

struct Words {
    __m256i low, high;
    Words(__m256i low, __m256i high) : low(low), high(high) {}
    explicit Words(const uint8_t* p)
        : low(_mm256_loadu_si256((const __m256i*)p)), high(_mm256_loadu_si256((const __m256i*)(p + 32))) {}
    template <int SHIFT, int MASK = -1>
    static __m256i moved(__m256i bits) {
        const __m256i found = SHIFT == 0 ? bits : _mm256_srli_epi16(bits, SHIFT);
        return MASK == -1 ? found : _mm256_and_si256(found, _mm256_set1_epi16((int16_t)MASK));
    }
    template <int SHIFT, int MASK = -1>
    Words shifted() const {
        return Words(moved<SHIFT, MASK>(low), moved<SHIFT, MASK>(high));
    }
    Words operator|(const Words& other) const {
        return Words(_mm256_or_si256(low, other.low), _mm256_or_si256(high, other.high));
    }
};

#if defined(__AVXVNNI__)
constexpr int8_t FLIP = 0;  // weights stay 128 too large: the first factor of vpdpbusd has no sign
#else
constexpr int8_t FLIP = -128;  // weights get their sign back: vpsignb below needs it
#endif

struct Codes {
    __m256i low, high;
    Codes() = default;
    explicit Codes(const uint8_t* p)
        : low(_mm256_xor_si256(_mm256_loadu_si256((const __m256i*)p), _mm256_set1_epi8(FLIP))),
          high(_mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(p + 32)), _mm256_set1_epi8(FLIP))) {}
};
struct Ints {
    Ints() = default;
    __m256i low, high;
#if defined(__AVXVNNI__)
    explicit Ints(int32_t shift) : low(_mm256_set1_epi32(shift)), high(low) {}
    void step(const Codes& w, const int8_t* p) {
        const Four x(p);
        low = _mm256_dpbusd_avx_epi32(low, w.low, x.bytes);
        high = _mm256_dpbusd_avx_epi32(high, w.high, x.bytes);
    }
#else
    explicit Ints(int32_t) : low(_mm256_setzero_si256()), high(low) {}
    // |w| times x with w's sign. vpmaddubsw saturates at 16 bits: two products of at most 128 * 127 add up to 32,512,
    // below 32,767. Inputs of -128 do not occur.
    static __m256i dot(__m256i acc, __m256i w, __m256i x) {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
        return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    void step(const Codes& w, const int8_t* p) {
        const Four x(p);
        low = dot(low, w.low, x.bytes);
        high = dot(high, w.high, x.bytes);
    }
#endif
    Vec part(int which) const { return _mm256_cvtepi32_ps(which == 0 ? low : high); }
};
inline Vec load_halves(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline Vec load_integers(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
struct Table {
    __m256i entries, mask = _mm256_set1_epi8(15);
    Table(const int8_t* p, int offset)  // 128 or 0, which is added to each entry
        : entries(_mm256_broadcastsi128_si256(
              _mm_xor_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi8((int8_t)(FLIP ^ offset))))) {}
    __m256i chosen(__m256i places) const { return _mm256_shuffle_epi8(entries, _mm256_and_si256(places, mask)); }
    Codes chosen(const Words& words) const {
        Codes codes;
        codes.low = chosen(words.low), codes.high = chosen(words.high);
        return codes;
    }
    void look_up(const uint8_t* p, Codes& low, Codes& high) const {
        const __m256i a = _mm256_loadu_si256((const __m256i*)p), b = _mm256_loadu_si256((const __m256i*)(p + 32));
        low.low = chosen(a), low.high = chosen(b);
        high.low = chosen(_mm256_srli_epi16(a, 4)), high.high = chosen(_mm256_srli_epi16(b, 4));
    }
};

struct Entries {
    __m256i low, high;  // lower and upper bytes of the entries, in both halves of the register
    Entries() = default;
    template <int BITS>
    Entries(const bf16* p, Bits<BITS>) {
        alignas(16) uint8_t bytes[2][16];
        for (int i = 0; i < 16; ++i) {
            const bf16 entry = p[i % (1 << BITS)];
            bytes[0][i] = (uint8_t)entry, bytes[1][i] = (uint8_t)(entry >> 8);
        }
        low = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)bytes[0]));
        high = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)bytes[1]));
    }
    // The entries that the lowest four bits of each word select. A byte shuffle writes zero for an index of 128 or
    // more, so one shuffle fills the lower bytes of the words and one the upper bytes.
    __m256i chosen(__m256i words) const {
        const __m256i code = _mm256_and_si256(words, _mm256_set1_epi16(15));
        const __m256i first = _mm256_or_si256(code, _mm256_set1_epi16((int16_t)0x8000));
        const __m256i second = _mm256_or_si256(_mm256_slli_epi16(code, 8), _mm256_set1_epi16(0x80));
        return _mm256_or_si256(_mm256_shuffle_epi8(low, first), _mm256_shuffle_epi8(high, second));
    }
    void choose(const Words& words, Tile& tile) const { tile.set(chosen(words.low), chosen(words.high)); }
    void choose(const Words& words, bf16* tile) const {
        _mm256_storeu_si256((__m256i*)tile, chosen(words.low));
        _mm256_storeu_si256((__m256i*)(tile + 16), chosen(words.high));
    }
};

struct UpperBytes {
    __m256i entries, mask = _mm256_set1_epi8(15);
    explicit UpperBytes(const uint8_t* p) : entries(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p))) {}
    template <bool IS_HIGH>
    void join(const uint8_t* lower, const uint8_t* codes, Tile* tiles) const {
        __m256i first[2], second[2];
        for (int part = 0; part < 2; ++part) {
            const __m256i both = _mm256_loadu_si256((const __m256i*)codes + part);
            const __m256i low = _mm256_loadu_si256((const __m256i*)lower + part);
            const __m256i places = _mm256_and_si256(IS_HIGH ? _mm256_srli_epi16(both, 4) : both, mask);
            const __m256i upper = _mm256_shuffle_epi8(entries, places);
            first[part] = _mm256_unpacklo_epi8(low, upper), second[part] = _mm256_unpackhi_epi8(low, upper);
        }
        tiles[0].set(first[0], first[1]);
        tiles[1].set(second[0], second[1]);
    }
};

struct Nearest {
    Vec entries[2], middles[2];
    explicit Nearest(const int8_t* table) {
        float entry[16], middle[16];
        for (int i = 0; i < 16; ++i) entry[i] = table[i];
        for (int i = 0; i < 16; ++i) middle[i] = i == 15 ? __builtin_inff() : 0.5f * (entry[i] + entry[i + 1]);
        for (int i = 0; i < 2; ++i) entries[i] = load(entry + 8 * i), middles[i] = load(middle + 8 * i);
    }
    static Vec take(const Vec* from, __m256i at) {
        const Vec is_high = _mm256_castsi256_ps(_mm256_slli_epi32(at, 28));
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(from[0], at), _mm256_permutevar8x32_ps(from[1], at), is_high);
    }
    __m256i search(Vec x) const {
        __m256i at = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int step = 8; step > 0; step /= 2) {
            const Vec middle = take(middles, _mm256_add_epi32(at, _mm256_set1_epi32(step - 1)));
            const __m256i is_beyond = _mm256_castps_si256(_mm256_cmp_ps(x, middle, _CMP_GT_OQ));
            at = _mm256_add_epi32(at, _mm256_and_si256(is_beyond, _mm256_set1_epi32(step)));
        }
        return at;
    }
    Vec entry(Vec x) const { return take(entries, search(x)); }
    Vec place(Vec x) const { return _mm256_cvtepi32_ps(search(x)); }
};

}  // namespace

// Attention of many query heads to a block of entries in float32: keys, values and queries are widened once for all
// heads and multiplied as small matrices. Every number is the same chain of fused multiply-adds as in attention.h.
#pragma once
#include "linear.h"

namespace {

constexpr int64_t ENTRIES = 64;     // ordinals of a block
constexpr int64_t MAX_TILED = 256;  // widest head whose keys are arranged in tiles: 32 KiB for a block

// Of sixteen registers six rows of sums over LANES numbers take twelve, the row that is multiplied two and a factor
// one.
constexpr int64_t MAX_FACTORS = 6;

// to[h][i] = keep[h] to[h][i] + sum over k < count of factors[h][k] rows[k][i], for R rows h and LANES numbers i; a sum
// begins at zero where `keep` is null.
template <int R>
void multiply_rows(const float* const* factors, const float* rows, int64_t stride, int64_t count, const float* keep,
                   float* const* to) {
    constexpr int PARTS = LANES / WIDTH;
    Vec acc[R][PARTS];
#pragma GCC unroll 6
    for (int h = 0; h < R; ++h)
#pragma GCC unroll 2
        for (int i = 0; i < PARTS; ++i)
            acc[h][i] = keep == nullptr ? broadcast(0) : mul(load(to[h] + i * WIDTH), broadcast(keep[h]));
    for (int64_t k = 0; k < count; ++k) {
        Vec row[PARTS];
#pragma GCC unroll 2
        for (int i = 0; i < PARTS; ++i) row[i] = load(rows + k * stride + i * WIDTH);
#pragma GCC unroll 6
        for (int h = 0; h < R; ++h) {
            const Vec factor = broadcast(factors[h][k]);
#pragma GCC unroll 2
            for (int i = 0; i < PARTS; ++i) acc[h][i] = fma(factor, row[i], acc[h][i]);
        }
    }
#pragma GCC unroll 6
    for (int h = 0; h < R; ++h)
#pragma GCC unroll 2
        for (int i = 0; i < PARTS; ++i) store(to[h] + i * WIDTH, acc[h][i]);
}

using MultiplyRows = void (*)(const float* const*, const float*, int64_t, int64_t, const float*, float* const*);
constexpr MultiplyRows MULTIPLY_ROWS[] = {multiply_rows<1>, multiply_rows<2>, multiply_rows<3>,
                                          multiply_rows<4>, multiply_rows<5>, multiply_rows<6>};

// Tiles of turn_rows in float32, number by number: [number][entry] for the sixteen entries of a tile.
inline void widen_tiles(const uint16_t* tiles, int64_t pairs, float* out) {
    for (int64_t p = 0; p < pairs; ++p, tiles += 2 * LANES, out += 2 * LANES) {
        uint32_t words[LANES], even[LANES], odd[LANES];
        __builtin_memcpy(words, tiles, sizeof words);
        for (int64_t i = 0; i < LANES; ++i) even[i] = words[i] << 16, odd[i] = words[i] & 0xffff0000;
        __builtin_memcpy(out, even, sizeof even);
        __builtin_memcpy(out + LANES, odd, sizeof odd);
    }
}
inline void widen_tiles(const float* tiles, int64_t pairs, float* out) {
    __builtin_memcpy(out, tiles, pairs * 2 * LANES * sizeof(float));
}

// A block of entries in float32.
class WideBlock {
public:
    // Widens the tiles of `count` keys, and as many values; `width` is a multiple of LANES.
    void hold(const bf16* tiles, const bf16* const* values, int64_t count, int64_t width) {
        widen_tiles(tiles, (count + LANES - 1) / LANES * width / 2, keys_);
        for (int64_t j = 0; j < count; ++j) widen_row(values[j], width, values_ + j * width);
    }

    // scores[h stride + j] = scale q[h].k[j]
    void score(const float* const* q, int64_t heads, int64_t count, int64_t width, float scale, float* scores,
               int64_t stride) const {
        for (int64_t j = 0; j < count; j += LANES)
            for_heads(heads, [&](int64_t h, int64_t some) {
                float* to[MAX_FACTORS];
                for (int64_t i = 0; i < some; ++i) to[i] = scores + (h + i) * stride + j;
                MULTIPLY_ROWS[some - 1](q + h, keys_ + j * width, LANES, width, nullptr, to);
                for (int64_t i = 0; i < some; ++i)
                    for (int64_t lane = 0; lane < LANES; lane += WIDTH)
                        store(to[i] + lane, mul(load(to[i] + lane), broadcast(scale)));
            });
    }

    // sums[h] = keep[h] sums[h] + weights[h] . values of the first `count` entries
    void mix(const float* const* weights, const float* keep, int64_t heads, int64_t count, int64_t width,
             float* const* sums) const {
        for (int64_t at = 0; at < width; at += LANES)
            for_heads(heads, [&](int64_t h, int64_t some) {
                float* to[MAX_FACTORS];
                for (int64_t i = 0; i < some; ++i) to[i] = sums[h + i] + at;
                MULTIPLY_ROWS[some - 1](weights + h, values_ + at, width, count, keep + h, to);
            });
    }

private:
    template <class Use>
    static void for_heads(int64_t heads, Use use) {
        for (int64_t h = 0; h < heads; h += MAX_FACTORS)
            use(h, heads - h < MAX_FACTORS ? heads - h : MAX_FACTORS);
    }

    static constexpr int64_t MOST = WIDENS ? ENTRIES * MAX_TILED : 1;
    alignas(64) float keys_[MOST];    // [tile of sixteen entries][number][entry]
    alignas(64) float values_[MOST];  // [entry][number]
};

}  // namespace

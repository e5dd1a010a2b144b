// Attention of many query heads to a block of entries in float32: keys, values and queries are widened once for all
// heads and multiplied as small matrices. Every number is the same chain of fused multiply-adds as in attention.h.
#pragma once
#include "linear.h"

namespace {

constexpr int64_t ENTRIES = 64;     // ordinals of a block
constexpr int64_t MAX_TILED = 256;  // widest head whose keys are arranged in tiles: 32 KiB for a block

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

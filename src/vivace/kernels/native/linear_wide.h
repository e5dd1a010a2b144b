// Products of matrices in float32, for bodies that have no products of bfloat16: rows of inputs are widened once for all
// tiles. Every number is the same chain of fused multiply-adds as in linear_bf16.h.
#pragma once
#include <vector>

#if defined(VIVACE_FLOAT32)
#include "linear_bf16.h"
#else
#include "linear_palette.h"
#endif

namespace {

inline void widen_row(const bf16* x, int64_t width, float* out) {
    for_width(width, [&](int64_t i, int64_t n) {
        const Vec v = load_some(x + i, n);
        n == WIDTH ? store(out + i, v) : store(out + i, v, n);
    });
}

// Fewest rows of inputs that are widened, the most that are summed in registers and that are widened together, and inputs
// of a step, for which a tile's weights take a quarter of the first cache.
constexpr int64_t LEAST_WIDE = 4, MAX_WIDE = 5, MOST_WIDE = 96, WIDE_INPUTS = 256;

// Rows of inputs in float32, until the thread asks for others.
inline const float* widened(const bf16* x, int64_t width, int64_t rows) {
    if constexpr (sizeof(bf16) == sizeof(float)) return (const float*)x;
    static thread_local std::vector<float> wide;
    if ((int64_t)wide.size() < rows * width) wide.resize((size_t)(rows * width));
    for (int64_t r = 0; r < rows; ++r) widen_row(x + r * width, width, wide.data() + r * width);
    return wide.data();
}

// sums[r][lane] of R rows over some pairs of inputs of a tile, added to what is there if they go on. Each pair prefetches
// what lies at `ahead`, which moves on by `each` bytes.
template <int R, class W>
void sum_wide_block(const W* tile, int64_t pairs, const float* x, int64_t stride, bool goes_on, float* sums,
                    const char* ahead, int64_t each) {
    constexpr int PARTS = LANES / WIDTH;
    Vec acc[R][PARTS];
#pragma GCC unroll 5
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int i = 0; i < PARTS; ++i) acc[r][i] = goes_on ? load(sums + r * LANES + i * WIDTH) : broadcast(0);
    for (int64_t k = 0; k < pairs; ++k, tile += 2 * LANES, x += 2, ahead += each) {
        __builtin_prefetch(ahead);
        if constexpr (sizeof(W) == 4) __builtin_prefetch(ahead + each / 2);
        const auto step = [&]<int WHICH>() __attribute__((always_inline)) {
            Vec weights[PARTS];
#pragma GCC unroll 2
            for (int i = 0; i < PARTS; ++i) weights[i] = half_of_pairs<WHICH>(tile, i);
#pragma GCC unroll 5
            for (int r = 0; r < R; ++r) {
                const Vec input = broadcast(x[r * stride + WHICH]);
#pragma GCC unroll 2
                for (int i = 0; i < PARTS; ++i) acc[r][i] = fma(input, weights[i], acc[r][i]);
            }
        };
        step.template operator()<0>();
        asm volatile("" ::: "memory");  // or the compiler loads more at once than there are registers
        step.template operator()<1>();
    }
#pragma GCC unroll 5
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int i = 0; i < PARTS; ++i) store(sums + r * LANES + i * WIDTH, acc[r][i]);
}

template <class W>
constexpr void (*SUM_WIDE[])(const W*, int64_t, const float*, int64_t, bool, float*, const char*, int64_t) = {
    sum_wide_block<1, W>, sum_wide_block<2, W>, sum_wide_block<3, W>, sum_wide_block<4, W>, sum_wide_block<5, W>,
};

// Weights of a step of a tile, and where those of the next step lie, with how many bytes for each pair of inputs.
template <class W>
struct WideStep {
    const W* weights;
    const void* next;
    int64_t bytes;
};

// Weights that are stored as numbers.
template <class W>
struct WideNumbers {
    WideStep<W> step(const Matrix& m, int64_t tile, int64_t at, int64_t) const {
        const W* const w = (const W*)m.weight + (tile * even(m.in) + at) * LANES;
        return {w, w + WIDE_INPUTS * LANES, 2 * LANES * sizeof(W)};
    }
};

#if !defined(VIVACE_FLOAT32)
// Weights that are codes into codebooks in bfloat16, decoded once for all rows.
template <int BITS>
struct WideCodes {
    using Block = LutWords<BITS>;
    WideStep<bf16> step(const Matrix& m, int64_t tile, int64_t at, int64_t pairs) {
        const Entries entries = Block::entries(m, tile);
        const uint8_t* w = (const uint8_t*)m.weight + tile * Block::size((m.in + 1) / 2) + at / 2 / Block::PAIRS * Block::BYTES;
        for (int64_t p = 0; p < pairs; p += Block::PAIRS, w += Block::BYTES)
            Block::decode(entries, w, numbers_ + p * 2 * LANES);
        return {numbers_, w, Block::BYTES / Block::PAIRS};
    }

private:
    alignas(64) bf16 numbers_[WIDE_INPUTS * LANES];
};
#endif

// sums[i][r][lane] of tiles tile..tile+count-1, for at most MOST_WIDE widened rows. While a step of a tile is multiplied
// with the blocks of rows one after another, each of them prefetches its share of the step that follows.
template <class W, class Weights>
void sum_wide(const Matrix& m, int64_t tile, int count, const float* x, int64_t stride, int64_t rows, float* sums,
              Weights&& weights) {
    const int64_t width = even(m.in), blocks = (rows + MAX_WIDE - 1) / MAX_WIDE, each = (rows + blocks - 1) / blocks;
    for (int i = 0; i < count; ++i)
        for (int64_t at = 0; at < width; at += WIDE_INPUTS) {
            const int64_t pairs = (width - at < WIDE_INPUTS ? width - at : WIDE_INPUTS) / 2;
            const WideStep<W> step = weights.step(m, tile + i, at, pairs);
            const char* ahead = (const char*)step.next;
            for (int64_t r = 0; r < rows; r += each, ahead += step.bytes / blocks * pairs) {
                const int64_t some = rows - r < each ? rows - r : each;
                float* const to = sums + (i * rows + r) * LANES;
                SUM_WIDE<W>[some - 1](step.weights, pairs, x + r * stride + at, stride, at > 0, to, ahead, step.bytes / blocks);
            }
        }
}

// The same for every format that is multiplied so.
inline void sum_wide_tiles(const Matrix& m, int64_t tile, int count, const float* x, int64_t stride, int64_t rows,
                           float* sums) {
    if constexpr (WIDENS) switch ((Format)m.format) {
        case TILES:
            return sum_wide<bf16>(m, tile, count, x, stride, rows, sums, WideNumbers<bf16>());
#if defined(VIVACE_FLOAT32)
        case FLOAT16_TILES:
            return sum_wide<Float16>(m, tile, count, x, stride, rows, sums, WideNumbers<Float16>());
        case BFLOAT16_TILES:
            return sum_wide<Bfloat16>(m, tile, count, x, stride, rows, sums, WideNumbers<Bfloat16>());
#else
        case LUT2:
            return sum_wide<bf16>(m, tile, count, x, stride, rows, sums, WideCodes<2>());
        case LUT3:
            return sum_wide<bf16>(m, tile, count, x, stride, rows, sums, WideCodes<3>());
        case LUT4:
            return sum_wide<bf16>(m, tile, count, x, stride, rows, sums, WideCodes<4>());
#endif
        default:
            return;
    }
}

// Whether rows of inputs are multiplied in float32 with a matrix.
inline bool is_wide(const Matrix& m, int64_t rows) {
    if (!WIDENS || rows < LEAST_WIDE) return false;
    switch ((Format)m.format) {
        case TILES:
        case FLOAT16_TILES:
        case BFLOAT16_TILES:
        case LUT2:
        case LUT3:
        case LUT4:
            return true;
        default:
            return false;
    }
}

}  // namespace

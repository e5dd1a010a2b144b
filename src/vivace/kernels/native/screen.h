// The largest output of a row without reading most of a large matrix: a screened head.
//
// The matrix is kept a second time in fewer bits (w'). For a row x, which is quantized to x', and each output
//
//     |w.x - w'.x'| = |(w - w').x + w'.(x - x')| <= |w - w'| |x| + |w'| |x - x'|      (Cauchy-Schwarz)
//
// so w'.x' bounds the output from both sides. An output whose upper bound is below the largest of all lower bounds is
// not the largest; the others are computed from the matrix itself, with the bits that `choose_greedily` has. What
// floating-point sums of either side may be off is part of `lost`. Outputs are compared after they were rounded to
// bfloat16, where the first of equals wins, so the largest lower bound is lowered by one unit in the last place.
#pragma once
#include "layers.h"

namespace {

constexpr float WIDER = 1.0f + 0x1p-16f;  // makes up for roundings of a norm that is computed here
constexpr float ULP = 0x1.04p-7f;         // a unit in the last place of bfloat16, relative, and a little more
constexpr float NEAR = 0x1p-20f;          // roundings of the sum of an output and its bias, relative
constexpr int64_t MOST_EXACT = 4;         // an item computes all of its outputs if more than one in so many is needed

// Outputs that are computed together: those that lie together in the layout.
inline int64_t outputs_together(const Matrix& m) {
    return m.format == ROW_MAJOR || m.format == EXACT12_ROWS ? 4 : m.format == EXACT12 ? GROUP * LANES : LANES;
}

void prepare_screened_row(const Screened& s, bf16* prepared, int64_t row) {
    const Linear& l = s.greedy.linear;
    const Matrix& m = l.matrix.screen->codes;
    prepare(m, l.x, prepared, row);
    const int64_t groups = int_groups(m.in);
    const IntRow quantized(prepared + row * prepared_width(m), groups);
    const bf16* x = l.x + row * m.in;
    double size = 0, missed = 0;
    for (int64_t i = 0; i < m.in; ++i) {
        const double value = widened(x[i]), off = value - (double)quantized.bytes[i] * quantized.scale[i / INT_GROUP];
        size += value * value, missed += off * off;
    }
    s.size[row] = (float)__builtin_sqrt(size) * WIDER, s.missed[row] = (float)__builtin_sqrt(missed) * WIDER;
}

// Writes the upper bounds of the outputs of tiles first..stop-1 and the largest lower bound of each row.
void bound_outputs(const Screened& s, const bf16* prepared, int64_t first, int64_t stop, int64_t item) {
    const Linear& l = s.greedy.linear;
    const Screen& screen = *l.matrix.screen;
    const int64_t width = tiles(l.matrix) * LANES, rows = l.rows;
    float* least = s.least + item * rows;
    for (int64_t row = 0; row < rows; ++row) least[row] = -__builtin_inff();
    for_sums(screen.codes, prepared, row_stride(screen.codes), rows, first, stop,
             [&](int64_t tile, int64_t row, const float* sums) {
        const Vec size = broadcast(s.size[row]), missed = broadcast(s.missed[row]);
        for_lanes(tile, l.matrix.out, [&](int64_t lane, int64_t n) {
            const int64_t at = tile * LANES + lane;
            const Vec v = with_bias(l.matrix, load(sums + lane), at, n), length = max(v, sub(broadcast(0), v));
            const Vec lost = fma(load(screen.lost + at), size, mul(load(screen.kept + at), missed));
            const Vec off = fma(length, broadcast(NEAR), lost), low = sub(v, off);
            store(s.upper + row * width + at, add(v, off));
            if (!any_greater(low, least[row])) return;
            float values[WIDTH];
            store(values, low);
            for (int64_t i = 0; i < n; ++i) least[row] = values[i] > least[row] ? values[i] : least[row];
        });
    });
}

// sums[r][lane] of the outputs that lie together from `output` on.
inline void sum_together(const Matrix& m, int64_t output, const bf16* x, int64_t stride, int64_t rows, float* sums) {
    if (m.format == ROW_MAJOR) {
        const bf16* w[4];
        for (int64_t o = 0; o < 4; ++o) w[o] = m.weight + (output + o < m.out ? output + o : m.out - 1) * m.in;
        int64_t r = 0;
        for (; r + 2 <= rows; r += 2) dot_block<2>(w, x + r * stride, m.in, stride, sums + r * LANES);
        if (r < rows) dot_block<1>(w, x + r * stride, m.in, stride, sums + r * LANES);
    } else if (m.format == EXACT12_ROWS) {
        for (int64_t row = 0; row < rows; row += MAX_EXACT_DOTS) {
            const int64_t some = rows - row < MAX_EXACT_DOTS ? rows - row : MAX_EXACT_DOTS;
            DOT_EXACT[some - 1](m, output / 4, x + row * stride, stride, sums + row * LANES);
        }
    } else {
        const int64_t left = tiles(m) - output / LANES, most = outputs_together(m) / LANES;
        sum_in_vectors(m, output / LANES, (int)(left < most ? left : most), x, stride, rows, sums);
    }
}

// The bound below which an output of a row is not the largest.
inline float bar_of(const Screened& s, int64_t threads, int64_t row) {
    const int64_t count = items(s.greedy.linear.matrix, threads), rows = s.greedy.linear.rows;
    float least = -__builtin_inff();
    for (int64_t item = 0; item < count; ++item) {
        const float found = s.least[item * rows + row];
        least = found > least ? found : least;
    }
    return least - (least < 0 ? -least : least) * ULP - 0x1p-120f;
}

// Finds the largest rounded output of each row among those of tiles first..stop-1 that may be the largest of all.
void choose_within_bounds(const Screened& s, int64_t threads, int64_t first, int64_t stop, int64_t item) {
    const Linear& l = s.greedy.linear;
    const Matrix& m = l.matrix;
    const int64_t rows = l.rows, width = tiles(m) * LANES, together = outputs_together(m), stride = row_stride(m);
    const int64_t start = first * LANES, end = stop * LANES < m.out ? stop * LANES : m.out;
    float* best = s.greedy.best + item * rows;
    int64_t* index = s.greedy.index + item * rows;
    for (int64_t row = 0; row < rows; ++row) best[row] = -__builtin_inff(), index[row] = start;
    const int64_t room = (end - start) / (together * MOST_EXACT);
    int64_t wanted[room + 1], count = 0;
    float bars[rows];
    for (int64_t row = 0; row < rows; ++row) bars[row] = bar_of(s, threads, row);
    for (int64_t output = start; output < end; output += LANES) {
        bool any = false;
        for (int64_t row = 0; row < rows && !any; ++row)
            for (int64_t lane = 0; lane < LANES; lane += WIDTH)
                any = any || any_greater(load(s.upper + row * width + output + lane), bars[row]);
        if (!any) continue;
        for (int64_t lane = 0; lane < LANES && output + lane < end; ++lane) {
            const int64_t unit = (output + lane) / together * together;
            if (count > 0 && wanted[count - 1] == unit) continue;
            for (int64_t row = 0; row < rows; ++row)
                if (s.upper[row * width + output + lane] > bars[row]) {
                    if (count == room) {
                        s.exact[item] = end - start;
                        return choose_greedily(l, first, stop, best, index);
                    }
                    wanted[count++] = unit;
                    break;
                }
        }
    }
    s.exact[item] = count * together;
    float sums[GROUP * BLOCK_ROWS * LANES];
    const RowBlocks blocks(rows);
    for (int64_t i = 0; i < count; ++i)
        for (int64_t row = 0; row < rows; row += blocks.size) {
            const int64_t some = blocks.at(row);
            sum_together(m, wanted[i], l.x + row * stride, stride, some, sums);
            for (int64_t r = 0; r < some; ++r)
                for (int64_t o = 0; o < together; o += WIDTH) {
                    const int64_t at = wanted[i] + o, left = m.out - at < together - o ? m.out - at : together - o;
                    const int64_t n = left < WIDTH ? left : WIDTH;
                    if (n <= 0) break;
                    const float* found = sums + (o / LANES * some + r) * LANES + o % LANES;
                    const Vec v = rounded(with_bias(m, load(found, n), at, n));
                    float values[WIDTH];
                    store(values, v);
                    for (int64_t k = 0; k < n; ++k)
                        if (values[k] > best[row + r]) best[row + r] = values[k], index[row + r] = at + k;
                }
        }
}

}  // namespace

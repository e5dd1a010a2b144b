// Attention of single rows to the entries that each of them reads, in the order in which it reads them.
//
// An entry's ordinal is its place in that order. Softmax runs online over blocks of 64 ordinals (Milakov & Gimelshein
// 2018, arXiv:1805.02867), counted from the first entry that the row reads, so that a row's sums are grouped the same
// way wherever its entries are stored.
#pragma once
#include "attention_wide.h"
#include "entries.h"

namespace {

constexpr int64_t MAX_GROUP = 128;  // most query heads per key/value head; core/cpu gives others to PyTorch
constexpr int64_t MAX_HEADS = WIDENS ? 48 : MAX_ROWS;  // query heads that read a block together

// A block of entries that several rows read. Their keys are also arranged as the tiles of a matrix whose outputs are
// the entries, so that scores are computed by the kernels of projections.
struct Block {
    const bf16 *k[ENTRIES], *v[ENTRIES];
    int64_t slot = -1, first = -1, stored = 0;  // what is loaded: slot, first ordinal, entries that are no tail
    int64_t place = -1;  // where the first of them is stored if the others lie behind it, in one block of the cache
    alignas(64) bf16 tiles[ENTRIES * MAX_TILED];
    alignas(64) bf16 decoded[2][ENTRIES * MAX_TILED];  // keys and values whose entries have eight bits
    bool is_widened = false;
    WideBlock wide;  // the same in float32, where so many heads read the block that it pays

    // Whether ordinals from..from+count-1 of a row are loaded; never where the row's tail reaches into them. Slots that
    // share a block of the cache share what is loaded of it.
    bool has(const Attention& a, int64_t row, int64_t from, int64_t count) const {
        if (a.num_seen(row) - from < count || count > stored || from != first) return false;
        return a.slot[row] == slot || (place >= 0 && a.places.of(a.slot[row], from) == place);
    }

    // Fills the block with ordinals from..from+count-1 of a row, for key/value head kv.
    void hold(const Attention& a, int64_t row, int64_t kv, int64_t from, int64_t count) {
        const int64_t seen = a.num_seen(row), here = seen - from < count ? seen - from : count;
        const bool is_straight = a.index == nullptr && here == count && a.places.within(from) + count <= a.places.block;
        const bf16* const keys = a.keys + kv * a.places.capacity * a.width;
        const bf16* const values = a.values + kv * a.places.capacity * a.width;
        slot = a.slot[row], first = from, stored = here, place = -1, is_widened = false;
        if (a.places.key_scales != nullptr) {
            if (is_straight) place = a.places.of(slot, from);
            for (int64_t j = 0; j < count; ++j) {
                const int64_t entry = a.entry(row, from + j, seen);
                const int64_t at = kv * a.places.capacity + (place >= 0 ? place + j : a.places.of(slot, entry));
                bf16 *key = decoded[0] + j * a.width, *value = decoded[1] + j * a.width;
                widen_entry((const int8_t*)a.keys + at * a.width, a.places.key_scales[at], key, a.width);
                widen_entry((const int8_t*)a.values + at * a.width, a.places.value_scales[at], value, a.width);
                k[j] = key, v[j] = value;
            }
        } else if (is_straight) {
            place = a.places.of(slot, from);
            for (int64_t j = 0; j < count; ++j) k[j] = keys + (place + j) * a.width, v[j] = values + (place + j) * a.width;
        } else {
            for (int64_t j = 0; j < count; ++j) {
                const int64_t entry = a.entry(row, from + j, seen);
                const int64_t at = a.places.of(slot, entry) * a.width;
                k[j] = keys + at, v[j] = values + at;
            }
        }
        if (is_tiled(a.width)) lay(count, a.width);
    }

    static bool is_tiled(int64_t width) { return width % 2 == 0 && width <= MAX_TILED; }

    void widen(int64_t count, int64_t width) {
        if (!is_widened) wide.hold(tiles, v, count, width);
        is_widened = true;
    }

    void lay(int64_t count, int64_t width) {
        for (int64_t j = 0; j < count; j += LANES) {
            const bf16* rows[LANES];
            for (int64_t i = 0; i < LANES; ++i) rows[i] = k[j + i < count ? j + i : count - 1];
            turn_rows(rows, width, tiles + j * width);
        }
    }
};

// Query heads that read a block together, of several rows where these read the same entries.
struct Queries {
    int64_t heads = 0, common = ENTRIES;  // number of heads, and of leading entries that all of them read
    const bf16* q[MAX_HEADS];
    float* sums[MAX_HEADS];
    float* highest[MAX_HEADS];
    float* total[MAX_HEADS];
    int64_t count[MAX_HEADS];
    const float* bias[MAX_HEADS];
    int64_t distance[MAX_HEADS];  // from the row back to the first entry of the block
    float scores[MAX_HEADS * ENTRIES], keep[MAX_HEADS];

    void add(const bf16* query, float* sum, float* high, float* all, int64_t seen, const float* lean, int64_t back) {
        q[heads] = query, sums[heads] = sum, highest[heads] = high, total[heads] = all, count[heads] = seen;
        bias[heads] = lean, distance[heads] = back;
        common = seen < common ? seen : common;
        ++heads;
    }
    // Whether heads and width are such that the block is widened for them.
    bool are_wide(int64_t width) const { return WIDENS && heads > MAX_ROWS && width % LANES == 0 && width <= MAX_TILED; }
};

// scores[h][j] = scale q[h].k[j] for heads `from` and following, at most MAX_ROWS of them.
inline void score_some(const Block& b, TileUnit& unit, Queries& to, int64_t from, int64_t heads, int64_t count,
                       int64_t width, float scale) {
    float* const scores = to.scores + from * ENTRIES;
    if (!Block::is_tiled(width)) {
        for (int64_t j = 0; j < count; j += 4) {
            const bf16* four[4];
            for (int64_t i = 0; i < 4; ++i) four[i] = b.k[j + i < count ? j + i : j];
            for (int64_t h = 0; h < heads; ++h)
                dot_block<1>(four, to.q[from + h], width, width, scores + h * ENTRIES + j);
        }
        for (int64_t j = 0; j < heads * ENTRIES; ++j) scores[j] *= scale;
        return;
    }
    alignas(64) bf16 q[MAX_ROWS * MAX_TILED];
    for (int64_t h = 0; h < heads; ++h) __builtin_memcpy(q + h * width, to.q[from + h], width * sizeof(bf16));
    float sums[ENTRIES * MAX_ROWS];
    const Matrix keys{b.tiles, nullptr, width, ENTRIES, TILES, nullptr, nullptr};
    const int64_t num_tiles = (count + LANES - 1) / LANES;
    sum_group<false>(unit, keys, 0, (int)num_tiles, q, width, heads, sums);
    for (int64_t t = 0; t < num_tiles; ++t)
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t i = 0; i < LANES; i += WIDTH)
                store(scores + h * ENTRIES + t * LANES + i,
                      mul(load(sums + (t * heads + h) * LANES + i), broadcast(scale)));
}

// The scores of all heads, from the block as it lies or in float32.
inline void score(Block& block, TileUnit& unit, Queries& to, int64_t count, int64_t width, float scale) {
    if (!to.are_wide(width)) {
        for (int64_t h = 0; h < to.heads; h += MAX_ROWS)
            score_some(block, unit, to, h, to.heads - h < MAX_ROWS ? to.heads - h : MAX_ROWS, count, width, scale);
        return;
    }
    block.widen(count, width);
    alignas(64) float numbers[MAX_HEADS * MAX_TILED];
    const float* q[MAX_HEADS];
    for (int64_t h = 0; h < to.heads; ++h) {
        float* const row = numbers + h * width;
        widen_row(to.q[h], width, row);
        q[h] = row;
    }
    block.wide.score(q, to.heads, count, width, scale, to.scores, ENTRIES);
}

// sums = sums * keep + weights . values, for PARTS vectors of HEADS heads. acc holds HEADS x PARTS registers over all
// entries, value PARTS more; every number is summed as one chain over the entries.
template <int HEADS, int PARTS>
inline void mix_block(float* const* sums, const float* keep, const float* weights, const bf16* const* v, int64_t at,
                      int64_t first, int64_t stop) {
    Vec acc[HEADS][PARTS];
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; ++i) acc[h][i] = mul(load(sums[h] + at + i * WIDTH), broadcast(keep[h]));
    for (int64_t j = first; j < stop; ++j) {
        Vec value[PARTS];
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; ++i) value[i] = load(v[j] + at + i * WIDTH);
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; ++h) {
            const Vec w = broadcast(weights[h * ENTRIES + j]);
#pragma GCC unroll 4
            for (int i = 0; i < PARTS; ++i) acc[h][i] = fma(w, value[i], acc[h][i]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; ++i) store(sums[h] + at + i * WIDTH, acc[h][i]);
}

// The values of HEADS heads, over their whole width: blocks of four, two and one vectors, then the numbers that are
// left.
template <int HEADS>
inline void mix_heads(float* const* sums, const float* keep, const float* weights, const bf16* const* v, int64_t first,
                      int64_t stop, int64_t width) {
    int64_t at = 0;
    if constexpr (HEADS * 4 <= MAX_MIXED)
        for (; at + 4 * WIDTH <= width; at += 4 * WIDTH) mix_block<HEADS, 4>(sums, keep, weights, v, at, first, stop);
    for (; at + 2 * WIDTH <= width; at += 2 * WIDTH) mix_block<HEADS, 2>(sums, keep, weights, v, at, first, stop);
    for (; at + WIDTH <= width; at += WIDTH) mix_block<HEADS, 1>(sums, keep, weights, v, at, first, stop);
    for (int h = 0; h < HEADS && at < width; ++h) {
        const int64_t n = width - at;
        Vec acc = mul(load(sums[h] + at, n), broadcast(keep[h]));
        for (int64_t j = first; j < stop; ++j) acc = fma(broadcast(weights[h * ENTRIES + j]), load(v[j] + at, n), acc);
        store(sums[h] + at, acc, n);
    }
}

// Adds entries first..stop-1 to the sums of some heads, after multiplying each head's sums by its `keep`.
void mix(const Queries& some, int64_t head, int64_t heads, const float* keep, const bf16* const* v, int64_t first,
         int64_t stop, int64_t width) {
    float* const* const sums = some.sums + head;
    const float* const weights = some.scores + head * ENTRIES;
    int64_t h = 0;
    for (; h + 4 <= heads; h += 4) mix_heads<4>(sums + h, keep + h, weights + h * ENTRIES, v, first, stop, width);
    for (; h + 2 <= heads; h += 2) mix_heads<2>(sums + h, keep + h, weights + h * ENTRIES, v, first, stop, width);
    for (; h < heads; ++h) mix_heads<1>(sums + h, keep + h, weights + h * ENTRIES, v, first, stop, width);
}

// Turns scores into weights exp(score - new maximum) in place; returns the factor on the sums of earlier blocks.
inline float soften(float* scores, int64_t count, float softcap, float* highest, float* total) {
    float top = *highest;
    if (softcap != 0)
        for (int64_t j = 0; j < ENTRIES; j += WIDTH) {
            const Vec capped = hyperbolic_tangent(div(load(scores + j), broadcast(softcap)));
            store(scores + j, mul(capped, broadcast(softcap)));
        }
    for (int64_t j = count; j < ENTRIES; ++j) scores[j] = -__builtin_inff();
    Vec tops = load(scores);
    for (int64_t j = WIDTH; j < ENTRIES; j += WIDTH) tops = max(tops, load(scores + j));
    const float here = max_of(tops);
    top = here > top ? here : top;
    Vec sum = broadcast(0);
    for (int64_t j = 0; j < ENTRIES; j += WIDTH) {
        const Vec weight = exponential(sub(load(scores + j), broadcast(top)));
        store(scores + j, weight);
    }
    for (int64_t j = count; j < ENTRIES; ++j) scores[j] = 0;
    for (int64_t j = 0; j < ENTRIES; j += WIDTH) sum = add(sum, load(scores + j));
    float kept[WIDTH];
    store(kept, exponential(broadcast(*highest - top)));
    const float keep = *highest == -__builtin_inff() ? 0 : kept[0];
    *total = *total * keep + sum_of(sum);
    *highest = top;
    return keep;
}

// Adds a block to the sums of some query heads. Entries that only some of them read come last, for these heads alone:
// an entry that a row does not read must not enter its sums even with weight zero, since it could be infinite.
void read(Block& block, TileUnit& unit, Queries& queries, int64_t count, const Attention& a) {
    score(block, unit, queries, count, a.width, a.scale);
    for (int64_t h = 0; a.bias != nullptr && h < queries.heads; ++h)
        for (int64_t j = 0; j < queries.count[h]; ++j) {
            const int64_t back = queries.distance[h] - j;
            queries.scores[h * ENTRIES + j] += queries.bias[h][back < a.bias_reach ? back : a.bias_reach - 1];
        }
    for (int64_t h = 0; h < queries.heads; ++h)
        queries.keep[h] = soften(queries.scores + h * ENTRIES, queries.count[h], a.softcap, queries.highest[h],
                                 queries.total[h]);
    if (queries.are_wide(a.width)) {
        const float* weights[MAX_HEADS];
        for (int64_t h = 0; h < queries.heads; ++h) weights[h] = queries.scores + h * ENTRIES;
        block.wide.mix(weights, queries.keep, queries.heads, queries.common, a.width, queries.sums);
    } else {
        mix(queries, 0, queries.heads, queries.keep, block.v, 0, queries.common, a.width);
    }
    constexpr float ALL[] = {1, 1, 1, 1};
    for (int64_t h = 0, some; h < queries.heads; h += some) {
        for (some = 1; h + some < queries.heads && some < 4 && queries.count[h + some] == queries.count[h];) ++some;
        if (queries.count[h] > queries.common)
            mix(queries, h, some, ALL, block.v, queries.common, queries.count[h], a.width);
    }
}

// Computes the query heads of key/value head `kv` for rows first..stop-1, at most MOST_TOGETHER of them. A block is
// loaded once for all rows that read it; the last row goes first, since of the rows of a chain it reads the most.
void attend(const Attention& a, int64_t first, int64_t stop, int64_t kv) {
    const int64_t group = a.heads / a.kv_heads, width = a.width, size = group * width;
    int64_t from[MOST_TOGETHER], reach[MOST_TOGETHER], longest = 0;
    float highest[MOST_TOGETHER][MAX_GROUP], total[MOST_TOGETHER][MAX_GROUP];
    for (int64_t row = first; row < stop; ++row) {
        int64_t& end = reach[row - first] = a.num_seen(row);
        for (int64_t i = 0; a.tail != nullptr && i < a.tail_width && a.tail[row * a.tail_width + i] >= 0; ++i) ++end;
        from[row - first] = a.window && end > a.window ? end - a.window : 0;
        longest = end - from[row - first] > longest ? end - from[row - first] : longest;
        for (int64_t g = 0; g < group; ++g) highest[row - first][g] = -__builtin_inff(), total[row - first][g] = 0;
        __builtin_memset(a.sums + (row * a.heads + kv * group) * width, 0, size * sizeof(float));
    }
    Block block;
    TileUnit unit;
    for (int64_t done = 0; done < longest; done += ENTRIES) {
        Queries queries;
        int64_t most = 0;  // entries of the block that is loaded
        const auto read_all = [&] {
            if (queries.heads > 0) read(block, unit, queries, most, a);
            queries.heads = 0, queries.common = ENTRIES;
        };
        for (int64_t row = stop - 1; row >= first; --row) {
            const int64_t i = row - first, at = from[i] + done, left = reach[i] - at;
            if (left <= 0) continue;
            const int64_t count = left < ENTRIES ? left : ENTRIES;
            if (!block.has(a, row, at, count)) {
                read_all();
                block.hold(a, row, kv, at, count);
                most = count;
            }
            const bf16* q = a.q + row * a.q_stride + kv * size;
            float* sums = a.sums + row * a.heads * width + kv * size;
            for (int64_t g = 0; g < group; ++g) {
                if (queries.heads == MAX_HEADS) read_all();
                const float* lean = a.bias == nullptr ? nullptr : a.bias + (kv * group + g) * a.bias_reach;
                queries.add(q + g * width, sums + g * width, &highest[i][g], &total[i][g], count, lean, reach[i] - 1 - at);
            }
        }
        read_all();
    }
    for (int64_t row = first; row < stop; ++row)
        for (int64_t g = 0; g < group; ++g) {
            const int64_t at = (row * a.heads + kv * group + g) * width;
            const Vec whole = broadcast(total[row - first][g]);
            for_width(width, [&](int64_t i, int64_t n) {
                const Vec v = n == WIDTH ? load(a.sums + at + i) : load(a.sums + at + i, n);
                store_some(a.out + at + i, div(v, whole), n);
            });
        }
}

// One item of attention: neighbouring rows and one key/value head.
void attend_some(const Attention& a, int64_t item) {
    const int64_t together = rows_together(a.rows), first = item / a.kv_heads * together, stop = first + together;
    attend(a, first, stop < a.rows ? stop : a.rows, item % a.kv_heads);
}

}  // namespace

// Sums of weights in four bits: codes into a table of sixteen integers, times a scale for each output and 64 inputs.
#pragma once
#include "linear_int8.h"

namespace {

// Q4: a group of a tile is eight times 64 bytes, each with four inputs of sixteen outputs in the low halves and the
// next four in the high halves. Codes are decoded to signed bytes (AMX multiplies these) or to bytes plus 128.
template <bool HAS_SIGN>
struct Q4Codes {
    static constexpr bool IS_SIGNED = HAS_SIGN;
    static constexpr int64_t BYTES = INT_GROUP / 2 * LANES;
    static constexpr int PARTS = 2;
    Table table;
    const bf16* scales;
    Q4Codes(const Matrix& m, int64_t tile, int64_t groups)
        : table(m.table, HAS_SIGN ? 0 : 128), scales((const bf16*)m.scales + tile * groups * LANES) {}
    void read(const uint8_t* p, Codes* codes) const { table.look_up(p, codes[0], codes[1]); }
    void fetch(int64_t g) const { __builtin_prefetch(scales + (g + INT_AHEAD / BYTES) * LANES); }
    Floats scales_of(int64_t g) const { return Floats(scales + g * LANES); }
    void add(Floats& total, const Ints& ints, float scale, const Floats& own) const { total.add(ints, scale, own); }
    void put(const Floats& total, float* p) const { total.put(p); }
};
using Q4Tiles = Q4Codes<false>;
using SignedQ4Tiles = Q4Codes<true>;

}  // namespace

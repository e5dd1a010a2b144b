// Keys and values in eight bits, with a scale for each head of each entry; core/cache.py has the same in PyTorch.
#pragma once
#include "bfloat16.h"

namespace {

// The largest number of a head becomes 127.
inline void narrow_entry(const bf16* x, int64_t width, int8_t* codes, EntryScale* scale) {
    float most = 0;
    for (int64_t i = 0; i < width; ++i) {
        const float size = __builtin_fabsf(widened(x[i]));
        most = size > most ? size : most;
    }
    *scale = to_bfloat16(most / 127);
    const float step = widened(*scale);
    for (int64_t i = 0; i < width; ++i) {
        float code = step == 0 ? 0 : __builtin_rintf(widened(x[i]) / step);
        code = code > 127 ? 127 : code < -127 ? -127 : code;
        codes[i] = (int8_t)code;
    }
}

inline void widen_entry(const int8_t* codes, EntryScale scale, bf16* x, int64_t width) {
    const float step = widened(scale);
    for (int64_t i = 0; i < width; ++i) x[i] = narrowed((float)codes[i] * step);
}

}  // namespace

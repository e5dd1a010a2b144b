// Keys and values in eight bits, with a scale for each head of each entry; core/cache.py has the same in PyTorch.
#pragma once
#include "abi.h"

namespace {

inline float float_of(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

inline bf16 bf16_of(float value) {  // to the nearest, ties to even
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The largest number of a head becomes 127.
inline void narrow_entry(const bf16* x, int64_t width, int8_t* codes, bf16* scale) {
    float most = 0;
    for (int64_t i = 0; i < width; ++i) {
        const float size = __builtin_fabsf(float_of(x[i]));
        most = size > most ? size : most;
    }
    *scale = bf16_of(most / 127);
    const float step = float_of(*scale);
    for (int64_t i = 0; i < width; ++i) {
        float code = step == 0 ? 0 : __builtin_rintf(float_of(x[i]) / step);
        code = code > 127 ? 127 : code < -127 ? -127 : code;
        codes[i] = (int8_t)code;
    }
}

inline void widen_entry(const int8_t* codes, bf16 scale, bf16* x, int64_t width) {
    const float step = float_of(scale);
    for (int64_t i = 0; i < width; ++i) x[i] = bf16_of((float)codes[i] * step);
}

}  // namespace

// Conversions between bfloat16 and float, one number at a time; nothing of the standard library is used (body.h).
// `widened` and `narrowed` are those of the numbers of tensors, which may be float32 (abi.h).
#pragma once
#include "abi.h"

namespace {

inline float widened(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint16_t to_bfloat16(float value) {  // to the nearest, ties to even
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(VIVACE_FLOAT32)
inline float widened(float x) { return x; }
inline float narrowed(float value) { return value; }
#else
inline bf16 narrowed(float value) { return to_bfloat16(value); }
#endif

}  // namespace

// Conversions between bfloat16 and float, one number at a time; nothing of the standard library is used (body.h).
#pragma once
#include "abi.h"

namespace {

inline float widened(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

inline bf16 narrowed(float value) {  // to the nearest, ties to even
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

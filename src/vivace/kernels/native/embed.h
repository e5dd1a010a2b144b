// A token's row of an embedding in any of the formats that embeddings are stored in.
#pragma once
#include <cstring>

#include "bfloat16.h"

namespace {

inline void embed_int8(const Matrix& m, int64_t token, bf16* h) {
    const int64_t tile = (m.in + INT_GROUP - 1) / INT_GROUP * INT_GROUP * LANES;
    const uint8_t* codes = (const uint8_t*)m.weight + token / LANES * tile + token % LANES * 4;
    const float scale = ((const float*)m.scales)[token];
    for (int64_t e = 0; e < m.in; ++e) h[e] = narrowed((float)((int)codes[e / 4 * 4 * LANES + e % 4] - 128) * scale);
}

inline void embed_exact(const Matrix& m, int64_t token, bf16* h) {
    const ExactSide& side = *(const ExactSide*)m.scales;
    const int64_t steps = (m.in + 31) / 32, group = token / 4, which = token % 4, plane = steps * 64;
    const uint8_t* w = (const uint8_t*)m.weight + group * 3 * plane;
    const int32_t* places = side.places();
    int32_t whole = places[group];
    for (int64_t k = 0; k < steps; ++k, w += 64, h += 32) {
        const int64_t count = m.in - 32 * k < 32 ? m.in - 32 * k : 32;
        if (whole < places[group + 1] && places[whole] == k) {
            memcpy(h, which < 3 ? (const void*)(w + which * plane) : side.last(whole - places[0]), count * sizeof(bf16));
            ++whole;
            continue;
        }
        for (int64_t i = 0; i < count; ++i) {
            const int64_t at = i / 8 * 16 + which % 2 * 8 + i % 8, code = w[2 * plane + at] >> which / 2 * 4 & 15;
            h[i] = (bf16)(side.upper[code] << 8 | w[which / 2 * plane + at]);
        }
    }
}

inline float widened_half(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
    if (rest < 0x400) {  // zero, or a multiple of 2^-24
        const float size = (float)rest * 0x1p-24f;
        return sign ? -size : size;
    }
    const uint32_t whole = sign | ((rest << 13) + (112u << 23));
    float value;
    memcpy(&value, &whole, 4);
    return value;
}

// A number of a group of a GRID matrix: `place` is that of the group, `unit` that of its 256 inputs.
inline float factor(const GridSide& side, int64_t kind, int64_t values, int64_t units, int64_t place, int64_t unit) {
    if (kind == HALVES) return widened_half(side.at<uint16_t>(values)[place]);
    if (kind == FLOATS) return side.at<float>(values)[place];
    return widened_half(side.at<uint16_t>(units)[unit]) * (float)side.at<int8_t>(values)[place];
}

inline void embed_grid(const Matrix& m, int64_t token, bf16* h) {
    const GridSide& side = *(const GridSide*)m.scales;
    const int64_t tile = token / LANES, lane = token % LANES, groups = (m.in + INT_GROUP - 1) / INT_GROUP;
    const int64_t wide = (groups + 3) / 4, per = INT_GROUP / side.group;
    const bool is_narrow = m.format == GRID4;
    const int64_t bytes = (is_narrow ? INT_GROUP / 2 : INT_GROUP) * LANES;
    const uint8_t* codes = (const uint8_t*)m.weight + tile * groups * bytes + lane * 4;
    const int32_t* order = side.at<int32_t>(side.order);
    for (int64_t e = 0; e < m.in; ++e) {
        const int64_t g = e / INT_GROUP, at = e % INT_GROUP;
        const int64_t place = ((tile * groups + g) * per + at / side.group) * LANES + lane;
        const int64_t unit = (tile * wide + g / 4) * LANES + lane;
        const uint8_t byte = codes[g * bytes + at / (is_narrow ? 8 : 4) * 4 * LANES + at % 4];
        int code = is_narrow ? side.table[at % 8 < 4 ? byte & 15 : byte >> 4] : (int)byte - 128;
        if (side.has_zeros) code -= side.at<int8_t>(side.zeros)[place];
        float value = (float)code * factor(side, side.scale, side.scales, side.scale_units, place, unit);
        if (side.offset != NOTHING) value += factor(side, side.offset, side.offsets, side.offset_units, place, unit);
        h[side.is_ordered ? order[e] : e] = narrowed(value);
    }
}

inline void embed_token(const Matrix& rows, const bf16* embedding, int64_t token, int64_t width, bf16* h) {
    if (embedding != nullptr) memcpy(h, embedding + token * width, width * sizeof(bf16));
    else if (rows.format == INT8) embed_int8(rows, token, h);
    else if (rows.format == GRID4 || rows.format == GRID8) embed_grid(rows, token, h);
    else embed_exact(rows, token, h);
}

}  // namespace

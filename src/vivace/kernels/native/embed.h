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

inline void embed_token(const Matrix& rows, const bf16* embedding, int64_t token, int64_t width, bf16* h) {
    if (embedding != nullptr) memcpy(h, embedding + token * width, width * sizeof(bf16));
    else if (rows.format == INT8) embed_int8(rows, token, h);
    else embed_exact(rows, token, h);
}

}  // namespace

// Rows as ranks send them in four bits: some features whole, the others as codes that are packed two to a byte, and
// their sums over ranks (Dong et al. 2024, Towards Low-bit Communication for Tensor Parallel LLM Inference,
// arXiv:2411.07942). The same arithmetic as the reference in Python (wire.py), in the same order, so the same bits:
// sums of errors run over sixteen lanes, each from the first to the last feature.
#include <cmath>
#include <vector>

#include "abi.h"
#include "bfloat16.h"

#define CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))

namespace {

constexpr float MAGIC = 12582912.f;  // 1.5 * 2^23: what is added to it is rounded to a whole number, ties to even
constexpr int64_t TRIED = 8;         // factors of a row that are tried, from the one that clips nothing downwards
constexpr float REACH = 7.5f;        // the largest multiple of a step that no code clips

inline float clamped(float y) {
    y = y < -8.f ? -8.f : y;
    return y > 7.f ? 7.f : y;
}

inline float number(const void* x, int64_t at, int64_t is_float) {
    return is_float ? static_cast<const float*>(x)[at] : widened(static_cast<const uint16_t*>(x)[at]);
}

// Sum of squared errors of features y (padded to lanes with zeros, as are the squares of their scales).
CLONES float lost(const float* y, const float* weight, int64_t padded, float factor, float inverse) {
    float lanes[LANES] = {};
    for (int64_t at = 0; at < padded; at += LANES) {
        for (int64_t lane = 0; lane < LANES; ++lane) {
            const float scaled = y[at + lane] * inverse;
            const float code = (clamped(scaled) + MAGIC) - MAGIC;
            const float error = y[at + lane] - code * factor;
            lanes[lane] += weight[at + lane] * (error * error);
        }
    }
    float total = 0;
    for (int64_t lane = 0; lane < LANES; ++lane) total += lanes[lane];
    return total;
}

CLONES void coded(const float* y, int64_t count, float inverse, int8_t* codes, int64_t* outside) {
    int64_t clipped = 0;
    for (int64_t i = 0; i < count; ++i) {
        const float scaled = y[i] * inverse;
        codes[i] = static_cast<int8_t>(static_cast<int32_t>((clamped(scaled) + MAGIC) - MAGIC));
        clipped += (scaled < -8.5f) | (scaled > REACH);
    }
    *outside += clipped;
}

// Adds what packed codes stand for: the lower halves of bytes are the first features, the upper ones the others.
CLONES void add_codes(const uint8_t* packed, const float* scale, int64_t half, float factor, float* out) {
    for (int64_t i = 0; i < half; ++i) {
        const float code = static_cast<float>(static_cast<int32_t>(packed[i] & 15) - 8);
        out[i] += (code * scale[i]) * factor;
    }
    for (int64_t i = 0; i < half; ++i) {
        const float code = static_cast<float>(static_cast<int32_t>(packed[i] >> 4) - 8);
        out[half + i] += (code * scale[half + i]) * factor;
    }
}

CLONES void packed(const int8_t* codes, int64_t half, uint8_t* out) {
    for (int64_t i = 0; i < half; ++i) out[i] = static_cast<uint8_t>((codes[i] + 8) | (codes[half + i] + 8) << 4);
}

}  // namespace

// Writes the payload of each row: [factor], codes of `rest`, bfloat16 numbers of `keep`; counts clipped features.
EXPORT void vivace_wire_encode(const WireRows* rows, int64_t* outside) {
    const WireCode& code = *rows->code;
    const int64_t half = code.num_rest / 2;
    const int64_t padded = (code.num_rest + LANES - 1) / LANES * LANES;
    std::vector<float> y(padded, 0.f);
    std::vector<int8_t> codes(code.num_rest);
    const float* inverse = code.inverses + rows->source * code.num_rest;
    const float* weight = code.weights + rows->source * padded;
    for (int64_t row = 0; row < rows->count; ++row) {
        const int64_t first = row * code.width;
        uint8_t* out = rows->payload + row * code.row_bytes;
        float largest = 0;
        for (int64_t i = 0; i < code.num_rest; ++i) {
            y[i] = number(rows->x, first + code.rest[i], rows->is_float) * inverse[i];
            largest = std::fabs(y[i]) > largest ? std::fabs(y[i]) : largest;
        }
        float back = 1.f;
        if (code.factors != nullptr) {
            int64_t top = 0;
            while (top < 255 && code.factors[top] * REACH < largest) ++top;
            int64_t best = top;
            float least = INFINITY;
            for (int64_t at = top; at >= 0 && at > top - TRIED; --at) {
                const float loss = lost(y.data(), weight, padded, code.factors[at], code.inverse_factors[at]);
                if (loss < least) least = loss, best = at;
            }
            back = code.inverse_factors[best];
            *out++ = static_cast<uint8_t>(best);
        }
        coded(y.data(), code.num_rest, back, codes.data(), outside);
        packed(codes.data(), half, out);
        out += half;
        for (int64_t i = 0; i < code.num_keep; ++i, out += 2) {
            const uint16_t rounded = to_bfloat16(number(rows->x, first + code.keep[i], rows->is_float));
            __builtin_memcpy(out, &rounded, sizeof rounded);
        }
    }
}

// Adds the rows that `num_sources` payloads stand for, from the first to the last, and rounds once.
EXPORT void vivace_wire_add(const WireRows* rows, const uint8_t* const* payloads, int64_t num_sources, float* sums) {
    const WireCode& code = *rows->code;
    std::vector<float> rest(code.num_rest), keep(code.num_keep);
    const int64_t half = code.num_rest / 2;
    for (int64_t row = 0; row < rows->count; ++row) {
        for (float& value : rest) value = 0;
        for (float& value : keep) value = 0;
        for (int64_t source = 0; source < num_sources; ++source) {
            const uint8_t* in = payloads[source] + row * code.row_bytes;
            const float factor = code.factors == nullptr ? 1.f : code.factors[*in++];
            const float* scale = code.scales + (rows->source + source) * code.num_rest;
            add_codes(in, scale, half, factor, rest.data());
            in += half;
            for (int64_t i = 0; i < code.num_keep; ++i, in += 2) {
                uint16_t number;
                __builtin_memcpy(&number, in, sizeof number);
                keep[i] += widened(number);
            }
        }
        float* out = sums + row * code.width;
        for (int64_t i = 0; i < code.num_rest; ++i) out[code.rest[i]] = rest[i];
        for (int64_t i = 0; i < code.num_keep; ++i) out[code.keep[i]] = keep[i];
    }
}

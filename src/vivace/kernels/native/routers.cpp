// Which experts routers would choose for one row: a guess, told many times a token, that only moves loads.
#include <algorithm>
#include <bit>
#include <numeric>
#include <vector>

#include "abi.h"

namespace {

float wide(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

}  // namespace

EXPORT void vivace_foresee(const Routers* routers) {
    const Routers& r = *routers;
    std::vector<float> logits(r.experts);
    std::vector<int64_t> order(r.experts);
    for (int64_t n = 0; n < r.count; ++n) {
        const float *scale = r.scale + n * r.width, *slow_scale = r.slow_scale + n * r.width;
        const float* weight = r.weight + n * r.width * r.experts;
        std::fill(logits.begin(), logits.end(), 0.0f);
        for (int64_t e = 0; e < r.width; ++e, weight += r.experts) {
            const float x = wide(r.fast[e]) * scale[e] + wide(r.slow[e]) * slow_scale[e];
            for (int64_t i = 0; i < r.experts; ++i) logits[i] += x * weight[i];
        }
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + r.chosen, order.end(),
                          [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
        std::copy_n(order.begin(), r.chosen, r.out + n * r.chosen);
    }
}

// Mixtures of experts except the experts themselves: routing, the weighted sum of the experts' outputs, and a
// prediction of the experts that later routers will choose, which only decides what is prefetched. What the phases of a
// span call is compiled for float32 too.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "embed.h"
#include "span.h"

namespace {

// Puts the indices of the `count` largest scores first, in falling order, the first of equals first.
template <class Score>
void most(std::vector<int64_t>& order, int64_t count, const Score* scores) {
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int64_t a, int64_t b) {
        return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
}

// out = [add +] sum_k weights[k] part(k), where part(k) has the numbers of the k-th expert.
template <class Part>
void mix(Part part, const bf16* weights, int64_t count, const bf16* add, int64_t width, bf16* out) {
    for (int64_t e = 0; e < width; ++e) {
        float sum = 0;
        for (int64_t k = 0; k < count; ++k) {
            const bf16 each = narrowed(widened(part(k)[e]) * widened(weights[k]));
            sum = k ? widened(narrowed(sum + widened(each))) : widened(each);
        }
        out[e] = narrowed(add == nullptr ? sum : widened(add[e]) + sum);
    }
}

}  // namespace

void choose_experts(const bf16* logits, int64_t experts, int64_t rows, int64_t top_k, int64_t normalises,
                    int64_t* chosen, bf16* weights) {
    std::vector<float> shares(experts);
    std::vector<int64_t> order(experts);
    for (int64_t row = 0; row < rows; ++row) {
        const bf16* of = logits + row * experts;
        float top = widened(of[0]), sum = 0, all = 0;
        for (int64_t i = 1; i < experts; ++i) top = std::max(top, widened(of[i]));
        for (int64_t i = 0; i < experts; ++i) sum += shares[i] = std::exp(widened(of[i]) - top);
        for (float& share : shares) share /= sum;
        most(order, top_k, shares.data());
        for (int64_t k = 0; k < top_k; ++k) all += shares[order[k]];
        for (int64_t k = 0; k < top_k; ++k) {
            chosen[row * top_k + k] = order[k];
            weights[row * top_k + k] = narrowed(shares[order[k]] / (normalises ? all : 1));
        }
    }
}

void mix_seats(const bf16* parts, const int64_t* seats, const bf16* weights, int64_t count, int64_t width, bf16* out) {
    mix([&](int64_t k) { return parts + seats[k] * width; }, weights, count, nullptr, width, out);
}

#if !defined(VIVACE_FLOAT32)

EXPORT void vivace_linear(int64_t body, int64_t threads, const Linear*);
EXPORT void vivace_gated(int64_t body, int64_t threads, const Gated*);

EXPORT void vivace_choose(int64_t body, int64_t threads, const Choice* choice) {
    const Choice& c = *choice;
    std::vector<bf16> logits(c.rows * c.router.out);
    const Linear product{c.router, c.x, nullptr, logits.data(), c.rows};
    vivace_linear(body, threads, &product);
    choose_experts(logits.data(), c.router.out, c.rows, c.top_k, c.normalises, c.chosen, c.weights);
}

EXPORT void vivace_mix(const Mix* given) {
    const Mix& m = *given;
    for (int64_t row = 0; row < m.rows; ++row) {
        const bf16* add = m.add == nullptr ? nullptr : m.add + row * m.width;
        const auto part = [&](int64_t k) { return m.parts[k] + row * m.stride; };
        mix(part, m.weights + row * m.count, m.count, add, m.width, m.out + row * m.width);
    }
}

EXPORT void vivace_feed(int64_t body, int64_t threads, const Gated* gated, const Linear* down) {
    std::vector<float> inner((size_t)(gated->rows * down->matrix.in));  // room for the numbers of any body
    Gated first = *gated;
    Linear second = *down;
    first.out = (bf16*)inner.data(), second.x = first.out;
    vivace_gated(body, threads, &first);
    vivace_linear(body, threads, &second);
}

EXPORT void vivace_foresee(const Routers* routers) {
    const Routers& r = *routers;
    std::vector<float> logits(r.experts);
    std::vector<int64_t> order(r.experts);
    for (int64_t n = 0; n < r.count; ++n) {
        const float *scale = r.scale + n * r.width, *slow_scale = r.slow_scale + n * r.width;
        const float* weight = r.weight + n * r.width * r.experts;
        std::fill(logits.begin(), logits.end(), 0.0f);
        for (int64_t e = 0; e < r.width; ++e, weight += r.experts) {
            const float x = widened(r.fast[e]) * scale[e] + widened(r.slow[e]) * slow_scale[e];
            for (int64_t i = 0; i < r.experts; ++i) logits[i] += x * weight[i];
        }
        most(order, r.chosen, logits.data());
        std::copy_n(order.begin(), r.chosen, r.out + n * r.chosen);
    }
}

#endif

// Draws one token of a row of logits: the one with the largest perturbed score among those that top-p allows.
//
// That token is the one with the largest score of all, unless it is outside the nucleus. Then the nucleus is among the
// tokens before it, which are few, so nothing is ever sorted but these.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "bfloat16.h"
#include "span.h"

namespace {

struct Drawn {
    int64_t index = -1;  // of the row, -1 where no token may come
    float margin = 0;    // by which its score is above the next one

    // By how much its share of exp(score) of the two best is above the other's: near 0 a small change of the logits would
    // draw the other one.
    float confidence() const { return std::tanh(margin / 2); }
};

class Draws {
public:
    Draws(const Body& body, const Drawing& how) : body_(body), how_(how) {}

    // Draws the token at a position from `count` logits in the body's numbers, or in float32.
    Drawn draw(const void* logits, bool is_float, int64_t count, const int64_t* ids, int64_t position) {
        scores_.resize((size_t)count);
        p_ = {logits, ids, count, is_float, how_.key, position, how_.scale, scores_.data(), -1, 0, 0, 0};
        body_.perturb(&p_);
        if (p_.index < 0 || how_.top_p >= 1) return {p_.index, p_.best - p_.second};
        float total, over;
        body_.masses(&p_, logit(p_.index), &total, &over);
        const float bound = how_.top_p * total, each = mass(p_.index);
        float before = over;  // of the tokens before the drawn one: likelier, or as likely with a smaller index
        for (int64_t i = 0; i < p_.index && before < bound; ++i)
            if (logit(i) == logit(p_.index)) before += each;
        return before < bound ? Drawn{p_.index, p_.best - p_.second} : from_nucleus(bound);
    }

private:
    float logit(int64_t i) const {
        return p_.is_float || body_.number_bytes == sizeof(float) ? ((const float*)p_.logits)[i]
                                                                  : widened(((const uint16_t*)p_.logits)[i]);
    }
    float mass(int64_t i) const { return std::exp((logit(i) - p_.top) * how_.scale); }

    // Draws from the tokens before the best one whose probabilities reach the bound, the likeliest in any case.
    Drawn from_nucleus(float bound) const {
        const float last = logit(p_.index);
        std::vector<int64_t> likely;
        for (int64_t i = 0; i < p_.count; ++i)
            if (logit(i) > last || (logit(i) == last && i < p_.index)) likely.push_back(i);
        std::sort(likely.begin(), likely.end(), [&](int64_t a, int64_t b) {
            return logit(a) > logit(b) || (logit(a) == logit(b) && a < b);
        });
        Drawn best;
        float first = -INFINITY, second = first, before = 0;
        for (const int64_t i : likely) {
            if (best.index >= 0 && before >= bound) break;
            before += mass(i);
            if (scores_[i] > first) second = first, first = scores_[i], best.index = i;
            else if (scores_[i] > second) second = scores_[i];
        }
        best.margin = first - second;
        return best;
    }

    const Body& body_;
    const Drawing how_;
    Perturbed p_{};
    std::vector<float> scores_;
};

}  // namespace

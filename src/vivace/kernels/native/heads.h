// Medusa's heads (methods/medusa/drafter.py) for one sequence: all of them read the last kept row.
#pragma once
#include "tree.h"

namespace {

class HeadRun : public Levels {
public:
    HeadRun(const Worker& worker, const Plan& plan, const Chain& chain, Heads& heads, const int64_t* widths)
        : Levels(worker, plan, chain, widths, heads.count), heads_(heads) {
        for (auto* rows : {&mixed_, &inner_}) rows->reset(new bf16[heads.count * plan.width]);
    }

    void guess() {
        const int64_t width = plan_.width, all = heads_.count * width;
        worker_.linear({heads_.mix, heads_.kept, nullptr, mixed_.get(), 1});
        const Activated silu{mixed_.get(), nullptr, inner_.get(), all, SILU};
        worker_.body.activate(&silu, 0, 0);
        for (int64_t i = 0; i < all; ++i)
            inner_[i] = narrowed(widened(inner_[i]) + widened(heads_.kept[i % width]));
        for (int64_t head = 0; head < heads_.count; ++head)
            read(heads_.heads[head], heads_.ids, inner_.get() + head * width, head, 1);
    }

    void follow(const bf16* final) { worker_.norm(plan_, chain_.final_norm, final, heads_.kept, 1); }

private:
    Heads& heads_;
    std::unique_ptr<bf16[]> mixed_, inner_;
};

}  // namespace

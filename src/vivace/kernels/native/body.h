// A native body: the kernels compiled for one instruction set, as a table of functions.
//
// Everything is in an unnamed namespace and nothing of the standard library is used, because an inline function that
// was compiled for this instruction set could otherwise be linked into files for older processors.
#pragma once
#include "draw.h"
#include "layers.h"
#if !defined(VIVACE_FLOAT32)
#include "cluster.h"
#include "neurons.h"
#include "quantize.h"
#include "screen.h"
#endif

namespace {

// Phase 0 quantizes one row of inputs per item where the weights need it, phase 1 multiplies some tiles per item.
void linear_item(const void* context, int64_t phase, int64_t item) {
    const LinearWork& work = *(const LinearWork*)context;
    const Linear& l = *work.linear;
    if (phase == 0) return prepare(l.matrix, l.x, work.prepared, item);
    int64_t first, stop;
    split_range(item, l.matrix, work.threads, &first, &stop);
    project(l.matrix, inputs(l.matrix, l.x, work.prepared), l.add, l.out, l.rows, first, stop);
}

void gated_item(const void* context, int64_t phase, int64_t item) {
    const GatedWork& work = *(const GatedWork*)context;
    Gated g = *work.gated;
    if (phase == 0) return prepare(g.gate, g.x, work.prepared, item);
    g.x = inputs(g.gate, g.x, work.prepared);
    int64_t first, stop;
    split_range(item, g.gate, work.threads, &first, &stop);
    project_gated(g, first, stop);
}

void greedy_item(const void* context, int64_t phase, int64_t item) {
    const GreedyWork& work = *(const GreedyWork*)context;
    Linear l = work.greedy->linear;
    if (phase == 0) return prepare(l.matrix, l.x, work.prepared, item);
    l.x = inputs(l.matrix, l.x, work.prepared);
    int64_t first, stop;
    split_range(item, l.matrix, work.threads, &first, &stop);
    choose_greedily(l, first, stop, work.greedy->best + item * l.rows, work.greedy->index + item * l.rows);
}

#if !defined(VIVACE_FLOAT32)
// Phase 0 quantizes a row of inputs, phase 1 bounds some outputs, phase 2 computes those that may be the largest.
void screened_item(const void* context, int64_t phase, int64_t item) {
    const ScreenedWork& work = *(const ScreenedWork*)context;
    const Screened& s = *work.screened;
    if (phase == 0) return prepare_screened_row(s, work.prepared, item);
    int64_t first, stop;
    split_range(item, s.greedy.linear.matrix, work.threads, &first, &stop);
    phase == 1 ? bound_outputs(s, work.prepared, first, stop, item) : choose_within_bounds(s, work.threads, first, stop, item);
}

void neurons_item(const void* context, int64_t phase, int64_t item) {
    const Neurons& n = *(const Neurons*)context;
    phase == 0 ? activate_neurons(n, item) : add_neurons(n, item);
}
#else  // what only weights in bfloat16 have
constexpr decltype(Body::linear) screened_item = nullptr, quantise_item = nullptr, cluster_item = nullptr,
                                 neurons_item = nullptr;
#endif

void activate_item(const void* context, int64_t, int64_t) {
    const Activated& a = *(const Activated*)context;
    activate(a.gate, a.up, a.out, a.count, a.activation);
}

void norm_item(const void* context, int64_t, int64_t item) {
    const Norm& n = *(const Norm*)context;
    norm_row(n.x + item * n.width, n.gain, n.out + item * n.width, n.width, n.eps, n.offset);
}

void attention_item(const void* context, int64_t, int64_t item) {
    attend_some(*(const Attention*)context, item);
}

constexpr Body BODY{linear_item, gated_item, greedy_item, screened_item, activate_item, norm_item, attention_item,
                    span_item, quantise_item, cluster_item, likeliest, rotate, perturb, masses,
                    neurons_item, sizeof(bf16)};

}  // namespace

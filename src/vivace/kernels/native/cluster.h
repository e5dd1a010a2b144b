// Soft clustering of tiles of weights (palette/dkm.py) and its gradient (palette/unique.py), a tile for each item. Maps
// are made in registers and never written.
#pragma once
#include "elementwise.h"

namespace {

constexpr float LEAST_SHARE = 1e-7f;  // LEAST of palette/dkm.py
constexpr int64_t SUMMED = 8;         // vectors that are summed in float32 before they are added up in float64

// The attention map of a vector of weights to K entries.
template <int K>
struct SoftMap {
    Vec gap[K];   // the weight less the entry
    Vec soft[K];  // the map before it is kept above the least
    float inverse;

    SoftMap(Vec w, const float* entries, float tau) : inverse(1.0f / tau) {
        Vec most = broadcast(-__builtin_inff()), total = broadcast(0);
#pragma GCC unroll 16
        for (int j = 0; j < K; ++j) {
            gap[j] = sub(w, broadcast(entries[j]));
            soft[j] = mul(mul(gap[j], gap[j]), broadcast(-inverse));
            most = max(most, soft[j]);
        }
#pragma GCC unroll 16
        for (int j = 0; j < K; ++j) {
            soft[j] = exponential(sub(soft[j], most));
            total = add(total, soft[j]);
        }
        const Vec part = div(broadcast(1.0f), total);
#pragma GCC unroll 16
        for (int j = 0; j < K; ++j) soft[j] = mul(soft[j], part);
    }

    Vec share(int j) const { return max(soft[j], broadcast(LEAST_SHARE)); }

    // Replaces gradients of the K shares by those of the gaps; a weight's is the sum of them.
    void through(Vec* of) const {
        Vec mean = broadcast(0);
#pragma GCC unroll 16
        for (int j = 0; j < K; ++j) {
            of[j] = where_negative(sub(broadcast(LEAST_SHARE), soft[j]), of[j], broadcast(0));
            mean = fma(soft[j], of[j], mean);
        }
#pragma GCC unroll 16
        for (int j = 0; j < K; ++j)
            of[j] = mul(mul(mul(sub(of[j], mean), soft[j]), gap[j]), broadcast(-2.0f * inverse));
    }
};

// Sums over the weights of a tile, one for each entry.
template <int K>
struct EntrySums {
    Vec some[K];
    double total[K] = {};
    int64_t held = 0;

    EntrySums() { clear(); }
    void clear() {
        for (int j = 0; j < K; ++j) some[j] = broadcast(0);
        held = 0;
    }
    void flush() {
        for (int j = 0; j < K; ++j) total[j] += sum_of(some[j]);
        clear();
    }
    // Called after each vector of weights.
    void step() {
        if (++held == SUMMED) flush();
    }
};

// One where there is a weight, for a vector of n of them.
inline Vec ones(int64_t n) {
    static const float all[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    return n == WIDTH ? broadcast(1.0f) : load(all, n);
}
inline Vec load_floats(const float* p, int64_t n) { return n == WIDTH ? load(p) : load(p, n); }
inline void store_floats(float* p, Vec v, int64_t n) { n == WIDTH ? store(p, v) : store(p, v, n); }

template <int K>
void cluster_tile(const Clustering& c, int64_t tile) {
    const float* weights = c.weights + tile * c.count;
    const float tau = c.tau[tile];
    for (int64_t round = 0; round < c.rounds; ++round) {
        const float* entries = c.centroids + (round * c.tiles + tile) * K;
        EntrySums<K> totals, sums;
        for_width(c.count, [&](int64_t i, int64_t n) {
            const Vec w = load_floats(weights + i, n), one = ones(n);
            const SoftMap<K> map(w, entries, tau);
#pragma GCC unroll 16
            for (int j = 0; j < K; ++j) {
                const Vec share = mul(map.share(j), one);
                totals.some[j] = add(totals.some[j], share);
                sums.some[j] = fma(share, w, sums.some[j]);
            }
            totals.step(), sums.step();
        });
        totals.flush(), sums.flush();
        for (int j = 0; j < K; ++j) {
            c.totals[(round * c.tiles + tile) * K + j] = (float)totals.total[j];
            c.centroids[((round + 1) * c.tiles + tile) * K + j] = (float)(sums.total[j] / totals.total[j]);
        }
    }
    const float* entries = c.centroids + (c.rounds * c.tiles + tile) * K;
    for_width(c.count, [&](int64_t i, int64_t n) {
        const SoftMap<K> map(load_floats(weights + i, n), entries, tau);
        Vec made = broadcast(0);
#pragma GCC unroll 16
        for (int j = 0; j < K; ++j) made = fma(map.share(j), broadcast(entries[j]), made);
        store_floats(c.clustered + tile * c.count + i, made, n);
    });
}

template <int K>
void cluster_tile_back(const Clustering& c, int64_t tile) {
    const float* weights = c.weights + tile * c.count;
    const float* given = c.given + tile * c.count;
    float* gradient = c.gradient + tile * c.count;
    const float tau = c.tau[tile];
    const float* entries = c.centroids + (c.rounds * c.tiles + tile) * K;
    EntrySums<K> reached;  // the gradient of the entries
    for_width(c.count, [&](int64_t i, int64_t n) {
        const Vec g = load_floats(given + i, n);  // 0 beyond the end
        const SoftMap<K> map(load_floats(weights + i, n), entries, tau);
        Vec moved[K], slope = broadcast(0);
#pragma GCC unroll 16
        for (int j = 0; j < K; ++j) moved[j] = broadcast(entries[j]);
        map.through(moved);
#pragma GCC unroll 16
        for (int j = 0; j < K; ++j) {
            slope = add(slope, moved[j]);
            reached.some[j] = fma(g, sub(map.share(j), moved[j]), reached.some[j]);
        }
        reached.step();
        store_floats(gradient + i, mul(g, slope), n);
    });
    reached.flush();
    for (int64_t round = c.rounds - 1; round >= 0; --round) {
        const float* before = c.centroids + (round * c.tiles + tile) * K;
        const float* after = before + c.tiles * K;
        float pull[K];
        for (int j = 0; j < K; ++j)
            pull[j] = (float)(reached.total[j] / (double)c.totals[(round * c.tiles + tile) * K + j]);
        EntrySums<K> onward;
        for_width(c.count, [&](int64_t i, int64_t n) {
            const Vec w = load_floats(weights + i, n), one = ones(n);
            const SoftMap<K> map(w, before, tau);
            Vec moved[K], sum = load_floats(gradient + i, n);
#pragma GCC unroll 16
            for (int j = 0; j < K; ++j) moved[j] = mul(sub(w, broadcast(after[j])), broadcast(pull[j]));
            map.through(moved);
#pragma GCC unroll 16
            for (int j = 0; j < K; ++j) {
                sum = add(sum, fma(broadcast(pull[j]), map.share(j), moved[j]));
                onward.some[j] = sub(onward.some[j], mul(moved[j], one));
            }
            onward.step();
            store_floats(gradient + i, sum, n);
        });
        onward.flush();
        reached = onward;
    }
}

void cluster_item(const void* context, int64_t, int64_t item) {
    const Clustering& c = *(const Clustering*)context;
    const bool is_back = c.gradient != nullptr;
    switch (c.entries) {
        case 4:
            return is_back ? cluster_tile_back<4>(c, item) : cluster_tile<4>(c, item);
        case 8:
            return is_back ? cluster_tile_back<8>(c, item) : cluster_tile<8>(c, item);
        default:
            return is_back ? cluster_tile_back<16>(c, item) : cluster_tile<16>(c, item);
    }
}

}  // namespace

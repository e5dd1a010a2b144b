// What crosses the boundary between Python (kernels/library.py mirrors these structs) and the native bodies.
//
// All numbers are bfloat16 unless said otherwise, all tensors contiguous; shape letters as in core/__init__.py.
#pragma once
#include <cstdint>

typedef uint16_t bf16;

#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int64_t LANES = 16;  // outputs of a tile of a packed matrix

constexpr int64_t INT_GROUP = 64;  // inputs that share a scale in integer products

// How weights lie. ROW_MAJOR: (out, in). TILES: [ceil(out / 16)][ceil(in / 2)][16][2], zeros where they end.
// INT8: bytes 128 too large, [ceil(out / 16)][ceil(in / 64)][16][16][4], and a float for each output.
// Q4: two codes a byte, [ceil(out / 16)][ceil(in / 64)][8][16][4], low half first, and bfloat16 scales
// [ceil(out / 16)][ceil(in / 64)][16]; a code chooses one of the sixteen bytes of the table.
// LUT4: four codes a word of 16 bits, [ceil(out / 16)][ceil(in / 8)][16][2], for an output and the even or the odd inputs
// of eight; a code chooses one of its tile's bfloat16 entries, which lie in `scales`, [ceil(out / 16)][16].
// EXACT12: as TILES, [ceil(out / 64)][3][ceil(in / 2)][64] bytes; a step, a pair of inputs of four tiles, has 64 bytes of
// each plane. The first has the lower bytes of two tiles, eight weights of one and eight of the other in turn, the second
// those of the others, the third codes of upper bytes, of the former in low halves. EXACT12_ROWS: as ROW_MAJOR,
// [ceil(out / 4)][3][ceil(in / 32)][64]; a step has 32 inputs of four outputs. `scales` is an ExactSide.
enum Format : int64_t { ROW_MAJOR, TILES, INT8, Q4, LUT4, EXACT12, EXACT12_ROWS };

// What belongs to EXACT12: a step with an upper byte that has no code keeps its weights whole, a tile in its place of each
// plane and the last one here. Then it says for each group, and behind the last, where its whole steps are listed, and
// lists them.
struct ExactSide {
    uint8_t upper[16];
    int64_t num_whole;
    uint8_t unused[40];

    const bf16* last(int64_t whole) const { return (const bf16*)(this + 1) + whole * 2 * LANES; }
    const int32_t* places() const { return (const int32_t*)last(num_whole); }
};

extern "C" {

// A matrix in one of the formats (enum Format).
struct Matrix {
    const bf16* weight;
    const bf16* bias;  // (out,) or null
    int64_t in, out;
    int64_t format;
    const void* scales;   // of INT8 and Q4, entries of LUT4, ExactSide of EXACT12
    const int8_t* table;  // of Q4
};

struct Linear {
    Matrix matrix;
    const bf16* x;    // (rows, in)
    const bf16* add;  // (rows, out) or null: out = add + round(x W^T + b)
    bf16* out;        // (rows, out); may be null when only the greedy choice is wanted
    int64_t rows;
};

struct Gated {
    Matrix gate, up;
    const bf16* x;
    bf16* out;  // (rows, F)
    int64_t rows;
    int64_t activation;
};

// out = round(act(gate)) * up
struct Activated {
    const bf16 *gate, *up;
    bf16* out;
    int64_t count, activation;
};

// What some neurons of a gated feed-forward add: out += round(act(gate)) * up, down. Those of which no row's activation is
// above zero are not multiplied on.
struct Neurons {
    const bf16 *gate, *up, *down;  // (count, E), one neuron `stride` numbers after the other
    const bf16* x;                 // (rows, E)
    bf16* inner;                   // (rows, count) working space
    float* out;                    // (rows, E)
    int64_t rows, count, width, stride, activation;
};

// The largest rounded output of each row and its smallest index.
struct Greedy {
    Linear linear;
    float* best;       // (chunks, rows)
    int64_t* index;    // (chunks, rows)
};

struct Norm {
    const bf16* x;
    const bf16* weight;
    bf16* out;
    int64_t rows, width;
    float eps, offset;
};

// Weights to four-bit codes, each choosing one of the sixteen bytes of the table, which rise.
struct Quantised {
    const bf16* weight;   // (rows, in)
    const int8_t* table;  // (16,)
    uint8_t* codes;       // (rows, groups * 64)
    bf16* scales;         // (rows, groups)
    int64_t rows, in;
};

// Queries of single rows over the entries each of them sees: the first `seen` of its slot, then `tail`.
struct Attention {
    const bf16* q;  // (rows, H, D), rows `q_stride` apart
    const bf16* keys;    // (slots, K, capacity, D)
    const bf16* values;  // (slots, K, capacity, D)
    const int64_t* slot;
    const int64_t* seen;
    const int64_t* tail;  // (rows, tail_width), -1 padded, or null
    bf16* out;            // (rows, H, D)
    float* sums;          // (rows, H, D) working space
    int64_t rows, q_stride, heads, kv_heads, width, capacity, tail_width;
    int64_t window;  // 0: none
    float scale, softcap;  // softcap 0: none
};

// A layer as the span executes it; null norms are absent.
struct Layer {
    Matrix qkv, o, gate, up, down;
    const bf16 *attention_norm, *ffn_norm, *q_norm, *k_norm;
    int64_t window, rope;
};

struct Plan {
    const Layer* layers;
    int64_t num_layers, heads, kv_heads, width, ffn_width, head_width, rotated, activation;
    float norm_eps, norm_offset, scale, softcap;
};

// A low-rank term at one site of one layer, for the rows whose `which` is not -1.
struct Term {
    int64_t layer, site, rank, in, out;
    const bf16* down;  // (A, rank, in)
    const bf16* up;    // (A, out, rank)
    const int64_t* which;
};

struct Call {
    const bf16* h;  // (rows, E) entering layer `start`
    bf16* out;      // (rows, E) leaving layer `stop - 1`
    const int64_t *slot, *seen, *tail, *entry;
    const bf16* const* keys;    // one pointer per layer of the plan
    const bf16* const* values;
    const bf16* const* cosines;  // one (rows, rotated) table per rope
    const bf16* const* sines;
    const Term* terms;  // by layer, then in the order in which they are added
    uint8_t* space;     // vivace_span_bytes
    int64_t start, stop, rows, num_write, num_feed, tail_width, capacity, num_terms;
};

// A companion's attention to what a deep layer stored about verified entries.
struct DeepRead {
    int64_t layer;
    const bf16* gain;      // (E,) of the norm before the query
    Matrix query, output;  // (H D, E) and (E, H D)
};

// Chains of guesses below one root for each sequence (chain.h).
struct Chain {
    Matrix head;
    Matrix rows;  // the embedding where it is INT8 or EXACT12_ROWS; else `embedding` is it
    const bf16 *embedding, *final_norm;
    const bf16* scale;          // (E,) on a companion's residual before the final norm; null: rows guess themselves
    const bf16* offsets;        // (sequences, num_offsets, E) added where a companion starts, the last for the rest
    const bf16* const* keys;    // one pointer per layer of the plan
    const bf16* const* values;
    const bf16* const* cosines;  // by rope and position
    const bf16* const* sines;
    const Term* terms;  // of companions, by layer; their `which` is not read
    const DeepRead* reads;  // one before each of the first layers
    const int64_t *slot, *length, *root, *limit;  // (sequences,): where, entries stored, token, guesses at most
    const int64_t* ends;                          // (num_ends,) tokens that nothing is guessed below
    int64_t *tokens, *slots, *nodes, *parents;    // of the rows made, room for sequences + all guesses
    bf16* hidden;                                 // (rows, E) at the gate; null where nothing is handed over
    int64_t gate, sequences, is_fed, capacity, num_terms, num_ropes, num_offsets, num_reads, num_ends;
    float embedding_scale, min_confidence;  // below the latter a guess is not guessed on from; 0: not asked
};

// Streams that follow the last kept row through the upper layers and guess in place of a chain (streams.h).
struct Streams {
    const Plan* plan;     // of the layers they go through
    const bf16* marks;    // (count, E) added where they start, or null
    const bf16* ones;     // (E,)
    Matrix feedback;      // (count E or more, 2 E) of the normed final residual and the root's normed embedding; or none
    const Term* terms;    // of all their rows; `which` is not read
    const bf16* final;    // (E,) of the last kept row after all layers
    bf16* entering;       // (E,) of the last kept row where they start; of the new one afterwards
    int64_t num_terms, insertion, count, has_feedback;
    float mark_eps;       // of the root's norm
};

// Several steps of drafting and verification for the one sequence of a chain (speculate.h).
struct Speculation {
    Streams* streams;  // null where chains are drafted
    Matrix head;      // of the model, while the chain may have a rough one
    Matrix feedback;  // (num_offsets E, E): offsets of the next chain from the normed last kept residual; or none
    int64_t has_feedback, steps, room;  // at most so many steps, and so many rows kept in all
    int64_t* tokens;                    // (room,) of the rows kept
    bf16* hidden;                       // (room, E) leaving the last layer
    int64_t *kept, *guessed;            // (steps,) rows kept and guesses made
    int64_t draft_ns;                   // spent drafting
};
}

// A mixture's router, and the experts that it chooses for each row (mixture.cpp).
struct Choice {
    Matrix router;     // (X, E)
    const bf16* x;     // (rows, E), normed
    int64_t* chosen;   // (rows, top_k), the likeliest first
    bf16* weights;     // (rows, top_k)
    int64_t rows, top_k, normalises;
};

// [add +] what experts made of each row, each times its weight, in the order of the router.
struct Mix {
    const bf16* const* parts;  // (count,) of (rows, E), rows `stride` apart
    const bf16* weights;       // (rows, count)
    const bf16* add;           // (rows, E) or null
    bf16* out;                 // (rows, E)
    int64_t rows, count, width, stride;
};

// Routers of mixtures, asked about a mix of two residuals of one row (mixture.cpp).
struct Routers {
    const bf16 *fast, *slow;           // (E,)
    const float *scale, *slow_scale;   // (count, E), of each
    const float* weight;               // (count, E, X)
    int64_t* out;                      // (count, chosen), the likeliest first
    int64_t count, width, experts, chosen;
};

// A part of a file and where in memory it belongs (reader.cpp).
struct Extent {
    int64_t offset, place, bytes;
};

// How a batch of reads ended: its number, its first error or 0, and what was to be read there.
struct Ended {
    int64_t number, error, offset, bytes;
};

constexpr int64_t ENDED = -1;    // in place of an error number: the file is shorter
constexpr int64_t DAMAGED = -2;  // a page is not as it was written

enum Site : int64_t { SITE_Q, SITE_K, SITE_V, SITE_O, SITE_GATE, SITE_UP, SITE_DOWN, SITE_MLP };
enum Activation : int64_t { SILU, GELU_TANH, GELU, RELU };

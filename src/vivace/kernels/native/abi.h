// The structs that Python passes to the native kernels; kernels/library.py and chain.py mirror them.
//
// Numbers are bfloat16 and tensors contiguous unless a comment says otherwise; shape letters are those of
// core/__init__.py. A "body" is the set of kernels that are compiled for one instruction set.
#pragma once
#include <cstdint>

// The numbers of tensors: bfloat16, and float32 in the bodies that are compiled for it (body_*_float32.cpp).
#if defined(VIVACE_FLOAT32)
typedef float bf16;
#else
typedef uint16_t bf16;
#endif
typedef uint16_t EntryScale;  // bfloat16 in every body: of a head of an entry in eight bits

#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int64_t LANES = 16;  // outputs of a tile of a packed matrix: the float32 numbers of one 512-bit register

constexpr int64_t INT_GROUP = 64;  // inputs that share a scale in integer products

// Layouts of weights. Every layout but ROW_MAJOR is padded to whole tiles, with weights that multiply to zero, so a
// kernel needs no special case at the end of a matrix; inputs are padded by the caller (Matrix.rows in native.py).
//
// ROW_MAJOR  (out, in).
// TILES      [ceil(out / 16)][ceil(in / 2)][16][2]: two inputs of sixteen outputs are the 64 bytes that one bfloat16
//            dot-product instruction of 512 bits takes. In float32 [ceil(out / 16)][ceil(in / 2)][2][16].
// INT8       [ceil(out / 16)][ceil(in / 64)][16][16][4] bytes, each weight plus 128, since one factor of the integer
//            dot product has no sign; `scales` has a float32 for each output.
// Q4         [ceil(out / 16)][ceil(in / 64)][8][16][4] bytes of two codes, the earlier inputs in the low half; a code
//            selects one of sixteen integers of `table`. `scales` is bfloat16, [ceil(out / 16)][ceil(in / 64)][16].
// LUT4       [ceil(out / 16)][ceil(in / 8)][16][2] words of 16 bits; a word has the four codes of one output for the
//            even, or the odd, ones of eight inputs. A code selects one of the sixteen bfloat16 entries of its tile's
//            codebook; `scales` has the codebooks, [ceil(out / 16)][16].
// LUT2       [ceil(out / 16)][ceil(in / 16)][16][2] such words with eight codes of two bits; codebooks of four entries.
// LUT3       [ceil(out / 16)][ceil(in / 32)][3][16][2] such words with five codes of three bits: those of pairs 0-4,
//            5-9 and 10-14 of the inputs, and in bit 15 of each the three bits of pair 15; codebooks of eight entries.
// LUT2_INTS, LUT3_INTS, LUT4_INTS  codes into a table of integers for each tile, multiplied as those of Q4 are:
//            `table` is [ceil(out / 16)][16] (the entries over again where there are fewer), `scales` as in Q4. LUT4_INTS
//            lies as Q4. LUT2_INTS is [ceil(out / 16)][ceil(in / 64)][4][16][4] bytes of four codes, the earliest inputs
//            lowest. LUT3_INTS is [ceil(out / 16)][ceil(in / 64)][2][3][16][4] bytes, for eight times four inputs: codes
//            0 and 1, 2 and 3, 4 and 5 in bits 0-5 of each plane; codes 6 and 7 have their lower bits in bits 6-7 of the
//            first two planes and their upper ones in bits 6 and 7 of the third.
// EXACT12    [ceil(out / 64)][3][ceil(in / 2)][64] bytes, in the order of sums of TILES. A step is two inputs of four
//            tiles and has 64 bytes in each of three planes: lower bytes of two tiles, eight weights of one and eight
//            of the other in turn; lower bytes of the other two tiles; and codes of the upper bytes of all four, those
//            of the first two in the low halves of the bytes. `scales` is an ExactSide.
// EXACT12_ROWS  [ceil(out / 4)][3][ceil(in / 32)][64] bytes, in the order of sums of ROW_MAJOR: a step is 32 inputs of
//            four outputs.
// GRID4, GRID8  the codes of a file: a weight is scale (code - zero) + offset. Codes lie as those of Q4 (through the
//            table of the GridSide) and of INT8; `scales` is a GridSide.
// FLOAT16_TILES, FLOAT16_ROWS, BFLOAT16_TILES, BFLOAT16_ROWS  for a body for float32: TILES and ROW_MAJOR of its layout,
//            whose weights take 16 bits and are widened in registers. The sums have the bits of the same weights in
//            float32.
enum Format : int64_t {
    ROW_MAJOR, TILES, INT8, Q4, LUT4, EXACT12, EXACT12_ROWS, FLOAT16_TILES, FLOAT16_ROWS, BFLOAT16_TILES, BFLOAT16_ROWS,
    LUT2, LUT3, LUT2_INTS, LUT3_INTS, LUT4_INTS, GRID4, GRID8
};

// How a number of each group of a GRID matrix is stored: not at all, as float16, as float32, or as an int8 multiple of
// a float16 for each 256 inputs.
enum Factor : int64_t { NOTHING, HALVES, FLOATS, MULTIPLES };

// The part of a GRID matrix beside its codes. Places are in bytes from the beginning of this struct; numbers of groups
// lie [ceil(out / 16)][ceil(in / 64)][64 / group][16], those for 256 inputs [ceil(out / 16)][ceil(in / 256)][16].
struct GridSide {
    int64_t group;          // neighbouring inputs that share a scale: 16, 32 or 64
    int64_t scale, offset;  // Factor of scales and of offsets
    int64_t has_zeros;      // whether groups have a code that stands for zero (int8); it is 0 otherwise
    int64_t is_ordered;     // whether inputs are taken in another order than they come in
    int64_t scales, scale_units, offsets, offset_units, zeros;
    int64_t order;          // of (in,) int32: which input comes at each place
    int8_t table[16];       // of GRID4: what codes stand for, before zeros and scales
    uint8_t unused[24];     // to 128 bytes

    template <class T>
    const T* at(int64_t place) const { return (const T*)((const uint8_t*)this + place); }
};

// The part of an EXACT12 matrix beside its planes. A step with an upper byte that has no code is stored uncompressed:
// three of its tiles take its 64 bytes in each plane, the fourth is here. After those fourth tiles come, for each group
// of tiles and one past the last, the index of its first uncompressed step in the list that follows, and that list of
// steps.
struct ExactSide {
    uint8_t upper[16];   // the upper bytes that have a code
    int64_t num_whole;   // uncompressed steps
    uint8_t unused[40];  // to 64 bytes, so that the tiles behind are aligned as the planes are

    const bf16* last(int64_t whole) const { return (const bf16*)(this + 1) + whole * 2 * LANES; }
    const int32_t* places() const { return (const int32_t*)last(num_whole); }
};

extern "C" {

struct Screen;

// A matrix in one of the formats (enum Format).
struct Matrix {
    const bf16* weight;
    const bf16* bias;  // (out,) or null
    int64_t in, out;
    int64_t format;
    const void* scales;   // of INT8, Q4 and LUT*_INTS, entries of LUT*, ExactSide of EXACT12, GridSide of GRID4 and GRID8
    const int8_t* table;  // of Q4 and LUT*_INTS
    const Screen* screen;  // null: none
};

// The same weights in fewer bits, with bounds for what the rounding changed: the largest output of a row is found
// without reading most of the matrix (screen.h).
struct Screen {
    Matrix codes;        // INT8
    const float* lost;   // (out,) at least |w - w'| of each output, plus what floating-point sums may be off, for |x| = 1
    const float* kept;   // (out,) at least |w'|
    int64_t* counts;     // (3,) added to: calls, outputs of the calls, outputs that were computed exactly
};

// The weights of a norm over the last dimension: with a bias it is a layer norm, without one a root-mean-square norm. An
// absent norm has neither.
struct Gain {
    const bf16 *weight, *bias;
};

struct Linear {
    Matrix matrix;
    const bf16* x;    // (rows, in)
    const bf16* add;  // (rows, out) or null: out = add + round(x W^T + b)
    bf16* out;        // (rows, out); null when only the largest output is asked for
    int64_t rows;
};

struct Gated {
    Matrix gate, up;
    const bf16* x;
    bf16* out;  // (rows, F)
    int64_t rows;
    int64_t activation;
};

// out = round(act(gate)) * up, or round(act(gate)) where `up` is null
struct Activated {
    const bf16 *gate, *up;
    bf16* out;
    int64_t count, activation;
};

// The contribution of some neurons of a gated feed-forward: out += (round(act(x gate^T)) * (x up^T)) down. With ReLU a
// neuron whose activation is zero takes no further products, and so does one whose `known` activation is.
struct Neurons {
    const bf16 *gate, *up, *down;  // (count, E), the neurons `stride` numbers apart; no gate where `known` is there
    const bf16* known;             // (rows, count) round(act(x gate^T)), or null
    const bf16* x;                 // (rows, E)
    bf16* inner;                   // (rows, count) working space
    float* out;                    // (rows, E)
    int64_t rows, count, width, stride, activation;
};

// The largest rounded output of each row and its index, the smallest of equals, for each item of the work.
struct Greedy {
    Linear linear;
    float* best;       // (chunks, rows)
    int64_t* index;    // (chunks, rows)
};

// The same through a screen. `size` and `missed` are norms: of a row, and of what quantizing it changed.
struct Screened {
    Greedy greedy;
    float *size, *missed;  // (rows,)
    float* upper;          // (rows, tiles * 16) upper bounds of the outputs
    float* least;          // (chunks, rows) the largest lower bound
    int64_t* exact;        // (chunks,) outputs that were computed exactly
};

struct Norm {
    const bf16* x;
    Gain gain;
    bf16* out;
    int64_t rows, width;
    float eps, offset;
};

// The quantization of weights to four-bit codes, each of which selects one of the sixteen rising integers of the table.
struct Quantised {
    const bf16* weight;   // (rows, in)
    const int8_t* table;  // (16,)
    uint8_t* codes;       // (rows, groups * 64)
    bf16* scales;         // (rows, groups)
    int64_t rows, in;
};

// Soft clustering of tiles of weights, or its gradient, where `gradient` is not null.
struct Clustering {
    const float* weights;   // (tiles, count)
    const float* tau;       // (tiles,) temperatures
    float* centroids;       // (rounds + 1, tiles, entries), of which the first are given
    float* totals;          // (rounds, tiles, entries) sums of the shares of each entry
    float* clustered;       // (tiles, count)
    const float* given;     // (tiles, count) gradient of what was clustered
    float* gradient;        // (tiles, count) that of the weights
    int64_t tiles, count, entries, rounds;  // entries: 4, 8 or 16
};

// Where entries are stored: those of a slot in blocks, which a table names by the place of their first entry.
struct Places {
    const int64_t* table;  // (slots, table_width)
    int64_t table_width, block, capacity;  // entries of a block, and of all blocks together
    const EntryScale *key_scales, *value_scales;  // (K, capacity) where entries have eight bits, else null
    const int64_t* pruned;  // (slots) prompt tokens that the layer has no entries of; null: it has all

    // Tokens that a layer lacks leave no gap: all later entries of the slot lie this much further in front.
    int64_t shift(int64_t slot) const { return pruned == nullptr ? 0 : pruned[slot]; }
    // Blocks of 64 entries, which nearly all models have, take no division.
    int64_t within(int64_t entry) const { return block == 64 ? entry & 63 : entry % block; }
    int64_t of(int64_t slot, int64_t entry) const {
        return table[slot * table_width + (block == 64 ? entry >> 6 : entry / block)] + within(entry);
    }
};

// Attention of single rows to the entries that each of them reads: the first `seen` of its slot, then those of `tail`.
// Where there is an index, the first `seen` that it names of the slot.
struct Attention {
    const bf16* q;  // (rows, H, D), rows `q_stride` apart
    const bf16* keys;    // (K, capacity, D)
    const bf16* values;  // (K, capacity, D)
    Places places;
    const int64_t* slot;
    const int64_t* seen;
    const int64_t* tail;   // (rows, tail_width), -1 padded, or null
    const int64_t* index;  // (slots, index_width) entries of a slot that its rows read, in this order; null: all
    bf16* out;             // (rows, H, D)
    float* sums;           // (rows, H, D) working space
    int64_t rows, q_stride, heads, kv_heads, width, tail_width, index_width;
    int64_t window;  // 0: none
    float scale, softcap;  // softcap 0: none
    const float* bias;  // (H, bias_reach) added to scores by how far back an entry is, the last to all beyond; or null
    int64_t bias_reach;

    int64_t num_seen(int64_t row) const { return seen[row] - places.shift(slot[row]); }
    int64_t tail_entry(int64_t row, int64_t i) const { return tail[row * tail_width + i] - places.shift(slot[row]); }
    // The entry that a row reads at an ordinal; ordinals from `seen` on are in the tail.
    int64_t entry(int64_t row, int64_t ordinal, int64_t seen) const {
        if (ordinal >= seen) return tail_entry(row, ordinal - seen);
        return index == nullptr ? ordinal : index[slot[row] * index_width + ordinal];
    }
};

// The gated feed-forward of an expert.
struct Expert {
    Matrix gate, up, down;
};

// The experts of a layer, all of one size and format, and the router that chooses among them.
struct Mixture {
    Matrix router;  // (X, E)
    const Expert* experts;
    int64_t top_k, normalises;  // as in Choice
};

// The weights of a layer in a span; `gate` is not read where the plan's feed-forwards have none.
struct Layer {
    Matrix qkv, o, gate, up, down;
    Gain attention_norm, ffn_norm;            // before each half
    Gain attention_post_norm, ffn_post_norm;  // after it, before the residual is added
    Gain q_norm, k_norm;
    int64_t window, rope;
    const Mixture* mixture;  // in place of gate, up and down; null: none
    Matrix cross_q, cross_o;  // of attention to the sources of texts, where the plan has such
    Gain cross_norm, cross_post_norm;
};

// The layers of a span and the sizes that they share.
struct Plan {
    const Layer* layers;
    int64_t num_layers, heads, kv_heads, width, ffn_width, head_width;
    int64_t rotated;            // components of a head that are rotated; 0: positions are added to embeddings
    int64_t activation;
    int64_t is_gated;           // whether feed-forwards are down(act(gate) * up), and not down(act(up))
    int64_t norms_heads_alone;  // whether queries and keys are normed head by head, and not over all heads at once
    float norm_eps, norm_offset, scale;
    float softcap, clip;        // of scores, and of queries, keys and values; 0: none
    int64_t norms_sums;         // whether norms after a half take the sum of the residual and what is added to it
    int64_t reads_sources;      // whether layers attend to the sources of texts between their halves
    const float* bias;          // as in Attention, of a text's rows to itself in all layers
    int64_t bias_reach;
};

// Low-rank deltas at one site of one layer, for the rows whose `which` (their adapter) is not -1.
struct Delta {
    int64_t layer, site, rank, in, out;
    const bf16* down;  // (A, rank, in)
    const bf16* up;    // (A, out, rank)
    const int64_t* which;
};

// Rows that go through layers start..stop-1 of a plan. The first `num_write` of them store keys and values; those from
// `num_feed` on get the deltas at SITE_MLP instead of the feed-forward.
//
// A call may compute a part of one layer instead: up to its stored keys and values (PROJECTED), what is behind them
// (BEHIND), or a half without its residual, the products of the attention's output (ATTENDED) or of `down` (FED).
enum LayerPart : int64_t { WHOLE, PROJECTED, BEHIND, ATTENDED, FED };
struct Call {
    const bf16* h;  // (rows, E) entering layer `start`
    bf16* out;      // (rows, E) leaving layer `stop - 1`; the products of a half
    const int64_t *slot, *seen, *tail, *index, *entry;
    const bf16* const* keys;    // one pointer per layer of the plan
    const bf16* const* values;
    const bf16* const* cosines;  // one (rows, rotated) table per rope
    const bf16* const* sines;
    const Places* places;  // one per layer of the plan
    const Delta* deltas;  // by layer, then in the order in which they are added
    uint8_t* space;     // vivace_span_bytes
    int64_t start, stop, rows, num_write, num_feed, tail_width, index_width, num_deltas;
    const bf16* const* cross_keys;  // as keys, of the sources, all of which each row reads
    const bf16* const* cross_values;
    const Places* cross_places;
    const int64_t* cross_seen;  // (rows,) entries of each row's source
    int64_t part;
    bf16* heads;  // (rows, H D + 2 K D) queries, keys and values, written by PROJECTED and read by BEHIND; else null
};

// The attention of a draft row to the entries that a deep layer stored for verified positions.
struct DeepRead {
    int64_t layer;
    const bf16* gain;      // (E,) of the norm before the query
    Matrix query, output;  // (H D, E) and (E, H D)
};

// How the tokens of a text are drawn (drawing.h): its key, one over the temperature (0: the likeliest token is taken), and
// the probability that the likeliest tokens must reach to be all that may be drawn.
struct Drawing {
    int64_t key;
    float scale, top_p;
};

// A row of logits and the noise that decides which token is drawn (draw.h).
struct Perturbed {
    const void* logits;   // (count,) numbers of the body, or float32 where `is_float`
    const int64_t* ids;   // (count,) token of each; null: in order
    int64_t count, is_float, key, position;
    float scale;
    float* scores;        // (count,) written: logit * scale + noise
    int64_t index;        // written: of the largest score, -1 where there is none
    float best, second, top;  // written: the two largest scores and the largest logit
};

// Chains of draft tokens below the last committed token (the root) of each sequence (chain.h).
struct Chain {
    Matrix head;
    Matrix rows;  // the embedding where it is INT8 or EXACT12_ROWS; else `embedding` is it
    const bf16 *embedding, *positions;  // positions: (entries, E) added to embeddings, or null
    Gain final_norm;
    const bf16* scale;          // (E,) on a draft row's residual before the final norm; null: there are no draft rows
    const bf16* offsets;        // (sequences, num_offsets, E) added where a draft row starts, the last at later depths
    const bf16* const* keys;    // one pointer per layer of the plan
    const bf16* const* values;
    const bf16* const* cosines;  // by rope and position
    const bf16* const* sines;
    const Places* places;  // one per layer of the plan
    const Delta* deltas;  // deltas of draft rows, by layer; their `which` is not read
    const Delta* worn;    // deltas of all rows of some sequences, by layer; their `which` is by sequence
    const DeepRead* reads;  // one before each of the first num_reads layers
    const int64_t *slot, *length, *root, *limit;  // (sequences,) slot, entries stored, last token, most guesses
    const int64_t* ends;                          // (num_ends,) end-of-text tokens, below which nothing is guessed
    const int64_t* ids;  // (head.out,) token of each output of the head; null: the outputs are all tokens, in order
    int64_t *tokens, *slots, *nodes, *parents;    // written for each row; sequences + the sum of limits at most
    bf16* hidden;                                 // (rows, E) residuals at the exit layer; null where not wanted
    const Drawing* drawings;                      // (sequences,) how tokens are drawn; null: they are the likeliest
    int64_t exit_layer, sequences, is_fed, num_deltas, num_worn, num_ropes, num_offsets, num_reads, num_ends;
    float embedding_scale, min_confidence;  // a guess less likely than the latter is its chain's last; 0: never
    float softcap, certain;  // of logits, 0: none; capping keeps the order of logits whose size is below the latter
};

// Stream rows, which start from the last kept row's residual at a layer and guess in place of a chain (streams.h).
struct Streams {
    const Plan* plan;     // layers that stream rows go through
    const bf16* embeddings;  // (count, E) stream embeddings, added where they start, or null
    const bf16* ones;     // (E,) ones, the weight of the norm of the root's embedding
    Matrix feedback;      // (count E or more, 2 E): offsets from the normed final residual and root's normed embedding
    Matrix head;          // what guesses are read with
    const int64_t* ids;   // (head.out,) token of each output of the head; null: the outputs are all tokens, in order
    const Delta* deltas;  // deltas of all stream rows; `which` is not read
    const bf16* final;    // (E,) of the last kept row after all layers
    bf16* entering;       // (E,) of the last kept row where they start; of the new one afterwards
    bf16* left;           // (count, E) streams of the last kept row after all layers, where they ride; then of the new one
    Matrix pruner_down, pruner_up, exit_head;  // the early exit whose guess is their feedback where they ride
    int64_t num_deltas, insertion_layer, count, has_feedback;
    int64_t rides, runs_behind;  // whether every row has streams while it is verified, and whether these run behind it
    float embedding_eps;  // eps of the norm of the root's embedding
};

// Heads on the last kept row's normed residual, each of which guesses a later token (heads.h).
struct Heads {
    Matrix mix;            // (count E, E): x + silu(mix x) is what the heads read
    const Matrix* heads;   // (count,)
    const int64_t* ids;    // token of each output of a head; null: the outputs are all tokens, in order
    bf16* kept;            // (E,) of the last kept row; of the new one afterwards
    int64_t count;
};

// Several steps of drafting and verification for the only sequence of a chain (speculate.h).
struct Speculation {
    Streams* streams;  // null where others draft
    Heads* heads;      // null where others draft
    const int64_t* widths;  // (depth,) guesses of streams or heads at each depth, each below each of the depth before
    Matrix head;      // the model's head, used for verification; the chain may draft with a quantized one
    Matrix feedback;  // (num_offsets E, E): maps the last kept row's normed residual to the next chain's offsets
    int64_t has_feedback, steps, room;  // whether there is one; most steps; most rows that are kept in all
    int64_t* tokens;                    // (room,) tokens of the kept rows
    bf16* hidden;                       // (room, E) residuals of the kept rows after the last layer
    int64_t *kept, *guessed;            // (steps,) rows kept and guesses made
    int64_t* depths;                    // (steps, most) depth of each guess
    int64_t most;                       // most guesses of a step
    int64_t draft_ns;                   // nanoseconds spent drafting
};
}

// The routing of rows by a mixture's router (mixture.cpp).
struct Choice {
    Matrix router;     // (X, E)
    const bf16* x;     // (rows, E), normed
    int64_t* chosen;   // (rows, top_k) experts, the likeliest first
    bf16* weights;     // (rows, top_k) their weights, which sum to one if `normalises`
    int64_t rows, top_k, normalises;
};

// The weighted sum of the experts' outputs, [add +] sum_k weights[k] parts[k], in the router's order.
struct Mix {
    const bf16* const* parts;  // (count,) of (rows, E), rows `stride` apart
    const bf16* weights;       // (rows, count)
    const bf16* add;           // (rows, E) or null
    bf16* out;                 // (rows, E)
    int64_t rows, count, width, stride;
};

// Routers of several layers, applied to fast * scale + slow * slow_scale of one row (mixture.cpp).
struct Routers {
    const bf16 *fast, *slow;           // (E,)
    const float *scale, *slow_scale;   // (count, E), for each router
    const float* weight;               // (count, E, X)
    int64_t* out;                      // (count, chosen), the likeliest first
    int64_t count, width, experts, chosen;
};

// How the rows of one sum travel in four bits (wire.cpp). Scales are of R ranks, then of their sum.
struct WireCode {
    const int32_t *keep, *rest;                // features that are sent whole, and those that are coded
    const float *scales, *inverses;            // (R + 1, num_rest) steps of the codes, and one over them
    const float* weights;                      // (R + 1, num_rest up to a multiple of 16) squares of the steps
    const float *factors, *inverse_factors;    // (256,) ascending factors of a row's steps; null where it has none
    int64_t width, num_keep, num_rest, row_bytes;  // num_rest is even
};

// Rows that are encoded, or added.
struct WireRows {
    const WireCode* code;
    const void* x;      // (count, width), bfloat16 or float32
    uint8_t* payload;   // (count, row_bytes)
    int64_t count, is_float, source;  // `source`: the first rank whose scales are used
};

// A part of a file and its place in memory (reader.cpp).
struct Extent {
    int64_t offset, place, bytes;
};

// The end of a batch of reads: its number, its first error or 0, and the range of the file where that happened.
struct Ended {
    int64_t number, error, offset, bytes;
};

constexpr int64_t ENDED = -1;    // in place of an error number: the read goes beyond the end of the file
constexpr int64_t DAMAGED = -2;  // in place of an error number: a page does not have its checksum

enum Site : int64_t { SITE_Q, SITE_K, SITE_V, SITE_O, SITE_GATE, SITE_UP, SITE_DOWN, SITE_MLP };
enum Activation : int64_t { SILU, GELU_TANH, GELU, RELU };

"""Tables that map Hugging Face tensor names to our parameters.

Our query, key and value projections are the rows q | k | v of one matrix, gate and up the rows gate | up of another.
``layout`` returns for each of our parameters the stored tensors it is made of; loading, saving and sharing
all use it, so the three cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vivace.core.config import ModelConfig


@dataclass(frozen=True)
class Names:
    """Names of the stored tensors of one family: stems without ``.weight`` unless they end in it; empty for absent
    parts.
    """

    roots: tuple[str, ...] = ("model.",)
    """Prefixes in use; the first is used for writing."""
    embedding: str = "embed_tokens"
    positions: str = ""
    final_norm: str = "norm"
    heads: tuple[str, ...] = ("lm_head",)
    """Names of the language model head, without a root; the first is used for writing."""
    layer: str = "layers.{}."
    """Prefix of a layer, with a place for its number."""
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = ""
    ffn_norm: str = "post_attention_layernorm"
    ffn_post_norm: str = ""
    q_norm: str = ""
    k_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """One fused tensor, or query, key and value."""
    output: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """One fused tensor, or gate and up."""
    down: str = "mlp.down_proj"
    router: str = ""
    expert_up: tuple[str, ...] = ()
    """Gate and up of an expert, with a place for its number."""
    expert_down: str = ""
    packed_up: str = ""
    """All experts in one tensor (X, 2F, E), as a module of transformers holds them."""
    packed_down: str = ""
    packed_router: str = ""
    up_plain: str = ""
    """The one projection in place of gate and up, in checkpoints whose feed-forward has no gate."""
    embedding_norm: str = ""
    relative: str = ""
    """Table of a relative position bias."""
    logits_bias: str = ""
    """Added to logits; without a root."""
    encoder: Names | None = None
    """Names of the encoder's tensors, behind the same root."""
    cross_norm: str = ""
    cross_q: str = ""
    cross_kv: tuple[str, ...] = ()
    cross_output: str = ""
    may_untie: bool = False
    """Whether a head that is stored counts although the configuration says that it is tied."""
    transposed: bool = False
    """Whether matrices are stored as (in, out)."""
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    """Patterns of stored tensors that hold no weights of the text model."""

    def packed(self) -> Names:
        """Return the table of the same family with its experts as one stack per layer."""
        return replace(self, expert_up=(), expert_down="", router=self.packed_router)


LLAMA = Names()
QWEN3 = replace(LLAMA, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
GEMMA = replace(
    LLAMA,
    attention_post_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    ffn_post_norm="post_feedforward_layernorm",
)
GEMMA3 = replace(GEMMA, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
GEMMA3_MULTIMODAL = replace(
    GEMMA3,
    roots=("model.language_model.", "language_model.model."),
    heads=("lm_head", "language_model.lm_head"),
    ignored=(*LLAMA.ignored, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
)
PHI3 = replace(LLAMA, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
OLMO2 = replace(
    QWEN3,
    attention_norm="",
    attention_post_norm="post_attention_layernorm",
    ffn_norm="",
    ffn_post_norm="post_feedforward_layernorm",
)
QWEN3_MOE = replace(
    QWEN3,
    router="mlp.gate",
    expert_up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    expert_down="mlp.experts.{}.down_proj",
    packed_up="mlp.experts.gate_up_proj",
    packed_down="mlp.experts.down_proj",
    packed_router="mlp.gate",
)
OLMOE = QWEN3_MOE
MIXTRAL = replace(
    LLAMA,
    router="block_sparse_moe.gate",
    expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    expert_down="block_sparse_moe.experts.{}.w2",
    packed_up="mlp.experts.gate_up_proj",
    packed_down="mlp.experts.down_proj",
    packed_router="mlp.gate",
)
GPT2 = Names(
    roots=("transformer.", ""),
    embedding="wte",
    positions="wpe",
    final_norm="ln_f",
    layer="h.{}.",
    attention_norm="ln_1",
    ffn_norm="ln_2",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    transposed=True,
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
)
OPT = Names(
    roots=("model.decoder.", "decoder."),
    positions="embed_positions",
    final_norm="final_layer_norm",
    attention_norm="self_attn_layer_norm",
    ffn_norm="final_layer_norm",
    output="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
)


@dataclass(frozen=True)
class TensorPiece:
    """One stored tensor and the rows of our parameter that it fills."""

    name: str
    start: int
    """First row."""
    stop: int
    """Row after the last."""
    transposed: bool = False
    """Whether the stored matrix is (in, out)."""
    expert: int | None = None
    """Index of the matrix in a stack; None if the tensor is one matrix."""
    stack: int = 0
    """Number of matrices in the stack."""


Range = tuple[int, int]
"""First, and one past the last."""


@dataclass(frozen=True)
class Target:
    """One of our parameters: its shape and the stored tensors it is made of, in the order of rows."""

    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]
    rows: tuple[Range, ...] | None = None
    """The rows that are read, in order, where that is not all of them."""
    columns: Range | None = None
    """The columns that are read, where that is not all of them."""

    @property
    def shape_read(self) -> tuple[int, ...]:
        """Return the shape of what is read."""
        first, *rest = self.shape
        if self.rows is not None:
            first = sum(stop - start for start, stop in self.rows)
        if self.columns is not None:
            rest[0] = self.columns[1] - self.columns[0]
        return (first, *rest)

    def parts(self) -> Iterator[tuple[TensorPiece, Range, int]]:
        """Yield every run of rows that is read: its piece, which rows of the piece, and where they go."""
        place = 0
        for start, stop in self.rows or ((0, self.shape[0]),):
            for piece in self.pieces:
                first, last = max(start, piece.start), min(stop, piece.stop)
                if first < last:
                    yield piece, (first - piece.start, last - piece.start), place
                    place += last - first


def layout(names: Names, config: ModelConfig, root: str, head: str) -> dict[str, Target]:
    """Return every parameter of the decoder by our name.

    Args:
        names: the family's table.
        config: the model.
        root: which of ``names.roots`` the checkpoint uses.
        head: which of ``names.heads`` it uses.
    """
    c = config
    table = {"embedding": _whole(f"{root}{names.embedding}.weight", (c.vocab_size, c.width))}
    if not c.tied_head:
        table["lm_head.weight"] = _whole(f"{head}.weight", (c.vocab_size, c.width))
    if c.logits_bias:
        table["logits_bias"] = _whole(names.logits_bias, (1, c.vocab_size))
    table.update(_stack(names, c, root))
    if c.encoder is not None:
        assert names.encoder is not None
        table.update({f"encoder.{name}": target for name, target in _stack(names.encoder, c.encoder, root)})
    return table


def _stack(names: Names, c: ModelConfig, root: str) -> Iterator[tuple[str, Target]]:
    """Yield the parameters of a stack of layers, without its embedding and head."""
    if names.positions:
        rows = c.max_positions + c.position_offset
        yield "position_embedding", _whole(f"{root}{names.positions}.weight", (rows, c.width))
    if c.embedding_norm:
        yield from _norm("embedding_norm", root + names.embedding_norm, c.width, c)
    if c.relative is not None:
        yield "relative.weight", _whole(f"{root}{names.relative}.weight", (c.relative.num_buckets, c.num_heads))
    if c.final_norm:
        yield from _norm("final_norm", root + names.final_norm, c.width, c)
    for index in range(c.num_layers):
        yield from _layer(names, c, index, root + names.layer.format(index))


def _layer(names: Names, c: ModelConfig, index: int, stem: str) -> Iterator[tuple[str, Target]]:
    """Yield the parameters of one layer."""
    ours = f"layers.{index}."
    query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield from _linear(f"{ours}qkv", _stems(stem, names.qkv), (query, key, key), c.width, c.qkv_bias, names.transposed)
    yield from _linear(f"{ours}o", (stem + names.output,), (c.width,), query, c.output_bias, names.transposed)
    for norm in ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm"):
        if stored := getattr(names, norm):
            yield from _norm(ours + norm, stem + stored, c.width, c)
    if names.q_norm:
        full = c.qk_norm == "full"
        for norm, width in (("q_norm", query), ("k_norm", key)):
            stored = f"{stem}{getattr(names, norm)}.weight"
            yield f"{ours}{norm}.weight", _whole(stored, (width if full else c.head_dim,))
    if c.encoder is not None:
        yield from _cross(names, c, c.encoder.width, f"{ours}cross.", stem)
    ours += "feed_forward."
    if c.is_moe(index):
        yield from _experts(names, c, ours, stem)
        return
    parts = (c.ffn_width,) * (2 if c.gated else 1)
    ups = names.up if c.gated or not names.up_plain else (names.up_plain,)
    yield from _linear(f"{ours}up", _stems(stem, ups), parts, c.width, c.ffn_bias, names.transposed)
    yield from _linear(f"{ours}down", (stem + names.down,), (c.width,), c.ffn_width, c.ffn_bias, names.transposed)


def _cross(names: Names, c: ModelConfig, width: int, ours: str, stem: str) -> Iterator[tuple[str, Target]]:
    """Yield what reads a source of this width in one layer."""
    query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    norm = "sum_norm" if c.norm_placement == "sum" else "norm"
    yield from _norm(ours + norm, stem + names.cross_norm, c.width, c)
    yield from _linear(f"{ours}q", (stem + names.cross_q,), (query,), c.width, c.qkv_bias, False)
    yield from _linear(f"{ours}kv", _stems(stem, names.cross_kv), (key, key), width, c.qkv_bias, False)
    yield from _linear(f"{ours}o", (stem + names.cross_output,), (c.width,), query, c.output_bias, False)


def _experts(names: Names, c: ModelConfig, ours: str, stem: str) -> Iterator[tuple[str, Target]]:
    """Yield the router and the experts of one layer."""
    assert c.moe is not None
    width, count = c.moe.expert_width, c.moe.num_experts
    yield f"{ours}router.weight", _whole(f"{stem}{names.router}.weight", (count, c.width))
    for expert in range(count):
        mine = f"{ours}experts.{expert}."
        if names.expert_up:
            stored = tuple(name.format(expert) for name in names.expert_up)
            yield from _linear(f"{mine}up", _stems(stem, stored), (width, width), c.width, False, False)
            stored = (stem + names.expert_down.format(expert),)
            yield from _linear(f"{mine}down", stored, (c.width,), width, False, False)
        else:
            up = TensorPiece(stem + names.packed_up, 0, 2 * width, expert=expert, stack=count)
            down = TensorPiece(stem + names.packed_down, 0, c.width, expert=expert, stack=count)
            yield f"{mine}up.weight", Target((2 * width, c.width), (up,))
            yield f"{mine}down.weight", Target((c.width, width), (down,))


def _stems(stem: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Put the prefix of a layer before each name."""
    return tuple(stem + name for name in names)


def _whole(name: str, shape: tuple[int, ...]) -> Target:
    """Return a parameter that is one stored tensor."""
    return Target(shape, (TensorPiece(name, 0, shape[0]),))


def _norm(ours: str, stored: str, width: int, c: ModelConfig) -> Iterator[tuple[str, Target]]:
    """Yield the weight of a norm, and its bias if it is a layer norm."""
    for leaf in ("weight", "bias") if c.norm == "layer" else ("weight",):
        yield f"{ours}.{leaf}", _whole(f"{stored}.{leaf}", (width,))


def _linear(
    ours: str, stored: tuple[str, ...], rows: tuple[int, ...], width: int, bias: bool, transposed: bool
) -> Iterator[tuple[str, Target]]:
    """Yield weight and bias of a projection whose parts of ``rows`` rows are stored in one tensor or in one tensor
    each.
    """
    total = sum(rows)
    if len(stored) == 1:
        rows = (total,)
    starts = [sum(rows[:place]) for place in range(len(rows))]
    spans = list(zip(stored, starts, rows, strict=True))
    weight = tuple(TensorPiece(f"{name}.weight", start, start + size, transposed) for name, start, size in spans)
    yield f"{ours}.weight", Target((total, width), weight)
    if bias:
        yield f"{ours}.bias", Target((total,), tuple(TensorPiece(f"{n}.bias", s, s + size) for n, s, size in spans))

"""The decoder: embedding, layers one at a time or as a span, final norm and head.

Techniques call the decoder and never change it. A layer offers its steps separately (``project``, ``read``, ``output``,
``feed``) for callers that work between them. ``run`` is the only entry to several layers, so that a backend can execute
them in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.backend import Backend, TorchBackend
from vivace.core.blocks import WIDEST_INT8, Account, BlockStore
from vivace.core.cache import KVCache, slot_bytes, specs_of
from vivace.core.config import ModelConfig
from vivace.core.el_attention import ElAttention, StateCache, state_spec
from vivace.core.layers import make_norm
from vivace.core.low_rank import add_low_rank
from vivace.core.moe import MixtureOfExperts
from vivace.core.parts import DenseParts, Parts
from vivace.core.relative import RelativeTable
from vivace.core.rope import Rotary
from vivace.core.seams import Stateful
from vivace.core.step import Step
from vivace.core.whole_texts import WholeTexts
from vivace.errors import ConfigError, UnsupportedError, nearest
from vivace.kernels import reference as kernels
from vivace.kernels.coded import Coded

Watch = Callable[[int, Tensor], None]
"""A function that is called with the index of a layer and the rows that leave it."""


KV_FORMATS = ("same", "int8")
"""How keys and values may be stored."""


class Layer(nn.Module):
    """One transformer layer: ``forward = feed(cross(attend(h)))``, ``attend = output(read(project(h)))``; only layers
    behind an encoder have ``cross``.
    """

    def __init__(self, config: ModelConfig, index: int, parts: Parts, rotary: Rotary | None) -> None:
        super().__init__()
        self.config = config
        self.index = index
        self.qkv = parts.projection(index, "qkv")
        self.o = parts.projection(index, "o")
        self.attention = parts.attention(index)
        self.feed_forward = parts.feed_forward(index)
        self.rotary = rotary
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._qkv_widths = {"q": query, "k": key, "v": key}
        self.cross = parts.cross(index)
        before = config.norm_placement in ("pre", "sandwich")
        after = config.norm_placement != "pre"
        self.attention_norm = make_norm(config) if before else None
        self.ffn_norm = make_norm(config) if before else None
        self.attention_post_norm = make_norm(config) if after else None
        self.ffn_post_norm = make_norm(config) if after else None
        has_norms = config.qk_norm != "none"
        self.q_norm = parts.head_norm(index, "q_norm") if has_norms else None
        self.k_norm = parts.head_norm(index, "k_norm") if has_norms else None

    def project(self, h: Tensor, step: Step) -> Tensor:
        """Compute norm, queries, keys and values, QK-norm and rotation, and store the writing rows' keys and values.

        Args:
            h: (T, E) rows that enter the layer.
            step: the call.

        Returns:
            Queries (T, H, D).
        """
        num_heads, written = self.config.num_heads, slice(step.num_write)
        rotated, values = self._heads(h, step)
        step.memory.put(self.index, step.in_layer(self.index), rotated[written, num_heads:], values[written])
        return rotated[:, :num_heads]

    def query(self, h: Tensor, step: Step) -> Tensor:
        """Return the queries (T, H, D) of rows (T, E) that enter the layer, and store nothing."""
        return self._heads(h, step)[0][:, : self.config.num_heads]

    def _heads(self, h: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Return queries and keys (T, H + K, D), rotated, and values (T, K, D)."""
        c = self.config
        x = h if self.attention_norm is None else self.attention_norm(h)
        qkv: Tensor = self.qkv(x)
        add_low_rank(qkv, x, step.low_rank, self.index, self._qkv_widths)
        if self.q_norm is not None:
            qkv = self._norm_heads(qkv)
        if c.qkv_clip is not None:
            qkv = qkv.clamp(-c.qkv_clip, c.qkv_clip)
        num_rotated = c.num_heads + c.num_kv_heads
        heads = qkv.view(qkv.shape[0], num_rotated + c.num_kv_heads, c.head_dim)
        rotated, values = heads[:, :num_rotated], heads[:, num_rotated:]
        if self.rotary is not None:
            rotated = kernels.rotate(rotated, *self.rotation(step, qkv.dtype))
        return rotated, values

    def _norm_heads(self, qkv: Tensor) -> Tensor:
        c = self.config
        assert self.q_norm is not None
        assert self.k_norm is not None
        query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        q, k, v = torch.split(qkv, [query, key, key], -1)
        if c.qk_norm == "head":
            q = self.q_norm(q.reshape(-1, c.num_heads, c.head_dim)).flatten(1)
            k = self.k_norm(k.reshape(-1, c.num_kv_heads, c.head_dim)).flatten(1)
            return torch.cat((q, k, v), -1)
        return torch.cat((self.q_norm(q), self.k_norm(k), v), -1)

    def rotation(self, step: Step, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines of a call's rows, each (T, 1, width), computed once per call."""
        assert self.rotary is not None
        key = (id(self.rotary), dtype)
        if key not in step.rotations:
            whole = None if step.grid is None else step.grid[1]
            step.rotations[key] = self.rotary.at(step.position, step.extent, dtype, whole, step.last)
        return step.rotations[key]

    def positions(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines of at least the first ``count`` positions, each (positions, 1, width)."""
        assert self.rotary is not None
        return self.rotary.table(count, dtype)

    def read(self, q: Tensor, step: Step) -> Tensor:
        """Return the attention of queries to stored entries, (T, H, D) -> (T, H, D)."""
        return self.attention(q, step.in_layer(self.index))

    def weigh(self, q: Tensor, step: Step) -> list[Tensor]:
        """Return with which weights queries (T, H, D) read their entries: for each row (H, entries), float32."""
        step, c = step.in_layer(self.index), self.config
        assert isinstance(step.memory, KVCache), "weights are of stored entries"
        weights = []
        for row, (slot, seen) in enumerate(zip(step.slot.tolist(), step.seen.tolist(), strict=True)):
            assert step.tail is None, "weights are of entries that follow one another"
            keys = step.readable(self.index, slot, seen)[0].float()
            grouped = q[row].float().view(c.num_kv_heads, -1, c.head_dim)
            scores = torch.einsum("kgd,ksd->kgs", grouped, keys).flatten(0, 1) * c.scale
            if c.attention_softcap is not None:
                scores = c.attention_softcap * torch.tanh(scores / c.attention_softcap)
            window = c.window(self.index)
            if window is not None:
                scores[:, : max(0, seen - window)] = -torch.inf
            weights.append(scores.softmax(-1))
        return weights

    def output(self, h: Tensor, a: Tensor, step: Step) -> Tensor:
        """Project attention ``a`` (T, H, D), apply the post-norm if there is one and add the residual ``h`` (T, E)."""
        a = a.reshape(a.shape[0], -1)
        if self.attention_post_norm is None and not step.low_rank:
            y: Tensor = self.o(a, h)
            return y
        y = self.o(a)
        add_low_rank(y, a, step.low_rank, self.index, {"o": y.shape[1]})
        return self.added(h, y, self.attention_post_norm)

    def added(self, h: Tensor, y: Tensor, norm: nn.Module | None) -> Tensor:
        """Add a half of the layer to the residual, with the norm after it where there is one."""
        if norm is None:
            return h + y
        total: Tensor = norm(h + y) if self.config.norm_placement == "sum" else h + norm(y)
        return total

    def attend(self, h: Tensor, step: Step) -> Tensor:
        """Compute the attention half of the layer, (T, E) -> (T, E)."""
        return self.output(h, self.read(self.project(h, step), step), step)

    def feed(self, u: Tensor, step: Step) -> Tensor:
        """Compute the feed-forward half, (T, E) -> (T, E); rows from ``num_feed`` on get their "mlp" deltas only."""
        x = u if self.ffn_norm is None else self.ffn_norm(u)
        plain = self.ffn_post_norm is None and not step.low_rank and step.num_feed == step.num_rows
        if plain:
            y: Tensor = self.feed_forward(x, step, u)
            return y
        y = self.feed_forward(x[: step.num_feed], step)
        if step.num_feed < step.num_rows:
            y = F.pad(y, (0, 0, 0, step.num_rows - step.num_feed))
        add_low_rank(y, x, step.low_rank, self.index, {"mlp": y.shape[1]})
        return self.added(u, y, self.ffn_post_norm)

    def forward(self, h: Tensor, step: Step) -> Tensor:
        """Run rows through the layer, (T, E) -> (T, E)."""
        u = self.attend(h, step)
        return self.feed(u if self.cross is None else self.cross(u, step), step)

    def route(self, h: Tensor) -> Tensor:
        """Return router logits (T, X) of residuals after attention (T, E), which are normed here."""
        assert isinstance(self.feed_forward, MixtureOfExperts), f"layer {self.index} has no router"
        return self.feed_forward.route(h if self.ffn_norm is None else self.ffn_norm(h))


class Decoder(nn.Module):
    """A transformer whose layers can be run one at a time or as a span.

    It is a stack of layers between an embedding and a head. An encoder is the same stack, whose rows read their whole
    text at once and whose head is not used; a decoder behind an encoder has it as ``encoder``.
    """

    def __init__(self, config: ModelConfig, parts: Parts | None = None, backend: Backend | None = None) -> None:
        """Build the modules; a loader then fills them with weights and calls the backend for each part.

        Args:
            config: the architecture.
            parts: makes the modules of projections; None keeps all weights in memory.
            backend: executes the decoder; None is PyTorch.
        """
        super().__init__()
        self.config = config
        parts = DenseParts(config) if parts is None else parts
        rotaries = [Rotary(rope, config.head_dim) if config.positions == "rotary" else None for rope in config.ropes]
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.width))
        self.coded: Coded | None = None
        """The embedding as codes of few bits, in the place of ``embedding``, until a backend lays them out."""
        self.position_embedding = None
        if config.positions == "learned":
            rows = config.max_positions + config.position_offset
            self.position_embedding = nn.Parameter(torch.empty(rows, config.width))
        self.relative = None
        if config.relative is not None:
            self.relative = RelativeTable(config.relative, config.num_heads, is_causal=config.is_causal)
        self.embedding_norm = make_norm(config) if config.embedding_norm else None
        which = config.rope_of_layer or (0,) * config.num_layers
        self.layers = nn.ModuleList(Layer(config, i, parts, rotaries[which[i]]) for i in range(config.num_layers))
        self.final_norm = make_norm(config) if config.final_norm else nn.Identity()
        self.lm_head = parts.head()
        self.logits_bias = nn.Parameter(torch.empty(1, config.vocab_size)) if config.logits_bias else None
        within = parts.encoder()
        self.encoder: Decoder | None = None
        if within is not None:
            assert config.encoder is not None
            self.encoder = Decoder(config.encoder, within)
        self.embedding_rows: nn.Module | None = None
        """Module that returns rows of the embedding where a backend packs it; ``embedding`` then has no rows."""
        self.tie()
        self.backend: Backend = TorchBackend() if backend is None else backend
        self.has_int8_entries = False
        """Whether keys and values are stored in eight bits."""
        self._blocks: BlockStore | None = None
        self._states: BlockStore | None = None
        self.stateful: Sequence[Stateful] = parts.stateful()
        """Parts with state for each sequence (windows of neurons); every session opens a state of each."""

    def tie(self) -> None:
        """Let the tables that layers and stacks share be the same tensors, once they have been read."""
        for layer in self.layers:
            if isinstance(layer, Layer):
                layer.attention.relative = self.relative
        if self.encoder is not None:
            self.encoder.embedding = self.embedding
            self.encoder.embedding_rows = self.embedding_rows

    def run_on(self, backend: Backend) -> None:
        """Pack all parts of a decoder that is in memory for a backend, which runs it from then on.

        Raises:
            UnsupportedError: the backend cannot run a decoder of this kind.
        """
        backend.pack_ends(self)
        for index in range(self.config.num_layers):
            backend.pack_layer(self, index)
        backend.finish(self)
        self.backend = backend

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the residual stream."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.embedding.device

    def store_entries(self, kv: str) -> None:
        """Choose how keys and values are stored, before the first cache is made.

        Args:
            kv: "same" (in the dtype of the weights), or "int8", which is lossy and takes half the memory.

        Raises:
            ConfigError: there is no such format.
            UnsupportedError: heads are too wide for native kernels to read them in eight bits.
        """
        if kv not in KV_FORMATS:
            raise ConfigError(f"kv is {kv!r}{nearest(kv, KV_FORMATS)}")
        if kv == "int8" and self.config.head_dim > WIDEST_INT8 and self.backend.rows_up_to:
            width = self.config.head_dim
            raise UnsupportedError(f"kv int8 is for heads of up to {WIDEST_INT8} numbers, this model's have {width}")
        self.has_int8_entries = kv == "int8"

    def new_cache(
        self, num_slots: int, capacity: int, *, row_count: int = 1, account: Account | None = None
    ) -> KVCache:
        """Make a cache for texts of this model, whose blocks come from the store that all its caches share.

        Args:
            num_slots: number of sequences.
            capacity: entries of each at most.
            row_count: calls are padded to a multiple of this many rows.
            account: whose memory blocks are taken from; None has no limit.
        """
        store = self.blocks
        cache = KVCache(
            store.specs, num_slots, capacity, row_count=row_count, dtype=store.dtype, store=store, account=account
        )
        if self.config.encoder is not None:
            most, kind = self.config.encoder.max_positions, StateCache if self.keeps_states else KVCache
            store = self.source_blocks
            cache.beside = kind(store.specs, num_slots, most, dtype=store.dtype, store=store, account=account)
        return cache

    def read_source(self, source: Sequence[int] | Tensor, slot: int, cache: KVCache) -> None:
        """Read a source and store what the rows of a slot read of it in every layer.

        Args:
            source: token ids, or what the encoder has made of them, (S, E).
            slot: whose source it is; it has none yet.
            cache: of the texts; sources are beside them.
        """
        self.read_sources({slot: source}, cache)

    def read_sources(self, sources: Mapping[int, Sequence[int] | Tensor], cache: KVCache) -> None:
        """Read the sources of several slots, as ``read_source`` reads one, with the same bits: all in one pass."""
        assert self.encoder is not None, "the model has an encoder"
        assert cache.beside is not None
        sources = {slot: source for slot, source in sources.items() if not cache.beside.lengths[slot]}
        unread = {slot: source for slot, source in sources.items() if not isinstance(source, Tensor)}
        found = dict(zip(unread, self.encoder.states(*unread.values()) if unread else (), strict=True))
        states = {slot: source if isinstance(source, Tensor) else found[slot] for slot, source in sources.items()}
        if states:
            self._keep_sources(states, cache.beside)

    def _keep_sources(self, states: Mapping[int, Tensor], beside: KVCache) -> None:
        """Store what rows of each slot read of its source in every layer, given its states (S, E) from the encoder."""
        counts = {slot: range(len(rows)) for slot, rows in states.items()}
        slots = [slot for slot, places in counts.items() for _ in places]
        step = Step.at(beside, slots, [place for places in counts.values() for place in places])
        rows = torch.cat([rows.to(self.dtype) for rows in states.values()])
        for layer in self.layers:
            assert isinstance(layer, Layer)
            assert layer.cross is not None
            layer.cross.store(rows, step)
        beside.commit(list(counts), list(counts.values()))

    def states(self, *texts: Sequence[int]) -> tuple[Tensor, ...]:
        """Return what an encoder makes of texts, (S, E) each, in one pass whose bits are those of each text alone."""
        ids = torch.tensor([token for text in texts for token in text], dtype=torch.int64, device=self.device)
        whole = WholeTexts([len(text) for text in texts])
        step = whole.step(self.device)
        out = self.norm(self.run(self.embed(ids, step), step))
        return tuple(out[first:stop] for first, stop in whole.bounds)

    def source_bytes(self, count: int) -> int:
        """Return the bytes that a source of so many tokens takes in the cache; 0 without an encoder."""
        if self.keeps_states:
            return slot_bytes([state_spec(self.config)], count, self.dtype)
        return 0 if self.config.encoder is None else self.slot_bytes(count)

    @property
    def keeps_states(self) -> bool:
        """Return whether sources are kept as the encoder's states, once for all layers (``el_attention.py``)."""
        return any(isinstance(layer, Layer) and isinstance(layer.cross, ElAttention) for layer in self.layers[:1])

    @property
    def source_blocks(self) -> BlockStore:
        """Return the blocks of all sources: those of the texts, unless states are kept, which have another size."""
        if not self.keeps_states:
            return self.blocks
        if self._states is None or (self._states.dtype, self._states.device) != (self.dtype, self.device):
            self._states = BlockStore([state_spec(self.config)], dtype=self.dtype, device=self.device)
        return self._states

    @property
    def blocks(self) -> BlockStore:
        """Return the blocks of all texts of this model, which are made when they are first asked for."""
        if self._blocks is None or (self._blocks.dtype, self._blocks.device) != (self.dtype, self.device):
            specs = specs_of(self.config, is_int8=self.has_int8_entries)
            self._blocks = BlockStore(specs, dtype=self.dtype, device=self.device)
        return self._blocks

    def slot_bytes(self, entries: int) -> int:
        """Return the largest number of bytes that ``entries`` entries of a sequence take in the cache."""
        if self._blocks is None:
            return slot_bytes(specs_of(self.config, is_int8=self.has_int8_entries), entries, self.dtype)
        return -(-entries // self._blocks.size) * self._blocks.block_bytes

    def embed(self, tokens: Tensor, step: Step) -> Tensor:
        """Return the embeddings of tokens, (T,) -> (T, E), with learned positions of the step where there are any."""
        c = self.config
        h: Tensor = F.embedding(tokens, self.embedding) if self.embedding_rows is None else self.embedding_rows(tokens)
        if c.embedding_scale != 1.0:
            h = h * _rounded(c.embedding_scale, h.dtype)
        if self.position_embedding is not None:
            h = h + F.embedding(step.position + c.position_offset, self.position_embedding)
        if c.positions == "sinusoid":
            h = h + sinusoids(step.position + c.position_offset, c.width, c.sinusoid_span).to(h.dtype)
        return h if self.embedding_norm is None else self.embedding_norm(h)

    def run(
        self, h: Tensor, step: Step, start: int = 0, stop: int | None = None, *, watch: Watch | None = None
    ) -> Tensor:
        """Run rows through layers start..stop-1, (T, E) -> (T, E).

        Args:
            h: (T, E) rows that enter layer ``start``.
            step: the call.
            start: first layer.
            stop: one past the last layer; None means all that remain.
            watch: called with the index and the rows after each layer.
        """
        last = self.config.num_layers if stop is None else stop
        count = len(h)
        h, step = padded(h, step)
        span = self.backend.span
        if span is not None and not span.covers(step):
            span = None
        if span is not None and watch is None:
            return span.run(h, step, start, last)[:count]
        for index in range(start, last):
            h = self.layers[index](h, step) if span is None else span.run(h, step, index, index + 1)
            if watch is not None:
                watch(index, h[:count])
        return h[:count]

    def store(self, h: Tensor, step: Step, layer: int) -> None:
        """Store the keys and values that rows (T, E) entering a layer have there, without taking them through it."""
        below = self.layers[layer]
        assert isinstance(below, Layer)
        below.project(*padded(h, step))

    def norm(self, h: Tensor) -> Tensor:
        """Apply the final norm, (n, E) -> (n, E)."""
        x: Tensor = self.final_norm(h)
        return x

    def _read_by_head(self, h: Tensor) -> Tensor:
        """Return what the head multiplies, (n, E) -> (n, E): normed, then scaled, which rounds once more."""
        x = self.norm(h)
        return x if self.config.head_scale == 1.0 else x * self.config.head_scale

    def head(self, h: Tensor, *, row_count: int = 1) -> Tensor:
        """Apply the final norm and the head, (n, E) -> (n, V) float32, padded to a multiple of ``row_count`` rows."""
        count = len(h)
        if count % row_count:
            h = torch.cat((h, h.new_zeros(-count % row_count, h.shape[1])))
        x = self._read_by_head(h)
        logits = kernels.linear(x, self.embedding) if self.lm_head is None else self.lm_head(x)
        logits = logits[:count].float()
        if self.logits_bias is not None:
            logits = logits + self.logits_bias
        cap = self.config.logit_softcap
        return logits if cap is None else cap * kernels.pointwise(torch.tanh, logits / cap)

    def greedy(self, h: Tensor, *, row_count: int = 1) -> Tensor:
        """Return the likeliest token of each row, (n, E) -> (n,); ties go to the smallest id."""
        choose: Callable[[Tensor], tuple[Tensor, Tensor]] | None = getattr(self.lm_head, "greedy", None)
        if choose is not None and row_count == 1 and self.logits_bias is None:
            tokens, logits = choose(self._read_by_head(h))
            most = self.config.certain_logit
            if most is None or (h.dtype == torch.bfloat16 and bool((logits.abs() < most).all())):
                return tokens
        return self.head(h, row_count=row_count).argmax(-1)


@cache
def _rounded(number: float, dtype: torch.dtype) -> float:
    """Return a number as a tensor of some dtype has it."""
    return float(torch.tensor(number, dtype=dtype))


def sinusoids(position: Tensor, width: int, span: int) -> Tensor:
    """Return sines and then cosines of positions (T,) at falling frequencies, (T, width) (Vaswani et al. 2017)."""
    frequency = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64, device=position.device) / span)
    angle = position[:, None].double() * frequency
    return torch.cat((angle.sin(), angle.cos()), 1).float()


def padded(h: Tensor, step: Step) -> tuple[Tensor, Step]:
    """Return rows and their call padded to a multiple of ``row_count`` with rows that store nothing."""
    missing = -len(h) % step.row_count
    if missing == 0 or step.grid is not None or step.chunk is not None:
        return h, step
    spare = torch.zeros(missing, dtype=torch.int64, device=h.device)
    return torch.cat((h, h[spare])), step.readers(spare, fed=step.num_feed == step.num_rows)

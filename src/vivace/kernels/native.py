"""The native kernels as operations on tensors; the bits of a row never depend on other rows of a call.

Numbers are bfloat16, or float32 in a body for that (``NativeBody.of``). Only bfloat16 has quantized weights, drafts in
native calls (``core/cpu/chain.py``), routing and single neurons.

Every output is summed as one chain over the inputs in their order, so neither the number of rows nor the number of
threads changes it. Results are rounded where ``reference`` rounds them: a projection is rounded before anything is
added to it. The kernels of different instruction sets differ in the last bits; an engine uses one of them
(``choice.py``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.kernels.chain import CChain, CSpeculation
from vivace.kernels.library import (
    ACTIVATIONS,
    BODIES,
    FLOAT32_BODIES,
    FORMATS,
    LANES,
    CActivated,
    CAttention,
    CCall,
    CChoice,
    CDrawing,
    CGain,
    CGated,
    CLinear,
    CMatrix,
    CMix,
    CNeurons,
    CNorm,
    CPlaces,
    CPlan,
    CRouters,
    CScreen,
)
from vivace.kernels.low_bit import TABLE, Rounded
from vivace.kernels.palette import IntPalette, Palette
from vivace.kernels.screen import Screen
from vivace.kernels.threads import num_threads

MAX_GROUP = 128
"""Largest number of query heads per key/value head that the attention kernels have buffers for."""

INDICES = {torch.bfloat16: BODIES, torch.float32: FLOAT32_BODIES}
"""Indices of the kernels in the library, by the dtype of what they compute."""

_Q4_TABLE = torch.tensor(TABLE, dtype=torch.int8)


def pack(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Arrange matrices in tiles, (..., out, in) -> (..., ceil(out / 16), ceil(in / 2), 16, 2), padded with zeros.

    A step of a tile has two inputs of each of sixteen outputs, the operand of one bfloat16 dot-product instruction.
    Where products are computed in float32, a step is (2, 16): the outputs of one input are an operand.

    Args:
        weight: (..., out, in).
        dtype: of the rows that are to be multiplied; None is the weight's.
    """
    *several, out_width, in_width = weight.shape
    padded = F.pad(weight, (0, in_width % 2, 0, -out_width % LANES))
    split = padded.reshape(*several, -1, LANES, padded.shape[-1] // 2, 2)
    by_input = (dtype or weight.dtype) == torch.float32
    return (split.movedim(-3, -1) if by_input else split.transpose(-3, -2)).contiguous()


def narrowed(weight: Tensor) -> Tensor:
    """Return a float32 matrix in 16 bits if these hold all of its numbers, such as those of a float16 checkpoint."""
    for dtype in (torch.bfloat16, torch.float16):
        # the first row is tried first, as nearly every matrix that does not fit shows it there
        if all(torch.equal(part.to(dtype).float(), part) for part in (weight[:1], weight)):
            return weight.to(dtype)
    return weight


def unpack(tiles: Tensor) -> Tensor:
    """Arrange tiles as rows, (tiles, pairs, 16, 2) -> (16 tiles, 2 pairs); the padding of ``pack`` is not removed."""
    tiles = tiles.transpose(2, 3) if tiles.shape[3] == LANES else tiles
    return tiles.transpose(1, 2).reshape(-1, 2 * tiles.shape[1])


@dataclass(frozen=True)
class Matrix:
    """A matrix in a layout of the native kernels; its tensors must not be moved while native calls use it."""

    weight: Tensor | Rounded
    """Tiles of ``pack``, a row-major matrix (out, in), or a quantized matrix."""
    bias: Tensor | None
    """(out,) of the weights' dtype, or None."""
    in_width: int
    out_width: int
    screen: Screen | None = None
    """Bounds by which ``greedy`` skips most outputs; None computes all of them."""
    widens: bool = False
    """Whether weights of 16 bits are multiplied in float32."""

    @property
    def format(self) -> str:
        """Name of the layout of ``weight``, one of ``FORMATS``."""
        if not isinstance(self.weight, Tensor):
            return self.weight.format
        is_tiled = self.weight.dim() == 4
        if self.widens:
            kind = "float16" if self.weight.dtype == torch.float16 else "bfloat16"
            return f"{kind}_tiles" if is_tiled else f"{kind}_rows"
        return "tiles" if is_tiled else "row_major"

    @cached_property
    def struct(self) -> CMatrix:
        """The matrix as a struct of the native library."""
        bias = _address(self.bias)
        sizes = (self.in_width, self.out_width, FORMATS[self.format])
        if not isinstance(self.weight, Tensor):
            codes, scales = self.weight.codes, self.weight.scales
            assert codes.is_contiguous()
            assert scales.is_contiguous()
            table = self.weight.table if isinstance(self.weight, IntPalette) else _Q4_TABLE
            assert table.is_contiguous()
            return CMatrix(codes.data_ptr(), bias, *sizes, scales.data_ptr(), table.data_ptr(), self._screen)
        assert self.weight.is_contiguous()
        return CMatrix(self.weight.data_ptr(), bias, *sizes, None, None, self._screen)

    @property
    def _screen(self) -> int | None:
        """Address of the struct of the screen."""
        return None if self.screen is None else ctypes.addressof(self._screen_struct)

    @cached_property
    def _screen_struct(self) -> CScreen:
        """The screen as a struct of the native library, which lives as long as the matrix."""
        assert self.screen is not None
        codes = Matrix(self.screen.codes, None, self.in_width, self.out_width)
        parts = (self.screen.lost, self.screen.kept, self.screen.counts)
        assert all(part.is_contiguous() for part in parts)
        return CScreen(codes.struct, *(part.data_ptr() for part in parts))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows that are multiplied."""
        if self.widens:
            return torch.float32
        return self.weight.dtype if isinstance(self.weight, Tensor) else torch.bfloat16

    def rows_of_weights(self) -> Tensor:
        """Return the weights as a row-major matrix (out, in)."""
        if not isinstance(self.weight, Tensor):
            return self.weight.dense().bfloat16()
        if self.weight.dim() == 2:
            return self.weight
        return unpack(self.weight)[: self.out_width, : self.in_width]

    def rows(self, x: Tensor) -> Tensor:
        """Return the inputs (T, in) contiguous and, for layouts that read them in pairs, padded to an even width."""
        assert x.dtype == self.dtype
        assert x.shape[1] == self.in_width
        in_pairs = self.format.endswith("tiles") or self.format == "exact12" or isinstance(self.weight, Palette)
        return F.pad(x, (0, 1)) if in_pairs and self.in_width % 2 else x.contiguous()


@dataclass(frozen=True, eq=False)
class Routers:
    """Routers of n layers, applied at once to ``fast * scale + slow * slow_scale``, one row for each layer, in float32.

    The RMS norm before a router only divides its logits by a positive number, which does not change their order, so it
    is left out.
    """

    scale: Tensor
    """(n, 1, E) factors on the residual ``fast``."""
    slow_scale: Tensor
    """(n, 1, E) factors on the residual ``slow``."""
    weight: Tensor
    """(n, E, X) router weights."""
    counts: tuple[int, ...]
    """Number of experts to predict for each layer."""

    @cached_property
    def laid_out(self) -> tuple[CRouters, ctypes.Array[c_int64]]:
        """The struct of a call without its two rows, made once, and the array that the call writes to."""
        num, width, experts = self.weight.shape
        most = max(self.counts)
        out = (c_int64 * (num * most))()
        parts = (each.data_ptr() for each in (self.scale, self.slow_scale, self.weight))
        return CRouters(None, None, *parts, ctypes.addressof(out), num, width, experts, most), out


class NativeBody:
    """The kernels compiled for one instruction set and one dtype."""

    def __init__(self, name: str, library: ctypes.CDLL, dtype: torch.dtype = torch.bfloat16) -> None:
        self.name = name
        self.dtype = dtype
        """Dtype of all tensors that it takes and returns."""
        self._library = library
        self._index = INDICES[dtype][name]

    def of(self, dtype: torch.dtype) -> NativeBody | None:
        """Return the kernels of the same instruction set for another dtype; None where there are none."""
        if dtype not in INDICES:
            return None
        return self if dtype == self.dtype else NativeBody(self.name, self._library, dtype)

    def linear(self, matrix: Matrix, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Return ``[add +] (x W^T + b)``, (T, in) -> (T, out)."""
        x = matrix.rows(x)
        out = x.new_empty(x.shape[0], matrix.out_width)
        plus = None if add is None else add.contiguous()
        call = CLinear(matrix.struct, x.data_ptr(), _address(plus), out.data_ptr(), x.shape[0])
        self._library.vivace_linear(self._index, num_threads(), byref(call))
        return out

    def gated(self, gate: Matrix, up: Matrix, x: Tensor, activation: str) -> Tensor:
        """Return ``act(gate(x)) * up(x)``, (T, E) -> (T, F)."""
        x = gate.rows(x)
        out = x.new_empty(x.shape[0], gate.out_width)
        call = CGated(gate.struct, up.struct, x.data_ptr(), out.data_ptr(), x.shape[0], ACTIVATIONS[activation])
        self._library.vivace_gated(self._index, num_threads(), byref(call))
        return out

    def feed(self, parts: tuple[Matrix, Matrix, Matrix], x: Tensor, activation: str, add: Tensor | None) -> Tensor:
        """Return ``[add +] down(act(gate(x)) * up(x))``, (T, E) -> (T, E), to the bits of ``gated`` and ``linear``."""
        gate, up, down = parts
        assert gate.out_width == up.out_width == down.in_width
        x = gate.rows(x)
        out = x.new_empty(x.shape[0], down.out_width)
        plus = None if add is None else add.contiguous()
        first = CGated(gate.struct, up.struct, x.data_ptr(), None, x.shape[0], ACTIVATIONS[activation])
        second = CLinear(down.struct, None, _address(plus), out.data_ptr(), x.shape[0])
        self._library.vivace_feed(self._index, num_threads(), byref(first), byref(second))
        return out

    def activate(self, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
        """Return ``act(gate) * up``, (T, F) each, to the bits that ``gated`` has, or ``act(gate)`` without ``up``."""
        gate, up = gate.contiguous(), None if up is None else up.contiguous()
        out = torch.empty_like(gate)
        call = CActivated(gate.data_ptr(), _address(up), out.data_ptr(), gate.numel(), ACTIVATIONS[activation])
        self._library.vivace_activate(self._index, byref(call))
        return out

    def add_neurons(
        self, parts: Mapping[str, Tensor], x: Tensor, out: Tensor, activation: str, known: Tensor | None = None
    ) -> None:
        """Add what n neurons of a gated feed-forward contribute: ``out += (act(x gate^T) * (x up^T)) down``.

        Args:
            parts: "gate", "up" and "down", each (n, E) bfloat16, all with the same distance between rows.
            x: (T, E) inputs of the feed-forward.
            out: (T, E) float32, added to in place.
            activation: activation of the gate; with "relu", neurons whose activation is zero are skipped.
            known: (T, n) bfloat16, ``act(x gate^T)``, of which zeros are skipped; there need be no "gate" then.
        """
        up, down = parts["up"], parts["down"]
        gate = parts["gate"] if known is None else None
        stride, given = up.stride(0), [part for part in (gate, up, down) if part is not None]
        assert all(part.stride() == (stride, 1) and part.dtype == torch.bfloat16 for part in given)
        assert known is None or (known.shape == (len(x), len(up)) and known.dtype == torch.bfloat16)
        assert out.dtype == torch.float32
        assert out.is_contiguous()
        x = x.contiguous()
        inner, known = x.new_empty(len(x), len(up)), None if known is None else known.contiguous()
        call = CNeurons(
            *(_address(part) for part in (gate, up, down, known, x, inner, out)),
            *(len(x), len(up), x.shape[1], stride, ACTIVATIONS[activation]),
        )
        self._library.vivace_neurons(self._index, num_threads(), byref(call))

    def choose(self, router: Matrix, x: Tensor, top_k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
        """Return weights and indices of the experts chosen for each row, each (T, top_k), the likeliest first."""
        x = router.rows(x)
        chosen = torch.empty(len(x), top_k, dtype=torch.int64)
        weights = x.new_empty(len(x), top_k)
        to = (chosen.data_ptr(), weights.data_ptr())
        call = CChoice(router.struct, x.data_ptr(), *to, len(x), top_k, normalise)
        self._library.vivace_choose(self._index, num_threads(), byref(call))
        return weights, chosen

    def mix(self, parts: Sequence[Tensor], weights: Tensor, add: Tensor | None) -> Tensor:
        """Return ``[add +] sum_k weights[:, k] parts[k]``, (T, E), with the roundings that PyTorch has."""
        rows, width = parts[0].shape
        stride = parts[0].stride(0)
        assert all(part.stride() == (stride, 1) and part.dtype == torch.bfloat16 for part in parts)
        out, weights = weights.new_empty(rows, width), weights.contiguous()
        plus = None if add is None else add.contiguous()
        lie = (c_void_p * len(parts))(*(part.data_ptr() for part in parts))
        sizes = (rows, len(parts), width, stride)
        self._library.vivace_mix(byref(CMix(lie, weights.data_ptr(), _address(plus), out.data_ptr(), *sizes)))
        return out

    def likeliest(self, routers: Routers, fast: Tensor, slow: Tensor) -> list[list[int]]:
        """Return the experts that each router would choose, given one row of both residuals, each (1, E) bfloat16."""
        assert fast.dtype == slow.dtype == torch.bfloat16
        fast, slow = fast.contiguous(), slow.contiguous()
        call, out = routers.laid_out
        call.fast, call.slow = fast.data_ptr(), slow.data_ptr()
        self._library.vivace_foresee(byref(call))
        most = max(routers.counts)
        return [out[place * most : place * most + count] for place, count in enumerate(routers.counts)]

    def greedy(self, matrix: Matrix, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of each row's largest rounded output and that output in float32, (T, in) -> (T,) each.

        Ties go to the smallest index.
        """
        x = matrix.rows(x)
        tokens = torch.empty(x.shape[0], dtype=torch.int64)
        values = torch.empty(x.shape[0], dtype=torch.float32)
        call = CLinear(matrix.struct, x.data_ptr(), None, None, x.shape[0])
        addresses = (tokens.data_ptr(), values.data_ptr())
        self._library.vivace_greedy(self._index, num_threads(), byref(call), *addresses)
        return tokens, values

    def draw(self, logits: Tensor, drawing: CDrawing, position: int, tokens: Tensor | None = None) -> tuple[int, float]:
        """Draw the token at a position of a text.

        Args:
            logits: (n,) float32.
            drawing: how it is drawn.
            position: index of the token in its text.
            tokens: (n,) int64 token that each logit belongs to; None: all, in order.

        Returns:
            The index that is drawn, -1 where none may be, and by how much its score is above the next one.
        """
        logits, margin = logits.contiguous(), c_float()
        ids = None if tokens is None else tokens.data_ptr()
        given = (logits.data_ptr(), len(logits), ids, byref(drawing), position, byref(margin))
        index: int = self._library.vivace_draw(self._index, *given)
        return index, margin.value

    def rows(self, matrix: Matrix, tokens: Tensor) -> Tensor:
        """Return rows of an embedding that is stored in eight or twelve bits, (T,) -> (T, in)."""
        tokens = tokens.contiguous()
        out = torch.empty(len(tokens), matrix.in_width, dtype=torch.bfloat16)
        self._library.vivace_rows(byref(matrix.struct), tokens.data_ptr(), len(tokens), out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Return the root-mean-square norm over the last dimension, as ``reference.rms_norm``."""
        return self._norm(x, CGain(weight.data_ptr(), None), eps, offset)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Return the layer norm over the last dimension, computed in float32."""
        return self._norm(x, CGain(weight.data_ptr(), bias.data_ptr()), eps, 0.0)

    def _norm(self, x: Tensor, gain: CGain, eps: float, offset: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        call = CNorm(x.data_ptr(), gain, out.data_ptr(), x.numel() // width, width, eps, offset)
        self._library.vivace_norm(self._index, byref(call))
        return out

    def attend_rows(
        self,
        q: Tensor,
        stored: tuple[Tensor, Tensor],
        blocks: tuple[Tensor, int],
        slot: Tensor,
        seen: Tensor,
        tail: Tensor | None,
        index: Tensor | None = None,
        *,
        window: int | None,
        scale: float,
        softcap: float | None = None,
        scales: tuple[int | None, int | None] = (None, None),
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of single rows to the entries that each of them reads, without gathering them first.

        Args:
            q: (T, H, D) queries.
            stored: keys and values, each (K, S, D).
            blocks: (slots, blocks) where each block of a slot's entries begins among the S, and the entries of a block.
            slot: (T,) slot whose entries a row reads.
            seen: (T,) number of entries from the beginning of the slot that a row reads first.
            tail: (T, A) entries that a row reads after those, padded with -1; None for none.
            index: (slots, S) entries of each slot that its rows read, in this order, in which ``seen`` counts; None
                for all.
            window: a row reads only the last this many of its entries; None for all.
            scale: factor on q.k.
            softcap: scores become ``c * tanh(score / c)`` when set.
            scales: addresses of the scales (K, S) of keys and of values in eight bits.
            bias: (H, R) float32 added to scores by how far back an entry is, the last to all beyond; None for none.

        Returns:
            (T, H, D).
        """
        (keys, values), (table, size) = stored, blocks
        rows, heads, width = q.shape
        if q.stride()[1:] != (width, 1):
            q = q.contiguous()
        assert all(t.is_contiguous() for t in (keys, values, table, slot, seen, index) if t is not None)
        out = q.new_empty(rows, heads, width)
        sums = q.new_empty(rows, heads, width, dtype=torch.float32)
        tail = None if tail is None else tail.contiguous()
        assert bias is None or (bias.is_contiguous() and bias.dtype == torch.float32)
        call = CAttention(
            *(q.data_ptr(), keys.data_ptr(), values.data_ptr()),
            CPlaces(table.data_ptr(), table.shape[1], size, keys.shape[1], *scales),
            *(slot.data_ptr(), seen.data_ptr(), _address(tail), _address(index), out.data_ptr(), sums.data_ptr()),
            *(rows, q.stride(0), heads, keys.shape[0], width),
            *(0 if tail is None else tail.shape[1], 0 if index is None else index.shape[1]),
            *(window or 0, scale, softcap or 0.0),
            *(_address(bias), 0 if bias is None else bias.shape[1]),
        )
        self._library.vivace_attention(self._index, num_threads(), byref(call))
        return out

    def chain(self, plan: CPlan, call: CChain) -> int:
        """Draft chains below the last token of each sequence; return the number of rows that were computed."""
        rows: int = self._library.vivace_chain(self._index, num_threads(), byref(plan), byref(call))
        return rows

    def speculate(self, drafting: CPlan, plan: CPlan, call: CChain, into: CSpeculation) -> int:
        """Draft with one plan and verify with another, several times; return the number of steps that were made."""
        given = (byref(drafting), byref(plan), byref(call), byref(into))
        steps: int = self._library.vivace_speculate(self._index, num_threads(), *given)
        return steps

    def span(self, plan: CPlan, call: CCall) -> None:
        """Run layers ``call.start .. call.stop - 1`` of a plan, with working space aligned to 64 bytes."""
        size = self._library.vivace_span_bytes(self._index, byref(plan), byref(call))
        space = torch.empty(size + 64, dtype=torch.uint8)
        call.space = space.data_ptr() + -space.data_ptr() % 64
        self._library.vivace_span(self._index, num_threads(), byref(plan), byref(call))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

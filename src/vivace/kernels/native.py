"""A native body's operations on tensors: bfloat16 on a CPU, a row's bits the same whatever stands beside it.

Every output is one chain of sums over the inputs in their order, so neither the number of rows nor the number
of threads changes it. Rounding stands where ``reference`` has it: a projection is rounded before anything is
added to it. Bodies differ from each other in bits; one is chosen once (``choice.py``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import byref, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.kernels.chain import CChain, CSpeculation
from vivace.kernels.library import (
    ACTIVATIONS,
    BODIES,
    FORMATS,
    LANES,
    CActivated,
    CAttention,
    CCall,
    CChoice,
    CGated,
    CLinear,
    CMatrix,
    CMix,
    CNeurons,
    CNorm,
    CPlan,
    CRouters,
)
from vivace.kernels.low_bit import TABLE, Rounded
from vivace.kernels.threads import num_threads

MAX_GROUP = 128
"""Query heads per key/value head that attention has room for."""


_Q4_TABLE = torch.tensor(TABLE, dtype=torch.int8)


def pack(weight: Tensor) -> Tensor:
    """(out, in) -> (ceil(out / 16), ceil(in / 2), 16, 2), zeros where it ends.

    Sixteen outputs lie side by side, two inputs each, as a bfloat16 dot product takes them.
    """
    out_width, in_width = weight.shape
    padded = F.pad(weight, (0, in_width % 2, 0, -out_width % LANES))
    return padded.view(-1, LANES, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()


def unpack(tiles: Tensor) -> Tensor:
    """``pack`` undone: (tiles, pairs, 16, 2) -> (16 tiles, 2 pairs), with whatever zeros it ended in."""
    return tiles.transpose(1, 2).reshape(-1, 2 * tiles.shape[1])


@dataclass(frozen=True)
class Matrix:
    """Weights as a body reads them; whoever holds it keeps the tensors where they are."""

    weight: Tensor | Rounded
    """Packed, row-major (out, in), or in few bits."""
    bias: Tensor | None
    in_width: int
    out_width: int

    @property
    def format(self) -> str:
        """How ``weight`` lies: in "tiles" if it went through ``pack``, "row_major", or a format of few bits."""
        if not isinstance(self.weight, Tensor):
            return self.weight.format
        return "tiles" if self.weight.dim() == 4 else "row_major"

    @cached_property
    def struct(self) -> CMatrix:
        """For the library."""
        bias = _address(self.bias)
        sizes = (self.in_width, self.out_width, FORMATS[self.format])
        if not isinstance(self.weight, Tensor):
            codes, scales = self.weight.codes, self.weight.scales
            assert codes.is_contiguous()
            assert scales.is_contiguous()
            return CMatrix(codes.data_ptr(), bias, *sizes, scales.data_ptr(), _Q4_TABLE.data_ptr())
        assert self.weight.dtype == torch.bfloat16
        assert self.weight.is_contiguous()
        return CMatrix(self.weight.data_ptr(), bias, *sizes, None, None)

    def rows_of_weights(self) -> Tensor:
        """The bfloat16 weights as (out, in); ``pack`` undone."""
        if not isinstance(self.weight, Tensor):
            return self.weight.dense().bfloat16()
        if self.format == "row_major":
            return self.weight
        return unpack(self.weight)[: self.out_width, : self.in_width]

    def rows(self, x: Tensor) -> Tensor:
        """Inputs (T, in) as the body wants them: packed matrices take an even number."""
        assert x.dtype == torch.bfloat16
        assert x.shape[1] == self.in_width
        return F.pad(x, (0, 1)) if self.format in ("tiles", "lut4", "exact12") and self.in_width % 2 else x.contiguous()


@dataclass(frozen=True, eq=False)
class Routers:
    """Routers of n layers that are asked at once about ``fast * scale + slow * slow_scale``, one row each, in float32.

    A norm before a router is a positive factor there, which changes no order, so it is left out.
    """

    scale: Tensor
    """(n, 1, E)."""
    slow_scale: Tensor
    """(n, 1, E)."""
    weight: Tensor
    """(n, E, X)."""
    counts: tuple[int, ...]
    """Experts that each router is asked for."""

    @cached_property
    def laid_out(self) -> tuple[CRouters, ctypes.Array[c_int64]]:
        """The call but for its rows, made once, and where it writes."""
        num, width, experts = self.weight.shape
        most = max(self.counts)
        out = (c_int64 * (num * most))()
        parts = (each.data_ptr() for each in (self.scale, self.slow_scale, self.weight))
        return CRouters(None, None, *parts, ctypes.addressof(out), num, width, experts, most), out


class NativeBody:
    """The operations compiled for one instruction set."""

    def __init__(self, name: str, library: ctypes.CDLL) -> None:
        self.name = name
        self._library = library
        self._index = BODIES[name]

    def linear(self, matrix: Matrix, x: Tensor, add: Tensor | None = None) -> Tensor:
        """``[add +] (x W^T + b)``, (T, in) -> (T, out)."""
        x = matrix.rows(x)
        out = x.new_empty(x.shape[0], matrix.out_width)
        plus = None if add is None else add.contiguous()
        call = CLinear(matrix.struct, x.data_ptr(), _address(plus), out.data_ptr(), x.shape[0])
        self._library.vivace_linear(self._index, num_threads(), byref(call))
        return out

    def gated(self, gate: Matrix, up: Matrix, x: Tensor, activation: str) -> Tensor:
        """``act(gate(x)) * up(x)``, (T, E) -> (T, F)."""
        x = gate.rows(x)
        out = x.new_empty(x.shape[0], gate.out_width)
        call = CGated(gate.struct, up.struct, x.data_ptr(), out.data_ptr(), x.shape[0], ACTIVATIONS[activation])
        self._library.vivace_gated(self._index, num_threads(), byref(call))
        return out

    def feed(self, parts: tuple[Matrix, Matrix, Matrix], x: Tensor, activation: str, add: Tensor | None) -> Tensor:
        """``[add +] down(act(gate(x)) * up(x))``, (T, E) -> (T, E): the bits of ``gated`` and ``linear``."""
        gate, up, down = parts
        assert gate.out_width == up.out_width == down.in_width
        x = gate.rows(x)
        out = x.new_empty(x.shape[0], down.out_width)
        plus = None if add is None else add.contiguous()
        first = CGated(gate.struct, up.struct, x.data_ptr(), None, x.shape[0], ACTIVATIONS[activation])
        second = CLinear(down.struct, None, _address(plus), out.data_ptr(), x.shape[0])
        self._library.vivace_feed(self._index, num_threads(), byref(first), byref(second))
        return out

    def activate(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """``act(gate) * up``, the bits of ``gated`` when the projections are made apart."""
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        call = CActivated(gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel(), ACTIVATIONS[activation])
        self._library.vivace_activate(self._index, byref(call))
        return out

    def add_neurons(self, parts: Mapping[str, Tensor], x: Tensor, out: Tensor, activation: str) -> None:
        """``out += (act(x gate^T) * (x up^T)) down``.

        Args:
            parts: "gate", "up" and "down", each (n, E) bfloat16, their rows equally far apart.
            x: (T, E).
            out: (T, E) float32.
            activation: of the gate; where it is "relu" neurons that are zero take no further product.
        """
        gate, up, down = (parts[name] for name in ("gate", "up", "down"))
        stride = gate.stride(0)
        assert all(part.stride() == (stride, 1) and part.dtype == torch.bfloat16 for part in (gate, up, down))
        assert out.dtype == torch.float32
        assert out.is_contiguous()
        x = x.contiguous()
        inner = x.new_empty(len(x), len(gate))
        call = CNeurons(
            *(part.data_ptr() for part in (gate, up, down, x, inner, out)),
            *(len(x), len(gate), x.shape[1], stride, ACTIVATIONS[activation]),
        )
        self._library.vivace_neurons(self._index, num_threads(), byref(call))

    def choose(self, router: Matrix, x: Tensor, top_k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
        """Shares and numbers of the experts that a router chooses for each row, both (T, top_k), likeliest first."""
        x = router.rows(x)
        chosen = torch.empty(len(x), top_k, dtype=torch.int64)
        weights = x.new_empty(len(x), top_k)
        to = (chosen.data_ptr(), weights.data_ptr())
        call = CChoice(router.struct, x.data_ptr(), *to, len(x), top_k, normalise)
        self._library.vivace_choose(self._index, num_threads(), byref(call))
        return weights, chosen

    def mix(self, parts: Sequence[Tensor], weights: Tensor, add: Tensor | None) -> Tensor:
        """``[add +] sum_k weights[:, k] parts[k]`` of (T, E) each, rounded where PyTorch would."""
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
        """The experts that each of some routers would choose for one row of two residuals, each (1, E) bfloat16."""
        assert fast.dtype == slow.dtype == torch.bfloat16
        fast, slow = fast.contiguous(), slow.contiguous()
        call, out = routers.laid_out
        call.fast, call.slow = fast.data_ptr(), slow.data_ptr()
        self._library.vivace_foresee(byref(call))
        most = max(routers.counts)
        return [out[place * most : place * most + count] for place, count in enumerate(routers.counts)]

    def greedy(self, matrix: Matrix, x: Tensor) -> Tensor:
        """Index of the largest rounded output of each row, the smallest of equals, (T, in) -> (T,)."""
        x = matrix.rows(x)
        tokens = torch.empty(x.shape[0], dtype=torch.int64)
        call = CLinear(matrix.struct, x.data_ptr(), None, None, x.shape[0])
        self._library.vivace_greedy(self._index, num_threads(), byref(call), tokens.data_ptr())
        return tokens

    def rows(self, matrix: Matrix, tokens: Tensor) -> Tensor:
        """Rows of an embedding in eight or twelve bits, (T,) -> (T, in)."""
        tokens = tokens.contiguous()
        out = torch.empty(len(tokens), matrix.in_width, dtype=torch.bfloat16)
        self._library.vivace_rows(byref(matrix.struct), tokens.data_ptr(), len(tokens), out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """As ``reference.rms_norm``."""
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        call = CNorm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps, offset)
        self._library.vivace_norm(self._index, byref(call))
        return out

    def attend_rows(
        self,
        q: Tensor,
        stored: tuple[Tensor, Tensor],
        slot: Tensor,
        seen: Tensor,
        tail: Tensor | None,
        *,
        window: int | None,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        """Attention of single rows over the entries each of them sees, read where they lie.

        Args:
            q: (T, H, D).
            stored: keys and values, each (slots, K, S, D).
            slot: (T,) whose entries a row reads.
            seen: (T,) it reads the first ``seen`` of them ...
            tail: (T, A) ... then these, -1 padded.
            window: only the last this many of what it reads.
            scale: factor on q.k.
            softcap: ``c * tanh(score / c)`` when set.

        Returns:
            (T, H, D).
        """
        keys, values = stored
        rows, heads, width = q.shape
        if q.stride()[1:] != (width, 1):
            q = q.contiguous()
        assert all(t.is_contiguous() for t in (keys, values, slot, seen))
        out = q.new_empty(rows, heads, width)
        sums = q.new_empty(rows, heads, width, dtype=torch.float32)
        tail = None if tail is None else tail.contiguous()
        call = CAttention(
            *(q.data_ptr(), keys.data_ptr(), values.data_ptr(), slot.data_ptr(), seen.data_ptr()),
            *(_address(tail), out.data_ptr(), sums.data_ptr(), rows, q.stride(0), heads, keys.shape[1], width),
            *(keys.shape[2], 0 if tail is None else tail.shape[1], window or 0, scale, softcap or 0.0),
        )
        self._library.vivace_attention(self._index, num_threads(), byref(call))
        return out

    def chain(self, plan: CPlan, call: CChain) -> int:
        """Chains of drafts; returns how many rows were made."""
        rows: int = self._library.vivace_chain(self._index, num_threads(), byref(plan), byref(call))
        return rows

    def speculate(self, drafting: CPlan, plan: CPlan, call: CChain, into: CSpeculation) -> int:
        """Chains drafted by one plan and verified by another; returns how many steps were made."""
        given = (byref(drafting), byref(plan), byref(call), byref(into))
        steps: int = self._library.vivace_speculate(self._index, num_threads(), *given)
        return steps

    def span(self, plan: CPlan, call: CCall) -> None:
        """Layers ``call.start .. call.stop - 1`` of a plan; working space is taken here."""
        size = self._library.vivace_span_bytes(byref(plan), byref(call))
        space = torch.empty(size + 64, dtype=torch.uint8)
        call.space = space.data_ptr() + -space.data_ptr() % 64
        self._library.vivace_span(self._index, num_threads(), byref(plan), byref(call))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

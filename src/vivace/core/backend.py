"""The interface between the decoder and the kernels that execute it on one kind of machine.

A backend is given to the decoder's constructor. While the weights are read it replaces modules of the decoder by
modules of its own, part by part, so that a loader can free each part's weights as they were stored. Afterwards it may
offer to run several layers (``span``) or several decoding steps (``chain``) in one call, with the same bits as one by
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from vivace.core.draft_rows import Chain
from vivace.core.layers import Linear
from vivace.core.seams import Span
from vivace.core.split_layers import SplitLayers

if TYPE_CHECKING:
    from vivace.core.low_rank import FixedFactors
    from vivace.core.model import Decoder
    from vivace.kernels.low_bit import Weights


class Backend(Protocol):
    """Lays out the weights of one decoder for its kernels and runs them; every decoder has its own backend."""

    weights: Weights
    """Format of the matrices."""

    @property
    def keeps_codes(self) -> bool:
        """Return whether matrices stored in few bits stay so; otherwise they are decoded while they are read."""

    span: Span | None
    """Runs several layers in one call; None before ``finish`` and where layers only run one by one."""
    split: SplitLayers | None
    """Runs layers in two calls each; None where their modules do."""
    chain: Chain | None
    """Drafts and verifies several tokens in one call; None before ``finish`` and where that is not possible."""
    num_ranks: int
    """Number of machines that share the work of the decoder."""
    rows_up_to: int
    """Prompt chunks that end at or before this position are computed as single rows, later ones as chunks. The choice
    depends only on the place in the text, so that a prompt gives the same bits whatever else is running."""

    def pack_ends(self, decoder: Decoder) -> None:
        """Lay out the embedding, the final norm and the head, whose weights have been read.

        Raises:
            UnsupportedError: this backend cannot run a decoder of this kind.
        """
        ...

    def pack_layer(self, decoder: Decoder, index: int) -> None:
        """Lay out one layer, whose weights have been read."""
        ...

    def finish(self, decoder: Decoder) -> None:
        """Prepare ``span`` and ``chain`` after all parts have been laid out."""
        ...

    def projection(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        """Make a module that multiplies by a matrix (out, in) of a method, on the same kernels as the layers, and adds
        a bias (out,) if there is one.
        """
        ...

    def lay_out(self, factors: FixedFactors) -> int:
        """Lay out an adapter's factors now, so that its first call takes no longer than the next; return the bytes
        that this takes beside the factors themselves.
        """
        ...

    def sibling(self) -> Backend:
        """Make a backend of the same kind for another decoder, such as the one layer of a feature drafter."""
        ...


class TorchBackend:
    """Runs the decoder's modules with PyTorch: the default, and the only backend that allows training."""

    weights: Weights = "bf16"
    keeps_codes = False
    span: Span | None = None
    split: SplitLayers | None = None
    chain: Chain | None = None
    num_ranks = 1
    rows_up_to = 0

    def pack_ends(self, decoder: Decoder) -> None:
        """Leave the embedding, the final norm and the head as they are."""

    def pack_layer(self, decoder: Decoder, index: int) -> None:
        """Leave the layer as it is."""

    def finish(self, decoder: Decoder) -> None:
        """Prepare nothing, since layers only run one by one."""

    def projection(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        """Make a linear layer that shares the matrix (out, in) and the bias."""
        return Linear.of(weight, bias)

    def lay_out(self, factors: FixedFactors) -> int:
        """Lay nothing out: PyTorch takes factors as they are."""
        return 0

    def sibling(self) -> Backend:
        """Make a PyTorch backend for another decoder."""
        return TorchBackend()

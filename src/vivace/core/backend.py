"""What executes a decoder: the seam behind which kernels of one kind of machine stand.

A backend is given to the decoder's constructor. While the weights are read it puts modules of its own in the places of
the decoder's, part by part, so that a loader can let go of each; afterwards it may offer to run several layers
(``span``) or several steps (``chain``) in one call. Layers one by one always give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from vivace.core.draft_rows import Chain
from vivace.core.layers import Linear
from vivace.core.seams import Span

if TYPE_CHECKING:
    from vivace.core.model import Decoder


class Backend(Protocol):
    """Lays out the weights of one decoder and runs it; every decoder has a backend of its own."""

    span: Span | None
    """Executes several layers at once; None before ``finish`` and where layers only run one by one."""
    chain: Chain | None
    """Drafts and verifies several tokens at once; None as for ``span``."""
    rows_up_to: int
    """Prompt chunks that end at or before this position go up as rows, later ones as chunks: by the place in the text
    and nothing else, so that a prompt gives the same bits whatever else is running."""

    def pack_ends(self, decoder: Decoder) -> None:
        """Take over the embedding, the final norm and the head, whose weights have been read.

        Raises:
            UnsupportedError: this backend cannot run a decoder of this kind.
        """
        ...

    def pack_layer(self, decoder: Decoder, index: int) -> None:
        """Take over one layer, whose weights have been read."""
        ...

    def finish(self, decoder: Decoder) -> None:
        """Prepare whatever spans parts, once all of them have been taken over."""
        ...

    def projection(self, weight: Tensor) -> nn.Module:
        """A module that multiplies by a matrix (out, in) that is not the model's own, on the kernels of its layers."""
        ...

    def sibling(self) -> Backend:
        """A backend of the same kind for another decoder, such as the one layer of a feature drafter."""
        ...


class TorchBackend:
    """PyTorch's kernels on the modules as they are built: the default, and the only backend that can be trained."""

    span: Span | None = None
    chain: Chain | None = None
    rows_up_to = 0

    def pack_ends(self, decoder: Decoder) -> None:
        """Leave the ends as they are."""

    def pack_layer(self, decoder: Decoder, index: int) -> None:
        """Leave the layer as it is."""

    def finish(self, decoder: Decoder) -> None:
        """Nothing spans parts here."""

    def projection(self, weight: Tensor) -> nn.Module:
        """A linear layer without bias over this very matrix (out, in)."""
        return Linear.of(weight)

    def sibling(self) -> Backend:
        """PyTorch for the other decoder too."""
        return TorchBackend()

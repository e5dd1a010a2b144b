"""The backend of a GPU: PyTorch's kernels, launched once for a whole pass instead of one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vivace.core.backend import TorchBackend
from vivace.core.cuda.chain import GraphChain
from vivace.core.cuda.graphs import GraphSpan, can_record
from vivace.core.cuda.recordings import Record, Recordings, cuda_graph
from vivace.core.draft_rows import why_no_chain
from vivace.errors import UnsupportedError

if TYPE_CHECKING:
    from vivace.core.model import Decoder
    from vivace.kernels.low_bit import Weights


class CudaBackend(TorchBackend):
    """Runs the decoder's modules with PyTorch, and passes of few rows as recorded graphs.

    A decoding step of a small model is a thousand kernels of a few microseconds each, which the processor cannot launch
    as fast as a GPU computes them. A graph is launched once.
    """

    def __init__(self, record: Record = cuda_graph) -> None:
        """Set what records the work of a pass; tests record without a GPU."""
        self._record = record

    def finish(self, decoder: Decoder) -> None:
        """Offer to run layers, and whole steps, as graphs where none of them waits for the processor."""
        if not can_record(decoder):
            return
        recordings = Recordings(self._record, decoder)
        self.span = GraphSpan(decoder, recordings)
        if why_no_chain(decoder.config) is None:
            self.chain = GraphChain(decoder, recordings)

    def sibling(self) -> CudaBackend:
        """Make a backend of the same kind for another decoder."""
        return CudaBackend(self._record)


def graphs_backend(dtype: torch.dtype, *, weights: Weights = "bf16", screens_head: bool | None = None) -> CudaBackend:
    """Make the backend of ``--kernels graphs`` for a decoder of any dtype.

    Raises:
        UnsupportedError: weights in few bits or a screened head were asked for.
    """
    if weights != "bf16":
        raise UnsupportedError(f"graphs run weights as they are stored, {weights} was asked for; leave --device out")
    if screens_head:
        raise UnsupportedError("graphs read the whole head, --screened-head was asked for; leave it out")
    return CudaBackend()

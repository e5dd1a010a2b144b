"""The plain forward pass: every row of a draft passes every remaining layer, in one call."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Draft, TargetPass
from vivace.core.step import Step
from vivace.kernels.threads import one_pytorch_thread


class ForwardPass:
    """Implements ``Traversal``: all rows of a draft pass the layers from ``draft.entry_layer`` on."""

    def run(self, model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> TargetPass:
        """Run one pass for the rows of all slots together and return their residuals before the final norm, (T, E).

        Rows with ``draft.hidden`` start from those residuals at ``draft.entry_layer``; all others start from their
        embeddings. With ``chunk`` the rows are of prompts and attend together instead of one by one.
        """
        step = Step.of(draft, cache, chunk=chunk)
        h = model.embed(draft.tokens, step) if draft.hidden is None else draft.hidden
        h = model.run(h, step, draft.entry_layer)
        return TargetPass(hidden=h, rows=torch.arange(len(draft.tokens)))


def threads_of(model: Decoder) -> AbstractContextManager[None]:
    """Return a context for passes that run row by row: PyTorch uses one thread inside where native code runs the
    layers.

    Idle PyTorch threads would take the cores that native threads need.
    """
    span = model.backend.span
    return nullcontext() if span is None or not span.is_native else one_pytorch_thread()

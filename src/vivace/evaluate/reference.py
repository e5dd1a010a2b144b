"""Compare plain decoding with the model as its file has it: layer by layer, in PyTorch, without a cache.

Every other method is compared with plain decoding, so plain decoding needs a reference that shares as little with it
as possible. Here the checkpoint is read once more, one layer at a time in float32, and each prompt with its answer
goes through every layer as one whole text: no packed weights, no native kernels, no cache, no drafts. At every place
of an answer the token that was written has to be the likeliest one.

A token that is not the likeliest may be due to rounding, where two tokens are nearly equally likely. Let z be the
largest logit at that place and ``s(z)`` the distance of neighbouring numbers of decoding's dtype at z. Decoding rounds
each logit by up to s/2 when it is written, and by about as much again on its way through the layers, and two logits
may be rounded in opposite directions. In bfloat16 gaps of up to ``2 s(z)`` are therefore called rounding; a larger one
is an error. In float32, where sums lose more than their last bit and logits are not rounded again, it is ``64 s(z)``.

If weights are quantized or in a store, those of the file are not the ones that decode. The same weights are used
instead, with their own kernels and still layer by layer without a cache. Two kinds of models have no bound, so that
differences are listed and none is an error: in a mixture of experts, rounding may make a router choose another expert,
and with quantized weights the activations may be quantized too; both change logits by more than rounding them does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vivace.checkpoint.load import load_decoder
from vivace.core.backend import TorchBackend
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.core.step import Step

SPACINGS = {torch.bfloat16: 2, torch.float32: 64}
"""Number of distances between neighbouring floating-point numbers that rounding may put between two logits."""


@dataclass(frozen=True)
class Departure:
    """A place where plain decoding wrote a token other than the likeliest."""

    prompt: int
    """Index of the prompt."""
    position: int
    """Index of the token in the answer."""
    expected: int
    """The likeliest token."""
    written: int
    """The token that was written."""
    gap: float
    """Logit of the likeliest token minus that of the one that was written."""
    top_two_gap: float
    """Logit of the likeliest token minus that of the second; less than ``gap`` if a third one was written."""
    rounding: float | None
    """The largest gap that rounding explains here; None if it may explain any (mixtures of experts, quantized
    weights).
    """

    @property
    def is_error(self) -> bool:
        """Whether the gap is larger than rounding explains."""
        return self.rounding is not None and self.gap > self.rounding


@dataclass(frozen=True)
class Plainness:
    """Plain decoding's answers compared with the reference."""

    num_prompts: int
    num_tokens: int
    """Number of tokens of all answers, each of which was compared."""
    departures: tuple[Departure, ...]

    @property
    def num_different(self) -> int:
        """Number of answers in which at least one token is not the likeliest."""
        return len({departure.prompt for departure in self.departures})

    @property
    def errors(self) -> tuple[Departure, ...]:
        """The differences that rounding does not explain."""
        return tuple(departure for departure in self.departures if departure.is_error)


@dataclass(frozen=True)
class Text:
    """A prompt and the answer to it, as one text."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    """New tokens, the end token included if one was written."""

    @property
    def tokens(self) -> Tensor:
        """All tokens (T,) except the last, after which nothing was written."""
        return torch.tensor([*self.prompt, *self.answer[:-1]])

    def call(self) -> Step:
        """Return the step that runs the whole text through a layer.

        A dynamic rotary embedding depends on the length; ``extent`` makes it treat the prompt as decoding did, as one
        call.
        """
        step = Step.dense(1, len(self.tokens))
        return replace(step, extent=(step.position + 1).clamp(min=len(self.prompt)))


class _Through(TorchBackend):
    """Runs texts through a decoder while its file is read: each layer is computed when it is loaded, and then freed."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self._texts = texts
        self.residuals: list[Tensor] = []
        """Residuals (T, E) of every text above the layers loaded so far."""

    @torch.inference_mode()
    def pack_ends(self, decoder: Decoder) -> None:
        """Embed the texts."""
        self.residuals = [decoder.embed(text.tokens, text.call()) for text in self._texts]

    @torch.inference_mode()
    def pack_layer(self, decoder: Decoder, index: int) -> None:
        """Run every text through this layer and free its weights."""
        layer = decoder.layers[index]
        pairs = zip(self.residuals, self._texts, strict=True)
        self.residuals = [layer(h, text.call()) for h, text in pairs]
        for parameter in layer.parameters():
            parameter.data = torch.empty(0)


def beside_checkpoint(folder: Path, dtype: torch.dtype, texts: Sequence[Text], sampling: Sampling) -> Plainness:
    """Compare answers with the likeliest tokens of a checkpoint in float32.

    Args:
        folder: the checkpoint.
        dtype: dtype that decoding computed in, which determines how far rounding goes.
        texts: prompts and their greedy answers.
        sampling: settings of the penalties under which the answers were written.
    """
    through = _Through([text for text in texts if text.answer])
    decoder = load_decoder(folder, dtype=torch.float32, backend=lambda _: through)
    return _compare(decoder, dtype, texts, through.residuals, sampling)


@torch.inference_mode()
def beside_itself(
    model: Decoder, texts: Sequence[Text], sampling: Sampling, *, has_few_bits: bool = False
) -> Plainness:
    """Compare answers with the likeliest tokens of the same weights that wrote them, on their own kernels.

    Args:
        model: the decoder that wrote the answers.
        texts: prompts and their greedy answers.
        sampling: settings of the penalties under which the answers were written.
        has_few_bits: whether weights are stored in fewer bits than they compute in.
    """
    tops = []
    for text in texts:
        if text.answer:
            h, step = model.embed(text.tokens, text.call()), text.call()
            for layer in model.layers:
                h = layer(h, step)
            tops.append(h)
    return _compare(model, None if has_few_bits else model.dtype, texts, tops, sampling)


@torch.inference_mode()
def _compare(
    decoder: Decoder, dtype: torch.dtype | None, texts: Sequence[Text], tops: Sequence[Tensor], sampling: Sampling
) -> Plainness:
    """Find the likeliest tokens from the last residuals (T, E) of the texts that have an answer, and compare."""
    departures, left = list[Departure](), iter(tops)
    bound_by = None if decoder.config.moe is not None else dtype
    for prompt, text in enumerate(texts):
        if text.answer:
            logits = decoder.head(next(left)[len(text.prompt) - 1 :])
            if sampling.reads_prefix:
                for place, row in enumerate(logits):
                    _penalise(row, sampling, [*text.prompt, *text.answer[:place]])
            departures += _departures(prompt, logits, text.answer, bound_by)
    return Plainness(len(texts), sum(len(text.answer) for text in texts), tuple(departures))


def _penalise(logits: Tensor, sampling: Sampling, prefix: Sequence[int]) -> None:
    """Apply the penalties to one row (V,) in place; a second implementation, so that decoding's is checked as well."""
    for token in set(prefix):
        logits[token] *= sampling.repetition_penalty if logits[token] < 0 else 1 / sampling.repetition_penalty
    size = sampling.no_repeat_ngram_size
    for start in range(len(prefix) - size + 1 if size else 0):
        if list(prefix[start : start + size - 1]) == list(prefix[len(prefix) - size + 1 :]):
            logits[prefix[start + size - 1]] = -math.inf


def _departures(prompt: int, logits: Tensor, answer: Sequence[int], dtype: torch.dtype | None) -> Iterator[Departure]:
    """Yield the places of one answer whose token is not the likeliest, given the logits (T, V) before each of its
    tokens.
    """
    best, second = logits.topk(2).values.T.tolist()
    for place, (expected, written) in enumerate(zip(logits.argmax(-1).tolist(), answer, strict=True)):
        if expected != written:
            limit = None if dtype is None else rounding(best[place], dtype)
            gap = best[place] - float(logits[place, written])
            yield Departure(prompt, place, expected, written, gap, best[place] - second[place], limit)


def rounding(logit: float, dtype: torch.dtype) -> float:
    """Return the largest gap that rounding to ``dtype`` may put between two logits of about this size."""
    spacing: float = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(logit), 1e-30)))
    return SPACINGS[dtype] * spacing

"""Compare plain decoding with the model as its file has it: layer by layer, in PyTorch, without a cache.

Every other method is compared with plain decoding, so plain decoding needs a reference that shares as little with it
as possible. Here the checkpoint is read once more, one layer at a time in float32, and each prompt with its answer
goes through every layer as one whole text: no packed weights, no native kernels, no cache, no drafts. At every place
of an answer the token that was written has to be the likeliest one.

A token that is not the likeliest may be due to rounding, where two tokens are nearly equally likely. How far rounding
to bfloat16 goes depends on the model and the place, since a logit is a long sum whose terms cancel. It is therefore
measured: the same layers read the same texts once more in PyTorch's bfloat16. At every place the logits of the 64
likeliest tokens differ from those in float32 by errors whose standard deviation is d; where it is below that over all
places, the latter is taken. The difference of two logits then has the deviation ``sqrt(2) d``. Decoding rounds
elsewhere than this second reading does, but by as much: over 1,300 places of a model of 135 million parameters the
errors of its two likeliest tokens, decoded natively, were within .6 ``sqrt(2) d`` in half of the cases, 2.8 in 99 % and
4.5 in all. A gap of up to ``6 sqrt(2) d`` is called rounding; a larger one is an error.

Few tokens have a close second, so that tokens alone tell little about a slightly wrong model. The kernels that decode
therefore read the texts as well, and their logits may be only 1.5 times as far from those in float32 as PyTorch's.
(On the model that ships and the one above it is .99 to 1.00 times; attention that is a tenth too sharp makes it 1.9.)
In float32 logits are not rounded again, and the bound of a gap is ``64 s(z)``, with s(z) the distance of neighbouring
numbers at the largest logit z.

If weights are quantized or in a store, those of the file are not the ones that decode. The same weights are used
instead, with their own kernels and still layer by layer without a cache. This reference rounds as decoding does, and d
comes from a second pass in which a random rounding is added to the input of each layer. A layer rounds more than once:
on three models, of 14 to 270 million parameters, d was 1.3 to 2.1 times what that gives, so it is doubled, and doubled
in square since both sides round. Two kinds of models have no bound, so that differences are listed and none is an
error: in a mixture of experts, rounding may make a router choose another expert, and with quantized weights the
activations may be quantized too; both change logits by more than rounding them does. Where the codes of a file are
multiplied as they are, the file in float32 is the reference, and it is said how far the logits are from it.
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

DEVIATIONS = 6
"""Number of standard deviations of the difference of two logits that are called rounding."""
LIKELY = 64
"""Number of the likeliest tokens whose errors are looked at."""
SPACINGS = 64
"""Number of distances between neighbouring numbers of float32 that rounding may put between two logits."""
SHAKEN = 2 * math.sqrt(2)
"""How many times as far as a shaken reading decoding is from its reference."""
FARTHER = 1.5
"""How many times as far as PyTorch's logits those of decoding may be from the reference."""


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
    deviations: float | None = None
    """The gap in standard deviations of what rounding does to the difference of two logits here, if that is known."""

    @property
    def is_error(self) -> bool:
        """Return whether the gap is larger than rounding explains."""
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

    distance: float | None = None
    """Root mean square of how far differences of likely logits, by the kernels that decode, are from float32's; None if
    the reference is not in float32.
    """
    usual_distance: float | None = None
    """The same of PyTorch's bfloat16; None if decoding rounds what PyTorch does not, so that there is no bound."""

    @property
    def errors(self) -> tuple[Departure, ...]:
        """The differences that rounding does not explain."""
        return tuple(departure for departure in self.departures if departure.is_error)

    @property
    def is_far(self) -> bool:
        """Return whether logits are farther from the reference than rounding explains."""
        if self.distance is None or self.usual_distance is None:
            return False
        return self.distance > FARTHER * self.usual_distance


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


@dataclass(frozen=True)
class _Reading:
    """Texts as a decoder read them."""

    decoder: Decoder
    residuals: Sequence[Tensor]
    """Residuals (T, E) above the last layer, of every text."""
    sampling: Sampling

    def logits(self, index: int, text: Text) -> Tensor:
        """Return the logits (A, V) in float32 before each token of an answer, penalties included."""
        logits = self.decoder.head(self.residuals[index][len(text.prompt) - 1 :]).float()
        if self.sampling.reads_prefix:
            for place, row in enumerate(logits):
                _penalise(row, self.sampling, [*text.prompt, *text.answer[:place]])
        return logits


@torch.inference_mode()
def beside_checkpoint(
    folder: Path, model: Decoder, texts: Sequence[Text], sampling: Sampling, *, rounds_inputs: bool = False
) -> Plainness:
    """Compare answers with the likeliest tokens of a checkpoint in float32.

    Args:
        folder: the checkpoint.
        model: the decoder that wrote the answers.
        texts: prompts and their greedy answers.
        sampling: settings of the penalties under which the answers were written.
        rounds_inputs: whether kernels multiply the codes of the file with inputs in eight bits.
    """
    exact = _read_file(folder, torch.float32, texts, sampling)
    if exact.decoder.config.moe is not None:
        return _compare(texts, exact, None)
    if model.dtype == torch.float32:
        return _compare(texts, exact, exact)
    own = _read_again(model, texts, sampling, shaken=False)
    if rounds_inputs:
        return _compare(texts, exact, None, own)
    return _compare(texts, exact, _read_file(folder, model.dtype, texts, sampling), own)


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
    reading = _read_again(model, texts, sampling, shaken=False)
    if has_few_bits or model.config.moe is not None:
        return _compare(texts, reading, None)
    if model.dtype == torch.float32:
        return _compare(texts, reading, reading)
    return _compare(texts, reading, _read_again(model, texts, sampling, shaken=True), factor=SHAKEN)


def _read_file(folder: Path, dtype: torch.dtype, texts: Sequence[Text], sampling: Sampling) -> _Reading:
    """Read the texts with the weights of a checkpoint, one layer of it at a time."""
    through = _Through([text for text in texts if text.answer])
    decoder = load_decoder(folder, dtype=dtype, backend=lambda _: through)
    return _Reading(decoder, through.residuals, sampling)


def _read_again(model: Decoder, texts: Sequence[Text], sampling: Sampling, *, shaken: bool) -> _Reading:
    """Read the texts with a decoder, layer by layer; ``shaken`` rounds the input of each layer once more at random."""
    draws = torch.Generator().manual_seed(0)
    spacing = torch.finfo(model.dtype).eps
    residuals = []
    for text in texts:
        if text.answer:
            h, step = model.embed(text.tokens, text.call()), text.call()
            for layer in model.layers:
                if shaken:
                    h = (h * (1 + spacing * (2 * torch.rand(h.shape, generator=draws) - 1))).to(h.dtype)
                h = layer(h, step)
            residuals.append(h)
    return _Reading(model, residuals, sampling)


@torch.inference_mode()
def _compare(
    texts: Sequence[Text],
    reading: _Reading,
    other: _Reading | None,
    own: _Reading | None = None,
    *,
    factor: float = 1.0,
) -> Plainness:
    """Compare answers with a reading.

    Args:
        texts: prompts and answers.
        reading: the texts as the reference reads them.
        other: another reading of the texts, which differs from it by rounding; the same one if rounding is that of
            float32, None if it has no bound.
        own: the texts as the kernels that decode read them, if their logits are to be compared too.
        factor: how many times as far as the other reading decoding may be.
    """
    departures, errors, own_errors = list[Departure](), list[Tensor](), list[Tensor]()
    answered = [(prompt, text) for prompt, text in enumerate(texts) if text.answer]
    for index, (prompt, text) in enumerate(answered):
        logits = reading.logits(index, text)
        found = list(_departures(prompt, logits, text.answer))
        if other is reading:
            limits = SPACINGS * _spacing(logits.amax(-1))
            found = [replace(one, rounding=float(limits[one.position])) for one in found]
        elif other is not None:
            errors.append(_deviations(logits, other.logits(index, text)) * factor)
            found = [replace(one, deviations=float(errors[-1][one.position])) for one in found]
        if own is not None:
            own_errors.append(_deviations(logits, own.logits(index, text)))
        departures += found
    usual, distance = _root_mean_square(errors), _root_mean_square(own_errors)
    if usual is not None:
        departures = [_judged(one, usual) for one in departures]
    num_tokens = sum(len(text.answer) for text in texts)
    return Plainness(len(texts), num_tokens, tuple(departures), distance, None if distance is None else usual)


def _root_mean_square(errors: Sequence[Tensor]) -> float | None:
    return float(torch.cat(list(errors)).square().mean().sqrt()) if errors else None


def _spacing(logits: Tensor) -> Tensor:
    """Return the distances of neighbouring numbers of float32 at these logits."""
    return torch.finfo(torch.float32).eps * logits.abs().clamp(min=1e-30).log2().floor().exp2()


def _deviations(logits: Tensor, others: Tensor) -> Tensor:
    """Return the standard deviations (A,) of the difference of two likely logits, from two readings (A, V)."""
    likely = logits.topk(min(LIKELY, logits.shape[-1]))
    errors = others.gather(-1, likely.indices) - likely.values
    errors[~likely.values.isfinite()] = math.nan  # tokens that a penalty bans
    errors -= errors.nanmean(-1, keepdim=True)
    return math.sqrt(2) * errors.square().nanmean(-1).sqrt()


def _judged(one: Departure, typical: float) -> Departure:
    """Return a difference whose ``deviations`` is the deviation of its place with its gap beside that, or beside the
    typical one if that is larger.
    """
    deviation = max(one.deviations or 0.0, typical, 1e-30)
    return replace(one, rounding=DEVIATIONS * deviation, deviations=one.gap / deviation)


def _penalise(logits: Tensor, sampling: Sampling, prefix: Sequence[int]) -> None:
    """Apply the penalties to one row (V,) in place; a second implementation, so that decoding's is checked as well."""
    for token in set(prefix):
        logits[token] *= sampling.repetition_penalty if logits[token] < 0 else 1 / sampling.repetition_penalty
    size = sampling.no_repeat_ngram_size
    for start in range(len(prefix) - size + 1 if size else 0):
        if list(prefix[start : start + size - 1]) == list(prefix[len(prefix) - size + 1 :]):
            logits[prefix[start + size - 1]] = -math.inf


def _departures(prompt: int, logits: Tensor, answer: Sequence[int]) -> Iterator[Departure]:
    """Yield the places of one answer whose token is not the likeliest, given the logits (A, V) before each of its
    tokens.
    """
    best, second = logits.topk(2).values.T.tolist()
    for place, (expected, written) in enumerate(zip(logits.argmax(-1).tolist(), answer, strict=True)):
        if expected != written:
            gap = best[place] - float(logits[place, written])
            yield Departure(prompt, place, expected, written, gap, best[place] - second[place], None)

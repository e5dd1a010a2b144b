"""The loop trains models that are no decoders on batches that are no text, and resumes a killed run exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.train import (
    BatchPlace,
    DataSplit,
    Lines,
    LoopConfig,
    LossParts,
    Objective,
    OptimiserConfig,
    TrainConfig,
    fit,
)
from vivace.train.report import StepMeans

STEPS = 30


@dataclass(frozen=True)
class Images:
    """Pictures of one size, (B, 1, 8, 8)."""

    pixels: Tensor

    @property
    def num_elements(self) -> int:
        return len(self.pixels)

    weight = num_elements


@dataclass(frozen=True)
class Translated:
    """Sentences and their translations, of other lengths."""

    source: Tensor
    """(B, S)"""
    target: Tensor
    """(B, T), the first token is given."""

    @property
    def num_elements(self) -> int:
        return self.source.numel() + self.target.numel()

    @property
    def weight(self) -> int:
        return self.target[:, 1:].numel()


class Source:
    """Batches drawn by their place alone."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def start_at(self, place: BatchPlace) -> Iterator[tuple[BatchPlace, Images | Translated]]:
        number = 5 * place.epoch + place.index  # five batches an epoch
        while True:
            number += 1
            yield BatchPlace(number // 5, number % 5), self.batch(torch.Generator().manual_seed(number))

    def batch(self, generator: torch.Generator) -> Images | Translated:
        if self.kind == "images":
            corner = torch.randint(0, 4, (6,), generator=generator)
            pixels = torch.zeros(6, 1, 8, 8)
            for image, at in zip(pixels, corner.tolist(), strict=True):
                image[0, at : at + 4, at : at + 4] = 1.0
            return Images(pixels)
        source = torch.randint(1, 9, (8, 5), generator=generator)
        return Translated(source, torch.cat((torch.zeros(8, 1, dtype=torch.int64), source.flip(1)), 1))


class Denoising(Objective[nn.Module, Images]):
    """Tell the noise from the picture at a random time (Ho et al. 2020, arXiv:2006.11239)."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def groups(self) -> Sequence[Mapping[str, object]]:
        return [{"params": list(self.model.parameters()), "name": "denoiser"}]

    def losses(self, model: nn.Module, batch: Images) -> LossParts:
        time, noise = torch.rand(len(batch.pixels), 1, 1, 1), torch.randn_like(batch.pixels)
        seen = batch.pixels * (1 - time).sqrt() + noise * time.sqrt()
        guess = model(torch.cat((seen, time.expand_as(seen)), 1))
        loss = F.mse_loss(guess, noise)
        yield loss, {"loss": float(loss.detach())}


class Translator(nn.Module):
    """An encoder, and a decoder that attends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 16)
        self.places = nn.Embedding(8, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 9)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        read = self.encoder(self._embed(source))
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.decoder(self._embed(target), read, tgt_mask=causal))

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.places(torch.arange(tokens.shape[1]))


class Translating(Objective[Translator, Translated]):
    """The next word of the translation, sentence by sentence so that several parts are backed through."""

    def __init__(self, model: Translator) -> None:
        self.model = model

    def groups(self) -> Sequence[Mapping[str, object]]:
        return [{"params": list(self.model.parameters()), "name": "translator"}]

    def losses(self, model: Translator, batch: Translated) -> LossParts:
        count = len(batch.source)
        for source, target in zip(batch.source.split(2), batch.target.split(2), strict=True):
            logits = model(source, target[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten()) * len(source) / count
            yield loss, {"loss": float(loss.detach())}


def made(kind: str) -> tuple[nn.Module, Objective]:
    torch.manual_seed(0)
    if kind == "images":
        denoiser = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 1, 3, padding=1))
        return denoiser, Denoising(denoiser)
    translator = Translator()
    return translator, Translating(translator)


class Kept(Lines):
    """Readings, and a kill after a step."""

    def __init__(self, kill_at: int | None = None) -> None:
        super().__init__(lambda _: None)
        self.kill_at = kill_at
        self.readings: list[StepMeans] = []

    def reading(self, reading: StepMeans) -> None:
        self.readings.append(reading)
        if reading.step == self.kill_at:
            raise KeyboardInterrupt


def train(kind: str, folder: Path, report: Kept) -> nn.Module:
    model, objective = made(kind)
    loop = LoopConfig(steps=STEPS, warmup_steps=2, accumulate=2, snapshot_s=0.0, evaluate_steps=7, report_steps=1)
    config = TrainConfig(loop, OptimiserConfig(adamw_rate=0.01), seed=5, plan="a test")
    held_back = [next(Source(kind).start_at(BatchPlace(99)))[1]]
    data = DataSplit(Source(kind), held_back, unit="images" if kind == "images" else "tokens")
    fit(model, objective, data, config, folder=folder, report=report)
    return model


@pytest.mark.parametrize("kind", ["images", "translations"])
def test_it_learns_and_a_killed_run_ends_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    report = Kept()
    whole = train(kind, tmp_path / "whole", report)
    losses = [reading.metrics["loss"] for reading in report.readings]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    with pytest.raises(KeyboardInterrupt):
        train(kind, tmp_path / "killed", Kept(kill_at=11))
    resumed = Kept()
    model = train(kind, tmp_path / "killed", resumed)
    assert resumed.readings[0].step == 11, "the snapshot is of step 10"
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_the_speed_is_told_in_what_the_batches_hold(tmp_path: Path) -> None:
    report = Kept()
    train("images", tmp_path, report)
    assert " images/s" in str(report.readings[-1])


def test_held_back_batches_count_by_their_weight(tmp_path: Path) -> None:
    """Two sentences of six words and one of two: the mean is over words."""

    class Constant(Translating):
        def losses(self, model: Translator, batch: Translated) -> LossParts:
            yield model.head.bias.sum() * 0.0 + float(batch.target.shape[1]), {}

    model = Translator()
    sizes = [Translated(torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 6, dtype=torch.int64))]
    sizes.append(Translated(torch.ones(1, 5, dtype=torch.int64), torch.ones(1, 3, dtype=torch.int64)))
    data = DataSplit(Source("translations"), sizes)
    config = TrainConfig(LoopConfig(steps=1, warmup_steps=0), OptimiserConfig())
    result = fit(model, Constant(model), data, config, folder=tmp_path, report=Kept())
    assert result.held_back["loss"] == pytest.approx((6.0 * 10 + 3.0 * 2) / 12)

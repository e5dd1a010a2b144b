"""A training run of an encoder-decoder that says each step, to be killed by a test: ``FILE FOLDER TOKENIZER``."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.train.tiny import PAIRS as ALL
from vivace.checkpoint.families import translate
from vivace.checkpoint.tokenizer import Tokenizer, load_tokenizer
from vivace.core.model import Decoder
from vivace.recipes.seq2seq import T5Shape
from vivace.train.batches import BatchPlace, DataSplit
from vivace.train.config import LoopConfig, TrainConfig
from vivace.train.data import Batches
from vivace.train.loop import fit
from vivace.train.optim import OptimiserConfig
from vivace.train.report import Lines
from vivace.train.source_data import SourceRows
from vivace.train.teacher_forcing import TeacherForcing
from vivace.train.variation import Pair

STEPS = 14
PAIRS = ALL[:11]


def tiny_seq2seq(dtype: torch.dtype = torch.float32) -> Decoder:
    """A T5 of two layers on each side, with small random weights."""
    shape = T5Shape(num_layers=2, num_decoder_layers=2, width=32, ffn_width=48, num_heads=4, head_dim=8, vocab_size=400)
    model = Decoder(translate(shape.hf_config()))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + (1.0 if parameter.dim() == 1 else 0.0))
    return model.to(dtype)


def source_rows(tokenizer: Tokenizer) -> SourceRows:
    """Pairs as sources and texts whose start token is 1."""
    return SourceRows(tokenizer, 1, 64, 64)


def train(folder: Path, tokenizer: Path, *, quiet: bool = True) -> Decoder:
    """The same run whoever calls it."""
    torch.set_num_threads(1)

    def draw(rng: random.Random, epoch: int) -> Sequence[Pair]:
        del epoch
        return rng.sample(PAIRS, len(PAIRS))

    model = tiny_seq2seq(torch.bfloat16)
    data = Batches(draw, source_rows(load_tokenizer(tokenizer)), tokens_per_batch=256)
    held_back = [next(data.start_at(BatchPlace(1000)))[1]]
    loop = LoopConfig(steps=STEPS, warmup_steps=5, accumulate=2, snapshot_s=0.0, evaluate_steps=5, report_steps=1)
    course = TrainConfig(loop, OptimiserConfig(momentum_steps=10), seed=3, plan="a test")
    report = Lines(lambda line: None if quiet else print(line, flush=True))  # noqa: T201
    fit(model, TeacherForcing(model), DataSplit(data, held_back), course, folder=folder, report=report)
    return model


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]), quiet=False)

"""A training run that says each step, to be killed by the test that starts it: ``python killed.py FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.train.tiny import batches, tiny_decoder
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.core.model import Decoder
from vivace.train.batches import DataSplit
from vivace.train.config import LoopConfig, TrainConfig
from vivace.train.data import BatchPlace
from vivace.train.loop import fit
from vivace.train.next_token import NextToken
from vivace.train.optim import OptimiserConfig
from vivace.train.report import Lines

STEPS = 45


def train(folder: Path, tokenizer: Path, *, quiet: bool = True) -> Decoder:
    """The same run whoever calls it."""
    torch.set_num_threads(1)
    model = tiny_decoder(torch.bfloat16)
    data = batches(load_tokenizer(tokenizer))
    held_back = [next(data.start_at(BatchPlace(1000)))[1]]
    course = TrainConfig(
        LoopConfig(steps=STEPS, warmup_steps=5, accumulate=2, snapshot_s=0.0, evaluate_steps=9, report_steps=1),
        OptimiserConfig(momentum_steps=10),
        seed=3,
        plan="a test",
    )
    report = Lines(lambda line: None if quiet else print(line, flush=True))  # noqa: T201
    fit(model, NextToken(model), DataSplit(data, held_back), course, folder=folder, report=report)
    return model


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]), quiet=False)

"""Beam search against transformers: the same ids and scores, family by family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.parity.families import VOCAB, make
from vivace.checkpoint.share import share_module
from vivace.core.sampling import Sampling
from vivace.decode.beams import BeamPlan, Hypothesis
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request, StopRule
from vivace.decode.session import Session

FAMILIES = ("llama", "qwen3", "gemma2", "gpt2")
TOLERANCE = 1e-5
ENDS = [5, 9]
NEW = 16
PAD = 0
"""Never written: processors of transformers take padding for text, so a padded prompt with it is another one."""


def without_padding(ids: Tensor, scores: Tensor) -> Tensor:
    return scores.index_fill(1, torch.tensor([PAD]), -torch.inf)


class Asked(NamedTuple):
    """Settings of a search under transformers' names."""

    early_stopping: Any = False
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    min_new_tokens: int | None = None
    forced_eos_token_id: int | None = None


Found = tuple[tuple[int, ...], float]
SETTINGS = (
    Asked(),
    Asked(True, 2.0, no_repeat_ngram_size=2),
    Asked("never", 0.6, min_new_tokens=6),
    Asked("never", -0.5, repetition_penalty=1.3),
    Asked(False, 0.0, forced_eos_token_id=ENDS[0]),
    Asked(True, 1.0, no_repeat_ngram_size=3, repetition_penalty=0.8, min_new_tokens=3),
)


def theirs(model: nn.Module, prompts: Sequence[list[int]], num_beams: int, asked: Asked) -> list[list[Found]]:
    """Texts and scores of transformers, ``num_beams`` of each prompt."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        ids,
        attention_mask=mask,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=ENDS,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
        suppress_tokens=[PAD],
        **asked._asdict(),
    )
    rows = out.sequences[:, longest:]
    scores = torch.zeros(len(rows)) if num_beams == 1 else out.sequences_scores
    found = [(cut(row), score) for row, score in zip(rows, scores.tolist(), strict=True)]
    return [found[at : at + num_beams] for at in range(0, len(found), num_beams)]


def cut(row: Tensor) -> tuple[int, ...]:
    """The tokens up to the first end; what follows is padding."""
    tokens = row.tolist()
    ends = [place for place, token in enumerate(tokens) if token in ENDS]
    return tuple(tokens[: ends[0] + 1] if ends else tokens)


def ours(model: Any, prompts: Sequence[list[int]], num_beams: int, asked: Asked) -> list[list[Hypothesis]]:
    least = asked.min_new_tokens or 0
    requests = [
        Request(
            tuple(prompt),
            NEW,
            NoDrafts(),
            stop=StopRule(end_tokens=frozenset(ENDS), min_new_tokens=least),
            sampling=Sampling(
                no_repeat_ngram_size=asked.no_repeat_ngram_size, repetition_penalty=asked.repetition_penalty
            ),
            processors=(without_padding,),
            forced_last=asked.forced_eos_token_id,
            beams=None
            if num_beams == 1
            else BeamPlan(num_beams, num_beams, asked.length_penalty, asked.early_stopping),
        )
        for prompt in prompts
    ]
    session = Session(model, num_slots=5, capacity=max(request.num_entries for request in requests))
    numbers = [session.admit(request) for request in requests]
    texts: dict[int, list[int]] = {number: [] for number in numbers}
    found: dict[int, list[Hypothesis]] = {}
    for emitted in session.drain():
        texts[emitted.request_id] += emitted.tokens
        found[emitted.request_id] = list(emitted.hypotheses)
    return [found[number] or [Hypothesis(tuple(texts[number]), 0.0, True)] for number in numbers]


def compare(family: str, num_beams: int, batch: int, settings: Sequence[Asked]) -> int:
    """Compare all texts of all settings; return how many there were."""
    model = make(family, seed=3)
    model.generation_config.eos_token_id = None
    decoder, count = share_module(model), 0
    generator = torch.Generator().manual_seed(batch)
    for asked in settings:
        lengths = torch.randint(1, 20, (batch,), generator=generator).tolist()
        prompts = [torch.randint(10, VOCAB, (length,), generator=generator).tolist() for length in lengths]
        if num_beams == 1:
            asked = asked._replace(early_stopping=False, length_penalty=1.0)
        expected, found = theirs(model, prompts, num_beams, asked), ours(decoder, prompts, num_beams, asked)
        for place, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert len(one) == len(other) == num_beams
            for rank, ((tokens, score), hypothesis) in enumerate(zip(one, other, strict=True)):
                where = f"{family}, {num_beams} beams, {asked}, prompt {place}, text {rank}"
                gap = abs(hypothesis.score - score)
                assert hypothesis.tokens == tokens, f"{where}: other ids, scores {gap} apart"
                assert gap <= TOLERANCE * max(1.0, abs(score)), f"{where}: scores {score} and {hypothesis.score}"
                count += 1
    return count


@pytest.mark.parametrize("num_beams", [1, 2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_scores(family: str, num_beams: int) -> None:
    place = FAMILIES.index(family) + num_beams
    chosen = [SETTINGS[place % len(SETTINGS)], SETTINGS[(place + 2) % len(SETTINGS)]]
    assert compare(family, num_beams, 3, chosen) == 2 * 3 * num_beams


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("num_beams", [1, 2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_scores_with_every_setting(family: str, num_beams: int, batch: int) -> None:
    assert compare(family, num_beams, batch, SETTINGS) == len(SETTINGS) * batch * num_beams

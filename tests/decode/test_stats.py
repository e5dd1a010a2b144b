"""Counters under vLLM's formulas, from drafts whose fate is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.decode.oracles import Text
from tests.decode.runs import finish
from tests.decode.scripted_drafters import Scripted
from tests.decode.tiny_decoders import VOCAB
from vivace.core.model import Decoder
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.decode.stats import DecodeStats

Models = Callable[..., Decoder]
Plain = Callable[[torch.dtype], list[Text]]


@pytest.mark.parametrize(("shape", "nodes"), [((1, 1, 1), 3), ((3, 1, 2), 12)], ids=str)
def test_counts_of_a_known_draft(models: Models, plain: Plain, shape: tuple[int, ...], nodes: int) -> None:
    """The third guess of every block is wrong: two are kept, a third token recovers."""
    text = plain(torch.bfloat16)[2]
    start = len(text.prompt)
    drafter = Scripted([[*text.prompt, *text.new]], VOCAB, shape=shape, is_right=lambda place: (place - start) % 3 < 2)
    session = Session(models(torch.bfloat16), num_slots=3, capacity=64)
    for result in finish(session, [Request(text.prompt, 21, drafter)] * 3):
        stats = result.stats
        assert (stats.method, stats.num_prompt_tokens, stats.num_tokens) == ("scripted", start, 21)
        assert stats.num_spec_steps == 7
        assert stats.num_accepted_draft_tokens == 14
        last = sum(shape[:1]) + shape[0] * shape[1]  # the last block may use two guesses more
        assert stats.num_draft_tokens == 6 * nodes + last
        assert stats.drafted_per_position == [7, 7, 6]
        assert stats.accepted_per_position == [7, 7, 0]
        assert stats.acceptance_per_position == [1.0, 1.0, 0.0]
        assert stats.mean_acceptance_length == 3.0
        assert stats.tokens_per_target_pass == 3.0
        assert stats.draft_acceptance_rate == pytest.approx(14 / (6 * nodes + last))


def test_times_add_up(models: Models, plain: Plain) -> None:
    text = plain(torch.float32)[5]
    session = Session(models(torch.float32), num_slots=1, capacity=64, chunk=8)
    (result,) = finish(session, [Request(text.prompt, 20, NoDrafts())])
    stats = result.stats
    assert min(stats.prefill_s, stats.draft_s, stats.verify_s, stats.first_token_s, stats.decode_s) > 0
    assert stats.first_token_s > stats.prefill_s
    assert stats.first_token_s + stats.decode_s >= stats.draft_s + stats.verify_s
    assert stats.tokens_per_s == pytest.approx(19 / stats.decode_s)
    assert stats.num_draft_tokens == 0
    assert stats.mean_acceptance_length == 1.0


def test_nothing_happened_yet() -> None:
    stats = DecodeStats()
    assert stats.mean_acceptance_length == stats.draft_acceptance_rate == stats.tokens_per_target_pass == 0.0
    assert stats.tokens_per_s == 0.0
    assert stats.acceptance_per_position == []

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from vivace.errors import ConfigError
from vivace.evaluate.benchmark import BenchmarkPrompt, Record, Trial, run_benchmark, summarise

QUESTIONS = [BenchmarkPrompt(f"q{i}", (i,)) for i in range(5)]


@dataclass
class Scripted:
    """Answers with fixed tokens and notes when it was asked."""

    name: str
    log: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def answer(self, batch: Sequence[BenchmarkPrompt]) -> Trial:
        self.log.append((self.name, tuple(q.token_ids[0] for q in batch)))
        return Trial(tuple((q.token_ids[0], 7) for q in batch), len(batch), 1.0, 2.0)


def trial(*token_ids: tuple[int, ...], decode_s: float = 1.0, total_s: float = 2.0, **more: object) -> Trial:
    return Trial(token_ids, num_first_tokens=len(token_ids), decode_s=decode_s, total_s=total_s, **more)  # type: ignore[arg-type]


def test_contestants_take_turns_on_every_batch_in_changing_order() -> None:
    log: list[tuple[str, tuple[int, ...]]] = []
    steps: list[tuple[int, int]] = []
    records = run_benchmark(
        [Scripted("a", log), Scripted("b", log), Scripted("c", log)],
        QUESTIONS,
        batch_size=2,
        repeats=2,
        warm_up=1,
        on_progress=lambda done, total: steps.append((done, total)),
    )
    warm, rounds = log[:3], [log[start : start + 3] for start in range(3, len(log), 3)]
    assert warm == [("a", (0, 1)), ("b", (0, 1)), ("c", (0, 1))]
    assert all({name for name, _ in one} == set("abc") for one in rounds)
    assert [one[0][1] for one in rounds] == [(0, 1), (2, 3), (4,)] * 2
    assert [len(record.trials) for record in records] == [3, 3, 3]
    assert all(len(batch) == 2 for record in records for batch in record.trials)
    assert (steps[0], steps[-1]) == ((1, 18), (18, 18))


def test_nobody_always_comes_after_the_same_contestant() -> None:
    """Whoever came after another engine every time would find the cache full of its weights every time."""
    log: list[tuple[str, tuple[int, ...]]] = []
    run_benchmark([Scripted(name, log) for name in "abcd"], QUESTIONS, repeats=8, warm_up=0)
    before: dict[str, Counter[str]] = {name: Counter() for name in "abcd"}
    for (earlier, _), (later, _) in pairwise(log):
        before[later][earlier] += 1
    for name, found in before.items():
        assert set("abcd") - {name} <= set(found), f"{name} never came after some"
        assert max(found.values()) < 0.6 * found.total(), f"{name} came after the same one nearly always: {found}"


def test_rates_are_tokens_behind_the_first_block_over_median_times() -> None:
    base = Record("plain", [[trial((1, 2, 3), decode_s=s) for s in (4.0, 1.0, 2.0)], [trial((1, 2), decode_s=2.0)] * 3])
    (run,) = summarise([base], "plain")
    assert run.tokens_per_s == (2 + 1) / (2.0 + 2.0)
    assert run.tokens_per_s_spread == (3 / 6, 3 / 3)
    assert run.end_to_end_tokens_per_s == 5 / 4
    assert run.first_token_ms == 0, "all of the time was decoding"
    assert (run.speedup, run.speedup_interval) == (1.0, (1.0, 1.0))
    assert (run.identical, run.num_tokens) == (True, 5)
    assert run.mean_acceptance_length is None
    assert run.prefill_s is None


def test_a_method_is_set_beside_the_baseline() -> None:
    base = Record("plain", [[trial((1, 2, 3), decode_s=4.0)], [trial((1, 2), decode_s=2.0)]])
    fast = Record(
        "fast",
        [
            [trial((1, 2, 3), decode_s=1.0, num_steps=2, num_accepted=1, num_drafted=4, prefill_s=1.0,
                  drafted_per_position=(2, 2), accepted_per_position=(1, 0), peak_memory_bytes=5)],
            [trial((1, 9), decode_s=0.5, num_steps=1, num_accepted=1, num_drafted=1, prefill_s=2.0,
                  drafted_per_position=(1,), accepted_per_position=(1,), peak_memory_bytes=9)],
        ],
    )  # fmt: skip
    _, run = summarise([base, fast], "plain")
    assert run.speedup == pytest.approx(4.0)
    assert run.speedup_interval == pytest.approx((4.0, 4.0))
    assert (run.identical, run.num_different) == (False, 1)
    assert run.mean_acceptance_length == 1 + 2 / 3
    assert run.tokens_per_target_pass == 5 / 3
    assert run.acceptance_per_position == (2 / 3, 0.0)
    assert run.prefill_s == 3.0
    assert run.peak_memory_bytes == 9


def test_whole_answers_are_set_beside_the_baselines_with_their_prompts() -> None:
    """Reading the prompt takes as long for both: 4 times as fast behind it is 1.6 times as fast in all."""
    base = Record("plain", [[trial((1, 2, 3), decode_s=4.0, total_s=8.0)], [trial((1, 2), decode_s=2.0, total_s=4.0)]])
    fast = Record("fast", [[trial((1, 2, 3), decode_s=1.0, total_s=5.0)], [trial((1, 2), decode_s=0.5, total_s=2.5)]])
    plain, run = summarise([base, fast], "plain")
    assert (plain.end_to_end_speedup, plain.end_to_end_interval) == (1.0, (1.0, 1.0))
    assert run.speedup == pytest.approx(4.0)
    assert run.end_to_end_speedup == pytest.approx(1.6)
    assert run.end_to_end_interval == pytest.approx((1.6, 1.6))


def test_one_take_that_differs_is_enough() -> None:
    base = Record("plain", [[trial((1, 2))] * 2])
    other = Record("other", [[trial((1, 2)), trial((1, 3))]])
    assert summarise([base, other], "plain")[1].num_different == 1


def test_empty_contests_are_refused() -> None:
    with pytest.raises(ConfigError, match="found 0 methods, 5 prompts, batch 1, 1 repeats"):
        run_benchmark([], QUESTIONS, repeats=1)
    with pytest.raises(ConfigError, match="0 prompts"):
        run_benchmark([Scripted("a")], [])
    with pytest.raises(ConfigError, match="the baseline 'plain' is not among a"):
        summarise([Record("a", [])], "plain")

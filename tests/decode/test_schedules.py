"""Random schedules under little memory: whoever is admitted, cancelled, forked, stopped or preempted, every text is its
own. The oracle is a session of one slot with memory enough, in which the request is alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
import torch

from tests.decode.tiny_decoders import prompts
from vivace.core.blocks import BlockStore
from vivace.core.cache import specs_of
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.core.seams import Drafter
from vivace.decode.lookup import LookupConfig, PromptLookup
from vivace.decode.memory import MemoryBudget, text_bytes
from vivace.decode.plain import NoDrafts
from vivace.decode.prefix import PrefixCache
from vivace.decode.request import Request, StopRule
from vivace.decode.session import Session
from vivace.errors import BusyError
from vivace.kernels.choice import choose
from vivace.methods.draft.drafter import DraftModel, DraftModelConfig

CAPACITY, SLOTS, SIZE = 64, 4, 8
SCHEDULES = 1000
"""Of the slow test; the other one runs a few of them."""


@dataclass
class Case:
    """A model in small blocks, and what may be asked of it."""

    model: Decoder
    drafters: list[Drafter]
    texts: dict[tuple[object, ...], tuple[tuple[int, ...], tuple[float, ...]]] = field(default_factory=dict)

    def alone(self, request: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """What a request writes when nothing else runs: ids and log-probabilities."""
        key = (request.tokens, request.sampling, request.seed if request.sampling.do_sample else None)
        if key not in self.texts:
            longest = CAPACITY - len(request.tokens)
            session = Session(self.model, num_slots=1, capacity=CAPACITY, chunk=8)
            session.admit(replace(request, drafter=NoDrafts(), prefix=None, stop=StopRule(), max_new_tokens=longest))
            emitted = list(session.drain())
            ids = tuple(token for each in emitted for token in each.tokens)
            self.texts[key] = ids, tuple(value for each in emitted for value in each.logprobs or ())
        ids, logprobs = self.texts[key]
        ends = [place + 1 for place, token in enumerate(ids) if token in request.stop.end_tokens]
        count = min(request.max_new_tokens, *ends[:1], len(ids))
        return ids[:count], logprobs[:count]


def in_small_blocks(model: Decoder) -> Decoder:
    model._blocks = BlockStore(specs_of(model.config), dtype=model.dtype, most=4000, size=SIZE)
    return model


@pytest.fixture(scope="module", params=["float32", "native", "windows"])
def case(request: pytest.FixtureRequest) -> Case:
    from tests.decode.tiny_decoders import build

    body = choose("auto").body
    if request.param == "native" and body is None:
        pytest.skip("no native kernels run here")
    windows = {"windows": (12, None, 12)} if request.param == "windows" else {}
    models = [build(torch.bfloat16 if request.param == "native" else torch.float32, seed=seed, **more)
              for seed, more in ((0, windows), (3, {"num_layers": 1}))]  # fmt: skip
    for model in models:
        if request.param == "native":
            pack_decoder(model.requires_grad_(False), body)
        in_small_blocks(model)
    drafters = [NoDrafts(), PromptLookup(LookupConfig()), DraftModel(models[1], 97, DraftModelConfig(3))]
    return Case(models[0], drafters)


class Schedule:
    """One session, and everything that happens in it."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.rng = case, random.Random(seed)
        largest = max(text_bytes(case.model, drafter, CAPACITY) for drafter in case.drafters)
        self.budget = MemoryBudget(int(largest * self.rng.uniform(1, 2.5)))
        by_row = case.model.backend.rows_up_to > CAPACITY
        self.prefix = PrefixCache(case.model.config, max_bytes=largest, chunk=8, by_row=by_row)
        self.budget.may_evict(self.prefix)
        self.session = Session(case.model, num_slots=SLOTS, capacity=CAPACITY, chunk=8, memory=self.budget)
        self.asked: dict[int, Request] = {}
        self.found: dict[int, tuple[list[int], list[float]]] = {}
        self.ended: set[int] = set()

    def admit(self) -> None:
        prompt = self.rng.choice(prompts(6, seed=self.rng.randrange(2)))
        sampled = self.rng.random() < 0.4
        sampling = Sampling(do_sample=True, temperature=0.9) if sampled else Sampling()
        drafter = self.rng.choice(self.case.drafters[: 1 if sampled else None])
        stop = StopRule(end_tokens=frozenset([self.rng.choice([5, 17, 60])])) if self.rng.random() < 0.5 else StopRule()
        request = Request(
            *(prompt, self.rng.randint(1, CAPACITY - len(prompt)), drafter, sampling, stop),
            seed=self.rng.randrange(3),
            logprobs=True,
            prefix=self.prefix.salted() if self.rng.random() < 0.5 else None,
        )
        number = self.session.admit(request)
        self.asked[number], self.found[number] = request, ([], [])

    def cancel(self) -> None:
        running = [number for number in self.asked if number not in self.ended]
        if running:
            number = self.rng.choice(running)
            self.session.cancel(number)
            self.ended.add(number)

    def fork(self) -> None:
        """Greedily a fork writes what its source writes; one that draws goes on with the same numbers."""
        ready = [s for s in self.session._live.values() if not s.pieces]
        if not ready:
            return
        source = self.rng.choice(ready).id
        copied = self.case.model.blocks.num_copied
        try:
            number = self.session.fork(source)
        except BusyError:
            return
        assert self.case.model.blocks.num_copied == copied
        self.asked[number] = self.asked[source]
        self.found[number] = tuple(list(part) for part in self.found[source])  # type: ignore[assignment]

    def step(self) -> None:
        for emitted in self.session.step():
            number = emitted.request_id
            assert emitted.error is None, emitted.error
            assert number not in self.ended
            ids, logprobs = self.found[number]
            ids += emitted.tokens
            logprobs += emitted.logprobs or ()
            if emitted.finish_reason:
                self.ended.add(number)
                self.check(number)
        assert self.budget.taken_bytes <= (self.budget.limit_bytes or 0)

    def check(self, number: int) -> None:
        wanted = self.case.alone(self.asked[number])
        assert tuple(map(tuple, self.found[number])) == wanted

    def run(self) -> None:
        for _ in range(self.rng.randint(10, 40)):
            self.rng.choices([self.admit, self.cancel, self.fork, self.step], [4, 1, 1, 8])[0]()
        while not self.session.is_idle:
            self.step()
        assert self.ended == set(self.asked)
        self.prefix.evict(1 << 40)
        assert self.budget.taken_bytes == 0


def run_all(case: Case, seeds: range) -> None:
    preempted = copied = evicted = 0
    for seed in seeds:
        schedule = Schedule(case, seed)
        schedule.run()
        preempted += schedule.session.num_preemptions
        evicted += schedule.prefix.num_evicted
        copied = case.model.blocks.num_copied
    assert preempted > len(seeds) // 4, "memory ended often enough"
    assert copied > 0
    assert evicted > 0


def test_some_schedules(case: Case) -> None:
    run_all(case, range(0, SCHEDULES, SCHEDULES // 5))


@pytest.mark.slow
def test_all_schedules(case: Case) -> None:
    run_all(case, range(SCHEDULES))

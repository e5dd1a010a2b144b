"""Behind a cached prompt every method answers, and guesses, as if it had read the prompt itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import vivace
from tests.every_method import QUICK, few_draw, load_for, make_model, not_quick_on_pytorch
from vivace.decode.plain import NoDrafts
from vivace.decode.prefix import CHUNK as CHUNK_OF_ENGINES
from vivace.decode.prefix import PrefixCache
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.engine import Engine, Options
from vivace.methods.table import METHODS
from vivace.serve.app import Server
from vivace.serve.config import ServeConfig

CHUNK = 24
PROMPT = "the quick fox and bob the aka fox the quick fox and bob the aka fox the quick fox and bob"
LONGER = PROMPT + " and aka the fox"
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "seed": 11}
DTYPES = ("float32", "bfloat16")
COUNTED = ("num_spec_steps", "num_draft_tokens", "accepted_per_position", "drafted_per_position", "exit_layers")


@dataclass(frozen=True)
class Answer:
    """What can be seen of one, whatever was cached."""

    tokens: tuple[int, ...]
    guesses: tuple[tuple[int, ...], ...]
    counts: tuple[object, ...]


@dataclass
class Reader:
    """An engine with a cache of prompts, whose sessions end with their requests."""

    engine: Engine
    prefix: PrefixCache

    def request(self, prompt: str, method: str, *, uses_cache: bool, shows: bool, **options: Any) -> Request:
        fields = {"max_new_tokens": 10, "ignore_eos": True, "logprobs": False, "raw": True, **options}
        made = self.engine.request(prompt, Options.of({"method": method, **fields}))
        return replace(made, shows_guesses=shows, prefix=self.prefix.salted(None) if uses_cache else None)

    def answer(self, request: Request) -> tuple[Answer, int]:
        """An answer, and how many prompt tokens were cached."""
        session = Session(self.engine.model, num_slots=1, capacity=160, chunk=CHUNK, steps_per_call=3)
        session.admit(request)
        emitted = list(session.drain())
        stats = emitted[-1].stats
        tokens = tuple(token for e in emitted for token in e.tokens)
        guesses = tuple(each for e in emitted for each in e.guesses or ())
        counts = () if stats.method == "auto" else tuple(getattr(stats, name) for name in COUNTED)
        return Answer(tokens, guesses if counts else (), counts), stats.num_cached_tokens

    def prime(self, prompt: str, drafter: str | None) -> None:
        """Let somebody send a prompt, by a method or without any drafter."""
        made = self.request(prompt, drafter or "plain", uses_cache=True, shows=False, max_new_tokens=1)
        self.answer(made if drafter else replace(made, drafter=NoDrafts()))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefix")


@pytest.fixture(params=DTYPES)
def reader(request: pytest.FixtureRequest, place: Path) -> Callable[[str], Reader]:
    """Of a method's model; bfloat16 runs on native kernels where there are some."""

    def get(method: str) -> Reader:
        engine = load_for(place, method, dtype=request.param)
        return Reader(engine, PrefixCache(engine.model.config, chunk=CHUNK, max_bytes=1 << 24))

    return get


@not_quick_on_pytorch("reader")
@few_draw("kind", "sampled")
@pytest.mark.parametrize(
    ("reader", "kind"),
    [("bfloat16", "greedy"), *((dtype, kind) for dtype in DTYPES for kind in ("greedy, guesses shown", "sampled"))],
    indirect=["reader"],
)
@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_without_a_cache(reader: Callable[[str], Reader], method: str, kind: str) -> None:
    """The whole prompt, or its first chunks, were sent before by somebody who drafts nothing or by this method."""
    if method == "auto" and kind == "sampled":
        pytest.skip("whether auto draws guesses follows the clock; a server decodes by lookup where a seed is given")
    fields: dict[str, Any] = {"shows": kind != "greedy", **(SAMPLED if kind == "sampled" else GREEDY)}
    made = reader(method)
    asked = made.request(PROMPT, method, uses_cache=False, **fields)
    wanted, known = made.answer(asked)
    assert known == 0
    for other, drafter in ((PROMPT, None), (LONGER, None), (LONGER, method)):
        made.prefix = PrefixCache(made.engine.model.config, chunk=CHUNK, max_bytes=1 << 24)
        made.prime(other, drafter)
        found, known = made.answer(made.request(PROMPT, method, uses_cache=True, **fields))
        assert known == (len(asked.tokens) - 1 if other == PROMPT else 3 * CHUNK)
        assert found == wanted
    _, known = made.answer(made.request(PROMPT, method, uses_cache=True, **fields))
    assert known == len(asked.tokens) - 1, "what was read behind the first chunks is kept as well"


def test_what_is_read_behind_a_cached_chunk_is_kept_with_its_residuals(reader: Callable[[str], Reader]) -> None:
    """A prompt is completed by one request and used by a third, which begins from residuals of both."""
    made = reader("eagle")
    wanted, _ = made.answer(made.request(LONGER, "eagle", uses_cache=False, shows=True, **GREEDY))
    for prompt in (PROMPT, LONGER):
        made.prime(prompt, None)
    asked = made.request(LONGER, "eagle", uses_cache=True, shows=True, **GREEDY)
    assert made.answer(asked) == (wanted, len(asked.tokens) - 1)


# From Python: vivace.load(..., prefix_cache=...)


def long_prompts(engine: Engine) -> tuple[str, str]:
    """Two of more than a chunk that begin alike, and differ behind it."""
    prompt = PROMPT
    while len(engine.tokenizer.encode(prompt)) < CHUNK_OF_ENGINES + 30:
        prompt += " " + PROMPT
    return prompt, prompt + " aka"


DRAWS_GUESSES = ("multirate", "eagle", "draft")
"""Methods whose sampled texts would show a drafter that knows less."""
OF_OWN_KIND = (*QUICK, "auto", "calm", "draft", "foresight", "lookup", "mod", "uno")
"""Methods that keep something else of a prompt than the others do, or nothing at all."""


@pytest.mark.slow_where(lambda method, kind: method not in OF_OWN_KIND)
@pytest.mark.parametrize(
    ("method", "kind"), [*((name, "greedy") for name in METHODS), *((name, "sampled") for name in DRAWS_GUESSES)]
)
def test_calls_of_an_engine_share_what_was_read(place: Path, method: str, kind: str) -> None:
    free, engine = (load_for(place, method, kernels="torch", prefix_cache=size) for size in (None, "16MiB"))
    short, longer = long_prompts(free)
    fields = {"method": method, "max_new_tokens": 6, "ignore_eos": True, "raw": True, "logprobs": True}
    fields |= SAMPLED if kind == "sampled" else GREEDY
    length = len(free.tokenizer.encode(short))
    wanted = {prompt: free.generate(prompt, **fields)[0] for prompt in (short, longer)}
    streamed = list(engine.stream(short, **fields))[-1].result
    assert streamed is not None
    found = [streamed, *engine.generate(short, **fields), *engine.generate(longer, **fields)]
    assert [one.stats.num_cached_tokens for one in found] == [0, length - 1, CHUNK_OF_ENGINES]
    for one, prompt in zip(found, (short, short, longer), strict=True):
        assert (one.token_ids, one.logprobs) == (wanted[prompt].token_ids, wanted[prompt].logprobs)
        if method != "auto":
            counts = [[getattr(stats, name) for name in COUNTED] for stats in (one.stats, wanted[prompt].stats)]
            assert counts[0] == counts[1], "and its guesses are as good"


def test_bits_of_padded_passes_are_kept_apart(place: Path) -> None:
    engine = vivace.load(make_model(place, "plain"), prefix_cache="16MiB")
    prompt, fields = long_prompts(engine)[0], {"method": "plain", "max_new_tokens": 2, "raw": True}
    known = [
        engine.generate(prompt, exact=is_exact, **fields)[0].stats.num_cached_tokens
        for is_exact in (False, True, True, False)
    ]
    length = len(engine.tokenizer.encode(prompt))
    assert known == [0, 0, length - 1, length - 1]


def test_cached_prompts_give_way_to_texts(place: Path) -> None:
    folder = make_model(place, "plain")
    free = vivace.load(folder, kernels="torch")
    block = free.model.blocks.block_bytes
    engine = vivace.load(folder, kernels="torch", memory=free.memory.held_bytes + 8 * block, prefix_cache="1GiB")
    for first in range(12):
        prompt = f"{first} " + long_prompts(engine)[0]
        found = engine.generate(prompt, method="plain", max_new_tokens=1, raw=True)
        assert found[0].token_ids == free.generate(prompt, method="plain", max_new_tokens=1, raw=True)[0].token_ids
    assert engine.prefix_cache is not None
    assert 0 < engine.prefix_cache.nbytes <= 8 * block
    assert engine.prefix_cache.num_evicted > 0
    assert engine.prefix_cache.num_queries > engine.prefix_cache.num_hits == 0


def test_a_server_shares_the_cache_of_its_engine(place: Path) -> None:
    engine = vivace.load(make_model(place, "plain"), prefix_cache="1MiB")
    server = Server(engine, ServeConfig(prefix_cache_bytes=0))
    assert server.worker.prefix is engine.prefix_cache
    own = Server(vivace.load(engine.folder), ServeConfig())
    assert own.worker.prefix is not None
    assert own.worker.prefix.max_bytes == 256 << 20
    assert own.engine.prefix_cache is None, "calls of the engine itself read their prompts"

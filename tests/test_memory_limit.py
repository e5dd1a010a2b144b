"""``vivace.load(..., memory=...)``: weights, drafters and texts share one limit."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest

import vivace
from tests.every_method import LAYERS, load_for, make_model, not_quick_on_pytorch
from tests.tiny_checkpoints import make_checkpoint
from vivace.core.cache import KVCache
from vivace.core.footprint import held_bytes
from vivace.decode.memory import text_bytes
from vivace.decode.plain import NoDrafts
from vivace.decode.shallow import DraftPlan
from vivace.engine import Engine, Options
from vivace.errors import BusyError, MemoryLimitError
from vivace.methods.multistream.config import StreamPlan
from vivace.methods.table import METHODS
from vivace.tuning import planned

PROMPTS = ["abc", "the quick brown fox", "x", "aaaa bbbb aaaa", "fox the aka", "bob"]
LONG = {"max_new_tokens": 40, "method": "plain", "ignore_eos": True, "raw": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    return make_model(folder, "eagle")


@pytest.fixture(scope="module")
def free(checkpoint: Path) -> Engine:
    """Without a limit."""
    return vivace.load(checkpoint)


def limited(checkpoint: Path, free: Engine, texts: float, **more: object) -> Engine:
    """With room for so many texts of 50 tokens by plain decoding."""
    memory = weights_of(free) + int(texts * _text(free))
    return vivace.load(checkpoint, memory=memory, **more)  # type: ignore[arg-type]


def weights_of(engine: Engine) -> int:
    return held_bytes(engine.model)[0]


def _text(free: Engine) -> int:
    return text_bytes(free.model, NoDrafts(), 50)


def test_many_prompts_run_in_turn(checkpoint: Path, free: Engine) -> None:
    engine = limited(checkpoint, free, 2.5)
    assert [r.token_ids for r in engine.generate(PROMPTS, **LONG)] == [
        r.token_ids for r in free.generate(PROMPTS, **LONG)
    ]
    assert engine.memory.taken_bytes == 0


def test_a_stream_beside_keeps_its_room(checkpoint: Path, free: Engine) -> None:
    wanted = free.generate(PROMPTS, **LONG)
    engine = limited(checkpoint, free, 2.5)
    stream = engine.stream(PROMPTS[0], **LONG)
    first = next(stream).token_ids
    beside = engine.generate(PROMPTS, **LONG)
    assert [r.token_ids for r in beside] == [r.token_ids for r in wanted]
    assert first + sum((chunk.token_ids for chunk in stream), ()) == wanted[0].token_ids


def test_a_stream_that_has_all_the_room_is_told_of(checkpoint: Path, free: Engine) -> None:
    engine = limited(checkpoint, free, 1.2)
    stream = engine.stream(PROMPTS[0], **LONG)
    next(stream)
    with pytest.raises(BusyError, match="other texts have"):
        engine.generate(PROMPTS[1], **LONG)
    stream.close()
    assert engine.generate(PROMPTS[1], **LONG)[0].finish_reason == "length"


def test_a_text_that_can_never_fit_is_refused(checkpoint: Path, free: Engine) -> None:
    engine = limited(checkpoint, free, 1)
    with pytest.raises(
        MemoryLimitError, match=r"a text of 40\d tokens takes .* beside weights .* ask for fewer"
    ) as told:
        engine.generate("abc", **{**LONG, "max_new_tokens": 400})
    assert told.value.exit_code == 2
    assert "\n" not in str(told.value)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vivace.engine.execution.load_decoder", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(MemoryLimitError, match=r"20.0 KiB of memory are too few: the model takes .*; give at least"):
        vivace.load(checkpoint, memory="20KiB")


def test_a_draft_model_that_does_not_fit_is_refused(checkpoint: Path, free: Engine, tmp_path: Path) -> None:
    large = make_checkpoint(tmp_path / "large", layers=4 * LAYERS, context=512)
    with pytest.raises(MemoryLimitError, match=r"the draft model takes .* beside weights .*; give at least"):
        limited(checkpoint, free, 2, draft_model=large)
    engine = vivace.load(checkpoint, draft_model=large)
    assert engine.memory.held_bytes > 3 * weights_of(free)
    assert "the draft model" in engine.memory.report


def test_weights_of_a_method_count_and_may_be_too_much(checkpoint: Path, free: Engine) -> None:
    engine = vivace.load(checkpoint)
    before = engine.memory.held_bytes
    engine.generate("abc", **{**LONG, "method": "eagle"})
    taken = engine.memory.held_bytes - before
    assert "weights of eagle" in engine.memory.report
    assert taken >= sum(w.nbytes for w in engine.methods.trained("eagle")[0].parameters())
    small = vivace.load(checkpoint, memory=before + taken // 4)
    with pytest.raises(MemoryLimitError, match="weights of eagle takes"):
        small.generate("abc", **{**LONG, "method": "eagle", "max_new_tokens": 1})
    assert small.memory.held_bytes == before


@pytest.mark.parametrize("weights", ["bf16", "q4"])
def test_copies_of_layers_count(folder: Path, library: object, weights: str) -> None:
    engine = vivace.load(make_model(folder, "multirate"), dtype="bfloat16")
    if engine.model.backend.chain is None:
        pytest.skip("no native kernels run here")
    engine.methods.drafter("multirate")
    before = engine.memory.held_bytes
    planned(engine, DraftPlan((1, 1), weights=weights)).methods.drafter("multirate")
    gc.collect()
    grown = engine.memory.held_bytes - before
    assert (grown > 10_000) == (weights != "bf16"), "copies stay for whoever asks next"
    planned(engine, DraftPlan((1,), weights=weights)).methods.drafter("multirate")
    assert engine.memory.held_bytes - before == grown


def test_what_a_drafter_alone_holds_goes_with_it(folder: Path, library: object) -> None:
    engine = vivace.load(make_model(folder, "multistream"), dtype="bfloat16")
    if engine.model.backend.chain is None:
        pytest.skip("no native kernels run here")
    engine.methods.drafter("multistream")
    before = engine.memory.held_bytes
    other = planned(engine, StreamPlan((1, 1), "kept", weights="q4")).methods.drafter("multistream")
    assert engine.memory.held_bytes > before
    del other
    gc.collect()
    assert engine.memory.held_bytes == before


@not_quick_on_pytorch("dtype")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_text_takes_more_than_it_was_promised(
    folder: Path, method: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cache that a session opens, its drafters' too, at the furthest entry that was written."""
    furthest: dict[KVCache, int] = {}
    reserve = KVCache.reserve

    def note(self: KVCache, slots: Sequence[int], entries: Sequence[int]) -> None:
        furthest[self] = max(furthest.get(self, 0), 1 + max(entries, default=-1))
        reserve(self, slots, entries)

    monkeypatch.setattr(KVCache, "reserve", note)
    engine = load_for(folder, method, dtype=dtype)
    engine.generate(PROMPTS[1], **{**LONG, "method": method, "logprobs": False})
    request = engine.request(PROMPTS[1], Options.of({**LONG, "method": method}))
    promised = text_bytes(engine.model, request.drafter, len(request.tokens) + request.max_new_tokens)
    assert 0 < sum(cache.slot_bytes(entries) for cache, entries in furthest.items()) <= promised
    assert engine.memory.taken_bytes == 0


def test_a_store_leaves_room_for_what_comes_beside(tmp_path: Path) -> None:
    from vivace.storage.budget import plan_memory
    from vivace.storage.convert import write_store
    from vivace.storage.loading import bytes_beside
    from vivace.storage.store import open_store

    store = write_store(make_model(tmp_path, "eagle"), tmp_path / "store", dtype="float32").folder
    small = make_checkpoint(tmp_path / "small", layers=1, context=512)
    needed = plan_memory(open_store(store), None, 512).num_bytes + bytes_beside(store, None, [])
    alone = vivace.load(store, memory=needed, kernels="torch", reader="buffered")
    beside = vivace.load(store, memory=needed, draft_model=small, kernels="torch", reader="buffered")
    for engine in (alone, beside):
        assert engine.storage is not None
        assert engine.memory.held_bytes <= needed - engine.storage.plan.cache_bytes
    assert len(beside.storage.plan.streamed) > len(alone.storage.plan.streamed) == 0  # type: ignore[union-attr]
    few: dict[str, object] = {**LONG, "max_new_tokens": 12}
    wanted = alone.generate(PROMPTS[:2], **few)
    assert [r.token_ids for r in beside.generate(PROMPTS[:2], **{**few, "method": "draft"})] == [
        r.token_ids for r in wanted
    ]
    for engine in (alone, beside):
        engine.storage.close()  # type: ignore[union-attr]

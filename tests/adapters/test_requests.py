"""What a request gets that names a LoRA: by itself, beside others, by every method, and behind prompts read before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
from tests.adapters.loras import make_lora
from tests.every_method import LAYERS, OF_MIXTURES, load_for, make_model
from tests.tiny_checkpoints import make_checkpoint
from vivace.conversation import Conversation
from vivace.engine import Engine
from vivace.errors import ConfigError, MismatchError, NotFoundError
from vivace.methods.table import METHODS

PROMPTS = ["abc", "the quick brown fox the quick", "x", "aaaa bbbb aaaa", "bob aka bob aka", "fox"]
WORN = ["sql", None, "small", "sql", "some", None]
LOSSLESS = [name for name, spec in METHODS.items() if spec.lossless]
HOT: dict[str, Any] = {"temperature": 1.3, "seed": 5}
Texts = list[tuple[tuple[int, ...], tuple[float, ...] | None]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("adapted"), context=256, layers=4)


@pytest.fixture(scope="module")
def loras(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("loras")
    return {
        "sql": make_lora(place / "sql", base, seed=1, rank=8),
        "small": make_lora(place / "small", base, seed=2, rank=3),
        "some": make_lora(place / "some", base, seed=3, ranks={"q": 4, "v": 2, "down": 5}),
    }


@pytest.fixture(scope="module", params=["torch", "native", "int8", "float32"])
def engine(request: pytest.FixtureRequest, base: Path, loras: dict[str, Path]) -> Engine:
    """Every way in which rows go up, where this processor has it."""
    how: dict[str, Any] = {
        "torch": {"kernels": "torch", "dtype": "bfloat16"},
        "native": {"dtype": "bfloat16"},
        "int8": {"weights": "int8"},
        "float32": {"dtype": "float32"},
    }[request.param]
    return vivace.load(base, adapters=loras, **how)


def texts(engine: Engine, prompts: list[str], **settings: Any) -> Texts:
    given = {"max_new_tokens": 12, "method": "plain", "logprobs": True} | settings
    return [(r.token_ids, r.logprobs) for r in engine.generate(prompts, **given)]


@pytest.mark.parametrize("sampling", [{}, HOT], ids=["greedy", "sampled"])
def test_one_batch_gives_each_what_it_has_alone(engine: Engine, base: Path, sampling: dict[str, Any]) -> None:
    """Three LoRAs of different shapes and the base; the base's rows are those of an engine that knows of none."""
    together = texts(engine, PROMPTS, adapter=WORN, **sampling)
    two_at_once = texts(engine, PROMPTS, adapter=WORN, batch_size=2, **sampling)
    for place, (prompt, name) in enumerate(zip(PROMPTS, WORN, strict=True)):
        [alone] = texts(engine, [prompt], adapter=name, **sampling)
        assert together[place] == alone
        assert two_at_once[place] == alone
    if not sampling:
        assert len({texts(engine, ["abc"], adapter=name)[0][0] for name in (None, "sql", "small", "some")}) == 4
    bare = vivace.load(
        base,
        dtype=str(engine.model.dtype).removeprefix("torch."),
        weights=engine.weights,
        kernels="torch" if engine.kernels.body is None else "auto",
    )
    places = [place for place, name in enumerate(WORN) if name is None]
    assert texts(bare, [PROMPTS[p] for p in places], **sampling) == [together[p] for p in places]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("method", LOSSLESS)
def test_lossless_methods_write_what_the_adapted_model_writes(models: Path, method: str) -> None:
    """Greedy, alone and in a batch in which others wear something else or nothing."""
    folder = make_model(models, method)
    name = "mixture" if method in OF_MIXTURES else "dense"
    for number in (1, 2):
        if not (models / f"{name}-{number}").exists():
            make_lora(models / f"{name}-{number}", folder, seed=number)
    worn = {"a": models / f"{name}-1", "b": models / f"{name}-2"}
    engine = load_for(models, method, dtype="bfloat16", adapters=worn)
    names: list[str | None] = ["a", None, "b", "a"]
    prompts = PROMPTS[1:5]
    expected = texts(engine, prompts, adapter=names, max_new_tokens=24)
    assert texts(engine, prompts, adapter=names, max_new_tokens=24, method=method) == expected
    assert texts(engine, prompts[:1], adapter="a", max_new_tokens=24, method=method) == expected[:1]
    assert LAYERS > 2


def test_an_adapter_without_effect_is_the_base(base: Path, tmp_path: Path) -> None:
    """B = 0: what an untrained LoRA of PEFT is."""
    make_lora(tmp_path / "zero", base, size=0.0)
    for kernels in ("torch", "auto"):
        engine = vivace.load(base, kernels=kernels, dtype="float32", adapters={"zero": tmp_path / "zero"})
        assert texts(engine, PROMPTS, adapter="zero") == texts(engine, PROMPTS)


def test_prompts_are_shared_within_an_adapter_only(base: Path, loras: dict[str, Path], tmp_path: Path) -> None:
    """In memory and on disk; a prompt of several chunks, and one that goes on where an answer ended."""
    long = "the quick brown fox " * 6
    fresh = vivace.load(base, adapters=loras, dtype="bfloat16")
    expected = {name: texts(fresh, [long], adapter=name) for name in (None, "sql", "small")}
    how: dict[str, Any] = {"dtype": "bfloat16", "adapters": loras, "prompt_cache": tmp_path / "kept"}
    engine = vivace.load(base, prefix_cache="16MiB", **how)
    for again in (False, True):
        for name, wanted in expected.items():
            [result] = engine.generate([long], adapter=name, max_new_tokens=12, method="plain", logprobs=True)
            assert [(result.token_ids, result.logprobs)] == wanted, name
            assert (result.stats.num_cached_tokens > 0) == again
    later = vivace.load(base, **how)
    for name, wanted in expected.items():
        [result] = later.generate([long], adapter=name, max_new_tokens=12, method="plain", logprobs=True)
        assert [(result.token_ids, result.logprobs)] == wanted, name
        assert result.stats.num_cached_tokens > 0


def test_a_conversation_wears_one(base: Path, loras: dict[str, Path]) -> None:
    """Turns of one are not read for another."""
    engine = vivace.load(base, adapters=loras, dtype="bfloat16", prefix_cache="16MiB")
    answers = {}
    for name in ("sql", None, "sql"):
        talk = Conversation(engine, adapter=name, max_new_tokens=10, method="plain")
        found = [talk.say("the quick").text, talk.say("brown fox").text]
        assert answers.setdefault(name, found) == found
    assert answers["sql"] != answers[None]


def test_a_text_that_lost_its_slot_goes_on_as_it_would_have(base: Path, loras: dict[str, Path]) -> None:
    """Where memory ends a request is read again later, with what it wrote: the bits are the same."""
    settings: dict[str, Any] = {"adapter": ["sql", "small"] * 4, "max_new_tokens": 200, "ignore_eos": True}
    prompts = [f"{word} the quick brown fox" for word in "abcdefgh"]
    much = vivace.load(base, adapters=loras, dtype="bfloat16")
    expected = texts(much, prompts, **settings)
    few = vivace.load(base, adapters=loras, dtype="bfloat16", memory=much.memory.held_bytes + (224 << 10))
    found = few.generate(prompts, method="plain", logprobs=True, **settings)
    assert [(result.token_ids, result.logprobs) for result in found] == expected
    assert sum(result.stats.num_preemptions for result in found) > 0


def test_what_cannot_be(base: Path, loras: dict[str, Path], tmp_path: Path) -> None:
    engine = vivace.load(base, adapters=loras)
    with pytest.raises(NotFoundError, match="there is no adapter 'sqm'; did you mean 'sql'"):
        engine.generate("a", adapter="sqm")
    with pytest.raises(NotFoundError, match="none was loaded"):
        vivace.load(base).generate("a", adapter="sql")
    with pytest.raises(ConfigError, match="adapter has 2 names for 1 prompts"):
        engine.generate("a", adapter=["sql", None])
    with pytest.raises(ConfigError, match="adapter must be one name here"):
        list(engine.stream("a", adapter=["sql"]))
    with pytest.raises(ConfigError, match="adapter_memory has no effect without a LoRA"):
        vivace.load(base, adapter_memory="1MiB")
    other = make_checkpoint(tmp_path / "other", seed=7, layers=4)
    with pytest.raises(MismatchError, match="was trained on base"):
        vivace.load(other, adapters=loras)


def test_logits_of_an_adapted_model(engine: Engine) -> None:
    ids = torch.arange(4, 40)[None]
    assert torch.equal(engine.logits(ids), engine.logits(ids, adapter=None))
    assert not torch.allclose(engine.logits(ids), engine.logits(ids, adapter="sql"), atol=0.1)


def test_experts_take_no_lora(models: Path) -> None:
    """A LoRA of the dense model that a mixture was made of fits its attention, and its experts take none."""
    folder = make_model(models, "foresight")
    dense = make_checkpoint(models / "few", layers=LAYERS, context=512)
    lora = make_lora(models / "of-the-dense", dense, says_base=False)
    with pytest.raises(MismatchError, match=r"layers.0.mlp.\w+, which this model does not have"):
        vivace.load(folder, adapters={"it": lora})

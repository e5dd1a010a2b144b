"""Memory is counted per owner: what methods share is counted once, and what one of them needs is its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn

from vivace.cli.systems import holdings
from vivace.core.footprint import held_bytes
from vivace.engine import SHIPPED, Engine, load
from vivace.evaluate.benchmark import BenchmarkPrompt
from vivace.evaluate.memory import Holdings
from vivace.evaluate.systems import MethodSystem

PROMPT = "Describe: name[The Eagle], food[Chinese], area[riverside]"
ADAPTERS = SHIPPED / "adapters"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load(SHIPPED)


def held(engine: Engine, method: str, max_new_tokens: int = 16) -> Holdings:
    question = BenchmarkPrompt(PROMPT, tuple(engine.tokenizer.encode_prompt(PROMPT)))
    return holdings(engine, MethodSystem(method, engine, max_new_tokens), [question])


def tensors_of(folder: Path) -> int:
    """Bytes of the weights in a folder, without the header of the file."""
    from vivace.checkpoint.adapters import load_adapter

    return sum(tensor.nbytes for tensor in load_adapter(folder)[1].values())


def test_what_owners_share_is_counted_for_the_first() -> None:
    shared, own = torch.zeros(100), torch.zeros(7)
    assert held_bytes([shared], {"both": (shared, own)}) == (400, 28)
    assert held_bytes((shared, own), [shared]) == (428, 0)


def test_a_view_holds_all_of_its_tensor_and_two_views_hold_it_once() -> None:
    whole = torch.zeros(10, 10)
    assert held_bytes([whole[0], whole[1:]], whole) == (400, 0)
    assert held_bytes(whole.numpy()[3], whole) == (400, 0)


def test_modules_closures_and_bound_methods_are_looked_into() -> None:
    layer = nn.Linear(4, 4, bias=False)

    def call() -> Tensor:
        return layer.weight

    assert held_bytes(call) == held_bytes(layer.forward) == held_bytes(layer) == (64,)


def test_what_weak_keys_lead_to_belongs_to_whoever_has_the_key() -> None:
    """Copies of layers lie in the model, keyed by the drafter that they were made for."""
    torch_key, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    copies = WeakKeyDictionary({torch_key: torch.zeros(50), other: torch.zeros(1000)})
    assert held_bytes([copies, torch.zeros(2)], torch_key) == (8, 200 + 4)


def test_every_method_of_a_model_has_its_weights_and_cache_and_a_drafter_of_its_own(engine: Engine) -> None:
    """Whatever ran before: copies that multirate left in the model are multirate's when Medusa is counted."""
    plain = held(engine, "plain")
    assert plain.drafter == 0
    assert plain.weights == pytest.approx(engine.num_bytes, rel=0.01)
    for method in ("multirate", "medusa"):
        found = held(engine, method)
        assert (found.weights, found.cache) == (plain.weights, plain.cache)
    assert held(engine, "medusa").drafter == pytest.approx(tensors_of(ADAPTERS / "medusa"), rel=0.01)
    assert held(engine, "multirate").drafter > 1.5 * tensors_of(ADAPTERS / "multirate"), "its copies of layers in q4"
    assert held(engine, "plain") == plain


def test_a_draft_models_weights_and_cache_are_the_drafters(engine: Engine) -> None:
    weights = (SHIPPED / "draft" / "model.safetensors").stat().st_size
    short, long = held(engine, "draft", 16), held(engine, "draft", 256)
    assert weights * 0.99 < short.drafter < weights * 1.2
    assert long.drafter > short.drafter, "its cache grows with the answer"
    assert long.cache > short.cache == held(engine, "plain").cache


@dataclass
class Slotted:
    """Of another package: not looked into."""

    tensor: Tensor = field(default_factory=lambda: torch.zeros(1))


def test_strangers_are_left_alone() -> None:
    assert held_bytes(Slotted(), "text", 3, None, int) == (0, 0, 0, 0, 0)

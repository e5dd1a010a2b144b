"""A store of a mixture under a budget, opened as users do: every method says what the resident model says."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.checkpoint.load import load_config
from vivace.checkpoint.upcycle import upcycle_checkpoint
from vivace.errors import MismatchError
from vivace.storage.convert import write_store
from vivace.storage.experts.foresight.config import ForesightConfig, ForesightPlan
from vivace.storage.experts.foresight.weights import Foresight


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    return upcycle_checkpoint(make_checkpoint(folder / "dense", layers=6), folder / "moe", num_experts=8, noise=0.5)


def make_foresight(folder: Path, mixture: Path) -> Path:
    """Weights that guess at random."""
    torch.manual_seed(4)
    config = ForesightConfig(rank=2, bottleneck=8, forecast=6)
    made = Foresight(config, load_config(mixture))
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    tensors = {name: value.detach() for name, value in made.state_dict().items()}
    save_adapter(folder, "foresight", base_hash(mixture), asdict(ForesightPlan(3, (1,))), asdict(config), tensors)
    return folder


def test_every_method_says_what_the_resident_model_says(mixture: Path, tmp_path: Path) -> None:
    store = write_store(mixture, tmp_path / "store").folder
    ahead = make_foresight(tmp_path / "ahead", mixture)
    resident = vivace.load(mixture, kernels="torch").generate("aka", method="plain", max_new_tokens=12, logprobs=True)[
        0
    ]
    planned = vivace.load(store, memory="100MiB").storage
    assert planned is not None
    least = planned.plan.num_bytes
    engine = vivace.load(store, memory=int(0.6 * least), adapters=ahead)
    assert engine.storage is not None
    assert engine.storage.experts is not None
    cache = engine.storage.experts
    assert cache.num_slots < 48
    for method in ("plain", "foresight", "lookup"):
        found = engine.generate("aka", method=method, max_new_tokens=12, logprobs=True)[0]
        assert (found.token_ids, found.logprobs) == (resident.token_ids, resident.logprobs), method
        assert (cache.counts.prefetched + cache.counts.late > 0) == (method != "plain")


def test_an_adapter_of_another_mixture_is_refused(mixture: Path, tmp_path: Path) -> None:
    store = write_store(mixture, tmp_path / "store").folder
    other = upcycle_checkpoint(mixture.parent / "dense", tmp_path / "other", num_experts=8, seed=9)
    with pytest.raises(MismatchError, match="was trained on base"):
        vivace.load(store, adapters=make_foresight(tmp_path / "ahead", other))

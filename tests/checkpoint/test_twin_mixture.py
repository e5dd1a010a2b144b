"""The wide twin of a mixture of experts, and of what foresees which of them will be needed."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.parity.families import make
from vivace.checkpoint.adapters import base_hash, load_adapter, save_adapter
from vivace.checkpoint.load import load_decoder
from vivace.checkpoint.widen import widen_checkpoint
from vivace.core.step import Step
from vivace.methods.composition import twins
from vivace.storage.experts.foresight.config import ForesightConfig, ForesightPlan
from vivace.storage.experts.foresight.weights import Foresight, of_mean_square_one

TOKENS = torch.tensor([5, 9, 41, 7, 7, 80])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_it_says_the_same_and_so_does_its_foresight(tmp_path: Path, family: str) -> None:
    base = tmp_path / "base"
    make(family).save_pretrained(base)
    small = load_decoder(base)
    torch.manual_seed(3)
    seen = Foresight(ForesightConfig(rank=4, bottleneck=8, forecast=6, leads=(1,)), small.config)
    tensors = {name: value + 0.3 * torch.randn_like(value) for name, value in seen.tensors().items()}
    folder = base / "adapters" / "foresight"
    save_adapter(folder, "foresight", base_hash(base), asdict(ForesightPlan()), asdict(seen.config), tensors)
    widen_checkpoint(base, tmp_path / "wide", 2, twins())
    wide = load_decoder(tmp_path / "wide")
    assert wide.config.moe is not None
    assert small.config.moe is not None
    assert wide.config.moe.expert_width == 2 * small.config.moe.expert_width
    assert wide.config.moe.num_experts == small.config.moe.num_experts

    found = []
    for model, place in ((small, folder), (wide, tmp_path / "wide" / "adapters" / "foresight")):
        foresight = Foresight(seen.config, model.config)
        foresight.load_state_dict(load_adapter(place)[1])
        step = Step.dense(1, len(TOKENS))
        with torch.no_grad():
            h = model.embed(TOKENS, step)
            which = torch.zeros(len(TOKENS), dtype=torch.int64)
            p = model.run(h, replace(step, deltas=(foresight.deltas(which),)), stop=1)
            routed = [
                of_mean_square_one(residual, model.config) @ foresight.router(model.layers[index], lead).T  # type: ignore[arg-type]
                for index in range(model.config.num_layers)
                if model.config.is_moe(index)
                for lead, residual in ((None, foresight.at(index, p, h)), (1, h))
            ]
            out = model.run(h, step)
            assert foresight.forecast is not None
            found.append((model.head(out), torch.stack(routed), *foresight.forecast(out, h)))
    for one, twin in zip(*found, strict=True):
        torch.testing.assert_close(twin, one, rtol=1e-4, atol=1e-5)

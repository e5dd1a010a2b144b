"""Reading far above the gate: verified positions only, the same while training and while drafting, and lossless."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vivace
from tests.core.test_bits import prefill
from tests.decode.runs import finish
from tests.decode.tiny_decoders import build, prompts
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import base_hash, load_adapter, save_adapter
from vivace.checkpoint.widen import widen_checkpoint, without_twin
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.core.seams import Draft, Drafter
from vivace.core.step import Step
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.decode.shallow import DraftPlan
from vivace.errors import ConfigError
from vivace.kernels.native import NativeBody
from vivace.methods.composition import twins
from vivace.methods.multirate.config import MultirateConfig
from vivace.methods.multirate.drafter import self_speculation
from vivace.methods.multirate.objective import MultirateLoss, MultirateObjective
from vivace.methods.multirate.reach import copying_layers
from vivace.methods.multirate.residual import Accelerator, dual_forward
from vivace.prompts import packaged_prompts
from vivace.train.data import Rows, TokenBatch
from vivace.train.distillation import FrozenPass

Accelerators = Callable[..., Accelerator]
Models = Callable[[torch.dtype], Decoder]

TEXT = tuple(range(3, 25))


def at_the_gate(model: Decoder, fast: Accelerator, verified: int) -> Tensor:
    """p of the token that follows ``verified`` stored ones, while drafting, (1, E)."""
    cache, _ = prefill(model, {0: list(TEXT[:verified])}, 1)
    draft = Draft.committed_only({0: TEXT[verified : verified + 1]})
    step = Step.of(draft, cache)
    return dual_forward(model, fast, model.embed(draft.tokens, step), step, torch.tensor([0]), None)[1]


@torch.no_grad()
def test_untrained_it_does_nothing(deep: Models, accelerator: Accelerators) -> None:
    model = deep(torch.float32)
    with_reach, without = accelerator(torch.float32, reach=(4, 5)), accelerator(torch.float32)
    assert torch.equal(at_the_gate(model, with_reach, 12), at_the_gate(model, without, 12))


@torch.no_grad()
@pytest.mark.parametrize("verified", [1, 7, 20])
def test_drafting_reads_what_training_read(deep: Models, accelerator: Accelerators, verified: int) -> None:
    """With every last verified position one back, position t of a dense batch is a root after t stored tokens."""
    model, fast = deep(torch.float32), accelerator(torch.float32, noise=0.2, reach=(5, 3))
    objective = MultirateObjective(fast, MultirateLoss(max_lag=1))
    tokens = torch.tensor([TEXT, TEXT[::-1]])
    dense = objective.accelerate(model, tokens, FrozenPass.of(model, tokens)).view(2, len(TEXT), -1)
    torch.testing.assert_close(at_the_gate(model, fast, verified)[0], dense[0, verified], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_nothing_that_is_not_verified_is_read(deep: Models, accelerator: Accelerators) -> None:
    """The last verified position is eight back: what stands in the eight between does not reach the residual."""
    model, fast = deep(torch.float32), accelerator(torch.float32, noise=0.2, reach=(5,))
    reach = next(fast.reaches())
    p = torch.randn(1, 48)
    last = torch.full((1, len(TEXT)), 9)
    seen = []
    for tail in (TEXT[10:], TEXT[:9:-1]):
        step = Step.dense(1, len(TEXT))
        model.run(model.embed(torch.tensor(TEXT[:10] + tail), step), step)
        seen.append(reach.over_text(p.expand(len(TEXT), -1), model, step, last)[17])
    assert torch.equal(*seen)
    assert not torch.equal(seen[0], p[0])
    assert torch.equal(reach.over_text(p.expand(len(TEXT), -1), model, step, torch.full_like(last, -1))[17], p[0])


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2, 1)])
@pytest.mark.parametrize("packed", [False, True])
@torch.inference_mode()
def test_text_is_that_of_plain_decoding(
    accelerator: Accelerators, body: NativeBody, widths: tuple[int, ...], packed: bool
) -> None:
    model = build(torch.bfloat16, num_layers=6, seed=3).requires_grad_(False)
    if packed:
        pack_decoder(model, body)
    fast = accelerator(torch.bfloat16, noise=0.1, reach=(4, 5, 3))
    drafter = self_speculation(model, fast, DraftPlan(widths))

    def answers(which: Drafter, slots: int) -> list[tuple[int, ...]]:
        session = Session(model, num_slots=slots, capacity=64, chunk=8)
        return [result.tokens for result in finish(session, [Request(text, 14, which) for text in prompts(5, seed=2)])]

    assert answers(drafter, 3) == answers(NoDrafts(), 1)


def test_learning_reaches_the_deep_layers(deep: Models, accelerator: Accelerators) -> None:
    """Gradients arrive in query, output and gain, and a few steps lower the loss."""
    model, fast = deep(torch.float32), accelerator(torch.float32, reach=(4,)).requires_grad_(True)
    next(fast.reaches()).start_from(model)
    objective = MultirateObjective(fast, MultirateLoss(max_lag=1))
    tokens = torch.tensor([TEXT, TEXT[::-1]])
    batch = TokenBatch(tokens, torch.arange(len(TEXT)).expand(2, -1) > 3)
    optimiser = torch.optim.Adam(fast.reach.parameters(), 0.002)
    torch.manual_seed(0)
    history = []
    for _ in range(30):
        optimiser.zero_grad()
        total = 0.0
        for part, seen in objective.losses(model, batch):
            part.backward()
            total += seen.get("kl", 0.0)
        optimiser.step()
        history.append(total)
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in fast.reach.parameters())
    assert history[-1] < history[0], history


def test_layers_that_copy_are_found() -> None:
    """In the model that ships, by its own answers to questions over tables."""
    engine = vivace.load(kernels="torch")
    asked = [str(prompt.request) for prompt in packaged_prompts("sql")[:6]]
    said = engine.generate(asked, method="plain", do_sample=False, max_new_tokens=32, logprobs=False)
    batches = Rows(engine.tokenizer, 256).batches([(q, a.text) for q, a in zip(asked, said, strict=True)], 1024)
    found = copying_layers(engine.model, batches, exit_layer=3, count=3)
    assert found == tuple(sorted(found))
    assert {13, 18} <= set(found)
    assert len(copying_layers(engine.model, batches[:1], exit_layer=20, count=9)) == 4


@pytest.mark.parametrize(
    ("reach", "complaint"), [((1, 2, 3, 4), "found \\[1, 2, 3, 4\\]"), ((-1,), "found \\[-1\\]"), ((6,), "beyond")]
)
def test_layers_that_are_not_there_are_refused(deep: Models, reach: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Accelerator(MultirateConfig(exit_layer=3, rank=0, bottleneck=4, reach=reach), deep(torch.float32).config)


def test_the_wide_twin_reaches_as_far(tmp_path: Path) -> None:
    """Same answers, same acceptance: a widened accelerator reads the widened layers."""
    place = make_checkpoint(tmp_path / "small", layers=4)
    engine = vivace.load(place)
    config = MultirateConfig(exit_layer=2, rank=4, bottleneck=8, feedback=True, reach=(3, 2))
    torch.manual_seed(1)
    fast = Accelerator(config, engine.model.config)
    tensors = {name: value + 0.1 * torch.randn_like(value) for name, value in fast.tensors().items()}
    folder = place / "adapters" / "multirate"
    save_adapter(folder, "multirate", base_hash(place), asdict(DraftPlan.chain(3)), asdict(config), tensors)
    widen_checkpoint(place, tmp_path / "wide", 2, twins())
    ours, theirs = (
        vivace.load(path).generate(["aka", "bob"], method="multirate", max_new_tokens=12, do_sample=False)
        for path in (place, tmp_path / "wide")
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.stats.accepted_per_position == other.stats.accepted_per_position
    small, wide = (load_adapter(path / "adapters" / "multirate") for path in (place, tmp_path / "wide"))
    assert wide[0]["config"] == small[0]["config"], "a wider model gets no higher ranks"
    assert wide[1]["up.0"].shape == (1, 2 * small[1]["up.0"].shape[1], 4)
    assert without_twin(place, twins()) == ()
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("multirate", "other"))
    assert without_twin(place, twins()) == ("multirate",)
    widen_checkpoint(place, tmp_path / "bare", 2, twins())
    assert not (tmp_path / "bare" / "adapters").exists()

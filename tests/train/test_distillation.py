"""The frozen pass, the head in parts and the losses of a guess, each against a few lines that anybody can check."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.train.tiny import tiny_decoder
from vivace.core.config import MoeConfig
from vivace.core.draft_head import DraftHead
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.errors import ConfigError
from vivace.kernels.reference import any_order
from vivace.train.distillation import (
    AlignedLoss,
    Cut,
    DistillationLoss,
    FrozenPass,
    divergence,
    head_in_parts,
    slices,
)
from vivace.train.objective import LossPart

TOKENS = torch.randint(0, 400, (3, 10), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def as_in_training() -> Iterator[None]:
    with any_order():
        yield


@torch.no_grad()
def residuals(model: Decoder) -> list[Tensor]:
    """Layer by layer, (B * T, E)."""
    step = Step.dense(*TOKENS.shape)
    found = [model.embed(TOKENS.reshape(-1), step)]
    for layer in model.layers:
        found.append(layer(found[-1], step))
    return found


@pytest.mark.parametrize("depths", [(), (1,), (0, 2, 4), range(5)])
def test_the_frozen_pass_keeps_what_was_asked_for_and_no_graph(depths: tuple[int, ...]) -> None:
    model = tiny_decoder(num_layers=4)
    frozen, expected = FrozenPass.of(model, TOKENS, depths), residuals(model)
    assert set(frozen.residuals) == {0, 4, *depths}
    for depth, h in frozen.residuals.items():
        assert torch.equal(h, expected[depth]), depth
        assert not h.requires_grad
    assert torch.equal(frozen.final, expected[-1])
    assert torch.equal(frozen.embedded, expected[0])
    keys, _ = frozen.step.memory.stored(3)
    assert keys.shape[2] == TOKENS.shape[1], "readers find the keys and values of the whole text"
    rows = torch.tensor([1, 7])
    logits = frozen.logits(DraftHead(model), rows)
    assert not logits.requires_grad
    with torch.no_grad():
        assert torch.equal(logits, model.head(expected[-1][rows]))


@pytest.mark.parametrize("rows", [None, torch.tensor([0, 5, 29])])
def test_what_stands_between_a_layers_halves_is_kept_too(rows: Tensor | None) -> None:
    model = tiny_decoder(num_layers=3, moe=MoeConfig(num_experts=4, top_k=2, expert_width=16, normalise=True))
    frozen = FrozenPass.of(model, TOKENS, attended=(0, 2), rows=rows)
    expected, step = residuals(model), Step.dense(*TOKENS.shape)
    assert set(frozen.attended) == {0, 2}
    for layer, u in frozen.attended.items():
        with torch.no_grad():
            whole = model.layers[layer].attend(expected[layer], step)
        assert torch.equal(u, whole if rows is None else whole[rows])
    assert torch.equal(frozen.final, expected[-1])


@pytest.mark.parametrize("rows", [1, 4, 7, 100])
def test_parts_have_the_gradient_of_the_whole(rows: int) -> None:
    torch.manual_seed(0)
    trunk, head, x = torch.randn(6, 5), torch.randn(9, 5), torch.randn(7, 6)
    targets = torch.randint(0, 9, (7,))

    def gradient(parts: bool) -> tuple[Tensor, float, int]:
        w = trunk.clone().requires_grad_()
        top = x @ w
        if not parts:
            loss = F.cross_entropy(top @ head.T, targets)
            loss.backward()
            return w.grad, float(loss.detach()), 1

        def part_of(h: Tensor, part: slice) -> LossPart:
            assert len(h) <= rows
            return F.cross_entropy(h @ head.T, targets[part], reduction="sum") / 7, {"loss": 1.0}

        total, count = 0.0, 0
        for loss, seen in head_in_parts(top, rows, part_of):
            loss.backward()
            total += float(loss.detach()) if seen else 0.0
            count += bool(seen)
        return w.grad, total, count

    (whole, loss, _), (found, total, count) = gradient(False), gradient(True)
    torch.testing.assert_close(found, whole)
    assert total == pytest.approx(loss)
    assert count == -(-7 // rows)


def test_without_gradients_there_is_nothing_to_send_on() -> None:
    with torch.no_grad():
        parts = list(head_in_parts(torch.randn(4, 3), 3, lambda h, part: (h.sum(), {"n": float(len(h))})))
    assert [seen for _, seen in parts] == [{"n": 3.0}, {"n": 1.0}]


def test_a_part_that_was_not_backed_through_is_noticed() -> None:
    top = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(AssertionError, match="back every part through"):
        list(head_in_parts(top, 2, lambda h, part: (h.sum(), {})))


def test_several_cuts_send_on_what_each_gathered() -> None:
    first, second, unread = (torch.randn(3, requires_grad=True) for _ in range(3))
    cut = Cut(first * 2, second * 3, unread * 5)
    (cut.copies[0].sum() + (cut.copies[1] ** 2).sum()).backward()
    assert first.grad is None, "the graph is cut"
    for loss, _ in cut.rest():
        loss.backward()
    torch.testing.assert_close(first.grad, torch.full((3,), 2.0))
    torch.testing.assert_close(second.grad, 2 * second.detach() * 9)
    assert unread.grad is None


def test_slices_cover_every_row_once() -> None:
    assert list(slices(5, 2)) == [slice(0, 2), slice(2, 4), slice(4, 6)]
    assert list(slices(4, 2)) == [slice(0, 2), slice(2, 4)]
    assert list(slices(0, 2)) == [slice(0, 2)]


@pytest.mark.parametrize("tau", [1.0, 2.5])
def test_losses_are_their_formulas(tau: float) -> None:
    torch.manual_seed(1)
    guess, truth, targets = torch.randn(5, 8), torch.randn(5, 8), torch.randint(0, 8, (5,))
    p, q = torch.softmax(truth / tau, -1), torch.softmax(guess / tau, -1)
    kl = float((p * (p / q).log()).sum())
    ce = float(sum(-torch.log_softmax(row, -1)[at] for row, at in zip(guess, targets.tolist(), strict=True)))
    assert float(divergence(guess, truth, tau)) == pytest.approx(kl, rel=1e-5)
    found = DistillationLoss(0.7, 0.3).of(guess, truth, targets, tau)
    assert float(found.loss) == pytest.approx(0.7 * tau**2 * kl + 0.3 * ce, rel=1e-5)
    assert int(found.agreed) == sum(int(a.argmax() == b.argmax()) for a, b in zip(guess, truth, strict=True))
    model = tiny_decoder()
    hidden, aim = torch.randn(5, 32), torch.randn(5, 32)
    logits, wanted = model.head(hidden).detach(), torch.randn(5, 400)
    loss, sums = AlignedLoss(0.7, 0.3, alignment=0.5, temperature=tau).of_residuals(
        model.head, hidden, wanted, aim, targets
    )
    away = float(sum(1 - F.cosine_similarity(a, b, dim=0) for a, b in zip(hidden, aim, strict=True)))
    expected = DistillationLoss(0.7, 0.3).of(logits, wanted, targets, tau).loss
    assert float(loss.detach()) == pytest.approx(float(expected) + 0.5 * away, rel=1e-5)
    assert float(sums["away"]) == pytest.approx(away, rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: DistillationLoss(distillation=-1), "weights"),
        (lambda: DistillationLoss(cross_entropy=-1), "weights"),
        (lambda: DistillationLoss(rows=0), "rows"),
        (lambda: AlignedLoss(alignment=-1), "alignment"),
        (lambda: AlignedLoss(temperature=0), "temperature"),
    ],
)
def test_weights_that_make_no_loss_are_refused(wrong: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrong()

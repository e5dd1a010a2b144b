"""A draft head guesses what the whole head would, among the tokens it may guess."""

from __future__ import annotations

import pytest
import torch

from tests.decode.tiny_decoders import VOCAB, build
from vivace.core.cpu.backend import pack_decoder
from vivace.core.draft_head import NOT_AMONG, DraftHead, check_size
from vivace.core.model import Decoder
from vivace.errors import ConfigError
from vivace.kernels.native import NativeBody

IDS = torch.tensor([0, 3, 4, 9, 11, VOCAB - 1])
KINDS = {"tied": {}, "own head": {"tied_head": False}, "capped": {"logit_softcap": 5.0}}


def rows(model: Decoder) -> torch.Tensor:
    return torch.randn(7, model.config.width, generator=torch.Generator().manual_seed(1)).to(model.dtype) * 3


def assert_head(model: Decoder) -> None:
    h, head = rows(model), DraftHead(model, IDS)
    whole, found = model.head(h), head(h)
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, IDS, False)
    torch.testing.assert_close(found[:, IDS], whole[:, IDS])
    torch.testing.assert_close(head.among(h), whole[:, IDS])
    assert bool((found[:, others] == -torch.inf).all())
    assert head.greedy(h).tolist() == found.argmax(-1).tolist()
    assert len(set(head.greedy(h).tolist())) > 1
    assert head.num_rows == len(IDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_it_reads_some_rows(kind: str, dtype: torch.dtype) -> None:
    assert_head(build(dtype, **KINDS[kind]).requires_grad_(False))


@pytest.mark.parametrize("kind", ["tied", "own head"])
@pytest.mark.parametrize("weights", ["bf16", "int8", "exact12"])
@torch.inference_mode()
def test_it_reads_some_rows_of_packed_heads(body: NativeBody, kind: str, weights: str) -> None:
    model = build(torch.bfloat16, **KINDS[kind]).requires_grad_(False)
    pack_decoder(model, body, weights)
    h, head = rows(model), DraftHead(model, IDS)
    torch.testing.assert_close(head(h)[:, IDS], model.head(h)[:, IDS], atol=0.1, rtol=0.05)
    assert head.greedy(h).tolist() == head(h).argmax(-1).tolist()
    assert set(head.greedy(h).tolist()) <= set(IDS.tolist())


@torch.inference_mode()
def test_all_tokens_are_the_decoders_own_head() -> None:
    model = build(torch.float32).requires_grad_(False)
    h, head = rows(model), DraftHead(model)
    assert torch.equal(head(h), model.head(h))
    assert torch.equal(head.greedy(h), model.greedy(h))
    assert torch.equal(head.best(model.norm(h)), model.greedy(h))
    assert torch.equal(head.among(h), model.head(h))
    assert head.num_rows == VOCAB
    assert head.places(IDS).tolist() == IDS.tolist()


@torch.inference_mode()
def test_a_drafters_own_head_is_cut_too() -> None:
    model = build(torch.float32).requires_grad_(False)
    own, x = torch.randn(VOCAB, model.config.width), rows(model)
    scores = DraftHead(model, IDS, own).scores(x)
    torch.testing.assert_close(scores[:, IDS], x @ own[IDS].T)
    assert DraftHead(model, IDS, own).best(x).tolist() == IDS[(x @ own[IDS].T).argmax(-1)].tolist()
    assert DraftHead(model, None, own).best(x).tolist() == (x @ own.T).argmax(-1).tolist()


def test_tokens_have_places() -> None:
    head = DraftHead(build(torch.float32).requires_grad_(False), IDS)
    assert head.places(torch.tensor([3, VOCAB - 1, 5, 0, 12])).tolist() == [1, 5, NOT_AMONG, 0, NOT_AMONG]
    with pytest.raises(ConfigError, match="vocabulary must be >= 0"):
        check_size(-1)


def test_gradients_pass_it() -> None:
    with torch.inference_mode(False), torch.enable_grad():
        model = build(torch.float32).requires_grad_(False)
        h = rows(model).requires_grad_()
        DraftHead(model, IDS).among(h).sum().backward()
    assert h.grad is not None
    assert float(h.grad.abs().sum()) > 0

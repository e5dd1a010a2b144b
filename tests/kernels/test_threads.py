"""PyTorch's threads stay out of the way of native kernels, in the thread that asks for it and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread

import pytest
import torch

from tests.decode.runs import finish
from tests.decode.tiny_decoders import build
from vivace.core.cpu.backend import pack_decoder
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.decode.stats import DecodeStats
from vivace.kernels import threads
from vivace.kernels.native import NativeBody
from vivace.kernels.threads import num_threads, one_pytorch_thread


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_native_kernels_keep_their_threads() -> None:
    with one_pytorch_thread():
        assert (torch.get_num_threads(), num_threads()) == (1, 2)
        with one_pytorch_thread():
            assert (torch.get_num_threads(), num_threads()) == (1, 2)
        assert (torch.get_num_threads(), num_threads()) == (1, 2)
    assert (torch.get_num_threads(), num_threads()) == (2, 2)


def test_an_error_inside_changes_nothing() -> None:
    with pytest.raises(KeyError), one_pytorch_thread():
        raise KeyError
    assert (torch.get_num_threads(), num_threads()) == (2, 2)


def test_other_threads_do_not_notice() -> None:
    seen = []
    with one_pytorch_thread():
        other = Thread(target=lambda: seen.append((torch.get_num_threads(), num_threads())))
        other.start()
        other.join()
    assert seen == [(2, 2)]


def test_without_openmp_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_omp", lambda: None)
    with one_pytorch_thread():
        assert (torch.get_num_threads(), num_threads()) == (2, 2)


@pytest.mark.parametrize("is_native", [True, False])
def test_decoding_on_native_layers_needs_one(
    body: NativeBody, monkeypatch: pytest.MonkeyPatch, is_native: bool
) -> None:
    model = build(torch.bfloat16, num_layers=2).requires_grad_(False)
    if is_native:
        pack_decoder(model, body)
    seen = set()
    count = DecodeStats.count
    monkeypatch.setattr(DecodeStats, "count", lambda *given: (seen.add(torch.get_num_threads()), count(*given)))
    finish(Session(model, num_slots=1, capacity=16), [Request((3, 1, 4), 5, NoDrafts())])
    assert seen == {1 if is_native else 2}
    assert torch.get_num_threads() == 2

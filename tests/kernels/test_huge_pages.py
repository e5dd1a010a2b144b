"""Memory in huge pages: tensors in it are the same, take what they need, and free it with the last of them."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.core.test_pages import resident
from vivace.core.low_rank import FixedFactors
from vivace.kernels.huge_pages import AREA, HUGE, LINE, HugePages
from vivace.kernels.low_bit import quantise

MIB = 1 << 20
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no huge pages to ask for")


def huge_bytes() -> int:
    """Bytes of huge pages of this process."""
    found = re.search(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    return 1024 * int(found[1])


def are_given() -> bool:
    """Whether the system gives huge pages to memory that asks."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.is_file() and "[never]" not in path.read_text()


def test_tensors_are_copies_that_begin_at_a_line_of_the_cache() -> None:
    memory = HugePages()
    given = [torch.randn(3, 5), torch.arange(7, dtype=torch.uint8), torch.randn(2, 16, dtype=torch.bfloat16).T]
    held = [memory.hold(values) for values in given]
    for values, copied in zip(given, held, strict=True):
        assert torch.equal(values, copied)
        assert copied.dtype == values.dtype
        assert copied.is_contiguous()
    if sys.platform == "linux":
        assert all(copied.data_ptr() % LINE == 0 for copied in held)
        assert held[1].data_ptr() - held[0].data_ptr() == LINE
        given[0].zero_()
        assert held[0].any()
    assert memory.hold(torch.empty(0, 4)).shape == (0, 4)


@linux_only
def test_an_area_is_in_huge_pages_but_for_what_is_not_a_whole_one() -> None:
    if not are_given():
        pytest.skip("this system gives no huge pages")
    before, held_before = huge_bytes(), resident()
    size = 2 * HUGE + HUGE // 2
    values = torch.zeros(size, dtype=torch.uint8)
    held_before, held = resident(), HugePages(size).hold(values)
    assert held.data_ptr() % HUGE == 0
    assert huge_bytes() - before == 2 * HUGE
    assert resident() - held_before < size + MIB


@linux_only
def test_memory_is_freed_with_the_last_tensor_in_it() -> None:
    memory, values = HugePages(), torch.ones(AREA // 4, dtype=torch.uint8)
    before = resident()
    held = [memory.hold(values) for _ in range(8)]
    assert resident() - before >= 8 * len(values)
    del memory
    first = held.pop(0)
    held.clear()
    assert resident() - before <= AREA + MIB
    assert first.all()
    del first
    assert resident() - before < MIB


@linux_only
def test_a_tensor_larger_than_an_area_gets_one_of_its_size() -> None:
    memory = HugePages(4096)
    small, large = memory.hold(torch.ones(1000)), memory.hold(torch.ones(5000))
    assert small.all()
    assert large.all()


def test_without_huge_pages_tensors_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vivace.kernels.huge_pages._ADVICE", None)
    values = torch.randn(4)
    assert HugePages().hold(values) is values


def test_a_kernel_that_refuses_the_advice_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("nothing is asked here")
    monkeypatch.setattr("vivace.kernels.huge_pages._ADVICE", 12345)
    values = torch.randn(4)
    assert torch.equal(HugePages().hold(values), values)


@pytest.mark.parametrize("format", ["q4", "int8", "lut3", "exact12"])
def test_every_part_of_a_rounded_matrix_is_held(format: str) -> None:
    weight = torch.randn(48, 64).bfloat16()
    rounded = quantise(weight, format)  # type: ignore[arg-type]
    held = HugePages().hold_parts(rounded)
    assert type(held) is type(rounded)
    for name, value in vars(rounded).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(held, name), value)
            assert sys.platform != "linux" or getattr(held, name).data_ptr() != value.data_ptr()
        else:
            assert getattr(held, name) == value


@linux_only
def test_factors_of_an_adapter_lie_in_one_area() -> None:
    factors = FixedFactors.of({(0, "q"): (torch.randn(8, 64), torch.randn(64, 8))})
    assert factors.memory.data_ptr() % HUGE == 0
    assert factors.down[0, "q"].data_ptr() == factors.memory.data_ptr()

"""Plans: never over the budget, near the best of all, and what cannot be had is said."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vivace.errors import ConfigError
from vivace.palette.plan import BitChoice, plan_bits

losses = st.lists(st.floats(0.001, 10), min_size=4, max_size=4).map(lambda each: sorted(each, reverse=True))


@settings(max_examples=80, deadline=None)
@given(all_losses=st.lists(losses, min_size=1, max_size=4), budget=st.floats(2, 8.5))
def test_it_is_near_the_best(all_losses: list[list[float]], budget: float) -> None:
    """No better than the best of all mixtures, and not worse than the best of a budget smaller by one step."""
    choices = {
        f"m{index}": tuple(BitChoice(bits, bits * 100, loss) for bits, loss in zip((2, 3, 4, 8), each, strict=True))
        for index, each in enumerate(all_losses)
    }
    plan = plan_bits(choices, 800 * len(choices), budget)
    allowed = budget * 800 * len(choices) / 8
    assert plan.num_bytes <= allowed
    assert plan.num_bytes == sum(bits * 100 for bits in plan.bits.values())

    def best(limit: float) -> float:
        mixes = [mix for mix in product(*choices.values()) if sum(each.num_bytes for each in mix) <= limit]
        return min((sum(each.loss for each in mix) for mix in mixes), default=float("inf"))

    assert best(allowed) - 1e-9 <= plan.loss <= best(allowed - 600) + 1e-9


def test_what_matters_gets_more() -> None:
    choices = {
        "deaf": tuple(BitChoice(bits, bits * 10, 0.1 / bits) for bits in (2, 3, 4, 8)),
        "touchy": tuple(BitChoice(bits, bits * 10, 10.0 / bits) for bits in (2, 3, 4, 8)),
    }
    bits = plan_bits(choices, 160, 3.0).bits
    assert bits["touchy"] > bits["deaf"]


def test_too_little() -> None:
    with pytest.raises(ConfigError, match=r"least possible is 2\.000 bits"):
        plan_bits({"m": (BitChoice(2, 20, 1.0), BitChoice(3, 30, 0.5))}, 80, 1.9)

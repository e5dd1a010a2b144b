"""Settings of foresight that cannot be."""

from __future__ import annotations

import pytest

from vivace.errors import ConfigError
from vivace.storage.experts.foresight.config import ForesightConfig, ForesightLoss


@pytest.mark.parametrize("rate", [1.0, float("inf"), float("nan")])
def test_rates_that_cannot_be(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate must be above 1, and finite"):
        ForesightConfig(rate=rate)


@pytest.mark.parametrize("weight", [-0.1, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["routing", "alignment", "forecast"])
def test_loss_weights_that_cannot_be(name: str, weight: float) -> None:
    with pytest.raises(ConfigError, match="loss weights must be finite"):
        ForesightLoss(**{name: weight})

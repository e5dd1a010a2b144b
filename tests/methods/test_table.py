"""The table of methods."""

from __future__ import annotations

import pytest

from vivace.errors import ConfigError
from vivace.methods.table import METHODS, find_method


def test_the_table_is_the_closed_one() -> None:
    ours = ["auto", "plain", "lookup", "draft", "multirate", "multirate+lookup", "multistream", "dynamic"]
    drafting = ["medusa", "lookahead", "eagle", "deed", "uno", "layerskip"]
    others = ["foresight", "calm", "lite", "skipdecode", "mod"]
    assert list(METHODS) == [*ours, *drafting, *others]
    assert all(method.name == name for name, method in METHODS.items())


def test_an_unknown_method_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'lookup'"):
        find_method("lokup")
    assert find_method("plain").lossless

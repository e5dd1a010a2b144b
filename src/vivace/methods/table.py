"""The one table of methods. The same names everywhere: command line, Python, JSON, docs.

A new method is its folder with a spec, and one line here. Importing the table imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from vivace.baselines.specs import CALM, DEED, EAGLE, LAYERSKIP, LITE, LOOKAHEAD, MEDUSA, MOD, SKIPDECODE, UNO
from vivace.decode.spec import MethodSpec
from vivace.decode.specs import AUTO, DRAFT, LOOKUP, PLAIN
from vivace.errors import ConfigError, nearest
from vivace.multirate.spec import DYNAMIC, FORESIGHT, MULTIRATE, MULTIRATE_LOOKUP
from vivace.multistream.spec import MULTISTREAM

METHODS: Mapping[str, MethodSpec] = {
    spec.name: spec
    for spec in (
        AUTO,
        PLAIN,
        LOOKUP,
        DRAFT,
        MULTIRATE,
        MULTIRATE_LOOKUP,
        MULTISTREAM,
        DYNAMIC,
        MEDUSA,
        LOOKAHEAD,
        EAGLE,
        DEED,
        UNO,
        LAYERSKIP,
        FORESIGHT,
        CALM,
        LITE,
        SKIPDECODE,
        MOD,
    )
}
"""By name, in the order in which they are listed."""


def find_method(name: str) -> MethodSpec:
    """The method called ``name``.

    Raises:
        ConfigError: no such name; the nearest is named.
    """
    method = METHODS.get(name)
    if method is None:
        raise ConfigError(f"there is no method {name!r}{nearest(name, METHODS)}")
    return method

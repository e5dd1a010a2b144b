"""The table of all methods. Their names are the same on the command line, in Python, in JSON and in the docs.

A new method is a folder with a spec and one line here. Importing the table does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from vivace.errors import ConfigError, UnsupportedError, nearest
from vivace.methods.auto.spec import AUTO
from vivace.methods.confidence.spec import CALM, LITE
from vivace.methods.draft.spec import DRAFT
from vivace.methods.dynamic.spec import DYNAMIC
from vivace.methods.eagle.spec import EAGLE
from vivace.methods.early_exit.spec import DEED, LAYERSKIP
from vivace.methods.foresight.spec import FORESIGHT
from vivace.methods.lookahead.spec import LOOKAHEAD
from vivace.methods.lookup.spec import LOOKUP
from vivace.methods.medusa.spec import MEDUSA
from vivace.methods.mod.spec import MOD
from vivace.methods.multirate.spec import MULTIRATE, MULTIRATE_LOOKUP
from vivace.methods.multistream.spec import MULTISTREAM
from vivace.methods.plain.spec import PLAIN
from vivace.methods.quantized.spec import QUANTIZED, QUANTIZED_LOOKUP
from vivace.methods.skipdecode.spec import SKIPDECODE
from vivace.methods.spec import MethodSpec
from vivace.methods.uno.spec import UNO

METHODS: Mapping[str, MethodSpec] = {
    spec.name: spec
    for spec in (
        AUTO,
        PLAIN,
        LOOKUP,
        DRAFT,
        QUANTIZED,
        QUANTIZED_LOOKUP,
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
"""By name, in the order in which methods are listed."""


def check_method(name: str, prefill: str, *, is_alone: bool = False) -> None:
    """Refuse a method that leaves out work of its own, where prompts are read with tokens left out.

    Args:
        name: of the method.
        prefill: of the way in which prompts are read.
        is_alone: whether tokens are left out of decoding too, which no method can draft for.

    Raises:
        UnsupportedError: the method is lossy, or cannot decode so; the message names both.
    """
    if is_alone and name not in (PLAIN.name, AUTO.name):
        raise UnsupportedError(
            f"method {name} cannot draft where prefill {prefill} prunes in decoding too; "
            "choose plain, or decode_keep 1",
            field="method",
        )
    if not find_method(name).lossless:
        raise UnsupportedError(
            f"method {name} skips layers of its own and cannot ride along with prefill {prefill}; "
            "choose a lossless method, or prefill full",
            field="method",
        )


def find_method(name: str) -> MethodSpec:
    """Return the spec of the method called ``name``.

    Raises:
        ConfigError: there is no such method; the message names the nearest.
    """
    method = METHODS.get(name)
    if method is None:
        raise ConfigError(f"there is no method {name!r}{nearest(name, METHODS)}")
    return method

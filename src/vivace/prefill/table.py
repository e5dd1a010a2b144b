"""The table of all ways to read a prompt. Their names are the same on the command line, in Python and over HTTP.

Importing the table does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vivace.errors import ConfigError, nearest

MIN_PROMPT = 512
"""Shortest prompt that is pruned where nothing else is asked for: on shorter ones nothing is gained."""


class Reading(NamedTuple):
    """How a caller wants a prompt to be read; None stands for what is usual."""

    name: str = "full"
    """Of the way, as in the table."""
    keep: str | None = None
    """A preset or a schedule."""
    min_prompt: int | None = None
    """Tokens of the shortest prompt that is pruned."""
    decode_keep: str | float | None = None
    """Share of the tokens that goes on in each decoding step, while what was pruned may come back; or "same"."""


@dataclass(frozen=True)
class PrefillSpec:
    """What lists know about one of them."""

    name: str
    summary: str
    is_lossy: bool = True
    keep: str | None = None
    """Schedule where none is asked for; None where there is nothing to prune."""
    prunes_below: bool = False
    """Whether tokens are pruned before the first layer, and nowhere else."""
    prunes_once: bool = False
    """Whether there is one layer behind which tokens are pruned."""
    has_plan: bool = False
    """Whether its usual schedule is the plan beside the checkpoint, where there is one."""
    can_return: bool = False
    """Whether what is pruned may come back while the answer is written."""
    reads_again: bool = False
    """Whether tokens that go on are read again from the first layer."""
    has_entries: bool = False
    """Whether a schedule may say which share of the keys and values is kept besides."""


PREFILLS: Mapping[str, PrefillSpec] = {
    spec.name: spec
    for spec in (
        PrefillSpec("full", "every token passes every layer", is_lossy=False),
        PrefillSpec(
            "lazy",
            "on the way up, tokens that the last one hardly reads are pruned, layer by layer",
            keep="balanced",
            has_plan=True,
            can_return=True,
        ),
        PrefillSpec(
            "static", "the same, once, by what the last token reads in a low layer", keep="4:0.5", prunes_once=True
        ),
        PrefillSpec("random", "tokens are drawn that are never read", keep="0:0.5", prunes_below=True),
        PrefillSpec(
            "lexical", "blocks that share few words with the end are never read", keep="0:0.5", prunes_below=True
        ),
        PrefillSpec(
            "gemfilter",
            "what the last token's queries match in a low layer is read again from the first one",
            keep="40%:0.3",
            prunes_once=True,
            reads_again=True,
        ),
        PrefillSpec(
            "fastkv",
            "what the last tokens read goes on behind one layer, and each key head keeps entries of its own",
            keep="47%:0.2:0.1",
            prunes_once=True,
            has_entries=True,
        ),
        PrefillSpec(
            "specprefill",
            "blocks that lower layers read while they guess the next tokens go on",
            keep="40%:0.3",
            prunes_once=True,
        ),
    )
}
"""By name, in the order in which they are listed."""


def find_prefill(name: str) -> PrefillSpec:
    """Return what is known of a way to read prompts.

    Raises:
        ConfigError: there is none of this name; the message names the nearest.
    """
    if name not in PREFILLS:
        raise ConfigError(f"prefill is {name!r}{nearest(name, PREFILLS)}", field="prefill")
    return PREFILLS[name]

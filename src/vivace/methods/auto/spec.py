"""Spec of ``auto``, which measures the other methods on this machine and uses the fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.methods.spec import MethodContext, MethodSpec

if TYPE_CHECKING:
    from vivace.core.seams import Drafter


def _auto(context: MethodContext) -> Drafter:
    from vivace.files import cache_folder
    from vivace.methods.auto.drafter import Adaptive
    from vivace.methods.auto.memory import KeptMeasurements

    plain, tried = context.drafters()
    place = context.place()
    if place is None:
        return Adaptive(tried, plain=plain)
    weights = {drafter.name: context.fingerprint(drafter.name) for drafter in tried}
    return Adaptive(tried, plain=plain, memory=KeptMeasurements(cache_folder(), place), weights=weights)


AUTO = MethodSpec(
    name="auto",
    summary="measure the methods on this machine and use the fastest",
    make=_auto,
    no_length="finds out how far to draft",
    runs_on_ranks=True,
)

"""No drafts: the decoder every other method is compared with; and what drafters remember that remember little."""

from __future__ import annotations

from collections.abc import Sequence

from vivace.core.seams import Context, Draft, TargetPass, Traversal, Verdict
from vivace.decode.climb import Climb


class Stateless:
    """A drafter's memory when it has none."""

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Nothing to keep."""

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing to forget."""

    def fork(self, sources: Sequence[int], targets: Sequence[int], length: int | None = None) -> None:
        """Nothing to copy."""

    def release(self, slots: Sequence[int]) -> None:
        """Nothing to forget."""

    def settle(self, slots: Sequence[int]) -> None:
        """Always complete."""


class Forgetful(Stateless):
    """A drafter's memory of each slot that is dropped where a text changes: it drafts without until it sees more."""

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """What was kept may be gone."""
        self.release(slots)

    def fork(self, sources: Sequence[int], targets: Sequence[int], length: int | None = None) -> None:
        """Copies see for themselves."""
        self.release(targets)


class NoDrafts(Stateless):
    """Plain decoding: one row per slot and step."""

    def __init__(self, name: str = "plain", traversal: Traversal | None = None) -> None:
        """Give the way up another name if it is another than all rows together."""
        self.name = name
        self.traversal: Traversal = Climb() if traversal is None else traversal

    def propose(self, context: Context) -> Draft:
        """The decided tokens alone."""
        return context.given()

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Nothing to learn."""

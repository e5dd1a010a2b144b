"""The captions of all tables: machine, kernels and commit of the figures.

These rules are enforced here, so that no table can miss them: a table has results of one kind of processor and one
kind of kernels; its caption names both, and mentions if the processor could run faster kernels than the measured ones;
a result from a tree with uncommitted changes is marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

CHANGED = "+changes"
"""End of a commit's name if the measured tree had uncommitted changes."""
NOT_RECORDED = "not recorded"
"""Text for a fact that was not recorded."""
BUSY = 0.05
"""Share of the machine's time used by other processes from which on a caption mentions it."""

Found = TypeVar("Found")


def is_clean(provenance: Mapping[str, Any]) -> bool:
    """Return whether a result comes from a committed tree."""
    commit = provenance["commit"]
    return commit is not None and not commit.endswith(CHANGED)


def tree(provenance: Mapping[str, Any]) -> str:
    """Return the commit, or that the measured tree was not committed."""
    commit = provenance["commit"]
    if commit is None:
        return "commit unknown"
    if is_clean(provenance):
        return f"commit {commit}"
    return f"**from a tree with uncommitted changes** on top of commit {commit.removesuffix(CHANGED)}"


def kernels(provenance: Mapping[str, Any], name: str) -> str:
    """Return which kernels ran, and whether the processor could run faster ones."""
    best = provenance.get("best_kernels", name)
    return f"kernels {name}" + ("" if best == name else f" (this processor runs {best} as well)")


def machine(provenance: Mapping[str, Any], name: str | None, threads: int | None = None) -> str:
    """Return processor, kernels (None where they are no matter of the figures), threads and commit."""
    count = threads or provenance["num_threads"]
    named = () if name is None else (kernels(provenance, name),)
    return ", ".join((provenance["cpu"], *named, f"{count} thread{'s' * (count != 1)}", tree(provenance)))


def heading(provenance: Mapping[str, Any], name: str, threads: int | None = None) -> str:
    """Return the same for the beginning of a caption, with processor and kernels in bold."""
    cpu_and_kernels, rest = f"{provenance['cpu']}, {kernels(provenance, name)}", machine(provenance, name, threads)
    return f"**{cpu_and_kernels}**{rest.removeprefix(cpu_and_kernels)}"


def others(setting: Mapping[str, Any]) -> str:
    """Return the share of the machine's time used by other processes, if it was measured and is large."""
    share = setting.get("others_cpu_share")
    return f"; other processes took {share:.0%} of its time" if share is not None and share > BUSY else ""


def by_kind(found: Iterable[Found], kind: Callable[[Found], tuple[str, ...]]) -> dict[tuple[str, ...], list[Found]]:
    """Group results by table: one for each processor and kernels, in the order of their first result."""
    groups: dict[tuple[str, ...], list[Found]] = {}
    for each in found:
        groups.setdefault(kind(each), []).append(each)
    return groups


def whole_answers(run: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    """Return the speed of whole answers, reading the prompt included, relative to another run of the same benchmark."""
    return float(run["end_to_end_tokens_per_s"]) / float(plain["end_to_end_tokens_per_s"])

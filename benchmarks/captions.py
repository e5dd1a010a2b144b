"""What every table has to say of its figures: which machine, which kernels, which tree, and what they are beside.

Rules, enforced here so that no table can forget them: a table holds results of one kind of processor and one kind of
kernels; its caption names both, and says when the processor runs faster kernels than those that were measured; a result
from a tree with uncommitted changes is marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

CHANGED = "+changes"
"""How a commit ends that is not what was measured."""
NOT_RECORDED = "not recorded"
"""Of what nobody wrote down."""
BUSY = 0.05
"""Share of the machine's time that others may take before a caption says so."""

Found = TypeVar("Found")


def is_clean(provenance: Mapping[str, Any]) -> bool:
    """Whether a result comes from a tree that is in the repository."""
    commit = provenance["commit"]
    return commit is not None and not commit.endswith(CHANGED)


def tree(provenance: Mapping[str, Any]) -> str:
    """The commit, or that there is none that holds what was measured."""
    commit = provenance["commit"]
    if commit is None:
        return "commit unknown"
    if is_clean(provenance):
        return f"commit {commit}"
    return f"**from a tree with uncommitted changes** on top of commit {commit.removesuffix(CHANGED)}"


def kernels(provenance: Mapping[str, Any], name: str) -> str:
    """Which kernels ran, and whether the processor has better ones."""
    best = provenance.get("best_kernels", name)
    return f"kernels {name}" + ("" if best == name else f" (this processor runs {best} as well)")


def machine(provenance: Mapping[str, Any], name: str, threads: int | None = None) -> str:
    """Processor, kernels, threads and commit."""
    count = threads or provenance["num_threads"]
    parts = (provenance["cpu"], kernels(provenance, name), f"{count} thread{'s' * (count != 1)}", tree(provenance))
    return ", ".join(parts)


def heading(provenance: Mapping[str, Any], name: str, threads: int | None = None) -> str:
    """The same for the beginning of a caption: processor and kernels in bold."""
    cpu_and_kernels, rest = f"{provenance['cpu']}, {kernels(provenance, name)}", machine(provenance, name, threads)
    return f"**{cpu_and_kernels}**{rest.removeprefix(cpu_and_kernels)}"


def others(setting: Mapping[str, Any]) -> str:
    """What other processes took of the machine, where that was watched and is worth saying."""
    share = setting.get("others_cpu_share")
    return f"; other processes took {share:.0%} of its time" if share is not None and share > BUSY else ""


def by_kind(found: Iterable[Found], kind: Callable[[Found], tuple[str, ...]]) -> dict[tuple[str, ...], list[Found]]:
    """Results in the tables they belong to: one for each processor and kernels, in the order of their first result."""
    groups: dict[tuple[str, ...], list[Found]] = {}
    for each in found:
        groups.setdefault(kind(each), []).append(each)
    return groups


def whole_answers(run: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    """Speed of whole answers, reading the prompt included, beside another run's of the same contest."""
    return float(run["end_to_end_tokens_per_s"]) / float(plain["end_to_end_tokens_per_s"])

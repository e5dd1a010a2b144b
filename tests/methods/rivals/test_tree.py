"""Trees of guesses against slow ways to make them; what heads and windows propose is what they were asked for."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from tests.decode.runs import finish
from tests.methods.rivals.conftest import rival
from vivace.core.seams import Draft
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.decode.tree import Node, TreePlan, every_path, grown, likeliest, likeliest_paths
from vivace.errors import ConfigError
from vivace.methods.lookahead.drafter import LookaheadPlan, Pool
from vivace.methods.medusa.drafter import Medusa, MedusaConfig, MedusaHeads

LEVELS = [[5, 6, 7], [8, 9], [1, 2]]


def paths(nodes: list[Node]) -> list[tuple[int, ...]]:
    """Tokens from the root to every node."""
    found: list[tuple[int, ...]] = []
    for node in nodes:
        found.append((*(found[node.parent] if node.parent >= 0 else ()), node.token))
    return found


def test_every_path_is_there_once() -> None:
    expected = {path for depth in (1, 2, 3) for path in product(*LEVELS[:depth])}
    found = paths(every_path(LEVELS))
    assert len(found) == len(expected)
    assert set(found) == expected


@pytest.mark.parametrize("count", [1, 4, 9, 40])
def test_the_likeliest_paths_are_those_of_a_full_search(count: int) -> None:
    chances = [[0.5, 0.3, 0.19], [0.6, 0.35], [0.9, 0.07]]
    share = [dict(zip(tokens, likely, strict=True)) for tokens, likely in zip(LEVELS, chances, strict=True)]
    every = {path for depth in (1, 2, 3) for path in product(*LEVELS[:depth])}
    ranked = sorted(every, key=lambda path: -prod(share[depth][token] for depth, token in enumerate(path)))
    assert set(paths(likeliest_paths(LEVELS, chances, count))) == set(ranked[:count])


def test_a_grown_draft_has_these_paths_below_its_roots() -> None:
    nodes = every_path(LEVELS)
    draft = grown(Draft.committed_only({3: [11, 12], 1: [13], 2: [14]}), {3: nodes, 2: nodes[:2]})
    below = {slot: [row for row in range(len(draft.tokens)) if draft.lists.slot[row] == slot] for slot in (1, 2, 3)}
    assert [len(rows) for rows in below.values()] == [1, 3, 2 + len(nodes)]
    tokens = [tuple(draft.lists.tokens[row] for row in draft.path(at)) for at in below[3][2:]]
    assert tokens == [(11, 12, *path) for path in paths(nodes)]
    assert [draft.lists.node[row] for row in below[3]] == list(range(2 + len(nodes)))


def test_a_pool_keeps_what_was_used_last() -> None:
    pool = Pool(LookaheadPlan(3, 2, 2))
    pool.add_text([1, 2, 3, 1, 4, 5, 1, 2, 3, 1, 6, 7])
    assert pool.after(1) == [(6, 7), (2, 3)]
    assert pool.after(9) == []


def test_a_prompt_fills_its_pool_once(base, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many drafts follow."""
    model, read = base(torch.float32), []
    add_text = Pool.add_text
    monkeypatch.setattr(Pool, "add_text", lambda self, tokens: (read.append(len(tokens)), add_text(self, tokens))[1])
    session = Session(model, num_slots=2, capacity=64)
    finish(session, [Request((5,) * length, 9, rival("lookahead", model)) for length in (7, 11)])
    assert sorted(read) == [7, 11]


def test_a_window_is_a_jacobi_iteration(base) -> None:
    """Each level's tokens are what the model said after the level below, one pass before."""
    model = base(torch.float32)
    drafter = rival("lookahead", model).open(model.new_cache(1, 8))
    memory = drafter._start([1, 2, 3])
    first = [list(level) for level in memory.levels]
    drafter._learn(memory, [50, 51, 52, 53, 54], accepted=0)
    assert memory.levels == [*first[1:], [50, 51, 52, 53, 54]]
    assert memory.pool.after(first[0][2])[0] == (*(level[2] for level in first[1:]), 52)
    drafter._learn(memory, [60, 61, 62, 63, 64], accepted=2)
    assert memory.levels[-1] == [62, 63, 64, 64, 64]


def test_plans_that_cannot_be_are_refused(base) -> None:
    with pytest.raises(ConfigError, match="a draft has at most 63 nodes"):
        LookaheadPlan(8, 7, 7)
    with pytest.raises(ConfigError, match="nodes must be between 0 and"):
        TreePlan((1,), 99)
    with pytest.raises(ConfigError, match="draft widths must be at most 32"):
        TreePlan((5000,), 4)
    model = base(torch.float32)
    with pytest.raises(ConfigError, match="deeper than the 3 heads"):
        Medusa(model, MedusaHeads(MedusaConfig(3), model.config), TreePlan((1, 1, 1, 1)))


def test_a_head_of_few_tokens_gives_all_of_them() -> None:
    tokens, chances = likeliest(torch.tensor([[0.0, 2.0, 1.0]]), 5, with_chances=True)
    assert tokens == [[1, 2, 0]]
    assert sum(chances[0]) == pytest.approx(1.0)

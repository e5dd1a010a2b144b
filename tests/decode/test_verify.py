"""Verification keeps the target's own path (greedy) and the target's own law (sampling), exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.decode.oracles import chi_square
from vivace.core.sampling import sample, uniform
from vivace.core.seams import Draft
from vivace.decode import verify
from vivace.decode.isolation import RequestFailed
from vivace.decode.verify import Guess, verify_greedy, verify_sampled
from vivace.errors import DecodingError, NoTokenError

V = 6
SLOTS = 500
LIKELY, CERTAIN = 0.01, 1e-9
"""p-values above the first are agreement; below the second, a different law."""


# Greedy: structure


@st.composite
def drafts(draw: st.DrawFn) -> tuple[Draft, Tensor]:
    """Random trees for one to four slots in any order, and a choice after each row."""
    slots = draw(st.permutations(range(4)))[: draw(st.integers(1, 4))]
    draft = Draft.committed_only({slot: draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)) for slot in slots})
    for _ in range(draw(st.integers(0, 4))):
        candidates = {*draft.last_committed().tolist(), *range(sum(draft.committed), len(draft.tokens))}
        leaves = draw(st.lists(st.sampled_from(sorted(candidates)), min_size=1, max_size=3, unique=True))
        width = draw(st.integers(1, 3))
        tokens = draw(st.lists(st.integers(0, 3), min_size=len(leaves) * width, max_size=len(leaves) * width))
        draft, _ = draft.grow(torch.tensor(leaves), torch.tensor(tokens).view(len(leaves), width))
    return draft, torch.tensor([draw(st.integers(0, 3)) for _ in range(len(draft.tokens))])


@given(drafts())
@settings(max_examples=150, deadline=None)
def test_greedy_keeps_the_longest_path_of_choices(case: tuple[Draft, Tensor]) -> None:
    draft, choice = case
    verdict = verify_greedy(draft, choice.tolist())
    roots = draft.last_committed().tolist()
    for slot, given_count, root, path, accepted, following in zip(
        draft.slots, draft.committed, roots, verdict.paths, verdict.accepted, verdict.next_tokens, strict=True
    ):
        assert all(int(draft.slot[row]) == slot for row in path)
        assert int(draft.parent[path[0]]) == -1
        assert all(int(draft.parent[below]) == above for above, below in pairwise(path))
        assert path[given_count - 1] == root
        assert accepted == len(path) - given_count
        for above, below in pairwise(path[given_count - 1 :]):
            assert int(draft.tokens[below]) == int(choice[above])
        assert following == int(choice[path[-1]])
        children = [r for r in range(sum(draft.committed), len(draft.tokens)) if int(draft.parent[r]) == path[-1]]
        assert following not in [int(draft.tokens[r]) for r in children]


@given(drafts())
@settings(max_examples=100, deadline=None)
def test_sampling_from_certain_laws_is_greedy(case: tuple[Draft, Tensor]) -> None:
    """One-hot laws: greedy slots in a batch that also samples."""
    draft, choice = case
    certain = torch.nn.functional.one_hot(choice, 4).float()
    generators = {slot: torch.Generator().manual_seed(slot) for slot in draft.slots}
    got, want = verify_sampled(draft, certain, generators), verify_greedy(draft, choice.tolist())
    tokens = [[[int(draft.tokens[row]) for row in path] for path in verdict.paths] for verdict in (got, want)]
    assert tokens[0] == tokens[1]  # of two siblings with the same token either may be kept
    assert got.next_tokens == want.next_tokens


# Sampling: the law of the text


def distributions(*shape: int, seed: int, zeros: float = 0.0) -> Tensor:
    """Random laws over the last dimension, a share of their entries impossible."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(*shape, V, generator=generator).double() ** 3 + 1e-3
    keep = torch.rand(*shape, V, generator=generator) >= zeros
    keep[..., 0] = True
    weights = weights * keep
    return (weights / weights.sum(-1, keepdim=True)).float()


class Target:
    """The law of three tokens: p1(a), p2(b | a), p3(c | a, b), one row per prefix.

    Prefixes are numbered so that the one that follows i by token t is ``V i + 1 + t``, the empty one is 0.
    """

    def __init__(self) -> None:
        by_depth = [distributions(seed=1), distributions(V, seed=2, zeros=0.3), distributions(V, V, seed=3, zeros=0.3)]
        p1, p2, p3 = (p.double() for p in by_depth)
        self.joint = p1[:, None, None] * p2[:, :, None] * p3
        self.after = torch.cat([p.reshape(-1, V) for p in by_depth])

    def complete(self, prefixes: Tensor, generator: torch.Generator) -> Tensor:
        """Counts (V^3,) of the texts that plain sampling makes of these."""
        while bool((short := prefixes < len(self.after)).any()):
            drawn = torch.multinomial(self.after[prefixes[short]], 1, generator=generator)[:, 0]
            prefixes[short] = V * prefixes[short] + 1 + drawn
        return torch.bincount(prefixes - len(self.after), minlength=V**3)


Proposer = Callable[[Tensor, Tensor, int, torch.Generator], tuple[Tensor, Tensor | None]]
"""(target laws (n, V), last token (n,), children, randomness) -> tokens (n, children), law they were drawn from."""


def most_likely(p: Tensor, last: Tensor, width: int, g: torch.Generator) -> tuple[Tensor, None]:
    return p.topk(width, -1).indices, None


def arbitrary(p: Tensor, last: Tensor, width: int, g: torch.Generator) -> tuple[Tensor, None]:
    return (last[:, None] + 1 + torch.arange(width)) % V, None


def drawn_from(
    distribution: Callable[[Tensor, Tensor], Tensor], claim: Callable[[Tensor], Tensor] = lambda q: q
) -> Proposer:
    """Independent children from ``law(p, last)``, which are said to come from ``claim`` of it."""

    def propose(p: Tensor, last: Tensor, width: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        q = distribution(p, last)
        return torch.multinomial(q, width, replacement=True, generator=g), claim(q)

    return propose


Q = distributions(V, seed=4)
Q_WITH_ZEROS = distributions(V, seed=5, zeros=0.5)


def opposite(p: Tensor, last: Tensor) -> Tensor:
    """Likely where the target is not."""
    q = (1.0 - p) ** 8 * (p < 0.5) + 1e-4
    return q / q.sum(-1, keepdim=True)


PROPOSERS: dict[str, Proposer] = {
    "most likely": most_likely,
    "arbitrary": arbitrary,
    "drawn": drawn_from(lambda p, last: Q[last]),
    "drawn, some impossible": drawn_from(lambda p, last: Q_WITH_ZEROS[last]),
    "nearly disjoint": drawn_from(opposite),
    "the target itself": drawn_from(lambda p, last: p),
}


def make_draft(target: Target, shape: Sequence[int], propose: Proposer, g: torch.Generator) -> tuple[Draft, Tensor]:
    """One tree per slot, and the number of the prefix that ends with each row."""
    draft = Draft.committed_only({slot: [0] for slot in range(SLOTS)})
    prefixes = torch.zeros(SLOTS, dtype=torch.int64)
    leaves = torch.arange(SLOTS)
    for width in shape:
        tokens, q = propose(target.after[prefixes[leaves]], draft.tokens[leaves], width, g)
        below = (V * prefixes[leaves, None] + 1 + tokens).reshape(-1)
        draft, leaves = draft.grow(leaves, tokens, q)
        prefixes = torch.cat((prefixes, below))
    return draft, prefixes


def texts(
    target: Target, shape: Sequence[int], propose: Proposer, count: int, judge: Tensor | None = None
) -> tuple[Tensor, float]:
    """Counts (V^3,) of ``count`` texts, each a verified draft completed by plain sampling; and the share accepted.

    ``judge`` replaces the laws by which guesses are verified.
    """
    g = torch.Generator().manual_seed(7)
    generators = {slot: torch.Generator().manual_seed(1000 + slot) for slot in range(SLOTS)}
    counts = torch.zeros(V**3)
    accepted = 0
    for _ in range(count // SLOTS):
        draft, prefixes = make_draft(target, shape, propose, g)
        verdict = verify_sampled(draft, (target.after if judge is None else judge)[prefixes], generators)
        last = prefixes[[path[-1] for path in verdict.paths]]
        counts += target.complete(V * last + 1 + torch.tensor(verdict.next_tokens), g)
        accepted += sum(verdict.accepted)
    return counts, accepted / (count * len(shape))


CASES = [
    *((name, (1, 1)) for name in PROPOSERS),
    *((name, (2, 2)) for name in PROPOSERS if name != "the target itself"),
    ("most likely", (3,)),
    ("drawn", (3,)),
]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
def test_the_law_of_the_text_is_the_targets(name: str, shape: tuple[int, ...]) -> None:
    target = Target()
    counts, accepted = texts(target, shape, PROPOSERS[name], 6_000)
    assert chi_square(counts, target.joint) > LIKELY
    assert accepted > (0.99 if name == "the target itself" else 0.01)


@pytest.mark.slow
def test_forty_thousand_texts() -> None:
    """The sharpest look, at the hardest case."""
    target = Target()
    counts, _ = texts(target, (2, 1), PROPOSERS["nearly disjoint"], 40_000)
    assert chi_square(counts, target.joint) > LIKELY


# Mutants: what must not pass


def filtered(q: Tensor) -> Tensor:
    kept = q * (q >= q.topk(2, -1).values[:, -1:])
    return kept / kept.sum(-1, keepdim=True)


def test_an_unfiltered_claim_is_caught() -> None:
    """Guesses drawn after top-k, said to be drawn before it."""
    target = Target()
    flat = Q.sqrt() / Q.sqrt().sum(-1, keepdim=True)
    honest = drawn_from(lambda p, last: filtered(flat[last]))
    counts, _ = texts(target, (1, 1), honest, 6_000)
    assert chi_square(counts, target.joint) > LIKELY

    def lie(p: Tensor, last: Tensor, width: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        return honest(p, last, width, g)[0], flat[last]

    counts, _ = texts(target, (1, 1), lie, 6_000)
    assert chi_square(counts, target.joint) < CERTAIN


def test_a_prefix_without_the_path_is_caught() -> None:
    """Guesses judged by the law of the text before the draft."""
    target = Target()

    short = target.after[:1].expand_as(target.after)
    counts, _ = texts(target, (1, 1), PROPOSERS["drawn"], 4_000, judge=short)
    assert chi_square(counts, target.joint) < CERTAIN


def recovers_from_the_full_law(
    distribution: Tensor, guesses: Sequence[Guess], probs: Tensor | None, generator: torch.Generator
) -> tuple[int | None, int | None]:
    for child, token, chance in guesses:
        if uniform(generator) * chance < float(distribution[token]):
            return child, None
    return None, sample(distribution, generator)


def keeps_what_is_possible(
    distribution: Tensor, guesses: Sequence[Guess], probs: Tensor | None, generator: torch.Generator
) -> tuple[int | None, int | None]:
    return next(
        ((child, None) for child, token, _ in guesses if distribution[token] > 0.1),
        (None, sample(distribution, generator)),
    )


@pytest.mark.parametrize("mutant", [recovers_from_the_full_law, keeps_what_is_possible])
@pytest.mark.parametrize("shape", [(1, 1), (2, 2)], ids=str)
def test_wrong_verification_is_caught(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., object], shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(verify, "_descend", mutant)
    target = Target()
    counts, _ = texts(target, shape, PROPOSERS["drawn"], 4_000)
    assert chi_square(counts, target.joint) < CERTAIN


# Neighbours


def test_a_slot_draws_alike_whatever_its_neighbours_drafted() -> None:
    """Deterministic guesses beside sampled ones use the random numbers they would use alone."""
    target = Target()
    p = target.after[[0, 3]]
    for seed in range(50):
        alone, _ = Draft.committed_only({3: [0]}).grow(torch.tensor([0]), torch.tensor([[2]]))
        both = Draft.committed_only({3: [0], 5: [0]})
        both, _ = both.grow(torch.tensor([1]), torch.tensor([[4]]), Q[:1])
        both, _ = both.grow(torch.tensor([0]), torch.tensor([[2]]))

        def generators(seed: int = seed) -> dict[int, torch.Generator]:
            return {slot: torch.Generator().manual_seed(seed + slot) for slot in (3, 5)}

        want = verify_sampled(alone, p, generators())
        got = verify_sampled(both, target.after[[0, 0, 5, 3]], generators())
        assert (got.accepted[0], got.next_tokens[0]) == (want.accepted[0], want.next_tokens[0])


def test_sample_never_draws_the_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the ends of the unit interval either."""
    weights = torch.tensor([0.0, 0.3, 0.3, 0.0])
    for number, token in ((0.0, 1), (1 - 2**-53, 2)):
        monkeypatch.setattr("vivace.core.sampling.uniform", lambda _, number=number: number)
        assert sample(weights, torch.Generator()) == token


def test_sample_inverts_the_cumulative_sum() -> None:
    weights = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0])
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(torch.tensor([sample(weights, generator) for _ in range(20_000)]), minlength=V)
    assert chi_square(counts, weights) > LIKELY
    assert int(counts[weights == 0].sum()) == 0


def test_a_rejected_guess_without_remainder_is_not_kept_where_it_is_excluded() -> None:
    """The two distributions agree up to rounding, but the guess is one that the target never takes."""
    target = torch.tensor([[0.5, 0.5 - 2**-24, 0.0]])
    drafted = torch.tensor([[0.0] * 3, [0.5, 0.5 - 2**-24, 2**-24]])
    draft, _ = Draft.committed_only({0: [1]}).grow(torch.tensor([0]), torch.tensor([[2]]), drafted[1:])
    for seed in range(20):
        verdict = verify_sampled(draft, target[[0, 0]], {0: torch.Generator().manual_seed(seed)})
        assert verdict.accepted == (0,)
        assert verdict.next_tokens[0] in (0, 1)


@pytest.mark.parametrize(
    ("empty", "path", "following"),
    [([2], (0, 1, 3), 4), ([2, 1], (0,), 1), ([2, 3], (0, 1), 2), ([2, 0], None, None), ([2, 0, 1], None, None)],
    ids=str,
)
@pytest.mark.parametrize("weight", [0.0, math.nan])
def test_a_text_breaks_off_where_nothing_can_follow_whatever_was_drafted(
    empty: list[int], path: tuple[int, ...] | None, following: int | None, weight: float
) -> None:
    """Behind the root a right guess 1 and below it 2; beside them a wrong guess 3. Some rows have no distribution."""
    draft, first = Draft.committed_only({0: [5]}).grow(torch.tensor([0]), torch.tensor([[1, 3]]))
    draft, _ = draft.grow(first[:1], torch.tensor([[2]]))
    target = torch.nn.functional.one_hot(torch.tensor([1, 2, 0, 4]), V).float()
    target[empty] = weight
    generators = {0: torch.Generator().manual_seed(0)}
    if path is not None:
        verdict = verify_sampled(draft, target, generators)
        assert (verdict.paths, verdict.accepted, verdict.next_tokens) == ((path,), (len(path) - 1,), (following,))
        return
    with pytest.raises(RequestFailed) as failure:
        verify_sampled(draft, target, generators)
    assert failure.value.slot == 0
    assert isinstance(failure.value.error, NoTokenError if weight == 0 else DecodingError)

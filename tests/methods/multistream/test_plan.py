"""Plans, the trees that they make, what a threshold prunes, and how many parameters streams have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.decode.tiny_decoders import prompts
from vivace.core.config import ModelConfig
from vivace.core.seams import Draft
from vivace.core.step import Step
from vivace.decode.tree import every_path, grown
from vivace.errors import ConfigError
from vivace.methods.multistream.calibration import kept_edges, threshold_for
from vivace.methods.multistream.config import MultistreamConfig, StreamPlan, plans_to_try
from vivace.methods.multistream.forward import StreamForwardPass
from vivace.methods.multistream.streams import Streams
from vivace.train.data import TokenBatch


@pytest.mark.parametrize(("width", "count"), [(2048, 40_960), (4096, 81_920), (256, 5_120)])
def test_the_papers_count_of_parameters(width: int, count: int) -> None:
    """Gamma E + 2 r E; 20 E with four streams and rank eight, as the paper's table has it."""
    config = MultistreamConfig(streams=4, insertion_layer=1, rank=0, bottleneck=0, pruner_rank=8)
    assert config.num_paper_parameters(width) == count
    model = ModelConfig(
        vocab_size=8, width=width, num_layers=2, num_heads=1, num_kv_heads=1, head_dim=8, ffn_width=8, max_positions=8
    )
    assert sum(p.numel() for p in Streams(config, model).parameters()) == count


def test_streams_inserted_lower_go_on_from_those_above_them(deep, streams) -> None:
    model, above = deep(torch.float32), streams(torch.float32, insertion_layer=4)
    wanted = replace(above.config, insertion_layer=2, feedback=True)
    assert above.config.precedes(wanted)
    assert not wanted.precedes(above.config)
    assert not replace(above.config, rank=8).precedes(wanted)
    made = Streams(wanted, model.config)
    made.take_over(Streams(above.config, model.config), above.tensors())
    which = torch.zeros(1, dtype=torch.int64)
    known, found = above.deltas(which), made.deltas(which)
    for site, weight in known.up.items():
        assert torch.equal(found.up[site], weight)
        assert torch.equal(found.down[site], known.down[site])
    assert all(not found.up[site].any() for site in set(found.up) - set(known.up))
    assert torch.equal(made.embeddings, above.embeddings)
    assert torch.equal(made.pruner.up, above.pruner.up)


def test_feedback_on_every_node_needs_a_pruning_layer() -> None:
    config = MultistreamConfig(feedback=True)
    assert {plan.attach for plan in plans_to_try(config)} == {"every", "kept"}
    StreamPlan((1,)).check_fits(config)
    without = MultistreamConfig(feedback=True, pruner_rank=0)
    assert {plan.attach for plan in plans_to_try(without)} == {"kept"}
    with pytest.raises(ConfigError, match="set attach to kept"):
        StreamPlan((1,)).check_fits(without)


def test_the_papers_largest_tree_fits_a_pass() -> None:
    """Gamma 4 and k 2 with streams on every node."""
    assert StreamPlan((2, 2, 2, 2)).num_rows == 30 + 31 * 4


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2), (3, 2, 1), (4, 4)], ids=str)
def test_a_tree_has_every_path_through_the_streams(deep, widths) -> None:
    """Node count, ancestors-or-self, the same position for the same depth; ones are a chain."""
    model = deep(torch.float32)
    plan = StreamPlan(widths, "kept")
    levels = [[10 * depth + place for place in range(width)] for depth, width in enumerate(widths)]
    draft = grown(Draft.committed_only({0: [1, 2], 1: [3]}), {1: every_path(levels)})
    assert len(draft.tokens) - 3 == plan.num_nodes
    assert draft.is_chain is (set(widths) == {1})
    leaves = [row for row, depth in enumerate(draft.depths) if depth == len(widths)]
    paths = {tuple(draft.lists.tokens[row] for row in draft.path(leaf)) for leaf in leaves}
    assert len(paths) == len(leaves) == torch.tensor(widths).prod()
    step = Step.of(draft, model.new_cache(2, 64))
    assert step.position.tolist() == [0, 1, *draft.depths[2:]]
    if step.tail is not None:
        assert (step.tail >= 0).sum(1).tolist() == [1, 2, *(depth + 1 for depth in draft.depths[2:])]


def test_a_pruned_draft_keeps_its_node_numbers() -> None:
    draft = grown(Draft.committed_only({0: [1], 1: [2]}), {0: every_path([[5, 6], [7, 8]]), 1: every_path([[9]])})
    assert draft.lists.parent == [-1, -1, 0, 0, 2, 2, 3, 3, 1]
    kept = draft.only([0, 1, 3, 7, 8])
    assert kept.lists.tokens == [1, 2, 6, 8, 9]
    assert kept.lists.node == [0, 0, 2, 6, 1]
    assert kept.lists.parent == [-1, -1, 0, 2, 1]
    assert kept.depths == [0, 0, 1, 2, 1]


@torch.no_grad()
def test_a_higher_threshold_keeps_a_part_of_what_a_lower_one_keeps(deep, streams) -> None:
    """Subsets, closed under parents, roots always, zero keeps all."""
    model = deep(torch.float32)
    made = streams(torch.float32, noise=0.5)
    generator = torch.Generator().manual_seed(3)
    levels = torch.randint(0, 97, (2, 6), generator=generator).tolist()
    draft = grown(Draft.committed_only({0: prompts(2, seed=4)[1]}), {0: every_path(levels)})
    cache = model.new_cache(1, 128)
    step = Step.of(draft, cache)
    entering = model.run(model.embed(draft.tokens, step), step, 0, 3)
    before: set[int] = set(range(len(draft.tokens)))
    sizes = []
    for threshold in (0.0, 1e-5, 1e-3, 1e-2, 0.1, 0.99):
        climb = StreamForwardPass(made, StreamPlan((1,), threshold=threshold))
        kept = set(climb.surviving(model, draft, entering))
        assert kept <= before
        assert all(draft.lists.parent[row] in kept for row in kept if draft.lists.parent[row] >= 0)
        assert {row for row, depth in enumerate(draft.depths) if depth == 0} <= kept
        before = kept
        sizes.append(len(kept))
    assert sizes[0] == len(draft.tokens)
    assert sizes[-1] < sizes[2] < sizes[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StreamPlan(()), "at least one"),
        (lambda: StreamPlan((3, 3, 3, 3)), "604 rows"),
        (lambda: StreamPlan((1,), threshold=1.0), "threshold must be"),
        (lambda: MultistreamConfig(streams=9), "between 1 and 8"),
        (lambda: MultistreamConfig(insertion_layer=0), "at least 1"),
        (lambda: MultistreamConfig(rank=-1), "must be >= 0"),
        (lambda: MultistreamConfig(insertion_layer=6).check_fits(6), "below the top"),
        (lambda: StreamPlan((1, 1)).check_fits(MultistreamConfig(streams=1)), "deeper than the 1 streams"),
        (lambda: StreamPlan((1,), threshold=0.1).check_fits(MultistreamConfig(pruner_rank=0)), "without a pruner"),
    ],
)
def test_plans_that_cannot_be_are_refused(make, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_every_plan_to_try_fits() -> None:
    config = MultistreamConfig(streams=3)
    plans = plans_to_try(config)
    assert len(set(plans)) == len(plans) > 20
    for plan in plans:
        plan.check_fits(config)


def test_a_calibrated_threshold_spares_the_share_it_says(deep, streams) -> None:
    model, made = deep(torch.float32), streams(torch.float32, noise=0.5)
    tokens = torch.randint(0, 97, (4, 40), generator=torch.Generator().manual_seed(0))
    batch = TokenBatch(tokens, torch.arange(40).expand(4, 40) >= 4)
    edges = kept_edges(model, made, batch)
    assert edges.shape == (4 * 36,)
    for surviving in (0.98, 0.5, 1.0):
        threshold = threshold_for([edges[:50], edges[50:]], surviving)
        assert (edges >= threshold).float().mean() >= surviving
        assert (edges > threshold).float().mean() < surviving
    with pytest.raises(ConfigError, match="needs edges"):
        threshold_for([])
    with pytest.raises(ConfigError, match="without a pruner"):
        kept_edges(model, streams(torch.float32, pruner_rank=0), batch)

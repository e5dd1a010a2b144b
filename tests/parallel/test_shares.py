from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vivace.checkpoint.load import fused
from vivace.checkpoint.names import Target, TensorPiece
from vivace.core.config import ModelConfig
from vivace.errors import ConfigError
from vivace.parallel.shares import HEAD_PART, shares_of

SMOLLM2 = ModelConfig(
    **{"vocab_size": 49152, "width": 576, "num_layers": 30, "max_positions": 64},
    **{"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "ffn_width": 1536},
)
"""The shape of SmolLM2-135M."""


def weights_of(config: ModelConfig) -> int:
    """Numbers in the matrices of a layer."""
    heads = 2 * config.head_dim * (config.num_heads + config.num_kv_heads)
    return config.width * (heads + (3 if config.gated else 2) * config.ffn_width)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 9])
def test_every_head_and_column_has_a_rank(num_ranks: int) -> None:
    shares = shares_of(SMOLLM2, num_ranks)
    for ranges, count in (("heads", 9), ("columns", 1536)):
        covered = [place for share in shares for place in range(*getattr(share, ranges))]
        assert covered == list(range(count))
    for share in shares:
        own = share.config(SMOLLM2)
        readers = {head // SMOLLM2.group for head in range(*share.heads)}
        assert readers == set(range(*share.kv_heads))
        assert own.num_heads % own.num_kv_heads == 0
        assert share.num_holders == sum(other.kv_heads == share.kv_heads for other in shares)


def test_columns_make_up_for_uneven_heads() -> None:
    first, second = shares_of(SMOLLM2, 2)
    assert (first.kv_heads, second.kv_heads) == ((0, 2), (2, 3))
    assert first.columns[1] < 768
    work = [weights_of(share.config(SMOLLM2)) for share in (first, second)]
    head = SMOLLM2.vocab_size * SMOLLM2.width / SMOLLM2.num_layers
    assert work[0] + HEAD_PART * head == pytest.approx(work[1], rel=0.03)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_rank_0_holds_the_head_and_less_of_the_layers(num_ranks: int) -> None:
    head = SMOLLM2.vocab_size * SMOLLM2.width
    held = [SMOLLM2.num_layers * weights_of(share.config(SMOLLM2)) for share in shares_of(SMOLLM2, num_ranks)]
    assert held[0] < min(held[1:])
    assert (held[0] + head) / (sum(held) + head) <= {2: 0.6, 3: 0.48, 4: 0.41}[num_ranks]


def test_a_large_head_leaves_rank_0_some_columns() -> None:
    small = replace(SMOLLM2, num_layers=2, vocab_size=1 << 18)
    first, second = shares_of(small, 2)
    assert 0 < first.columns[1] < second.columns[1] - second.columns[0]


def test_a_slow_rank_takes_less() -> None:
    shares = shares_of(replace(SMOLLM2, num_heads=12, num_kv_heads=12, vocab_size=1), 2, [2.0, 1.0])
    work = [weights_of(share.config(SMOLLM2)) for share in shares]
    assert work[0] / work[1] == pytest.approx(2.0, rel=0.03)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(4, 2, 5), (4, 2, 8), (9, 3, 10)])
def test_too_many_ranks_are_refused(heads: int, kv_heads: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"{ranks} ranks cannot share"):
        shares_of(replace(SMOLLM2, num_heads=heads, num_kv_heads=kv_heads), ranks)


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_and_columns_of_several_pieces(transposed: bool) -> None:
    whole = torch.arange(70).view(10, 7)
    pieces = (TensorPiece("a", 0, 4, transposed), TensorPiece("b", 4, 10, transposed))
    stored = [whole[:4], whole[4:]]
    target = Target((10, 7), pieces, rows=((1, 2), (3, 6), (9, 10)), columns=(2, 5))
    found = fused(target, [t.t().contiguous() if transposed else t for t in stored], torch.int64, torch.device("cpu"))
    assert target.shape_read == (5, 3)
    assert torch.equal(found, whole[[1, 3, 4, 5, 9]][:, 2:5])

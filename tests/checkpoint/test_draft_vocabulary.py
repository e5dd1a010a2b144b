"""A draft vocabulary is counted, written, read back, and refused where it is another model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vivace.checkpoint.draft_vocabulary import FILE, first_of, has_vocabulary, ranked, read_vocabulary, save_vocabulary
from vivace.errors import ConfigError, CorruptError, MismatchError, NotFoundError


def test_frequent_tokens_come_first_and_ends_before_them() -> None:
    ids = ranked([(5, 7, 7, 1), (7, 5, 3)], ends=(2, 1), vocab_size=10)
    assert ids.tolist() == [1, 2, 7, 5, 3, 0, 4, 6, 8, 9]
    assert first_of(ids, 4, 2).tolist() == [1, 2, 5, 7]
    assert first_of(ids, 99).tolist() == list(range(10))
    with pytest.raises(ConfigError, match="of 1 tokens leaves out an end-of-text token; give 2 at least"):
        first_of(ids, 1, 2)


def test_it_lies_beside_other_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not has_vocabulary(tmp_path)
    assert not has_vocabulary(None)
    save_vocabulary(tmp_path, torch.tensor([2, 7, 5]))
    assert has_vocabulary(tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"
    found = read_vocabulary(tmp_path, 10, (2,))
    assert (found.tolist(), found.dtype) == ([2, 7, 5], torch.int64)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([2, 7, 10], "names token 10; this model has tokens 0 to 9"),
        ([2, 7, 7], "names a token twice"),
        ([7, 2], r"does not begin with the end-of-text tokens of this model \(2\)"),
        ([], "holds no list of token ids"),
    ],
)
def test_another_models_is_refused(tmp_path: Path, ids: list[int], message: str) -> None:
    save_vocabulary(tmp_path, torch.tensor(ids))
    with pytest.raises(MismatchError, match=message):
        read_vocabulary(tmp_path, 10, (2,))


def test_a_missing_or_broken_one_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="make one: vivace tune METHOD --answers FILE"):
        read_vocabulary(tmp_path, 10, (2,))
    (tmp_path / FILE).write_bytes(b"nothing")
    with pytest.raises(CorruptError, match="truncated or not safetensors"):
        read_vocabulary(tmp_path, 10, (2,))

"""The draft vocabulary beside the weights of a method: token ids in a safetensors file, the most frequent first.

How many of them may be guessed is said by the plan of the method (``vocabulary``), which ``vivace tune`` chooses. The
ids can be written after the training as well, because the rows that are read are those of the decoder's own head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from vivace.checkpoint.files import read_tensors, staged, write_tensors
from vivace.errors import ConfigError, MismatchError, NotFoundError

FILE = "draft_vocabulary.safetensors"
_IDS = "ids"


def ranked(answers: Iterable[Sequence[int]], ends: Sequence[int], vocab_size: int) -> Tensor:
    """Return all tokens of a model: those that end a text, then the others, the most frequent in its answers first.

    Tokens that occur equally often, such as those that do not occur, are in the order of their ids, which is about
    that of their frequency where merges made them: of 109,000 tokens of held-back answers of SmolLM2-135M 96.3 % are
    among the 11,800 that occur in 440,000 others, and 97.4 % among 16,384 in this order.
    """
    counts = Counter(chain.from_iterable(answers))
    others = sorted(set(range(vocab_size)) - set(ends), key=lambda token: (-counts[token], token))
    return torch.tensor([*sorted(set(ends)), *others], dtype=torch.int32)


def save_vocabulary(folder: str | Path, ids: Tensor) -> None:
    """Write the ids, the most frequent first, beside the weights in ``folder``; other files there are kept.

    Raises:
        CheckpointError: the disk is full or may not be written; a previous file is as it was.
    """
    with staged(folder) as staging:
        write_tensors(staging / FILE, {_IDS: ids.to(torch.int32)})


def has_vocabulary(folder: str | Path | None) -> bool:
    """Return whether there is a draft vocabulary in a folder."""
    return folder is not None and (Path(folder) / FILE).is_file()


def read_vocabulary(folder: str | Path, vocab_size: int, ends: Sequence[int]) -> Tensor:
    """Read and check a draft vocabulary.

    Args:
        folder: that of the weights.
        vocab_size: number of tokens of the decoder.
        ends: its end-of-text tokens.

    Returns:
        (n,) int64 ids, the most frequent first.

    Raises:
        NotFoundError: there is none.
        MismatchError: it is of another model: an id is twice there or none of the decoder's, or an end-of-text token is
            missing, without which no draft could end.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise NotFoundError(
            f"the plan in {folder} guesses from a draft vocabulary and there is no {FILE}; make one: "
            "vivace tune METHOD --answers FILE"
        )
    ids = read_tensors(path).get(_IDS)
    if ids is None or ids.dim() != 1 or len(ids) == 0 or ids.dtype not in (torch.int32, torch.int64):
        raise MismatchError(f"{path} holds no list of token ids")
    ids = ids.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        wrong = next(token for token in ids.tolist() if not 0 <= token < vocab_size)
        raise MismatchError(f"{path} names token {wrong}; this model has tokens 0 to {vocab_size - 1}")
    if len(ids.unique()) < len(ids):
        raise MismatchError(f"{path} names a token twice")
    if missing := sorted(set(ends) - set(ids[: len(set(ends))].tolist())):
        raise MismatchError(
            f"{path} does not begin with the end-of-text tokens of this model ({', '.join(map(str, missing))}), so no "
            "draft could end"
        )
    return ids


def first_of(ids: Tensor, size: int, least: int = 1) -> Tensor:
    """Return the ``size`` most frequent tokens in ascending order; all of them where there are fewer.

    Raises:
        ConfigError: not even the end-of-text tokens, ``least`` of them, are among so few.
    """
    if size < least:
        raise ConfigError(f"a draft vocabulary of {size} tokens leaves out an end-of-text token; give {least} at least")
    return ids[:size].sort().values

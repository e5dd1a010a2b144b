"""The tokenizer of a model that is trained from scratch, learnt from its rows and kept for resumed runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vivace.checkpoint.bpe import save_bpe, train_bpe
from vivace.checkpoint.files import read_json
from vivace.errors import MismatchError
from vivace.files import write_text
from vivace.train.resume import STATE
from vivace.train.variation import Pair, digest_of

LEARNT_FROM = "learnt_from.json"
"""File beside a tokenizer that says for which rows and which shape it was learnt."""


def own_tokenizer(
    run: Path, pairs: Sequence[Pair], config: Mapping[str, Any], num_positions: int, *, is_chat: bool = True
) -> Path:
    """Return the folder of the tokenizer of a run, which is learnt from its rows if it is not there yet.

    Args:
        run: folder of the run.
        pairs: the rows.
        config: ``config.json`` of the model, which names the size of the vocabulary; it is written beside.
        num_positions: largest number of tokens of a text.
        is_chat: whether the tokenizer gets a chat template.

    Raises:
        MismatchError: the run began with the tokenizer of other rows, or of another shape.
    """
    folder = run / "tokenizer"
    learnt_from = {"data": digest_of(pairs), "config": config}
    known = folder / LEARNT_FROM
    if (folder / "config.json").exists() and (not known.exists() or read_json(known) == learnt_from):
        return folder
    if known.exists() and any(run.rglob(STATE)):
        raise MismatchError(f"{run} belongs to a run with another recipe or other data; start in an empty folder")
    texts = dict.fromkeys(prompt for prompt, _ in pairs)
    pieces = train_bpe([*texts, *(answer for _, answer in pairs)], int(config["vocab_size"]))
    save_bpe(pieces, folder, num_positions, is_chat=is_chat)
    write_text(known, json.dumps(learnt_from, indent=2) + "\n")
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    return folder

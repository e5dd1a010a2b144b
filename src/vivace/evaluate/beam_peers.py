"""Beam search of transformers, as the benchmark of beams runs it: the same ids and settings, prompts padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vivace.evaluate.ctranslate2 import Search
from vivace.evaluate.peers import require_plain


class TransformersBeams:
    """``model.generate`` of transformers."""

    def __init__(self, folder: Path, dtype: str, reads_sources: bool, ends: Sequence[int]) -> None:
        """Load a checkpoint in a dtype; ``reads_sources`` says that it has an encoder, ``ends`` its end tokens.

        Raises:
            UnsupportedError: its weights are in a GGUF file, or quantized by another program.
        """
        require_plain(folder)
        import transformers

        kind = transformers.AutoModelForSeq2SeqLM if reads_sources else transformers.AutoModelForCausalLM
        self.model: Any = kind.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.reads_sources, self.ends = reads_sources, set(ends)
        pad = self.model.generation_config.pad_token_id
        self.pad = int(next(iter(ends)) if pad is None else pad)
        self.settings: Mapping[str, Any] = {
            "do_sample": False,
            "eos_token_id": list(ends),
            "pad_token_id": self.pad,
        }

    def __call__(self, batch: Sequence[Sequence[int]], search: Search) -> list[tuple[int, ...]]:
        """Return the best text of each prompt, end token excluded."""
        return self.generate(batch, search._asdict())

    @torch.inference_mode()
    def generate(self, batch: Sequence[Sequence[int]], settings: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """Return the texts of prompts under settings of ``model.generate``, end tokens excluded."""
        longest = max(map(len, batch))
        left = not self.reads_sources
        padding = [[self.pad] * (longest - len(prompt)) for prompt in batch]
        ids = [[*pads, *prompt] if left else [*prompt, *pads] for pads, prompt in zip(padding, batch, strict=True)]
        real = [[0] * len(pads) + [1] * len(prompt) for pads, prompt in zip(padding, batch, strict=True)]
        mask = torch.tensor(real if left else [row[::-1] for row in real])
        found = self.model.generate(torch.tensor(ids), attention_mask=mask, **settings, **self.settings)
        return [self.cut(row) for row in found[:, longest if left else 1 :].tolist()]

    def cut(self, row: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a text up to its end token or the padding behind it."""
        stop = next((place for place, token in enumerate(row) if token in self.ends or token == self.pad), len(row))
        return tuple(row[:stop])

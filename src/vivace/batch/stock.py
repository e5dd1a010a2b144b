"""The first prompts of a file answered by plain transformers too: whose texts are the same, and how long both take.

Each prompt is answered alone by both, in turns, so that neither pads. Both have the same token ids, dtype and threads,
and transformers gets the settings of the run; what the checkpoint says itself, it reads itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vivace.decode.request import Request
from vivace.engine import Engine, Options
from vivace.errors import UnsupportedError
from vivace.evaluate.beam_peers import TransformersBeams

_SAME = (
    *("num_beams", "num_return_sequences", "length_penalty", "early_stopping", "no_repeat_ngram_size"),
    "repetition_penalty",
)
"""Options that transformers has under the same names."""


@dataclass(frozen=True)
class StockComparison:
    """How the answers of the first prompts compare with those of transformers."""

    num_prompts: int
    different: tuple[int, ...]
    """Numbers, from 1 on, of the prompts whose best text has other tokens."""
    seconds: float
    stock_seconds: float
    dtype: str


class Stock:
    """transformers, with the checkpoint of an engine and its settings."""

    def __init__(self, engine: Engine, options: Options) -> None:
        """Load the checkpoint once more.

        Args:
            engine: the model that answers.
            options: how it answers.

        Raises:
            UnsupportedError: transformers cannot be asked for the same: texts are drawn, or begin behind a LoRA or a
                soft prompt, or go on behind their end, or the checkpoint is not plain safetensors.
        """
        wrong = [
            why
            for why, holds in (
                ("texts are drawn by chance; give --temperature 0", not engine.sampling(options).is_greedy),
                ("it wears no LoRA of ours", options.adapter is not None),
                ("it has no soft prompts of ours", engine.prompt_pool is not None),
                ("texts go on behind their end; leave out ignore_eos", options.ignore_eos),
                ("it keeps stop strings, which end texts here", bool(engine.stop_strings(options))),
            )
            if holds
        ]
        if wrong:
            raise UnsupportedError(f"the answers are not compared with those of transformers: {wrong[0]}")
        self.engine = engine
        self.options = options
        self.dtype = str(engine.model.dtype).removeprefix("torch.")
        reads_sources = engine.model.encoder is not None
        self._peer = TransformersBeams(engine.folder, self.dtype, reads_sources, engine.tokenizer.eos_ids)

    def compare(self, prompts: Sequence[Any], progress: Callable[[int, int], None]) -> StockComparison:
        """Let both answer some prompts.

        Args:
            prompts: the first of a file.
            progress: called with the number of prompts that are compared, and of all.
        """
        different: list[int] = []
        ours_s = theirs_s = 0.0
        for number, prompt in enumerate(prompts, 1):
            request = self.engine.request(prompt, self.options)
            started = time.perf_counter()
            ours = [*self.engine.answer(request, self.options)][-1].result
            between = time.perf_counter()
            theirs = self._answer(request)
            ended = time.perf_counter()
            ours_s, theirs_s = ours_s + between - started, theirs_s + ended - between
            assert ours is not None
            if self._peer.cut(ours.token_ids) != theirs:
                different.append(number)
            progress(number, len(prompts))
        return StockComparison(len(prompts), tuple(different), ours_s, theirs_s, self.dtype)

    def _answer(self, request: Request) -> tuple[int, ...]:
        """Return the best text of transformers for a request, its end token left out."""
        source = request.tokens if request.source is None else request.source
        assert isinstance(source, tuple), "sources are token ids until they are read"
        settings = {name: getattr(self.options, name) for name in self.options.asked(_SAME)}
        settings |= {"max_new_tokens": request.max_new_tokens, "min_new_tokens": request.stop.min_new_tokens}
        if self.options.forced_bos_token_id is not None:
            settings["forced_bos_token_id"] = request.forced_first
        return self._peer.generate([source], settings)[0]

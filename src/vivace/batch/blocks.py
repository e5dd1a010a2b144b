"""A callable that answers blocks of rows, as Ray Data's ``map_batches`` passes them, where one machine is not enough.

::

    rows.map_batches(Answers, fn_constructor_kwargs={"model": "vivace-2m", "num_beams": 4}, concurrency=2)

Ray makes one object in each of its worker processes, so a model is loaded once there, and calls it with blocks, which
are mappings from columns to arrays. Nothing here needs Ray; any program that has rows in columns can call it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vivace.engine import Engine, Options, load
from vivace.errors import ConfigError


class Answers:
    """Adds the columns ``text`` and, with beams, ``score`` and other ``alternatives`` to blocks of prompts."""

    def __init__(
        self,
        model: str | None = None,
        *,
        column: str = "prompt",
        answer: str = "text",
        load_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Load a model.

        Args:
            model: as ``vivace.load`` takes it; None is the model that ships.
            column: where the prompts are.
            answer: where the answers go; ``score`` and ``alternatives`` are beside it.
            load_options: further arguments of ``vivace.load``.
            options: fields of ``Options``, for every prompt.

        Raises:
            ConfigError: an option is unknown or out of range, or a column of answers would replace the prompts.
            CheckpointError: the checkpoint is missing or broken.
        """
        Options.of(options)  # a wrong name is said before a model is read
        if column in (answer, "score", "alternatives") or answer in ("score", "alternatives"):
            raise ConfigError(
                f"prompts are in {column!r} and answers go to {answer!r}, 'score' and 'alternatives'; name another "
                "column for one of them"
            )
        self._column = column
        self._answer = answer
        self._options = options
        self._engine: Engine = load(model, **(load_options or {}))

    def __call__(self, block: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Return the block's columns with those of the answers, row by row.

        Raises:
            ConfigError: there is no column of prompts, a row is no text, or is empty.
        """
        if self._column not in block:
            raise ConfigError(f"a block has no column {self._column!r}; its columns are {', '.join(block)}")
        prompts = [str(one) if isinstance(one, str) else one for one in block[self._column]]
        wrong = next((place for place, one in enumerate(prompts) if not isinstance(one, str)), None)
        if wrong is not None:
            raise ConfigError(f"row {wrong} of a block has no text in {self._column!r}")
        if (empty := next((place for place, one in enumerate(prompts) if not one.strip()), None)) is not None:
            raise ConfigError(f"row {empty} of a block has an empty text in {self._column!r}; every row is one prompt")
        results = self._engine.generate(prompts, **self._options)
        found: dict[str, Any] = {**block, self._answer: [result.text for result in results]}
        if any(result.score is not None for result in results):
            found["score"] = [result.score for result in results]
        if any(result.alternatives for result in results):
            found["alternatives"] = [[other.text for other in result.alternatives] for result in results]
        return found

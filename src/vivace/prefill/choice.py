"""Turns what a caller asks for into the way in which a prompt is read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from vivace.checkpoint.adapters import base_hash
from vivace.core.model import Decoder
from vivace.decode.prefill import FULL, Prefill
from vivace.errors import ConfigError, UnsupportedError
from vivace.prefill.learned import KIND, LearnedScores
from vivace.prefill.pruned import PrunedPrefill, Pruning, check_model
from vivace.prefill.rivals.fastkv import FastKVPruning
from vivace.prefill.rivals.gemfilter import GemFilterPruning
from vivace.prefill.rivals.specprefill import SpecPruning
from vivace.prefill.schedule import SCORES, Schedule, parse_decode_keep, parse_keep
from vivace.prefill.table import MIN_PROMPT, PREFILLS, PrefillSpec, Reading, find_prefill

STATES: Mapping[str, type[Pruning]] = {
    "gemfilter": GemFilterPruning,
    "fastkv": FastKVPruning,
    "specprefill": SpecPruning,
}
"""By name, how those ways choose that choose in a manner of their own."""
MOST_KEPT = 64
"""Schedules that are kept, so that requests with the same one share passes."""


class Prefills:
    """The ways to read prompts of one model, each made when it is first asked for."""

    def __init__(self, model: Decoder, folder: Path | None = None, full: Prefill = FULL) -> None:
        """Read prompts of ``model``; what was learnt for it lies in ``folder``, where its checkpoint is.

        ``full`` is how prompts are read in full.
        """
        self._model = model
        self._folder = folder
        self._full = full
        self._read: LearnedScores | None = None
        self._made: OrderedDict[tuple[object, ...], PrunedPrefill] = OrderedDict()

    def of(self, asked: Reading, length: int) -> tuple[Prefill, str | None]:
        """Return how a prompt is read, and why in full where something else was asked for.

        Args:
            asked: the way and its settings; None stands for the way's own.
            length: tokens of the prompt.

        Raises:
            ConfigError: there is no such way, or a setting is out of range or has no effect.
            UnsupportedError: prompts of this model cannot be pruned.
        """
        name, keep, min_prompt, decode_keep = asked
        spec = find_prefill(name)
        if spec.keep is None:
            for what, value in (("keep", keep), ("min_prompt", min_prompt), ("decode_keep", decode_keep)):
                if value is not None:
                    raise ConfigError(
                        f"{what} has no effect on prefill {name}; leave it out, or choose another", field=what
                    )
            explain: Callable[[Decoder, int], str | None] | None = getattr(self._full, "reason_for", None)
            return self._full, None if explain is None else explain(self._model, length)
        if decode_keep is not None and not spec.can_return:
            able = " or ".join(other.name for other in PREFILLS.values() if other.can_return)
            raise ConfigError(
                f"decode_keep has no effect on prefill {name}; leave it out, or choose {able}", field="decode_keep"
            )
        shortest = MIN_PROMPT if min_prompt is None else min_prompt
        if shortest < 1:
            raise ConfigError(f"min_prompt must be at least 1, found {shortest}", field="min_prompt")
        check_model(self._model, name)
        schedule = self.schedule(spec, keep)
        shares = None if decode_keep is None else parse_decode_keep(decode_keep, schedule)
        if length < shortest:
            return self._full, f"the prompt has {length} tokens; prefill {name} begins at {shortest}"
        key = name, schedule, shares
        if key not in self._made:
            row_bytes = self._model.config.width * self._model.dtype.itemsize
            scored = any(point.score != SCORES[0] for point in schedule.points)
            learned = self.learned if scored else None
            self._made[key] = PrunedPrefill(
                spec, schedule, shares, width_bytes=row_bytes, learned=learned, state=STATES.get(name)
            )
        found = self._made[key]
        self._made.move_to_end(key)
        while len(self._made) > MOST_KEPT:
            self._made.popitem(last=False)
        return found, None

    def schedule(self, spec: PrefillSpec, keep: str | None) -> Schedule:
        """Return the schedule of a way to read prompts.

        Args:
            spec: the way.
            keep: a preset or a schedule; None is the way's own.

        Raises:
            ConfigError: a layer or share cannot be.
        """
        num_layers = self._model.config.num_layers
        if spec.prunes_below:
            return parse_keep(keep or spec.keep or "", 1, first=0, most=1)
        if keep is None and spec.has_plan and self.has_learned:
            keep = self.learned.plan.keep
        elif keep is None:
            keep = spec.keep or ""
            layer, colon, share = keep.partition(":")
            if layer.isdecimal():  # its low layer, or a model's last but one
                keep = f"{min(int(layer), num_layers - 1)}{colon}{share}"
        most = 1 if spec.prunes_once else None
        schedule = parse_keep(keep, num_layers, most=most, has_entries=spec.has_entries)
        if spec.reads_again:
            schedule = replace(schedule, reads_again=True)
        for point in schedule.points:
            if point.score != SCORES[0]:
                self.learned.check(point.layer, point.score)
        return schedule

    @property
    def has_learned(self) -> bool:
        """Return whether something was learnt for this model, or a schedule chosen."""
        return self._folder is not None and (self._folder / "adapters" / KIND).is_dir()

    @property
    def learned(self) -> LearnedScores:
        """Return what lies beside the checkpoint, read when it is first asked for.

        Raises:
            UnsupportedError: there is nothing.
            CheckpointError: it is broken or of another base.
        """
        if not self.has_learned:
            raise UnsupportedError(
                "the scores heads and taught are learnt on your prompts: vivace train lazy --model MODEL --data FILE",
                field="keep",
            )
        if self._read is None:
            assert self._folder is not None
            self._read = LearnedScores.read(self._folder / "adapters" / KIND, base_hash(self._folder))
            self._read.check_fits(self._model.config)
        return self._read

    def forget_learned(self) -> None:
        """Read what lies beside the checkpoint again when it is asked for: something else was written there."""
        self._read = None
        self._made.clear()

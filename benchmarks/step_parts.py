"""Timing the parts of a step on one machine: passes with nothing committed, and the work outside of passes in sessions.

Passes are timed as a session makes them. If several steps are made in one native call, drafts and verifications
alternate inside it, so that each finds in the processor's cache what the other left there, and the way to Python and
back is shared. Everything that is not a pass counts as the host's: building contexts, committing, emitting tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Context, Decided, Draft, Drafter, DraftState, TargetPass, Verdict
from vivace.decode.distributions import Distributions
from vivace.decode.forward import ForwardPass, threads_of
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.errors import ConfigError
from vivace.evaluate.roofline import run_pass, timed
from vivace.evaluate.speed_law import StepCosts

STEPS = 8
"""Number of steps that there is room for; more than one native call makes with drafts, and as many as without."""


@torch.inference_mode()
def measure_parts(
    model: Decoder, plain: Drafter, drafter: Drafter, tokens: Sequence[int], *, longest: int, repeats: int = 9
) -> StepCosts:
    """Time P, D(n) and V(n) after a text, in turns; nothing is committed, so every turn repeats the same step.

    Args:
        model: the target.
        plain: the drafter of plain decoding.
        drafter: the drafter of a greedy method; drafts shorter than asked for are counted as they are.
        tokens: the text; its last token is the one that drafts start from.
        longest: number of tokens of the longest draft.
        repeats: number of measurements per median.

    Raises:
        ConfigError: there are fewer than two tokens, or ``longest`` is below 1.
    """
    if len(tokens) < 2 or longest < 1:
        raise ConfigError(f"a step needs two tokens and a guess, found {len(tokens)} tokens and {longest} guesses")
    room = STEPS * (longest + 1)
    cache, climb = model.new_cache(1, len(tokens) + room + 1), ForwardPass()
    prompt = Draft.committed_only({0: list(tokens[:-1])}, device=cache.device)
    undrafted, drafting = plain.open(cache), drafter.open(cache)
    drafting.observe(prompt, climb.run(model, prompt, cache, chunk=True), None)
    cache.commit([0], [range(len(tokens) - 1)])
    law = Distributions({0: Request(tuple(tokens), room, drafter)}, {0: tokens}, cache.lengths)
    asked = [Context((0,), {0: tokens}, cache, law, {0: n}, room={0: room}) for n in range(longest + 1)]
    found: list[list[tuple[float, float]]] = [[] for _ in asked]
    with threads_of(model):
        for _ in range(repeats + 1):
            for n, context in enumerate(asked):
                found[n].append(_step_seconds(model, climb, drafting if n else undrafted, context))
    medians = [[statistics.median(part) for part in zip(*times[1:], strict=True)] for times in found]
    (given, alone), *drafts = medians
    return StepCosts(given + alone, tuple(drafted for drafted, _ in drafts), tuple(checked for _, checked in drafts))


def _step_seconds(model: Decoder, climb: ForwardPass, drafting: DraftState, context: Context) -> tuple[float, float]:
    """Return the seconds of drafting and of verifying, for a step or as means over the steps made in one native
    call.
    """
    found: list[Draft | Decided] = []
    [proposing] = timed(lambda: found.append(drafting.propose(context)), model.device)
    [proposed] = found
    if isinstance(proposed, Decided):
        [steps] = proposed.steps
        return proposed.draft_s / len(steps), (proposing - proposed.draft_s) / len(steps)
    [checking] = timed(lambda: run_pass(model, climb, proposed, context.cache), model.device)
    return proposing, checking


def host_seconds(model: Decoder, requests: Sequence[Request], *, repeats: int = 3) -> float:
    """Return the mean seconds per step outside of passes while requests are answered one by one, without first blocks.

    Raises:
        ConfigError: every answer ended with its first block.
    """
    found = []
    for _ in range(repeats + 1):
        watched = [_watch(model, request) for request in requests]
        steps = sum(count for _, count in watched)
        if steps < 1:
            raise ConfigError(f"{len(requests)} requests were answered in their first blocks: longer ones are needed")
        found.append(sum(seconds for seconds, _ in watched) / steps)
    return statistics.median(found[1:])


def _watch(model: Decoder, request: Request) -> tuple[float, int]:
    """Return the seconds outside of passes in all steps of an answer except the first, and the number of those
    steps.
    """
    watched = Watched(request.drafter)
    session = Session(model, num_slots=1, capacity=len(request.tokens) + request.max_new_tokens)
    session.admit(replace(request, drafter=watched))
    first_s, host_s, steps = 0.0, 0.0, 0
    for emitted in session.drain():
        first_s = first_s or watched.passes_s
        host_s = emitted.stats.decode_s - (watched.passes_s - first_s)
        steps = emitted.stats.num_spec_steps - 1
    return host_s, steps


class Watched:
    """A drafter that measures the passes of its session: the native call, or from the draft to the verdict."""

    def __init__(self, drafter: Drafter) -> None:
        """Wrap ``drafter``, whose behaviour does not change."""
        self.name = drafter.name
        self.passes_s = 0.0
        self._drafter = drafter

    @property
    def leaves_all_entries(self) -> bool:
        """Return whether the watched drafter does."""
        return self._drafter.leaves_all_entries

    def text_bytes(self, entries: int) -> int:
        """As much as the drafter's own."""
        return self._drafter.text_bytes(entries)

    def open(self, cache: KVCache) -> WatchedState:
        """Return the state of the session that is measured."""
        return WatchedState(self, self._drafter.open(cache))


class WatchedState:
    """The state of a measured drafter."""

    def __init__(self, watched: Watched, inner: DraftState) -> None:
        """Wrap ``inner`` and add its times to ``watched``."""
        self.traversal = inner.traversal
        self._watched, self._inner = watched, inner
        self._started, self._is_decided = 0.0, False
        self.commit, self.truncate, self.release = inner.commit, inner.truncate, inner.release
        self.saved, self.restore, self.extend, self.fork = inner.saved, inner.restore, inner.extend, inner.fork

    @property
    def reason(self) -> str | None:
        """The wrapped drafter's reason."""
        return self._inner.reason

    def propose(self, context: Context) -> Draft | Decided:
        """Return the wrapped drafter's proposal; the passes begin here."""
        self._started = time.perf_counter()
        proposed = self._inner.propose(context)
        self._is_decided = isinstance(proposed, Decided)
        if self._is_decided:
            self._watched.passes_s += time.perf_counter() - self._started
        return proposed

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Pass the verdict to the wrapped drafter; if no native call has decided already, the passes end here."""
        if verdict is not None and not self._is_decided:
            self._watched.passes_s += time.perf_counter() - self._started
        self._inner.observe(draft, passed, verdict)

"""``/v1/moderations``: what the server's guard says about texts, in OpenAI's format.

Rules read the text. Where the guard has a head, the text is read as a prompt in the batch of all other requests, for
one token that nobody sees: the head then judges the residuals that this leaves.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vivace.adapters.guard.guard import GuardedPrompt, TextGuard
from vivace.decode.request import Request
from vivace.engine import Engine, Options
from vivace.serve.api_error import APIError
from vivace.serve.bodies import ModerationBody
from vivace.serve.catalog import Catalog
from vivace.serve.validation import fields_of


class Moderation:
    """Prepares requests to ``/v1/moderations`` and writes their replies, for one engine."""

    def __init__(self, engine: Engine, catalog: Catalog, max_model_len: int) -> None:
        """Take the engine's guard; without one every request is refused."""
        self._engine = engine
        self._catalog = catalog
        self._max_model_len = max_model_len

    @property
    def guard(self) -> TextGuard:
        """Return the engine's guard.

        Raises:
            APIError: there is none (403).
        """
        if self._engine.guard is None:
            raise APIError(403, "this server has no guard; start it with --guard DIR_OR_FILE", code="no_guard")
        return self._engine.guard

    def asked(self, raw: bytes) -> tuple[list[str], list[Request]]:
        """Return the texts of a body, and the requests that have the model read them; none where no head judges.

        Raises:
            UsageError: a field is wrong, a text does not fit, or a rule takes too long on it.
        """
        guard = self.guard
        body = fields_of(ModerationBody, raw)
        self._catalog.find(body.model)
        texts = [body.input] if isinstance(body.input, str) else list(body.input)
        if guard.head is None or not guard.head.judges("input"):
            return texts, []
        options = Options(max_new_tokens=1, method="plain", do_sample=False)
        requests = []
        for text in texts:
            request = self._engine.request(text, options)
            request.check_fits(self._max_model_len)
            requests.append(replace(request, guard=GuardedPrompt(guard, {}, notes_all=True), refused=None, prefix=None))
        return texts, requests

    def reply(self, texts: Sequence[str], measured: Sequence[dict[str, float]]) -> dict[str, Any]:
        """Return the reply.

        Args:
            texts: what was asked about.
            measured: scores of the head's categories, for each text; empty without a head.
        """
        results = [self._result(text, dict(measured[place]) if measured else {}) for place, text in enumerate(texts)]
        return {"id": f"modr-{uuid.uuid4().hex}", "model": self._catalog.base, "results": results}

    def _result(self, text: str, scores: dict[str, float]) -> dict[str, Any]:
        found = dict.fromkeys(self.guard.categories, False)
        if self.guard.head is not None:
            config, thresholds = self.guard.head.config, self.guard.head.plan.thresholds
            for name, threshold in zip(config.categories, thresholds, strict=True):
                found[name] = scores.get(name, 0.0) >= threshold
        for name, score in self.guard.flagged(text).items():
            found[name], scores[name] = True, score
        return {
            "flagged": any(found.values()),
            "categories": found,
            "category_scores": {name: scores.get(name, 0.0) for name in found},
        }

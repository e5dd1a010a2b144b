"""The models that a server offers: the base, the base with other draft weights, and the base with each LoRA."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vivace.checkpoint.lora_config import is_lora
from vivace.core.low_rank import AdapterSource
from vivace.core.seams import Drafter
from vivace.engine import Engine
from vivace.errors import ConfigError, NotFoundError, VivaceError, nearest
from vivace.methods.composition import Methods, adapters_by_method
from vivace.methods.table import METHODS
from vivace.serve.api_error import APIError


class Catalog:
    """Maps names of models and methods to drafters. Only LoRAs may come and go while the server runs."""

    def __init__(self, engine: Engine, base: str, method: str, adapters: Mapping[str, str | Path]) -> None:
        """Load every adapter.

        Args:
            engine: the base model.
            base: the name it is served under.
            method: how requests are decoded that do not say.
            adapters: folders by the name they are served under.

        Raises:
            ConfigError: two models of one name.
            CheckpointError: an adapter is missing, broken or of another base.
            UsageError: the method does not exist, or cannot be had here.
        """
        self.base = base
        self.created = int(time.time())
        self.num_layers = engine.model.config.num_layers
        self._engine = engine
        self._loras = engine.adapters
        self._methods: dict[str, Methods] = {base: engine.methods}
        self._defaults: dict[str, str] = {base: method}
        for name, folder in adapters.items():
            if name in self._methods:
                raise ConfigError(f"two models are called {name!r}; give the adapter another name")
            if is_lora(folder):
                self.add(name, Path(folder))
                continue
            found = adapters_by_method([folder], engine.folder)
            methods = Methods(engine.model, engine.folder, found, engine.methods.second, memory=engine.memory)
            methods.remembers = engine.methods.remembers
            self._methods[name] = methods
            kind = next(iter(found))
            self._defaults[name] = method if method == "auto" or METHODS[method].adapter == kind else kind
        for name in self._loras.names:
            if name in self._methods:
                raise ConfigError(f"two models are called {name!r}; give the adapter another name")
            engine.methods_of(name)  # reads its draft weights, if it has any
        for name, default in self._defaults.items():
            self._methods[name].drafter(default)

    def names(self) -> list[str]:
        """Return the names of all models that are served, the base first."""
        return [*self._methods, *self._loras.names]

    def add(self, name: str, folder: Path) -> None:
        """Serve a LoRA from now on.

        Raises:
            ConfigError: the name is taken, or cannot be one.
            VivaceError: it cannot be read, or there is no room for it.
        """
        if name in self._methods:
            raise ConfigError(f"the name {name!r} is taken by a model of this server; give another name")
        self._loras.add(name, folder)
        try:
            self._engine.methods_of(name)  # its draft weights, if it has any
        except VivaceError:
            self._loras.remove(name)
            raise

    def remove(self, name: str) -> None:
        """Serve a LoRA no more.

        Raises:
            APIError: there is none of this name (404).
            BusyError: a request runs or waits with it.
        """
        try:
            self._loras.remove(name)
        except NotFoundError as exc:
            raise APIError(404, str(exc), param="lora_name", code="model_not_found") from None

    def source(self, model: str) -> AdapterSource | None:
        """Return the LoRA of a model, as a request carries it; for a model that is none the one, if there is such, that
        all wear which name none.

        Raises:
            APIError: it has gone since it was found (404).
        """
        if not self.is_lora(model):
            return self._loras.worn(None)
        try:
            return self._loras.source(model)
        except NotFoundError as exc:
            raise APIError(404, str(exc), param="model", code="model_not_found") from None

    def is_lora(self, model: str) -> bool:
        """Return whether a model is the base with a LoRA that the request names."""
        return model not in self._methods

    def _of(self, model: str) -> str:
        """Return the name under which settings of a model are kept: those of a LoRA are the base's."""
        return model if model in self._methods else self.base

    def _methods_of(self, model: str) -> Methods:
        """Return the drafters of a model; those of a LoRA are the base's, unless it has draft weights of its own."""
        if model in self._methods:
            return self._methods[model]
        try:
            return self._engine.methods_of(model)
        except NotFoundError as exc:
            raise APIError(404, str(exc), param="model", code="model_not_found") from None

    def find(self, name: str | None) -> str:
        """Return the model that a request names; the base where it names none.

        Raises:
            APIError: there is no model of that name (404).
        """
        if name is None:
            return self.base
        if name not in self._methods and name not in self._loras:
            raise APIError(
                404,
                f"there is no model {name[:200]!r}{nearest(name, self.names())}",
                param="model",
                code="model_not_found",
            )
        return name

    def methods(self, model: str) -> list[str]:
        """Return the methods that can run with this model."""
        return ["auto", *self._methods_of(model).runnable()]

    def method(self, model: str, asked: str | None) -> str:
        """The method a request is decoded with.

        Args:
            model: as ``find`` gave it.
            asked: what the request says.

        Raises:
            APIError: an unknown method, or one that is not ready here.
        """
        chosen = asked or self._defaults[self._of(model)]
        if chosen not in self.methods(model):
            raise APIError(
                400,
                f"method {chosen[:100]!r} is not ready on this server; use one of {', '.join(self.methods(model))}",
                param="method",
            )
        return chosen

    def drafter(self, model: str, method: str, num_draft_tokens: int | None, quality: float | None = None) -> Drafter:
        """Return the drafter of a method.

        Raises:
            APIError: a number of guesses, or a quality, is given for a method that does not take one.
        """
        try:
            return self._methods_of(model).drafter(method, num_draft_tokens, quality)
        except ConfigError as exc:
            raise APIError(400, str(exc), param="num_draft_tokens" if quality is None else "quality") from None

    def cards(self, max_model_len: int) -> list[dict[str, Any]]:
        """Return the entries of ``/v1/models``."""
        return [
            {
                "id": name,
                "object": "model",
                "created": self.created,
                "owned_by": "vivace",
                "root": self.base,
                "parent": None if name == self.base else self.base,
                "max_model_len": max_model_len,
                "num_layers": self.num_layers,
                "methods": self.methods(name),
                "default_method": self._defaults[self._of(name)],
            }
            for name in self.names()
        ]

"""The model that a checkpoint in few bits was made of, whose distribution a training gives back to it."""

from __future__ import annotations

from vivace.checkpoint.files import resolve
from vivace.checkpoint.load import load_decoder
from vivace.core.model import Decoder
from vivace.engine import Engine
from vivace.errors import MismatchError


def stored_model(name: str, engine: Engine) -> Decoder:
    """Return the decoder of a folder or Hub id in float32, frozen, on the device of the checkpoint made of it.

    Raises:
        NotFoundError: there is none.
        MismatchError: it is of another shape than the checkpoint.
    """
    stored = load_decoder(resolve(name), dtype="float32")
    if stored.config != engine.model.config:
        raise MismatchError(f"{name} has another shape than {engine.folder}, which is not made of it")
    stored.requires_grad_(False)
    return stored.to(engine.model.device)

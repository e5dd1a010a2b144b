"""The OpenAPI document of routes that parse their bodies themselves, beside the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_PLACE = "#/components/schemas/{model}"


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """Return the part of the document for a route that takes this body."""
    schema = {"$ref": _PLACE.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Add the schemas of these bodies to an application's document."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_PLACE)
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return document

    setattr(app, "openapi", openapi)  # noqa: B010 - an assignment, as FastAPI's manual shows it, is an error to mypy

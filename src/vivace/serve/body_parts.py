"""What the bodies of requests are made of: formats of answers, tools, and the turns of a conversation."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

FIRST = Field(fail_fast=True)
"""Stops validating a list at its first error: a body of a megabyte can contain hundreds of thousands."""


class StrictModel(BaseModel):
    """A body in which unknown fields, and values of another type, are errors; null counts as left out."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        left = {name: value for name, value in values.items() if value is not None}
        if cls.model_config.get("extra") == "forbid":
            known = {field.alias or name for name, field in cls.model_fields.items()}
            for name in [name for name in left if name not in known][1:]:
                del left[name]  # one of them is enough to refuse the body
        return left


class StreamOptions(StrictModel):
    """What a stream contains besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_obfuscation(cls, values: Any) -> Any:
        """Accept ``include_obfuscation: false``: this server never pads chunks to hide their length."""
        if isinstance(values, dict) and values.get("include_obfuscation") is False:
            return {name: value for name, value in values.items() if name != "include_obfuscation"}
        return values


class Schema(StrictModel):
    """A named JSON schema to which the answer conforms."""

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """The format to which the answer conforms."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type 'json_schema' needs the field json_schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError("json_schema has an effect only with type 'json_schema'")
        return self


class Function(StrictModel):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """Return the JSON schema of the arguments; a function without parameters takes none."""
        return self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(StrictModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(StrictModel):
    """The name of the function that the answer has to call."""

    name: str


class NamedTool(StrictModel):
    """The function that the answer has to call."""

    type: Literal["function"]
    function: FunctionName


class TextPart(StrictModel):
    """A text part of a message whose content is a list."""

    type: Literal["text"]
    text: str


class Message(StrictModel):
    """One turn of a conversation; the chat template has to read its further fields (``message_fields.py``)."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: str = Field(min_length=1)
    content: str | Annotated[list[TextPart], FIRST] = ""

    def template_values(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        more = dict(self.model_extra or {})
        if isinstance(more.get("tool_calls"), list):
            more["tool_calls"] = [_with_values(call) for call in more["tool_calls"]]
        return {"role": self.role, "content": text, **more}


def _with_values(call: Any) -> Any:
    """Return a call as templates read it: with its arguments as values, which are text in OpenAI's messages."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):  # an answer that was cut off; the template shows what there is
        return call
    return {**call, "function": {**call["function"], "arguments": values}}

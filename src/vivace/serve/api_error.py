"""The errors of the HTTP interface, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vivace.errors import (
    BusyError,
    CapacityError,
    DecodingError,
    MemoryLimitError,
    NoTokenError,
    UsageError,
    VivaceError,
)

_KINDS: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "invalid_request_error",
    500: "server_error",
    503: "server_error",
}
_HEADERS: Mapping[int, dict[str, str]] = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}


class APIError(UsageError):
    """A request that is refused or has failed, with the HTTP status of the response."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """Refuse.

        Args:
            status: of the response.
            message: what was asked, what was found, what to do; one line.
            param: the field at fault.
            code: short name for programs.
        """
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """Return the JSON body of the response."""
        return error_body(self.status, str(self), param=self.param, code=self.code)

    @property
    def headers(self) -> dict[str, str]:
        """Return the HTTP headers of the response, such as ``Retry-After``."""
        return _HEADERS.get(self.status, {})


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the JSON of an error in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""
    return {
        "error": {"message": message, "type": _KINDS.get(status, "server_error"), "param": param, "code": code},
    }


def api_error_of(error: VivaceError) -> APIError:
    """Return the API error for an error of this package: 4xx where the request cannot be fulfilled, else 5xx."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, BusyError):
        return APIError(429, str(error), code="memory_exceeded")
    if isinstance(error, MemoryLimitError):
        return APIError(400, str(error), code="too_large_for_memory")
    if isinstance(error, CapacityError):
        return APIError(400, str(error), code="context_length_exceeded")
    if isinstance(error, NoTokenError):
        return APIError(400, str(error), code="no_token_allowed")
    if isinstance(error, UsageError):
        return APIError(400, str(error), param=error.field)
    if isinstance(error, DecodingError):
        return APIError(500, "decoding this request failed; the server's log says why", code="decoding_failed")
    return APIError(500, "the server could not do this; its log says why", code="internal_error")

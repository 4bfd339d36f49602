"""Errors as the API tells them: problem documents (RFC 9457), always."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from forewarn.collectors.errors import ForewarnError, InputError, StorageError

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 5

_log = structlog.get_logger("forewarn.service")


class Problem(ForewarnError):
    """An answer other than success. `field` names what in the request was wrong."""

    def __init__(
        self, status: int, detail: str, *, field: str = "", headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.field, self.headers = status, detail, field, headers


def document(
    status: int, detail: str, *, field: str = "", headers: dict[str, str] | None = None
) -> JSONResponse:
    """A problem document as a response."""
    content: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
    }
    if field:
        content["field"] = field
    return JSONResponse(content, status, headers, MEDIA_TYPE)


def field_of(text: str) -> str:
    """The field that an InputError names before its first colon; empty when it names none."""
    head, colon, _ = text.partition(":")
    return head if colon and " " not in head else ""


def storage_problem(error: StorageError) -> JSONResponse:
    return document(503, str(error), headers={"Retry-After": str(RETRY_AFTER_S)})


def install(app: FastAPI) -> None:
    """Have every error of `app` answered by a problem document."""

    async def on_problem(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Problem)
        return document(error.status, error.detail, field=error.field, headers=error.headers)

    async def on_http(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return document(error.status_code, str(error.detail), headers=dict(error.headers or {}))

    async def on_invalid(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
        return document(422, f"{field}: {first['msg']}", field=field)

    async def on_input(_request: Request, error: Exception) -> JSONResponse:
        return document(422, str(error), field=field_of(str(error)))

    async def on_storage(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, StorageError)
        return storage_problem(error)

    async def on_anything(request: Request, error: Exception) -> JSONResponse:
        _log.error("request_failed", method=request.method, path=request.url.path, exc_info=error)
        return document(500, "an internal error; the service's log tells more")

    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(InputError, on_input)
    app.add_exception_handler(StorageError, on_storage)
    app.add_exception_handler(Exception, on_anything)

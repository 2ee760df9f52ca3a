"""Errors as OpenAI's clients read them: a status, and ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import functools
import logging
import operator
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)


class Refusal(Exception):
    """What a client is told in place of an answer.

    Attributes:
        status: of HTTP.
        body: what the answer holds.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status)


def of_validation(error: ValidationError, body: Any, expected: Mapping[str, str]) -> Refusal:
    """Names the first field of a body that is not as it should be, and says why.

    Args:
        expected: of some fields, by name, what to say in place of pydantic's message.
    """
    first: Any = error.errors()[0]
    path = [part for part in first["loc"] if _is_of_body(part)]
    given, message = first["input"], first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    for depth, part in enumerate(path):
        if part in expected and first["type"] not in ("missing", "value_error"):
            path, message = path[: depth + 1], f"expected {expected[part]}"
            given = functools.reduce(operator.getitem, path, body)
            break
    name = ".".join(map(str, path))
    if first["type"] == "missing":
        return Refusal(f"{name}: this field is required", param=path[0])
    return Refusal(f"{name}: {message}, got {_shown(given)}", param=path[0])


def _is_of_body(part: int | str) -> bool:
    """Whether it is a place in the body, and no kind of value that pydantic tried there, such as ``list[str]``."""
    return isinstance(part, int) or (re.fullmatch("[a-z_]+", part) is not None and part not in {"str", "int"})


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class _Caught:
    """Answers what nobody else caught. Starlette's own way raises it again behind the answer, and the server then
    closes the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal is_started
            is_started = is_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:
            if is_started or scope["type"] != "http":
                raise
            logger.exception("a request failed")
            refusal = Refusal(f"the server failed: {type(error).__name__}: {error}", status=500)
            await refusal.response()(scope, receive, send)


def install(app: FastAPI) -> None:
    """Has every error of the application be one of OpenAI's form."""

    @app.exception_handler(Refusal)
    async def refuse(request: Request, error: Refusal) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return Refusal(message, status=error.status_code).response()

    app.add_middleware(_Caught)

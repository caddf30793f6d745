"""Errors as answers: typed, with the matching HTTP status; JSON for programs, a page for people."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, TypeAlias

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from millrace.base.errors import MillraceError

_logger = logging.getLogger(__name__)

HTTP_STATUS: Final = {
    "INVALID_ARGUMENT": 422,
    "TICK_NOT_REACHED": 409,
    "TICK_TOO_OLD": 410,
    "POSITION_TRUNCATED": 410,
    "PERMISSION_DENIED": 403,
    "COLLECTION_NOT_FOUND": 404,
    "CHANNEL_NOT_FOUND": 404,
    "NODE_NOT_FOUND": 404,
    "INVALID_SETTINGS": 409,
    "INVALID_STREAM": 422,
    "STREAM_BUSY": 409,
    "PIPELINE_INVALID": 422,
    "PIPELINE_NOT_FOUND": 404,
    "PIPELINE_EXISTS": 409,
    "PIPELINE_CONFLICT": 409,
    "PIPELINE_BUSY": 409,
    "QUOTA_EXCEEDED": 409,
    "TOO_MUCH_WORK": 422,
    "SERVICE_BUSY": 503,
    "SECRET_UNREADABLE": 409,
    "SINK_REFUSED": 409,
    "COMMIT_FENCED": 409,
    "SINK_BUSY": 503,
    "LOG_UNAVAILABLE": 503,
    "META_UNAVAILABLE": 503,
    "CATALOG_BUSY": 503,
    "POSITIONS_BUSY": 503,
    "META_AMBIGUOUS": 503,
    "TOKEN_FILE_REFUSED": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""HTTP status by the code of a MillraceError. Others are 500."""


class ApiError(BaseModel):
    """An error in an answer."""

    code: str
    message: str
    retriable: bool
    problems: list[dict[str, str]] | None = None
    """Faults of a declaration: field, message and kind of each."""


class ErrorResponse(BaseModel):
    """The body of every answer that is not a success."""

    error: ApiError


ERROR_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    401: {"model": ErrorResponse, "description": "Not logged in."},
    403: {"model": ErrorResponse, "description": "No permission."},
    404: {"model": ErrorResponse, "description": "No such thing."},
    422: {"model": ErrorResponse, "description": "An invalid parameter."},
}
"""Descriptions of error answers for a route's documentation."""

ErrorRenderer: TypeAlias = Callable[[Request, int, ApiError], Response]


def install_error_handlers(app: FastAPI, page: ErrorRenderer | None) -> None:
    """Answer the errors of `app`; `page(request, status, fault)` renders one for a browser."""

    def answer(
        request: Request, status: int, code: str, message: str, retriable: bool = False, problems: Any = None
    ) -> Response:
        fault = ApiError(code=code, message=message, retriable=retriable, problems=problems)
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
        if page is not None and _is_page(request):
            found = page(request, status, fault)
            found.headers.update(headers or {})
            return found
        return JSONResponse(ErrorResponse(error=fault).model_dump(exclude_none=True), status, headers)

    async def handle_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, MillraceError)
        status = HTTP_STATUS.get(error.code, 500)
        if status == 500:
            _logger.error("%s %s: %s", request.method, request.url.path, error, exc_info=error)
        return answer(request, status, error.code, str(error), error.retriable, getattr(error, "problems", None))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        # The standard name of this status depends on Python's version.
        code = "BODY_TOO_LARGE" if error.status_code == 413 else HTTPStatus(error.status_code).name
        return answer(request, error.status_code, code, str(error.detail))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        wrong = "; ".join(f"{'.'.join(map(str, each['loc'][1:]))}: {each['msg']}" for each in error.errors())
        return answer(request, 422, "INVALID_ARGUMENT", wrong)

    async def unknown(request: Request, error: Exception) -> Response:
        _logger.error("%s %s", request.method, request.url.path, exc_info=error)
        return answer(request, 500, "INTERNAL", "Something failed here; this server's log has the details.", True)

    app.add_exception_handler(MillraceError, handle_error)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unknown)


def _is_page(request: Request) -> bool:
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    return not path.startswith("/api/") and path != "/metrics" and "text/html" in request.headers.get("accept", "")

"""Tag an answer, log lines and history entries with the id of the request they belong to.

A client may supply the id (``X-Request-ID``) to find its request in both logs.
"""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar
from typing import Final

REQUEST_ID_HEADER: Final = "x-request-id"
REQUEST_ID: Final[ContextVar[str]] = ContextVar("request", default="")
"""The id of the request that this context answers; empty outside a request."""
_TAKEN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def accept_request_id(given: str) -> str:
    """Return `given` if it is a valid request id, else a new id."""
    return given if _TAKEN.fullmatch(given) else uuid.uuid4().hex[:16]

"""What belongs to one request: an id that its answer, the lines of the log and the lines of the history bear.

Who asks may give one (``X-Request-ID``), so that his own log's lines are found by it, too.
"""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar
from typing import Final

REQUEST_ID_HEADER: Final = "x-request-id"
REQUEST_ID: Final[ContextVar[str]] = ContextVar("request", default="")
"""Of the request that is being answered here; "" outside of any."""
_TAKEN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def accept_request_id(given: str) -> str:
    """`given` where it can be one, else a new one."""
    return given if _TAKEN.fullmatch(given) else uuid.uuid4().hex[:16]

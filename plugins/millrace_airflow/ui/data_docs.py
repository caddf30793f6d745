"""The Data Docs of the quality checks, behind the login: pages of one folder, without scripts and foreign assets.

They are HTML that shows values of rows. Under Airflow's address a script among them would act as the reader, so scripts
are disabled.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from millrace.observe.observer import Observer
from millrace.operations.quality.data_docs import INDEX, docs_store
from millrace.storage.local import LocalStore
from millrace.storage.store import TableStore
from millrace_airflow.ui.access import Reader

POLICY: Final = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'self'"
)
MEDIA: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".jpg": "image/jpeg",
    ".gif": "image/gif",
    ".ico": "image/x-icon",
    ".woff": "font/woff",
    ".woff2": "font/woff2",
}
"""The media types that are served. Other files of the folder are not."""
_SWITCHED_OFF: Final = re.compile(
    r"""<script\b.*?</script\s*>|<footer>(?:(?!</footer>).)*newsletter.*?</footer>|<(?:link|img)\b[^>]*?\b(?:href|src)\s*=\s*["']?(?:https?:)?//[^>]*>""",
    re.IGNORECASE | re.DOTALL,
)
"""Content that the policy would block with browser warnings (scripts and foreign assets), and an advertisement.

The policy is the actual protection.
"""
_HANDLER: Final = re.compile(r"""(<[^<>]*?)\son[a-z]+\s*=\s*(?:"[^"]*"|'[^']*')""", re.IGNORECASE)
"""Inline event handlers of tags, for the same reason."""


def router(observer: Observer) -> APIRouter:
    """``GET /data-docs/<path>``."""
    made = APIRouter(include_in_schema=False)

    @made.get("/data-docs/{path:path}")
    def data_docs(request: Request, path: str, user: Reader) -> Response:
        name = path or INDEX
        data = read_inside(docs_store(observer.settings), name)
        if data is None:
            raise HTTPException(404, "No such page of the Data Docs: run the DAG quality to have them built.")
        media, headers = MEDIA[_suffix(name)], {"Content-Security-Policy": POLICY}
        if media != "text/html":
            return Response(data, media_type=media, headers=headers)
        page = _SWITCHED_OFF.sub("", data.decode("utf-8", "replace"))
        style = f'<link rel="stylesheet" href="{request.scope.get("root_path", "")}/static/data_docs.css"></head>'
        page = _HANDLER.sub(r"\1", page).replace("</head>", style, 1)
        return Response(page, media_type=media, headers=headers)

    return made


def read_inside(store: TableStore, name: str) -> bytes | None:
    """Return the file `name` of the Data Docs, if it is one that may be served."""
    parts = name.split("/")
    if _suffix(name) not in MEDIA or "\0" in name or not all(part and part.strip(".") for part in parts):
        return None
    try:
        if isinstance(store, LocalStore) and not (store.folder / name).resolve().is_relative_to(store.folder.resolve()):
            return None  # a link that leads outside
        return store.read(name)
    except (OSError, ValueError):
        return None


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()

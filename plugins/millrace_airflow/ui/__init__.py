"""The views inside Airflow, the REST API and the metrics of Millrace: one web application, mounted under ``/millrace``.

The application is built once the web server has started (millrace_airflow.ui.middleware), and no sooner, so that
schedulers and workers, which load the plugin too, pay nothing for it. :data:`EXTERNAL_VIEWS` is its place in the
navigation.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fastapi import FastAPI

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

URL_PREFIX: Final = "/millrace"
WAIT_SECONDS: Final = 0.5
"""How long a page request waits while the application is built, before it shows the starting page."""
STARTING: Final = b"""<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="1">
<title>Millrace</title></head>
<body><p>Millrace's pages are starting. This page loads again by itself.</p></body></html>"""


class LazyApp:
    """An ASGI application that is built by :meth:`build` or at its first request.

    Until then, pages show that it starts.
    """

    def __init__(self, build: Callable[[], FastAPI]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._app: FastAPI | None = None

    def build(self) -> FastAPI:
        """Build the application, once. Its imports take seconds."""
        with self._lock:
            if self._app is None:
                self._app = self._build()
            return self._app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if app is None:
            building = asyncio.ensure_future(asyncio.to_thread(self.build))  # other requests continue meanwhile
            if _is_page(scope) and not (await asyncio.wait({building}, timeout=WAIT_SECONDS))[0]:
                await _say_it_starts(send)
                return
            app = await building
        await app(scope, receive, send)


def _is_page(scope: Scope) -> bool:
    """Return whether the request is from a person who waits for a page."""
    accepts = [value for name, value in scope.get("headers", ()) if name == b"accept"]
    return scope["type"] == "http" and scope["method"] == "GET" and any(b"text/html" in each for each in accepts)


async def _say_it_starts(send: Send) -> None:
    headers = [(b"content-type", b"text/html; charset=utf-8"), (b"cache-control", b"no-store"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": STARTING})


def create_app() -> FastAPI:
    """Return the application, with the settings of this process and Airflow's login."""
    from millrace_airflow.ui.app import create_app as build

    return build()


def _view(name: str, route: str, path: str, icon: str) -> dict[str, Any]:
    return {
        "name": name,
        "href": f"{_base_path()}{URL_PREFIX}/{path}",
        "destination": "nav",
        "url_route": route,
        "category": "browse",
        "icon": f"{_base_path()}{URL_PREFIX}/static/{icon}.svg",
        "icon_dark_mode": f"{_base_path()}{URL_PREFIX}/static/{icon}-dark.svg",
    }


def _base_path() -> str:
    """Return the path of Airflow's address: empty, or a proxy's prefix."""
    from urllib.parse import urlsplit

    from airflow.sdk import conf

    return urlsplit(conf.get("api", "base_url", fallback="") or "").path.rstrip("/")


EXTERNAL_VIEWS: Final = [_view("Millrace", "millrace", "", "millrace") | {"category": None, "nav_top_level": True}]
"""For ``AirflowPlugin.external_views``: one entry of the navigation, with the pages as tabs inside it."""

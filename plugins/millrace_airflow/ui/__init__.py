"""The views inside Airflow, the REST API and the metrics of Millrace: one web application, mounted under ``/millrace``.

What the plugin registers is :data:`FASTAPI_APPS` and :data:`EXTERNAL_VIEWS`. The application is built with the first request
that reaches it, so that schedulers and workers, which load the plugin too, pay nothing for it.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fastapi import FastAPI

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

URL_PREFIX: Final = "/millrace"


class FirstRequest:
    """An ASGI application that builds the real one when the first request comes."""

    def __init__(self, build: Callable[[], FastAPI]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._app: FastAPI | None = None

    def _built(self) -> FastAPI:
        with self._lock:
            if self._app is None:
                self._app = self._build()
            return self._app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if app is None:
            from anyio import to_thread

            app = await to_thread.run_sync(self._built)  # its imports take seconds: other requests go on meanwhile
        await app(scope, receive, send)


def create_app() -> FastAPI:
    """The application, with the settings of this process and Airflow's login."""
    from millrace_airflow.ui.app import create_app as build

    return build()


FASTAPI_APPS: Final = [{"app": FirstRequest(create_app), "url_prefix": URL_PREFIX, "name": "Millrace"}]
"""For ``AirflowPlugin.fastapi_apps``."""


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
    """The path of Airflow's address: empty, or what a proxy puts before it."""
    from urllib.parse import urlsplit

    from airflow.sdk import conf

    return urlsplit(conf.get("api", "base_url", fallback="") or "").path.rstrip("/")


EXTERNAL_VIEWS: Final = [_view("Millrace", "millrace", "", "millrace") | {"category": None, "nav_top_level": True}]
"""For ``AirflowPlugin.external_views``: one entry of the navigation, with the pages as tabs inside it."""

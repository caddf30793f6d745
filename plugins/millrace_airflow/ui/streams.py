"""The page of declared streams: a graph of what feeds what, and a table of how each is doing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from millrace.base.errors import MillraceError
from millrace.catalog.sqlite_file import collection_names
from millrace.observe.observer import Observer
from millrace_airflow.ui.access import Reader
from millrace_airflow.ui.pages import Renderer
from millrace_airflow.ui.stream_graph import graph_layout


def router(observer: Observer, renderer: Renderer) -> APIRouter:
    """Its route."""
    made = APIRouter(include_in_schema=False)

    @made.get("/streams")
    def streams(request: Request, user: Reader) -> HTMLResponse:
        values: dict[str, Any] = {"found": None, "drawn": None, "problem": None, "collections": set()}
        try:
            found = observer.streams()
            values |= {"found": found, "drawn": graph_layout(found)}
            values["collections"] = set(collection_names(observer.settings.data_dir))
        except MillraceError as error:  # a declaration that cannot be read
            values["problem"] = f"{error.code}: {error}"
        return renderer.page(request, "streams.html", tab="streams", overview=observer.overview(), **values)

    return made

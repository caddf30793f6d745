"""Values at paths of a document: taken, put, removed. Objects alone are gone through; a list is a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from millrace.pipelines.model.paths import joined

Document: TypeAlias = dict[str, Any]
MISSING: Final = object()


class Refused(Exception):
    """A step cannot do its work on this document; `kind` is a stable name."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def getter(path: tuple[str, ...]) -> Callable[[Document], Any]:
    """What gives the value at `path`, or MISSING."""
    if len(path) == 1:
        (name,) = path
        return lambda document: document.get(name, MISSING)
    *folders, last = path

    def get(document: Document) -> Any:
        for folder in folders:
            document = document.get(folder, MISSING)
            if type(document) is not dict:
                return MISSING
        return document.get(last, MISSING)

    return get


def taker(path: tuple[str, ...]) -> Callable[[Document], Any]:
    """What removes the value at `path` and gives it, or MISSING."""
    if len(path) == 1:
        (name,) = path
        return lambda document: document.pop(name, MISSING)
    folder, last = getter(path[:-1]), path[-1]

    def take(document: Document) -> Any:
        inner = folder(document)
        return inner.pop(last, MISSING) if type(inner) is dict else MISSING

    return take


def setter(path: tuple[str, ...]) -> Callable[[Document, Any], None]:
    """What puts a value at `path`, making objects on the way. Raises Refused where something else is in the way."""
    *folders, last = path
    if not folders:

        def put(document: Document, value: Any) -> None:
            document[last] = value

        return put

    def put_inside(document: Document, value: Any) -> None:
        for folder in folders:
            inner = document.get(folder, MISSING)
            if type(inner) is not dict:
                if inner is not MISSING and inner is not None:
                    raise Refused("NO_OBJECT", f"{joined(path)}: {folder!r} holds a {type(inner).__name__}, no object")
                inner = document[folder] = {}
            document = inner
        document[last] = value

    return put_inside

"""Backends by scheme: ``open_service("rocksmq:///data/log", {...})``.

A backend is a function ``(location, settings) -> LogService``; it registers itself here by scheme, and its module is
imported only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Final
from urllib.parse import unquote, urlsplit

from millrace.errors import InvalidSettings
from millrace.log.protocol import LogService

Opener = Callable[[str, Mapping[str, object]], LogService]
"""Opens the service at a location (what stands behind ``scheme://``, percent-decoded) with the backend's settings."""

BACKENDS: Final[dict[str, str]] = {
    "rocksmq": "millrace.log.rocksmq:open_location",
}
"""Scheme -> ``module:function`` of an :data:`Opener`. A new backend is one line here."""


def open_service(url: str, settings: Mapping[str, object] | None = None) -> LogService:
    """The log service at `url` (``scheme://location``), or of scheme `url` with its location in ``settings["path"]``.

    Raises InvalidSettings for an unknown scheme or settings; what the backend raises where it does not open.
    """
    options = dict(settings or {})
    scheme, separator, _ = url.partition("://")
    if separator:
        parts = urlsplit(url)
        location = unquote(parts.netloc + parts.path)
    else:
        location = str(options.pop("path", ""))
    target = BACKENDS.get(scheme)
    if target is None:
        raise InvalidSettings(f"no log backend {scheme!r}; known are {', '.join(sorted(BACKENDS))}")
    if not location:
        raise InvalidSettings(f"the log backend {scheme!r} needs a location: {scheme}://… or the setting 'path'")
    module, _, function = target.partition(":")
    opener: Opener = getattr(import_module(module), function)
    return opener(location, options)

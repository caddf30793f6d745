"""Opens a log backend by scheme: ``open_service("rocksmq:///data/log", {...})``,
``open_service("kafka://host:9092/prefix?name=value")``.

A backend is a function ``(location, settings) -> LogService``, declared by scheme (millrace.base.log_backends). Its
module is imported when it is first used. Options of a URL are settings of the backend; credentials are never among
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from millrace.base.errors import InvalidSettings
from millrace.base.extras import missing_extra_error
from millrace.base.log_backends import backend_of
from millrace.base.settings.value import without_credentials
from millrace.log.protocol import LogService

BackendOpener = Callable[[str, Mapping[str, object]], LogService]
"""Opens the service at a location (the part after ``scheme://``, percent-decoded) with the backend's settings."""


class ReadOnlyOpener(Protocol):
    """Opens a local log for reading only while no process has it. Raises LogBusy if one has."""

    def __call__(self, folder: Path, *, server_folder: Path) -> LogService:
        """`server_folder`: the folder whose server would have the log."""
        ...


def open_read_only(url: str, *, server_folder: Path) -> LogService:
    """Open the local log at `url` for reading only.

    Raises LogBusy, InvalidSettings.
    """
    looker: ReadOnlyOpener = _resolve(backend_of(url).looker)
    return looker(Path(_split(url)[0]), server_folder=server_folder)


def open_service(url: str, settings: Mapping[str, object] | None = None) -> LogService:
    """Open the log service at `url` (``scheme://location?name=value&...``), or of scheme `url` with
    ``settings["path"]``.

    Options of the URL override `settings` of the same name.
    Raises InvalidSettings for an unknown scheme, unknown settings, or a password in the URL; and the backend's
    errors.
    """
    options = dict(settings or {})
    scheme, separator, _ = url.partition("://")
    if separator:
        location, given = _split(url)
        options |= given
    else:
        location = str(options.pop("path", ""))
    target = backend_of(scheme).opener
    if not location:
        raise InvalidSettings(f"the log backend {scheme!r} needs a location: {scheme}://… or the setting 'path'")
    opener: BackendOpener = _resolve(target)
    return opener(location, options)


def _resolve(target: str) -> Any:
    module, _, function = target.partition(":")
    return getattr(_import(module), function)


def _import(module: str) -> ModuleType:
    """Import a module in a thread that ends with the import.

    A pybind11 module (Pulsar's client) keeps the thread state of the thread that imports it first, while that thread
    lives. In the log server that may be a gRPC thread whose state ends with the call; the next send from that thread
    then used freed memory, and the server hung or died (pybind11 issue 2888).
    """
    with ThreadPoolExecutor(1, thread_name_prefix="import") as pool:
        try:
            return pool.submit(import_module, module).result()
        except ModuleNotFoundError as error:
            raise missing_extra_error(error) or error from None


def _split(url: str) -> tuple[str, dict[str, str]]:
    """Return location and options of a URL, percent-decoded.

    Raises InvalidSettings.
    """
    parts = urlsplit(without_credentials(url, "the log's URL"))
    if parts.fragment:
        raise InvalidSettings("the log's URL has a fragment (#…), which is not used: remove it")
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise InvalidSettings("the options of the log's URL are malformed: write ?name=value&name=value") from None
    given = dict(pairs)
    if len(given) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidSettings(f"option {twice!r} occurs twice in the log's URL")
    return unquote(parts.netloc + parts.path), given

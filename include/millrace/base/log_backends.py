"""Log backends by name, with what each can do; no other module knows them by name.

A backend is declared, not imported: `opener` names a function of type
:data:`millrace.log.registry.BackendOpener`, which the registry imports when it opens a log. The built-in backends
are listed below. Another package registers its own by an entry point:

    [project.entry-points."millrace.log_backends"]
    mylog = "my_package.declaration:BACKEND"        # a LogBackend, in a module that imports little

The setting `log` then accepts ``mylog://…``. Code that needs to know what a log can do asks for its declaration
(:func:`backend_of`), never for its name. tests/conformance checks each backend against its declaration.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from millrace.base.entry_points import load_entry_points
from millrace.base.errors import InvalidSettings

GROUP: Final = "millrace.log_backends"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBackend:
    """The declaration of a backend, by the scheme of its URL."""

    scheme: str
    opener: str
    """``module:function``, an :data:`millrace.log.registry.BackendOpener`."""
    form: str
    """The form of its URL, for error messages."""
    local: bool = False
    """Whether its files are on this host and only one process may open them; other processes use the log's server."""
    looker: str = ""
    """Read-only opener of a local backend, as ``module:function`` (:data:`millrace.log.registry.ReadOnlyOpener`)."""
    fences: bool = False
    """Whether the log lets only one of two concurrent writers append; otherwise the chain's terms decide."""
    retains: bool = False
    """Whether it frees truncated entries at once, reports the bytes, and applies its own retention by size and age."""


EMBEDDED: Final = "rocksmq"
"""The default backend; as a whole URL, the log in the deployment's own folder."""

BUILT_IN: Final = (
    LogBackend(
        scheme=EMBEDDED,
        opener="millrace.log.rocksmq.service:open_location",
        form=EMBEDDED,
        local=True,
        looker="millrace.log.rocksmq.read_only:ReadOnlyRocksMQ",
        fences=True,
        retains=True,
    ),
    LogBackend(scheme="kafka", opener="millrace.log.kafka.service:open_location", form="kafka://host:port/prefix"),
    LogBackend(
        scheme="pulsar",
        opener="millrace.log.pulsar.service:open_location",
        form="pulsar://host:port/tenant/namespace",
        fences=True,
    ),
)


def find_backend(url: str) -> LogBackend | None:
    """Return the backend of a log's URL or scheme ("" is the embedded one); None if it is unknown."""
    scheme = url.partition("://")[0] or EMBEDDED
    built_in = next((each for each in BUILT_IN if each.scheme == scheme), None)
    return built_in or next((each for each in load_entry_points(GROUP, LogBackend) if each.scheme == scheme), None)


def backend_of(url: str) -> LogBackend:
    """Return the backend of a log's URL or scheme.

    Raises InvalidSettings, listing the known backends, if it is unknown.
    """
    found = find_backend(url)
    if found is None:
        known = sorted(each.scheme for each in (*BUILT_IN, *load_entry_points(GROUP, LogBackend)))
        raise InvalidSettings(f"unknown log backend {url.partition('://')[0]!r}; the known ones are {', '.join(known)}")
    return found


def is_in_data_folder(url: str) -> bool:
    """Return whether `url` names the log in the deployment's own folder: a local backend without a location."""
    return "://" not in url and backend_of(url).local


def check_log_url(url: str, where: str) -> None:
    """Check a value of the setting `log`: a local backend's name, or the URL of another backend.

    Raises InvalidSettings otherwise.
    """
    found = find_backend(url) if url else None
    if found is None or not (url == found.scheme if found.local else re.fullmatch(r"[^:]+://\S+", url)):
        forms = [each.form for each in (*BUILT_IN, *load_entry_points(GROUP, LogBackend))]
        raise InvalidSettings(
            f"{where} = {url!r}: allowed is {', '.join(forms[:-1])} or {forms[-1]}, with ?option=value&..."
        )

"""Which log backends there are and what each can do: the one place that knows them by name.

A backend is declared, not imported: `opener` names a function of :mod:`millrace.log.registry`, which imports it when a log is
opened. Those of Millrace stand below. A package of yours registers its own by an entry point:

    [project.entry-points."millrace.log_backends"]
    mylog = "my_package.declaration:BACKEND"        # a LogBackend, in a module that imports little

From then on the setting `log` takes ``mylog://…`` as it takes the others. Nothing else asks for a backend's name; who has to
know what a log can do asks for its declaration (:func:`backend_of`). tests/conformance holds each to what it declares.
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
    """A backend by its URL's scheme."""

    scheme: str
    opener: str
    """``module:function``, an :data:`millrace.log.registry.BackendOpener`."""
    form: str
    """What its URL looks like, in words."""
    local: bool = False
    """It lies in files of this host that one process alone may open: everybody else asks the log's server."""
    looker: str = ""
    """Of a local one: ``module:function``, a :data:`millrace.log.registry.ReadOnlyOpener`."""
    fences: bool = False
    """Of two writers at once the log lets one append; without it the chain's terms alone decide between them."""
    retains: bool = False
    """It gives up what was truncated at once and says how much, and has a retention of its own by size and age."""


EMBEDDED: Final = "rocksmq"
"""The backend of a deployment that names none, and as a log's whole URL: the log in the deployment's own folder."""

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
    """The backend of a log's URL, or of a bare scheme ("": the embedded one); None where there is no such."""
    scheme = url.partition("://")[0] or EMBEDDED
    built_in = next((each for each in BUILT_IN if each.scheme == scheme), None)
    return built_in or next((each for each in load_entry_points(GROUP, LogBackend) if each.scheme == scheme), None)


def backend_of(url: str) -> LogBackend:
    """As :func:`find_backend`. Raises InvalidSettings that names those there are."""
    found = find_backend(url)
    if found is None:
        known = sorted(each.scheme for each in (*BUILT_IN, *load_entry_points(GROUP, LogBackend)))
        raise InvalidSettings(f"no log backend {url.partition('://')[0]!r}; known are {', '.join(known)}")
    return found


def is_in_data_folder(url: str) -> bool:
    """Whether a log's URL is that of the log in the deployment's own folder: no place, and a backend that needs none."""
    return "://" not in url and backend_of(url).local


def check_log_url(url: str, where: str) -> None:
    """Raises InvalidSettings where the setting `log` cannot be `url`: a local log lies in the data folder, any other has a URL."""
    found = find_backend(url) if url else None
    if found is None or not (url == found.scheme if found.local else re.fullmatch(r"[^:]+://\S+", url)):
        forms = [each.form for each in (*BUILT_IN, *load_entry_points(GROUP, LogBackend))]
        raise InvalidSettings(
            f"{where} = {url!r}: allowed is {', '.join(forms[:-1])} or {forms[-1]}, with ?option=value&..."
        )

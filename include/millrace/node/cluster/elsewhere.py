"""The log's server of a deployment whose nodes take appends: it sends clients to them, and appends itself where there is no such
node.

`append_extension` is what the server is given to host (millrace.rpc.launch). While nodes with the append role live, an append that
comes here is refused as stale, and the client asks here who has the PChannel. The chain's terms keep apart whoever appends all the
same; so this looks at the meta store beside the appends, not before each.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from millrace.base.errors import AssignmentStale, InvalidSettings, LogUnavailable, MillraceError, RevisionCompacted
from millrace.base.settings import Settings
from millrace.coord.clock import SystemClock
from millrace.coord.discovery import Discovery
from millrace.coord.opening import cluster_token, open_store, require_cluster
from millrace.coord.session import APPEND, NODES, NodeInfo
from millrace.log.protocol import LogService
from millrace.meta.opening import OpenStore
from millrace.node.append import server

LOOK_SECONDS: Final = 0.25
"""Between two looks at who lives."""

_log: Final = logging.getLogger(__name__)


def append_extension(service: LogService, folder: Path) -> server.AppendExtension:
    """The append host of a log's server, in a deployment that may have nodes with the append role."""
    return server.append_extension(service, folder, placing=Elsewhere)


class Elsewhere:
    """The protocol Placing, of the log's server."""

    def __init__(self, settings: Settings) -> None:
        """What a deployment without a cluster costs is a look at a file each quarter of a second."""
        self._settings = settings
        self._store: OpenStore | None = None
        self._alive: frozenset[str] = frozenset()
        """Sessions of nodes with the append role."""
        self._closed = threading.Event()
        self._looking = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="nodes-that-append", daemon=True)
        self._thread.start()

    @contextmanager
    def appending(self, pchannel: str) -> Iterator[None]:
        if self._alive:
            raise AssignmentStale(f"nodes of the cluster take what is appended to {pchannel}: ask who has it")
        yield

    def assignments(self, *, after: int, trusted: bool) -> dict[str, Any]:
        with self._looking:
            self._look()
            if self._store is None or not self._alive:
                return {"version": 0, "whole": True, "assignments": []}
            source = Discovery(self._store)
            try:
                update = source.all() if after < 0 else source.since(after)
            except (RevisionCompacted, MillraceError) as error:
                if not isinstance(error, RevisionCompacted):
                    raise LogUnavailable(f"who has which PChannel cannot be told now: {error}") from error
                update = source.all()
        found = [
            [each.pchannel, each.term, each.session, each.address if each.session in self._alive else ""]
            for each in update.assignments
            if each.role == APPEND
        ]
        answer: dict[str, Any] = {"version": update.version, "whole": update.whole, "assignments": found}
        return answer | ({"token": cluster_token(self._settings)} if trusted else {})

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            with self._looking:
                try:
                    self._look()
                except MillraceError as error:  # who was there is taken to be there: clients are told to ask again
                    _log.warning("the meta store cannot be looked at: %s: %s", error.code, error)

    def _look(self) -> None:
        """See who lives. Raises MetaUnavailable, UnsupportedVersion."""
        if self._closed.is_set():
            return
        if self._store is None:
            try:
                require_cluster(self._settings)
            except InvalidSettings:
                return
            self._store = open_store(self._settings, SystemClock())
        listed = self._store.list(NODES).entries
        self._alive = frozenset(
            entry.key.removeprefix(NODES) for entry in listed if APPEND in NodeInfo.decoded(entry.value).roles
        )

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        if self._store is not None:
            self._store.close()

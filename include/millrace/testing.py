"""A complete deployment for tests: a real log, chain and tables, without a JVM, removed at the end.

    import millrace.testing

    with millrace.testing.deployment() as db:
        users = db.create_collection("users", {"id": "int64"}, key="id")
        users.insert([{"id": 1}])
        assert users.read().num_rows == 1

The calling process, instead of Spark, writes the log to the tables, with the same code (docs/testing.md).
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, MillraceError
from millrace.base.settings import Settings
from millrace.client.append_client import AppendClient
from millrace.client.database import Database
from millrace.message.ids import LogId
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end

_POLL: Final = 0.05
_MOST_FAILURES: Final = 100


class Deployment(Database):
    """A :class:`millrace.Database` whose tables are updated by a thread of this process. Made by :func:`deployment`."""

    def __init__(self, settings: Settings, append: AppendClient) -> None:
        super().__init__(settings, append)
        self.failures: list[MillraceError] = []
        """Errors that stopped the thread's work, such as a parked PChannel; newest last, at most a hundred."""
        self._turn = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="millrace-testing", daemon=True)
        self._thread.start()

    def settle(self, *, deadline: float = 30.0) -> None:
        """Write everything that was appended before this call to the tables: `wal`, rows, segments, checkpoints.

        Raises the error that stops a PChannel (ChannelParked, TableUnavailable), or DeadlineExceeded if the thread uses
        the tables for longer than `deadline` seconds.
        """
        if not self._turn.acquire(timeout=deadline):
            raise DeadlineExceeded(f"the tables were not free within {deadline:g} s")
        try:
            self._take()
        finally:
            self._turn.release()

    def close(self) -> None:
        """Stop the thread, the clients and the log server. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(timeout=60)
        try:
            with suppress(MillraceError):
                self.connection.service.shutdown()
        finally:
            super().close()

    def _take(self) -> None:
        ingest_to_end(self.settings, self.log)
        flush_to_end(self.settings)

    def _keep_up(self) -> None:
        taken: dict[str, LogId] = {}
        while not self._ended.wait(_POLL):
            with self._turn:
                try:
                    ends = self._ends()
                    if ends != taken:  # reading the tables costs ten times as much as reading the log's ends
                        self._take()
                        taken = ends
                except MillraceError as error:
                    self.failures = [*self.failures, error][-_MOST_FAILURES:]

    def _ends(self) -> dict[str, LogId]:
        log = self.log
        return {name: log.open(name).end() for name in log.names()}


@contextmanager
def deployment(folder: str | Path | None = None, **settings: Any) -> Iterator[Deployment]:
    """Create a deployment in `folder`, which is kept, or in a temporary folder, which is always removed at the end.

    `settings` override the defaults (:class:`millrace.Settings`); the environment is ignored.

    Raises InvalidSettings, LogUnavailable.
    """
    made = Path(tempfile.mkdtemp(prefix="millrace-testing-")) if folder is None else Path(folder)
    chosen = replace(Settings.load(env={}), data_dir=made / "data" if folder is None else made, **settings)
    try:
        with Deployment.in_folder(chosen) as db:
            yield db
    finally:
        if folder is None:
            _removed(made)


def _removed(folder: Path) -> None:
    """Remove the folder; the log server, which was just told to stop, may still write files for a moment."""
    end = Deadline.after(10)
    while folder.exists() and end.pause(0.02):
        shutil.rmtree(folder, ignore_errors=True)

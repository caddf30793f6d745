"""What the log's server says, where one runs: ends, what the WAL lacks, terms, parked channels, its metrics. Starts none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from millrace.base.errors import InvalidArgument, LogUnavailable, MillraceError
from millrace.base.settings import Settings
from millrace.client.append_client import AppendClient
from millrace.message.ids import EARLIEST
from millrace.message.log_entries import LogDescription
from millrace.rpc.wire import ClockView
from millrace.tables.read.freshness import lag_seconds
from millrace.tables.wal.table import WalPosition, WalTable

DEADLINE: Final = 3.0
"""Seconds that one question to the server may take."""


@dataclass(frozen=True)
class ChannelLogView:
    """One PChannel by its log and the append host."""

    description: LogDescription
    lag_seconds: float | None
    """None where the log cannot be read behind what the WAL has: `parked` says why."""
    term: int
    parked: str | None


@dataclass(frozen=True)
class LogView:
    """All PChannels of the log; `running` is False where no server runs (nothing else is known then)."""

    running: bool
    channels: dict[str, ChannelLogView] = field(default_factory=dict)
    clock: ClockView | None = None
    """The clock that the server stamps by; None where brokers stamp."""


class LogProbe:
    """Holds one connection to the log's server. Thread-safe: one question at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._client: AppendClient | None = None

    @contextmanager
    def client(self) -> Iterator[AppendClient]:
        """The connection, for one caller. Raises LogUnavailable where no server runs."""
        with self._lock:
            if not (self._settings.log_path / "server.json").exists():
                raise LogUnavailable("no log server runs; it starts with the first producer or with the streaming job")
            if self._client is None:
                self._client = AppendClient.connect(self._settings.data_dir, start=False, deadline=DEADLINE)
            try:
                yield self._client
            except LogUnavailable:
                self._client.close()
                self._client = None
                raise

    def probe(self, wal: WalTable | None) -> LogView:
        """How each PChannel's log stands to `wal`."""
        try:
            with self.client() as client:
                positions = wal.valid_positions(wal.pchannels()) if wal is not None else {}
                return LogView(True, dict(_channels(client, wal, positions)), _clock(client))
        except LogUnavailable:
            return LogView(False)

    def metrics(self) -> str:
        """The append host's metrics in the Prometheus text format; "" where no server runs."""
        try:
            with self.client() as client:
                return client.metrics()
        except LogUnavailable:
            return ""

    def close(self) -> None:
        """Let go of the connection."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None


def _channels(
    client: AppendClient, wal: WalTable | None, positions: dict[str, WalPosition]
) -> Iterator[tuple[str, ChannelLogView]]:
    for name in client.service.names():
        log = client.service.open(name)
        try:
            described = log.describe()
            position = positions.get(name)
            begin = (position.position if position is not None else None) or EARLIEST
            term, parked = _hosted(client, name)
            lag: float | None = 0.0
            try:
                lag = lag_seconds(wal, log, name) if described.end > begin else 0.0
            except LogUnavailable:
                raise
            except MillraceError as error:
                lag, parked = None, parked or f"log: {error.code}: {error}"
            yield name, ChannelLogView(described, lag, term, parked)
        finally:
            log.close()


def _clock(client: AppendClient) -> ClockView | None:
    try:
        return client.service.clock()
    except InvalidArgument:
        return None


def _hosted(client: AppendClient, name: str) -> tuple[int, str | None]:
    """Term, and why the append host stands still, if it does."""
    try:
        host = client.describe(name)
    except LogUnavailable:
        raise
    except MillraceError as error:
        return 0, f"append host: {error.code}: {error}"
    return int(host["term"]), f"append host: {host['parked']}" if host["parked"] else None

"""Queries the log's server, if one runs: log ends, lags, terms, parked channels, metrics. Never starts a server."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from pyarrow import flight

from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidArgument, LogUnavailable, MillraceError
from millrace.base.settings import Settings
from millrace.client.append_client import AppendClient
from millrace.message.ids import EARLIEST, LogId
from millrace.message.log_entries import LogDescription
from millrace.rpc import calls
from millrace.rpc.link import CONNECTION_FAILURES, Link, call_error
from millrace.rpc.wire import ClockView, log_id
from millrace.tables.read.freshness import lag_seconds
from millrace.tables.wal.table import WalPosition, WalTable
from millrace.wal.definitions import OpenFigures

DEADLINE: Final = 3.0
"""Deadline of one request to the server, in seconds."""


@dataclass(frozen=True)
class ChannelLogView:
    """One PChannel according to its log and the append host."""

    description: LogDescription | None
    """None if the log cannot be described. `parked` has the reason."""
    lag_seconds: float | None
    """None if the log cannot be read from the WAL's position on. `parked` has the reason."""
    term: int
    parked: str | None
    open: OpenFigures | None = None
    """Amount of open work; None from a server of an earlier build."""


@dataclass(frozen=True)
class LogView:
    """All PChannels of the log. If `running` is False, nothing else is known."""

    running: bool
    channels: dict[str, ChannelLogView] = field(default_factory=dict)
    clock: ClockView | None = None
    """The clock that stamps the log. None if brokers stamp."""
    pid: int | None = None
    """Process id of the server."""


class LogProbe:
    """Holds one connection to the log's server. Thread-safe; serves one request at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._client: AppendClient | None = None
        self._complete: dict[str, tuple[int, LogId]] = {}
        """For each PChannel, the commit and the end of the log at which the WAL lacked nothing."""

    @contextmanager
    def client(self) -> Iterator[AppendClient]:
        """Yield the connection to one caller. Raises LogUnavailable if no server runs."""
        with self._lock:
            if not (self._settings.log_path / "server.json").exists():
                raise LogUnavailable("no log server runs; the first producer or the streaming job starts it")
            if self._client is None:
                self._client = AppendClient.connect(self._settings.data_dir, start=False, deadline=DEADLINE)
            try:
                yield self._client
            except LogUnavailable:
                self._client.close()
                self._client = None
                raise

    def probe(self, wal: WalTable | None, positions: Mapping[str, WalPosition]) -> LogView:
        """Return the state of each PChannel's log relative to `wal` and the `positions` in it."""
        try:
            with self.client() as client:
                pid = int(client.service.ping()["pid"])
                return LogView(True, dict(self._channels(client, wal, positions)), _clock(client), pid)
        except LogUnavailable:
            return LogView(False)

    def _channels(
        self, client: AppendClient, wal: WalTable | None, positions: Mapping[str, WalPosition]
    ) -> Iterator[tuple[str, ChannelLogView]]:
        for name, found in client.describe_all().items():
            host, described = found.get("host"), _description(found.get("log"))
            reasons = [f"append host: {found['host_error'] if host is None else host['parked']}"]
            if host is not None and not host["parked"]:
                reasons.clear()
            lag: float | None = None
            if described is None:
                reasons.append(f"log: {found['log_error']}")
            else:
                try:
                    lag = self._lag(client, wal, name, positions.get(name), described, host)
                except LogUnavailable:
                    raise
                except MillraceError as error:
                    reasons.append(f"log: {error.code}: {error}")
            term, figures = (0, None) if host is None else (int(host["term"]), OpenFigures(*host["open"]))
            yield name, ChannelLogView(described, lag, term, next(iter(reasons), None), figures)

    def _lag(
        self,
        client: AppendClient,
        wal: WalTable | None,
        name: str,
        position: WalPosition | None,
        described: LogDescription,
        host: Mapping[str, Any] | None,
    ) -> float:
        """Return the seconds that the WAL lags behind a log. The log is read only if it may have news for the WAL."""
        reached = (position.position if position is not None else None) or EARLIEST
        if described.end <= reached or (host is not None and LogId(*host["news_end"]) <= reached):
            return 0.0
        # To tell time ticks without news from others decodes the state of all VChannels: once for each end.
        seen = (0 if position is None else position.commits, described.end)
        if self._complete.get(name) == seen:
            return 0.0
        with closing(client.service.open(name)) as log:
            lag = lag_seconds(wal, log, name)
        if lag == 0.0:
            self._complete[name] = seen
        return lag

    def metrics(self) -> str:
        """Return the append host's metrics in the Prometheus text format, or "" if no server runs."""
        try:
            with self.client() as client:
                return host_metrics(client)
        except LogUnavailable:
            return ""

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None


def host_metrics(client: AppendClient) -> str:
    """Return the metrics of the append host that `client` is connected to, in the Prometheus text format."""

    def call(link: Link, deadline: Deadline) -> str:
        try:
            with link.calling() as flights:
                (found,) = flights.do_action(
                    flight.Action(calls.METRICS.name, b""), link.options(client.service.deadline)
                )
        except CONNECTION_FAILURES as error:
            raise call_error(error) from error
        return str(found.body.to_pybytes().decode())

    return client.service.call_with_retry(call, seconds=client.service.deadline)


def _clock(client: AppendClient) -> ClockView | None:
    try:
        return client.service.clock()
    except InvalidArgument:
        return None


def _description(found: Mapping[str, Any] | None) -> LogDescription | None:
    if found is None:
        return None
    return LogDescription(begin=log_id(found["begin"]), end=log_id(found["end"]), bytes=int(found["bytes"]))

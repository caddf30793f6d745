"""How tables of PostgreSQL are captured: their lanes, their feeder, and the end of what the flow made."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.base.settings import Settings
from millrace.flows.sources.capture.feeder import Feeder
from millrace.flows.sources.capture.lane import CapturedRows, CapturedTables
from millrace.flows.sources.capture.ticks import remove_spool, spool_folder
from millrace.flows.sources.postgres.model import PostgresSource
from millrace.flows.sources.postgres.server import Server, properties_of


def source_of(
    declared: PostgresSource, settings: Settings, *, group: str, standing: Mapping[str, int]
) -> CapturedTables:
    """Return the lanes that are declared."""
    return CapturedTables(spool_folder(settings, group), declared.names)


def reader_of(declared: PostgresSource, settings: Settings, *, group: str, topic: str, partition: int) -> CapturedRows:
    """Return a reader of one of them."""
    return CapturedRows(spool_folder(settings, group), topic)


def feeder_of(declared: PostgresSource, settings: Settings, *, group: str) -> Feeder:
    """Check the server, and start what captures the tables. Raises InvalidSettings, LogUnavailable, StreamBusy."""
    server = Server(declared, group)
    server.check_server()
    return Feeder(
        settings,
        spool_folder(settings, group),
        tables=declared.names,
        properties=properties_of(declared, group, server),
        max_bytes=declared.spool_mib << 20,
        snapshot_again=declared.on_loss == "snapshot",
        database=server,
        log=server,
    )


def release(declared: PostgresSource, settings: Settings, *, group: str) -> None:
    """Drop the slot and the publication of a flow, and remove its spool. Raises InvalidSettings, LogUnavailable."""
    Server(declared, group).release()
    remove_spool(settings, group)

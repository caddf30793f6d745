"""The capture of PostgreSQL tables: lanes, feeder, and removal of the flow's objects."""

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
    """Return the declared source."""
    return CapturedTables(spool_folder(settings, group), declared.names)


def reader_of(declared: PostgresSource, settings: Settings, *, group: str, topic: str, partition: int) -> CapturedRows:
    """Return a reader of one lane of the declared source."""
    return CapturedRows(spool_folder(settings, group), topic)


def feeder_of(declared: PostgresSource, settings: Settings, *, group: str) -> Feeder:
    """Check the server, and start the capture's feeder. Raises InvalidSettings, LogUnavailable, StreamBusy."""
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

"""How tables of MariaDB are captured: the checks of its server, and the engine's properties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from millrace.base.errors import InvalidSettings, LogUnavailable
from millrace.base.settings import Settings
from millrace.flows.sources.capture.engine import regex_of, server_number
from millrace.flows.sources.capture.feeder import Feeder
from millrace.flows.sources.capture.lane import CapturedRows, CapturedTables
from millrace.flows.sources.capture.ticks import spool_folder
from millrace.flows.sources.mariadb.model import MariaDbSource

_CONNECT_SECONDS: Final = 10
_WANTED: Final = {"log_bin": "1", "binlog_format": "ROW", "binlog_row_image": "FULL"}


def source_of(
    declared: MariaDbSource, settings: Settings, *, group: str, standing: Mapping[str, int]
) -> CapturedTables:
    """Return the lanes that are declared."""
    return CapturedTables(spool_folder(settings, group), declared.names)


def reader_of(declared: MariaDbSource, settings: Settings, *, group: str, topic: str, partition: int) -> CapturedRows:
    """Return a reader of one of them."""
    return CapturedRows(spool_folder(settings, group), topic)


def feeder_of(declared: MariaDbSource, settings: Settings, *, group: str) -> Feeder:
    """Check the server, and start what captures the tables. Raises InvalidSettings, LogUnavailable, StreamBusy."""
    check_server(declared)
    return Feeder(
        settings,
        spool_folder(settings, group),
        tables=declared.names,
        properties=properties_of(declared, group),
        max_bytes=declared.spool_mib << 20,
        snapshot_again=declared.on_loss == "snapshot",
        log=BinaryLog(declared),
        # Between two GTIDs, without a table for signals. A server without any GTID yet cannot be read so.
        reading={"read.only": "true"},
    )


def properties_of(declared: MariaDbSource, group: str) -> dict[str, str]:
    """Return Debezium's properties. The server knows the reader by a number made of `group`, one for each flow."""
    return {
        "name": group,
        "topic.prefix": "millrace",
        "connector.class": "io.debezium.connector.mariadb.MariaDbConnector",
        "database.hostname": declared.host,
        "database.port": str(declared.port),
        "database.user": declared.user,
        "database.password": declared.password.get_secret_value(),
        "database.ssl.mode": declared.tls,
        "database.server.id": str(server_number(group)),
        "database.include.list": regex_of(declared.database),
        "table.include.list": ",".join(regex_of(each) for each in declared.names),
        "snapshot.mode": "initial" if declared.start == "earliest" else "no_data",
        "provide.transaction.metadata": "true",
        "include.schema.changes": "true",
        "signal.enabled.channels": "in-process",
        "signal.poll.interval.ms": "1000",
        "incremental.snapshot.chunk.size": "4096",
        "tombstones.on.delete": "false",
        "skipped.operations": "none",
        "bigint.unsigned.handling.mode": "precise",
        "decimal.handling.mode": "precise",
        "event.processing.failure.handling.mode": "fail",
        "heartbeat.interval.ms": "1000",
        "connect.keep.alive.interval.ms": "10000",
        "notification.enabled.channels": "sink",
        "notification.sink.topic.name": "notifications",
        "offset.flush.interval.ms": "0",
        "errors.max.retries": "0",
    }


def connected(declared: MariaDbSource) -> Any:
    """Connect to the server. Raises InvalidSettings if it refuses the user, LogUnavailable."""
    import pymysql

    try:
        return pymysql.connect(
            host=declared.host,
            port=declared.port,
            user=declared.user,
            password=declared.password.get_secret_value(),
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_CONNECT_SECONDS,
            ssl=None if declared.tls == "disable" else {"check_hostname": declared.tls == "verify-full"},
        )
    except pymysql.err.OperationalError as error:
        code, words = (*error.args, "")[:2]
        if code in (1044, 1045, 1698):
            raise InvalidSettings(
                f"MariaDB {declared.host}:{declared.port} refuses {declared.user!r}: {words}"
            ) from None
        raise LogUnavailable(f"MariaDB {declared.host}:{declared.port} cannot be reached: {words or error}") from None


class BinaryLog:
    """The server's binary log."""

    def __init__(self, declared: MariaDbSource) -> None:
        self._declared = declared

    def end(self) -> dict[str, Any]:
        """As millrace.flows.sources.capture.feeder.DatabaseLog says."""
        with connected(self._declared) as connection, connection.cursor() as cursor:
            cursor.execute("show master status")
            row = cursor.fetchone()
        return {"file": row[0], "pos": int(row[1])} if row else {"file": "", "pos": 0}

    def behind(self, offset: Any, end: Any, /) -> int:
        if "file" not in offset:  # of a snapshot that has just begun
            return int(end["pos"])
        if offset["file"] >= end["file"]:
            return int(end["pos"] - offset["pos"]) if offset["file"] == end["file"] else 0
        with connected(self._declared) as connection, connection.cursor() as cursor:
            cursor.execute("show binary logs")
            sizes = {str(row[0]): int(row[1]) for row in cursor.fetchall()}
        between = sum(size for name, size in sizes.items() if offset["file"] <= name < end["file"])
        return int(between - offset["pos"] + end["pos"])

    def moment(self, offset: Any, /) -> float:
        return float(offset.get("ts_sec", 0))


def check_server(declared: MariaDbSource) -> None:
    """Check that the server writes a binary log with whole rows, and that the tables have a primary key.

    Raises InvalidSettings with the statement to run, LogUnavailable if the server cannot be reached.
    """
    with connected(declared) as connection, connection.cursor() as cursor:
        for name, wanted in _WANTED.items():
            found = _one(cursor, f"select @@global.{name}")
            if str(found) != wanted:
                how = "set log_bin in the server's configuration and restart it"
                how = (
                    how if name == "log_bin" else f"run `SET GLOBAL {name} = '{wanted}'`, and in the configuration too"
                )
                raise InvalidSettings(f"MariaDB {declared.host}: {name} is {found}, and capture needs {wanted}: {how}")
        for table in declared.names:
            _check_table(cursor, declared, table)


def _check_table(cursor: Any, declared: MariaDbSource, table: str) -> None:
    place = table.split(".", 1)
    kind = _one(
        cursor,
        "select table_type from information_schema.tables where table_schema = %s and table_name = %s",
        *place,
    )
    if kind != "BASE TABLE":
        words = "does not exist" if kind is None else f"is a {str(kind).lower()}, and has no changes in the log"
        raise InvalidSettings(f"MariaDB {declared.host}: {table} {words}")
    keys = _one(
        cursor,
        "select count(*) from information_schema.key_column_usage where table_schema = %s and table_name = %s"
        " and constraint_name = 'PRIMARY'",
        *place,
    )
    if not keys:
        raise InvalidSettings(
            f"MariaDB {declared.host}: {table} has no primary key, by which changes find their rows:"
            f" run `ALTER TABLE {table} ADD PRIMARY KEY (...)`"
        )


def _one(cursor: Any, query: str, *values: str) -> Any:
    cursor.execute(query, values)
    row = cursor.fetchone()
    return None if row is None else row[0]

"""The capture of MariaDB tables: the checks of the server, and the engine's properties."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from millrace.base.errors import InvalidSettings, LogUnavailable
from millrace.base.settings import Settings
from millrace.flows.sources.capture.ddl import newest_gtids
from millrace.flows.sources.capture.engine import TOO_LARGE, regex_of, server_number
from millrace.flows.sources.capture.feeder import Database, Feeder
from millrace.flows.sources.capture.lane import CapturedRows, CapturedTables
from millrace.flows.sources.capture.spool import Standing
from millrace.flows.sources.capture.ticks import remove_spool, spool_folder
from millrace.flows.sources.mariadb.model import MariaDbSource

_CONNECT_SECONDS: Final = 10
_CHUNK_ROWS: Final = 4096
_CHUNK_BYTES: Final = 16 << 20
"""The most bytes of rows that the engine holds while it reads a table beside its changes."""
_REFUSED: Final = frozenset({1044, 1045, 1142, 1227, 1698})
_NO_SELECT: Final = 1142
_RIGHTS: Final = {
    "REPLICATION SLAVE": {"REPLICATION SLAVE"},
    "BINLOG MONITOR": {"BINLOG MONITOR", "REPLICATION CLIENT", "SUPER"},
    "RELOAD": {"RELOAD", "LOCK TABLES"},
}
"""Each needed right, with the rights that include it."""
_GRANT: Final = re.compile(r"GRANT (.+) ON (\S+) TO ")
_WANTED: Final = {"log_bin": "1", "binlog_format": "ROW", "binlog_row_image": "FULL", "log_bin_compress": "0"}


def source_of(
    declared: MariaDbSource, settings: Settings, *, group: str, standing: Mapping[str, int]
) -> CapturedTables:
    """Return the declared source."""
    return CapturedTables(spool_folder(settings, group), declared.names)


def reader_of(declared: MariaDbSource, settings: Settings, *, group: str, topic: str, partition: int) -> CapturedRows:
    """Return a reader of one lane of the declared source."""
    return CapturedRows(spool_folder(settings, group), topic)


def feeder_of(declared: MariaDbSource, settings: Settings, *, group: str) -> Feeder:
    """Check the server, and start the capture's feeder. Raises InvalidSettings, LogUnavailable, StreamBusy."""
    check_server(declared)
    return Feeder(
        settings,
        spool_folder(settings, group),
        tables=declared.names,
        properties=properties_of(declared, group),
        max_bytes=declared.spool_mib << 20,
        snapshot_again=declared.on_loss == "snapshot",
        database=MariaDb(declared, group),
        log=BinaryLog(declared),
        # Watermarks by GTIDs need no signal table, but fail on a server without any GTID yet.
        reading={"read.only": "true"},
    )


def release(declared: MariaDbSource, settings: Settings, *, group: str) -> None:
    """Remove the spool of a flow. The server stores nothing about a reader that has left."""
    remove_spool(settings, group)


def properties_of(declared: MariaDbSource, group: str) -> dict[str, str]:
    """Return Debezium's properties, without those of each start."""
    return {
        "name": group,
        "millrace.database": declared.database,
        "topic.prefix": "millrace",
        "connector.class": "io.debezium.connector.mariadb.MariaDbConnector",
        "database.hostname": declared.host,
        "database.port": str(declared.port),
        "database.user": declared.user,
        "database.password": declared.password.get_secret_value(),
        "database.ssl.mode": declared.tls,
        "database.include.list": regex_of(declared.database),
        "table.include.list": ",".join(regex_of(each) for each in declared.names),
        "snapshot.mode": "initial" if declared.start == "earliest" else "no_data",
        "provide.transaction.metadata": "true",
        "include.schema.changes": "true",
        "signal.enabled.channels": "in-process",
        "signal.poll.interval.ms": "1000",
        # Rows of other databases do not belong to the flow, and their DDL would be stored forever.
        "schema.history.internal.store.only.captured.databases.ddl": "true",
        "tombstones.on.delete": "false",
        "skipped.operations": "none",
        "bigint.unsigned.handling.mode": "precise",
        "decimal.handling.mode": "precise",
        "driver.yearIsDateType": "false",  # the year 0000 has no dates
        "enable.time.adjuster": "false",  # it would turn the year 1 into 2001
        "converters": "values",
        "values.type": "millrace.MariaDbValues",
        "event.processing.failure.handling.mode": "fail",
        "heartbeat.interval.ms": "1000",
        # The server sends a heartbeat every 0.8 of it. On an idle server, a table that is read beside its changes waits
        # for one. A reader that is blocked for longer reconnects, so it is not shorter.
        "connect.keep.alive.interval.ms": "10000",
        "notification.enabled.channels": "sink",
        "notification.sink.topic.name": "notifications",
        "offset.flush.interval.ms": "0",
        "errors.max.retries": "0",
    }


@contextmanager
def connected(declared: MariaDbSource) -> Iterator[Any]:
    """Connect to the server and yield a cursor. Raises InvalidSettings if it refuses the user, LogUnavailable."""
    import pymysql

    place = f"MariaDB {declared.host}:{declared.port}"
    try:
        with (
            pymysql.connect(
                host=declared.host,
                port=declared.port,
                user=declared.user,
                password=declared.password.get_secret_value(),
                connect_timeout=_CONNECT_SECONDS,
                read_timeout=_CONNECT_SECONDS,
                ssl=None if declared.tls == "disable" else {"check_hostname": declared.tls == "verify-full"},
            ) as connection,
            connection.cursor() as cursor,
        ):
            yield cursor
    except pymysql.err.MySQLError as error:
        code, words = (*error.args, "", "")[:2]
        if code in _REFUSED:
            raise InvalidSettings(f"{place} refuses {declared.user!r}: {words}") from None
        raise LogUnavailable(f"{place} cannot be reached: {words or error}") from None


class BinaryLog:
    """The server's binary log."""

    def __init__(self, declared: MariaDbSource) -> None:
        self._declared = declared

    def end(self) -> dict[str, Any]:
        """Return the position after the newest change. Raises LogUnavailable."""
        with connected(self._declared) as cursor:
            cursor.execute("show master status")
            row = cursor.fetchone()
        return {"file": row[0], "pos": int(row[1])} if row else {"file": "", "pos": 0}

    def behind(self, offset: Any, end: Any, /) -> int:
        if "file" not in offset:  # a snapshot has just begun
            return int(end["pos"])
        if offset["file"] == end["file"] and offset["pos"] <= end["pos"]:
            left = int(end["pos"] - offset["pos"])
            return 0 if left and self._ends_with_statement(offset, end) else left
        with connected(self._declared) as cursor:
            cursor.execute("show binary logs")
            sizes = {str(row[0]): int(row[1]) for row in cursor.fetchall()}
        return bytes_between(sizes, offset, end)

    def _ends_with_statement(self, offset: Any, end: Any) -> bool:
        """Return whether a DDL statement that was read is the last one of the log.

        The engine's offset is before its transaction until the next one begins, since it has no COMMIT.
        """
        if not offset.get("event") or not offset.get("transaction_id"):
            return False
        with connected(self._declared) as cursor:
            cursor.execute("show binlog events in %s from %s limit 3", (offset["file"], offset["pos"]))
            rows = cursor.fetchall()
        kinds = [(row[2], str(row[5])) for row in rows]
        wanted = ("Gtid", f"GTID {offset['transaction_id']}")
        return len(rows) == 2 and kinds[0] == wanted and kinds[1][0] == "Query" and int(rows[1][4]) == end["pos"]

    def moment(self, offset: Any, /) -> float:
        return float(offset.get("ts_sec", 0))


def bytes_between(sizes: Mapping[str, int], offset: Mapping[str, Any], end: Mapping[str, Any]) -> int:
    """Return the bytes of a binary log between two positions; 0 or less if `offset` is not before `end`.

    `sizes` has the server's files, oldest first, since their names do not sort as texts (999999, 1000000). If the log
    does not have `offset`, because it was purged or reset (RESET MASTER), all of it is unread.
    """
    if sizes.get(offset["file"], -1) < offset["pos"]:
        return sum(sizes.values())
    files = list(sizes)
    last = files.index(end["file"]) if end["file"] in sizes else -1
    first = files.index(offset["file"])
    if first > last:
        return 0
    return int(sum(sizes[each] for each in files[first:last]) - offset["pos"] + end["pos"])


class MariaDb(Database):
    """A feeder's hooks for a MariaDB server."""

    def __init__(self, declared: MariaDbSource, group: str) -> None:
        self._declared, self._group = declared, group

    def before_engine(self, now: Standing) -> Mapping[str, str]:
        """Return the properties of this start.

        The server disconnects a reader when another one with its number connects, so flows of one id on two machines
        have different numbers.
        """
        name = f"{self._group} {now.identity}" if now.identity else self._group
        return {
            "database.server.id": str(server_number(name)),
            "incremental.snapshot.chunk.size": str(self._chunk(now) if now.unread else _CHUNK_ROWS),
            # The most rows that the driver holds. It reads them from one stream, whatever their number.
            "snapshot.fetch.size": "1" if TOO_LARGE in now.error else "10",
            "millrace.watched": "\n".join(self._others()),
        }

    def resume(self, offset: Any) -> Any:
        """Return the position at which the engine starts. MariaDB accepts one GTID of each domain."""
        return offset if not (offset or {}).get("gtids") else {**offset, "gtids": ",".join(newest_gtids(offset))}

    def _others(self) -> list[str]:
        """Return other objects whose changes affect the tables: tables with a trigger, and views, that name them."""
        declared = self._declared
        with connected(declared) as cursor:
            cursor.execute(
                "select event_object_table, action_statement from information_schema.triggers"
                " where event_object_schema = %s union all select table_name, view_definition from"
                " information_schema.views where table_schema = %s",
                (declared.database, declared.database),
            )
            found = cursor.fetchall()
        names = [each.lower() for each in declared.relations]
        return sorted({name for name, text in found if any(each in str(text).lower() for each in names)})

    def _chunk(self, now: Standing) -> int:
        """Return how many rows of the tables to be read the engine may hold."""
        with connected(self._declared) as cursor:
            names = [each.partition(".")[2] for each in now.unread]
            found = _one(
                cursor,
                "select max(avg_row_length) from information_schema.tables where table_schema = %s and table_name in"
                f" ({', '.join(['%s'] * len(names))})",
                self._declared.database,
                *names,
            )
        return max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // max(1, int(found or 1))))


def check_server(declared: MariaDbSource) -> None:
    """Check the user's rights, that the server logs whole rows, and that the tables have a primary key.

    Raises InvalidSettings with the statement to run, LogUnavailable if the server cannot be reached.
    """
    with connected(declared) as cursor:
        _check_rights(cursor, declared)
        for name, wanted in _WANTED.items():
            found = _one(cursor, f"select @@global.{name}")
            if str(found) != wanted:
                how = "set log_bin in the server's configuration and restart it"
                value = f"'{wanted}'" if wanted.isalpha() else wanted
                how = (
                    how if name == "log_bin" else f"run `SET GLOBAL {name} = {value}`, and set it in the configuration"
                )
                raise InvalidSettings(f"MariaDB {declared.host}: {name} is {found}, and capture needs {wanted}: {how}")
        for table in declared.names:
            _check_table(cursor, declared, table)


def _check_rights(cursor: Any, declared: MariaDbSource) -> None:
    cursor.execute("show grants")  # with those of roles that are set
    found: set[str] = set()
    for (line,) in cursor.fetchall():
        granted = _GRANT.match(line)
        names = set() if granted is None else {each.strip() for each in granted[1].split(",")}
        found |= names if granted is not None and granted[2] == "*.*" else names & {"LOCK TABLES"}
    missing = [] if "ALL PRIVILEGES" in found else [name for name, any_of in _RIGHTS.items() if not any_of & found]
    if missing:
        raise InvalidSettings(
            f"MariaDB {declared.host}: {declared.user!r} lacks the right {' and '.join(missing)}: run `GRANT"
            f" {', '.join(missing)} ON *.* TO {_account(cursor)}`"
        )


def _account(cursor: Any) -> str:
    name, _, host = str(_one(cursor, "select current_user()")).rpartition("@")
    return f"'{name}'@'{host}'"


def _check_table(cursor: Any, declared: MariaDbSource, table: str) -> None:
    import pymysql

    place = table.split(".", 1)
    quoted = ".".join(f"`{each}`" for each in place)
    try:
        cursor.execute(f"select 1 from {quoted} limit 0")
    except pymysql.err.MySQLError as error:
        if error.args[0] == _NO_SELECT:
            raise InvalidSettings(
                f"MariaDB {declared.host}: {declared.user!r} may not read {table}: run `GRANT SELECT ON {quoted} TO"
                f" {_account(cursor)}`"
            ) from None
        # Otherwise the next statement reports the error.
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
    if declared.foreign_keys == "refuse":
        _check_foreign_keys(cursor, declared, table)
    unknown = _one(
        cursor,
        "select concat(column_name, ' has the type ', data_type) from information_schema.columns"
        " where table_schema = %s and table_name = %s and data_type in ('inet4', 'inet6', 'vector', 'xmltype') limit 1",
        *place,
    )
    if unknown:
        raise InvalidSettings(
            f"MariaDB {declared.host}: {table}.{unknown}, which the engine does not support:"
            " change it to another type, such as"
            " VARCHAR or VARBINARY"
        )


def _check_foreign_keys(cursor: Any, declared: MariaDbSource, table: str) -> None:
    """Raise InvalidSettings if foreign keys change rows: the server does that without logging it."""
    found = _one(
        cursor,
        "select concat('by the foreign key ', constraint_name, ' (ON DELETE ', delete_rule, ', ON UPDATE ',"
        " update_rule, ') if ', referenced_table_name, ' changes') from information_schema.referential_constraints"
        " where constraint_schema = %s and table_name = %s and (delete_rule in ('CASCADE', 'SET NULL', 'SET DEFAULT')"
        " or update_rule in ('CASCADE', 'SET NULL', 'SET DEFAULT')) limit 1",
        *table.split(".", 1),
    )
    if found:
        raise InvalidSettings(
            f"MariaDB {declared.host}: {table} gets changes {found}, which the binary log does"
            " not record: change the key to"
            " RESTRICT and let the application change both tables, or declare `foreign_keys: ignore` if that table's"
            " keys are never deleted or changed"
        )


def _one(cursor: Any, query: str, *values: str) -> Any:
    cursor.execute(query, values)
    row = cursor.fetchone()
    return None if row is None else row[0]

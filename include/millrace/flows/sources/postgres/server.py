"""The PostgreSQL server of a capture: its requirements, publication and slot, and the slot's continuity.

The slot belongs to the flow. Each snapshot begins with a new slot, whose exported snapshot and first change meet
exactly. Between two starts of the engine the slot retains the WAL after the flow's position, unless somebody drops it
or the server invalidates it (``max_slot_wal_keep_size``). Then `Server.before_engine` raises CaptureLost.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from millrace.base.deadline import Deadline
from millrace.base.errors import CaptureBusy, CaptureLost, InvalidSettings, LogUnavailable
from millrace.base.extras import import_optional
from millrace.flows.sources.capture.engine import TOO_LARGE
from millrace.flows.sources.capture.feeder import Database
from millrace.flows.sources.capture.rereading import TableReader
from millrace.flows.sources.capture.spool import Standing
from millrace.flows.sources.postgres.model import PostgresSource
from millrace.flows.sources.postgres.rows import RowReader, quoted, texts_of
from millrace.flows.sources.postgres.values import SESSION

_CONNECT_SECONDS: Final = 10
_RELEASE_SECONDS: Final = 15.0
_FETCHED_ROWS: Final = 2000
_FETCHED_BYTES: Final = 32 << 20
"""About the bytes of a snapshot's rows that the engine fetches at once."""
_OLDEST: Final = 14
"""The first version that decodes messages, which heartbeats need to move an idle slot."""
_REFUSED: Final = re.compile(
    r"authentication failed|no pg_hba\.conf entry|role \".*\" does not exist|database \".*\" does not exist"
    r"|permission denied for database|not permitted to log in|no password supplied",
    re.IGNORECASE,
)
_MESSAGE: Final = "SELECT pg_logical_emit_message(true, 'millrace', '')"
"""Changes no table, but moves the engine's position."""
_MARK: Final = "Made by Millrace for"


class Server(Database):
    """The server of `declared`, for the flow with the consumer group `group`."""

    whole_transactions = True

    def __init__(self, declared: PostgresSource, group: str) -> None:
        self._declared = declared
        self._group = group
        self.slot = declared.slot or identifier_of(group)
        self.publication = declared.publication or identifier_of(group)
        self._history: dict[str, Any] = {}
        """The cluster and the timeline of the server, as of the engine's start."""

    # --- before anything starts --------------------------------------------------------------------------------------

    def check_server(self) -> None:
        """Check the server, the role and the table, and create the publication if it is missing.

        Raises InvalidSettings with the statement to run, LogUnavailable if the server cannot be reached.
        """
        with self.connect() as db:
            self._check_settings(db)
            for table in self._declared.relations:
                self._check_table(db, table)
            self._check_slots(db)
            self._publish(db)

    def _check_settings(self, db: Any) -> None:
        version = db.info.server_version // 10_000
        if version < _OLDEST:
            raise self._wrong(f"is version {version}, and capture needs {_OLDEST}: upgrade it")
        (recovers,) = _row(db, "select pg_is_in_recovery()")
        if recovers:
            raise self._wrong("is a standby: declare the host of the primary")
        (level,) = _row(db, "show wal_level")
        if level != "logical":
            raise self._wrong(
                f"has wal_level {level}, and capture needs logical: run `ALTER SYSTEM SET wal_level = 'logical'` and"
                " restart the server"
            )
        (replicates,) = _row(
            db,
            "select exists (select from pg_roles where rolname = current_user and (rolreplication or rolsuper))"
            " or exists (select from pg_roles where rolname in ('rds_replication', 'azure_pg_admin')"
            " and pg_has_role(oid, 'member'))",
        )
        if not replicates:
            raise self._wrong(
                f"does not let {self._declared.user!r} replicate: run `ALTER ROLE {quoted(self._declared.user)}"
                " REPLICATION`"
            )

    def _check_table(self, db: Any, table: str) -> None:
        declared = self._declared
        relation, name = quoted(declared.namespace, table), f"{declared.namespace}.{table}"
        found = db.execute(
            "select c.oid, c.relkind, c.relpersistence, has_schema_privilege(n.oid, 'usage'),"
            " has_schema_privilege(n.oid, 'usage') and has_table_privilege(c.oid, 'select'), c.relispartition"
            " from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = %s and c.relname = %s"
            " and c.relkind not in ('i', 'I', 'S', 't', 'c')",
            (declared.namespace, table),
        ).fetchone()
        if found is None:
            raise self._wrong(f"has no table {name} in the database {declared.database}")
        oid, kind, persistence, used, readable, is_part = found
        if kind not in ("r", "p"):
            words = {"v": "view", "m": "materialized view", "f": "foreign table"}.get(kind, "relation")
            raise self._wrong(f"logs no changes of {name}, which is a {words}: declare a table")
        if is_part:
            raise self._wrong(f"publishes {name}, which is a partition, as its parent: declare the parent table")
        if persistence != "p":
            raise self._wrong(
                f"logs no changes of {name}, which is unlogged or temporary: run `ALTER TABLE {relation} SET LOGGED`"
            )
        role = quoted(declared.user)
        if not used:
            raise self._wrong(
                f"does not let {declared.user!r} see the schema: run `GRANT USAGE ON SCHEMA"
                f" {quoted(declared.namespace)} TO {role}`"
            )
        if not readable:
            raise self._wrong(f"does not let {declared.user!r} read {name}: run `GRANT SELECT ON {relation} TO {role}`")
        self._check_identity(db, oid, name, relation)

    def _check_identity(self, db: Any, oid: int, name: str, relation: str) -> None:
        """Check that each change names its row by the primary key, and has all of its values."""
        (key,) = _row(
            db,
            "select array_agg(a.attname order by a.attnum) from pg_index i join pg_attribute a"
            " on a.attrelid = i.indrelid and a.attnum = any(i.indkey) where i.indrelid = %s and i.indisprimary",
            oid,
        )
        if not key:
            raise self._wrong(
                f"has no primary key of {name}, which identifies changed rows: run `ALTER TABLE {relation} ADD"
                " PRIMARY KEY (...)`"
            )
        # An update does not log an unchanged value that is stored apart (TOAST), unless the old row is logged.
        leaves = "with recursive part as (select %s::oid as id union all select inhrelid from pg_inherits, part"
        leaves += " where inhparent = id) "
        weak = [
            found
            for (found,) in db.execute(
                leaves + "select format('%%I.%%I', n.nspname, c.relname) from part join pg_class c on c.oid = id"
                " join pg_namespace n on n.oid = c.relnamespace where c.relreplident <> 'f' and (c.relreplident <> 'd'"
                " or exists (select from pg_attribute a where a.attrelid = c.oid and a.attnum > 0"
                " and not a.attisdropped and a.attlen = -1 and a.attstorage <> 'p' and a.attname <> all(%s)))"
                " order by 1",
                (oid, key),
            )
        ]
        if weak:
            shown = "; ".join(f"ALTER TABLE {each} REPLICA IDENTITY FULL" for each in weak[:20])
            raise self._wrong(
                f"does not log the whole row with each change of {name}, so a long value that an update leaves alone"
                f" would be missing: run `{shown}`"
            )

    def _check_slots(self, db: Any) -> None:
        slots = db.execute(
            "select slot_name, active, plugin, database from pg_replication_slots order by active, slot_name"
        ).fetchall()
        ours = next((each for each in slots if each[0] == self.slot), None)
        if ours is not None:
            if ours[2:] != ("pgoutput", self._declared.database):
                raise self._wrong(
                    f"has a slot {self.slot!r} of {ours[2] or 'physical replication'} in {ours[3] or 'no database'}:"
                    " declare another slot"
                )
            return
        most = int(_row(db, "show max_replication_slots")[0])
        if len(slots) >= most:
            idle = next((name for name, active, *_ in slots if not active), None)
            drop = f", or drop an unused one: `SELECT pg_drop_replication_slot('{idle}')`" if idle else ""
            raise self._wrong(
                f"has no free replication slot, since all {most} are used: run `ALTER SYSTEM"
                " SET max_replication_slots ="
                f" {most + 10}` and restart the server{drop}"
            )
        senders = int(_row(db, "show max_wal_senders")[0])
        (sending,) = _row(db, "select count(*) from pg_stat_replication")
        if sending >= senders:
            raise self._wrong(
                f"has no free WAL sender, since all {senders} are used: run `ALTER SYSTEM SET max_wal_senders ="
                f" {senders + 10}` and restart the server"
            )

    def _publish(self, db: Any) -> None:
        """Create the publication, or check the existing one."""
        errors = import_optional("psycopg").errors
        declared = self._declared
        tables = ", ".join(quoted(declared.namespace, each) for each in declared.relations)
        name = quoted(self.publication)
        create = f"CREATE PUBLICATION {name} FOR TABLE {tables} WITH (publish_via_partition_root = true)"
        found = db.execute(
            "select pubinsert and pubupdate and pubdelete and pubtruncate, pubviaroot from pg_publication"
            " where pubname = %s",
            (self.publication,),
        ).fetchone()
        if found is None:
            try:
                with db.transaction():
                    db.execute(create)
                    db.execute(f"COMMENT ON PUBLICATION {name} IS '{_MARK} {self._group}'")
            except errors.InsufficientPrivilege as error:
                raise self._wrong(
                    f"does not let {declared.user!r} create a publication"
                    f" ({error.diag.message_primary}): run `{create}`"
                    " as the owner of the tables"
                ) from None
            except errors.DuplicateObject:
                pass  # another worker was first
            return
        complete, via_root = found
        if not complete:
            raise self._wrong(
                f"does not publish all changes in {self.publication}: run `ALTER PUBLICATION {name} SET (publish ="
                " 'insert, update, delete, truncate')`"
            )
        for table in declared.relations:
            self._check_published(db, table, via_root=via_root)

    def _check_published(self, db: Any, table: str, *, via_root: bool) -> None:
        namespace, name = self._declared.namespace, quoted(self.publication)
        relation = quoted(namespace, table)
        (divided,) = _row(
            db,
            "select relkind = 'p' from pg_class c join pg_namespace n on n.oid = relnamespace"
            " where nspname = %s and relname = %s",
            namespace,
            table,
        )
        if divided and not via_root:
            raise self._wrong(
                f"publishes the partitions of {namespace}.{table}, not the table: run `ALTER PUBLICATION {name} SET"
                " (publish_via_partition_root = true)`"
            )
        published = "select to_jsonb(p) ->> 'rowfilter', to_jsonb(p) -> 'attnames', (select json_agg(attname) from"
        published += " pg_attribute where attrelid = format('%%I.%%I', schemaname, tablename)::regclass and attnum > 0"
        published += " and not attisdropped and attgenerated = '') from pg_publication_tables p"
        row = db.execute(
            f"{published} where pubname = %s and schemaname = %s and tablename = %s",
            (self.publication, namespace, table),
        ).fetchone()
        if row is None:
            self._add(db, table)
            return
        condition, columns, all_columns = row
        if condition is not None or (columns is not None and not set(all_columns) <= set(columns)):
            raise self._wrong(
                f"publishes only some rows or columns of {namespace}.{table} in {self.publication}: run `ALTER"
                f" PUBLICATION {name} DROP TABLE {relation}`, and then `ALTER PUBLICATION {name} ADD TABLE {relation}`"
            )

    def _add(self, db: Any, table: str) -> None:
        """Add a table to the publication, if a flow created it."""
        errors = import_optional("psycopg").errors
        name, relation = quoted(self.publication), quoted(self.namespace, table)
        statement = f"ALTER PUBLICATION {name} ADD TABLE {relation}"
        if self._is_ours(db):
            try:
                db.execute(statement)
                return
            except errors.DuplicateObject:
                return  # another worker was first
            except errors.InsufficientPrivilege:
                pass
        raise self._wrong(f"does not publish {self.namespace}.{table} in {self.publication}: run `{statement}`")

    def _is_ours(self, db: Any) -> bool:
        """Return whether a flow created the publication."""
        (found,) = _row(
            db,
            "select exists (select from pg_publication where pubname = %s"
            " and obj_description(oid, 'pg_publication') like %s)",
            self.publication,
            f"{_MARK} %",
        )
        return bool(found)

    # --- around the engine -------------------------------------------------------------------------------------------

    def before_engine(self, now: Standing) -> Mapping[str, str]:
        self._look(now)
        with self.connect() as db:
            if now.offset is None:
                self._drop_slot(db)  # a snapshot is exact only with the slot that exports it
            else:
                self._require_slot(db, now)
                self._await_slot(db)
            return self._columns(db) | {"snapshot.fetch.size": str(self._fetched(db, now))}

    def _fetched(self, db: Any, now: Standing) -> int:
        """Return how many rows of a snapshot the engine fetches at once, by the size of the tables on the disk."""
        if TOO_LARGE in now.error:
            return 2
        declared = self._declared
        (size,) = _row(
            db,
            "select coalesce(max(pg_table_size(c.oid) / greatest(1, reltuples)), 0)::bigint from pg_class c"
            " join pg_namespace n on n.oid = relnamespace where nspname = %s and relname = any(%s)",
            declared.namespace,
            list(declared.relations),
        )
        return int(max(2, min(_FETCHED_ROWS, _FETCHED_BYTES // max(1, int(size)))))

    def _columns(self, db: Any) -> dict[str, str]:
        """Return the properties that depend on the columns: a snapshot of texts, without generated columns.

        The log has no generated columns, so the snapshot leaves them out, too.
        """
        declared = self._declared
        found: dict[str, str] = {}
        excluded: list[str] = []
        for table in declared.relations:
            columns = db.execute(
                "select attname, attgenerated <> '' from pg_attribute a join pg_class c on c.oid = attrelid"
                " join pg_namespace n on n.oid = relnamespace where nspname = %s and relname = %s and attnum > 0"
                " and not attisdropped order by attnum",
                (declared.namespace, table),
            ).fetchall()
            texts = texts_of([name for name, computed in columns if not computed])
            excluded += [
                "\\.".join(map(_literal, (declared.namespace, table, name))) for name, computed in columns if computed
            ]
            found[f"snapshot.select.statement.overrides.{declared.namespace}.{table}"] = (
                f"SELECT {', '.join(texts)} FROM {quoted(declared.namespace, table)}"
            )
        domains = ",".join(f"{name}={base}" for name, base in self.domains(db).items())
        return found | {
            "values.domains": domains,
            "values.digits": self._digits_of_domains(db),
            "column.exclude.list": ",".join(excluded),
        }

    def domains(self, db: Any) -> dict[str, str]:
        """Return the base type of each domain and of each array of a domain."""
        found = dict(
            db.execute(
                "select typname, base from (select t.typname, t.oid, b.typname as base from pg_type t"
                " join pg_type b on b.oid = t.typbasetype where t.typtype = 'd' union all"
                " select a.typname, a.oid, '_' || b.typname from pg_type t join pg_type a on a.oid = t.typarray"
                " join pg_type b on b.oid = t.typbasetype where t.typtype = 'd') found"
                " where typname !~ '[,=]' order by oid"
            ).fetchall()
        )
        return {name: _base(name, found) for name in found}

    def _digits_of_domains(self, db: Any) -> str:
        """Return the digits of numeric domains, for java/PostgresValues.java."""
        found = db.execute(
            "with recursive base as (select oid, typname, typbasetype as type, typtypmod as modifier from pg_type"
            " where typtype = 'd' union all select base.oid, base.typname, t.typbasetype,"
            " case when modifier = -1 then t.typtypmod else modifier end from base join pg_type t on t.oid = type"
            " where t.typtype = 'd') select typname, modifier from base where type = 'numeric'::regtype"
            " and modifier >= 4 and typname !~ '[,=]' order by oid"
        ).fetchall()
        return ",".join(f"{name}={modifier}" for name, modifier in found)

    def before_change(self, now: Standing) -> None:
        # The engine silently creates a missing slot. Before the first acknowledgement, a slot after the offset is a
        # different one.
        if now.offset is not None:
            self._look(now)
            with self.connect() as db:
                self._require_slot(db, now)

    def offset(self, offset: Any) -> Any:
        """Return the end of the last commit or snapshot: the server sends the transactions that commit after it.

        Without the fields of a position inside a transaction, Debezium does not search for one.
        """
        place = offset.get("lsn_commit") or offset.get("lsn") or self._confirmed()
        return {"lsn": place, "lsn_commit": place, "ts_usec": offset.get("ts_usec", 0)} | self._history

    def tables(self, now: Standing) -> tuple[str, ...]:
        # An earlier build stored them in its offset.
        named = (now.offset or {}).get("tables", "")
        return now.tables or tuple(named.split(",") if named else ())

    def reader(self) -> TableReader:
        return RowReader(self)

    def wake(self) -> None:
        with self.connect() as db:
            db.execute(_MESSAGE)

    def end(self) -> dict[str, Any]:
        """Return the position after the newest change. Raises LogUnavailable."""
        with self.connect() as db:
            (place,) = _row(db, "select (pg_current_wal_lsn() - '0/0'::pg_lsn)::bigint")
        return {"lsn": int(place)}

    def behind(self, offset: Any, end: Any, /) -> int:
        """Return the bytes of the log between `offset` and `end`."""
        return int(end["lsn"]) - int(offset["lsn"])

    def moment(self, offset: Any, /) -> float:
        """Return when the change at `offset` was made, in seconds since 1970."""
        return float(offset.get("ts_usec", 0)) / 1e6

    def admit(self, table: str) -> None:
        """Publish a table that was created again. Raises InvalidSettings with the statement to run, LogUnavailable."""
        with self.connect() as db:
            self._check_table(db, table)
            self._publish(db)

    def _confirmed(self) -> int:
        """Return the slot's position, for a capture without a snapshot."""
        with self.connect() as db:
            (place,) = _row(
                db,
                "select (confirmed_flush_lsn - '0/0'::pg_lsn)::bigint from pg_replication_slots where slot_name = %s",
                self.slot,
            )
        return int(place)

    def _look(self, now: Standing) -> None:
        """Determine the server's log, and check that it is the captured one up to the capture's position.

        A standby that was promoted may lack the end of the former primary's log, and has other changes there.
        """
        with self.connect(replication="database") as db:
            system, timeline = _row(db, "IDENTIFY_SYSTEM")[:2]
            self._history = {"system": system, "timeline": int(timeline)}
            known = self._history | (now.offset or {"lsn": 0})
            if known["system"] != system:
                raise CaptureLost(f"{self._declared.name}: {self._place} is another database cluster than before")
            before, place = known["timeline"], int(known["lsn"])
            if before == int(timeline):
                return
            _, history = _row(db, f"TIMELINE_HISTORY {timeline}")
        text = history.decode() if isinstance(history, bytes) else str(history)
        left = {int(line.split()[0]): _number(line.split()[1]) for line in text.splitlines() if line.strip()}
        if left.get(before, 0) < place:
            raise CaptureLost(
                f"{self._declared.name}: the server went from timeline {before} to {timeline} at"
                f" {_lsn(left.get(before, 0))}, before the capture's position {_lsn(place)}"
            )

    def _require_slot(self, db: Any, now: Standing) -> None:
        found = db.execute(
            "select confirmed_flush_lsn - '0/0'::pg_lsn, wal_status, to_jsonb(s) ->> 'invalidation_reason'"
            " from pg_replication_slots s where slot_name = %s",
            (self.slot,),
        ).fetchone()
        name, place = self._declared.name, int(now.offset["lsn"])
        if found is None:
            raise CaptureLost(f"{name}: the replication slot {self.slot} no longer exists")
        confirmed, status, reason = found
        if status == "lost" or reason:
            raise CaptureLost(
                f"{name}: the server has removed WAL that the replication slot {self.slot} needs"
                f" ({reason or 'max_slot_wal_keep_size'})"
            )
        if confirmed is not None and int(confirmed) > place:
            raise CaptureLost(
                f"{name}: the replication slot {self.slot} is at {_lsn(int(confirmed))}, after the capture's"
                f" position {_lsn(place)}: it was created again, or moved"
            )

    def _await_slot(self, db: Any) -> None:
        """Wait until nobody reads the slot: the server may detect the end of a killed engine late."""
        end = Deadline.after(_RELEASE_SECONDS)
        while (busy := self._busy(db)) is not None:
            if not end.pause(0.1):
                raise busy

    def _busy(self, db: Any) -> CaptureBusy | None:
        """Return the error that names the reader of the slot, or None if there is none."""
        found = db.execute(
            "select active_pid, coalesce(nullif(a.application_name, ''), 'a client'),"
            " coalesce(host(a.client_addr), 'the same host'), a.backend_start::text"
            " from pg_replication_slots s left join pg_stat_activity a on a.pid = s.active_pid"
            " where slot_name = %s and active_pid is not null",
            (self.slot,),
        ).fetchone()
        if found is None:
            return None
        pid, application, host, since = found
        return CaptureBusy(
            f"{self._declared.name}: the replication slot {self.slot} is in use by the server's process {pid}"
            f" ({application} on {host}, since {since or 'some time'}): stop that reader, declare another slot, or"
            f" run `SELECT pg_terminate_backend({pid})` if it is not needed"
        )

    # --- the end -----------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Drop the slot, and the publication if the flow created it. Raises InvalidSettings, LogUnavailable."""
        with self.connect() as db:
            self._drop_slot(db)
            if self._is_ours(db):
                db.execute(f"DROP PUBLICATION IF EXISTS {quoted(self.publication)}")

    def removal(self) -> list[str]:
        """Return the statements that `release` runs."""
        return [
            f"select pg_drop_replication_slot('{self.slot}')",
            *([] if self._declared.publication else [f"drop publication if exists {quoted(self.publication)}"]),
        ]

    def _drop_slot(self, db: Any) -> None:
        """Drop the slot if it exists, after a killed engine has disconnected from it."""
        errors = import_optional("psycopg").errors
        end = Deadline.after(_RELEASE_SECONDS)
        while True:
            try:
                db.execute(
                    "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s",
                    (self.slot,),
                )
                return
            except errors.UndefinedObject:
                return
            except errors.ObjectInUse:
                busy = self._busy(db)
                if busy is not None and not end.pause(0.1):
                    raise busy from None

    # --- connections -------------------------------------------------------------------------------------------------

    @contextmanager
    def connect(self, **more: Any) -> Iterator[Any]:
        """Connect, in autocommit. Raises InvalidSettings if the server refuses the login, else LogUnavailable."""
        psycopg = import_optional("psycopg")
        declared = self._declared
        options: dict[str, Any] = {"sslrootcert": declared.tls_ca} if declared.tls_ca else {}
        try:
            db = psycopg.connect(
                host=declared.host,
                port=declared.port,
                user=declared.user,
                password=declared.password.get_secret_value() or None,
                dbname=declared.database,
                sslmode=declared.tls,
                connect_timeout=_CONNECT_SECONDS,
                options=f"-c statement_timeout={_CONNECT_SECONDS * 1000}",
                application_name="millrace",
                autocommit=True,
                **options,
                **more,
            )
        except psycopg.OperationalError as error:
            words = " ".join(str(error).split())
            if _REFUSED.search(words):
                raise self._wrong(f"refuses {declared.user!r}: {words}") from None
            raise LogUnavailable(f"{self._place} cannot be reached: {words}") from None
        try:
            with db:
                yield db
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            raise LogUnavailable(f"{self._place} ended the connection: {' '.join(str(error).split())}") from None
        except psycopg.Error as error:
            raise self._wrong(f"refuses a statement of the capture: {' '.join(str(error).split())}") from None

    @property
    def namespace(self) -> str:
        """The schema of the tables."""
        return self._declared.namespace

    @property
    def _place(self) -> str:
        return f"PostgreSQL {self._declared.host}:{self._declared.port}"

    def _wrong(self, words: str) -> InvalidSettings:
        return InvalidSettings(f"{self._place} {words}")


def properties_of(declared: PostgresSource, group: str, server: Server) -> dict[str, str]:
    """Return Debezium's properties, after `server.check_server`, except those of each start."""
    found: Mapping[str, str] = {
        "name": group,
        "topic.prefix": "millrace",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "plugin.name": "pgoutput",
        "database.hostname": declared.host,
        "database.port": str(declared.port),
        "database.user": declared.user,
        "database.password": declared.password.get_secret_value(),
        "database.dbname": declared.database,
        "database.sslmode": declared.tls,
        "slot.name": server.slot,
        "publication.name": server.publication,
        "publication.autocreate.mode": "disabled",
        "schema.include.list": _literal(declared.namespace),
        "table.include.list": ",".join(map(_literal, declared.names)),
        "snapshot.mode": "initial" if declared.start == "earliest" else "no_data",
        "provide.transaction.metadata": "true",
        "tombstones.on.delete": "false",
        "skipped.operations": "none",
        "converters": "values",
        "values.type": "millrace.PostgresValues",
        "snapshot.select.statement.overrides": ",".join(declared.names),
        "include.unknown.datatypes": "true",
        "datatype.propagate.source.type": ".+",
        "driver.options": " ".join(f"-c {name}={value}" for name, value in SESSION.items()),
        "event.converting.failure.handling.mode": "fail",
        "event.processing.failure.handling.mode": "fail",
        "heartbeat.interval.ms": str(declared.heartbeat_seconds * 1000),
        # An idle database has no changes to confirm while other databases of its server write. This creates one.
        "heartbeat.action.query": _MESSAGE,
        "status.update.interval.ms": "1000",
        "notification.enabled.channels": "sink",
        "notification.sink.topic.name": "notifications",
        "offset.flush.interval.ms": "0",
        "errors.max.retries": "0",
        "slot.max.retries": "0",
    }
    more = {"database.sslrootcert": declared.tls_ca} if declared.tls_ca else {}
    return {**found, **more}


def identifier_of(group: str) -> str:
    """Return a name of a slot or publication for a consumer group: its letters and digits, and a unique digest."""
    letters = re.sub(r"[^a-z0-9_]", "_", group.lower())[:50]
    return f"{letters}_{hashlib.sha256(group.encode()).hexdigest()[:12]}"


def _base(name: str, domains: Mapping[str, str]) -> str:
    """Return the base type of a domain, or of an array of one."""
    for _ in range(len(domains) + 1):
        if name not in domains:
            break
        name = domains[name]
    return name


def _row(db: Any, query: str, *values: Any) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = db.execute(query, values or None).fetchone()
    assert row is not None, "the query returns a row"
    return row


def _literal(name: str) -> str:
    """Return a Java regular expression that matches exactly `name`."""
    return "".join(each if each.isalnum() or each == "_" else f"\\{each}" for each in name)


def _number(lsn: str) -> int:
    high, low = lsn.split("/")
    return int(high, 16) << 32 | int(low, 16)


def _lsn(place: int) -> str:
    return f"{place >> 32:X}/{place & 0xFFFFFFFF:X}"

"""A connection to a database that is read by SQL: MariaDB, PostgreSQL and SQLite by their Python drivers."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from millrace.base.closeable import Closeable
from millrace.base.errors import InvalidSettings, LogUnavailable
from millrace.base.extras import import_optional
from millrace.flows.sources.sql.model import PORTS, SqlDatabase
from millrace.flows.sources.sql.values import Column

CONNECT_SECONDS: Final = 10
READ_SECONDS: Final = 300
SESSION: Final = {
    "DateStyle": "ISO", "IntervalStyle": "iso_8601", "TimeZone": "UTC", "bytea_output": "hex", "lc_monetary": "C",
    "extra_float_digits": "3",
}  # fmt: skip
"""Settings of PostgreSQL's sessions and trigger functions, so that values have one text."""
PAGE_BYTES: Final = 16 << 20
"""About the most bytes of rows that are read at once."""
_LONG: Final = ("char", "text", "blob", "binary", "json", "geometry")
"""Parts of MariaDB type names whose values may be long."""
_SHORT: Final = frozenset(
    {
        "boolean", "smallint", "integer", "bigint", "real", "double precision", "numeric", "money", "date", "interval",
        "uuid", "oid", "inet", "cidr", "macaddr", "name",
    }
)  # fmt: skip
"""PostgreSQL types whose values are short."""
_SHORT_BYTES: Final = 8
_MARK: Final = "\0"
_REFUSED: Final = (1044, 1045, 1049, 1142, 1146, 1227, 1419, 1698)
"""MariaDB error codes for a wrong user, missing rights, and a missing database or table."""


class SqlConnection(Closeable):
    """A session in autocommit. One thread uses it. Every method raises LogUnavailable and InvalidSettings."""

    def __init__(self, declared: SqlDatabase) -> None:
        self.declared = declared
        self.engine = declared.engine
        self.mark = "?" if self.engine == "sqlite" else _MARK
        """The placeholder of a parameter in a statement."""
        with self._errors():
            self._connection = self._connect()

    def _connect(self) -> Any:
        declared, secret = self.declared, self.declared.password.get_secret_value()
        if self.engine == "sqlite":
            return sqlite3.connect(
                f"file:{declared.database}?mode=rw", uri=True, isolation_level=None, timeout=30.0,
                check_same_thread=False,
            )  # fmt: skip
        if self.engine == "mariadb":
            pymysql = import_optional("pymysql")
            tls: Any = None if declared.tls == "disable" else {"check_hostname": declared.tls == "verify-full"}
            if tls is not None and declared.tls_ca:
                tls["ca"] = declared.tls_ca
            return pymysql.connect(
                host=declared.host, port=declared.port or PORTS["mariadb"], user=declared.user, password=secret,
                database=declared.database, charset="utf8mb4", autocommit=True, connect_timeout=CONNECT_SECONDS,
                read_timeout=READ_SECONDS, ssl=tls,
                init_command="set time_zone = '+00:00', sql_mode = '', tx_isolation = 'READ-COMMITTED'",
            )  # fmt: skip
        psycopg = import_optional("psycopg")
        return psycopg.connect(
            host=declared.host, port=declared.port or PORTS["postgres"], user=declared.user, password=secret,
            dbname=declared.database, sslmode=declared.tls, autocommit=True, connect_timeout=CONNECT_SECONDS,
            sslrootcert=declared.tls_ca or None,
            options=" ".join(f"-c {name}={value}" for name, value in SESSION.items()),
        )  # fmt: skip

    def close(self) -> None:
        """Idempotent."""
        try:
            self._connection.close()
        except Exception:  # noqa: S110 (a connection that is broken)
            pass

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement; return its rows, or none."""
        with self._errors():
            cursor = self._connection.cursor()
            try:
                if values:
                    if self.engine != "sqlite":
                        statement = statement.replace("%", "%%").replace(_MARK, "%s")
                    cursor.execute(statement, tuple(values))
                else:
                    cursor.execute(statement)
                return [tuple(row) for row in cursor.fetchall()] if cursor.description else []
            finally:
                cursor.close()

    def fitting(self, columns: Sequence[Column], source: str, values: Sequence[Any], *, order: str, most: int) -> int:
        """Return how many of the next `most` rows to read at once: about PAGE_BYTES, at least one.

        `source` is the text after FROM, without ORDER BY, and names the table ``r``. `columns` are the columns to read.
        """
        lengths = [length for each in columns if (length := self._length(each))]
        if not lengths or most == 1:
            return most
        sizes = self.rows(f"select {' + '.join(lengths)} from {source} order by {order} limit {most}", values)
        size = 0
        for count, (length,) in enumerate(sizes):
            size += int(length)
            if size > PAGE_BYTES:
                return max(1, count)
        return most

    def size(self, columns: Sequence[Column], source: str, values: Sequence[Any], *, most: int) -> int:
        """Return about how many bytes the rows of `source` have, at most `most` of them. See `fitting`."""
        lengths = [length for each in columns if (length := self._length(each))]
        expression = " + ".join([*lengths, str(_SHORT_BYTES * (len(columns) - len(lengths)))])
        ((found,),) = self.rows(
            f"select coalesce(sum(size), 0) from (select {expression} as size from {source} limit {most}) s", values
        )
        return int(found)

    def _length(self, column: Column) -> str:
        """Return an expression for the bytes of a column; empty if they are few."""
        name = f"r.{self.name(column.name)}"
        if self.engine == "sqlite":
            return f"coalesce(length(cast({name} as blob)), 0)"
        if self.engine == "mariadb":
            long = any(each in column.type for each in _LONG)
            return f"coalesce(octet_length({name}), 0)" if long else ""
        if column.type in _SHORT or column.type.startswith(("timestamp", "time ")):
            return ""
        return f"coalesce(octet_length({name}{'' if column.type == 'bytea' else '::text'}), 0)"

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Make all reads within this context see one moment."""
        begin = {
            "mariadb": "start transaction with consistent snapshot, read only",
            "postgres": "begin isolation level repeatable read, read only",
            "sqlite": "begin",
        }
        if self.engine == "mariadb":
            self.rows("set transaction isolation level repeatable read")
        self.rows(begin[self.engine])
        try:
            yield
        finally:
            self.rows("rollback")

    def name(self, name: str) -> str:
        """Return a name, quoted for SQL."""
        sign = "`" if self.engine == "mariadb" else '"'
        return f"{sign}{name}{sign}"

    def table(self, name: str) -> str:
        """Return a table's name with its schema, quoted for SQL."""
        if self.engine == "postgres":
            return f"{self.name(self.declared.namespace)}.{self.name(name)}"
        return self.name(name)

    def columns(self, table: str) -> list[Column]:
        """Return the columns of a table or view, in their order. Raises InvalidSettings if there is none."""
        if self.engine == "sqlite":
            rows = self.rows(f"select name, lower(type) from pragma_table_info({_text(table)})")
            found = [Column(name, str(kind).partition("(")[0]) for name, kind in rows]
        elif self.engine == "mariadb":
            rows = self.rows(
                "select column_name, case when column_type = 'bit(1)' then column_type else data_type end"
                " from information_schema.columns where table_schema = database() and table_name = \0"
                " order by ordinal_position",
                [table],
            )
            found = [Column(name, str(kind).lower()) for name, kind in rows]
        else:
            rows = self.rows(
                "select attname, case when t.typcategory = 'A' then 'x[]' when t.typtype = 'd' then"
                " format_type(t.typbasetype, null) else format_type(a.atttypid, null) end"
                " from pg_attribute a join pg_type t on t.oid = a.atttypid"
                " where attrelid = to_regclass(\0) and attnum > 0 and not attisdropped order by attnum",
                [self.table(table)],
            )
            found = [Column(name, kind) for name, kind in rows]
        if not found:
            raise InvalidSettings(f"{self.declared.words}: there is no table {table!r} that {self._user} may read")
        return found

    def key(self, table: str) -> list[str]:
        """Return the columns of a table's primary key, in order; empty for a view."""
        if self.engine == "sqlite":
            rows = self.rows(f"select name from pragma_table_info({_text(table)}) where pk > 0 order by pk")
        elif self.engine == "mariadb":
            rows = self.rows(
                "select column_name from information_schema.key_column_usage where table_schema = database()"
                " and table_name = \0 and constraint_name = 'PRIMARY' order by ordinal_position",
                [table],
            )
        else:
            rows = self.rows(
                "select attname from pg_index i join unnest(i.indkey) with ordinality k(number, place) on true"
                " join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.number"
                " where i.indrelid = to_regclass(\0) and i.indisprimary order by k.place",
                [self.table(table)],
            )
        return [str(name) for (name,) in rows]

    @property
    def _user(self) -> str:
        return self.declared.user or "this process"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate the driver's errors: to InvalidSettings if somebody must act, else to LogUnavailable."""
        place = self.declared.words
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error) or "busy" in str(error):
                raise LogUnavailable(f"{place}: {error}") from None
            raise InvalidSettings(f"{place}: {error}") from None
        except Exception as error:
            family = type(error).__module__.partition(".")[0]
            if family not in ("pymysql", "psycopg", "sqlite3"):
                raise
            words = str(error).strip()
            code = error.args[0] if error.args else None
            state = str(getattr(error, "sqlstate", None) or "")
            if family == "psycopg" and "password authentication failed" in words:
                state = "28P01"
            if code in _REFUSED or state[:2] in ("28", "3D", "3F", "42") or type(error).__name__ == "ProgrammingError":
                raise InvalidSettings(f"{place}: {words}") from None
            raise LogUnavailable(f"{place}: {words}") from None


def _text(value: str) -> str:
    doubled = value.replace("'", "''")
    return f"'{doubled}'"

"""Rows of PostgreSQL's tables, read beside their changes: the shapes of tables, and pages of rows by the key.

The log has no DDL. A shape shows whether a statement changed rows: the table's columns by their numbers, and its files,
which are replaced when ALTER TABLE rewrites the rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from millrace.base.extras import import_optional
from millrace.flows.sources.capture.columns import PRECISION, SCALE, TYPE
from millrace.flows.sources.capture.ddl import Effect
from millrace.flows.sources.capture.rereading import Look, Page
from millrace.flows.sources.postgres.values import SESSION, json_of

if TYPE_CHECKING:
    from millrace.flows.sources.postgres.server import Server

PAGE_ROWS: Final = 5_000
PAGE_BYTES: Final = 8 << 20
_FETCHED_ROWS: Final = 200
_FIRST_ROWS: Final = 8
"""Rows that are fetched at once until their size is known."""
_NO_DIGITS: Final = 4
"""The offset of a numeric's modifier. A modifier below it has no digits."""
_LOCK_SECONDS: Final = 1
_ALIKE: Final = {"text", "varchar", "citext"}
"""Types with the same form."""
_PLACE: Final = "(pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint"

_SHAPES: Final = """
with recursive wanted as (
    select c.oid, c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname = %(namespace)s and c.relname = any(%(tables)s) and c.relkind in ('r', 'p')
), part as (
    select oid as root, oid from wanted
    union all select root, inhrelid from pg_inherits join part on inhparent = part.oid
), base as (
    select attrelid, attnum, atttypid as type, atttypmod as modifier, atttypid as outer_type
    from pg_attribute where attrelid in (select oid from wanted) and attnum > 0 and not attisdropped
    union all
    select attrelid, attnum, t.typbasetype, case when t.typtypmod <> -1 then t.typtypmod else modifier end, outer_type
    from base join pg_type t on t.oid = base.type where t.typtype = 'd'
)
select w.relname, w.oid::bigint,
    (select md5(string_agg(c.relfilenode::text, ',' order by c.oid)) from part join pg_class c on c.oid = part.oid
        where root = w.oid),
    (select json_agg(json_build_array(a.attnum, a.attname, t.typname, b.modifier, format_type(a.atttypid, a.atttypmod),
            a.atthasmissing, a.xmin::text) order by a.attnum)
        from pg_attribute a join base b on b.attrelid = a.attrelid and b.attnum = a.attnum
        join pg_type t on t.oid = b.type and t.typtype <> 'd'
        where a.attrelid = w.oid and a.attgenerated = ''),
    (select json_agg(a.attname order by array_position(i.indkey::int2[], a.attnum)) from pg_index i
        join pg_attribute a on a.attrelid = i.indrelid and a.attnum = any(i.indkey)
        where i.indrelid = w.oid and i.indisprimary)
from wanted w
"""


class RowReader:
    """Reads the shapes and rows of one server's tables (millrace.flows.sources.capture.rereading.TableReader)."""

    def __init__(self, server: Server) -> None:
        self._server, self._namespace = server, server.namespace
        self._domains: dict[str, str] = {}

    def look(self, tables: Sequence[str], /) -> Look:
        with self._server.connect() as db:
            found = self._shapes(db, tables)
            ((place,),) = db.execute(f"select {_PLACE}").fetchall()
        return Look(found, int(place))

    def _shapes(self, db: Any, tables: Sequence[str]) -> dict[str, Any]:
        names = {each.split(".", 1)[1]: each for each in tables}
        self._domains = self._server.domains(db)
        rows = db.execute(_SHAPES, {"namespace": self._namespace, "tables": list(names)}).fetchall()
        found: dict[str, Any] = dict.fromkeys(tables)
        for name, oid, files, columns, key in rows:
            found[names[name]] = {
                "oid": oid,
                "files": files,
                "columns": {
                    str(number): {
                        "name": column, "type": self._domains.get(kind, kind), "modifier": modifier, "cast": cast,
                        "missing": missing, "changed": changed,
                    }
                    for number, column, kind, modifier, cast, missing, changed in columns or ()
                },
                "key": key or [],
            }  # fmt: skip
        return found

    def effect(self, before: Any, after: Any, /) -> Effect:
        if before is None or after is None or before["oid"] != after["oid"] or before["key"] != after["key"]:
            return Effect.REPLACE
        written = before["files"] != after["files"]
        for number, column in after["columns"].items():
            known = before["columns"].get(number)
            if known is None:
                if column["missing"] or written:
                    return Effect.READ
                continue
            kinds = {known["type"], column["type"]}
            others = len(kinds) > 1 and not kinds <= _ALIKE
            if others or known["name"] != column["name"] or (written and known["changed"] != column["changed"]):
                return Effect.READ
        return Effect.NOTHING

    def admit(self, table: str, /) -> None:
        self._server.admit(table.split(".", 1)[1])

    def page(self, table: str, shape: Any, after: list[str] | None, /) -> Page | None:
        errors = import_optional("psycopg").errors
        name = table.split(".", 1)[1]
        relation = quoted(self._namespace, name)
        with self._server.connect() as db:
            settings = {**SESSION, "lock_timeout": f"{_LOCK_SECONDS}s", "statement_timeout": "60s"}
            db.execute(f"select {', '.join('set_config(%s, %s, false)' for _ in settings)}", _flat(settings))
            try:
                with db.transaction():
                    db.execute("set transaction isolation level repeatable read, read only")
                    # Lock before the snapshot: one that is older than a rewrite of the table would see no rows.
                    db.execute(f"lock table {relation} in access share mode")
                    if self._shapes(db, [table])[table] != shape:
                        return None
                    return self._page(db, table, relation, shape, after)
            except (errors.LockNotAvailable, errors.UndefinedTable):
                return None

    def _page(self, db: Any, table: str, relation: str, shape: Any, after: list[str] | None) -> Page:
        columns = list(shape["columns"].values())
        casts = {each["name"]: each["cast"] for each in columns}
        key = ", ".join(
            quoted("row", each) for each in shape["key"]
        )  # the columns, not the selected texts of the same name
        marks = ", ".join(f"%s::text::{casts[each]}" for each in shape["key"])
        query = f'select {", ".join(texts_of([each["name"] for each in columns]))} from {relation} as "row"'
        ordered = f"order by {key} limit {PAGE_ROWS}"
        if after is not None:  # values are substituted then, so a plain % must be doubled
            query, ordered = (each.replace("%", "%%") for each in (f"{query} where ({key}) >", ordered))
            query += f" ({marks})"
        rows: list[tuple[Any, ...]] = []
        size = 0
        with db.cursor(name="page") as cursor:
            cursor.execute(f"{query} {ordered}", after)
            whole, asked = False, _FIRST_ROWS
            while not whole and size < PAGE_BYTES:
                found = cursor.fetchmany(asked)
                rows += found
                mine = sum(len(each) for row in found for each in row if each is not None)
                whole, size = len(found) < asked, size + mine
                asked = max(1, min(_FETCHED_ROWS, 2 * asked, PAGE_BYTES * len(rows) // (4 * max(1, size))))
        ((place,),) = db.execute(f"select {_PLACE}").fetchall()
        names = [each["name"] for each in columns]
        last = None
        if rows and (not whole or len(rows) == PAGE_ROWS):
            last = [rows[-1][names.index(each)] for each in shape["key"]]
        return Page(self._lines(table, shape, rows), _description(table, shape), last, int(place))

    def _lines(self, table: str, shape: Any, rows: Sequence[tuple[Any, ...]]) -> list[bytes]:
        columns = list(shape["columns"].values())
        values: list[list[str]] = []
        for place, each in enumerate(columns):
            begin, kind = json.dumps(each["name"]) + ":", each["type"]
            values.append([begin + ("null" if row[place] is None else json_of(row[place], kind)) for row in rows])
        names = [each["name"] for each in columns]
        keys = [names.index(each) for each in shape["key"]]
        head = f'{{"t":{json.dumps(table)},"o":"r","s":"incremental","m":{time.time_ns() // 1_000_000}'
        return [
            f'{head},"k":{{{",".join(row[place] for place in keys)}}},"a":{{{",".join(row)}}}}}'.encode()
            for row in zip(*values, strict=True)
        ]

    def passed(self, offset: Any, place: int, /) -> bool:
        return int(offset["lsn"]) >= place

    def wake(self) -> None:
        self._server.wake()


def texts_of(columns: Sequence[str]) -> list[str]:
    """Return SQL expressions for the texts of columns, in the log's form.

    `format` uses the types' own output: a cast to text truncates char(n), and extends inet.
    """
    return [
        f"case when {each} is distinct from null then format('%s', {each}) end as {each}"
        for each in map(quoted, columns)
    ]


def quoted(*names: str) -> str:
    """Return a qualified name, quoted for SQL."""
    return ".".join('"{}"'.format(each.replace('"', '""')) for each in names)


def _description(table: str, shape: Any) -> dict[str, Any]:
    """Return the columns in the engine's form of descriptions (java/CaptureEngine.java)."""
    return {
        "table": table,
        "key": shape["key"],
        "columns": [
            {
                "name": each["name"],
                "type": "bytes" if each["type"] == "bytea" else "string",
                "meaning": None,
                "optional": each["name"] not in shape["key"],
                "default": False,
                "parameters": {TYPE: each["type"], **_digits(each)},
            }
            for each in shape["columns"].values()
        ],
    }


def _digits(column: Mapping[str, Any]) -> dict[str, str]:
    """Return precision and scale of a numeric column with a fixed number of digits; empty for others."""
    if column["type"] != "numeric" or column["modifier"] < _NO_DIGITS:
        return {}
    packed = column["modifier"] - _NO_DIGITS
    return {PRECISION: str(packed >> 16 & 0xFFFF), SCALE: str(((packed & 0x7FF) ^ 0x400) - 0x400)}


def _flat(settings: Mapping[str, str]) -> list[str]:
    return [each for pair in settings.items() for each in pair]

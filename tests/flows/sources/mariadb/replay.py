"""What a database's tables have and what their lanes come to, in one form."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import pymysql
from pymysql.constants import CLIENT

from millrace.flows.records import is_truncation
from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.capture.ticks import spool_folder
from millrace.flows.sources.sql.values import Column, form_of, value_of
from tests.flows.sources.mariadb.test_table import Shop
from tests.waiting import until

_DIGITS = Context(prec=100)


class Tables(Shop):
    """A database with tables of any columns, all of them captured."""

    def __init__(self, folder: Path, *tables: str, **more: Any) -> None:
        super().__init__(folder, "id int primary key", **more)
        self.capture(*tables)

    def capture(self, *tables: str) -> None:
        """Declare these tables."""
        self.declared = self.declared.model_copy(update={"table": None, "tables": tables})

    def script(self, text: str) -> None:
        """Run several statements in one session."""
        with pymysql.connect(
            **self.login,
            password=self.password,
            autocommit=True,
            database=self.database,
            client_flag=CLIENT.MULTI_STATEMENTS,
        ) as connection:
            cursor = connection.cursor()
            cursor.execute(text)
            while cursor.nextset():
                pass

    def keyed(self) -> list[str]:
        """The tables with a primary key."""
        found = self.execute(
            "select table_name from information_schema.key_column_usage where table_schema = database()"
            " and constraint_name = 'PRIMARY' group by table_name order by table_name"
        )
        return [str(name) for (name,) in found]

    def wanted(self, table: str) -> list[dict[str, Any]]:
        """The rows of a table as the documents say that records have them; none if there is no such table."""
        columns = [
            Column(str(name), str(kind))
            for name, kind in self.execute(
                "select column_name, case when column_type = 'bit(1)' then column_type else data_type end"
                " from information_schema.columns where table_schema = database()"
                f" and table_name = {pymysql.converters.escape_item(table, 'utf8mb4')} order by ordinal_position"
            )
        ]
        if not columns:
            return []
        forms = [form_of("mariadb", each) for each in columns]
        names = [f"`{each.name.replace('`', '``')}`" for each in columns]
        expressions = ", ".join(form.expression.format(name) for form, name in zip(forms, names, strict=True))
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute("set time_zone = '+00:00'")
            cursor.execute(f"select {expressions} from `{self.database}`.`{table.replace('`', '``')}`")
            rows = cursor.fetchall()
        return _plain(
            {each.name: value_of(form, raw) for each, form, raw in zip(columns, forms, row, strict=True)}
            for row in rows
        )

    def replayed(self) -> dict[str, dict[str, Any]]:
        """The rows that the records come to, by key, with all digits of their numbers."""
        rows: dict[str, dict[str, Any]] = {}
        for each in self.records():
            if is_truncation(each):
                rows.clear()
            elif each.value is None:
                rows.pop((each.key or b"").decode(), None)
            else:
                rows[(each.key or b"").decode()] = json.loads(each.value, parse_float=Decimal)
        return rows

    def found(self, table: str) -> list[dict[str, Any]]:
        """The rows that the lane of a table comes to."""
        self.lane = f"{self.database}.{table}"
        return _plain(self.replayed().values())

    def differences(self, tables: Sequence[str]) -> list[Any]:
        """What lanes and tables do not have in common: a table, a row of it that one of them has, and which."""
        differences: list[Any] = []
        for table in tables:
            found, wanted = self.found(table), self.wanted(table)
            names = wanted[0].keys() if wanted else ()
            wide = {name for row in wanted for name, value in row.items() if isinstance(value, Decimal)}
            found = (
                [{name: _number(row.get(name)) if name in wide else row.get(name) for name in names} for row in found]
                if names
                else found
            )
            ours, theirs = {str(each) for each in found}, {str(each) for each in wanted}
            for row in wanted:
                if str(row) not in ours:
                    first = next(iter(row))
                    near = next((each for each in found if each[first] == row[first]), {})
                    other = {name: (near.get(name), value) for name, value in row.items() if near.get(name) != value}
                    differences.append((table, row[first], "captured and there", other))
                    if len(differences) > 10:
                        break
            differences += [(table, "captured", each) for each in found if str(each) not in theirs][:10]
            if len(found) != len(wanted):
                differences.append((table, len(found), len(wanted)))
        return differences

    def equal(self, tables: Sequence[str], words: str, *, seconds: float = 60) -> None:
        """Wait until lanes have what tables have, the snapshot included. Fails with what differs."""
        with Spool(spool_folder(self.settings, self.group)) as spool:
            try:
                _until_empty(
                    lambda: self.differences(tables) if spool.standing().complete else [spool.standing()],
                    words,
                    seconds,
                )
            except AssertionError as error:
                now = spool.standing()
                raise AssertionError(f"{error}; {len(now.unread)} tables are unread, error {now.error!r}") from None


def _until_empty(look: Callable[[], list[Any]], words: str, seconds: float) -> None:
    last: list[Any] = []

    def empty() -> bool:
        last[:] = look()
        return not last

    try:
        until(empty, words, seconds=seconds)
    except AssertionError:
        raise AssertionError(f"{words}: {last[:4]}") from None


def _plain(rows: Any) -> list[dict[str, Any]]:
    """Rows with numbers as they compare."""
    plain: list[dict[str, Any]] = []
    for row in rows:
        plain.append({name: _value(value) for name, value in row.items()})
    return plain


def _number(value: Any) -> Any:
    """A number, also of a decimal of more than 38 digits, which is a text in a record."""
    return _DIGITS.normalize(Decimal(value)) if isinstance(value, str) else value


def _value(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float | Decimal):
        return _DIGITS.normalize(Decimal(str(value)))
    return json.dumps(value) if isinstance(value, dict | list) else value

"""The statements that create the table of changes and the triggers, for the user to run, and a check of them.

A trigger writes the columns that the table has when the statements are generated. It also writes a fingerprint of them,
by which a check finds triggers that are missing or outdated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from millrace.base.errors import InvalidSettings
from millrace.flows.sources.sql.connection import SESSION, SqlConnection
from millrace.flows.sources.sql.values import Column, Form, form_of
from millrace.flows.sources.triggers.model import TriggersSource

COMMAND: Final = "millrace flows statements"
_OBJECT: Final[Mapping[str, str]] = {
    "mariadb": "json_object",
    "postgres": "jsonb_build_object",
    "sqlite": "json_object",
}
_SAME: Final[Mapping[str, str]] = {
    "mariadb": "binary OLD.{0} <=> binary NEW.{0}",
    "postgres": "OLD.{0}::text is not distinct from NEW.{0}::text",
    "sqlite": "OLD.{0} is NEW.{0}",
}
_TRANSACTION: Final[Mapping[str, str]] = {"mariadb": "connection_id()", "postgres": "txid_current()", "sqlite": "0"}


class Shape(NamedTuple):
    """The present columns and key of a table."""

    table: str
    columns: tuple[tuple[Column, Form], ...]
    key: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """A digest that changes with columns, types and key."""
        described = repr(([tuple(each) for each, _ in self.columns], self.key))
        return hashlib.sha256(described.encode()).hexdigest()[:16]


def shape_of(connection: SqlConnection, table: str) -> Shape:
    """Return the shape of a table. Raises InvalidSettings if it is missing or has no primary key, LogUnavailable."""
    columns = connection.columns(table)
    key = connection.key(table)
    if not key:
        raise InvalidSettings(
            f"{connection.declared.words}: {table} has no primary key, which identifies changed rows: add one"
        )
    return Shape(table, tuple((each, form_of(connection.engine, each)) for each in columns), tuple(key))


def statements(connection: SqlConnection, declared: TriggersSource) -> list[str]:
    """Return the statements to run, in their order. Raises InvalidSettings, LogUnavailable."""
    name = connection.name
    changes = connection.table(declared.changes)
    texts = {"mariadb": "longtext", "postgres": "jsonb", "sqlite": "text"}[declared.engine]
    number = {
        "mariadb": "bigint unsigned not null auto_increment primary key",
        "postgres": "bigint generated always as identity primary key",
        "sqlite": "integer primary key autoincrement",
    }[declared.engine]
    moment = {
        "mariadb": "timestamp(6) not null default current_timestamp(6)",
        "postgres": "timestamptz not null default clock_timestamp()",
        "sqlite": "text not null default (strftime('%Y-%m-%d %H:%M:%f', 'now'))",
    }[declared.engine]
    columns = (
        f"id {number}, txid bigint not null, source varchar(64) not null, shape char(16) not null,"
        f" op char(1) not null, {name('key')} {texts}, {name('before')} {texts}, {name('after')} {texts},"
        f" made_at {moment}"
    )
    more = " engine = InnoDB default character set utf8mb4" if declared.engine == "mariadb" else ""
    found = ["set names utf8mb4"] if declared.engine == "mariadb" else []
    found.append(f"create table if not exists {changes} ({columns}){more}")
    if declared.engine == "mariadb":
        found.append(f"create index if not exists by_txid on {changes} (txid)")
    else:
        index = connection.name(f"{declared.changes}_txid")
        found.append(f"create index if not exists {index} on {changes} (txid)")
    for table in declared.relations:
        found += _triggers(connection, declared, shape_of(connection, table))
    return found


def check(connection: SqlConnection, declared: TriggersSource) -> list[Shape]:
    """Return the present shapes.

    Raises InvalidSettings, with the command to run, if triggers are missing or outdated.
    """
    found = []
    missing = []
    for table in declared.relations:
        shape = shape_of(connection, table)
        found.append(shape)
        if _count(connection, shape) < (2 if declared.engine == "postgres" else 3):
            missing.append(table)
    try:
        connection.rows(f"select 1 from {connection.table(declared.changes)} where id < 0")
    except InvalidSettings:
        missing = list(declared.relations)
    if missing:
        raise InvalidSettings(
            f"{declared.words}: the triggers of {', '.join(missing)} are missing, disabled, or older than the table's"
            f" columns: run what `{COMMAND}` prints"
        )
    return found


def removal(connection: SqlConnection, declared: TriggersSource) -> list[str]:
    """Return the statements that remove the triggers and then the table of changes; empty if they do not exist.

    Includes triggers of tables that the flow no longer declares. Raises LogUnavailable.
    """
    engine, name, mark = connection.engine, connection.name, connection.mark
    changes, prefix = connection.table(declared.changes), f"{declared.changes}_"
    try:
        connection.rows(f"select 1 from {changes} where id < 0")
        found = [f"drop table if exists {changes}"]
    except InvalidSettings:  # it does not exist
        found = []
    size = len(prefix)
    if engine == "postgres":
        schema, written = declared.namespace, f"%{changes}%"
        triggers = connection.rows(
            "select t.tgname, n.nspname, c.relname from pg_trigger t join pg_proc p on p.oid = t.tgfoid"
            " join pg_class c on c.oid = t.tgrelid join pg_namespace n on n.oid = c.relnamespace"
            f" where p.pronamespace = to_regnamespace({mark}) and left(p.proname, {size}) = {mark}"
            f" and p.prosrc like {mark} and not t.tgisinternal and t.tgparentid = 0 order by 2, 3, 1",
            [name(schema), prefix, written],
        )
        functions = connection.rows(
            f"select proname from pg_proc where pronamespace = to_regnamespace({mark})"
            f" and left(proname, {size}) = {mark} and prosrc like {mark} order by 1",
            [name(schema), prefix, written],
        )
        return [
            *(f"drop trigger if exists {name(each)} on {name(place)}.{name(table)}" for each, place, table in triggers),
            *(f"drop function if exists {name(schema)}.{name(each)}()" for (each,) in functions),
            *found,
        ]
    if engine == "mariadb":
        rows = connection.rows(
            f"select trigger_name from information_schema.triggers where trigger_schema = database()"
            f" and left(trigger_name, {size}) = {mark} and action_statement like {mark}",
            [prefix, f"%{changes}%"],
        )
        names = {str(each) for (each,) in rows}
        if found:  # without the right TRIGGER they are hidden, and their tables would become unwritable
            events = ("insert", "update", "delete")
            names |= {f"{prefix}{table}_{event}" for table in declared.relations for event in events}
    else:
        rows = connection.rows(
            f"select name from sqlite_master where type = 'trigger' and substr(name, 1, {size}) = {mark}"
            f" and sql like {mark}",
            [prefix, f"%{changes}%"],
        )
        names = {str(each) for (each,) in rows}
    return [*(f"drop trigger if exists {name(each)}" for each in sorted(names)), *found]


def remove(connection: SqlConnection, declared: TriggersSource) -> None:
    """Remove the triggers, and then the table of changes. Idempotent.

    Raises InvalidSettings with the statements to run if the user may not, LogUnavailable.
    """
    wanted = removal(connection, declared)
    for number, each in enumerate(wanted):  # removing the table of changes before its triggers would stop all writers
        try:
            connection.rows(each)
        except InvalidSettings as error:
            words = "; ".join(wanted[number:])
            raise InvalidSettings(
                f"{error}. Triggers still write into {declared.changes}, which is no longer read: run `{words};` as"
                f" the owner of the tables (`{COMMAND} --remove` prints it), and repeat this"
            ) from None


def _count(connection: SqlConnection, shape: Shape) -> int:
    """Return how many triggers of a table write its present columns."""
    wanted, mark = f"%{shape.fingerprint}%", connection.mark
    if connection.engine == "mariadb":
        statement = (
            "select count(*) from information_schema.triggers where event_object_schema = database()"
            f" and event_object_table = {mark} and action_statement like {mark}"
        )
        table: Any = shape.table
    elif connection.engine == "sqlite":
        statement = (
            f"select count(*) from sqlite_master where type = 'trigger' and tbl_name = {mark} and sql like {mark}"
        )
        table = shape.table
    else:
        statement = (
            "select count(*) from pg_trigger t join pg_proc p on p.oid = t.tgfoid"
            f" where t.tgrelid = to_regclass({mark}) and t.tgenabled in ('O', 'A') and p.prosrc like {mark}"
        )
        table = connection.table(shape.table)
    return int(connection.rows(statement, [table, wanted])[0][0])


def _triggers(connection: SqlConnection, declared: TriggersSource, shape: Shape) -> list[str]:
    engine, name = connection.engine, connection.name
    changes, table = connection.table(declared.changes), connection.table(shape.table)
    forms = {each.name: form for each, form in shape.columns}

    def image(row: str, names: Sequence[str]) -> str:
        parts = [f"{_text(each)}, {forms[each].expression.format(f'{row}.{name(each)}')}" for each in names]
        if engine != "postgres" or len(parts) <= 50:  # a function of PostgreSQL has at most 100 arguments
            return f"{_OBJECT[engine]}({', '.join(parts)})"
        some = [f"jsonb_build_object({', '.join(parts[at : at + 50])})" for at in range(0, len(parts), 50)]
        return f"({' || '.join(some)})"

    every = list(forms)
    old_key, new_key = image("OLD", shape.key), image("NEW", shape.key)
    old, new = image("OLD", every), image("NEW", every)
    own = f"{_TRANSACTION[engine]}, {_text(shape.table)}, {_text(shape.fingerprint)}"
    into = f"insert into {changes} (txid, source, shape, op, {name('key')}, {name('before')}, {name('after')})"
    same = " and ".join(f"({_SAME[engine].format(name(each))})" for each in shape.key)
    inserted = f"{into} values ({own}, 'c', {new_key}, null, {new})"
    deleted = f"{into} values ({own}, 'd', {old_key}, {old}, null)"
    nowhere = " from dual" if engine == "mariadb" else ""
    # A change of the key is a delete and an insert, in one statement, so that clients need no special delimiter.
    updated = (
        f"{into} select {own}, 'd', {old_key}, {old}, null{nowhere} where not ({same})"
        f" union all select {own}, case when {same} then 'u' else 'c' end, {new_key},"
        f" case when {same} then {old} end, {new}{nowhere}"
    )
    prefix = f"{declared.changes}_{shape.table}"
    bodies = {"insert": inserted, "update": updated, "delete": deleted}
    if engine == "mariadb":
        return [
            f"create or replace trigger {name(f'{prefix}_{event}')} after {event} on {table} for each row {body}"
            for event, body in bodies.items()
        ]
    if engine == "sqlite":
        found = []
        for event, body in bodies.items():
            found.append(f"drop trigger if exists {name(f'{prefix}_{event}')}")
            found.append(f"create trigger {name(f'{prefix}_{event}')} after {event} on {table} begin {body}; end")
        return found
    emptied = f"{into} values ({own}, 't', null, null, null)"
    function = f"{name(declared.namespace)}.{name(prefix)}"
    settings = " ".join(f"set {key} = '{value}'" for key, value in SESSION.items())
    return [
        f"create or replace function {function}() returns trigger language plpgsql security definer {settings} as"
        f" $millrace$ begin if TG_OP = 'INSERT' then {inserted}; elsif TG_OP = 'UPDATE' then {updated};"
        f" elsif TG_OP = 'DELETE' then {deleted}; else {emptied}; end if; return null; end $millrace$",
        f"drop trigger if exists {name(prefix)} on {table}",
        f"create trigger {name(prefix)} after insert or update or delete on {table} for each row"
        f" execute function {function}()",
        f"drop trigger if exists {name(f'{prefix}_all')} on {table}",
        f"create trigger {name(f'{prefix}_all')} after truncate on {table} for each statement"
        f" execute function {function}()",
    ]


def _text(value: str) -> str:
    doubled = value.replace("'", "''")
    return f"'{doubled}'"

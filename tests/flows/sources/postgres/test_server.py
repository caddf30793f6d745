"""What a real PostgreSQL lacks for a capture, each with the statement that helps; no engine runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import CaptureLost, InvalidSettings, LogUnavailable, PipelineInvalid
from millrace.brokers.postgres import PostgresServer
from millrace.flows.sources.capture.spool import Standing
from millrace.flows.sources.postgres.model import PostgresSource
from millrace.flows.sources.postgres.server import Server, identifier_of, properties_of
from millrace.pipelines.declaration import pipeline_of
from tests.flows.sources.postgres.shop import Shop
from tests.waiting import until


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path, "id int primary key, amount bigint")
    yield made
    made.released()


def problem(shop: Shop, **changed: Any) -> str:
    """The message with which the check refuses."""
    with pytest.raises(InvalidSettings) as refused:
        Server(shop.declared.model_copy(update=changed), shop.group).check_server()
    return str(refused.value)


def statement(message: str) -> str:
    """The first statement that a message says to run."""
    found = re.search(r"`(.+?)`", message)
    assert found is not None, message
    return found[1]


def test_a_server_that_has_all_gets_a_publication_and_no_slot_yet(shop: Shop) -> None:
    server = Server(shop.declared, shop.group)
    server.check_server()
    server.check_server()
    assert shop.execute("select pubname, pubviaroot from pg_publication") == [(server.publication, True)]
    assert shop.slots() == []


def test_each_statement_that_is_said_helps(shop: Shop) -> None:
    for damage in (
        "create table bare (id int)",
        "create table names (id int primary key, name text)",
        "create table unnamed (id int primary key); alter table unnamed replica identity nothing",
        "create unlogged table quick (id int primary key)",
        "create table parts (id int primary key, name text) partition by range (id);"
        " create table part_1 partition of parts for values from (0) to (10)",
    ):
        shop.execute(*damage.split(";"))
        table = damage.split()[2] if "unlogged" not in damage else "quick"
        said = statement(problem(shop, table=table))
        shop.execute(*said.replace("(...)", "(id)").split(";"))
        Server(
            shop.declared.model_copy(update={"table": table, "publication": f"for_{table}"}), shop.group
        ).check_server()
        shop.execute(f"drop publication for_{table}")


def test_a_role_gets_what_it_lacks_one_after_the_other(shop: Shop) -> None:
    role = f"reader_{shop.database}"
    shop.execute(f"create role {role} login password 'secret'", "create schema aside")
    shop.execute("create table aside.items (id int primary key)")
    try:
        said = []
        for _ in range(4):
            message = problem(shop, user=role, password=shop.declared.password.__class__("secret"), namespace="aside")
            said.append(statement(message))
            shop.execute(said[-1])
        assert [each.split(" ")[0] for each in said] == ["ALTER", "GRANT", "GRANT", "CREATE"]
        changed = {"user": role, "password": shop.declared.password.__class__("secret"), "namespace": "aside"}
        Server(shop.declared.model_copy(update=changed), shop.group).check_server()
        assert "refuses" in problem(shop, user=role, password=shop.declared.password.__class__("wrong"))
        assert "refuses" in problem(shop, database="absent")
    finally:
        shop.execute(f"drop publication if exists {Server(shop.declared, shop.group).publication}")
        shop.execute(f"drop owned by {role}", f"drop role {role}")
    with pytest.raises(LogUnavailable, match="cannot be reached"):
        Server(shop.declared.model_copy(update={"port": 1}), shop.group).check_server()


def test_what_logs_no_changes_is_refused(shop: Shop) -> None:
    shop.execute("create view seen as select * from items")
    assert "is a view" in problem(shop, table="seen")
    assert "no table public.absent" in problem(shop, table="absent")
    shop.execute("create table parts (id int primary key) partition by range (id)")
    shop.execute("create table part_1 partition of parts for values from (0) to (10)")
    assert "declare the parent" in problem(shop, table="part_1")


def test_a_publication_of_the_user_has_to_be_whole(shop: Shop) -> None:
    shop.execute("create table other (id int primary key)")
    for made in (
        "create publication mine for table other",
        "create publication mine for table items with (publish = 'insert')",
        "create publication mine for table items where (id > 5)",
        "create publication mine for table items (id)",
    ):
        shop.execute(made)
        for said in re.findall(r"`(.+?)`", problem(shop, publication="mine")):
            shop.execute(said)
        Server(shop.declared.model_copy(update={"publication": "mine"}), shop.group).check_server()
        shop.execute("drop publication mine")
    shop.execute("create publication mine for all tables")
    declared = shop.declared.model_copy(update={"publication": "mine"})
    Server(declared, shop.group).check_server()
    Server(declared, shop.group).release()
    assert shop.execute("select pubname from pg_publication") == [("mine",)], "what the user made stays"


def test_a_slot_of_another_kind_or_database_is_left_alone(shop: Shop) -> None:
    shop.execute(f"select pg_create_physical_replication_slot('{shop.database}')")
    try:
        assert "declare another slot" in problem(shop, slot=shop.database)
    finally:
        shop.execute(f"select pg_drop_replication_slot('{shop.database}')")


def test_a_slot_that_is_gone_moved_or_made_anew_is_a_loss(shop: Shop) -> None:
    server = Server(shop.declared, shop.group)
    server.check_server()
    make = f"select pg_create_logical_replication_slot('{shop.slot}', 'pgoutput')"
    shop.execute(make)
    ((place,),) = shop.execute(
        "select (confirmed_flush_lsn - '0/0'::pg_lsn)::bigint from pg_replication_slots"
        f" where slot_name = '{shop.slot}'"
    )
    now = Standing(offset={"lsn": place}, complete=True)
    server.before_engine(now)
    server.before_change(now)
    shop.execute("insert into items values (1, 1)", f"select pg_drop_replication_slot('{shop.slot}')")
    with pytest.raises(CaptureLost, match="no longer exists"):
        server.before_engine(now)
    shop.execute(make)
    for look in (server.before_engine, server.before_change):
        with pytest.raises(CaptureLost, match="was created again, or moved"):
            look(now)
    server.before_engine(Standing())
    assert shop.slots() == [], "a snapshot begins without a slot"


def test_a_slot_whose_wal_the_server_removed_is_a_loss(tmp_path: Path) -> None:
    properties = {
        "max_slot_wal_keep_size": "1MB",
        "max_wal_size": "32MB",
        "min_wal_size": "32MB",
        "wal_level": "replica",
    }
    with PostgresServer(
        tmp_path / "postgres", properties=properties | {"max_replication_slots": "1"}
    ).start() as running:
        shop = Shop(tmp_path, "id int primary key", server=running)
        server = Server(shop.declared, shop.group)
        assert statement(problem(shop)) == "ALTER SYSTEM SET wal_level = 'logical'"
        running.stop()
        running._properties["wal_level"] = "logical"
        running.start()
        server.check_server()
        shop.execute("select pg_create_physical_replication_slot('idle')")
        said = problem(shop)
        assert "max_replication_slots = 11" in said
        shop.execute(re.findall(r"`(.+?)`", said)[1])
        shop.execute(f"select pg_create_logical_replication_slot('{shop.slot}', 'pgoutput')")
        ((place,),) = shop.execute("select (confirmed_flush_lsn - '0/0'::pg_lsn)::bigint from pg_replication_slots")
        for _ in range(4):
            shop.execute("select pg_logical_emit_message(false, '', repeat('x', 1 << 20))", "select pg_switch_wal()")
            shop.execute("checkpoint")
        with pytest.raises(CaptureLost, match="max_slot_wal_keep_size"):
            server.before_engine(Standing(offset={"lsn": place}, complete=True))
        server.before_engine(Standing())
        shop.released()


def test_what_is_behind_the_log_s_end_is_counted(shop: Shop) -> None:
    server = Server(shop.declared, shop.group)
    offset = {**server.end(), "ts_usec": 1_700_000_000_500_000}
    assert server.behind(offset, server.end()) < 100_000
    shop.execute("create table wide (x text)", "insert into wide select md5(g::text) from generate_series(1, 20000) g")
    assert 1_000_000 < server.behind(offset, server.end()) < 50_000_000
    assert server.moment(offset) == 1_700_000_000.5
    before = server.end()
    server.wake()
    assert server.behind(before, server.end()) > 0


def test_a_table_that_is_declared_later_is_added_to_the_flow_s_publication_alone(shop: Shop) -> None:
    Server(shop.declared, shop.group).check_server()
    shop.execute("create table more (id int primary key)")
    both = shop.declared.model_copy(update={"table": None, "tables": ("items", "more")})
    server = Server(both, shop.group)
    server.check_server()
    server.check_server()
    assert shop.execute("select tablename from pg_publication_tables order by 1") == [("items",), ("more",)]
    shop.execute(f"alter publication {server.publication} drop table more")
    shop.execute(f"comment on publication {server.publication} is null")
    with pytest.raises(InvalidSettings, match=r"run `ALTER PUBLICATION .* ADD TABLE"):
        server.check_server()


def test_a_statement_that_fails_is_a_typed_error(shop: Shop) -> None:
    with (
        pytest.raises(InvalidSettings, match="refuses a statement of the capture: division by zero"),
        Server(shop.declared, shop.group).connect() as db,
    ):
        db.execute("select 1 / 0")


def test_names_of_slots_are_those_of_one_flow_and_the_password_is_in_no_word(shop: Shop) -> None:
    names = {identifier_of(f"millrace-{each}") for each in ("a-b", "a.b", "A-b", "a" * 200)}
    assert len(names) == 4
    assert all(re.fullmatch(r"[a-z0-9_]{1,63}", each) for each in names)
    properties = properties_of(shop.declared, shop.group, Server(shop.declared, shop.group))
    secret = shop.declared.password.get_secret_value()
    assert [name for name, value in properties.items() if secret in value] == ["database.password"]
    assert secret not in repr(shop.declared)


@pytest.mark.parametrize(
    "source",
    [
        {"table": "a", "tables": ["b"]},
        {},
        {"tables": ["a", "a"]},
        {"table": 'a"b'},
        {"table": "a.b"},
        {"table": "a", "slot": "Not-a-name"},
    ],
)
def test_declarations_that_cannot_be_are_refused(source: dict[str, Any]) -> None:
    declared = {"kind": "postgres", "host": "db", "user": "u", "database": "d", **source}
    with pytest.raises(PipelineInvalid):
        pipeline_of({"id": "x", "source": declared, "sink": {"kind": "collection", "collection": "c"}})
    assert PostgresSource(host="db", user="u", database="d", tables=("a", "b")).name == "public.a,public.b"


def test_a_new_timeline_goes_on_where_the_old_one_was_left_and_not_before(tmp_path: Path) -> None:
    """What a promoted standby has: here the server itself recovers to another timeline."""
    with PostgresServer(tmp_path / "postgres").start() as running:
        shop = Shop(tmp_path, "id int primary key", server=running)
        server = Server(shop.declared, shop.group)
        server.check_server()
        shop.execute(f"select pg_create_logical_replication_slot('{shop.slot}', 'pgoutput')")
        server.before_engine(Standing())
        shop.execute(f"select pg_create_logical_replication_slot('{shop.slot}', 'pgoutput')")
        ((start,),) = shop.execute("select (confirmed_flush_lsn - '0/0'::pg_lsn)::bigint from pg_replication_slots")
        known = server.offset({"lsn": start})
        assert (known["timeline"], known["lsn"]) == (1, start)
        shop.execute("insert into items values (1)")
        running.stop()
        tables = tmp_path / "postgres" / "server" / "tables"
        owner = (tables / "PG_VERSION").stat()
        (tables / "recovery.signal").touch(mode=0o600)
        os.chown(tables / "recovery.signal", owner.st_uid, owner.st_gid)
        running._properties["restore_command"] = "false"
        running.start()
        until(lambda: shop.execute("select pg_is_in_recovery()") == [(False,)], "it is promoted", seconds=30)
        ((end,),) = shop.execute("select (pg_current_wal_lsn() - '0/0'::pg_lsn)::bigint")
        server.before_engine(Standing(offset=known, complete=True))
        assert server.offset({"lsn": start})["timeline"] == 2
        for look in (server.before_engine, server.before_change):
            with pytest.raises(CaptureLost, match="from timeline 1 to 2"):
                look(Standing(offset=known | {"lsn": end + 1000}, complete=True))
            with pytest.raises(CaptureLost, match="another database cluster"):
                look(Standing(offset=known | {"system": "7"}, complete=True))
        older = {name: value for name, value in known.items() if name not in ("system", "timeline")}
        server.before_engine(Standing(offset=older, complete=True))
        shop.released()

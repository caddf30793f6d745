"""Changes by triggers: none is lost that commits late, and each comes once, on real databases."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from millrace.base.errors import InvalidSettings, LogUnavailable
from millrace.base.failpoint import VARIABLE
from millrace.commands.main import app
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.records import OPERATION, Record
from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.capture.ticks import recorded_ticks, spool_folder
from millrace.flows.sources.sql.connection import SqlConnection
from millrace.flows.sources.triggers import reading
from millrace.flows.sources.triggers.model import TriggersSource
from millrace.flows.sources.triggers.reading import TriggersPoller, lock_changes, release
from millrace.flows.sources.triggers.statements import statements
from millrace.pipelines.declaration import pipeline_of
from millrace.testing import deployment
from tests.flows.sources.capture.shops import working
from tests.flows.sources.sql.databases import Base, administer
from tests.waiting import until

ENGINES = ["sqlite", "mariadb", "postgres"]
SERVERS = ["mariadb", "postgres"]


def _shop(folder: Path, engine: str, columns: str = "id int primary key, v int, name varchar(20)", **more: Any) -> Any:
    base = Base(folder, engine)
    base.execute(f"create table items ({columns})")
    declared = base.declared(TriggersSource, table="items", every_seconds=0.05, **more)
    return base, declared


def _install(base: Base, declared: TriggersSource) -> None:
    with SqlConnection(declared) as connection:
        base.execute(*statements(connection, declared))


def _unread(base: Base, declared: TriggersSource) -> int:
    with Spool(spool_folder(base.settings, base.group)) as spool, SqlConnection(declared) as connection:
        return TriggersPoller(declared).unread(connection, spool)


def _told(record: Record) -> tuple[str, str, Any]:
    operation = dict(record.headers)[OPERATION] or b""
    return operation.decode(), (record.key or b"").decode(), record.value and json.loads(record.value).get("v")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_snapshot_and_then_each_change_once_and_the_table_of_changes_is_trimmed(tmp_path: Path, engine: str) -> None:
    base, declared = _shop(tmp_path, engine)
    base.execute("insert into items values (1, 10, 'a'), (2, 20, null)")
    with pytest.raises(InvalidSettings, match=r"triggers of items are missing.*millrace flows statements"):
        base.once(declared)
    _install(base, declared)
    base.execute("insert into items values (3, 30, 'in the snapshot')", "update items set v = 31 where id = 3")
    assert 60 < _unread(base, declared) < 300
    base.once(declared)
    assert _unread(base, declared) == 0
    assert [_told(each) for each in base.records(declared)] == [("r", "1", 10), ("r", "2", 20), ("r", "3", 31)]
    assert base.execute("select count(*) from millrace_changes") == [(0,)]
    base.execute(
        "insert into items values (4, 40, 'x')", "update items set v = 41 where id = 4",
        "delete from items where id = 2",
        "update items set id = 9 where id = 1",
    )  # fmt: skip
    base.once(declared)
    assert [_told(each) for each in base.records(declared)[3:]] == [
        ("c", "4", 40), ("u", "4", 41), ("d", "2", None), ("d", "1", None), ("c", "9", 10),
    ]  # fmt: skip
    assert base.execute("select count(*) from millrace_changes") == [(0,)]
    base.execute("alter table items add column more int")
    with pytest.raises(InvalidSettings, match="older than the table's"):
        base.once(declared)
    _install(base, declared)
    base.execute("update items set more = 5 where id = 9")
    base.once(declared)
    assert base.replayed(declared)["9"] == {"id": 9, "v": 10, "name": "a", "more": 5}


@pytest.mark.parametrize("engine", SERVERS)
def test_numbers_that_are_taken_early_and_committed_late_are_read(tmp_path: Path, engine: str) -> None:
    base, declared = _shop(tmp_path, engine, start="latest")
    _install(base, declared)
    base.once(declared)
    with closing(base.connect(autocommit=False)) as early, closing(base.connect(autocommit=False)) as undone:
        early.cursor().execute("insert into items values (1, 1, null)")
        undone.cursor().execute("insert into items values (2, 2, null)")
        base.execute("insert into items values (3, 3, null)")
        base.once(declared)
        assert [_told(each)[1] for each in base.records(declared)] == ["3"]
        early.cursor().execute("insert into items values (4, 4, null)")
        early.commit()
        undone.rollback()
    base.execute("update items set v = 7 where id = 1")
    base.once(declared)
    assert [_told(each) for each in base.records(declared)] == [
        ("c", "3", 3), ("c", "1", 1), ("c", "4", 4), ("u", "1", 7)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "engine", [each if each == "sqlite" else pytest.param(each, marks=pytest.mark.slow) for each in ENGINES]
)
def test_tables_are_read_together_at_the_recorded_ticks(tmp_path: Path, engine: str) -> None:
    """Each transaction moves an amount from one table to the other, so their sum stays."""
    base, declared = _shop(tmp_path, engine)
    base.execute("create table others (id int primary key, v int)")
    base.execute("insert into items values (1, 100, null)", "insert into others values (1, 100)")
    declared = declared.model_copy(update={"table": None, "tables": ("items", "others")})
    _install(base, declared)
    source = {**declared.model_dump(mode="json", exclude={"table"}), "password": base.password}
    flow = pipeline_of(
        {
            "id": base.group.removeprefix("millrace-"),
            "source": source,
            "sink": {"kind": "collection", "collection": "{table}"},
            "errors": {"collection": "letters"},
        }
    )
    with deployment(base.settings.data_dir) as db:
        for name in ("items", "others"):
            db.create_collection(name, {"id": "int64", "v": "int64?", "name": "string?"}, key="id", vchannels=2)

        def total(**at: Any) -> int:
            read = (db[name].read(**at).to_pylist() for name in ("items", "others"))
            return sum(row["v"] for rows in read for row in rows)

        with working(FlowRun(base.settings, flow)) as fine:
            for turn in range(30):
                with closing(base.connect(autocommit=False)) as writer:
                    cursor = writer.cursor()
                    cursor.execute("begin") if engine == "sqlite" else None
                    cursor.execute(f"update items set v = v - {turn} where id = 1")
                    cursor.execute(f"update others set v = v + {turn} where id = 1")
                    writer.commit()
                if turn % 10 == 9:
                    left = 100 - turn * (turn + 1) // 2
                    until(
                        lambda left=left: (
                            fine() and db["items"].read().to_pylist()[-1:] == [{"id": 1, "v": left, "name": None}]
                        ),
                        "it came",
                    )
            ticks = lambda: recorded_ticks(base.settings, flow.name)  # noqa: E731 - looked at again and again
            until(lambda: fine() and ticks()[-1].mark.source == "change 60", "the last change has a tick")
        found = ticks()
        assert {total(at=each.tick) for each in found} == {200}
        assert len(found) >= 3


def test_a_transaction_that_is_larger_than_a_part_has_no_tick_before_its_end(tmp_path: Path) -> None:
    base, declared = _shop(tmp_path, "sqlite", page_rows=5)
    _install(base, declared)
    base.once(declared)
    with closing(base.connect()) as writer:
        writer.execute("begin")
        for number in range(42):
            writer.execute(f"insert into items values ({number}, 0, null)")
        writer.execute("commit")
    with patch.object(reading, "PART_PAGES", 1), patch.object(reading, "MOST_PAGES", 2):
        base.once(declared)
    with Spool(spool_folder(base.settings, base.group)) as spool:
        marks = [spool.mark(number - 1, number) for number in (10, 20, 30, 40, 42)]
    told = [(each.source, each.whole) for each in marks if each is not None]
    assert told[-1] == ("change 42", True)
    assert [whole for _, whole in told[:4]] == [False] * 4


@pytest.mark.parametrize("engine", SERVERS)
def test_interleaved_writers_come_to_the_table(tmp_path: Path, engine: str) -> None:
    """Several transactions are open at once, wait for each other's rows, commit or do not, while changes are read."""
    base, declared = _shop(tmp_path, engine, page_rows=3)
    base.execute(*(f"insert into items values ({n}, 0, null)" for n in range(12)))
    _install(base, declared)
    dice = random.Random(7)
    writers = [base.connect(autocommit=False) for _ in range(4)]
    with patch.object(reading, "PART_PAGES", 2), base.captured(declared) as feeder:
        feeder.wait_complete(30)
        for turn in range(240):
            mine = dice.randrange(4)
            key = mine + 4 * dice.randrange(3)  # no two wait for each other for ever
            cursor = writers[mine].cursor()
            roll = dice.random()
            if roll < 0.5:
                cursor.execute(f"update items set v = {turn} where id = {key}")
            elif roll < 0.6:
                cursor.execute(f"delete from items where id = {key}")
                cursor.execute(f"insert into items values ({key}, {turn}, 'again')")
            elif roll < 0.9:
                writers[mine].commit()
            else:
                writers[mine].rollback()
        for each in writers:
            each.commit()
            each.close()
        rows = dict(base.execute("select id, v from items"))
        until(
            lambda: {int(key): row["v"] for key, row in base.replayed(declared).items()} == rows,
            "the lane has the table",
            seconds=30,
        )
    assert base.execute("select count(*) from millrace_changes") == [(0,)]


@pytest.mark.parametrize("engine", SERVERS)
def test_a_part_ends_with_transactions_and_two_readers_are_refused(tmp_path: Path, engine: str) -> None:
    base, declared = _shop(tmp_path, engine, start="latest", page_rows=2)
    _install(base, declared)
    base.once(declared)
    with closing(base.connect(autocommit=False)) as writer:
        for n in range(7):
            writer.cursor().execute(f"insert into items values ({n}, {n}, null)")
        writer.commit()
    base.execute("insert into items values (100, 1, null)")
    with SqlConnection(declared) as connection, patch.object(reading, "PART_PAGES", 1):
        poller = TriggersPoller(declared)
        poller._check(connection)
        changes, numbers, whole = poller._part(connection)
        assert whole
        assert len(changes) == len(numbers) == 8, "pages are read until the transaction ends"
        lock_changes(connection, declared)
        with SqlConnection(declared) as other, pytest.raises(LogUnavailable, match="another session reads"):
            lock_changes(other, declared)


PROGRAM = """
import sys, json
from pathlib import Path
from millrace.base.settings import Settings
from millrace.flows.registry import feeder_of
from millrace.flows.sources.triggers.model import TriggersSource
place, data, group = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
feeder = feeder_of(TriggersSource(**place), Settings(data_dir=Path(data)), group=group)
feeder.wait_complete(30)
feeder.close()
"""


@pytest.mark.parametrize(
    "point",
    [
        "capture.spooled@1",
        pytest.param("capture.snapshot@2", marks=pytest.mark.slow),
        pytest.param("capture.spooling@1", marks=pytest.mark.slow),
        pytest.param("capture.removed@1", marks=pytest.mark.slow),
    ],
)
def test_a_feeder_that_is_killed_reads_each_change_once(tmp_path: Path, point: str) -> None:
    base, declared = _shop(tmp_path, "sqlite", page_rows=4)
    base.execute(*(f"insert into items values ({n}, {n}, null)" for n in range(10)))
    _install(base, declared)
    place = {**base.place, "table": "items", "page_rows": 4}
    env = os.environ | {VARIABLE: point, "PYTHONPATH": "include"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(place), str(base.settings.data_dir), base.group]
    if not point.startswith("capture.snap"):
        with patch.object(reading, "PART_PAGES", 1):
            base.once(declared)
    base.execute(*(f"update items set v = {n + 50} where id = {n % 10}" for n in range(20)))
    codes = [subprocess.run(command, env=env, check=False, timeout=60).returncode for _ in range(2)]
    assert -9 in codes
    base.once(declared)
    rows = dict(base.execute("select id, v from items"))
    assert {int(key): row["v"] for key, row in base.replayed(declared).items()} == rows
    updates = [_told(each)[2] for each in base.records(declared) if _told(each)[0] == "u"]
    assert updates == ([] if point.startswith("capture.snap") else list(range(50, 70)))


def test_values_have_the_capture_s_form_from_the_snapshot_and_from_triggers(tmp_path: Path) -> None:
    base, declared = _shop(
        tmp_path,
        "mariadb",
        "id int unsigned primary key, big bigint unsigned, price decimal(65,30), bits bit(12), flag bit(1), y year,"
        " e enum('a','b'), s set('x','y'), j json, raw blob, d date, dt datetime(6), ts timestamp(6) null, t time(6),"
        " name varchar(50), fd double",
    )
    values = (
        "({}, 18446744073709551615, 12345678901234567890123456789012345.123456789012345678901234567890, b'101', b'1',"
        " 2024, 'a', 'x,y', '{{\"a\":1}}', x'00ff', '2024-02-29', '1000-01-01 00:00:00.000001',"
        " '2024-01-01 01:02:03.123456', '-838:59:59', 'Ä😀', 0.1)"
    )
    _install(base, declared)
    base.execute("set names utf8mb4", "set time_zone = '+00:00'", f"insert into items values {values.format(1)}")
    base.once(declared)
    base.execute("set names utf8mb4", "set time_zone = '+00:00'", f"insert into items values {values.format(2)}")
    base.once(declared)
    wanted = (
        '{"id":%s,"big":18446744073709551615,"price":12345678901234567890123456789012345.123456789012345678901234567890,'
        '"bits":5,"flag":true,"y":2024,"e":"a","s":"x,y","j":"{\\"a\\":1}","raw":"AP8=","d":"2024-02-29",'
        '"dt":"1000-01-01T00:00:00.000001","ts":"2024-01-01T01:02:03.123456Z","t":"-838:59:59.000000",'
        '"name":"Ä😀","fd":0.1}'
    )
    for number, record in enumerate(base.records(declared), 1):
        assert (record.value or b"").decode() == wanted % number
        assert dict(record.headers)["millrace.base64"] == b"raw"


def _nothing_is_left(base: Base) -> None:
    named = {
        "sqlite": "select name from sqlite_master where name like 'millrace%'",
        "mariadb": "select trigger_name from information_schema.triggers where trigger_schema = database() union all"
        " select table_name from information_schema.tables where table_schema = database() and table_name <> 'items'",
        "postgres": "select tgname::text from pg_trigger where not tgisinternal union all select relname::text from"
        " pg_class where relname like 'millrace%' union all select proname::text from pg_proc where proname like"
        " 'millrace%'",
    }[base.engine]
    assert base.execute(named) == []
    base.execute("insert into items (id, v) values (77, 1)")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_release_removes_triggers_also_of_tables_that_are_left_out_and_the_spool(tmp_path: Path, engine: str) -> None:
    base, declared = _shop(tmp_path, engine)
    base.execute("create table other (id int primary key)")
    _install(base, declared.model_copy(update={"table": None, "tables": ("items", "other")}))
    base.once(declared)
    if engine != "sqlite":
        with base.captured(declared) as feeder:
            feeder.wait_complete(30)
            with pytest.raises(LogUnavailable, match="another session reads"):
                release(declared, base.settings, group=base.group)
    assert spool_folder(base.settings, base.group).exists()
    for _ in range(2):
        release(declared, base.settings, group=base.group)
        assert not spool_folder(base.settings, base.group).exists()
    base.execute("drop table other")
    _nothing_is_left(base)


@pytest.mark.parametrize("engine", SERVERS)
def test_a_user_who_may_not_remove_triggers_gets_the_statements_and_writers_go_on(tmp_path: Path, engine: str) -> None:
    base, declared = _shop(tmp_path, engine)
    _install(base, declared)
    user = f"reader_{base.database[-8:]}"
    account = f"{user}@'127.0.0.1'"
    if engine == "mariadb":
        administer(
            f"create user {account} identified by 'secret'", f"grant select on {base.database}.* to {account}",
            f"grant trigger on {base.database}.items to {account}",
            f"grant delete on {base.database}.millrace_changes to {account}",
        )  # fmt: skip
    else:
        base.execute(
            f"create role {user} login password 'secret'", f"grant select on items to {user}",
            f"grant select, delete on millrace_changes to {user}",
        )  # fmt: skip
    poor = declared.model_copy(update={"user": user, "password": SecretStr("secret")})
    base.once(poor)
    with pytest.raises(InvalidSettings, match=r"Triggers still write into millrace_changes.*drop t.*--remove") as told:
        release(poor, base.settings, group=base.group)
    assert spool_folder(base.settings, base.group).exists()
    base.execute("insert into items (id, v) values (5, 5)")
    (text,) = (
        re.findall(r"run `(.*?);` as", str(told.value))
        if engine == "postgres"
        else re.findall(r"run `(drop.*?);` as", str(told.value))
    )
    base.execute(*text.split("; "))
    release(poor, base.settings, group=base.group)
    _nothing_is_left(base)


def test_the_command_prints_what_to_run(tmp_path: Path) -> None:
    base, declared = _shop(tmp_path, "sqlite")
    file = tmp_path / "orders.json"
    flow = {
        "id": "orders",
        "source": {"kind": "triggers", **base.place, "table": "items"},
        "sink": {"kind": "collection", "collection": "items"},
        "errors": {"collection": "letters"},
    }
    file.write_text(json.dumps(flow))
    done = CliRunner().invoke(app, ["flows", "statements", str(file), "--data", str(tmp_path / "data")])
    assert done.exit_code == 0, done.output
    with closing(base.connect()) as connection:
        connection.executescript(done.stdout)
    base.execute("insert into items values (1, 2, null)")
    base.once(declared)
    assert base.replayed(declared) == {"1": {"id": 1, "v": 2, "name": None}}
    shown = CliRunner().invoke(app, ["flows", "statements", str(file), "--remove", "--data", str(tmp_path / "data")])
    assert 'drop table if exists "millrace_changes";' in shown.stdout
    done = CliRunner().invoke(app, ["flows", "release", str(file), "--data", str(tmp_path / "data")])
    assert done.exit_code == 0, done.output
    _nothing_is_left(base)
    shown = CliRunner().invoke(app, ["flows", "statements", str(file), "--remove", "--data", str(tmp_path / "data")])
    assert shown.stdout == "-- orders has nothing in its database\n"

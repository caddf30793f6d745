"""Rows by a column that grows: each change once, also one that commits late, on real databases."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import InvalidSettings, LogUnavailable
from millrace.base.failpoint import VARIABLE
from millrace.flows.registry import release, source_of
from millrace.flows.sources.capture import polling
from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.capture.ticks import spool_folder
from millrace.flows.sources.query.model import QuerySource
from millrace.flows.sources.query.polling import QueryPoller
from millrace.flows.sources.source import SourceLag
from millrace.flows.sources.sql.connection import SqlConnection
from tests.flows.sources.sql.databases import Base
from tests.waiting import until

ENGINES = ["sqlite", "mariadb", "postgres"]


def _values(base: Base, declared: QuerySource) -> list[Any]:
    return [(row["id"], row["v"]) for each in base.records(declared) if (row := json.loads(each.value or b"{}"))]


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_come_once_in_the_order_of_the_column_and_changes_after_a_restart(tmp_path: Path, engine: str) -> None:
    base = Base(tmp_path, engine)
    base.execute("create table items (id int primary key, v int, name varchar(20))", "create index by_v on items (v)")
    base.execute(*(f"insert into items values ({n}, {100 - n // 3}, 'n{n}')" for n in range(30)))
    declared = base.declared(QuerySource, table="items", column="v", overlap=5, page_rows=7, every_seconds=0.05)
    base.once(declared)
    found = _values(base, declared)
    assert found == sorted(((n, 100 - n // 3) for n in range(30)), key=lambda each: (each[1], each[0]))
    base.execute("update items set v = 200 where id = 3", "insert into items values (50, 198, null)")
    base.once(declared)
    assert _values(base, declared)[30:] == [(50, 198), (3, 200)]
    with base.captured(declared):
        base.execute("update items set v = 201, name = 'x' where id < 2")
        until(lambda: len(_values(base, declared)) == 34, "both changes are there", seconds=20)
    assert base.replayed(declared)["1"] == {"id": 1, "v": 201, "name": "x"}
    positions = [each.offset for each in base.records(declared)]
    assert positions == sorted(set(positions))


@pytest.mark.parametrize("rows", [30, 28])  # the last page has rows, or none
def test_a_tick_stands_for_a_whole_poll(tmp_path: Path, rows: int) -> None:
    base = Base(tmp_path, "sqlite")
    base.execute("create table items (id int primary key, v int)")
    base.execute(*(f"insert into items values ({n}, {n})" for n in range(rows)))
    declared = base.declared(QuerySource, table="items", column="v", overlap=100, page_rows=7, every_seconds=0.05)
    base.once(declared)
    base.once(declared)  # a poll that finds nothing new adds nothing
    with Spool(spool_folder(base.settings, base.group)) as spool:
        marks = [spool.mark(number - 1, number) for number in (7, 14, 21, rows)]
        assert [each and (each.source, each.whole) for each in marks] == [
            ("v 6", False), ("v 13", False), ("v 20", False), (f"v {rows - 1}", True)
        ]  # fmt: skip


@pytest.mark.parametrize("engine", ["mariadb", "postgres"])
def test_a_row_whose_transaction_commits_late_is_read_within_the_overlap_alone(tmp_path: Path, engine: str) -> None:
    base = Base(tmp_path, engine)
    base.execute("create table items (id int primary key, v int)")
    declared = base.declared(QuerySource, table="items", column="v", overlap=10)
    with closing(base.connect(autocommit=False)) as late, closing(base.connect(autocommit=False)) as lost:
        late.cursor().execute("insert into items values (1, 95)")
        lost.cursor().execute("insert into items values (2, 89)")
        base.execute("insert into items values (3, 100)")
        base.once(declared)
        assert _values(base, declared) == [(3, 100)]
        late.commit()
        lost.commit()
    base.once(declared)
    assert _values(base, declared) == [(3, 100), (1, 95)]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_bytes_that_are_not_read_are_those_of_newer_rows(tmp_path: Path, engine: str) -> None:
    base = Base(tmp_path, engine)
    base.execute("create table items (id int primary key, v int, name varchar(4000))")
    declared = base.declared(QuerySource, table="items", column="v", overlap=5)

    def unread() -> int:
        with Spool(spool_folder(base.settings, base.group)) as spool, SqlConnection(declared) as connection:
            return QueryPoller(declared).unread(connection, spool)

    base.execute(f"insert into items values (1, 10, '{'x' * 1000}'), (2, null, 'never read')")
    assert 1000 <= unread() < 1100
    base.once(declared)
    assert unread() == 0
    base.execute(f"insert into items values (3, 11, '{'y' * 3000}')")
    assert 3000 <= unread() < 3100


def test_a_source_that_cannot_be_read_is_behind_until_it_is_read_again(tmp_path: Path) -> None:
    base = Base(tmp_path, "sqlite")
    base.execute("create table items (id int primary key, v int)", "insert into items values (1, 1)")
    declared = base.declared(QuerySource, table="items", column="v", every_seconds=0.05)
    with (
        patch.object(polling, "_LAG_SECONDS", 0.1),
        patch.object(polling, "_FIRST_PAUSE", 0.1),
        closing(source_of(declared, base.settings, group=base.group)) as source,
        base.captured(declared) as feeder,
    ):
        feeder.wait_complete(30)
        until(lambda: source.lag() == SourceLag(0, 0.0, ""), "nothing is to be read", seconds=10)
        base.execute("alter table items rename to gone")
        until(lambda: source.lag().seconds > 0.5, "it is behind", seconds=20)
        assert source.lag().bytes is None
        assert "no such table" in source.lag().cause or "no table" in source.lag().cause
        base.execute("alter table gone rename to items")
        until(lambda: source.lag() == SourceLag(0, 0.0, ""), "it is read again", seconds=30)
    with Spool(spool_folder(base.settings, base.group)) as spool:
        assert spool.fact("read_at") is not None


@pytest.mark.parametrize("engine", ["mariadb", "postgres"])
def test_times_have_an_overlap_of_seconds(tmp_path: Path, engine: str) -> None:
    base = Base(tmp_path, engine)
    kind = "datetime(6)" if engine == "mariadb" else "timestamptz"
    base.execute(f"create table items (id int primary key, v {kind})")
    declared = base.declared(QuerySource, table="items", column="v", overlap=60)
    base.execute("insert into items values (1, '2024-05-01 12:00:00.5'), (5, null)")
    base.once(declared)
    base.execute("insert into items values (2, '2024-05-01 11:59:01'), (3, '2024-05-01 11:58:59')")
    base.once(declared)
    assert [each[0] for each in _values(base, declared)] == [1, 2]
    (record, _) = base.records(declared)
    zone = "" if engine == "mariadb" else "Z"
    assert json.loads(record.value or b"")["v"] == f"2024-05-01T12:00:00.500000{zone}"
    assert record.timestamp == 1_714_564_800_500


def test_latest_leaves_out_what_is_there_also_within_the_overlap(tmp_path: Path) -> None:
    base = Base(tmp_path, "sqlite")
    base.execute("create table items (id int primary key, v int)", "insert into items values (1, 99), (2, 100)")
    declared = base.declared(QuerySource, table="items", column="v", overlap=10, start="latest")
    base.once(declared)
    base.execute("insert into items values (3, 95)")
    base.once(declared)
    assert _values(base, declared) == [(3, 95)]
    for _ in range(2):
        release(declared, base.settings, group=base.group)
        assert not spool_folder(base.settings, base.group).exists()


def test_views_need_a_key_and_mistakes_are_said(tmp_path: Path) -> None:
    base = Base(tmp_path, "sqlite")
    base.execute("create table items (id int primary key, v int)", "create view seen as select id, v from items")
    base.execute("insert into items values (7, 1)")
    with pytest.raises(InvalidSettings, match="has no primary key: set key"):
        base.once(base.declared(QuerySource, table="seen", column="v"))
    base.once(base.declared(QuerySource, table="seen", column="v", key=("id",)))
    with pytest.raises(InvalidSettings, match="no column 'w'"):
        base.once(base.declared(QuerySource, table="items", column="w"))
    with pytest.raises(InvalidSettings, match="no table 'other'"):
        base.once(base.declared(QuerySource, table="other", column="v"))
    with pytest.raises(InvalidSettings, match="unable to open"):
        base.once(QuerySource(engine="sqlite", database=str(tmp_path / "none.db"), table="items", column="v"))


@pytest.mark.parametrize("engine", ["mariadb", "postgres"])
def test_a_server_that_refuses_and_one_that_is_not_there(tmp_path: Path, engine: str) -> None:
    base = Base(tmp_path, engine)
    declared = base.declared(QuerySource, table="items", column="v")
    with pytest.raises(InvalidSettings, match=r"nobody|password"):
        SqlConnection(declared.model_copy(update={"user": "nobody"}))
    with pytest.raises(LogUnavailable):
        SqlConnection(declared.model_copy(update={"port": 1}))


PROGRAM = """
import sys, json
from pathlib import Path
from millrace.base.settings import Settings
from millrace.flows.registry import feeder_of
from millrace.flows.sources.query.model import QuerySource
place, data, group = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
feeder = feeder_of(QuerySource(**place), Settings(data_dir=Path(data)), group=group)
feeder.wait_complete(30)
feeder.close()
"""


@pytest.mark.parametrize("point", ["capture.spooled", pytest.param("capture.spooling", marks=pytest.mark.slow)])
def test_a_feeder_that_is_killed_reads_each_row_once(tmp_path: Path, point: str) -> None:
    base = Base(tmp_path, "sqlite")
    base.execute("create table items (id int primary key, v int)")
    base.execute(*(f"insert into items values ({n}, {n})" for n in range(40)))
    place = {**base.place, "table": "items", "column": "v", "overlap": 3, "page_rows": 10}
    for visit in (2, 3):
        env = os.environ | {VARIABLE: f"{point}@{visit}", "PYTHONPATH": "include"}
        command = [sys.executable, "-c", PROGRAM, json.dumps(place), str(base.settings.data_dir), base.group]
        assert subprocess.run(command, env=env, check=False, timeout=60).returncode == -9
    declared = QuerySource(**place)
    base.once(declared)
    assert _values(base, declared) == [(n, n) for n in range(40)]


class Poll:
    """A poller in this thread."""

    def __init__(self, base: Base, declared: QuerySource) -> None:
        self.base, self.declared = base, declared

    def restart(self) -> None:
        folder = spool_folder(self.base.settings, self.base.group)
        with Spool(folder, write=True) as spool, SqlConnection(self.declared) as connection:
            poller = QueryPoller(self.declared)
            poller.begin(connection, spool)
            poller.poll(connection, spool, lambda: True)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 5), st.integers(0, 4)),
        st.tuples(st.just("poll"), st.just(0), st.just(0)),
    ),
    max_size=20,
)


@settings(max_examples=25, deadline=None)
@given(steps=steps)
def test_the_newest_of_each_row_arrives_however_late_within_the_overlap(
    steps: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each write takes a value at most the overlap below the largest; the row's newest content is always read."""
    base = Base(tmp_path_factory.mktemp("query"), "sqlite")
    base.execute("create table items (id int primary key, v int, n int)")
    poll = Poll(base, base.declared(QuerySource, table="items", column="v", overlap=4, page_rows=2))
    with closing(sqlite3.connect(base.place["database"], isolation_level=None)) as writer:
        for number, (what, key, below) in enumerate([*steps, ("poll", 0, 0)]):
            if what == "write":
                values = (key, 10 + number - below, number)
                writer.execute("insert or replace into items values (?, ?, ?)", values)
            else:
                poll.restart()
                wanted = {str(row[0]): row[2] for row in writer.execute("select * from items")}
                assert {key: row["n"] for key, row in base.replayed(poll.declared).items()} == wanted
    told = [
        (each["id"], each["n"]) for record in base.records(poll.declared) if (each := json.loads(record.value or b""))
    ]
    assert len(told) == len(set(told)), "each change once"

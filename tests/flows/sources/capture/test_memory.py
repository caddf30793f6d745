"""Rows of many MiB pass a capture in memory that is bounded, by each way of capturing."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.capture.ticks import spool_folder
from millrace.flows.sources.query.model import QuerySource
from millrace.flows.sources.sql import connection
from millrace.flows.sources.sql.connection import SqlConnection
from millrace.flows.sources.triggers import reading
from millrace.flows.sources.triggers.model import TriggersSource
from millrace.flows.sources.triggers.statements import statements
from tests.flows.sources.capture.memory import started
from tests.flows.sources.mariadb.test_table import Shop as MariaDb
from tests.flows.sources.postgres.shop import Shop as Postgres
from tests.flows.sources.sql.databases import Base

ROWS, MIB = 64, 8
PEAK_MIB = 700
"""Of the worker's process, which would have 1,024 MiB of rows alone, in several copies."""
ENGINE_MIB = 900
"""Of the engine: its heap of 512 MiB, and what a JVM has beside it."""


def _ended(process: subprocess.Popen[str]) -> tuple[dict[str, Any], int]:
    """Wait for the end; return what it printed and the largest memory of its engine in MiB."""
    largest, known = 0, psutil.Process(process.pid)
    while process.poll() is None:
        for each in known.children() if known.is_running() and known.status() != psutil.STATUS_ZOMBIE else ():
            try:
                largest = max(largest, each.memory_info().rss >> 20)
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.05)
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    assert process.returncode == 0
    return json.loads(lines[-1]), largest


@pytest.mark.parametrize("kind", ["query", "triggers"])
@pytest.mark.parametrize("engine", ["sqlite", "mariadb", "postgres"])
def test_pages_are_cut_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, kind: str) -> None:
    monkeypatch.setattr(connection, "PAGE_BYTES", 100_000)
    monkeypatch.setattr(reading, "PART_BYTES", 100_000)
    monkeypatch.setattr(reading, "MOST_BYTES", 300_000)  # all changes of a session may be one transaction
    base = Base(tmp_path, engine)
    base.execute(
        f"create table items (id int primary key, v int, body {'text' if engine != 'mariadb' else 'longtext'})"
    )
    if kind == "query":
        declared: Any = base.declared(QuerySource, table="items", column="v")
    else:
        declared = base.declared(TriggersSource, table="items")
        with SqlConnection(declared) as opened:
            base.execute(*statements(opened, declared))

    def fill(first: int) -> None:
        rows = ((first + place, 200 if place % 4 == 0 else 40_000) for place in range(20))
        base.execute(*(f"insert into items values ({key}, {key}, '{'x' * size}')" for key, size in rows))

    fill(100)
    base.once(declared)
    fill(200)
    base.once(declared)
    assert len(base.records(declared)) == 40
    with Spool(spool_folder(base.settings, base.group)) as spool:
        sizes = [size for (size,) in spool.rows_of("select size from parts")]
    assert len(sizes) > 6
    assert max(sizes) < 300_000 + 100_000 + 50_000, "a part, one page more, and the row that fills it"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["query", "triggers"])
def test_sql_reads_rows_of_many_mib_in_a_snapshot_and_in_one_transaction(tmp_path: Path, kind: str) -> None:
    base = Base(tmp_path, "sqlite")
    base.execute("create table items (id integer primary key, v integer, body text)")
    if kind == "query":
        declared: Any = base.declared(QuerySource, table="items", column="v", every_seconds=0.05)
    else:
        declared = base.declared(TriggersSource, table="items", every_seconds=0.05)
        with SqlConnection(declared) as opened:
            base.execute(*statements(opened, declared))
    fill = (
        f"with recursive n(i) as (select {{}} union all select i + 1 from n where i < {{}} + {ROWS} - 1)"
        f" insert into items select i, i, hex(zeroblob({MIB << 19})) from n"
    )
    base.execute(fill.format(1, 1))
    with started(declared, "", base.settings, base.group, 2 * ROWS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        base.execute(fill.format(1001, 1001))
        told, _ = _ended(process)
    assert told["rows"] == 2 * ROWS
    assert told["peak_mib"] < PEAK_MIB, told


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("database", ["mariadb", "postgres"])
def test_an_engine_reads_rows_of_many_mib_in_a_snapshot_and_in_the_log(tmp_path: Path, database: str) -> None:
    """Small rows come before the large ones, so that nothing knows how large those are."""
    shop: MariaDb | Postgres
    if database == "mariadb":
        shop = MariaDb(tmp_path, "id int primary key, body longtext")
        shop.execute("insert into items select seq, 'small' from seq_1_to_3000")
        fill = f"insert into items select seq, repeat('x', {MIB << 20}) from seq_{{}}_to_{{}}"
    else:
        shop = Postgres(tmp_path, "id int primary key, body text")
        shop.execute("alter table items replica identity full", "alter table items alter body set storage external")
        shop.execute("insert into items select g, 'small' from generate_series(1, 3000) g")
        fill = f"insert into items select g, repeat('x', {MIB << 20}) from generate_series({{}}, {{}}) g"
    shop.execute(fill.format(10_001, 10_000 + ROWS))
    password = shop.declared.password.get_secret_value()
    with started(shop.declared, password, shop.settings, shop.group, 3000 + 2 * ROWS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        shop.execute(fill.format(20_001, 20_000 + ROWS // 2))  # in one transaction
        for number in range(20_001 + ROWS // 2, 20_001 + ROWS):
            shop.execute(fill.format(number, number))
        told, engine = _ended(process)
    assert told["rows"] == 3000 + 2 * ROWS
    assert told["peak_mib"] < PEAK_MIB, told
    assert 100 < engine < ENGINE_MIB
    if isinstance(shop, Postgres):
        shop.released()

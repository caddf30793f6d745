"""The coordinator's file among several processes: who cannot get at it is told what to do, and nothing was done."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from millrace.base.errors import CatalogBusy
from millrace.coord.catalog.database import CoordinatorDb


@contextmanager
def held_by_another(path: Path, how: str = "immediate") -> Iterator[None]:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute(f"begin {how}")
        yield
        other.execute("rollback")


def test_a_file_that_another_process_holds_is_an_error_that_says_so_and_nothing_is_done(tmp_path: Path) -> None:
    path = tmp_path / "coord.db"
    with CoordinatorDb(path, busy_seconds=0.05) as database:
        put = "insert into producer values (7, 1)"
        with held_by_another(path):
            assert database.execute("select * from producer") == []  # who reads waits for nobody
            for write in (
                lambda: database.execute(put),
                lambda: database.execute_many(put, [()]),
                lambda: _in_one(database, put),
            ):
                with pytest.raises(CatalogBusy, match=r"coord\.db") as found:
                    write()
                assert found.value.retriable
        _in_one(database, put)
        assert database.execute("select * from producer") == [(7, 1)]


def test_a_file_that_is_held_as_it_is_opened_is_the_same_error(tmp_path: Path) -> None:
    path = tmp_path / "coord.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("create table t (a)")  # not yet a file that readers and writers share
    with held_by_another(path, "exclusive"), pytest.raises(CatalogBusy):
        CoordinatorDb(path, busy_seconds=0.05)
    CoordinatorDb(path).close()


def test_what_is_wrong_with_a_statement_is_not_taken_for_a_file_that_is_held(tmp_path: Path) -> None:
    with (
        CoordinatorDb(tmp_path / "coord.db") as database,
        pytest.raises(sqlite3.OperationalError, match="no such table"),
    ):
        database.execute("select * from nowhere")


def test_a_transaction_that_fails_leaves_nothing_and_the_next_one_is_whole(tmp_path: Path) -> None:
    with CoordinatorDb(tmp_path / "coord.db") as database:
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            _in_one(database, "insert into producer values (7, 1)", "insert into nowhere values (1)")
        _in_one(database, "insert into producer values (8, 1)")
        assert database.execute("select id from producer") == [(8,)]


def _in_one(database: CoordinatorDb, *statements: str) -> None:
    with database.transaction():
        for statement in statements:
            database.execute(statement)

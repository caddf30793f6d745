"""Airflow's components start in order, and one that ends is the end of all.

Its SQLite database lets readers and a writer go on at once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from millrace_airflow import standalone
from millrace_airflow.sqlite import enable_wal_mode


class Component:
    """A component that runs until it is told to end."""

    def __init__(self, parent: Started, name: str, command: list[str], env: dict[str, str]) -> None:
        self.name, self.ended = name, False
        self.process = SimpleNamespace(poll=lambda: 1 if self.ended else None)
        parent.components.append(self)

    def start(self) -> None:
        pass

    def stop(self) -> None:
        self.ended = True

    def join(self, timeout: float) -> None:
        assert self.ended


class Started(standalone.Standalone):
    """Airflow with such components; `turns` say what happens between two looks."""

    def __init__(self, turns: list[Callable[[Started], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.components: list[Component] = []
        self.listening = False
        self._turns = iter(turns)

    def names(self) -> list[str]:
        return [each.name for each in self.components]

    def calculate_env(self) -> dict[str, str]:
        return {}

    def find_user_info(self) -> None:
        pass

    def initialize_database(self) -> None:
        pass

    def _listens(self) -> bool:
        return self.listening

    def _pause(self, seconds: float) -> bool:
        if seconds:
            next(self._turns)(self)
        return False


@pytest.fixture(autouse=True)
def components(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "SubCommand", Component)


def listen(airflow: Started) -> None:
    airflow.listening = True


def test_the_scheduler_starts_once_the_web_server_listens() -> None:
    seen: list[list[str]] = []

    def look(airflow: Started) -> None:
        seen.append(airflow.names())

    def interrupt(_airflow: Started) -> None:
        raise KeyboardInterrupt

    airflow = Started([look, look, listen, look, interrupt])
    assert airflow.run() == 0
    assert seen[:2] == [["api-server", "dag-processor"]] * 2
    assert seen[2] == ["api-server", "dag-processor", "scheduler", "triggerer"]
    assert all(each.ended for each in airflow.components)


@pytest.mark.parametrize("before", [True, False])
def test_a_component_that_ends_ends_all_of_them(before: bool) -> None:
    def end_one(airflow: Started) -> None:
        airflow.components[1].ended = True

    airflow = Started([end_one] if before else [listen, end_one])
    assert airflow.run() == 1
    assert all(each.ended for each in airflow.components)
    assert ("scheduler" in airflow.names()) is not before


def test_a_sqlite_database_takes_a_write_while_another_process_reads(tmp_path: Path) -> None:
    path = tmp_path / "airflow.db"
    with sqlite3.connect(path) as writer:
        writer.execute("CREATE TABLE run (id INTEGER)")
        writer.executemany("INSERT INTO run VALUES (?)", [(1,), (2,)])
    enable_wal_mode(f"sqlite:///{path}")
    reader = sqlite3.connect(path, timeout=0.0)
    writer = sqlite3.connect(path, timeout=0.0)
    try:
        rows = reader.execute("SELECT id FROM run")
        assert rows.fetchone() == (1,), "the read goes on"
        with writer:
            writer.execute("INSERT INTO run VALUES (3)")
        assert rows.fetchall() == [(2,)]
    finally:
        reader.close()
        writer.close()


def test_another_database_is_left_as_it_is() -> None:
    enable_wal_mode("postgresql+psycopg2://nobody@localhost:1/none")

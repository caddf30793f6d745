"""DDL, lookups and a page of the list cost what they change or show, whatever else the catalog has."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionQuery
from millrace.catalog.sqlite_file import catalog_path
from millrace.coord.coordinator import Coordinator
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField
from tests.coord.catalog.filled import fill_catalog
from tests.coord.ddl.rig import SCHEMA, ChainLog

PCHANNELS = 4
MANY = 3_000
STEP = 20
"""Instructions of SQLite's machine between two counts."""

CALLS: dict[str, Callable[[Coordinator], object]] = {
    "create": lambda each: each.create_collection("new", SCHEMA),
    "alter": lambda each: each.alter("mine", [AddField(FieldSpec("more", "string", True))]),
    "create_partition": lambda each: each.create_partition("mine", "p"),
    "flush": lambda each: each.flush("mine"),
    "drop": lambda each: each.drop_collection("mine"),
    "lookup": lambda each: each.collection("mine"),
    "lookup by id": lambda each: each.collections_by_id([1]),
    "next page": lambda each: each.collection_page(CollectionQuery(after="filled_000004", limit=4)),
    "resume": lambda each: each.resume(),
    "ensure a PChannel": lambda each: each.ensure_pchannel("dml_3"),
}


class Work:
    """What a call asked of the file and of the chain."""

    def __init__(self, coordinator: Coordinator, log: ChainLog) -> None:
        self.steps = self.statements = self.asked = 0
        self._db: sqlite3.Connection = coordinator._store._db._db
        self._log = log

    @contextmanager
    def counted(self) -> Iterator[None]:
        ask = self._log.definitions

        def asking(pchannel: str, number: int | None) -> object:
            self.asked += 1
            return ask(pchannel, number)

        self._log.definitions = asking  # type: ignore[assignment, method-assign]
        self._db.set_progress_handler(self._step, STEP)
        self._db.set_trace_callback(self._statement)
        try:
            yield
        finally:
            self._db.set_trace_callback(None)
            self._db.set_progress_handler(None, 0)
            self._log.definitions = ask  # type: ignore[method-assign]

    def _step(self) -> int:
        self.steps += STEP
        return 0

    def _statement(self, words: str) -> None:
        self.statements += 1


def work(folder: Path, others: int, call: Callable[[Coordinator], object]) -> Work:
    """The work of `call` in a deployment with its own collection "mine" and `others`."""
    log = ChainLog()
    settings = Settings(data_dir=folder, cache_dir=folder)
    with Coordinator(settings, log=log, append=log) as coordinator:  # type: ignore[arg-type]
        coordinator.ensure_pchannels(PCHANNELS)
        coordinator.create_collection("mine", SCHEMA)
        fill_catalog(catalog_path(folder), others, SCHEMA, pchannels=PCHANNELS, dropped=others)
        found = Work(coordinator, log)
        with found.counted():
            call(coordinator)
        return found


@pytest.mark.parametrize("call", CALLS)
def test_a_call_does_the_same_work_beside_ten_collections_and_beside_thousands(tmp_path: Path, call: str) -> None:
    few, many = (work(tmp_path / f"{others}", others, CALLS[call]) for others in (10, MANY))
    assert (many.statements, many.asked) == (few.statements, few.asked)
    pages = MANY if call == "next page" else 0  # an index counts all: a few instructions for each
    assert many.steps <= 1.2 * few.steps + 100 + 8 * pages


def test_a_start_asks_each_pchannel_once_and_for_changed_collections_only(tmp_path: Path) -> None:
    log = ChainLog()
    settings = Settings(data_dir=tmp_path, cache_dir=tmp_path)
    with Coordinator(settings, log=log, append=log) as coordinator:  # type: ignore[arg-type]
        coordinator.ensure_pchannels(PCHANNELS)
        for number in range(40):
            coordinator.create_collection(f"c{number}", SCHEMA)
        found = Work(coordinator, log)
        with found.counted():
            coordinator.ensure_pchannels(PCHANNELS)
        assert found.asked == PCHANNELS

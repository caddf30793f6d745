"""Whoever looks at a deployment of thousands of collections reads what is shown, and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.base.settings import Settings
from millrace.catalog import sqlite_file
from millrace.catalog.collection import CollectionQuery
from millrace.catalog.sqlite_file import catalog_path, read_names, read_page
from millrace.commands.status import worst_pchannels
from millrace.coord.catalog.store import CatalogStore
from millrace.message.ids import LogId
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.observe import log_probe, maintenance, table_cache
from millrace.observe.channels import pchannel_views
from millrace.observe.collections import FlushProgress
from millrace.observe.log_probe import ChannelLogView, LogView
from millrace.observe.maintenance import TableSurvey
from millrace.observe.models import JobView
from millrace.observe.observer import Observer
from millrace.tables.wal.table import WalTotals
from millrace.wal.definitions import OpenFigures
from millrace.wal.state import ChannelState
from tests.coord.catalog.filled import fill_catalog

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False),), "id")
MANY = 600


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    made = Settings(data_dir=tmp_path, cache_dir=tmp_path / "cache")
    with CatalogStore(catalog_path(tmp_path)):
        fill_catalog(catalog_path(tmp_path), MANY, SCHEMA, pchannels=4, dropped=40)
    return made


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What is read: definitions of collections, and tables."""
    found: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        call = getattr(module, name)

        def counting(*given: Any, **named: Any) -> Any:
            found[name] += 1
            return call(*given, **named)

        monkeypatch.setattr(module, name, counting)

    counted(sqlite_file, "collection_from_row")
    counted(table_cache, "open_table")
    counted(maintenance, "open_table")
    return found


@pytest.fixture
def observer(settings: Settings) -> Iterator[Observer]:
    made = Observer(settings)
    yield made
    made.close()


def test_a_page_reads_its_own_collections_and_knows_how_many_there_are(
    observer: Observer, work: Counter[str], settings: Settings
) -> None:
    page = observer.collections(limit=25, offset=50)
    assert (page.total, len(page.items)) == (MANY, 25)
    assert page.items[0].name == f"filled_{51:06}"
    assert work["collection_from_row"] == 25
    assert work["open_table"] <= 2 * 25 + 5, "rows and deletes of each, and the deployment's own"
    found = observer.collections(search="D_00012", limit=50)
    assert [each.name for each in found.items] == [f"filled_{number:06}" for number in range(120, 130)]
    assert observer.collections(dropped=True).total == MANY + 40


def test_the_overview_counts_collections_and_reads_none(observer: Observer, work: Counter[str]) -> None:
    assert observer.overview().totals.collections == MANY
    observer.metrics()
    assert work["collection_from_row"] == 0


def test_pages_by_cursor_have_each_collection_once_whatever_is_dropped_in_between(settings: Settings) -> None:
    seen: list[str] = []
    after = ""
    while True:
        page = read_page(settings.data_dir, CollectionQuery(after=after, limit=70))
        seen += [each.name for each in page.items]
        if not (after := page.next):
            break
        with CatalogStore(catalog_path(settings.data_dir)) as store, store.transaction():
            store._db.execute("update collection set state = 'dropped' where id = ?", (len(seen) - 5,))
    assert seen == sorted(set(seen))
    assert len(seen) == MANY


@pytest.mark.parametrize("dropped", [False, True])
def test_a_page_is_read_in_the_order_of_an_index(settings: Settings, dropped: bool) -> None:
    store = CatalogStore.open_read_only(settings.data_dir)
    assert store is not None
    statements: list[str] = []
    with store:
        store._db._db.set_trace_callback(statements.append)
        store.page(CollectionQuery(dropped=dropped, after="filled_000300", limit=5))
        store._db._db.set_trace_callback(None)
        plan = " ".join(str(row[-1]) for row in store._db.execute(f"explain query plan {statements[-1]}"))
    assert "TEMP B-TREE" not in plan
    assert "USING INDEX" in plan


def test_a_survey_of_tables_looks_at_some_in_turn(settings: Settings, work: Counter[str]) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    survey = TableSurvey(settings, clock=clock)
    names = read_names(settings.data_dir, dropped=False)
    for calls in range(1, 4):
        survey.look(names, seconds=100.0, limit=10)
        assert 90 <= work["open_table"] / calls <= 110
    survey.look({1: "only"}, seconds=100.0, limit=10)
    assert work["open_table"] < 350, "collections that were dropped are passed over"


def test_status_shows_the_pchannels_that_need_attention() -> None:
    rows = [{"pchannel": f"dml_{number}", "lag_seconds": 0.0, "parked": None} for number in range(256)]
    rows[200] |= {"parked": "it is parked"}
    rows[7] |= {"lag_seconds": 60.0}
    shown = [each["pchannel"] for each in worst_pchannels(rows)]
    assert {"dml_200", "dml_7"} <= set(shown)
    assert len(shown) == 20
    assert worst_pchannels(rows[:20]) == rows[:20]


def test_what_is_open_comes_from_the_append_host_and_no_state_is_decoded() -> None:
    class Undecoded:
        last_tick, totals, position = 5 << 18, WalTotals(7, 1), LogId(0, 9)

        @property
        def state(self) -> ChannelState:
            raise AssertionError("the state of all VChannels is decoded")

    hosted = ChannelLogView(None, 0.0, 3, None, OpenFigures(600, 1, 20, 400))
    node = JobView(name="streaming-node", state="never started")
    positions: Any = {"dml_0": Undecoded()}
    (view,) = pchannel_views(positions, {}, LogView(True, {"dml_0": hosted}), {}, node, {})
    assert (view.term, view.wal_position, view.messages) == (3, "0:9", 7)
    assert (view.vchannels, view.open_transactions, view.growing_rows, view.growing_bytes) == (600, 1, 20, 400)


def test_the_flushers_progress_decodes_the_catalogs_that_moved() -> None:
    decoded: list[str] = []

    @dataclass(frozen=True)
    class Counted:
        pchannel: str
        time_tick: int
        rows: int

        @property
        def catalog(self) -> Any:
            decoded.append(self.pchannel)
            segment = SimpleNamespace(rows=self.rows, bytes=10 * self.rows)
            return SimpleNamespace(
                vchannels={f"{self.pchannel}_1v0": SimpleNamespace(collection_id=1, growing={5: segment})}
            )

    first: Any = {name: Counted(name, 1, 3) for name in ("dml_0", "dml_1")}
    found = FlushProgress.of(first)
    assert found.growing_rows == {1: 6}
    moved: Any = first | {"dml_1": Counted("dml_1", 2, 4)}
    after = FlushProgress.of(moved, known=found)
    assert decoded == ["dml_0", "dml_1", "dml_1"]
    assert (after.growing_rows, after.growing["dml_1_1v0", 5]) == ({1: 7}, (4, 40))
    assert FlushProgress.of({"dml_0": moved["dml_0"]}, known=after).growing_rows == {1: 3}


def test_the_log_of_a_pchannel_at_rest_is_looked_into_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[LogId] = []
    end, lag = LogId(0, 12), 0.0

    def look(wal: object, log: Any, name: str) -> float:
        looked.append(end)
        return lag

    monkeypatch.setattr(log_probe, "lag_seconds", look)
    service = SimpleNamespace(open=lambda name: SimpleNamespace(close=lambda: None))
    hosted = {"term": 1, "parked": None, "open": [600, 0, 0, 0], "news_end": [0, 10]}

    def described() -> dict[str, Any]:
        return {"dml_0": {"host": hosted, "log": {"begin": [0, 0], "end": list(end), "bytes": 100}}}

    client: Any = SimpleNamespace(service=service, describe_all=described)
    position: Any = SimpleNamespace(position=LogId(0, 9), commits=4)
    probe = log_probe.LogProbe(settings)

    def lags() -> float | None:
        return dict(probe._channels(client, None, {"dml_0": position}))["dml_0"].lag_seconds

    assert [lags(), lags(), lags()] == [0.0] * 3
    assert looked == [LogId(0, 12)], "only time ticks follow: the same end says the same"
    end, lag = LogId(0, 13), 5.0
    assert [lags(), lags()] == [5.0, 5.0]
    assert looked[1:] == [LogId(0, 13)] * 2, "what lags is looked at each time"
    position.position, position.commits = LogId(0, 13), 5
    assert lags() == 0.0
    assert len(looked) == 3
    end, hosted["news_end"] = LogId(0, 20), [0, 13]
    assert lags() == 0.0
    assert len(looked) == 3, "the host knows that only time ticks follow"

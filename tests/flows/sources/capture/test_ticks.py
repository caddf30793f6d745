"""The ticks of captured transactions, by a program and by a command."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.base.errors import InvalidArgument
from millrace.base.settings import Settings
from millrace.commands.main import app
from millrace.flows.range_host.status import flow_folder
from millrace.flows.sinks.collection.routes import CollectionTicks
from millrace.flows.sources.capture.spool import Mark, Spool
from millrace.flows.sources.capture.ticks import recorded_ticks, spool_folder, tick_of
from millrace.testing import deployment
from tests.docs.pages import python_blocks
from tests.docs.test_examples import run


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    found = Settings(data_dir=tmp_path / "data")
    with Spool(spool_folder(found, "millrace-shop")) as spool:
        spool.record(100, Mark(5, "", 0))
        for tick, source in ((200, "0-1-10"), (250, "1-1-3"), (300, "0-1-20"), (400, "0-2-1000")):
            spool.record(tick, Mark(tick, source, 1_700_000_000_000 + tick))
    return found


@pytest.mark.parametrize(
    ("transaction", "tick"), [("0-1-9", 200), ("0-1-10", 200), ("0-1-11", 300), ("0-1-21", 400), ("1-1-3", 250)]
)
def test_the_tick_of_a_transaction_is_the_first_that_holds_it(settings: Settings, transaction: str, tick: int) -> None:
    assert tick_of(settings, "shop", transaction).tick == tick


@pytest.mark.parametrize("transaction", ["0-1-1001", "2-1-1", "yesterday", ""])
def test_a_transaction_without_a_tick_is_an_error(settings: Settings, transaction: str) -> None:
    with pytest.raises(InvalidArgument, match=r"no recorded tick|is not a transaction"):
        tick_of(settings, "shop", transaction)


def test_a_flow_that_captures_nothing_has_no_ticks(settings: Settings) -> None:
    assert [each.tick for each in recorded_ticks(settings, "shop", limit=2)] == [300, 400]
    with pytest.raises(InvalidArgument, match="has captured no database"):
        recorded_ticks(settings, "other")


def test_a_command_lists_them(settings: Settings) -> None:
    folder = flow_folder(settings, "shop")
    folder.mkdir(parents=True)
    (folder / "flow.json").write_text('{"words": "", "source": "mariadb:shop.orders", "sink": "collection:orders"}')
    base = ["flows", "ticks", "shop", "--json", "--data", str(settings.data_dir)]
    told = CliRunner().invoke(app, base)
    assert told.exit_code == 0, told.output
    rows = json.loads(told.stdout)
    assert [(each["tick"], each["transaction"]) for each in rows][:2] == [(100, "snapshot"), (200, "0-1-10")]
    told = CliRunner().invoke(app, [*base, "--transaction", "0-1-15"])
    assert [each["tick"] for each in json.loads(told.stdout)] == [300]


def test_the_page_s_tables_are_read_at_one_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    with deployment() as db:
        monkeypatch.setenv("MILLRACE_DATA", str(db.settings.data_dir))
        for name in ("shop_orders", "shop_order_lines"):
            db.create_collection(name, {"id": "int64"}, key="id").insert([{"id": 1}])
        with (
            Spool(spool_folder(db.settings, "millrace-shop")) as spool,
            closing(CollectionTicks(db.settings, ["shop_orders", "shop_order_lines"])) as ticks,
        ):
            spool.record(ticks.now(), Mark(2, "0-1-10", 0))
        for name in ("shop_orders", "shop_order_lines"):
            db[name].insert([{"id": 2}])
        names: dict[str, Any] = {}
        for each in python_blocks("docs/capture.md"):
            run(each.text, names)
        names["db"].close()
    assert [names["orders"].num_rows, names["lines"].num_rows] == [1, 1]

"""Rows that are read beside their changes: of a table that was added, and after DDL, which the log does not have."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from millrace.base.errors import InvalidSettings
from millrace.flows.sources.capture import rereading
from millrace.flows.sources.capture.ddl import Effect
from millrace.flows.sources.postgres import rows as rows_module
from millrace.flows.sources.postgres.rows import RowReader
from tests.flows.sources.capture.shops import kill_engine
from tests.flows.sources.postgres.shop import Shop
from tests.flows.sources.postgres.test_loss import writing
from tests.flows.sources.postgres.test_table import FULL
from tests.waiting import until

DDL = (
    "alter table items add column note varchar(10)",
    "alter table items add column five int not null default 5",
    "alter table items add column dice float8 default random()",
    "alter table items rename column note to words",
    "alter table items alter column amount type text using 'a' || amount",
    "alter table items alter column amount type text using upper(amount)",
    "alter table items drop column words, add column words varchar(10) default 'w'",
    "alter table items drop column five",
    "alter table items add column number int generated always as identity",
    "truncate items",
    "drop table items",
    "create table items (id int primary key, other int default 4)",
    "alter table items alter column other type bigint using other * 5000000000",
)


@pytest.mark.parametrize(
    ("statement", "effect"),
    [
        ("add column x int", Effect.NOTHING),
        ("add column x int default 5", Effect.READ),
        ("add column x float8 default random()", Effect.READ),
        ("add column x int generated always as identity", Effect.READ),
        ("add column x int generated always as (id * 2) stored", Effect.NOTHING),
        ("drop column amount", Effect.NOTHING),
        ("drop column amount, add column amount bigint", Effect.NOTHING),
        ("rename column amount to x", Effect.READ),
        ("alter column name type varchar(40)", Effect.NOTHING),
        ("alter column name type text", Effect.NOTHING),
        ("alter column name type text using upper(name)", Effect.READ),
        ("alter column amount type int", Effect.READ),
        ("alter column amount type bigint using amount * 2", Effect.READ),
        ("alter column amount set not null, alter column amount set default 7", Effect.NOTHING),
        ("alter column name set storage external", Effect.NOTHING),
        ("drop constraint items_pkey, add primary key (id, amount)", Effect.REPLACE),
    ],
)
def test_a_shape_tells_what_a_statement_did_to_rows(tmp_path: Path, statement: str, effect: Effect) -> None:
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint")
    shop.execute("insert into items values (1, 'x', 1)")
    reader = RowReader(shop.server_of())
    before = reader.look([shop.lane])
    shop.execute(f"alter table items {statement}")
    after = reader.look([shop.lane])
    assert reader.effect(before.shapes[shop.lane], after.shapes[shop.lane]) is effect
    assert reader.passed({"lsn": after.place}, before.place)
    shop.execute("vacuum full items", "insert into items (id) select 2 where false")
    again = reader.look([shop.lane]).shapes[shop.lane]
    if "default 5" not in statement:  # which the rewrite puts into the rows
        assert reader.effect(after.shapes[shop.lane], again) is Effect.NOTHING, "a rewrite that changes no value"


def test_a_table_that_is_made_anew_is_published_again(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint")
    shop.execute(FULL)
    server = shop.server_of()
    server.check_server()
    reader = RowReader(server)
    before = reader.look([shop.lane]).shapes[shop.lane]
    shop.execute("drop table items")
    gone = reader.look([shop.lane]).shapes[shop.lane]
    assert gone is None
    assert reader.effect(before, gone) is Effect.REPLACE
    assert reader.page(shop.lane, before, None) is None
    shop.execute("create table items (id int primary key, note text)")
    with pytest.raises(InvalidSettings, match="REPLICA IDENTITY FULL"):
        reader.admit(shop.lane)
    shop.execute(FULL)
    reader.admit(shop.lane)
    assert shop.execute("select tablename from pg_publication_tables") == [("items",)]
    server.release()


def test_pages_are_bounded_follow_the_key_and_have_one_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "PAGE_ROWS", 300)
    monkeypatch.setattr(rows_module, "PAGE_BYTES", 30_000)
    shop = Shop(tmp_path, 'region char(5), "100% id" numeric(6,2), name text, primary key (region, "100% id")')
    shop.execute(
        "insert into items select chr(65 + g % 3), g / 4.0, repeat('x', g % 400) from generate_series(1, 2000) g"
    )
    reader = RowReader(shop.server_of())
    shape = reader.look([shop.lane]).shapes[shop.lane]
    after, found, pages = None, list[str](), 0
    while True:
        page = reader.page(shop.lane, shape, after)
        assert page is not None
        pages, found = pages + 1, found + [msgspec.json.decode(line)["a"] for line in page.lines]
        assert len(page.lines) <= 300
        assert sum(map(len, page.lines)) < 150_000
        after = page.after
        if after is None:
            break
    assert pages >= 10
    wanted = shop.execute('select region, "100% id" from items order by 1, 2')
    assert [(row["region"], row["100% id"]) for row in found] == [(region, float(number)) for region, number in wanted]
    with shop.connect() as db, db.transaction():
        db.execute("lock table items in access exclusive mode")
        assert reader.page(shop.lane, shape, None) is None, "who holds a lock is not waited for"
    shop.execute("alter table items add column more int")
    assert reader.page(shop.lane, shape, None) is None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rows_follow_ddl_of_which_the_log_says_nothing(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount int", heartbeat_seconds=1)
    shop.execute(FULL, "insert into items select g, 'n' || g, g * 3 from generate_series(1, 50) g")

    def equal() -> bool:
        wanted = shop.rows() if shop.execute("select to_regclass('items')") != [(None,)] else {}
        found = shop.replayed()
        return found.keys() == wanted.keys() and all(
            found[key].get(name) == value for key, row in wanted.items() for name, value in row.items()
        )

    with shop.captured() as feeder:
        until(equal, "the snapshot", seconds=60)
        for number, statement in enumerate(DDL):
            shop.execute(statement)
            if "create table" in statement:
                shop.execute(FULL, f"insert into items select g from generate_series(1, {number}) g")
            if number % 5 == 2:
                kill_engine(feeder)
            if number % 2 and "drop table" not in statement:
                shop.execute(
                    f"insert into items (id) select {1000 * number} + g from generate_series(1, 3) g",
                    f"update items set id = id + 500 where id = {1000 * number + 1}",
                )
            until(equal, statement, seconds=60)
        until(lambda: not shop.standing().unread, "nothing is left to be read", seconds=30)
    shop.released()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_table_that_is_declared_later_is_read_beside_the_changes_through_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "PAGE_ROWS", 1_000)
    monkeypatch.setattr(rereading, "READ_SECONDS", 0.01)
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint", heartbeat_seconds=1)
    shop.execute(
        FULL,
        "insert into items select g, 'i', 0 from generate_series(0, 99) g",
        "create table later (id int primary key, name varchar(300), amount bigint)",
        "alter table later replica identity full",
        "insert into later select g, repeat('l', 250), 0 from generate_series(1, 60000) g",
    )
    with shop.captured():
        shop.reaches()
    shop.execute("delete from later where id % 3 = 0")
    shop.declared = shop.declared.model_copy(update={"table": None, "tables": ("items", "later")})
    with writing(shop, "items"), writing(shop, "later"), shop.captured() as feeder:
        until(lambda: shop.standing().unread, "it is to be read", seconds=60)
        for step in range(2):
            held = shop.standing().next
            until(lambda held=held: shop.standing().next > held + 6_000, "a part of it is read", seconds=60)
            assert shop.standing().unread
            kill_engine(feeder)
            shop.execute(f"update later set amount = -1 where id % 7 = {step}", "delete from later where id > 59000")
    with shop.captured() as feeder:
        feeder.wait_complete(60)
        for table in ("items", "later"):
            shop.lane, shop.table = f"public.{table}", table
            shop.reaches()
        assert shop.standing().epoch == 1, "no table was read anew"
    shop.released()

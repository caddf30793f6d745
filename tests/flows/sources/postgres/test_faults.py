"""What goes wrong around a PostgreSQL that is captured: each fault is a typed error that says what to do, or changes
nothing of the result."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pydantic import SecretStr

from millrace.flows.sources.capture import feeder as feeder_module
from millrace.flows.sources.capture import spool as spool_module
from tests.flows.sources.capture.shops import kill_engine
from tests.flows.sources.postgres.shop import Shop
from tests.flows.sources.postgres.test_table import FULL
from tests.waiting import until


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_password_that_changes_and_rights_that_go_are_said_until_they_are_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeder_module, "_LONGEST_PAUSE", 1.0)
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint")
    role = f"reader_{shop.database}"
    shop.execute(
        FULL, "insert into items values (1, 'x', 1)", f"create role {role} login replication password 'secret'",
        f"grant select on items to {role}", f"create publication {shop.server_of().publication} for table items",
    )  # fmt: skip
    owner = shop.declared
    shop.declared = owner.model_copy(update={"user": role, "password": SecretStr("secret")})
    try:
        with shop.captured() as feeder:
            shop.reaches()
            shop.execute(f"alter role {role} password 'another'")
            kill_engine(feeder)
            shop.execute("insert into items values (2, 'y', 2)")
            until(lambda: "authentication failed" in shop.standing().error, "the refusal is noted", seconds=60)
            shop.execute(f"alter role {role} password 'secret' noreplication")
            until(lambda: "REPLICATION" in shop.standing().error.upper(), "the right is named", seconds=60)
            shop.execute(f"alter role {role} replication")
            shop.reaches()
            assert shop.standing().epoch == 1
    finally:
        shop.declared = owner
        shop.released()
        shop.execute(f"drop publication {shop.server_of().publication}", f"drop owned by {role}", f"drop role {role}")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_200_000_rows_of_one_transaction_come_whole(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key, name varchar(100), amount bigint")
    shop.execute(FULL)
    with shop.captured() as feeder:
        until(lambda: shop.standing().complete, "the capture follows the log", seconds=60)
        with shop.connect() as db, db.transaction():
            db.execute("insert into items select g, repeat('n', 90), 0 from generate_series(1, 200000) g")
            db.execute("update items set amount = 1 where id <= 50000")
        feeder.wait_complete(200)
        found = shop.records()
        assert len(found) == 250_000
        assert len({dict(each.headers)["millrace.transaction"] for each in found}) == 1
        assert shop.replayed() == shop.rows()
    shop.released()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tables_that_change_names_or_keys_are_what_their_lanes_come_to(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint", heartbeat_seconds=1)
    shop.execute(
        FULL, "insert into items select g, 'x', g from generate_series(1, 50) g",
        "create table spare (id int primary key, name varchar(20), amount bigint)",
        "alter table spare replica identity full", "insert into spare values (7, 'spare', 7)",
    )  # fmt: skip

    def equal() -> bool:
        wanted = shop.execute("select * from items") if shop.execute("select to_regclass('items')") != [(None,)] else []
        return sorted(wanted) == sorted(tuple(row.values()) for row in shop.replayed().values())

    with shop.captured() as feeder:
        until(equal, "the snapshot", seconds=60)
        for words in (
            "alter table items rename to others; alter table spare rename to items;"
            "insert into items values (8, 'y', 8)",
            "drop table items; create table items (id int primary key, name varchar(20), amount bigint);"
            "alter table items replica identity full; insert into items values (1, 'new', 1)",
            "alter table items rename to gone",
            "alter table others rename to items; insert into items values (100, 'back', 1);"
            "delete from items where id = 1",
            "alter table items drop constraint items_pkey, add primary key (id, name);"
            "insert into items values (100, 'twice', 2); update items set name = 'z' where id = 2",
            "truncate items; insert into items values (3, 'after', 3)",
        ):
            shop.execute(*words.split(";"))
            if "drop table" in words:
                kill_engine(feeder)
            until(equal, words, seconds=60)
        until(lambda: not shop.standing().unread, "nothing is left to be read", seconds=30)
        assert shop.standing().epoch == 1, shop.standing().error
    shop.released()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_position_is_confirmed_only_after_its_changes_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a feeder that fails between the two reads no change again."""
    shop = Shop(tmp_path, "id int primary key, name varchar(20), amount bigint")
    shop.execute(FULL)
    seen: list[int] = []
    synced: list[int] = []
    early: list[tuple[int, int]] = []

    def confirmed() -> int:
        ((place,),) = shop.execute(
            "select (confirmed_flush_lsn - '0/0'::pg_lsn)::bigint from pg_replication_slots"
            f" where slot_name = '{shop.slot}'"
        )
        return int(place)

    def slowly(point: str) -> None:
        if point == "capture.spooling" and synced:  # in the transaction that stores a batch
            time.sleep(0.3)
            seen.append(confirmed())
            if seen[-1] > synced[-1]:
                early.append((seen[-1], synced[-1]))
        elif point == "capture.spooled":
            synced.append(int(shop.standing().offset["lsn"]))
            if len(synced) in (3, 6):
                raise OSError("a fault after the append and before the acknowledgement")

    with shop.captured():
        until(lambda: shop.standing().complete, "the capture follows the log", seconds=60)
        monkeypatch.setattr(spool_module, "hit", slowly)
        monkeypatch.setattr(feeder_module, "hit", slowly)
        for turn in range(12):
            shop.execute(f"insert into items select {turn}00 + g, 'x', 0 from generate_series(1, 50) g")
            time.sleep(0.2)
        shop.reaches()
    assert not early
    assert len(set(seen)) > 1, "the slot moves"
    assert len(synced) > 3, "a fault came between the two"
    found = shop.records()
    assert len(found) == 12 * 50, "each change once"
    shop.released()

"""Which statements change rows that a binary log does not have."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from millrace.flows.sources.capture.ddl import (
    Effect,
    current_records,
    effect_of,
    newest_gtids,
    renamed_tables,
    table_of,
)


def _column(name: str, kind: str = "INT", **more: Any) -> dict[str, Any]:
    plain = {
        "length": None, "scale": None, "charsetName": None, "optional": True, "generated": False,
        "autoIncremented": False, "defaultValueExpression": None, "enumValues": None,
    }  # fmt: skip
    return {"name": name, "typeName": kind, **plain, **more}


def _table(*columns: dict[str, Any], key: tuple[str, ...] = ("id",)) -> dict[str, Any]:
    return {"primaryKeyColumnNames": list(key), "columns": [_column("id", optional=False), *columns]}


NAME = _column("name", "VARCHAR", length=20, charsetName="utf8mb4")


@pytest.mark.parametrize(
    ("statement", "after", "effect"),
    [
        ("alter table t add index (name)", _table(NAME), Effect.NOTHING),
        ("alter table t drop index i, drop foreign key f", _table(NAME), Effect.NOTHING),
        ("alter table t add note text", _table(NAME, _column("note", "TEXT")), Effect.NOTHING),
        ("alter table t drop name", _table(), Effect.NOTHING),
        ("alter table t modify name varchar(30)", _table({**NAME, "length": 30}), Effect.NOTHING),
        ("alter table t modify id bigint", _table(NAME) | {"columns": [_column("id", "BIGINT", optional=False), NAME]},
         Effect.NOTHING),
        ("alter table t add n int not null", _table(NAME, _column("n", optional=False)), Effect.READ),
        ("alter table t add n int default 3", _table(NAME, _column("n", defaultValueExpression="3")), Effect.READ),
        ("alter table t add n int as (id)", _table(NAME, _column("n", generated=True)), Effect.READ),
        ("alter table t rename column name to other", _table({**NAME, "name": "other"}), Effect.READ),
        ("alter table t drop name, add name varchar(20)", _table(NAME), Effect.READ),
        ("alter table t modify name varchar(3)", _table({**NAME, "length": 3}), Effect.READ),
        ("alter table t modify name int", _table(_column("name")), Effect.READ),
        ("alter table t modify name varchar(20) not null", _table({**NAME, "optional": False}), Effect.READ),
        ("alter table t convert to character set latin1", _table({**NAME, "charsetName": "latin1"}), Effect.READ),
        ("alter table t drop partition p", _table(NAME), Effect.REPLACE),
        ("alter table t truncate partition p", _table(NAME), Effect.REPLACE),
        ("alter table t drop primary key, add primary key (name)", _table(NAME, key=("name",)), Effect.REPLACE),
        ("rename table u to t", _table(NAME), Effect.REPLACE),
        ("alter table t rename to u", _table(NAME), Effect.REPLACE),
    ],
)  # fmt: skip
def test_a_statement_has_an_effect_on_rows(statement: str, after: dict[str, Any], effect: Effect) -> None:
    change = {"type": "ALTER", "id": '"d"."t"', "table": after}
    assert effect_of(statement, change, _table(NAME)) is effect
    assert effect_of(statement, change, None) is Effect.REPLACE, "of a table that is not known all are read again"


def test_a_dropped_or_new_table_replaces_its_rows() -> None:
    for kind, table in (("DROP", None), ("CREATE", _table(NAME))):
        assert effect_of("", {"type": kind, "id": '"d"."t"', "table": table}, _table(NAME)) is Effect.REPLACE


def test_names_of_tables() -> None:
    assert table_of({"id": '"shop"."or""ders"'}) == 'shop.or"ders'
    assert {"d.a", "d.b", "e.c"} <= renamed_tables("rename table `a` to b, e.c to x", "d.t")
    assert renamed_tables("alter table a add b int", "d.t") == set()
    assert renamed_tables("alter table a rename column b to c, rename index i to j", "d.t") == set()
    assert renamed_tables("alter table `a` add b int, rename to e.`c`", "d.t") == {"d.a", "e.c"}


def _record(number: int, kind: str, *tables: str, text: str = "", snapshot: bool = False) -> str:
    position = {"file": f"b.{number // 100:06d}", "pos": number % 100, "gtids": f"0-1-{number}"}
    if snapshot:
        position |= {"snapshot": "INITIAL"}
    changes = [{"type": kind, "id": each, "table": None if kind == "DROP" else {"version": number}} for each in tables]
    return json.dumps({"position": position, "ddl": text, "tableChanges": changes})


def _recovered(history: list[str], until: int) -> dict[str, Any]:
    """The tables that an engine knows which continues after `until`."""
    tables: dict[str, Any] = {}
    for record in map(json.loads, history):
        place = record["position"]
        if "snapshot" in place or int(place["file"][2:]) * 100 + place["pos"] <= until:
            for each in record["tableChanges"]:
                tables[each["id"]] = each["table"]
    return {name: table for name, table in tables.items() if table is not None}


def test_a_schema_history_is_what_tables_are_now_and_what_comes_after_the_offset() -> None:
    dice = random.Random(5)
    for _ in range(200):
        history = [_record(0, "CREATE", each, snapshot=True) for each in "ab"]
        for number in range(1, 150):
            kind = dice.choice(("CREATE", "ALTER", "ALTER", "DROP"))
            history.append(_record(number, kind, *dice.sample("abcdef", dice.choice((1, 1, 2)))))
        until = dice.randrange(10, 140)
        offset = {"file": f"b.{until // 100:06d}", "pos": until % 100, "gtids": f"0-1-{until}"}
        kept = current_records(history, offset)
        for later in (until, until + 3, 149):
            assert _recovered(kept, later) == _recovered(history, later)
        assert len(kept) <= 12 + 150 - until, "two of each table at most, and what comes after the offset"


def test_statements_without_a_table_leave_the_history_unless_later_ones_need_them() -> None:
    history = [
        _record(1, "", text="create view v as select 1"),
        _record(2, "", text="alter database d character set latin1"),
        _record(3, "", text="SET character_set_server=utf8mb4"),
        _record(60, "", text="drop procedure p"),
    ]
    assert current_records(history, {"file": "b.000000", "pos": 50, "gtids": "0-1-50"}) == history[1:]
    assert current_records(history, {"file": "b.000000", "pos": 50, "gtids": "1-1-50"}) == history, "another domain"


def test_a_position_has_the_newest_gtid_of_each_domain() -> None:
    """After a failover the engine lists the former server's, too, which MariaDB refuses and the history outlives."""
    position = {"gtids": "0-2-10, 5-1-3,0-1-9,7-1-1"}
    assert newest_gtids(position) == {"0-2-10": ("0", 10), "5-1-3": ("5", 3), "7-1-1": ("7", 1)}
    assert newest_gtids({}) == newest_gtids({"gtids": ""}) == {}
    history = [_record(9, "CREATE", "a"), _record(10, "ALTER", "a"), _record(11, "ALTER", "a")]
    offset = {"file": "b.000001", "pos": 1, "gtids": "0-2-10,0-1-8"}
    assert current_records(history, offset) == history[1:]

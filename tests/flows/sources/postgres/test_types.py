"""Every type of PostgreSQL has one form (docs/capture.md): in the snapshot, in the log, and beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import pytest

from millrace.flows.sources.capture.columns import table_columns
from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.postgres.rows import RowReader
from tests.flows.sources.postgres.shop import Shop
from tests.waiting import until

FORMS: Final[dict[str, dict[str, str]]] = {
    "smallint": {"-32768": "-32768"},
    "bigint": {"9223372036854775807": "9223372036854775807"},
    "oid": {"4294967295": "4294967295"},
    "numeric": {
        "12345678901234567890123.4500": "12345678901234567890123.4500",
        "'NaN'": '"NaN"',
        "'Infinity'": '"Infinity"',
        "'-Infinity'": '"-Infinity"',
    },
    "numeric(65,30)": {
        "12345678901234567890123456789012345.12": "12345678901234567890123456789012345.120000000000000000000000000000"
    },
    "numeric(5,-2)": {"1234567": "1234600"},
    "numeric(2,4)": {"0.0012": "0.0012", "'NaN'": '"NaN"'},
    "price": {"12.5": "12.50"},
    "money": {"'-92233720368547758.08'": "-92233720368547758.08", "12345.67": "12345.67"},
    "real": {"1.5": "1.5", "'NaN'": '"NaN"', "'1e20'": "1e+20"},
    "double precision": {"0.1": "0.1", "'-Infinity'": '"-Infinity"', "1e-300": "1e-300"},
    "boolean": {"true": "true", "false": "false"},
    "char(5)": {"'a'": '"a    "'},
    "text": {"'Ä😀\"\\\n'": '"Ä😀\\"\\\\\\n"', "''": '""'},
    "citext": {"'AbC'": '"AbC"'},
    "mood": {"'it''s'": '"it\'s"'},
    "uuid": {"'A0EEBC99-9c0b-4ef8-bb6d-6bb9bd380a11'": '"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"'},
    "json": {"'{\"a\" : 1}'": '"{\\"a\\" : 1}"', "'null'": '"null"'},
    "jsonb": {"'{\"a\" : 1}'": '"{\\"a\\": 1}"'},
    "xml": {"'<a>1</a>'": '"<a>1</a>"'},
    "hstore": {"'a=>1, b=>NULL'": '"\\"a\\"=>\\"1\\", \\"b\\"=>NULL"'},
    "bytea": {"'\\x00ff'": '"AP8="', "''": '""'},
    "bit(3)": {"b'101'": '"101"'},
    "varbit": {"b'0000001'": '"0000001"', "b''": '""'},
    "date": {
        "'2024-02-29'": '"2024-02-29"',
        "'infinity'": '"infinity"',
        "'-infinity'": '"-infinity"',
        "'0044-03-15 BC'": '"0044-03-15 BC"',
        "'1582-10-10'": '"1582-10-10"',
        "'5874897-12-31'": '"5874897-12-31"',
    },
    "timestamp": {
        "'2024-02-29 12:00:00.123456'": '"2024-02-29T12:00:00.123456"',
        "'2024-02-29 12:00:00.1'": '"2024-02-29T12:00:00.100000"',
        "'infinity'": '"infinity"',
        "'4713-01-01 BC'": '"4713-01-01 00:00:00 BC"',
    },
    "timestamptz": {"'2024-02-29 12:00:00+05:30'": '"2024-02-29T06:30:00.000000Z"', "'-infinity'": '"-infinity"'},
    "time": {"'23:59:59.999999'": '"23:59:59.999999"', "'24:00:00'": '"24:00:00.000000"'},
    "timetz": {"'23:59:59.9+02'": '"23:59:59.900000+02"', "'24:00:00-05:30'": '"24:00:00.000000-05:30"'},
    "interval": {
        "'1 year 2 months 3 days 04:05:06.7'": '"P1Y2M3DT4H5M6.7S"',
        "'-1 month 5 days -00:00:01'": '"P-1M5DT-1S"',
        "'1000000 hours'": '"PT1000000H"',
    },
    "inet": {"'192.168.0.1/24'": '"192.168.0.1/24"', "'::1'": '"::1"', "'10.0.0.1'": '"10.0.0.1"'},
    "cidr": {"'192.168.0.0/24'": '"192.168.0.0/24"'},
    "macaddr": {"'08-00-2b-01-02-03'": '"08:00:2b:01:02:03"'},
    "int4range": {"'[1,4]'": '"[1,5)"', "'empty'": '"empty"', "'(,5)'": '"(,5)"'},
    "tstzrange": {"'[2024-01-01 00:00+02,)'": '"[\\"2023-12-31 22:00:00+00\\",)"'},
    "int4multirange": {"'{[1,3),[5,6)}'": '"{[1,3),[5,6)}"'},
    "tsvector": {"'a fat cat'": "\"'a' 'cat' 'fat'\""},
    "point": {"'(1,2)'": '"(1,2)"'},
    "pg_lsn": {"'16/B374D848'": '"16/B374D848"'},
    "positive": {"7": "7"},
    "even_positive": {"8": "8"},
    "positive[]": {"'{7,8}'": "[7,8]"},
    "pair": {"row(1, 'x, y')": '"(1,\\"x, y\\")"', "row(null, null)": '"(,)"'},
    "int[]": {
        "'{1,null,3}'": "[1,null,3]",
        "'{{1,2},{3,4}}'": "[[1,2],[3,4]]",
        "'[2:3]={1,2}'": "[1,2]",
        "'{}'": "[]",
    },
    "numeric[]": {"'{1.50,NaN}'": '[1.50,"NaN"]'},
    "money[]": {"'{1.5}'": "[1.50]"},
    "interval[]": {"'{1 day}'": '["P1D"]'},
    "text[]": {"array['a', null, 'b,c', 'null', '', '\\\"']": '["a",null,"b,c","null","","\\\\\\""]'},
    "bytea[]": {"array['\\x00ff'::bytea]": '["AP8="]'},
    "timestamptz[]": {"'{2024-01-01 00:00:00+02,infinity}'": '["2023-12-31T22:00:00.000000Z","infinity"]'},
    "mood[]": {"'{sad}'": '["sad"]'},
    "box[]": {"'{(1,2),(0,0);(3,4),(0,0)}'": '["(1,2),(0,0)","(3,4),(0,0)"]'},
}

FIELDS: Final = {
    "smallint": "int16", "bigint": "int64", "oid": "int64", "numeric(5,-2)": "decimal(7,0)",
    "numeric(2,4)": "decimal(4,4)", "price": "decimal(8,2)", "money": "decimal(19,2)", "real": "float32",
    "double precision": "float64", "boolean": "bool", "uuid": "uuid", "bytea": "binary", "date": "date",
    "timestamp": "timestamp_ntz", "timestamptz": "timestamp", "positive": "int32", "even_positive": "int32",
}  # fmt: skip
"""The fields of a collection that is made of the columns; json for arrays, and string for others."""


TYPES: Final = (
    "create extension hstore",
    "create extension citext",
    "create type mood as enum ('sad', 'it''s')",
    "create domain price as numeric(8,2)",
    "create domain positive as int check (value > 0)",
    "create domain even_positive as positive check (value % 2 = 0)",
    "create type pair as (a int, b text)",
)


def test_a_value_that_is_read_beside_the_log_has_its_form(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "a int, b numeric(6,2), primary key (b, a)")
    names = {kind: f"c{number}" for number, kind in enumerate(FORMS)}
    shop.execute(
        *TYPES,
        *(f"alter table items add {name} {kind}" for kind, name in names.items()),
        "alter table items add made int generated always as (a + 1) stored",
        f"alter database {shop.database} set IntervalStyle = 'postgres_verbose'",
        f"alter database {shop.database} set bytea_output = 'escape'",
        f"alter database {shop.database} set DateStyle = 'German'",
    )
    count = 0
    for kind, forms in FORMS.items():
        for value in forms:
            count += 1
            shop.execute(f"insert into items (a, b, {names[kind]}) values ({-count}, {count % 7} / 4.0, {value})")
    reader = RowReader(shop.server_of())
    shape = reader.look(["public.items"]).shapes["public.items"]
    page = reader.page("public.items", shape, None)
    assert page is not None
    assert page.after is None
    rows = [msgspec.json.decode(line)["a"] for line in page.lines]
    assert [(row["b"], row["a"]) for row in rows] == sorted((n % 7 / 4.0, -n) for n in range(1, count + 1))
    found = {row["a"]: msgspec.json.decode(line, type=_Line).a for row, line in zip(rows, page.lines, strict=True)}
    count = 0
    for kind, forms in FORMS.items():
        for form in forms.values():
            count += 1
            assert bytes(found[-count][names[kind]]).decode() == form, kind
            assert "made" not in found[-count]
    types = table_columns(page.description).types
    for kind, name in names.items():
        assert types[name] == FIELDS.get(kind, "json" if kind.endswith("[]") else "string") + "?", kind


class _Line(msgspec.Struct):
    a: dict[str, msgspec.Raw]


@pytest.mark.slow
def test_every_value_has_its_form_wherever_it_is_read(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "id int primary key")
    names = {kind: f"c{number}" for number, kind in enumerate(FORMS)}
    shop.execute(
        *TYPES,
        "alter table items replica identity full",
        *(f"alter table items add {name} {kind}" for kind, name in names.items()),
        "alter table items add number int generated always as identity",
        "alter table items add made int generated always as (id + 1) stored",
        # What a session shows must not depend on how the database is set.
        f"alter database {shop.database} set IntervalStyle = 'postgres_verbose'",
        f"alter database {shop.database} set bytea_output = 'escape'",
        f"alter database {shop.database} set DateStyle = 'German'",
    )
    rows: dict[int, dict[str, str]] = {0: {}}
    inserts = ["insert into items (id) values (0)"]
    for turn in range(max(map(len, FORMS.values()))):
        chosen = {kind: list(forms.items())[turn] for kind, forms in FORMS.items() if turn < len(forms)}
        columns = ", ".join(names[kind] for kind in chosen)
        values = ", ".join(value for value, _ in chosen.values())
        inserts.append(f"insert into items (id, {columns}) values ({turn + 1}, {values})")
        rows[turn + 1] = {names[kind]: form for kind, (_, form) in chosen.items()}
    shop.execute(*inserts)
    with shop.captured():
        until(lambda: len(shop.records()) == len(rows), "the snapshot has the rows", seconds=60)
        shop.execute("truncate items restart identity", *inserts)
        until(lambda: len(shop.records()) == 2 * len(rows) + 1, "the log has the rows", seconds=60)
        shop.execute("alter table items add extra int default 1")
        until(lambda: len(shop.records()) == 3 * len(rows) + 1, "rows that DDL changed are read", seconds=60)
        shop.execute("delete from items where id = 0")
        until(lambda: len(shop.records()) == 3 * len(rows) + 2, "a delete comes", seconds=60)
    found = [each for each in shop.records() if each.value is not None]
    for place, record in enumerate(found):
        assert record.value is not None
        texts = {
            name: bytes(each).decode().replace("\\uD83D\\uDE00", "😀")
            for name, each in msgspec.json.decode(record.value, type=dict[str, msgspec.Raw]).items()
        }
        number = int(texts.pop("id"))
        assert texts.pop("number") == str(number + 1)
        assert texts.pop("extra", "") == ("1" if place >= 2 * len(rows) else "")
        assert texts == {name: rows[number].get(name, "null") for name in names.values()}, "and no generated column"
        assert dict(record.headers)["millrace.base64"].decode() == names["bytea"]
    operations = [dict(each.headers)["millrace.op"] for each in found]
    assert operations == [b"r"] * len(rows) + [b"c"] * len(rows) + [b"r"] * len(rows)
    with Spool(shop.folder) as spool:
        for place in (found[0].offset, found[len(rows)].offset, found[-1].offset):
            columns, _ = spool.columns(shop.lane, place)
            assert columns is not None
            types = table_columns(columns).types
            for kind, name in names.items():
                assert types[name] == FIELDS.get(kind, "json" if kind.endswith("[]") else "string") + "?", kind
    shop.released()

"""Any changes of a schema, with writers of any of its versions.

A read, a scan and the changes at every tick are what a model says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.client.collection import Collection
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.storage.table import open_table
from millrace.tables.collections.data_tables import earliest_readable_tick, rows_uri
from millrace.tables.wal.reader import MAX_TICK
from millrace.testing import Deployment, deployment
from tests.laws.profile import examples
from tests.tables.test_schema_evolution import by_id, older


@pytest.fixture(scope="module")
def db() -> Iterator[Deployment]:
    with deployment(pchannels=2) as made:
        yield made


KINDS = (
    "int8",
    "int16",
    "int32",
    "int64",
    "float32",
    "float64",
    "decimal(6,2)",
    "decimal(9,4)",
    "date",
    "timestamp",
    "string",
    "struct<p: int8, q: string>",
)
WIDER = {
    "int8": "int32",
    "int16": "int32",
    "int32": "int64",
    "float32": "float64",
    "decimal(6,2)": "decimal(9,4)",
    "date": "timestamp",
}


def values_of(kind: str) -> st.SearchStrategy[Any]:
    if kind.startswith("struct"):
        parts = parts_of(kind)
        return st.tuples(*(st.none() | values_of(each) for each in parts.values())).map(
            lambda values: dict(zip(parts, values, strict=True))
        )
    match kind:
        case "float32" | "float64":
            return st.floats(width=32, allow_nan=False).map(lambda each: each + 0.0)
        case "date":
            return st.dates()
        case "timestamp":
            return st.datetimes(timezones=st.just(UTC)).map(lambda each: each.replace(fold=0))
        case "string":
            return st.text(max_size=3)
        case "decimal(6,2)" | "decimal(9,4)":
            return st.integers(-999_999, 999_999).map(lambda digits: Decimal(digits).scaleb(-2 if "6" in kind else -4))
    return st.integers(-128, 127)


def parts_of(kind: str) -> dict[str, str]:
    return dict(each.split(": ") for each in kind.removeprefix("struct<").removesuffix(">").split(", "))


@dataclass(slots=True)
class Model:
    """What a collection must hold: rows by the identity of their fields, and each version's fields."""

    versions: list[list[tuple[str, int, str]]]
    """(name, identity, type) of each field beside the key."""
    rows: dict[int, dict[int, Any]] = field(default_factory=dict)
    """Each value with the version that it was written in."""
    parts: list[tuple[int, int, str, str | None]] = field(default_factory=list)
    """In which version, in which field, which part got which name: None where it went, its own where it came."""
    expected: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    """At a tick: the rows."""

    def keep(self, tick: int) -> None:
        now = self.versions[-1]
        rows = [
            {"id": key, **{name: _as(self.now(who, *held.get(who, (None, 0))), kind) for name, who, kind in now}}
            for key, held in sorted(self.rows.items())
        ]
        self.expected.append((tick, rows))

    def now(self, who: int, value: Any, written: int) -> Any:
        """A value with its parts under the names of now."""
        for version, field_, part, to in self.parts:
            if field_ != who or version <= written or not isinstance(value, dict):
                continue
            if part == to:
                value = {**value, part: None}
            else:
                value = {to if name == part else name: each for name, each in value.items() if name != part or to}
        return value

    def change_part(self, chosen: tuple[str, int, str], part: str, to: str | None) -> None:
        """The next version: of the struct `chosen` a part has another name, went (None) or came (its own)."""
        kinds = parts_of(chosen[2])
        if part == to:
            kinds[part] = "int8"
        else:
            kinds = {to if name == part else name: each for name, each in kinds.items() if name != part or to}  # type: ignore[misc]
        kind = f"struct<{', '.join(f'{name}: {each}' for name, each in kinds.items())}>"
        self.parts.append((len(self.versions), chosen[1], part, to))
        self.versions.append([(*each[:2], kind) if each == chosen else each for each in self.versions[-1]])


def _as(value: Any, kind: str) -> Any:
    if value is not None and kind == "timestamp" and not isinstance(value, datetime):
        return datetime(value.year, value.month, value.day, tzinfo=UTC)
    return Decimal(value).quantize(Decimal(1).scaleb(-4)) if value is not None and kind == "decimal(9,4)" else value


@examples(4)
@given(st.data())
def test_any_changes_and_writers_of_any_version_read_back_at_every_tick(db: Deployment, data: st.DataObject) -> None:
    name = f"any{len(db.collections())}"
    made = db.create_collection(
        name, {"id": "int64", "a": "int8?", "b": "decimal(6,2)?", "c": f"{KINDS[-1]}?"}, key="id", vchannels=2
    )
    model = Model([[("a", 0, "int8"), ("b", 1, "decimal(6,2)"), ("c", 2, KINDS[-1])]])
    known, made_fields = [older(made)], 3
    for _ in range(data.draw(st.integers(2, 12))):
        now = model.versions[-1]
        names = [each for each, _, _ in now]
        match data.draw(
            st.sampled_from(
                [
                    *["insert"] * 3,
                    "delete",
                    "settle",
                    "compact",
                    "add",
                    "drop",
                    "rename",
                    "widen",
                    "order",
                    *["part"] * 3,
                ]
            )
        ):
            case "add" if free := sorted({"a", "b", "c", "d", "e"} - set(names)):
                chosen, kind = data.draw(st.sampled_from(free)), data.draw(st.sampled_from(KINDS))
                made.alter(add={chosen: f"{kind}?"})
                model.versions.append([*now, (chosen, made_fields, kind)])
                made_fields += 1
            case "drop" if names:
                chosen = data.draw(st.sampled_from(names))
                made.alter(drop=[chosen])
                model.versions.append([each for each in now if each[0] != chosen])
            case "rename" if names and (free := sorted({"a", "b", "c", "d", "e"} - set(names))):
                chosen, to = data.draw(st.sampled_from(names)), data.draw(st.sampled_from(free))
                made.alter(rename={chosen: to})
                model.versions.append([(to if each == chosen else each, who, kind) for each, who, kind in now])
            case "widen" if wide := [each for each, _, kind in now if kind in WIDER]:
                chosen = data.draw(st.sampled_from(wide))
                to = {each: WIDER.get(kind, "") for each, _, kind in now}[chosen]
                made.alter(widen={chosen: to})
                model.versions.append([(each, who, to if each == chosen else kind) for each, who, kind in now])
            case "order" if names:
                order = data.draw(st.permutations(names))
                made.alter(order=["id", *order])
                model.versions.append(sorted(now, key=lambda each: order.index(each[0])))
            case "part" if structs := [each for each in now if each[2].startswith("struct")]:
                field_ = data.draw(st.sampled_from(structs))
                kinds = parts_of(field_[2])
                part, to = data.draw(st.sampled_from(sorted(kinds))), data.draw(st.sampled_from("pqrs"))
                if to not in kinds and data.draw(st.booleans()):
                    made.alter(rename={f"{field_[0]}.{part}": to})
                elif to not in kinds:
                    made.alter(add={f"{field_[0]}.{to}": "int8"})
                    part = to
                elif len(kinds) > 1:
                    made.alter(drop=f"{field_[0]}.{part}")
                    to = None
                else:
                    continue
                model.change_part(field_, part, to)
            case "settle":
                db.settle()
            case "compact":
                db.settle()
                fold = data.draw(st.sampled_from(["always", "auto", "never"]))
                compact(db.settings, CompactionParams(collections=(name,), fold=fold, min_files=2), history=MAX_TICK)
            case "delete" if model.rows:
                key = data.draw(st.sampled_from(sorted(model.rows)))
                tick = made.delete([key]).last_tick
                del model.rows[key]
                model.keep(tick)
            case _:
                version = data.draw(st.integers(0, len(known) - 1))
                fields = model.versions[version]
                values = {each: data.draw(st.none() | values_of(kind)) for each, _, kind in fields}
                key = len(model.expected) + 100 * data.draw(st.integers(0, 3))
                tick = known[version].upsert([{"id": key, **values}]).last_tick
                model.rows[key] = {who: (values[each], version) for each, who, _ in fields}
                model.keep(tick)
        if len(model.versions) > len(known):
            known.append(older(made))
    if data.draw(st.booleans()):
        db.settle()
    base = earliest_readable_tick(open_table(rows_uri(db.settings, made.id)))
    model.expected = [each for each in model.expected if each[0] >= base]
    for tick, rows in model.expected:
        found = by_id(made.read(at=tick))
        assert [list(each) for each in found[:1]] == [list(each) for each in rows[:1]] or not rows
        assert _same(found, rows), (tick, found, rows)
    _fold_changes(made, model)
    _fold_scan(made)


def _fold_scan(made: Collection) -> None:
    """A scan in the schema of now, taken one change after the other, is what is read now."""
    end = made.database.current_tick(made.definition.pchannels)
    rows: dict[int, dict[str, Any]] = {}
    for change in made.scan(until=end, schema="current"):
        assert change.rows.schema == (made.schema.arrow() if change.kind == "insert" else made.schema.key_arrow())
        for each in change.rows.to_pylist():
            rows.pop(each["id"], None)
            if change.kind == "insert":
                rows[each["id"]] = each
    wanted = made.read(at=end)
    assert wanted.schema == made.schema.arrow()
    assert _same([rows[key] for key in sorted(rows)], by_id(wanted))


def _same(found: list[dict[str, Any]], rows: list[dict[str, Any]]) -> bool:
    """NaN is itself, and UTC one zone, by whichever class."""
    return repr(found).replace(repr(ZoneInfo("UTC")), repr(UTC)) == repr(rows).replace(repr(ZoneInfo("UTC")), repr(UTC))


def _fold_changes(made: Collection, model: Model) -> None:
    """The changes from nothing, taken one after the other, are what is read at the end."""
    if not model.expected:
        return
    end, wanted = model.expected[-1]
    held: dict[int, dict[str, Any]] = {}
    with made.changes(until=end) as stream:
        for each in (each for batch in stream for each in batch.rows.to_pylist()):
            if each["_change"] == "delete":
                held.pop(each["id"], None)
            else:
                held[each["id"]] = each
    assert sorted(held) == [each["id"] for each in wanted]

"""Checks, defaults and computed fields that are drawn.

What the chain takes, and what a read at every tick has, is what a model says.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from millrace.base.settings import Settings
from millrace.client.nested_changes import resolve_paths
from millrace.client.schemas import alter_changes
from millrace.message import builders
from millrace.message.expression.tree import Node
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import apply_changes
from millrace.node.flush.definition import flush_to_end
from millrace.tables.read.arrow import read_arrow
from tests.laws.profile import examples
from tests.message.expression.model import Failed, row_value
from tests.tables.wal_maker import Collection, WalMaker

FIRST = CollectionSchema(
    (FieldSpec("id", "int64", False), FieldSpec("n", "int64", True), FieldSpec("m", "int64", True)), "id"
)
NUMBERS = st.recursive(
    st.sampled_from(["n", "m", "2", "9223372036854775807"]),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from("+-*%"), inner),
        st.builds("coalesce({}, {})".format, inner, inner),
        st.builds("CASE WHEN {} > {} THEN {} ELSE {} END".format, inner, inner, inner, inner),
    ),
    max_leaves=4,
)
CONDITIONS = st.builds("{} {} {}".format, NUMBERS, st.sampled_from(["<", "<=", "=", "!="]), NUMBERS)
SMALL = st.none() | st.integers(-3, 3)
ROW = st.fixed_dictionaries({"id": st.integers(0, 5), "n": SMALL, "m": SMALL})
INSERT = st.tuples(
    st.just("insert"),
    st.lists(ROW, min_size=1, max_size=3),
    st.integers(0, 9),  # of which version
    st.integers(0, 9),  # whether a computed value is given wrong
)
CHANGES = st.one_of(
    st.tuples(st.just("computed"), NUMBERS),
    st.tuples(st.just("default"), st.integers(-3, 3)),
    st.tuples(st.just("check"), CONDITIONS, st.booleans()),
    st.tuples(st.just("drop")),
)
OTHERS = st.one_of(
    st.tuples(st.just("delete"), st.integers(0, 5)), st.tuples(st.just("commit")), st.tuples(st.just("flush"))
)
STEPS = st.lists(st.tuples(INSERT, CHANGES, INSERT, OTHERS), min_size=1, max_size=4).map(
    lambda rounds: [step for each in rounds for step in each]
)

Row = dict[str, Any]


def value(node: Any, row: Row) -> Any:
    assert isinstance(node, Node)
    return row_value(node, row)


def filled(row: Row, newest: CollectionSchema) -> Row:
    """A row as `newest` has it. Raises Failed."""
    found = dict(row)
    for field in newest.fields:
        if field.name not in row and field.default is not None:
            found[field.name] = value(field.default, {})
        elif field.name not in row and field.computed is None:
            found[field.name] = None
    for field in newest.fields:
        if field.computed is not None:
            found.setdefault(field.name, value(field.computed, found))
    return found


def holds(row: Row, newest: CollectionSchema) -> bool:
    """Whether the newest rules let a row in."""
    try:
        seen = filled(row, newest)
        return all(value(each.condition, seen) is not False for each in newest.checks) and all(
            value(each.computed, seen) == seen[each.name] for each in newest.fields if each.computed is not None
        )
    except Failed:
        return False


def said(row: Row, version: CollectionSchema, wrong: bool) -> Row:
    """A row as a producer says it who knows that version: computed values too, all of them wrong or none."""
    found = dict(row)
    for field in version.fields:
        if field.computed is not None:
            try:
                found[field.name] = value(field.computed, row)
            except Failed:
                found[field.name] = None
            found[field.name] = 77 if wrong and found[field.name] != 77 else found[field.name]
        else:
            found.setdefault(field.name, None)
    return found


COMPUTED = ("computed", "(n * 2)")
WRITE = ("insert", [{"id": 1, "n": 1, "m": 0}, {"id": 2, "n": None, "m": 3}], 0, 1)


@example(
    [COMPUTED, WRITE, ("default", 2), ("check", "n < 3", True), WRITE, ("flush",), ("drop",), (*WRITE[:2], 1, 0)], 0
)
@example(
    [("check", "n + 9223372036854775807 != 0", False), WRITE, ("drop",), WRITE], 0
)  # one that fails is none that holds
@examples(8)
@given(STEPS, st.integers(0, 2))
def test_rules_let_in_and_fill_what_the_model_says_at_every_tick(steps: list[tuple[Any, ...]], first: int) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        maker = WalMaker(Settings(data_dir=folder / "data"), pchannels=("p0",))
        maker.open()
        collection = Collection(maker, vchannels=1, schema=FIRST)
        collection.create()
        maker.commit()
        [vchannel] = collection.vchannels
        versions, rows = [FIRST], list[Row]()
        wanted: list[tuple[str, list[Row], CollectionSchema]] = []
        """What the log takes, in order: each message's type, the rows behind it, and the schema."""
        for step in steps:
            newest = versions[-1]
            change: dict[str, Any] = {}
            match step:
                case ["insert", given, which, flaw]:
                    place = which % len(versions)
                    written = [said(row, versions[place], flaw == 0) for row in given]
                    collection.schema, collection.schema_version = versions[place], place + 1
                    columns = {field.name: [row[field.name] for row in written] for field in versions[place].fields}
                    collection.append(vchannel, collection.insert(columns, vchannel=vchannel))
                    if all(holds(row, newest) for row in written):
                        rows = [*rows, *(filled(row, newest) for row in written)]
                        wanted.append(("INSERT", rows, newest))
                    continue
                case ["delete", key]:
                    collection.append(vchannel, collection.delete([key], vchannel=vchannel))
                    rows = [row for row in rows if row["id"] != key]
                    wanted.append(("DELETE", rows, newest))
                    continue
                case ["computed", text]:
                    name = f"c{len(versions)}"
                    change = {"add": {name: "int64?"}, "computed": {name: text}}
                case ["default", number]:
                    change = {"add": {f"d{len(versions)}": "int64?"}, "set_default": {f"d{len(versions)}": number}}
                case ["check", text, of_new]:
                    last = newest.fields[-1].name
                    change = {
                        "add_check": {
                            f"k{len(versions)}": text.replace("n", last) if of_new and "C" not in text else text
                        }
                    }
                case ["drop"] if newest.checks:
                    change = {"drop_check": newest.checks[0].name}
                case ["commit"] | ["flush"]:
                    maker.commit()
                    if step[0] == "flush":
                        flush_to_end(maker.settings)
            if change:
                made = resolve_paths(alter_changes(**change), lambda newest=newest: newest)
                versions.append(apply_changes(newest, made))
                message = builders.schema_change(
                    made, schema_version=len(versions), vchannel=vchannel, collection_id=1, term=1
                )
                collection.append(vchannel, message)
                wanted.append(("SCHEMA_CHANGE", rows, versions[-1]))
        maker.commit()
        taken = [m for m in maker.accepted["p0"] if m["type"] in ("INSERT", "DELETE", "SCHEMA_CHANGE")]
        assert [m["type"] for m in taken] == [kind for kind, _, _ in wanted]
        assert {each["reason"] for each in maker.rejected} <= {"CHECK_VIOLATED"}
        for place in {*range(first, len(taken), 3), len(taken) - 1} if taken else ():
            found = read_arrow(maker.settings, 1, at=taken[place]["time_tick"])
            _, then, schema = wanted[place]
            names = [field.name for field in schema.fields]
            assert found.column_names == names
            expected = [{name: row.get(name) for name in names} for row in then]
            assert sorted(found.to_pylist(), key=repr) == sorted(expected, key=repr)
    finally:
        shutil.rmtree(folder)

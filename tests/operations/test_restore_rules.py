"""A restore brings rows back as they were, whatever rules came later; and the rules with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.base.errors import CheckViolated
from millrace.base.settings import Settings
from millrace.client.database import Database, connect
from millrace.client.nested_changes import resolve_paths
from millrace.client.schemas import alter_changes, schema
from millrace.operations.restore.schema_rules import split_rules
from tests.operations.test_restore import restore, settle, with_arrow

RULED = schema(
    {"id": "int64", "n": "int32", "twice": "int64"},
    key="id",
    defaults={"n": 1},
    computed={"twice": "n * 2"},
    checks={"some": "n > 0"},
)


@pytest.fixture
def client(settings: Settings) -> Iterator[Database]:
    with connect(settings=settings) as made:
        made.catalog.ensure_pchannels(1)
        made.catalog.create_collection("c", RULED)
        made.new_producer().insert("c", [{"id": 1, "n": 500}, {"id": 2}])
        made.catalog.alter("c", resolve_paths(LATER, lambda: made.definition("c").schema))
        made.new_producer().insert("c", [{"id": 3, "m": 7}])
        yield made
        made.connection.service.shutdown()


LATER = alter_changes(
    rename={"n": "m"},
    widen={"m": "int64"},
    add={"thrice": "int64?", "mark": "string?"},
    computed={"thrice": "m * 3"},
    set_default={"mark": "x"},
    add_check={"few": "m < 100"},
)
ROWS = [
    {"id": 1, "m": 500, "twice": 1000, "thrice": None, "mark": None},
    {"id": 2, "m": 1, "twice": 2, "thrice": None, "mark": None},
    {"id": 3, "m": 7, "twice": 14, "thrice": 21, "mark": "x"},
]


def rows(client: Database, name: str) -> list[dict[str, object]]:
    settle(client)
    return sorted(client.collection(name).read().to_pylist(), key=lambda row: row["id"])


@pytest.mark.slow
def test_a_new_collection_has_the_rows_and_the_rules_that_can_be(client: Database) -> None:
    assert rows(client, "c") == ROWS
    restore(client, with_arrow)
    assert rows(client, "restored") == ROWS
    made = client.definition("restored")
    assert [each.name for each in made.schema.checks] == ["some", "few"]
    assert [field.name for field in made.schema.fields if field.computed is not None] == ["twice"]
    for wrong, words in (({"m": 0}, "some"), ({"m": 100}, "few"), ({"m": 1, "twice": 5}, "twice")):
        with pytest.raises(CheckViolated, match=words):
            client.new_producer().insert(made, [{"id": 9, **wrong}])
    client.new_producer().insert(made, [{"id": 9}])
    assert rows(client, "restored")[-1] == {"id": 9, "m": 1, "twice": 2, "thrice": None, "mark": "x"}


@pytest.mark.slow
def test_in_place_rows_from_before_a_rule_are_not_looked_at(client: Database) -> None:
    tick = settle(client)
    client.new_producer().delete("c", [1, 2, 3])
    client.new_producer().insert("c", [{"id": 4, "m": 4}])
    assert [row["id"] for row in rows(client, "c")] == [4]
    restore(client, with_arrow, in_place=True, into="", at=str(tick))
    assert rows(client, "c") == ROWS


def test_a_rule_that_was_another_once_does_not_hold_of_every_row() -> None:
    looser = schema({"id": "int64", "n": "int64"}, key="id", checks={"some": "n > 0", "few": "n < 9"})
    stricter = schema({"id": "int64", "n": "int64"}, key="id", checks={"some": "n > 5", "few": "n < 9"})
    kept, later = split_rules(stricter, [looser, stricter])
    assert [each.name for each in kept.checks] == ["few"]
    assert [change[0] for change in later] == ["some"]

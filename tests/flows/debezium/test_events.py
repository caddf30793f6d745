"""What Debezium's events do to rows: each form, each operation, and what is none of them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.flows.debezium.events import Change, Events, Rules
from millrace.flows.documents import Refused
from millrace.flows.records import is_truncation
from tests.flows.debezium.samples import (
    CUSTOMERS,
    MYSQL_SOURCE,
    ORDERS,
    POSTGRES_SOURCE,
    event,
    key_with_schema,
    record,
    with_schema,
)

ANNE = {"id": 1004, "first_name": "Anne", "email": "annek@noanswer.org"}


def _change(value: Any, key: Any = None, /, *, headers: Any = (), **rules: Any) -> Change | None:
    return Events(Rules(**rules)).change(record(value, key, headers=headers))


def _document(value: Any, key: Any = None, /, **rules: Any) -> Any:
    found = _change(value, key, **rules)
    assert found is not None
    return found.document


def _refused(value: Any, key: Any = None, /, **rules: Any) -> str:
    with pytest.raises(Refused) as error:
        _change(value, key, **rules)
    return error.value.kind


@pytest.mark.parametrize("op", ["c", "r", "u"])
@pytest.mark.parametrize("schema", [False, True])
def test_a_row_is_the_after_of_its_event(op: str, schema: bool) -> None:
    value, key = event(op, None, ANNE), {"id": 1004}
    found = _change(
        with_schema(value, CUSTOMERS) if schema else value, key_with_schema(key, CUSTOMERS) if schema else key
    )
    assert found is not None
    assert found.document == ANNE
    assert found.record.key == b"1004"
    assert ("millrace.op", op.encode()) in found.record.headers
    assert found.record.original is not None
    assert json.loads(found.record.original.key or b"") == (key_with_schema(key, CUSTOMERS) if schema else key)


def test_types_of_the_schema_become_json() -> None:
    row = {"number": 9, "day": 19_782, "total": "EtY=", "state": "paid", "note": "AP8="}
    found = _change(with_schema(event("c", None, row, MYSQL_SOURCE), ORDERS), key_with_schema({"number": 9}, ORDERS))
    assert found is not None
    assert found.document == {"number": 9, "day": "2024-02-29", "total": 48.22, "state": "paid", "note": "AP8="}
    assert ("millrace.base64", b"note") in found.record.headers


def test_types_may_be_declared_for_records_without_a_schema() -> None:
    row = {"number": 9, "day": 19_782, "total": "EtY=", "state": "paid", "note": "AP8="}
    types = (("day", "Date"), ("total", "Decimal(2)"), ("note", "bytes"))
    found = _change(event("c", None, row, MYSQL_SOURCE), {"number": 9}, types=types)
    assert found is not None
    assert found.document == {"number": 9, "day": "2024-02-29", "total": 48.22, "state": "paid", "note": "AP8="}
    assert ("millrace.base64", b"note") in found.record.headers


@pytest.mark.parametrize("schema", [False, True])
def test_a_delete_has_the_key_of_its_record(schema: bool) -> None:
    value = event("d", {"id": 1004, "first_name": "", "email": None})
    found = _change(
        with_schema(value, CUSTOMERS) if schema else value,
        key_with_schema({"id": 1004}, CUSTOMERS) if schema else {"id": 1004},
    )
    assert found is not None
    assert found.document is None
    assert found.record.value is None
    assert found.record.key == b"1004"


def test_a_key_of_several_columns_is_a_list_and_has_their_types() -> None:
    fields = ({**ORDERS[1], "field": "day"}, {"type": "string", "optional": False, "field": "who"})
    found = _change(event("d"), key_with_schema({"day": 19_782, "who": "a"}, fields))
    assert found is not None
    assert found.record.key == b'["2024-02-29","a"]'


def test_a_declared_key_comes_from_the_row() -> None:
    rules: dict[str, Any] = {"key": ("id", "first_name")}
    created, deleted = _change(event("c", None, ANNE), **rules), _change(event("d", ANNE), **rules)
    assert created is not None
    assert deleted is not None
    assert created.record.key == deleted.record.key == b'[1004,"Anne"]'
    assert _refused(event("d"), {"id": 1}, **rules) == "NO_KEY"
    assert _refused(event("d", {"id": 1}), **rules) == "NO_KEY"


def test_a_tombstone_deletes_unless_its_delete_came_just_before() -> None:
    events = Events(Rules())
    key = {"id": 1004}
    assert events.change(record(event("d", ANNE), key, offset=1)) is not None
    assert events.change(record(None, key, offset=2)) is None
    again = events.change(record(None, key, offset=3))  # the delete before it was compacted away
    assert again is not None
    assert (again.document, again.record.key) == (None, b"1004")
    assert events.change(record(event("d", ANNE), key, offset=4)) is not None
    assert events.change(record(None, {"id": 5}, offset=5)) is not None
    assert events.change(record(event("d", ANNE), key, offset=6)) is not None
    assert events.change(record({"schema": {"type": "struct"}, "payload": None}, key, offset=7)) is not None


@st.composite
def _topics(draw: st.DrawFn) -> tuple[list[tuple[int, bytes, bytes | None]], dict[int, int]]:
    """Records as a connector writes them that starts again and again, perhaps compacted; and the table's rows."""
    keys = draw(st.lists(st.integers(1, 3), min_size=1, max_size=16))
    truth: dict[int, int] = {}
    changes: list[list[tuple[bytes, bytes | None]]] = []
    for number, key in enumerate(keys):
        name = json.dumps({"id": key}).encode()
        source = {**MYSQL_SOURCE, "pos": number // 2, "row": number % 2}
        if key in truth and draw(st.booleans()):
            del truth[key]
            changes.append([(name, json.dumps(event("d", {"id": key}, None, source)).encode()), (name, None)])
        else:
            truth[key] = number
            changes.append([(name, json.dumps(event("u", None, {"id": key, "n": number}, source)).encode())])
    sent: list[tuple[bytes, bytes | None]] = []
    at = 0
    while at < len(keys):
        upto = draw(st.integers(at + 1, len(keys)))
        sent += [each for change in changes[at:upto] for each in change]
        at = draw(st.integers(0, upto)) if len(sent) < 120 and draw(st.booleans()) else upto
    records = [(offset, *each) for offset, each in enumerate(sent)]
    clean = draw(st.integers(0, len(records)))
    last = {key: offset for offset, key, _ in records[:clean]}
    return [each for each in records if each[0] >= clean or last[each[1]] == each[0]], truth


@given(_topics(), st.integers(0, 12), st.data())
def test_rows_end_as_the_tables_whatever_is_sent_again(topic: Any, size: int, data: st.DataObject) -> None:
    records, truth = topic
    events, rows, place = Events(Rules(repeats=size)), dict[bytes, int](), 0
    while place < len(records):
        batch = records[place : place + data.draw(st.integers(1, 5))]
        for _ in range(data.draw(st.integers(1, 2))):  # the sink may refuse a batch, which is then tried again
            taken = [events.change(record(value, key, offset=offset)) for offset, key, value in batch]
        for change in taken:
            if change is not None and change.document is None:
                rows.pop(change.record.key or b"", None)
            elif change is not None:
                rows[change.record.key or b""] = change.document["n"]  # type: ignore[index]
        place += len(batch)
    assert rows == {str(key).encode(): number for key, number in truth.items()}


def test_a_changed_key_is_a_delete_and_an_insert() -> None:
    events = Events(Rules())
    gone = events.change(record(event("d", ANNE), {"id": 1004}, headers=[("__debezium.newkey", b'{"id":7}')]))
    here = events.change(
        record(event("c", None, {**ANNE, "id": 7}), {"id": 7}, offset=8, headers=[("__debezium.oldkey", b"{}")])
    )
    assert gone is not None
    assert here is not None
    assert (gone.record.key, here.record.key) == (b"1004", b"7")
    assert _refused(event("u", ANNE, {**ANNE, "id": 7}), {"id": 7}) == "KEY_CHANGED"


HEARTBEAT = {"ts_ms": 1_559_033_904_961}
BEGIN = {"status": "BEGIN", "id": "555:24023128", "ts_ms": 1, "event_count": None, "data_collections": None}
DDL = {"source": MYSQL_SOURCE, "ts_ms": 1, "databaseName": "inventory", "ddl": "ALTER TABLE t ...", "tableChanges": []}
NOTIFICATION = {"id": "1", "aggregate_type": "Initial Snapshot", "type": "COMPLETED", "additional_data": {}}


@pytest.mark.parametrize("value", [HEARTBEAT, BEGIN, {**BEGIN, "status": "END"}, DDL, NOTIFICATION])
@pytest.mark.parametrize("schema", ["", "io.debezium.connector.common.Heartbeat", "other"])
def test_what_changes_no_row_is_nothing(value: Any, schema: str) -> None:
    named = {"schema": {"type": "struct", "fields": [], "name": schema}, "payload": value}
    assert _change(named if schema else value, {"serverName": "shop"}) is None


def test_a_message_of_the_log_is_nothing() -> None:
    assert (
        _change({"op": "m", "ts_ms": 1, "source": POSTGRES_SOURCE, "message": {"prefix": "a", "content": "YQ=="}})
        is None
    )


def test_a_truncation_is_an_error_unless_it_is_declared() -> None:
    assert _refused(event("t")) == "TRUNCATED"
    assert _change(event("t"), truncates="ignore") is None
    found = _change(event("t"), truncates="apply")
    assert found is not None
    assert is_truncation(found.record)


@pytest.mark.parametrize("schema", [False, True])
def test_an_unwrapped_event_is_its_row(schema: bool) -> None:
    def made(row: dict[str, Any]) -> Any:
        columns = {**{each["field"]: each for each in CUSTOMERS}, "__deleted": {"type": "string", "field": "__deleted"}}
        fields = [columns[name] for name in row]
        return {"schema": {"type": "struct", "fields": fields, "name": "Value"}, "payload": row} if schema else row

    here = _change(made({**ANNE, "__deleted": "false"}), {"id": 1004}, unwrapped=True)
    gone = _change(made({**ANNE, "__deleted": "true"}), {"id": 1004}, unwrapped=True)
    assert here is not None
    assert gone is not None
    assert here.document == ANNE
    assert (gone.document, gone.record.value, gone.record.key) == (None, None, b"1004")


def test_an_unwrapped_event_tells_its_operation() -> None:
    found = _change({**ANNE, "__op": "r", "__lsn": 5}, {"id": 1004}, unwrapped=True)
    assert found is not None
    assert found.document == {**ANNE, "__lsn": 5}
    assert ("millrace.op", b"r") in found.record.headers
    gone = _change({**ANNE, "__op": "d"}, {"id": 1004}, unwrapped=True)
    assert gone is not None
    assert gone.document is None
    assert _refused({**ANNE, "__op": "x"}, {"id": 1004}, unwrapped=True) == "UNKNOWN_OP"


def test_a_row_with_columns_of_an_envelopes_names_is_unwrapped_as_it_is() -> None:
    row = {"schema": "public", "payload": "x", "op": "buy", "source": "web", "after": 1}
    assert _document(row, {"id": 1}, unwrapped=True) == row


MARK = "__debezium_unavailable_value"


def test_a_value_that_was_not_logged_is_that_of_before_or_refused() -> None:
    after = {**ANNE, "email": MARK}
    assert _document(event("u", ANNE, after), {"id": 1004}) == ANNE
    assert _refused(event("u", None, after), {"id": 1004}) == "UNAVAILABLE"
    assert _refused(event("u", after, after), {"id": 1004}) == "UNAVAILABLE"
    assert _refused(after, {"id": 1004}, unwrapped=True) == "UNAVAILABLE"
    row = {"number": 9, "day": 0, "total": None, "state": None, "note": base64.b64encode(MARK.encode()).decode()}
    assert _refused(with_schema(event("u", None, row), ORDERS), {"number": 9}) == "UNAVAILABLE"
    told = {**ANNE, "email": f"{MARK}, she said"}
    assert _document(event("u", None, told), {"id": 1004}) == told


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (event("x", None, ANNE), "UNKNOWN_OP"),
        (event(7, None, ANNE), "UNKNOWN_OP"),  # type: ignore[arg-type]
        (event("c"), "NO_AFTER"),
        (event("u", ANNE), "NO_AFTER"),
        (event("c", None, "row"), "NO_ROW"),
        (event("c", None, [1]), "NO_ROW"),
        ({"first_name": "Anne"}, "ENVELOPE"),
        ([1], "ENVELOPE"),
        ("text", "ENVELOPE"),
        (event("c", None, ANNE, source="shop"), "ENVELOPE"),
        (event("c", None, ANNE, source={**MYSQL_SOURCE, "db": {}}), "ENVELOPE"),  # type: ignore[arg-type]
        (event("c", None, ANNE, source={"commit_lsn": "1", "change_lsn": "2", "event_serial_no": []}), "ENVELOPE"),
        (with_schema(event("c", None, {**ANNE, "more": 1}), CUSTOMERS), "SCHEMA"),
        (with_schema(event("c", None, {"id": 1}), CUSTOMERS), "SCHEMA"),
        ({"schema": {"type": 7}, "payload": event("c", None, ANNE)}, "SCHEMA"),
        (
            with_schema(event("c", None, {"number": 9, "day": 0, "total": "?", "state": "", "note": ""}), ORDERS),
            "VALUE",
        ),
        (
            with_schema(event("c", None, {"number": 9, "day": "a", "total": "", "state": "", "note": ""}), ORDERS),
            "VALUE",
        ),
        (b"\0\0\0\0\1abc", "NO_REGISTRY"),
    ],
)
def test_what_is_no_event_is_refused_with_a_kind(value: Any, kind: str) -> None:
    assert _refused(value, {"id": 1}) == kind


def test_a_file_with_a_number_too_long_for_one_has_no_order() -> None:
    assert _document(event("c", None, ANNE, source={**MYSQL_SOURCE, "file": "bin." + "9" * 5000}), {"id": 1}) == ANNE


def test_a_delete_without_a_key_is_refused() -> None:
    assert _refused(event("d", ANNE)) == "NO_KEY"
    assert _refused(None) == "NO_KEY"
    assert _refused(event("d", ANNE), b"{no json") == "NO_KEY"


def test_a_key_that_is_a_text_stays() -> None:
    found = _change(event("d", ANNE), b"1004")
    assert found is not None
    assert found.record.key == b"1004"


def test_versions_are_positions_where_that_is_declared() -> None:
    assert Events(Rules()).change(record(event("c", None, ANNE), {"id": 1}))[2] is None  # type: ignore[index]
    found = _change(event("c", None, ANNE), {"id": 1}, versions=True)
    assert found is not None
    assert found.version == POSTGRES_SOURCE["lsn"]
    assert _refused(event("c", None, ANNE, source={"connector": "vitess"}), {"id": 1}, versions=True) == "NO_VERSION"
    assert _refused(None, {"id": 1}, versions=True) == "NO_VERSION"


def test_an_event_that_is_sent_again_is_nothing() -> None:
    events = Events(Rules())
    assert events.change(record(event("c", None, ANNE), {"id": 1004}, offset=1)) is not None
    assert events.change(record(event("c", None, ANNE), {"id": 1004}, offset=1)) is not None, "the same record"
    assert events.change(record(event("c", None, ANNE), {"id": 1004}, offset=2)) is None
    assert events.change(record(event("c", None, ANNE), {"id": 1004}, offset=2, partition=1)) is not None
    assert Events(Rules(repeats=0)).change(record(event("c", None, ANNE), {"id": 1004})) is not None


def test_numbers_keep_their_digits() -> None:
    from millrace.flows.documents import encoded

    value = (
        b'{"before":null,"after":{"id":1,"n":18446744073709551615,"f":1.00000000000000000001},"op":"c","source":null}'
    )
    assert encoded(_document(value, {"id": 1})) == b'{"id":1,"n":18446744073709551615,"f":1.00000000000000000001}'


def test_schemas_that_are_remembered_are_bounded() -> None:
    from millrace.flows.debezium import events as module

    events = Events(Rules())
    for number in range(module._PLANS * 2 + 1):
        named = with_schema(event("c", None, ANNE), CUSTOMERS, f"t{number}")
        assert events.change(record(named, key_with_schema({"id": number}, CUSTOMERS), offset=number)) is not None
    assert len(events._plans) <= module._PLANS


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from([MARK, "c", "d", "u", "t"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["op", "after", "before", "source", "schema", "payload", "fields", "type", "id", "__op"])
            | st.text(max_size=3),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(JSON | st.binary(max_size=20), JSON | st.binary(max_size=8), st.booleans())
def test_any_record_is_a_change_or_nothing_or_refused(value: Any, key: Any, unwrapped: bool) -> None:
    """What a document may do to a flow: Transform takes also the decoder's errors for one document's own."""
    import msgspec

    try:
        _change(value, key, unwrapped=unwrapped, truncates="apply")
    except (Refused, msgspec.DecodeError, UnicodeDecodeError):
        pass

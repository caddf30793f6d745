"""Bodies of control messages."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument, Malformed
from millrace.message.bodies import MAX_BODY_BYTES, encode_body, parse_body
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import AddField
from millrace.message.types import BEHAVIOUR, Flag
from millrace.message.types import MessageType as T

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("é", "string", True)), "id")
COLLECTION = {
    "name": "flights",
    "vchannels": ["pc0_7v0", "pc1_7v1"],
    "schema": SCHEMA.to_json(),
    "partitions": {"JFK": 1, "LGA": 2},
}
BODILESS = [
    T.DROP_COLLECTION, T.DROP_PARTITION, T.FLUSH_ALL, T.COMMIT_TXN, T.ROLLBACK_TXN, T.KEEP_ALIVE, T.TIME_TICK,
    T.CREATE_SEGMENT
]  # fmt: skip


STAGED = {"path": "load/000000.parquet", "partition_id": 1, "rows": 3, "bytes": 900, "digest": "0a" * 32}
IMPORT = {"import_id": "load", "files": [STAGED, STAGED | {"path": "load/000001.parquet"}], "replace": False}


def import_of(**changed: object) -> dict[str, object]:
    """An Import's body whose one file is as it should be, but for what is `changed`."""
    return IMPORT | {"files": [STAGED | changed]}


def test_every_type_with_behaviour_has_a_body_or_carries_rows() -> None:
    for kind, flags in BEHAVIOUR.items():
        if flags & Flag.DML:
            with pytest.raises(InvalidArgument):
                parse_body(kind, b"")
        else:
            try:
                parse_body(kind, b"")
            except Malformed:
                pass


def test_bodies_come_back_as_they_were() -> None:
    bodies: dict[T, dict[str, object]] = {
        T.TERM_OPENING: {"chain_version": 1, "config": {"segment_rows": 5}},
        T.CONFIG: {"segment_rows": 5, "whatever": -3},
        T.CREATE_PARTITION: {"name": "JFK"},
        T.BEGIN_TXN: {"keepalive_ms": 5},
        T.MANUAL_FLUSH: {"segment_id": 1 << 60},
        T.FLUSH: {"policy": "capacity"},
        T.ALTER_WAL: {"generation": 1, "log": "kafka://broker:9092/millrace"},
        T.IMPORT: IMPORT,
    }
    for kind, body in bodies.items():
        assert parse_body(kind, encode_body(body)) == body
    assert parse_body(T.CREATE_COLLECTION, encode_body(COLLECTION)) == COLLECTION | {"schema": SCHEMA}
    field = FieldSpec("note", "string", True)
    assert parse_body(T.SCHEMA_CHANGE, encode_body({"add": field.to_json()})) == {"changes": [AddField(field)]}


def test_encoding_is_canonical() -> None:
    assert encode_body({"b": [1, "é"], "a": None}) == '{"a":null,"b":[1,"é"]}'.encode()
    for wrong in ({"a": float("nan")}, {"a": "\ud800"}, {"a": b""}, {"a": "x" * MAX_BODY_BYTES}):
        with pytest.raises(InvalidArgument):
            encode_body(wrong)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../wal/x",
        "a/../../x",
        "a//b",
        "a/",
        "./a",
        "a/.",
        "a/.b",
        ".trims/a",
        "..",
        "a\\..\\b",
        "a\0b",
        "a\nb",
        "x" * 1025,
    ],
    ids=repr,
)
def test_a_path_that_could_lead_out_of_the_staged_folder_is_malformed(path: str) -> None:
    with pytest.raises(Malformed, match="relative to the staged folder"):
        parse_body(T.IMPORT, json.dumps(import_of(path=path)).encode())


def test_an_import_that_replaces_may_name_no_file() -> None:
    body = {"import_id": "empty", "files": [], "replace": True}
    assert parse_body(T.IMPORT, encode_body(body)) == body


@pytest.mark.parametrize("kind", BODILESS, ids=lambda kind: kind.name)
def test_a_type_that_says_all_in_its_header_has_no_body(kind: T) -> None:
    assert parse_body(kind, b"") == {}
    with pytest.raises(Malformed):
        parse_body(kind, b"{}")


@pytest.mark.parametrize("kind", [T.BEGIN_TXN, T.MANUAL_FLUSH], ids=lambda kind: kind.name)
def test_an_optional_body_may_be_absent_or_empty(kind: T) -> None:
    assert parse_body(kind, b"") == parse_body(kind, b"{}") == {}


NOT_JSON = [
    b"",
    b"{",
    b"[]",
    b"1",
    b"\xff",
    b'{"a":1}x',
    b'{"a":1,"a":1}',
    b'{"a":1.0}',
    b'{"a":1e3}',
    b'{"a":NaN}',
    b'{"a":-Infinity}',
    b'{"a":9223372036854775808}',
    b'{"a":' + b"9" * 100_000 + b"}",
    b'{"a":"\\ud800"}',
    b'{"\\udfff":1}',
    b'{"a":' + b"[" * 9 + b"]" * 9 + b"}",
    b"[" * 500_000,
    b'{"a":' * 100_000,
    b'\xef\xbb\xbf{"a":1}',
]


@pytest.mark.parametrize("payload", NOT_JSON, ids=lambda payload: repr(payload[:20]))
def test_what_is_no_json_object_is_refused_in_the_same_words(payload: bytes) -> None:
    with pytest.raises(Malformed, match="the body is no JSON object") as caught:
        parse_body(T.CONFIG, payload)
    limit = sys.getrecursionlimit()
    try:
        # A host with another stack says the same: a rejection's words are stored.
        sys.setrecursionlimit(limit * 3)
        with pytest.raises(Malformed) as again:
            parse_body(T.CONFIG, payload)
    finally:
        sys.setrecursionlimit(limit)
    assert str(again.value) == str(caught.value)


def test_a_body_above_1_mib_is_refused_unread() -> None:
    with pytest.raises(Malformed, match="1048576"):
        parse_body(T.CONFIG, b" " * (MAX_BODY_BYTES + 1))


WRONG_SHAPES: list[tuple[T, object]] = [
    (T.CONFIG, {"a": "1"}),
    (T.CONFIG, {"a": True}),
    (T.CONFIG, {"a": None}),
    (T.TERM_OPENING, {"chain_version": 1}),
    (T.TERM_OPENING, {"chain_version": "1", "config": {}}),
    (T.TERM_OPENING, {"chain_version": 0, "config": {}}),
    (T.TERM_OPENING, {"chain_version": 1, "config": []}),
    (T.TERM_OPENING, {"chain_version": 1, "config": {}, "more": 1}),
    (T.CREATE_PARTITION, {}),
    (T.CREATE_PARTITION, {"name": ""}),
    (T.CREATE_PARTITION, {"name": 5}),
    (T.CREATE_PARTITION, {"name": "é" * 128}),
    (T.BEGIN_TXN, {"keepalive_ms": "5"}),
    (T.BEGIN_TXN, {"keepalive_ms": -1}),
    (T.BEGIN_TXN, {"lease": 1}),
    (T.MANUAL_FLUSH, {"segment_id": None}),
    (T.FLUSH, {}),
    (T.ALTER_WAL, {}),
    (T.ALTER_WAL, {"generation": 0, "log": ""}),
    (T.ALTER_WAL, {"generation": 1, "log": 1}),
    (T.ALTER_WAL, {"generation": 1}),
    (T.IMPORT, IMPORT | {"import_id": ""}),
    (T.IMPORT, IMPORT | {"files": []}),
    (T.IMPORT, IMPORT | {"files": {}}),
    (T.IMPORT, IMPORT | {"files": ["load/000000.parquet"]}),
    (T.IMPORT, IMPORT | {"files": [STAGED, STAGED]}),
    (T.IMPORT, IMPORT | {"replace": 0}),
    (T.IMPORT, IMPORT | {"more": 1}),
    (T.IMPORT, {"import_id": "load", "files": [STAGED]}),
    (T.IMPORT, import_of(more=1)),
    (T.IMPORT, import_of(rows=0)),
    (T.IMPORT, import_of(rows=True)),
    (T.IMPORT, import_of(bytes=0)),
    (T.IMPORT, import_of(partition_id=0)),
    (T.IMPORT, import_of(digest="0a")),
    (T.IMPORT, import_of(digest="0A" * 32)),
    (T.IMPORT, import_of(digest="0a" * 32 + "\n")),
    (T.IMPORT, import_of(digest=None)),
    (T.IMPORT, import_of(path=7)),
    (T.SCHEMA_CHANGE, {"add": {"name": "x", "type": "int64"}}),
    (T.SCHEMA_CHANGE, {"add": {"name": "x", "type": "int65", "nullable": True}}),
    (T.CREATE_COLLECTION, {}),
    (T.CREATE_COLLECTION, COLLECTION | {"name": ""}),
    (T.CREATE_COLLECTION, COLLECTION | {"vchannels": []}),
    (T.CREATE_COLLECTION, COLLECTION | {"vchannels": ["a", "a"]}),
    (T.CREATE_COLLECTION, COLLECTION | {"vchannels": "ab"}),
    (T.CREATE_COLLECTION, COLLECTION | {"vchannels": [["a"]]}),
    (T.CREATE_COLLECTION, COLLECTION | {"partitions": {"a": 0}}),
    (T.CREATE_COLLECTION, COLLECTION | {"partitions": {"a": 1, "b": 1}}),
    (T.CREATE_COLLECTION, COLLECTION | {"partitions": {"": 1}}),
    (T.CREATE_COLLECTION, COLLECTION | {"schema": None}),
    (T.CREATE_COLLECTION, COLLECTION | {"schema": SCHEMA.to_json() | {"primary_key": "nope"}}),
    (T.CREATE_COLLECTION, COLLECTION | {"more": 1}),
]


@pytest.mark.parametrize(("kind", "body"), WRONG_SHAPES, ids=str)
def test_a_body_of_another_shape_is_malformed(kind: T, body: object) -> None:
    with pytest.raises(Malformed):
        parse_body(kind, json.dumps(body).encode())


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["name", "config", "schema", "add", "vchannels", "x"]), inner, max_size=4),
    ),
    max_leaves=10,
)


@given(
    st.sampled_from([kind for kind, flags in BEHAVIOUR.items() if not flags & Flag.DML]), st.one_of(st.binary(), JSON)
)
def test_any_bytes_are_a_body_or_malformed(kind: T, value: object) -> None:
    payload = value if isinstance(value, bytes) else json.dumps(value).encode()
    try:
        assert isinstance(parse_body(kind, payload), dict)
    except Malformed:
        pass

"""Documents become messages by columns as they do one by one."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Final

from hypothesis import event, given
from hypothesis import strategies as st

from millrace.catalog.collection import CollectionInfo
from millrace.client.schemas import schema
from millrace.flows.conversion import DOCUMENT_ERRORS, row_of
from millrace.flows.documents import decoded, encoded
from millrace.flows.plain import PlainActions, PlainRecords
from millrace.flows.records import BINARY, DIGITS, Action, Record
from millrace.flows.sinks.collection.placed import (
    Placed,
    placed_documents,
    placed_messages,
    replaced_messages,
    rows_in,
)

_numbers = st.one_of(
    st.integers(-(1 << 70), 1 << 70).map(str),
    st.integers(-300, 300).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-99999, max_value=99999).map("{:f}".format),
    st.sampled_from(
        ["1.50", "0.1234567890123456789", "-0", "-0.0", "1e3", "1E-7", "9007199254740993", "2e400", "1.10e1"]
    ),
)
_texts = st.one_of(
    st.text(max_size=4),
    st.sampled_from(["NaN", "Infinity", " 7", "+7", "007", "0x10", "1_000", "7", "1.5", "1e2", "", "\0"]),
    _numbers,
)
_moments = st.one_of(
    st.datetimes().map(lambda each: each.isoformat()),
    st.datetimes().map(lambda each: each.isoformat(timespec="microseconds") + "Z"),
    st.dates().map(str),
    st.sampled_from(
        [
            "2024-02-29T12:00:00.5",
            "2024-02-29T12:00:00+02:00",
            "2024-02-29T12:00:00+0200",
            "20240229",
            "2024-W01-1",
            "0000-01-01",
            "0000-01-01T00:00:00",
            "2024-02-30",
            "2024-02-29T24:00:00",
            "2023-06-30T23:59:60Z",
            "2024-02-29T12:00:00.123456789",
            "2024-02-29T12",
            "10000-01-01",
            "infinity",
            "2024-02-29T12:00:00z",
            "-2024-01-01",
        ]
    ),
    st.just("2024-02-29 12:00"),
)
_quoted = st.one_of(_texts.map(json.dumps), _moments.map('"{}"'.format))
_anything = st.one_of(_numbers, _quoted, st.sampled_from(["null", "true", "false", "[1,2.5]", '{"a":1}']))
_doubles = st.floats(allow_nan=False, allow_infinity=False, width=32).map(repr)
_seconds = st.datetimes().map(lambda each: each.isoformat(timespec="microseconds"))
_hundredths = st.decimals("-9999999999.99", "9999999999.99", places=2).map("{:f}".format)
KINDS: Final = {
    "bool": st.sampled_from(["true", "false"]),
    "int16": st.integers(-(1 << 15), (1 << 15) - 1).map(str),
    "int64": st.integers(-(1 << 63), (1 << 63) - 1).map(str),
    "float32": _doubles,
    "float64": st.one_of(_doubles, st.floats(allow_nan=False, allow_infinity=False).map(repr)),
    "decimal(12,2)": _hundredths,
    "decimal(38,18)": st.one_of(_hundredths, st.decimals(-(10**19), 10**19, places=18).map("{:f}".format)),
    "string": _quoted,
    "binary": st.binary(max_size=4).map(lambda each: json.dumps(base64.b64encode(each).decode())),
    "date": st.dates().map('"{}"'.format),
    "timestamp": _seconds.map('"{}Z"'.format),
    "timestamp_ntz": _seconds.map('"{}"'.format),
    "uuid": st.uuids().map('"{}"'.format),
    "json": _anything,
    "list<int64>": st.sampled_from(["[]", "[1,2]", "[null]"]),
}
KEYS: Final = ("int64", "string", "int16", "date", "decimal(12,2)", "uuid", "timestamp")
_Rows = list[tuple[str, int, int, str]]
"""VChannel, type of message, offset and values of each row."""


@st.composite
def worlds(draw: st.DrawFn) -> tuple[CollectionInfo, list[Action]]:
    """A collection, and what is to be done there."""
    kinds = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=2))
    key = {f"k{place}": kind for place, kind in enumerate(kinds)}
    others = draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=4))
    fields = {**key, **{f"c{place}": f"{kind}?" for place, kind in enumerate(others)}}
    odd = draw(st.booleans())
    keys = {name: draw(st.lists(_field(kind, odd), min_size=1, max_size=3)) for name, kind in key.items()}
    documents: list[tuple[bytes | None, str]] = []
    for _ in range(draw(st.integers(1, 8))):
        mine = {name: draw(st.sampled_from(texts)) for name, texts in keys.items()}
        if draw(st.integers(0, 3)) == 0:
            found = list(mine.values())
            text = found[0] if len(found) == 1 else f"[{','.join(found)}]"
            documents.append((None, json.loads(text) if text.startswith('"') and draw(st.booleans()) else text))
            continue
        for name, kind in fields.items():
            if name not in key and draw(st.integers(0, 5)):
                mine[name] = draw(st.one_of(st.just("null"), _field(kind.removesuffix("?"), odd)))
        if odd and draw(st.integers(0, 5)) == 0:
            mine["unknown"] = "1"
        names = draw(st.permutations(sorted(mine)))
        inside = ",".join(f'"{name}":{mine[name]}' for name in names)
        documents.append((f"{{{inside}}}".encode(), "-"))
    headers: list[tuple[str, bytes | None]] = []
    for header, kind in ((BINARY, "binary"), (DIGITS, "string")):
        listed = [name for name, each in fields.items() if each == f"{kind}?" and draw(st.booleans())]
        headers += [(header, ",".join(listed).encode())] if listed else []
    made = schema(fields, key=list(key))
    info = CollectionInfo(1, "c", "active", ("dml_0_1v0", "dml_0_1v1"), (made,), {"_default": 1}, 2)
    return info, [
        Action(Record("t", 0, 10 + 3 * place, text.encode(), body, 0, list(headers)), text, body, None)
        for place, (body, text) in enumerate(documents)
    ]


def _field(kind: str, odd: bool) -> st.SearchStrategy[str]:
    return st.one_of(KINDS[kind], KINDS[kind], _anything, st.just("null")) if odd else KINDS[kind]


def _plain(actions: Sequence[Action]) -> PlainActions:
    records = [each.record for each in actions]
    keys = [each.id if each.body is None else "" for each in actions]
    values = [each.body for each in actions]
    return PlainActions(PlainRecords([each.offset for each in records], values, keys, records.__getitem__))


def _rows(placed: Placed | None, info: CollectionInfo) -> tuple[_Rows, _Rows] | None:
    """Return the rows that are sent, and those that later ones of their keys replace."""
    if placed is None:
        return None
    sent, replaced = (
        sorted(
            (each.vchannel, int(each.type), place, repr(row))
            for each in messages
            for place, row in zip(each.places, rows_in(each, info).to_pylist(), strict=True)
        )
        for messages in placed
    )
    return sent, replaced


def _one_by_one(actions: Sequence[Action], info: CollectionInfo) -> tuple[_Rows, _Rows] | None:
    """The rows as a document after another gives them; None if one does not fit."""
    try:
        bodies = [None if each.body is None else encoded(decoded(each.body)) for each in actions]
        given = [each._replace(body=body) for each, body in zip(actions, bodies, strict=True)]
        rows = [(each, row_of(each, info.schema)) for each in given]
        return _rows(Placed(placed_messages(rows, info), replaced_messages(rows, info)), info)
    except DOCUMENT_ERRORS:
        return None


@given(worlds())
def test_documents_that_become_messages_by_columns_become_those_of_one_after_another(
    world: tuple[CollectionInfo, list[Action]],
) -> None:
    info, actions = world
    found = _rows(placed_documents(actions, info), info)
    assert _rows(placed_documents(_plain(actions), info), info) == found
    wanted = _one_by_one(actions, info)
    if found is not None:
        assert found == wanted
    event(f"by columns: {found is not None}, one by one: {wanted is not None}")

"""Debezium's events, decoded and written on one core, beside a plain decoder of the same bytes in the same run.

The baseline of decoding is `msgspec.json.decode` of each value into Python objects: what any reader of JSON has to do.
The baseline of writing is `msgspec.json.encode` of the same envelopes from Python objects. Subject and baseline
alternate. Rows are per second of CPU time of the one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.log_bench import Ratio
from millrace.flows.debezium.events import Events, Rules
from millrace.flows.debezium.model import DebeziumEvents
from millrace.flows.debezium.writing import EventWriter
from millrace.flows.records import OPERATION, Action, Record
from millrace.message.schema import CollectionSchema, FieldSpec

_SCHEMA: Final = CollectionSchema(
    (
        FieldSpec("number", "int64", nullable=False),
        FieldSpec("day", "date", nullable=False),
        FieldSpec("total", "decimal(12,2)", nullable=True),
        FieldSpec("state", "string", nullable=True),
        FieldSpec("note", "string", nullable=True),
        FieldSpec("at", "timestamp_ntz", nullable=True),
        FieldSpec("weight", "float64", nullable=True),
    ),
    primary_key="number",
)


def parts(folder: Path, quick: bool) -> dict[str, Callable[[], Any]]:
    """Return the parts of the section."""
    rows, pairs = (10_000, 3) if quick else (100_000, 7)
    return {
        f"{what} events, {'with' if schemas else 'without'} schemas": _part(what, rows, pairs, schemas=schemas)
        for what in ("decode", "write")
        for schemas in (False, True)
    }


def _part(what: str, rows: int, pairs: int, *, schemas: bool) -> Callable[[], Any]:
    def act() -> Any:
        return {"ratio": _measured(what, rows, pairs, schemas=schemas)}

    return act


def _documents(count: int) -> list[Action]:
    made = []
    for number in range(count):
        row = {
            "number": number,
            "day": "2024-02-29",
            "total": f"{number}.25",
            "state": "paid",
            "note": "left at the door, again" * 2,
            "at": "2024-02-29T12:00:00.123456",
            "weight": 0.5 * number,
        }
        record = Record("orders", 0, number, str(number).encode(), b"", 1_709_208_000_123, [(OPERATION, b"c")])
        made.append(Action(record, str(number), msgspec.json.encode(row), None))
    return made


def _measured(what: str, rows: int, pairs: int, *, schemas: bool) -> Ratio:
    declared = DebeziumEvents(collection="orders", schemas=schemas)
    documents = _documents(rows)
    messages, failures = EventWriter(declared, lambda: _SCHEMA).encoded(documents)
    assert not failures
    records = [Record("t", 0, place, each.id.encode(), each.body, 1) for place, each in enumerate(messages)]
    objects = [(msgspec.json.decode(each.id), msgspec.json.decode(each.body or b"")) for each in messages]

    def decode() -> None:
        change = Events(Rules()).change
        for record in records:
            found = change(record)
            assert found is not None

    def decode_plainly() -> None:
        for record in records:
            msgspec.json.decode(record.key or b"")
            msgspec.json.decode(record.value or b"")

    def write() -> None:
        EventWriter(declared, lambda: _SCHEMA).encoded(documents)

    def write_plainly() -> None:
        for key, value in objects:
            msgspec.json.encode(key)
            msgspec.json.encode(value)

    subject, baseline = (decode, decode_plainly) if what == "decode" else (write, write_plainly)
    found = [(_rate(subject, rows), _rate(baseline, rows)) for _ in range(pairs)]
    ratios = [ours / theirs for ours, theirs in found]
    return Ratio(
        f"{what} {'with' if schemas else 'without'} schemas",
        "rows/s",
        pairs,
        statistics.median(ours for ours, _ in found),
        statistics.median(theirs for _, theirs in found),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )


def _rate(act: Callable[[], None], rows: int) -> float:
    begun = time.thread_time()
    act()
    return rows / (time.thread_time() - begun)

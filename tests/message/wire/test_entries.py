"""The wire form: what was encoded comes back, whichever way it was encoded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.message.columns import MESSAGE_SCHEMA
from millrace.message.model import MutableMessage
from millrace.message.wire.crc import combine_crc32c
from millrace.message.wire.decode import decode_entries, entry_crc
from millrace.message.wire.encode import encode_columns, encode_entry
from tests.message.samples import HEADER, entries, messages, runs


def messages_of(batch: pa.RecordBatch) -> list[MutableMessage]:
    return [MutableMessage(**{name: row[name] for name in HEADER}) for row in batch.to_pylist()]


@given(st.lists(runs(), max_size=8))
def test_messages_come_back_as_they_were_with_the_entry_they_came_in(framed: list[list[MutableMessage]]) -> None:
    found = decode_entries(entries([encode_entry(run) for run in framed]))
    found.validate(full=True)
    assert found.schema == MESSAGE_SCHEMA
    assert messages_of(found) == [message for run in framed for message in run]
    places = [(entry, index) for entry, run in enumerate(framed) for index in range(len(run))]
    assert list(zip(found.column("entry").to_pylist(), found.column("index").to_pylist(), strict=True)) == places
    assert found.column("physical_ms").to_pylist() == [1000 + entry for entry, _ in places]
    assert found.column("detail").null_count == len(places)


@given(runs())
def test_columns_and_messages_give_the_same_bytes(run: list[MutableMessage]) -> None:
    numbers: dict[str, Any] = {name: [getattr(message, name) for message in run] for name in HEADER[2:-1]}
    payloads = [message.payload for message in run]
    expected = encode_entry(run)
    types, names = [message.type for message in run], [message.vchannel for message in run]
    assert encode_columns(type=types, vchannel=names, payloads=payloads, **numbers) == expected
    arrays: dict[str, Any] = {name: np.array(column, dtype=np.int64) for name, column in numbers.items()}
    assert (
        encode_columns(
            type=np.array(types, dtype=np.uint16),
            vchannel=pa.array(names).dictionary_encode(),
            payloads=pa.array([b"before", *payloads], pa.large_binary())[1:],
            **arrays,
        )
        == expected
    )


@given(messages(), st.integers(1, 30))
def test_scalars_stand_for_columns_of_one_value(message: MutableMessage, count: int) -> None:
    scalars = {name: getattr(message, name) for name in HEADER[2:-1]}
    found = encode_columns(type=message.type, vchannel=message.vchannel, payloads=[message.payload] * count, **scalars)
    assert found == encode_entry([message] * count)


@given(st.lists(runs(), min_size=1, max_size=6), st.data())
def test_a_slice_of_a_run_of_entries_decodes_as_that_part_of_it(
    framed: list[list[MutableMessage]], data: st.DataObject
) -> None:
    run = entries([encode_entry(part) for part in framed])
    start = data.draw(st.integers(0, len(framed)))
    stop = data.draw(st.integers(start, len(framed)))
    assert messages_of(decode_entries(run[start:stop])) == [message for part in framed[start:stop] for message in part]


def test_one_message_is_framed_in_few_bytes() -> None:
    message = MutableMessage(
        type=400,
        vchannel="pc0_7v0",
        term=1,
        collection_id=7,
        partition_id=1,
        schema_version=1,
        rows=1,
        payload=b"x" * 1024,
    )
    assert len(encode_entry([message])) - 1024 < 100
    assert len(encode_entry([message] * 1000)) - 1000 * 1024 < 100


def test_an_entry_frames_up_to_65536_messages() -> None:
    tick = MutableMessage(type=1200)
    assert decode_entries(entries([encode_entry([tick] * 65536)])).num_rows == 65536
    for count in (0, 65537):
        with pytest.raises(InvalidArgument, match="65536"):
            encode_entry([tick] * count)


def test_the_payloads_of_a_single_entry_are_not_copied() -> None:
    run = entries([encode_entry([MutableMessage(type=400, payload=b"x" * 1000)] * 5)])
    data = decode_entries(run).column("payload").buffers()[2]
    assert data.address == run.column("value").buffers()[2].address


def test_the_crc_of_an_entry_is_over_all_its_bytes() -> None:
    value = encode_entry([MutableMessage(type=1200)])
    assert entry_crc(value) == entry_crc(memoryview(value)) == entry_crc(pa.py_buffer(value)) == crc32c.crc32c(value)


@pytest.mark.parametrize(
    "changes",
    [
        {"type": 0},
        {"type": 65536},
        {"type": -1},
        {"term": -1},
        {"rows": 1 << 63},
        {"epoch": 1 << 31},
        {"schema_version": 1 << 31},
        {"vchannel": "x" * 256},
        {"vchannel": "é" * 128},
        {"vchannel": "\ud800"},
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 2])
def test_what_the_wire_form_cannot_carry_is_refused_when_it_is_written(changes: dict[str, object], count: int) -> None:
    message = replace(MutableMessage(type=400), **changes)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        encode_entry([message] * count)


@pytest.mark.parametrize(
    "columns",
    [
        {"term": [1, 2, 3]},
        {"term": [1.0, 2.0]},
        {"term": [1, None]},
        {"term": [1, 1 << 64]},
        {"vchannel": ["a"]},
        {"vchannel": pa.array(["a", None])},
        {"payloads": pa.array([b"a", None], pa.large_binary())},
        {"payloads": []},
        {"terms": 1},
    ],
)
def test_columns_that_do_not_fit_are_refused(columns: dict[str, object]) -> None:
    arguments: dict[str, object] = {"type": 400, "vchannel": "a", "payloads": [b"", b""]}
    with pytest.raises(InvalidArgument):
        encode_columns(**(arguments | columns))  # type: ignore[arg-type]


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_checksum_of_joined_bytes_follows_from_those_of_the_parts(first: bytes, second: bytes) -> None:
    crc = crc32c.crc32c
    assert combine_crc32c(crc(first), crc(second), len(second)) == crc(first + second)


@pytest.mark.parametrize("size", [0, 1, 300_000, 1 << 20, (4 << 20) + 3])
def test_the_checksum_of_a_whole_entry_is_that_of_its_bytes_whether_they_are_looked_at_or_not(size: int) -> None:
    entry = encode_entry([MutableMessage(type=1, vchannel="p0_1v0", payload=b"\x9a" * size)])
    assert entry_crc(entry, verified=True) == entry_crc(entry) == crc32c.crc32c(entry)

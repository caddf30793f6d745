"""Wire form of a bundle: appends to several PChannels in one message, and their answers in another.

A request is the entries of all appends, one after the other (VALUE_SCHEMA); its metadata names each append's PChannel,
number of entries and seconds to wait. An answer is the decisions of all appends, one after the other (OUTCOME_SCHEMA);
its metadata has for each append the number of its rows, or its failure.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import pyarrow as pa
from pyarrow import flight

from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidArgument
from millrace.rpc.link import ConnectionLost
from millrace.rpc.outcome import OUTCOME_SCHEMA, AppendOutcome
from millrace.rpc.wire import ack_from_bytes, from_json, to_json

MAX_APPENDS: Final = 256
"""Appends of a bundle, at most."""

Answer: TypeAlias = AppendOutcome | Exception


@dataclass(frozen=True, slots=True)
class BundledAppend:
    """One append of a bundle."""

    pchannel: str
    values: pa.LargeBinaryArray
    deadline: Deadline


def encode_bundle(appends: Sequence[BundledAppend]) -> tuple[pa.LargeBinaryArray, bytes]:
    """Return a bundle's entries and metadata."""
    parts = [[each.pchannel, len(each.values), each.deadline.remaining(minimum=0.001)] for each in appends]
    return pa.concat_arrays([each.values for each in appends]), to_json({"appends": parts})


def decode_bundle(values: pa.LargeBinaryArray, metadata: bytes) -> list[BundledAppend]:
    """Return the appends of a bundle. Raises InvalidArgument for metadata that do not fit the entries."""
    parts = from_json(metadata).get("appends")
    if not isinstance(parts, list) or not 0 < len(parts) <= MAX_APPENDS:
        raise InvalidArgument(f"a bundle has 1 to {MAX_APPENDS} appends")
    found, begin = [], 0
    for part in parts:
        match part:
            case [str(pchannel), int(count), int() | float() as seconds] if count > 0 and 0 <= seconds <= 86_400:
                # A copy: the receiving code reads buffers from their beginning.
                each = pa.concat_arrays([values.slice(begin, count)])
                found.append(BundledAppend(pchannel, each, Deadline.after(seconds)))
                begin += count
            case _:
                raise InvalidArgument(
                    f"{part!r} is not an append of a bundle: write [PChannel, number of entries, seconds to wait]"
                )
    if begin != len(values):
        raise InvalidArgument(f"the appends of the bundle have {begin} entries, but the message {len(values)}")
    return found


def encode_answers(answers: Sequence[AppendOutcome | bytes]) -> tuple[pa.RecordBatch, bytes]:
    """Return the rows and the metadata of the answer to a bundle; a failure is in wire form (failure_to_bytes)."""
    outcomes: list[Any] = []
    rows = [OUTCOME_SCHEMA.empty_table()]
    for each in answers:
        if isinstance(each, bytes):
            outcomes.append(base64.b64encode(each).decode())
        else:
            outcomes.append(len(each))
            rows.append(pa.Table.from_batches([each.rows]))
    merged = pa.concat_tables(rows).combine_chunks().to_batches()
    empty = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in OUTCOME_SCHEMA], schema=OUTCOME_SCHEMA)
    return (merged[0] if merged else empty), to_json({"answers": outcomes})


def decode_answers(chunk: flight.FlightStreamChunk, count: int) -> list[Answer]:
    """Return the answers to the `count` appends of a bundle, in order. Raises ConnectionLost for another answer."""
    outcomes = None if chunk.app_metadata is None else from_json(chunk.app_metadata.to_pybytes()).get("answers")
    if chunk.data is None or not isinstance(outcomes, list) or len(outcomes) != count:
        raise ConnectionLost("the append host did not answer each append of a bundle")
    found: list[Answer] = []
    begin = 0
    for each in outcomes:
        if isinstance(each, int):
            found.append(AppendOutcome(chunk.data.slice(begin, each)))
            begin += each
        else:
            found.append(_failure(base64.b64decode(each)))
    return found


def _failure(data: bytes) -> Exception:
    try:
        ack_from_bytes(data)
    except Exception as error:
        return error
    return ConnectionLost("the append host sent an empty answer")

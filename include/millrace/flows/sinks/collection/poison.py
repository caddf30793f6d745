"""Poison rows: rows that no message can carry (a null in a non-nullable column), or that the chain refuses.

They become rows of a collection of dead letters, in the same micro-batch and exactly once like the others, with a
description of the error and the row as Arrow bytes, from which `redriven` restores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.client.consume.dead_letters import LETTERS as LETTERS
from millrace.client.consume.dead_letters import SHORT, reason_text, row_fields
from millrace.client.consume.dead_letters import arrow_bytes as arrow_bytes

_Rows = TypeVar("_Rows", pa.Table, Sequence[Any])

MOST: Final = 1_000
"""The most poison rows of one micro-batch. With more, the rows are not the cause, and the stream stops."""


def parts_that_fit(rows: _Rows, fits: Callable[[_Rows], object]) -> Iterator[tuple[_Rows, InvalidArgument | None]]:
    """Yield parts of `rows`, in order: those that `fits` accepts, and each single row that it refuses, with the error.

    If few of n rows do not fit, `fits` is called about log n times for each.
    """
    parts = [rows] if len(rows) else []
    while parts:
        part = parts.pop()
        try:
            fits(part)
        except InvalidArgument as error:
            if len(part) == 1:
                yield part, error
                continue
            middle = len(part) // 2
            parts += [part[middle:], part[:middle]]
        else:
            yield part, None


def sift(table: pa.Table, fits: Callable[[pa.Table], object]) -> tuple[pa.Table, list[tuple[pa.Table, str]]]:
    """Return the rows that `fits` accepts without InvalidArgument, and each other one with its error.

    Raises the error for the whole if more than MOST rows are poison.
    """
    try:
        fits(table)
    except InvalidArgument as error:
        refused = error
    else:
        return table, []
    good: list[pa.Table] = []
    bad: list[tuple[pa.Table, str]] = []
    for part, why in parts_that_fit(table, fits):
        if why is None:
            good.append(part)
        else:
            bad.append((part, str(why)))
            if len(bad) > MOST:
                raise refused
    return (pa.concat_tables(good) if good else table.slice(0, 0)), bad


def letters(stream: str, batch_id: int, bad: Iterable[tuple[int, pa.Table, str]]) -> pa.Table:
    """Return rows of LETTERS from the rows' numbers in their batch, the rows, and their errors."""
    rows = [
        {
            "id": f"{stream}/{batch_id}/{number}",
            "stream": stream,
            "batch": batch_id,
            "reason": reason_text(reason),
            **row_fields(row),
        }
        for number, row, reason in bad
    ]
    return pa.Table.from_pylist(rows, schema=LETTERS.arrow())


def shortened(letter: pa.Table) -> pa.Table:
    """Return a letter that is too large without its payload and with the beginning of its text, for display only."""
    found = letter.to_pylist()[0]
    return pa.Table.from_pylist([found | {"row": found["row"][:SHORT], "payload": b""}], schema=LETTERS.arrow())


def in_order(found: pa.Table) -> list[int]:
    """Return the places of letters ordered by incarnation, batch, and row in the batch."""

    def place(number: int) -> tuple[int, int, int]:
        parts = ids[number].removeprefix(f"{streams[number]}/").split("/")
        return int(parts[0]) if len(parts) > 2 else 0, batches[number], int(parts[-1])

    ids, streams, batches = (found[each].to_pylist() for each in ("id", "stream", "batch"))
    return sorted(range(len(ids)), key=place)


def redriven(found: pa.Table) -> list[pa.RecordBatch]:
    """Return the rows in letters as the sink received them; none for a letter without a payload."""
    batches: list[pa.RecordBatch] = []
    for payload in filter(None, found["payload"].to_pylist()):
        with pa.ipc.open_stream(payload) as reader:
            batches += list(reader)
    return batches

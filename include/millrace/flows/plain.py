"""Columnar records whose values are documents, and their actions for a sink. Items are created on access.

A source that produces such values returns a batch of thousands of records as columns. If no step changes them, the sink
reads the columns, and no object per record is created. All other code reads them as a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from millrace.flows.records import Action, Record


class PlainRecords(Sequence[Record]):
    """Records of one partition whose values are JSON objects, one line each, or absent.

    Offsets ascend. All records list the same columns in their headers (BINARY, DIGITS).
    """

    __slots__ = ("_make", "_places", "keys", "offsets", "values")

    def __init__(
        self,
        offsets: Sequence[int],
        values: Sequence[bytes | None],
        keys: Sequence[str],
        make: Callable[[int], Record],
        places: range | None = None,
    ) -> None:
        """`keys` are the keys of records without a value. A truncation, which can only be the first record, has none.

        `make` returns a record by its place, one of `places` (by default 0, 1, 2, ...).
        """
        self.offsets, self.values, self.keys, self._make = offsets, values, keys, make
        self._places = range(len(offsets)) if places is None else places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int, /) -> Record: ...
    @overload
    def __getitem__(self, place: slice, /) -> PlainRecords: ...

    def __getitem__(self, place: int | slice, /) -> Record | PlainRecords:
        if isinstance(place, int):
            return self._make(self._places[place])
        return PlainRecords(self.offsets[place], self.values[place], self.keys[place], self._make, self._places[place])


class PlainActions(Sequence[Action]):
    """The actions of plain records: write the value as the document, or delete the row of the record's key."""

    __slots__ = ("records",)

    def __init__(self, records: PlainRecords) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, place: int, /) -> Action: ...
    @overload
    def __getitem__(self, place: slice, /) -> PlainActions: ...

    def __getitem__(self, place: int | slice, /) -> Action | PlainActions:
        if isinstance(place, slice):
            return PlainActions(self.records[place])
        record = self.records[place]
        name = self.records.keys[place] if record.value is None else record.position
        return Action(record, name, record.value, None)


def bodies(documents: Sequence[Action]) -> Sequence[bytes | None]:
    """Return the body of each document."""
    return documents.records.values if isinstance(documents, PlainActions) else [each.body for each in documents]


def removed_ids(documents: Sequence[Action]) -> list[str]:
    """Return the ids of the documents without a body."""
    if isinstance(documents, PlainActions):
        records = documents.records
        return [key for key, value in zip(records.keys, records.values, strict=True) if value is None]
    return [each.id for each in documents if each.body is None]


def offsets(documents: Sequence[Action]) -> Sequence[int]:
    """Return the offset of each document's record."""
    if isinstance(documents, PlainActions):
        return documents.records.offsets
    return [each.record.offset for each in documents]


def value_bytes(records: Sequence[Record]) -> int:
    """Return the bytes of all values."""
    values = records.values if isinstance(records, PlainRecords) else (each.value for each in records)
    return sum(len(each) for each in values if each)

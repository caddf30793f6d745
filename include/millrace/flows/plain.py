"""Records whose values are documents as they are, and what a sink is to do for them: items are made when asked for.

A source that knows its values gives a batch of thousands of records as columns. Where nothing changes them on their
way, the sink takes the columns, and no object for each record is made. Everything else reads them as a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from millrace.flows.records import Action, Record


class PlainRecords(Sequence[Record]):
    """Records of one partition whose values are objects of JSON in one line each, or absent.

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
        """`keys` are those of records without a value: a truncation, which can only be the first record, has none.

        `make` returns a record by its place, one of `places`: 0, 1, 2, ... by default.
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
    """The actions of plain records: the value is the document, or the row of the record's key is deleted."""

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

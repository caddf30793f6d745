"""A producer that may be killed at any instant.

It writes down, synced, what became of each call, outside of the system.

    python kill_producer.py <journal file> <first row> <rows a call> <collection>...

The data folder comes from the environment (MILLRACE_DATA). Row ids are `<first row> + n`, in the order of the calls,
which take turns with the collections: plain inserts, upserts and transactions that commit or roll back. A line of the
journal is one call: what became of it, then the ids it was about.

    acknowledged  every row is in the collection once
    rolled-back   none is
    unknown       all of them are there once, or none (a plain insert: each once or not at all)
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

import pyarrow as pa

from millrace.base.errors import AppendRejected, AppendUnresolved, MillraceError
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import connect
from millrace.client.produce.producer import Producer
from millrace.message.keys import vchannel_index


class OnPurpose(Exception):
    """Rolls a transaction back."""


def note(journal: TextIO, what: str, ids: list[int]) -> None:
    journal.write(f"{what} {' '.join(map(str, ids))}\n")
    journal.flush()
    os.fsync(journal.fileno())


def rows_of(ids: list[int]) -> pa.Table:
    return pa.table({"id": ids, "word": [f"row {number}" for number in ids]})


def transaction(producer: Producer, collection: CollectionInfo, ids: list[int], *, commit: bool) -> str:
    """One transaction over `ids`, which have one VChannel, in three parts; what became of it."""
    home = int(vchannel_index(pa.array(ids[:1]), len(collection.vchannels))[0])
    third = max(1, len(ids) // 3)
    try:
        with producer.transaction(collection, vchannel=home) as txn:
            for start in range(0, len(ids), third):
                txn.insert(rows_of(ids[start : start + third]))
            if not commit:
                raise OnPurpose
    except OnPurpose:
        return "rolled-back"
    except AppendRejected:  # its lease ran out while a server was down: nothing of it is visible
        return "rolled-back"
    return "acknowledged"


def main() -> None:
    """Insert until killed."""
    first, step = int(sys.argv[2]), int(sys.argv[3])
    os.nice(10)  # a driver that starts beside it gets what it needs of few cores
    with connect() as client, open(sys.argv[1], "a", encoding="ascii") as journal:
        collections = [client.definition(name) for name in sys.argv[4:]]
        producer = client.new_producer()
        for call in range(1 << 30):
            ids = list(range(first, first + step))
            first += step
            collection = collections[call % len(collections)]
            if call % 3:
                homes = vchannel_index(pa.array(ids), len(collection.vchannels))
                ids = [number for number, home in zip(ids, homes.tolist(), strict=True) if home == homes[0]]
            note(journal, "unknown", ids)  # until the next line says better
            try:
                if call % 3:
                    result = transaction(producer, collection, ids, commit=call % 3 == 1)
                else:
                    (producer.upsert if call % 2 else producer.insert)(collection, rows_of(ids))
                    result = "acknowledged"
            except MillraceError as error:
                if not error.retriable and not isinstance(error, AppendUnresolved):
                    raise
                producer.close()
                producer = client.new_producer()
                continue
            note(journal, result, ids)


if __name__ == "__main__":
    main()

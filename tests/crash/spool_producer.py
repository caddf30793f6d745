"""A producer with a spool that may be killed at any instant: it writes down, synced, what it tried and what was taken.

    python spool_producer.py <journal file> <spool folder> <first number> [drain]

The data folder comes from the environment (MILLRACE_DATA); the log's server is somebody else's to start. Row n has the
key n % KEYS and the number n. With `drain` it adds nothing, and ends once the spool is empty.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyarrow as pa

from millrace.base.errors import SpoolFull
from millrace.client.database import connect

KEYS = 5


def main() -> None:
    """Insert one row a call until killed."""
    journal, spool, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    with (
        connect(start=False, eager=False) as client,
        open(journal, "a", encoding="ascii") as written,
        client.new_producer(spool=spool) as producer,
    ):

        def note(what: str) -> None:
            written.write(f"{what} {number}\n")
            written.flush()
            os.fsync(written.fileno())

        assert producer.spool is not None
        if sys.argv[4:] == ["drain"]:
            assert producer.spool.wait_empty(timeout=60), producer.spool.error
            note("drained")
            return
        collection = client.definition("spooled")
        while True:
            note("tried")
            try:
                taken = producer.insert(collection, pa.table({"id": [number % KEYS], "number": [number]}))
            except SpoolFull:
                note("refused")
            else:
                note("spooled" if taken.spooled_rows else "judged")
            number += 1


if __name__ == "__main__":
    main()

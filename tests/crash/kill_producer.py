"""A producer that may be killed at any instant: it writes down, synced, what was acknowledged, outside of the system.

    python kill_producer.py <journal file> <first row> <rows a call>

The data folder comes from the environment (MILLRACE_DATA). Row ids are `<first row> + n`; a line of the journal is the
range of ids that one acknowledged call inserted.
"""

from __future__ import annotations

import os
import sys

import pyarrow as pa

from millrace.client.client import Client
from millrace.errors import MillraceError


def main() -> None:
    """Insert until killed (or until standard input is closed)."""
    journal, first, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with Client.connect() as client, open(journal, "a", encoding="ascii") as acknowledged:
        collection = client.collection("kills")
        producer = client.producer()
        while True:
            rows = pa.table(
                {"id": range(first, first + step), "word": [f"row {number}" for number in range(first, first + step)]}
            )
            try:
                producer.insert(collection, rows)
            except MillraceError as error:
                if not error.retriable:
                    raise
                # The answer is unknown: this range is never acknowledged, and never sent by another producer.
                producer = client.producer()
                first += step
                continue
            acknowledged.write(f"{first} {first + step}\n")
            acknowledged.flush()
            os.fsync(acknowledged.fileno())
            first += step


if __name__ == "__main__":
    main()

"""A publisher that lives for some ticks: python -m tests.crash.publish_process <table> <newest tick's ms>.

Tick number n adds file n with its row n masked, and masks one more row of each older file. A tick that is published is
not published again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from millrace.storage.published import AddedFile, PublishedChange, PublishedTable
from millrace.storage.store import store_at
from millrace.storage.table import LogMaintenance
from tests.storage.published_world import SCHEMA, positions, tick_at

ROWS = 100


def publish(uri: Path | str, until: int) -> PublishedTable:
    table = PublishedTable.create(store_at(uri), SCHEMA, collection_id=1)
    for ms in range(1, until + 1):
        if table.tick >= tick_at(ms):
            continue
        change = PublishedChange(
            tick_at(ms),
            1,
            add=[AddedFile(f"_rows/part-{ms}.parquet", 1, ROWS, masked=positions([ms]))],
            mask={path: positions({*table.masked(path).tolist(), ms}) for path in table.files},
        )
        table.commit(change, maintenance=LogMaintenance(checkpoint_commits=2, keep_commits=1))
        # Versions older than the newest are expired at once: each commit releases the vectors before it.
        table.expire(before_ms=2**60, keep=1)
    return table


if __name__ == "__main__":
    publish(sys.argv[1], int(sys.argv[2]))

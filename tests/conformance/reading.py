"""Reading a log as plain Python, for comparisons."""

from __future__ import annotations

from millrace.log.protocol import Log
from millrace.message.ids import EARLIEST, LogId
from millrace.message.log_entries import ENTRY_SCHEMA

Entry = tuple[LogId, bytes]


def read_all(
    log: Log, position: LogId = EARLIEST, *, end: LogId | None = None, max_bytes: int = 1 << 20
) -> list[Entry]:
    """Every entry from `position` on, in runs of about `max_bytes`; checks what each run promises."""
    entries: list[Entry] = []
    while True:
        run = log.read(position, end=end, max_bytes=max_bytes)
        assert run.batch.schema == ENTRY_SCHEMA
        run.batch.validate(full=True)
        rows = run.batch.to_pylist()
        if not rows:
            assert run.next >= position
            return entries
        found = [(LogId(row["ledger"], row["entry"]), row["value"]) for row in rows]
        assert found[0][0] >= position
        assert run.next == found[-1][0].following()
        entries += found
        position = run.next


def stamps(log: Log) -> list[int]:
    """The append stamps of all entries, read at once."""
    return [int(stamp) for stamp in log.read(EARLIEST).batch.column("physical_ms").to_pylist()]

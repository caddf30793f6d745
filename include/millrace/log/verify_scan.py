"""A check of a log without checksums of its own at hand: everything is read, as the backend gives it, and must follow on."""

from __future__ import annotations

import pyarrow.compute as pc

from millrace.base.errors import LogCorrupted
from millrace.log.protocol import Log
from millrace.message.log_entries import VerifyReport


def verify_by_reading(log: Log) -> VerifyReport:
    """Read a log from its beginning to where it ends now. Raises what a read raises but LogCorrupted, which is the finding."""
    described = log.describe()
    position, entries, size, records = described.begin, 0, 0, 0
    while position < described.end:
        try:
            run = log.read(position, end=described.end)
        except LogCorrupted as error:
            return VerifyReport(records, entries, size, position, str(error))
        position = run.next
        if not run.batch.num_rows:
            break  # the end; what lies in front of it and is no entry was proven to be none
        records += 1
        entries += run.batch.num_rows
        size += pc.sum(pc.binary_length(run.batch.column("value"))).as_py()
    if position < described.end:
        return VerifyReport(records, entries, size, position, f"the log ends at {position}, before {described.end}")
    return VerifyReport(records, entries, size, None, "every batch's checksum holds, and nothing is missing")

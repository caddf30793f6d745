"""Records that a worker has reason to fear, tried by a process apart before it takes them itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from millrace.flows.declare.errors import SKIPPED
from millrace.flows.declare.flow import Flow
from millrace.flows.range_host.in_hand import LATE_SECONDS
from millrace.flows.records import TRANSFORMATION, Failure, Record
from millrace.flows.samples.trying import TRYING, Trying
from millrace.flows.transform.operators import Open
from millrace.runtime.sandbox.errors import TooMuchWork
from millrace.runtime.sandbox.pool import Sandbox

SKIP: Final = "skip"
"""The step of the letter of a record that somebody named to be put aside."""
CRASHED: Final = "CRASHED"
"""The kind of the letter of a record at which worker processes ended."""
FEARED: Final = frozenset({TooMuchWork.code, SKIPPED, CRASHED})
"""Kinds of letters whose records are tried apart before a process takes them again."""


def tried(flow: Flow, records: Sequence[Record], open_rows: Open) -> tuple[list[Record], list[Failure]]:
    """Split `records`: acceptable ones, and failures that take over half a worker's patience or end their process."""
    left, failures = [], []
    with Trying(Sandbox(TRYING, seconds=LATE_SECONDS / 2, max_processes=1)) as trying:
        for record in records:
            try:
                trying.run(flow, record, open_rows)
            except TooMuchWork as error:
                failures.append(Failure(record, TRANSFORMATION, error.where, error.code, str(error)))
            else:
                left.append(record)
    return left, failures

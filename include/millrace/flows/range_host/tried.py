"""Suspect records, which a separate process tries before the worker takes them itself."""

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
"""The step in the letter of a skipped record."""
CRASHED: Final = "CRASHED"
"""The kind of the letter of a record that ended worker processes."""
FEARED: Final = frozenset({TooMuchWork.code, SKIPPED, CRASHED})
"""Kinds of letters whose records are tried in a separate process before a worker takes them again."""


def tried(flow: Flow, records: Sequence[Record], open_rows: Open) -> tuple[list[Record], list[Failure]]:
    """Split `records` into acceptable ones and failures, which exceed half a worker's time limit or end the process."""
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

"""The process that is killed: a stream of four batches, taken from the beginning each time."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa

from millrace.streams.keyed.durable import DurableRun
from millrace.streams.operators.patterns import Patterns
from millrace.streams.patterns.sql import parse

SCHEMA = pa.schema([("k", pa.utf8()), ("t", pa.int64()), ("v", pa.int64())])
QUERY = parse(
    "PARTITION BY k ORDER BY t MEASURES A.t AS a, LAST(B.t) AS b, MATCH_NUMBER() AS m PATTERN (A B+) WITHIN 9 DEFINE"
    " B AS v > PREV(v)"
)
BATCHES = [
    pa.table({"k": [f"k{at % 3}" for at in range(20)], "t": range(20 * number, 20 * number + 20),
        "v": [(at * at * 7 + number) % 11 for at in range(20)]}, SCHEMA)
    for number in range(4)
]  # fmt: skip


def stream(folder: Path) -> DurableRun:
    return DurableRun(str(folder / "stream"), Patterns(QUERY, "t"), SCHEMA, delay=3, shards=2)


def run(folder: Path) -> None:
    """What each process does: everything from the beginning; what is there already has no second effect."""
    durable = stream(folder)
    for number, rows in enumerate(BATCHES):
        durable.batch(number, rows)
    durable.finish(len(BATCHES))


if __name__ == "__main__":
    run(Path(sys.argv[1]))

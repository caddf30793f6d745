"""The flusher: writes what is visible in the ``wal`` table into the collections' tables, and publishes them beside.

    python jobs/flusher.py [--available-now] [--result FILE] [--progress FILE]

Runs until SIGTERM, or with ``--available-now`` until everything present at the start is done. Settings come from
``MILLRACE_*`` and the settings file (docs/operating.md).
"""

from __future__ import annotations

from millrace.node.flush.definition import FlushLoop
from millrace.node.publish.definition import publishing, publishing_at_end
from millrace.node.range_loop.query import query_of
from millrace.runtime import job


def main() -> None:
    """Run the flusher's query."""
    arguments = job.parser(__doc__).parse_args()
    job.run(
        "millrace-flusher",
        [query_of(FlushLoop)],
        available_now=arguments.available_now,
        result=arguments.result,
        progress=arguments.progress,
        beside=publishing_at_end if arguments.available_now else publishing,
    )


if __name__ == "__main__":
    main()

"""The streaming node: writes the log to the ``wal`` table; with ``--with-flusher`` also the collections' tables.

    python jobs/streaming_node.py [--with-flusher] [--available-now] [--result FILE] [--progress FILE]

With MILLRACE_NODE it joins a cluster and runs the PChannels that it is assigned (docs/coordinator.md). Runs until
SIGTERM, or with ``--available-now`` until everything present at the start is done. Settings come from ``MILLRACE_*``
and the settings file (docs/operating.md).
"""

from __future__ import annotations

from millrace.node.cluster.membership import cluster_member
from millrace.node.flush.definition import FlushLoop
from millrace.node.ingest.definition import IngestLoop
from millrace.node.publish.definition import publishing, publishing_at_end
from millrace.node.range_loop.query import query_of
from millrace.runtime import job


def main() -> None:
    """Run one or both queries in this driver."""
    parser = job.parser(__doc__)
    parser.add_argument("--with-flusher", action="store_true", help="run the flusher as a second query of this driver")
    arguments = parser.parse_args()
    with cluster_member() as member:
        ownership = None if member is None else member.owned
        queries: list[job.StartQuery] = [query_of(IngestLoop, ownership=ownership)]
        if arguments.with_flusher:
            queries.append(query_of(FlushLoop, ownership=ownership))
        publisher = publishing_at_end if arguments.available_now else publishing
        job.run(
            "millrace-streaming-node",
            queries,
            available_now=arguments.available_now,
            result=arguments.result,
            progress=arguments.progress,
            on_started=(lambda: None) if member is None else member.start,
            on_stopped=(lambda: None) if member is None else member.leave,
            beside=publisher if arguments.with_flusher else None,
        )


if __name__ == "__main__":
    main()

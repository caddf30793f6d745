"""A declared stream, or a group of them: moves a collection's rows through a transform into a sink, continuously.

    python jobs/stream.py NAME [--available-now] [--result FILE] [--progress FILE]

NAME is a stream, or a group of streams that share this driver (`millrace flows list`). Runs until SIGTERM, or with
``--available-now`` until everything present at the start is done. Settings come from ``MILLRACE_*`` and the settings
file (docs/operating.md).
"""

from __future__ import annotations

from millrace.base.settings import Settings
from millrace.flows.spark_host.query import queries_of, streams_of
from millrace.flows.spark_host.status import app_name
from millrace.runtime import job


def main() -> None:
    """Run the queries of one job."""
    parser = job.parser(__doc__)
    parser.add_argument("name", metavar="NAME", help="the stream, or the group")
    arguments = parser.parse_args()
    settings = Settings.load()
    job.run(
        app_name(arguments.name),
        queries_of(settings, streams_of(settings, arguments.name)),
        available_now=arguments.available_now,
        result=arguments.result,
        progress=arguments.progress,
        supervisor=arguments.supervisor,
    )


if __name__ == "__main__":
    main()

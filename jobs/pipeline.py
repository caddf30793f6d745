"""A pipeline on Spark: topics in, transformed documents out, one task for each partition.

    python jobs/pipeline.py --declaration FILE [--config FILE] [--available-now] [--result FILE] [--progress FILE]

Runs until SIGTERM, or with ``--available-now`` until everything present at the start is done. Settings come from
``MILLRACE_*`` and the settings file (docs/operating.md).
"""

from __future__ import annotations

from pathlib import Path

from millrace.base.settings import Settings
from millrace.flows.declare.configuration import Configuration
from millrace.flows.declare.file import flow_of_file
from millrace.flows.declare.keys import Keys
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.limits import hold_to
from millrace.flows.range_host.logs import begin_log, new_run
from millrace.flows.range_host.status import State, flow_folder
from millrace.node.range_loop.query import query_of
from millrace.runtime import job


def main() -> None:
    """Run the pipeline's query."""
    parser = job.parser(__doc__)
    parser.add_argument(
        "--declaration", type=Path, required=True, metavar="FILE", help="YAML or JSON, with its secrets"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a pipeline-config.yaml")
    arguments = parser.parse_args()
    configuration = Configuration() if arguments.config is None else Configuration.load(arguments.config)
    pipeline = flow_of_file(arguments.declaration, configuration, keys=Keys(Settings.load().data_dir))
    hold_to(pipeline.resources)  # before the JVM starts, which reads the number of cores once

    made: list[FlowRun] = []

    def definition(settings: Settings) -> FlowRun:
        if not made:
            begin_log(flow_folder(settings, pipeline.name), configuration.log, flow=pipeline.name, run=new_run())
        end(made)  # the query restarts: its previous definition is finished
        made.append(FlowRun(settings, pipeline, on_spark=True))
        return made[-1]

    try:
        job.run(
            f"millrace-pipeline-{pipeline.name}",
            [query_of(definition)],
            available_now=arguments.available_now,
            result=arguments.result,
            progress=arguments.progress,
            supervisor=arguments.supervisor,
        )
    except BaseException as error:
        end(made, State.FAILED, job.error_json(error)["message"])
        raise
    end(made)


def end(made: list[FlowRun], state: State = State.STOPPED, cause: str = "") -> None:
    """Write the final state of each definition to its status file."""
    for each in made:
        each.end(state, cause)


if __name__ == "__main__":
    main()

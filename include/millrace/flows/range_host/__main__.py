"""``python -m millrace.flows.range_host FILE``: run the flow of FILE until SIGTERM or SIGINT.

FILE is a declaration with its secrets (JSON or YAML). ``--config`` names a pipeline-config.yaml; ``--until-end`` stops
at the topics' ends as of the start. The log is pipeline.log in the flow's folder.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import millrace.runtime.arrow_without_pandas  # noqa: F401 - first, before an array is made
from millrace.base.errors import ErrorLimitExceeded, LanesFailed, MillraceError
from millrace.base.files import replace_json
from millrace.base.metrics import Metrics, MetricsServer
from millrace.base.settings import Settings
from millrace.flows.declare.configuration import Configuration
from millrace.flows.declare.file import flow_of_file
from millrace.flows.declare.keys import Keys
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.host import run
from millrace.flows.range_host.limits import hold_to
from millrace.flows.range_host.logs import begin_log, new_run
from millrace.flows.range_host.status import pulse_path, worker_folder
from millrace.flows.range_host.supervision import Supervision
from millrace.runtime.child_processes import SupervisorWatch
from millrace.runtime.process_setup import set_up_service


def main() -> int:
    """Run the worker. Return 0 after a requested stop, or 1 after an error, which is printed on one line."""
    parser = argparse.ArgumentParser(
        prog="python -m millrace.flows.range_host", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a pipeline-config.yaml")
    parser.add_argument("--until-end", action="store_true", help="end at the topics' ends as of the start")
    parser.add_argument("--supervisor", type=int, metavar="PID", help="end when this parent process has ended")
    parser.add_argument(
        "--worker", type=int, default=0, metavar="N", help="the number of this worker, if there are several"
    )
    parser.add_argument("--result", type=Path, metavar="FILE", help="receives an error that a restart cannot fix")
    options = parser.parse_args()
    stop = set_up_service()
    metrics = Metrics()
    server = None
    try:
        settings = Settings.load_for_writing()
        configuration = Configuration.load(options.config) if options.config is not None else Configuration()
        flow = flow_of_file(options.file, configuration, keys=Keys(settings.data_dir))
        if options.supervisor is not None:
            pulse = pulse_path(settings, flow.name, options.worker)
            SupervisorWatch(options.supervisor, stop, patience=settings.stop_deadline, pulse=pulse).start()
        folder = worker_folder(settings, flow.name, options.worker)
        begin_log(folder, configuration.log, flow=flow.name, run=new_run())
        hold_to(flow.resources)
        server = _served(metrics, settings.metrics_port) if settings.metrics_port else None
        definition = FlowRun(settings, flow, options.worker)
        supervision = Supervision(settings, flow, worker=options.worker)
        if options.until_end:  # retry what failed in an earlier run
            supervision.restart()
        run(definition, stop=stop, metrics=metrics, until_end=options.until_end, own_process=True)
        if options.until_end and not stop.is_set():
            _require_whole(supervision)
    except MillraceError as error:
        logging.getLogger("millrace.pipelines").error("%s: %s", error.code, error)
        if options.result is not None and isinstance(
            error, ErrorLimitExceeded | LanesFailed
        ):  # a restart cannot fix it
            report = {"code": error.code, "message": str(error), "retriable": error.retriable}
            replace_json(options.result, {"ok": False, "error": report})
        return 1
    finally:
        if server is not None:
            server.close()
    return 0


def _require_whole(supervision: Supervision) -> None:
    failed = {lane: health for lane, health in supervision.tasks.items() if health.failed}
    if failed:
        lane, health = next(iter(failed.items()))
        raise LanesFailed(f"{len(failed)} lanes failed: {', '.join(sorted(failed))}; {lane}: {health.cause}")


def _served(metrics: Metrics, port: int) -> MetricsServer | None:
    """Serve metrics at `port`. If another worker of this machine uses it, metrics are only in the worker's folder."""
    try:
        return metrics.serve(port)
    except OSError as error:
        logging.getLogger("millrace.pipelines").warning("metrics_port %d is taken: %s", port, error)
        return None


if __name__ == "__main__":
    sys.exit(main())

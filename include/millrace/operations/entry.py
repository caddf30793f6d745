"""The job around an operation: arguments in, one result file out, a clean end on SIGTERM.

    python -m millrace.operations <operation> [--params JSON] [--result FILE] [--progress FILE]

The result file holds ``{"ok": true, "report": {...}}`` or ``{"ok": false, "error": {"code", "message", "retriable"}}`` and is
written last, whole; after SIGTERM it holds ``{"ok": true, "stopped": true, "report": {}}``. Without ``--result`` it goes to standard output. Exit code 0, or 1 for an error; 143 after SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from millrace.base.data_folder import prepare_data_folder, restrict_umask
from millrace.base.errors import MillraceError
from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.operations.operation import Operation, OperationParams, OperationReport
from millrace.runtime.priority import lower_priority
from millrace.runtime.progress import Progress
from millrace.runtime.spark_slots import spark_slot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def main(operation: Operation, argv: Sequence[str] | None = None) -> int:
    """Run `operation` as a process's whole work, as its command line says; the exit code."""
    arguments = _parser(operation).parse_args(argv)
    restrict_umask()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        chosen = operation.params.parse(json.loads(arguments.params))
        report = run_in_process(operation, Settings.load(), chosen, Progress(arguments.progress))
    except (MillraceError, json.JSONDecodeError) as error:
        logging.getLogger(__name__).exception("failed")
        code = error.code if isinstance(error, MillraceError) else "INVALID_ARGUMENT"
        retriable = isinstance(error, MillraceError) and error.retriable
        _finish(arguments.result, {"ok": False, "error": _error(code, str(error), retriable)})
        return 1
    except _Stopped:
        if arguments.result is not None:
            _finish(arguments.result, {"ok": True, "stopped": True, "report": {}})
        raise
    except Exception as error:
        logging.getLogger(__name__).exception("failed")
        # What has no type of ours may be the storage, or another writer: a retry is worth its cost.
        _finish(arguments.result, {"ok": False, "error": _error(type(error).__name__, str(error), True)})
        return 1
    _finish(arguments.result, {"ok": True, "report": report.to_json()})
    return 0


def run_in_process(
    operation: Operation, settings: Settings, params: OperationParams, progress: Progress
) -> OperationReport:
    """Do it in this process, with a Spark session where it needs one."""
    prepare_data_folder(settings.data_dir)
    if operation.low_priority:
        lower_priority()
    if not operation.needs_spark:
        return operation.load()(settings, params, progress)
    with spark_session(operation.name, settings, progress) as spark:
        return operation.load()(spark, settings, params, progress)


@contextmanager
def spark_session(name: str, settings: Settings, progress: Progress) -> Iterator[SparkSession]:
    """A session for the operation `name`, in its turn: there are only so many at once (millrace.runtime.spark_slots)."""
    from millrace.runtime.spark_session import session

    with spark_slot(settings, name, progress):
        progress.update("starting Spark")
        spark = session(f"millrace-{name}", settings=settings)
        try:
            yield spark
        finally:
            spark.stop()


class _Stopped(SystemExit):
    """SIGTERM: the run was stopped, it did not fail."""


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    """End through the finally clauses: staged work is given up, the session is closed."""
    raise _Stopped(128 + signal.SIGTERM)


def _error(code: str, message: str, retriable: bool) -> dict[str, Any]:
    return {"code": code, "message": message, "retriable": retriable}


def _finish(path: Path | None, result: dict[str, Any]) -> None:
    if path is None:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        replace_json(path, result)


def _parser(operation: Operation) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=operation.name, description=operation.summary)
    made.add_argument("--params", default="{}", metavar="JSON", help="the operation's parameters; default: {}")
    made.add_argument("--result", type=Path, metavar="FILE", help="where the result goes; default: standard output")
    made.add_argument("--progress", type=Path, metavar="FILE", help="a file that is kept up with the progress")
    return made

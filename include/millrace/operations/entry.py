"""The process that runs one operation: arguments in, one result file out, a clean end on SIGTERM.

    python -m millrace.operations <operation> [--params JSON] [--result FILE] [--progress FILE]

The result file holds ``{"ok": true, "report": {...}}`` or ``{"ok": false, "error": {"code", "message", "retriable"}}``.
It is written last, in one piece. After SIGTERM it holds ``{"ok": true, "stopped": true, "report": {}}``. Without
``--result`` the result goes to standard output.

Exit codes: 0 for success, 1 for an error, 143 after SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from millrace.base.data_folder import prepare_data_folder, restrict_umask
from millrace.base.errors import MetaUnavailable, MillraceError
from millrace.base.extras import require_modules
from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.coord.machine.tables_place import reading_place
from millrace.operations.operation import Operation, OperationParams, OperationReport
from millrace.runtime.process_setup import lower_priority
from millrace.runtime.progress import Progress
from millrace.runtime.spark.slots import spark_slot
from millrace.storage.pins import TablePins

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SessionFactory: TypeAlias = "Callable[[], AbstractContextManager[SparkSession]]"
"""Creates the Spark session of a run, if one is needed."""


def main(operation: Operation, argv: Sequence[str] | None = None) -> int:
    """Run `operation` as the whole work of this process and return the exit code."""
    arguments = _parser(operation).parse_args(argv)
    restrict_umask()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        chosen = operation.params.parse(json.loads(arguments.params))
        report = run_in_process(operation, _settings(), chosen, Progress(arguments.progress))
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
        # An error without a code may come from the storage or from a concurrent writer, so a retry is worth its cost.
        _finish(arguments.result, {"ok": False, "error": _error(type(error).__name__, str(error), True)})
        return 1
    _finish(arguments.result, {"ok": True, "report": report.to_json()})
    return 0


def _settings() -> Settings:
    """Load the settings. In a cluster the tables may have moved while no process of this machine copied that."""
    settings = Settings.load()
    if not settings.meta_store:
        return settings
    try:
        with reading_place(settings) as read:
            read()
    except MetaUnavailable as error:
        logging.getLogger(__name__).warning("the tables are taken to be where this machine knows them: %s", error)
    return Settings.load()


def run_in_process(
    operation: Operation, settings: Settings, params: OperationParams, progress: Progress
) -> OperationReport:
    """Run `operation` in this process, with a Spark session if it needs one.

    A pin keeps the files of the table versions that it uses (millrace.storage.pins).

    Raises InvalidSettings if a library that it requires is missing.
    """
    require_modules(*operation.requires)
    prepare_data_folder(settings.data_dir)
    if operation.low_priority:
        lower_priority()
    with ExitStack() as stack:
        if not operation.needs_spark:
            stack.enter_context(TablePins(settings.pins_uri).pinned())
            return operation.load()(settings, params, progress)
        spark = stack.enter_context(spark_session(operation.name, settings, progress))
        stack.enter_context(TablePins(settings.pins_uri).pinned())  # not while it waits for its turn
        return operation.load()(spark, settings, params, progress)


@contextmanager
def spark_session(name: str, settings: Settings, progress: Progress) -> Iterator[SparkSession]:
    """Yield a Spark session for the operation `name`.

    Waits for a slot first: millrace.runtime.spark.slots limits how many sessions run at a time.
    """
    from millrace.runtime.spark.session import session

    with spark_slot(settings, name, progress):
        progress.update("starting Spark")
        spark = session(f"millrace-{name}", settings=settings)
        try:
            yield spark
        finally:
            spark.stop()


class _Stopped(SystemExit):
    """The run was stopped by SIGTERM. It did not fail."""


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    """Leave through the finally clauses, which discard staged work and close the session."""
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
    made.add_argument("--params", default="{}", metavar="JSON", help="the operation's parameters (default: {})")
    made.add_argument("--result", type=Path, metavar="FILE", help="file for the result (default: standard output)")
    made.add_argument("--progress", type=Path, metavar="FILE", help="file that the run updates with its progress")
    return made

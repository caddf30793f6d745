"""The Spark job around an operation: arguments in, one result file out, a clean end on SIGTERM.

    python jobs/<operation>.py [--params JSON] [--result FILE] [--progress FILE]

The result file holds ``{"ok": true, "report": {...}}`` or ``{"ok": false, "error": {"code", "message", "retriable"}}`` and is
written last, whole. Without ``--result`` it goes to standard output. Exit code 0, or 1 for an error; 143 after SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from millrace.data_folder import claim, private
from millrace.errors import MillraceError
from millrace.ops.operation import OperationParams, OperationReport, Progress, write_json
from millrace.ops.places import place
from millrace.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

P = TypeVar("P", bound=OperationParams)
SparkOperation = Callable[["SparkSession", Settings, P, Progress], OperationReport]
PlainOperation = Callable[[Settings, P, Progress], OperationReport]


def run_spark(
    name: str, params: type[P], operation: SparkOperation[P], *, doc: str | None, argv: Sequence[str] | None = None
) -> int:
    """Run an operation that needs a Spark session; the exit code."""

    def with_session(settings: Settings, chosen: P, progress: Progress) -> OperationReport:
        with spark_session(name, settings, progress) as spark:
            return operation(spark, settings, chosen, progress)

    return run_plain(params, with_session, doc=doc, argv=argv)


@contextmanager
def spark_session(name: str, settings: Settings, progress: Progress) -> Iterator[SparkSession]:
    """A session for the operation `name`, in its turn: there are only so many at once (millrace.ops.places)."""
    from millrace.spark import session

    with place(settings, name, progress):
        progress.say("starting Spark")
        spark = session(f"millrace-{name}", settings=settings)
        try:
            yield spark
        finally:
            spark.stop()


def run_plain(
    params: type[P], operation: PlainOperation[P], *, doc: str | None, argv: Sequence[str] | None = None
) -> int:
    """Run an operation without Spark; the exit code."""
    arguments = _parser(doc).parse_args(argv)
    private()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        chosen = params.parse(json.loads(arguments.params))
        settings = Settings.load()
        claim(settings.data_dir)
        report = operation(settings, chosen, Progress(arguments.progress))
    except (MillraceError, json.JSONDecodeError) as error:
        logging.getLogger(__name__).exception("failed")
        code = error.code if isinstance(error, MillraceError) else "INVALID_ARGUMENT"
        retriable = isinstance(error, MillraceError) and error.retriable
        _finish(arguments.result, {"ok": False, "error": _error(code, str(error), retriable)})
        return 1
    except Exception as error:
        logging.getLogger(__name__).exception("failed")
        # What has no type of ours may be the storage, or another writer: a retry is worth its cost.
        _finish(arguments.result, {"ok": False, "error": _error(type(error).__name__, str(error), True)})
        return 1
    _finish(arguments.result, {"ok": True, "report": report.to_json()})
    return 0


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    """End through the finally clauses: staged work is given up, the session is closed."""
    sys.exit(128 + signal.SIGTERM)


def _error(code: str, message: str, retriable: bool) -> dict[str, Any]:
    return {"code": code, "message": message, "retriable": retriable}


def _finish(path: Path | None, result: dict[str, Any]) -> None:
    if path is None:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        write_json(path, result)


def _parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--params", default="{}", metavar="JSON", help="the operation's parameters; default: {}")
    made.add_argument("--result", type=Path, metavar="FILE", help="where the result goes; default: standard output")
    made.add_argument("--progress", type=Path, metavar="FILE", help="a file that is kept up with the progress")
    return made

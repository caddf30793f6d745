"""A worker's log: one JSON line per event, with the flow's name, in a file that rotates by pipeline-config.yaml.

``developMode`` writes plain text instead, including debug messages. maxSize is in MB of a file, maxBackups counts
files, maxAge is in days.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

from millrace.base.correlation import REQUEST_ID
from millrace.flows.declare.configuration import Log

FILE: Final = "pipeline.log"
_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}
_DAY: Final = 86_400


class JsonLine(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, pipeline, run, message, and the stack of an error.

    `run` is the same in all lines of one worker's life, `request` in all lines for one request.
    """

    def __init__(self, *, flow: str, run: str) -> None:
        super().__init__()
        self._about = {
            "pipeline": flow,
            "run": run,
        }  # earlier builds used the key "pipeline", and log readers rely on it

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._about,
            **({"request": request} if (request := REQUEST_ID.get()) else {}),
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _Rotated(RotatingFileHandler):
    """Rotates files at `log.maxSize`, removing files that are too old, and with `maxBackups` 0 all rotated files."""

    def __init__(self, path: Path, log: Log) -> None:
        size = log.maxSize * 1_000_000
        super().__init__(path, maxBytes=size, backupCount=max(1, log.maxBackups), encoding="utf-8", delay=True)
        self._path, self._log = path, log

    def doRollover(self) -> None:
        super().doRollover()
        forget(self._path, days=self._log.maxAge)
        if not self._log.maxBackups:  # the base class would never rotate
            self._path.with_name(f"{self._path.name}.1").unlink(missing_ok=True)


def begin_log(folder: Path, log: Log, *, flow: str, run: str, file: str = FILE) -> logging.Handler:
    """Write this process's log to `file` of `folder`; remove files older than maxAge, now and at each rotation."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file
    forget(path, days=log.maxAge)
    handler = _Rotated(path, log)
    if log.developMode:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    else:
        handler.setFormatter(JsonLine(flow=flow, run=run))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.DEBUG if log.developMode else _LEVELS[log.logLevel])
    for name in ("opensearch", "urllib3", "kafka"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are raised with their reason
    return handler


def new_run() -> str:
    """Return a new name for this run of the process."""
    return uuid.uuid4().hex[:12]


def forget(path: Path, *, days: int) -> None:
    """Remove rotated files of `path` that are older than `days`; 0 removes none."""
    if days:
        for old in path.parent.glob(f"{path.name}.*"):
            if time.time() - old.stat().st_mtime > days * _DAY:
                old.unlink(missing_ok=True)

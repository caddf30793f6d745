"""A worker's log: one JSON line per event, with the flow's name, in a file that rotates by pipeline-config.yaml.

``developMode`` writes text for people instead, including debug messages. maxSize is in MB of a file, maxBackups counts
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
    """One object a line: time (UTC), level, logger, pipeline, run, message, and the error's stack where there is one.

    `run` is the same in all lines of one worker's life, `request` in all lines for one request.
    """

    def __init__(self, *, flow: str, run: str) -> None:
        super().__init__()
        self._about = {"pipeline": flow, "run": run}  # the key of earlier builds, which readers of logs know

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
    """Rotates files of `log.maxSize`; with each what is too old goes, and of `maxBackups` 0 what was rotated."""

    def __init__(self, path: Path, log: Log) -> None:
        size = log.maxSize * 1_000_000
        super().__init__(path, maxBytes=size, backupCount=max(1, log.maxBackups), encoding="utf-8", delay=True)
        self._path, self._log = path, log

    def doRollover(self) -> None:
        super().doRollover()
        forget(self._path, days=self._log.maxAge)
        if not self._log.maxBackups:  # its base would never rotate
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
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what fails is raised, with its reason
    return handler


def new_run() -> str:
    """A name for this process's life."""
    return uuid.uuid4().hex[:12]


def forget(path: Path, *, days: int) -> None:
    """Remove rotated files of `path` that are older than so many days; 0: none."""
    if days:
        for old in path.parent.glob(f"{path.name}.*"):
            if time.time() - old.stat().st_mtime > days * _DAY:
                old.unlink(missing_ok=True)

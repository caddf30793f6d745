"""How Spark's planner and tasks reach a deployment's log: brokers directly, the embedded log through its server.

A log that was switched to or from the embedded backend is reached through the server too. The next call notices a
switch.
"""

from __future__ import annotations

import threading
from functools import lru_cache

from millrace.base.log_backends import backend_of, is_in_data_folder
from millrace.base.settings import Settings
from millrace.log.generations.generation_file import GenerationFile
from millrace.log.generations.service import open_deployment_log
from millrace.log.protocol import LogService
from millrace.rpc.launch import launch_of
from millrace.rpc.remote_log import RemoteLogService


class LogConnection:
    """The log service of a deployment, opened on first use, and reopened after a switch that changes how to reach it.

    If no server runs, it is started as the settings say, with the append host, so that clients find both.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._service: LogService | None = None
        self._through_server = False
        self._lock = threading.Lock()

    def service(self) -> LogService:
        """Return the shared connection. It reconnects by itself. Costs one stat call."""
        with self._lock:
            log, folder = self._settings.log, self._settings.log_path
            through = is_in_data_folder(log) or any(
                backend_of(item.url).local for item in GenerationFile(folder, log).generations.items
            )
            if self._service is not None and through != self._through_server:
                self._close()
            if self._service is None:
                self._through_server = through
                if through:
                    self._service = RemoteLogService.connect(folder, launch=launch_of(self._settings))
                else:
                    self._service = open_deployment_log(folder, log, embedded=False)
            return self._service

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._service is not None:
            self._service.close()
            self._service = None


@lru_cache(maxsize=4)
def worker_connection(settings: Settings) -> LogConnection:
    """Return the connection that all tasks of a Python worker share."""
    return LogConnection(settings)

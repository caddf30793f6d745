"""How planner and tasks of Spark reach a deployment's log: brokers directly, the embedded log through its server.

A log that was switched from or to the embedded one is reached through the server, too; a switch is seen at the next look.
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
    """The log service of a deployment, opened when first asked for, and anew where a switch has it reached in another way.

    Where no server runs, it is started as the settings say, with the append host: clients must find both, whoever came first.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._service: LogService | None = None
        self._through_server = False
        self._lock = threading.Lock()

    def service(self) -> LogService:
        """One connection for all callers, one after the other; it mends itself when it breaks. A look at one file's stat."""
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
        """Idempotent."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._service is not None:
            self._service.close()
            self._service = None


@lru_cache(maxsize=4)
def worker_connection(settings: Settings) -> LogConnection:
    """That of all tasks which a Python worker runs."""
    return LogConnection(settings)

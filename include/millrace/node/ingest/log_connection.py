"""Connections of Spark's planner and tasks to a deployment's log: to brokers directly, to the embedded log by its
server.

A log that was switched to or from the embedded backend is reached through the server too. The next call notices a
switch.

Executors that do not share the data folder get the list of backends and tombstones with each plan: it decides what a
task reads.
"""

from __future__ import annotations

import threading
from functools import lru_cache

from millrace.base.errors import InvalidSettings
from millrace.base.files import replace_file
from millrace.base.log_backends import backend_of, is_in_data_folder
from millrace.base.settings import Settings
from millrace.log.generations.generation_file import FILE as GENERATIONS_FILE
from millrace.log.generations.generation_file import GenerationFile
from millrace.log.generations.service import open_deployment_log
from millrace.log.generations.shared_list import shared_list
from millrace.log.protocol import LogService
from millrace.rpc.launch import launch_of
from millrace.rpc.remote_log import RemoteLogService


class LogConnection:
    """The log service of a deployment, opened on first use, and reopened after a switch that changes how to reach it.

    If no server runs, it is started as the settings say, with the append host, so that clients find both.
    """

    def __init__(self, settings: Settings, *, in_task: bool = False) -> None:
        """`in_task`: the plan brought the list of backends, so nobody asks the tables' store for it."""
        self._settings = settings
        self._shared = None if in_task else shared_list(settings)
        self._service: LogService | None = None
        self._through_server = False
        self._lock = threading.Lock()

    def service(self) -> LogService:
        """Return the shared connection. It reconnects by itself. Costs one stat call."""
        with self._lock:
            log, folder = self._settings.log, self._settings.log_path
            if self._service is None and self._shared is not None:
                GenerationFile(folder, log, shared=self._shared)
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


def shipped_generations(settings: Settings) -> bytes:
    """Return the list of the log's backends for tasks that do not share the data folder; empty if they do."""
    if not settings.spark_environment:
        return b""
    try:
        return (settings.log_path / GENERATIONS_FILE).read_bytes()
    except FileNotFoundError:
        return b""


def service_of_task(settings: Settings, generations: bytes) -> LogService:
    """Return the log service that all tasks of a Python worker share, with the list that came with the plan."""
    path = settings.log_path / GENERATIONS_FILE
    if generations and not (path.exists() and path.read_bytes() == generations):
        replace_file(path, generations)
    return _worker_connection(settings).service()


@lru_cache(maxsize=4)
def _worker_connection(settings: Settings) -> LogConnection:
    return LogConnection(settings, in_task=True)


def require_reachable_log(settings: Settings) -> None:
    """Raise InvalidSettings if executors cannot reach the deployment's log or tables."""
    if not settings.spark_environment:
        return
    if "://" not in settings.tables:
        raise InvalidSettings(
            "executors with an environment of their own (MILLRACE_SPARK_ENVIRONMENT) share no folder with this machine:"
            " set MILLRACE_TABLES to an object store"
        )
    urls = [item.url for item in GenerationFile(settings.log_path, settings.log).generations.items]
    if is_in_data_folder(settings.log) or any(backend_of(url).local for url in urls):
        raise InvalidSettings(
            "executors with an environment of their own (MILLRACE_SPARK_ENVIRONMENT) cannot read an embedded log: set"
            " MILLRACE_LOG to a broker, or move the log to one with `millrace log switch`"
        )

"""The way to Millrace for tasks of one's own: its settings, a client, the launcher of jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.client.client import Client
    from millrace.runtime.launch.launcher import Launcher


class MillraceHook(BaseHook):
    """Millrace by the settings of this worker (``MILLRACE_*``, ``MILLRACE_CONFIG``), or by another data folder.

        with MillraceHook().client() as client:
            rows = client.read("flights")

    `data_dir` goes over the setting; the rest stays.
    """

    hook_name = "Millrace"

    def __init__(self, *, data_dir: str | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._data_dir = data_dir

    @property
    def settings(self) -> Settings:
        """The settings. Raises InvalidSettings."""
        return load_settings(self._data_dir)

    def client(self, *, start: bool = True) -> Client:
        """A client, to be used as a context manager; `start` lets it start the log's server. Raises LogUnavailable."""
        from millrace.client.client import Client

        return Client.connect(self.settings, start=start)

    def launcher(self) -> Launcher:
        """The launcher of jobs on this data folder."""
        from millrace.runtime.launch.launcher import Launcher

        return Launcher(self.settings)


def load_settings(data_dir: str | None = None) -> Settings:
    """The settings of this process, with `data_dir` over the one they name."""
    from millrace.base.settings import Settings

    found = Settings.load()
    return found if data_dir is None else replace(found, data_dir=Path(data_dir))

"""Access to Millrace for users' own tasks: its settings, a database, the launcher of jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.client.client import Client
    from millrace.client.database import Database
    from millrace.runtime.launch.launcher import Launcher


class MillraceHook(BaseHook):
    """Millrace by the settings of this worker (``MILLRACE_*``, ``MILLRACE_CONFIG``), or by another data folder.

        with MillraceHook().database() as db:
            rows = db["flights"].read()

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

    def database(self, *, start: bool = True) -> Database:
        """Connect to the deployment; close the database, or use it in a ``with`` block.

        With `start`, start the log server if none runs. Raises LogUnavailable.
        """
        from millrace.client.database import connect

        return connect(settings=self.settings, start=start)

    def client(self, *, start: bool = True) -> Client:
        """Deprecated: use :meth:`database`."""
        return self.database(start=start).client

    def launcher(self) -> Launcher:
        """Return the launcher of jobs on this data folder."""
        from millrace.runtime.launch.launcher import Launcher

        return Launcher(self.settings)


def load_settings(data_dir: str | None = None) -> Settings:
    """Return the settings of this process, with `data_dir` instead of theirs if given."""
    from millrace.base.settings import Settings

    found = Settings.load()
    return found if data_dir is None else replace(found, data_dir=Path(data_dir))

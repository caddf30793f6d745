"""`airflow standalone` with the auth manager that the configuration names, which Airflow's own command replaces by the simple one.

python -m millrace_airflow.standalone
"""

from __future__ import annotations

import os

from airflow.cli.commands.standalone_command import StandaloneCommand
from airflow.configuration import conf

_VARIABLE = "AIRFLOW__CORE__AUTH_MANAGER"


class Standalone(StandaloneCommand):
    """All of Airflow's components under one process."""

    def calculate_env(self) -> dict[str, str]:
        """What the components are started with."""
        chosen = conf.get("core", "auth_manager")
        env: dict[str, str] = super().calculate_env()  # type: ignore[no-untyped-call]
        env[_VARIABLE] = os.environ[_VARIABLE] = chosen
        return env


if __name__ == "__main__":
    Standalone().run()  # type: ignore[no-untyped-call]

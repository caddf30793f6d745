"""`airflow standalone` in order: what works through the web server is started once that listens, and with the auth
manager of the configuration.

python -m millrace_airflow.standalone

Airflow's own command starts all components at once, so that on a busy machine the scheduler runs overdue tasks that
cannot reach the web server yet and use their tries up; it goes on where a component has ended; and it replaces the auth
manager by the simple one.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Final

from airflow.cli.commands.standalone_command import StandaloneCommand, SubCommand
from airflow.configuration import conf
from airflow.utils.providers_configuration_loader import providers_configuration_loaded

from millrace_airflow.sqlite import enable_wal_mode

_VARIABLE = "AIRFLOW__CORE__AUTH_MANAGER"

FIRST_COMPONENTS: Final = ("api-server", "dag-processor")
LATER_COMPONENTS: Final = ("scheduler", "triggerer")
"""Components that call the web server, or start what does."""
POLL_SECONDS: Final = 0.1


class Standalone(StandaloneCommand):
    """All of Airflow's components under one process."""

    def calculate_env(self) -> dict[str, str]:
        """What the components are started with."""
        chosen = conf.get("core", "auth_manager")
        env: dict[str, str] = super().calculate_env()  # type: ignore[no-untyped-call]
        env[_VARIABLE] = os.environ[_VARIABLE] = chosen
        return env

    def initialize_database(self) -> None:
        """Make its tables, and let its readers and its writer go on beside each other."""
        super().initialize_database()  # type: ignore[no-untyped-call]
        enable_wal_mode(conf.get("database", "sql_alchemy_conn"))

    @providers_configuration_loaded
    def run(self) -> int:
        """Start the components in order and stay until SIGINT, or until one of them ends; the exit code."""
        logging.getLogger("").setLevel(logging.WARNING)
        env = self.calculate_env()
        self.find_user_info()  # type: ignore[no-untyped-call]
        self.initialize_database()
        try:
            self._start(FIRST_COMPONENTS, env)
            while not self._listens():
                if ended := self._ended():
                    return self._stop(f"{ended} ended before the web server listened")
                self._pause()
            self._start(LATER_COMPONENTS, env)
            while not (ended := self._ended()):
                self._pause()
            return self._stop(f"{ended} ended")
        except KeyboardInterrupt:
            self._stop("stopped")
            return 0

    def _start(self, names: tuple[str, ...], env: dict[str, str]) -> None:
        for name in names:
            self.print_output("standalone", f"starting {name}")
            self.subcommands[name] = SubCommand(self, name=name, command=[name], env=env)
            self.subcommands[name].start()

    def _listens(self) -> bool:
        host = conf.get("api", "host")
        host = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        try:
            with socket.create_connection((host, conf.getint("api", "port")), timeout=1.0):
                return True
        except OSError:
            return False

    def _ended(self) -> str:
        """The first component that has ended; empty: all run."""
        for name, each in self.subcommands.items():
            if each.process is not None and each.process.poll() is not None:
                return str(name)
        return ""

    def _pause(self) -> None:
        self.update_output()  # type: ignore[no-untyped-call]
        time.sleep(POLL_SECONDS)

    def _stop(self, why: str) -> int:
        """End the components; the exit code where one of them had ended by itself."""
        self.print_output("standalone", why)
        for each in self.subcommands.values():
            each.stop()
        for each in self.subcommands.values():
            each.join()
        self.update_output()  # type: ignore[no-untyped-call]
        return 1


if __name__ == "__main__":
    raise SystemExit(Standalone().run())  # type: ignore[no-untyped-call]

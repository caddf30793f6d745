"""`airflow standalone` in order: components that call the web server start once it listens.

    python -m millrace_airflow.standalone

Airflow's own command starts all components at once: on a busy machine the scheduler then runs overdue tasks, which
cannot reach the web server yet and use up their tries. It also continues when a component has ended, and replaces the
configured auth manager by the simple one. This command does neither.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from typing import Final

from airflow.cli.commands.standalone_command import StandaloneCommand, SubCommand
from airflow.configuration import conf
from airflow.utils.providers_configuration_loader import providers_configuration_loaded

from millrace.base.deadline import Deadline
from millrace.base.process import all_processes
from millrace.base.settings import Settings
from millrace.runtime.processes import send_signal, with_descendants
from millrace.runtime.supervisor import Fault, RestartBackoff, Supervisor
from millrace_airflow.sqlite import enable_wal_mode

_VARIABLE = "AIRFLOW__CORE__AUTH_MANAGER"

FIRST_COMPONENTS: Final = ("api-server", "dag-processor")
LATER_COMPONENTS: Final = ("scheduler", "triggerer")
"""Components that call the web server, or start processes that do."""
POLL_SECONDS: Final = 0.1


class Standalone(StandaloneCommand):
    """All of Airflow's components under one process."""

    stop_deadline = 30.0
    """How long the components may take to end after SIGINT, in seconds."""

    def calculate_env(self) -> dict[str, str]:
        """Return the environment of the components."""
        chosen = conf.get("core", "auth_manager")
        env: dict[str, str] = super().calculate_env()  # type: ignore[no-untyped-call]
        env[_VARIABLE] = os.environ[_VARIABLE] = chosen
        return env

    def initialize_database(self) -> None:
        """Create the tables, and let readers and the writer run concurrently."""
        super().initialize_database()  # type: ignore[no-untyped-call]
        enable_wal_mode(conf.get("database", "sql_alchemy_conn"))

    @providers_configuration_loaded
    def run(self) -> int:
        """Start the components in order and stay until SIGINT, or until one of them ends; return the exit code."""
        logging.getLogger("").setLevel(logging.WARNING)
        self._env = self.calculate_env()
        self.find_user_info()  # type: ignore[no-untyped-call]
        self.initialize_database()
        supervisor = Supervisor(
            self._start_first,
            backoff=RestartBackoff(0.0, 0.0),  # no restarts here: the installation's supervisor restarts all of them
            stop_deadline=self.stop_deadline,
            poll=POLL_SECONDS,
            on_fault=lambda fault: self.print_output("standalone", str(fault)),
        )
        try:
            supervisor.run(self._pause)
        except KeyboardInterrupt:
            self.stop(deadline=self.stop_deadline)  # SIGINT may have come while the components were starting
            self.print_output("standalone", "stopped")
            return 0
        return 1

    def _start_first(self) -> Standalone:
        self._start(FIRST_COMPONENTS)
        return self

    def fault(self) -> Fault | None:
        """Return the fault of a component that ended, if any.

        Start the later components once the web server listens.
        """
        ended = next((name for name, each in self.subcommands.items() if _has_ended(each)), "")
        complete = LATER_COMPONENTS[0] in self.subcommands
        if ended:
            return Fault(f"{ended} ended" + ("" if complete else " before the web server listened"), restart=False)
        if not complete and self._listens():
            self._start(LATER_COMPONENTS)
        return None

    def stop(self, *, deadline: float) -> None:
        """End all components: SIGTERM, and SIGKILL to their trees after `deadline` seconds."""
        components = list(self.subcommands.values())
        for each in components:
            each.stop()
        end = Deadline.after(deadline)
        for each in components:
            each.join(end.remaining())
        left = {each.process.pid for each in components if each.process is not None and each.process.poll() is None}
        everything = all_processes()
        for pid in with_descendants(left, everything):
            send_signal(everything[pid], signal.SIGKILL)
        self.update_output()  # type: ignore[no-untyped-call]

    def _start(self, names: tuple[str, ...]) -> None:
        for name in names:
            self.print_output("standalone", f"starting {name}")
            self.subcommands[name] = SubCommand(self, name=name, command=[name], env=self._env)
            self.subcommands[name].start()

    def _listens(self) -> bool:
        host = conf.get("api", "host")
        host = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        try:
            with socket.create_connection((host, conf.getint("api", "port")), timeout=1.0):
                return True
        except OSError:
            return False

    def _pause(self, seconds: float) -> bool:
        """Print the components' output and wait. Never ends the supervision; only SIGINT does."""
        self.update_output()  # type: ignore[no-untyped-call]
        time.sleep(seconds)
        return False


def _has_ended(component: SubCommand) -> bool:
    return component.process is not None and component.process.poll() is not None


if __name__ == "__main__":
    command = Standalone()  # type: ignore[no-untyped-call]
    command.stop_deadline = Settings.load().stop_deadline
    raise SystemExit(command.run())

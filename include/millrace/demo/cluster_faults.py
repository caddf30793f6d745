"""``make run NODES=3``: the demo's load on a cluster whose nodes are killed, suspended, drained and added meanwhile.

The first node is a Spark driver; the others run without Spark. The coordinator, and each server that the demo started
(brokers, meta store, object store, Spark's master and workers), is killed and started again. Each fault starts when the
cluster has recovered from the previous one. At the end the demo prints every move and how long its PChannel was down,
and the summary checks every row as it does with one node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from rich.console import Console
from rich.table import Table

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, MillraceError
from millrace.base.settings import Settings
from millrace.brokers.server import LocalServer
from millrace.coord import control
from millrace.coord.session import moving_roles
from millrace.demo.cluster import POLL_SECONDS, LocalCluster, MoveObserver
from millrace.demo.summary import LoadMonitor

START_DEADLINE: Final = 300.0
"""Spark starts beside all other processes, on two cores."""
MIN_NODES: Final = 3
MOVE_DEADLINE: Final = 120.0
FAULT_INTERVAL_SECONDS: Final = 3.0
"""Seconds of normal operation between two faults."""

_Server = TypeVar("_Server", bound=LocalServer)


class DemoServers:
    """The servers that the demo started, in order."""

    def __init__(self, starter: ThreadPoolExecutor) -> None:
        """`starter` has one thread, which outlives the servers: a server dies with the thread that started it."""
        self._starter = starter
        self.all: list[LocalServer] = []

    def added(self, server: _Server) -> _Server:
        """Add a server, and return it."""
        self.all.append(server)
        return server

    def restart(self, server: LocalServer) -> None:
        """Kill a server, and start it again over its data. Raises JobFailed, DeadlineExceeded."""
        server.kill()
        self._starter.submit(server.start).result()


@contextmanager
def demo_servers() -> Iterator[DemoServers]:
    """Yield a list of servers that is empty at first. The servers must stop before the block ends."""
    with ThreadPoolExecutor(1, thread_name_prefix="servers") as starter:
        yield DemoServers(starter)


def with_short_intervals(settings: Settings) -> Settings:
    """Shorten the intervals that still have their defaults, so that the demo shows in a minute what takes several.

    Appends are tried for longer: on a busy machine, a broker that was killed needs a minute to start.
    """
    usual = Settings()
    silent, interval, attempts = settings.session_seconds, settings.balance_interval, settings.append_attempts
    return replace(
        settings,
        session_seconds=5.0 if silent == usual.session_seconds else silent,
        balance_interval=5.0 if interval == usual.balance_interval else interval,
        append_attempts=60 if attempts == usual.append_attempts else attempts,
        # Under load on a few cores, a moving PChannel is seldom up to date to the second.
        balance_lag=30.0 if settings.balance_lag == usual.balance_lag else settings.balance_lag,
    )


class FaultInjector(threading.Thread):
    """A cluster under load, and the faults of its nodes. The demo treats it as the streaming job."""

    def __init__(
        self,
        settings: Settings,
        cluster: LocalCluster,
        nodes: int,
        job: Path,
        servers: DemoServers,
        console: Console,
    ) -> None:
        super().__init__(name="faults", daemon=True)
        self.log_file = settings.run_path
        self._settings = settings
        self._cluster = cluster
        self._nodes = nodes
        self._job = job
        self._servers = servers
        self._console = console
        self._pchannels = 0
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self._roles = moving_roles(settings.log)
        self.moves = {role: MoveObserver(settings, cluster.store, role=role) for role in self._roles}

    def start_nodes(self, watch: LoadMonitor, *, pchannels: int) -> None:
        """Start the coordinator and the nodes, and wait until they share all PChannels."""
        cluster, self._pchannels = self._cluster, pchannels
        cluster.coordinator()
        cluster.node("n1", job=self._job)
        names = [f"n{number}" for number in range(2, self._nodes + 1)]
        for name in names:
            cluster.node(name)
        watch.wait_until(lambda: set(self._owners().values()) == {"n1", *names}, self, START_DEADLINE)
        for moves in self.moves.values():
            moves.start()
        self._say(f"{pchannels} PChannels on n1 (Spark), {', '.join(names)}")

    def _owners(self) -> dict[str, str]:
        """Return the owner of each PChannel and role; empty while any of them has no owner."""
        try:
            found = {
                f"{name} ({role})": owner for role in self._roles for name, owner in self._cluster.owners(role).items()
            }
        except MillraceError:
            return {}
        return found if len(found) == self._pchannels * len(self._roles) else {}

    def run(self) -> None:
        try:
            faults: list[Callable[[], None]] = [
                partial(self._kill, f"n{self._nodes}"),
                partial(self._suspend, "n2"),
                self._restart_coordinator,
                # The tasks of the only Spark driver shall run on the cluster's workers to the end.
                self._restart_driver if self._settings.spark_master else self._drain,
                self._add,
                *(partial(self._restart, server) for server in self._servers.all),
            ]
            for fault in faults:
                if self._ended.wait(FAULT_INTERVAL_SECONDS):
                    return
                fault()
        except Exception as error:
            self._failure = error

    def _kill(self, name: str) -> None:
        self._say(f"{name} is killed")
        self._cluster.jobs.pop(name).kill()
        self._owned_without(name)

    def _suspend(self, name: str) -> None:
        session = self._cluster.session(name)
        self._say(f"{name} is suspended")
        self._cluster.suspend(name)
        self._owned_without(name)
        self._say(f"{name} is woken")
        self._cluster.resume(name)
        self._until(lambda: self._cluster.session(name) not in ("", session) and name in self._owners().values())

    def _restart_coordinator(self) -> None:
        self._say("the coordinator is killed, and started again")
        self._cluster.jobs.pop("c1").kill()
        self._cluster.coordinator("c1")

    def _restart_driver(self) -> None:
        self._say("n1, the Spark driver, is killed, and started again")
        self._cluster.jobs.pop("n1").kill()
        self._owned_without("n1")
        self._cluster.node("n1", job=self._job)
        self._until(lambda: "n1" in self._owners().values(), START_DEADLINE)

    def _restart(self, server: LocalServer) -> None:
        self._say(f"{server.data.name} is killed, and started again")
        self._servers.restart(server)
        nodes = {name for name in self._cluster.jobs if name.startswith("n")}
        self._until(lambda: set(self._owners().values()) == nodes)

    def _drain(self) -> None:
        self._say("drained n1, then stopped it")
        control.drain(self._cluster.store, "n1")
        self._owned_without("n1")
        self._cluster.jobs.pop("n1").stop(deadline=self._settings.stop_deadline)

    def _add(self) -> None:
        name = f"n{self._nodes + 1}"
        self._say(f"{name} is added")
        self._cluster.node(name)
        self._until(lambda: name in self._owners().values())

    def _owned_without(self, name: str) -> None:
        self._until(lambda: bool(owners := self._owners()) and name not in owners.values())

    def _until(self, what: Callable[[], bool], seconds: float = MOVE_DEADLINE) -> None:
        end = Deadline.after(seconds)
        while not self._ended.is_set() and not what():
            if not end.pause(POLL_SECONDS):
                raise DeadlineExceeded(
                    f"the cluster did not recover within {seconds:.0f} s\n{self._cluster.log_tails()}"
                )

    def _say(self, words: str) -> None:
        self._console.print(f"  [bold]{time.strftime('%H:%M:%S')}[/] {words}")

    # -- as the demo's streaming job ----------------------------------------------------------------------------------

    def running(self) -> bool:
        return self._failure is None and all(job.running() for job in list(self._cluster.jobs.values()))

    def tail(self) -> str:
        return f"{self._failure or ''}\n{self._cluster.log_tails()}"

    def over(self) -> bool:
        """Return whether all faults are over, or one was not survived."""
        return not self.is_alive()

    def wait_finished(self) -> None:
        """Wait until the cluster has recovered from the last fault. Raises the error of a fault that it did not."""
        self.join(MOVE_DEADLINE)
        if self._failure is not None:
            raise self._failure
        for moves in self.moves.values():
            moves.stop()

    def stop(self) -> None:
        """Inject no further faults, and observe no further moves. Idempotent."""
        self._ended.set()
        if self.is_alive():
            self.join(MOVE_DEADLINE)
        for moves in self.moves.values():
            moves.end()

    def print_moves(self) -> None:
        """Print how each PChannel moved."""
        columns = ("PChannel", "Role", "Term", "Why", "From", "To", "Handed over", "Downtime")
        table = Table(*columns, title="Moves", title_justify="left")
        for column in (2, 6, 7):
            table.columns[column].justify = "right"
        for role, moves in self.moves.items():
            for move in moves.observed():
                downtime = "-" if move.downtime_seconds is None else f"{move.downtime_seconds:.2f} s"
                handed = f"{move.assigned_at - move.decided_at:.2f} s"
                table.add_row(move.pchannel, role, str(move.term), move.cause, move.source, move.to, handed, downtime)
        self._console.print(table)
        self._console.print(
            "Handover: from the decision until the new owner is ready; producers wait that long if appends moved."
            " Downtime: between two commits to the WAL, while rows arrive."
        )


@contextmanager
def faulty_cluster(
    settings: Settings, nodes: int, job: Path, servers: DemoServers, console: Console
) -> Iterator[FaultInjector]:
    """Yield the cluster; stop all of its processes at the end."""
    with LocalCluster(settings) as cluster:
        made = FaultInjector(settings, cluster, nodes, job, servers, console)
        try:
            yield made
        finally:
            made.stop()

"""The faults of the demo's cluster: what it reports of moves, and how its servers are restarted."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from rich.console import Console

from millrace.base.settings import Settings
from millrace.brokers.server import LocalServer
from millrace.coord.channels.record import ChannelRecord
from millrace.coord.clock import SystemClock
from millrace.coord.session import INGEST
from millrace.coord.store_factory import open_cluster_store
from millrace.demo.cluster import MoveObserver
from millrace.demo.cluster_faults import demo_servers, faulty_cluster, with_short_intervals


def test_a_move_lasts_from_its_decision_on_and_its_downtime_is_between_two_commits(settings: Settings) -> None:
    with open_cluster_store(settings, SystemClock()) as store:
        moves = MoveObserver(settings, store)
        record = ChannelRecord("dml_0", INGEST).begin_assignment("n1@1", "", "place")
        moves._saw(record, 1.0)
        moves._saw(record.complete_assignment(), 2.0)
        assert list(moves.observed()) == [], "the first owner took it from nobody"
        lost = record.complete_assignment().mark_unavailable("lost")
        moves._saw(lost, 10.0)
        moves._saw(lost.begin_assignment("n2@2", "", "lost"), 10.5)
        moves._saw(lost.begin_assignment("n2@2", "", "lost").complete_assignment(), 11.0)
        moves._commits["dml_0"] = [5.0, 8.0, 11.25, 12.0]
        (move,) = moves.observed()
        assert (move.source, move.to, move.cause, move.term) == ("n1", "n2", "lost", 2)
        assert (move.decided_at, move.assigned_at, move.downtime_seconds) == (10.0, 11.0, 3.25)
        assert not Path(settings.wal_uri).exists()


def test_a_demo_with_faults_shortens_what_nobody_set_and_its_producers_outlast_a_slow_restart() -> None:
    found = with_short_intervals(Settings())
    assert found.session_seconds < Settings().session_seconds
    assert found.append_attempts * found.append_retry_delay >= 60
    assert with_short_intervals(Settings(append_attempts=2)).append_attempts == 2


def test_nothing_is_observed_when_the_store_of_a_demo_is_closed(settings: Settings) -> None:
    with (
        demo_servers() as servers,
        faulty_cluster(settings, 3, Path("job"), servers, Console()) as faults,
    ):
        for moves in faults.moves.values():
            moves.start()
    assert not any(moves.is_alive() for moves in faults.moves.values())


class _FileServer(LocalServer):
    port_names = ("client",)
    heap = ""

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def prepare(self) -> list[str]:
        return [sys.executable, "-m", "http.server", "--bind", self.host, str(self.port["client"])]


def test_a_restarted_server_outlives_the_thread_that_asked_for_it(tmp_path: Path, settings: Settings) -> None:
    with demo_servers() as servers, servers.added(_FileServer(tmp_path, settings=settings)) as server:
        before, ports = server.pid, server.port
        asking = threading.Thread(target=servers.restart, args=(server,))
        asking.start()
        asking.join(30)
        assert (server.port, servers.all) == (ports, [server])
        assert server.pid != before
        time.sleep(0.2)  # the kernel kills a server with the thread that started it
        assert server.running()
        assert server.ready()
    assert not server.running()

"""What the demo says of moves: how long each took, and how long its PChannel stood still."""

from __future__ import annotations

from pathlib import Path

from millrace.base.settings import Settings
from millrace.coord.channels.record import ChannelRecord
from millrace.coord.clock import SystemClock
from millrace.coord.session import INGEST
from millrace.coord.store_factory import open_cluster_store
from millrace.demo.cluster import MoveObserver


def test_a_move_lasts_from_its_decision_on_and_stands_still_between_two_commits(settings: Settings) -> None:
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

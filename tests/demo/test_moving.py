"""What the demo says of moves: how long each took, and how long its PChannel stood still."""

from __future__ import annotations

from pathlib import Path

from millrace.base.settings import Settings
from millrace.coord.channels.record import ChannelRecord
from millrace.coord.clock import SystemClock
from millrace.coord.opening import open_store
from millrace.coord.session import INGEST
from millrace.demo.cluster import Moves


def test_a_move_lasts_from_its_decision_on_and_stands_still_between_two_commits(settings: Settings) -> None:
    with open_store(settings, SystemClock()) as store:
        moves = Moves(settings, store)
        record = ChannelRecord("dml_0", INGEST).assigning("n1@1", "", "place")
        moves._saw(record, 1.0)
        moves._saw(record.assigned(), 2.0)
        assert list(moves.found()) == [], "the first owner took it from nobody"
        lost = record.assigned().unavailable("lost")
        moves._saw(lost, 10.0)
        moves._saw(lost.assigning("n2@2", "", "lost"), 10.5)
        moves._saw(lost.assigning("n2@2", "", "lost").assigned(), 11.0)
        moves._commits["dml_0"] = [5.0, 8.0, 11.25, 12.0]
        (move,) = moves.found()
        assert (move.source, move.to, move.cause, move.term) == ("n1", "n2", "lost", 2)
        assert (move.began, move.ended, move.stood) == (10.0, 11.0, 3.25)
        assert not Path(settings.wal_uri).exists()

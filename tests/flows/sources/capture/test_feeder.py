"""A feeder goes on after whatever ends its engine or its spool, and says why it waits."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.base.errors import CaptureEnded
from millrace.base.settings import Settings
from millrace.flows.sources.capture import feeder
from millrace.flows.sources.capture.engine import Batch, Event
from millrace.flows.sources.capture.spool import Spool
from tests.waiting import until


@pytest.mark.parametrize("fault", [CaptureEnded("gone"), OSError("no space"), sqlite3.OperationalError("disk full")])
def test_a_fault_of_any_kind_is_noted_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    started: list[Any] = []

    def start(*given: Any, **more: Any) -> Any:
        started.append(more)
        raise fault

    monkeypatch.setattr(feeder, "Engine", start)
    monkeypatch.setattr(feeder, "_FIRST_PAUSE", 0.01)
    settings = Settings(data_dir=tmp_path / "data")
    with feeder.Feeder(settings, tmp_path / "spool", tables=["d.t"], properties={}, max_bytes=1):
        until(lambda: len(started) > 2, "it is tried again", seconds=10)
    with Spool(tmp_path / "spool") as spool:
        assert spool.standing().error == str(fault)


def test_rows_that_are_read_beside_the_changes_keep_the_name_of_the_last_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded tick is found by it, also if nothing is written meanwhile."""
    scanned = {"scanned_collection": "d.t", "status": "SUCCEEDED"}
    change = {"t": "d.t", "k": {"id": 1}}
    batches = [
        [{"o": "notification", "n": "Initial Snapshot: COMPLETED"}],
        [{"o": "BEGIN", "g": "0-1-7"}, {"o": "c", "g": "0-1-7", **change}, {"o": "END", "g": "0-1-7"}],
        [{"o": "r", **change}, {"o": "notification", "n": "Incremental Snapshot: TABLE_SCAN_COMPLETED", "a": scanned}],
    ]

    class Scripted:
        pid = 1

        def __init__(self, *given: Any, **more: Any) -> None:
            """Each start continues the script."""

        def read(self) -> Batch:
            if not batches:
                raise CaptureEnded("no more")
            lines = [msgspec.json.encode(each | {"f": {"pos": len(batches)}}) for each in batches.pop(0)]
            return Batch(lines, [msgspec.json.decode(each, type=Event) for each in lines])

        def acknowledge(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(feeder, "Engine", Scripted)
    monkeypatch.setattr(feeder, "_FIRST_PAUSE", 0.01)
    with Spool(tmp_path / "spool") as spool:
        settings = Settings(data_dir=tmp_path)
        with feeder.Feeder(settings, tmp_path / "spool", tables=["d.t"], properties={}, max_bytes=1 << 20):
            until(lambda: spool.standing().next == 2, "all is read", seconds=10)
        first, last = spool.mark(0, 1), spool.mark(1, 2)
    assert first is not None
    assert last is not None
    assert (first.source, last.source, last.whole) == ("0-1-7", "0-1-7", True)

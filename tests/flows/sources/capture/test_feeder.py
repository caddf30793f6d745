"""A feeder goes on after whatever ends its engine or its spool, says why it waits, and stops for no lack of room."""

from __future__ import annotations

import json
import queue
import sqlite3
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.base.errors import CaptureEnded, CaptureLost, InvalidArgument, LogUnavailable, StreamBusy
from millrace.base.settings import Settings
from millrace.flows.records import is_truncation
from millrace.flows.sources.capture import feeder
from millrace.flows.sources.capture.engine import Batch, Event, History
from millrace.flows.sources.capture.lane import CapturedRows, CapturedTables
from millrace.flows.sources.capture.spool import Mark, Spool
from millrace.flows.sources.source import Limits
from tests.waiting import until

DONE = {"o": "notification", "n": "Initial Snapshot: COMPLETED", "p": {}, "f": {"pos": 1}}


class Script:
    """The engine's side of the frames, written by a test: batches, or what ends it; then it waits to be closed."""

    def __init__(self, *frames: Any) -> None:
        self.frames = list(frames)
        self.starts: list[dict[str, Any]] = []
        self.acknowledged = 0
        self.signals: list[Mapping[str, Any]] = []

    def __call__(self, settings: Settings, properties: Mapping[str, str], **more: Any) -> Script:
        self.starts.append({"properties": properties, **more})
        self._closed: queue.SimpleQueue[None] = queue.SimpleQueue()
        return self

    pid = 1

    def read(self) -> Any:
        if not self.frames:
            self._closed.get()
            raise CaptureEnded("closed")
        frame = self.frames.pop(0)
        if isinstance(frame, Exception):
            raise frame
        return frame

    def acknowledge(self) -> None:
        self.acknowledged += 1

    def signal(self, kind: str, data: Mapping[str, Any]) -> None:
        self.signals.append(data)

    def close(self) -> None:
        self._closed.put(None)


def batch(*events: Mapping[str, Any]) -> Batch:
    lines = [json.dumps(each).encode() for each in events]
    return Batch(lines, [msgspec.json.decode(each, type=Event) for each in lines])


def change(number: int, *, table: str = "d.t", text: str = "", **more: Any) -> dict[str, Any]:
    row = {"id": number, "text": text}
    return {"t": table, "o": "c", "k": {"id": number}, "a": row, "m": 1, "p": {}, "f": {"pos": number}, **more}


def end(number: int) -> dict[str, Any]:
    return {"o": "END", "g": f"0-1-{number}", "m": 1, "p": {}, "f": {"pos": number, "transaction_id": None}}


class Fed:
    """A feeder of a script, with its spool."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, script: Any) -> None:
        patch.setattr(feeder, "Engine", script)
        patch.setattr(feeder, "_FIRST_PAUSE", 0.01)
        patch.setattr(feeder, "_LAG_SECONDS", 0.05)
        self.settings, self.folder = Settings(data_dir=folder / "data"), folder / "spool"

    def start(self, *, tables: Sequence[str] = ("d.t",), max_bytes: int = 1 << 20, **more: Any) -> feeder.Feeder:
        return feeder.Feeder(self.settings, self.folder, tables=tables, properties={}, max_bytes=max_bytes, **more)

    def ids(self, table: str = "d.t") -> list[int]:
        """What the lane has from its beginning on; a truncation is -1."""
        lanes, rows = CapturedTables(self.folder, [table]), CapturedRows(self.folder, table)
        try:
            ends, found = lanes.ends()[f"{table}-0"], []
            start = ends.low
            while start < ends.high:
                for each in rows.batches(start, ends.high, Limits(100, 1 << 20, 0.0)):
                    found += [-1 if is_truncation(one) else int(one.key or b"") for one in each.records or ()]
                    start = each.end
            return found
        finally:
            lanes.close()
            rows.close()


@pytest.mark.parametrize(
    "fault",
    [
        CaptureEnded("gone"),
        OSError("no space"),
        sqlite3.OperationalError("disk full"),
        KeyError("table"),
        subprocess.TimeoutExpired("java", 20),
    ],
)
def test_a_fault_of_any_kind_is_noted_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    started: list[Any] = []

    def start(*given: Any, **more: Any) -> Any:
        started.append(more)
        raise fault

    fed = Fed(tmp_path, monkeypatch, start)
    with fed.start():
        until(lambda: len(started) > 2, "it is tried again", seconds=10)
    with Spool(fed.folder) as spool:
        assert str(fault) in spool.standing().error


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


def test_a_loss_that_cannot_be_noted_is_tried_again_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Spool) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    lost = CaptureLost("the log is gone")
    fed = Fed(tmp_path, monkeypatch, script := Script(batch(DONE), *[lost] * 4))
    with Spool(fed.folder, write=True) as spool:
        spool.append([], [Mark(0, "", 0)], partition={}, offset={"pos": 0}, complete=True, tables=["d.t"])
    with monkeypatch.context() as patch:
        patch.setattr(Spool, "begin_epoch", full)
        pauses: list[float] = []
        patch.setattr(feeder.RestartBackoff, "record_failure", lambda self, why: pauses.append(1.0))
        with fed.start(snapshot_again=True):
            until(lambda: not script.frames, "the feeder goes on", seconds=10)
            assert len(pauses) == 4, "each of them is followed by a pause"


def test_a_loss_offers_a_new_snapshot_which_replaces_the_rows_once_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(batch(change(1), DONE), CaptureLost("the log is gone"))
    fed = Fed(tmp_path, monkeypatch, script)
    with pytest.raises(InvalidArgument, match="nothing was captured"):
        feeder.note_snapshot(fed.folder)
    with fed.start(), Spool(fed.folder) as spool:
        until(lambda: "the log is gone" in spool.standing().error, "it stopped", seconds=10)
        offered = spool.standing().error
        assert offered.startswith("CAPTURE_LOST: ")
        assert "run `millrace flows snapshot spool`" in offered
        assert fed.ids() == [1]
        until(lambda: len(script.starts) == 2, "it tries again where it was", seconds=10)
        script.frames = [batch(change(2), DONE)]
        feeder.note_snapshot(fed.folder)
        script.close()
        until(lambda: fed.ids()[-1:] == [2], "the new snapshot is there", seconds=10)
        assert fed.ids() == [1, -1, 2]
        assert spool.fact(feeder.SNAPSHOT) is False
        assert [each.get("offset") for each in script.starts] == [None, {"pos": 1}, None]


def test_a_snapshot_that_fails_again_and_again_waits_longer_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = batch(change(1, o="r"), change(2, o="r"))
    fed = Fed(tmp_path, monkeypatch, Script(*[rows, CaptureEnded("a value of the table")] * 3))
    with fed.start() as running:
        until(lambda: running._backoff.failures == 3, "three failures in a row", seconds=10)


def test_a_transaction_that_is_larger_than_the_spool_comes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end makes it visible, so nothing can be passed before that: waiting for room would last for ever."""
    parts = [batch(*(change(10 * part + each) for each in range(10))) for part in range(1, 20)]
    script = Script(batch(DONE), *parts, batch(end(1000)), *parts[:3])
    fed = Fed(tmp_path, monkeypatch, script)
    with fed.start(max_bytes=200):
        until(lambda: len(fed.ids()) == 190, "the transaction is whole", seconds=10)
        acknowledged = script.acknowledged
        assert acknowledged == 21, "and now it waits for the lane"
        lanes = CapturedTables(fed.folder, ["d.t"])
        lanes.mirror([("d.t", 0, lanes.ends()["d.t-0"].high)])
        lanes.close()
        until(lambda: script.acknowledged == 24, "the lane has made room", seconds=10)


def test_a_restart_inside_of_a_transaction_makes_no_end_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine announces the rest of a transaction by another BEGIN."""
    begin = {"o": "BEGIN", "g": "0-1-7", "m": 1, "p": {}, "f": {"pos": 2}}
    inside = {"f": {"pos": 3, "transaction_id": "0-1-7"}}
    parts = [batch(DONE, begin, change(1, **inside)), CaptureEnded("killed"), batch(begin, change(2, **inside))]
    script = Script(*parts, CaptureEnded("killed"))
    fed = Fed(tmp_path, monkeypatch, script)
    with fed.start():
        until(lambda: len(script.starts) == 3, "it was killed twice", seconds=10)
        assert fed.ids() == []
        script.frames += [batch(begin, change(3), end(7), {**begin, "g": "0-1-8"}, change(4))]
        script.close()  # so that a start follows which reads them
        until(lambda: fed.ids() == [1, 2, 3], "it is whole", seconds=10)


def test_a_statement_right_after_the_snapshot_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    column = {
        "name": "id", "typeName": "INT", "length": None, "scale": None, "charsetName": None, "optional": False,
        "generated": False, "autoIncremented": False, "defaultValueExpression": None, "enumValues": None,
    }  # fmt: skip
    added = {**column, "name": "five", "defaultValueExpression": "5"}

    def ddl(words: str, *columns: Any) -> dict[str, Any]:
        table = {"primaryKeyColumnNames": ["id"], "columns": list(columns)}
        found = [{"type": "ALTER", "id": '"d"."t"', "table": table}]
        return {"o": "ddl", "n": words, "a": found, "m": 1, "p": {}, "f": {"pos": 2}}

    script = Script(
        batch(ddl("create table t (id int)", column), change(1, o="r"), DONE, ddl("alter table t add five", added))
    )
    script.frames[0].events[0].notification = "create table t (id int)"
    fed = Fed(tmp_path, monkeypatch, script)
    with fed.start(reading={"read.only": "true"}), Spool(fed.folder) as spool:
        until(lambda: spool.standing().unread == ("d.t",), "the rows are to be read again", seconds=10)


def test_a_table_that_comes_back_is_emptied_before_its_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were deleted while it was none of the flow's are in no change."""
    fed = Fed(tmp_path, monkeypatch, Script(batch(change(1), change(1, table="d.u"), DONE)))
    both, one = ("d.t", "d.u"), ("d.t",)
    with fed.start(tables=both, reading={"read.only": "true"}):
        until(lambda: fed.ids("d.u") == [1], "the snapshot", seconds=10)
    monkeypatch.setattr(feeder, "Engine", Script(batch(change(2), end(2))))
    with fed.start(tables=one, reading={"read.only": "true"}):
        until(lambda: fed.ids() == [1, 2], "the other one goes on", seconds=10)
    script = Script(batch(change(7, table="d.u"), end(3)))
    monkeypatch.setattr(feeder, "Engine", script)
    with fed.start(tables=both, reading={"read.only": "true"}):
        until(lambda: fed.ids("d.u") == [-1, 7], "it begins empty", seconds=10)
        assert script.signals == [{"type": "incremental", "data-collections": [r"d\.u"]}]
        assert fed.ids() == [1, 2]


def test_what_an_engine_was_reading_is_not_continued_for_a_table_that_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = Fed(tmp_path, monkeypatch, script := Script())
    offset = {"pos": 3, "incremental_snapshot_collections": '[{"id":"d.u"}]', "incremental_snapshot_maximum_key": "x"}
    with Spool(fed.folder, write=True) as spool:
        state: dict[str, Any] = {"tables": ["d.t", "d.u"], "unread": ["d.u"]}
        spool.append([], [Mark(0, "", 0)], partition={}, offset=offset, complete=True, **state)
    with fed.start():
        until(lambda: script.starts, "an engine starts", seconds=10)
        assert script.starts[0]["offset"] == {"pos": 3}


def test_all_tables_that_are_to_be_read_are_asked_for_at_once_and_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine takes one signal a second: a hundred tables, altered twice, would take minutes."""
    names = [f"d.t{number}" for number in range(100)]
    scanned = {"o": "notification", "n": "Incremental Snapshot: TABLE_SCAN_COMPLETED"}
    fed = Fed(tmp_path, monkeypatch, script := Script(batch(end(4))))
    with Spool(fed.folder, write=True) as spool:
        state: dict[str, Any] = {"tables": names, "unread": [*names, *names], "epoch": 1}
        spool.append([], [Mark(0, "", 0)], partition={}, offset={"pos": 3}, complete=True, **state)
    with fed.start(tables=names, reading={"read.only": "true"}), Spool(fed.folder) as spool:
        until(lambda: script.acknowledged == 1, "it is asked", seconds=10)
        assert script.signals == [{"type": "incremental", "data-collections": [rf"d\.t{each}" for each in range(100)]}]
    script.frames = [
        batch(*({**scanned, "a": {"scanned_collection": each, "status": "EMPTY"}, "f": {"pos": 5}} for each in names))
    ]
    script.starts.clear()
    with fed.start(tables=names, reading={"read.only": "true"}), Spool(fed.folder) as spool:
        until(lambda: not spool.standing().unread, "one reading of each is enough", seconds=10)


def test_a_table_that_is_altered_while_it_is_read_is_read_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = Fed(tmp_path, monkeypatch, script := Script())
    offset = {"pos": 3, "incremental_snapshot_collections": '[{"id":"d.t"}]'}
    with Spool(fed.folder, write=True) as spool:
        state: dict[str, Any] = {"tables": ["d.t"], "unread": ["d.t"] * 4, "epoch": 1}
        spool.append([], [Mark(0, "", 0)], partition={}, offset=offset, complete=True, **state)
    scanned = {"o": "notification", "n": "Incremental Snapshot: TABLE_SCAN_COMPLETED", "f": {"pos": 5}}
    scanned["a"] = {"scanned_collection": "d.t", "status": "SUCCEEDED"}
    script.frames = [batch(end(4)), batch(scanned)]
    with fed.start(reading={"read.only": "true"}), Spool(fed.folder) as spool:
        until(lambda: script.acknowledged == 2, "one of the two readings is done", seconds=10)
        assert spool.standing().unread == ("d.t",)
        assert len(script.signals) <= 1


def history(number: int, table: str) -> History:
    changes = [{"type": "CREATE", "id": f'"d"."{table}"', "table": {}}]
    return History(json.dumps({"position": {"file": "b.1", "pos": number}, "ddl": "", "tableChanges": changes}))


def test_a_schema_history_is_bounded_while_an_engine_runs_and_says_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database whose temporary tables come and go has a statement for each, for years."""
    monkeypatch.setattr(feeder, "_MORE_HISTORY", 20)
    frames: list[Any] = [batch({**DONE, "f": {"file": "b.1", "pos": 1}})]
    for number in range(2, 302):
        frames += [
            history(number, f"t{number % 7}"),
            batch({"o": "heartbeat", "f": {"file": "b.1", "pos": number + 1}}),
        ]
    fed = Fed(tmp_path, monkeypatch, script := Script(*frames))
    sizes: list[int] = []

    def acknowledge() -> None:
        with Spool(fed.folder) as spool:
            sizes.append(len(spool.history()))

    monkeypatch.setattr(script, "acknowledge", acknowledge)
    with fed.start():
        until(lambda: len(sizes) >= 300, "all statements are there", seconds=20)
    assert max(sizes) <= 2 * 7 + 20 + 1, "twice what is needed, and some more"
    with Spool(fed.folder) as spool:
        assert {json.loads(each)["tableChanges"][0]["id"] for each in spool.history()} == {
            f'"d"."t{number}"' for number in range(7)
        }


def test_a_statement_that_the_next_engine_reads_again_is_in_the_history_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = batch({**DONE, "f": {"file": "b.1", "pos": 1}})
    heartbeat = batch({"o": "heartbeat", "f": {"file": "b.1", "pos": 2}})
    frames = [begun, history(2, "a"), heartbeat, CaptureEnded("killed"), history(2, "a"), history(3, "b"), heartbeat]
    fed = Fed(tmp_path, monkeypatch, script := Script(*frames))
    with fed.start(), Spool(fed.folder) as spool:
        until(lambda: script.acknowledged == 3, "both engines have read", seconds=10)
        assert [json.loads(each)["position"]["pos"] for each in spool.history()] == [2, 3]


def test_rows_that_cannot_be_read_again_and_again_are_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two failures may have passed by the next try; a key that cannot be compared fails each time."""
    facts = {"scanned_collection": "d.t", "status": "SQL_EXCEPTION"}
    failed = {"o": "notification", "n": "Incremental Snapshot: TABLE_SCAN_COMPLETED", "a": facts, "f": {"pos": 3}}
    fed = Fed(tmp_path, monkeypatch, script := Script(*[batch(failed)] * 3))
    with Spool(fed.folder, write=True) as spool:
        state: dict[str, Any] = {"tables": ["d.t"], "unread": ["d.t"], "epoch": 1}
        spool.append([], [Mark(0, "", 0)], partition={}, offset={"pos": 3}, complete=True, **state)
    with fed.start(reading={"read.only": "true"}, snapshot_again=True), Spool(fed.folder) as spool:
        until(lambda: len(script.starts) == 4, "a fourth engine starts", seconds=20)
        assert [each["offset"] is None for each in script.starts] == [False, False, False, True]
        assert spool.standing().epoch == 3  # one for the loss, one for the engine


def test_rows_that_are_ahead_of_the_log_are_read_once_the_log_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement that comes later in the log has changed the table: the engine ends each time that it reads a row."""
    offset = {"pos": 3, "incremental_snapshot_collections": '[{"id":"d.t"}]'}
    reading = [CaptureEnded("Column 'd' not found in result set ... This might be caused by DBZ-4350")]
    script = Script(*reading, batch(change(50), end(50)), batch(change(100), end(100)))
    fed = Fed(tmp_path, monkeypatch, script)
    with Spool(fed.folder, write=True) as spool:
        state: dict[str, Any] = {"tables": ["d.t"], "unread": ["d.t"], "epoch": 1}
        spool.append([], [Mark(0, "", 0)], partition={}, offset=offset, complete=True, **state)
    asked: list[int] = []
    monkeypatch.setattr(script, "signal", lambda *_: asked.append(script.acknowledged))
    with fed.start(reading={"read.only": "true"}, log=FailingLog()):
        until(lambda: asked, "the rows are asked for", seconds=10)
        assert [each["offset"] for each in script.starts] == [offset, {"pos": 3}], "and it goes on without reading"
        assert asked == [2], "after the batch that ends where the log ended"


class FailingLog:
    """A database whose log is looked at in vain, then with success."""

    def __init__(self, *faults: Exception) -> None:
        self.faults, self.moments = list(faults), 1.0

    def end(self) -> Any:
        if self.faults:
            raise self.faults.pop(0)
        return {"pos": 100}

    def behind(self, offset: Any, end: Any, /) -> int:
        return int(end["pos"] - offset["pos"])

    def moment(self, offset: Any, /) -> float:
        return self.moments


def test_the_lag_is_measured_on_after_a_fault_and_unknown_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = Fed(tmp_path, monkeypatch, Script(batch(DONE)))
    log = FailingLog()
    with fed.start(log=log), Spool(fed.folder) as spool:
        until(lambda: spool.standing().lag_bytes == 99, "it is measured", seconds=10)
        assert spool.standing().lag_seconds > 1_000_000
        log.faults = [LogUnavailable("it restarts")] * 1_000_000
        until(lambda: spool.standing().lag_bytes is None, "it is not known", seconds=10)
        log.faults = [ValueError("what no one expects")]
        log.moments = 0.0
        until(lambda: spool.standing().lag_bytes == 99, "it is measured again", seconds=10)
        until(lambda: spool.standing().lag_seconds == 0.0, "an offset without a time has no age", seconds=10)


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        ('ERROR: replication slot "millrace_a" is active for PID 4711', False),
        ("ERROR: all replication slots are in use", False),
        ("FATAL: must be superuser or replication role to use replication slots", False),
        ("Failed to start replication stream; please make sure to use a distinct replication slot name", False),
        ('ERROR: replication slot "millrace_a" does not exist', True),
        ('ERROR: can no longer get changes from replication slot "millrace_a"', True),
        ('ERROR: can no longer access replication slot "millrace_a"', True),
        ("Client requested master to start replication from purged GTIDs", True),
        ("Probably the slave state is too old and required binlog files have been purged.", True),
        ("Cannot replicate because the master purged required binary logs", True),
        ("Failed to read a page of shop.purged_orders: the connection was reset", False),
        ("a session logs statements in place of rows: have it SET SESSION binlog_format = 'ROW'", True),
    ],
)  # fmt: skip
def test_a_slot_that_is_in_use_or_a_name_is_no_loss(words: str, lost: bool) -> None:
    assert feeder.is_loss(CaptureEnded(f"the capture engine stopped: {words}")) is lost
    assert not feeder.is_loss(LogUnavailable(words)), "what the engine says ends it"
    assert feeder.is_loss(CaptureLost("gone"))


def test_a_feeder_goes_on_on_another_machine_and_the_former_one_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"tables": str(tmp_path / "tables"), "meta_store": f"sqlite:///{tmp_path}/meta.db"}
    begin = {"o": "BEGIN", "g": "0-1-7", "m": 1, "p": {}, "f": {"pos": 2}}
    first = Fed(tmp_path / "a", monkeypatch, Script(batch(change(1, o="r"), DONE), batch(begin, change(2), end(7))))
    first.settings = Settings(data_dir=tmp_path / "a", **shared)
    other = Script(batch(change(3), end(8)))
    with first.start() as former:
        until(lambda: first.ids() == [1, 2], "the first machine feeds", seconds=10)
        mine = feeder.Engine
        assert isinstance(mine, Script)
        second = Fed(tmp_path / "b", monkeypatch, other)
        second.settings = Settings(data_dir=tmp_path / "b", **shared)
        with second.start() as running:
            until(lambda: second.ids() == [1, 2, 3], "the second has all, and goes on", seconds=10)
            assert other.starts[0]["offset"] == {"pos": 7, "transaction_id": None}
            monkeypatch.setattr(feeder, "Engine", mine)
            mine.frames.append(batch(change(3), end(8)))
            mine.close()

            def is_told() -> bool:
                try:
                    former.check()
                except StreamBusy:
                    return True
                return False

            until(is_told, "the former one learns of it", seconds=10)
            running.check()
            assert first.ids() == [1, 2]

"""State rows: a commit adds what changed; a snapshot and the increments after it give the state, or a typed error."""

from __future__ import annotations

import pickle
import random
from functools import cache
from pathlib import Path

import pytest

from millrace.base.errors import StateDamaged
from millrace.node.ingest.committer import WalCommitter
from millrace.tables.wal import state_rows
from millrace.tables.wal.state_rows import MAX_INCREMENTS, SMALL_STATE
from millrace.tables.wal.table import WalTable
from millrace.wal.chain import ChainOutcome
from millrace.wal.state import ChannelState
from tests.node.wal_samples import message, wal_rows, write_range
from tests.wal.busy_channel import BusyChannel

VCHANNELS = 200


@cache
def first_state() -> ChannelState:
    return BusyChannel(VCHANNELS).state


class Committed:
    """A ``wal`` table to which a PChannel with many collections is committed."""

    def __init__(self, folder: Path) -> None:
        self.table = WalTable.create(folder / "wal")
        self.committer = WalCommitter(WalTable.open(self.table.uri))
        self.busy = BusyChannel(0)
        self.busy.state = first_state()
        self.busy._entries = first_state().position.entry
        self.states: list[bytes] = []
        self.sizes: list[int] = []
        self.commit()

    def commit(self, *touched: int) -> None:
        """Commit an insert into each of some collections."""
        if touched:
            self.busy.append(*map(self.busy.insert, touched))
        state = self.busy.state
        rows = wal_rows([message(state.position.entry)]), wal_rows([])
        self.committer.table.refresh()
        base = self.committer.table.position("p0")
        report = write_range(Path(self.table.uri), base, ChainOutcome(state, lambda: rows))
        self.sizes += [file.size for file in report.actions if file.partition["kind"] == "state"]
        assert self.committer.commit([report]).committed
        self.states.append(state.to_bytes())

    def opened(self) -> WalTable:
        """The table as another process has it."""
        state_rows._decoded.clear()
        return WalTable.open(self.table.uri)

    def files(self) -> list[str]:
        return self.opened().table.files("kind = 'state'")


@pytest.fixture
def committed(tmp_path: Path) -> Committed:
    return Committed(tmp_path)


def test_a_commit_of_one_row_writes_what_changed(committed: Committed) -> None:
    whole = committed.sizes[0]
    assert whole > 7_500, "compressed"
    for number in range(1, 16):
        committed.commit(number)
        assert len(committed.files()) <= MAX_INCREMENTS + 1
        assert committed.opened().position("p0").state_bytes == committed.states[-1]
    # A file has some 4 kB besides; no commit wrote the whole state again, and merges took in a few increments.
    assert max(committed.sizes[1:]) < whole
    assert sum(committed.sizes[1:]) / 15 < 5_500


def test_a_snapshot_follows_when_the_increments_outweigh_it(committed: Committed) -> None:
    dice = random.Random(3)
    snapshots = set()
    for _ in range(8):
        committed.commit(*dice.sample(range(1, VCHANNELS + 1), 165))
        rows = committed.opened().position("p0").rows
        assert sum(row.size for row in rows[1:]) < rows[0].size
        assert rows[0].size > 40_000
        snapshots.add(rows[0].path)
    assert len(snapshots) > 1
    assert committed.opened().position("p0").state_bytes == committed.states[-1]


def test_a_small_state_is_one_row(tmp_path: Path) -> None:
    table = WalTable.create(tmp_path / "wal")
    committer, busy = WalCommitter(WalTable.open(table.uri)), BusyChannel(2)
    for _ in range(3):
        busy.append(busy.insert(1))
        committer.table.refresh()
        rows = wal_rows([message(busy.state.position.entry)]), wal_rows([])
        outcome = ChainOutcome(busy.state, lambda rows=rows: rows)  # type: ignore[misc]
        assert committer.commit([write_range(Path(table.uri), committer.table.position("p0"), outcome)]).committed
        assert len(WalTable.open(table.uri).position("p0").rows) == 1
    assert len(busy.state.to_bytes()) < SMALL_STATE


def test_law_7_every_version_gives_its_state_from_the_rows_that_were_live_then(committed: Committed) -> None:
    dice = random.Random(7)
    for _ in range(24):
        committed.commit(*dice.sample(range(1, VCHANNELS + 1), dice.choice([1, 1, 2, 40])))
    table = committed.opened()
    for version in dice.sample(range(1, table.version + 1), 12):
        state_rows._decoded.clear()
        found = table.position_at("p0", version)
        assert found is not None
        assert found.state_bytes == committed.states[found.commits - 1]


def test_a_lost_row_is_an_error_and_no_other_state(committed: Committed) -> None:
    for number in range(1, 6):
        committed.commit(number)
    rows = committed.opened().position("p0").rows
    for row in rows:
        path = Path(committed.table.uri) / row.path
        sound = path.read_bytes()
        path.unlink()
        with pytest.raises(StateDamaged, match="commit 6"):
            committed.opened().position("p0")
        path.write_bytes(sound)
    assert committed.opened().position("p0").state_bytes == committed.states[-1]


def test_a_row_in_the_place_of_another_is_an_error(committed: Committed) -> None:
    for number in range(1, 6):
        committed.commit(number)
    rows = committed.opened().position("p0").rows
    root = Path(committed.table.uri)
    sound = {row.path: (root / row.path).read_bytes() for row in rows}
    for one, other in ((rows[0], rows[1]), (rows[2], rows[3]), (rows[3], rows[2]), (rows[1], rows[4])):
        (root / one.path).write_bytes(sound[other.path])
        with pytest.raises(StateDamaged, match="commit 6"):
            committed.opened().position("p0")
        (root / one.path).write_bytes(sound[one.path])


def test_an_increment_to_a_state_that_a_repair_replaced_is_not_followed(committed: Committed) -> None:
    """Rows of other commits with the same numbers are another chain."""
    committed.commit(1)
    committed.commit(2)
    last = committed.opened().position("p0").rows[-1]
    other = state_rows.state_row("x", last.commits - 1, b"\x04{}", None)
    with pytest.raises(state_rows.Malformed, match=f"commit {last.commits - 1}"):
        state_rows.chain_of([other, last], last)


def test_of_two_increments_to_one_base_one_is_committed(committed: Committed) -> None:
    base, state = committed.opened().position("p0"), committed.busy.state
    reports = []
    for number in (3, 4):
        committed.busy.state = state
        committed.busy.append(*[committed.busy.insert(number)] * (number - 2))
        rows = wal_rows([message(committed.busy.state.position.entry)]), wal_rows([])
        made = ChainOutcome(committed.busy.state, lambda rows=rows: rows)  # type: ignore[misc]
        reports.append((write_range(Path(committed.table.uri), base, made), committed.busy.state.to_bytes()))
    (first, kept), (second, _) = reports
    assert WalCommitter(WalTable.open(committed.table.uri)).commit([first]).committed
    assert WalCommitter(WalTable.open(committed.table.uri)).commit([second]).fenced
    assert committed.opened().position("p0").state_bytes == kept


def test_a_handle_reads_the_new_row_only_and_a_task_none(committed: Committed, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = WalTable.open(committed.table.uri)
    assert handle.position("p0").state is not None
    read: list[str] = []
    parse = WalTable._state_row
    monkeypatch.setattr(
        WalTable, "_state_row", lambda self, name, path: (read.append(path), parse(self, name, path))[1]
    )
    for number in range(1, 6):
        committed.commit(number)
        read.clear()
        handle.refresh()
        position = handle.position("p0")
        assert handle.position("p0").state_bytes == committed.states[-1]
        assert len(read) == 1
    sent = pickle.dumps(position)
    assert len(sent) < 2_000, "the state is not sent to tasks"
    received = pickle.loads(sent)
    assert received == position
    assert received.state_bytes == committed.states[-1]
    state_rows._decoded.clear()
    assert received.state_bytes == committed.states[-1], "a task without the cache reads the rows"

"""An entry that parks its PChannel is replaced by a tombstone: every host judges the same, or nobody's word changes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pyarrow import flight

from millrace.access.grants import Caller, Principal
from millrace.base.errors import (
    InvalidArgument,
    LogRegressed,
    LogUnavailable,
    TombstoneRefused,
    UnsupportedVersion,
)
from millrace.log.generations.generation_file import FILE, GenerationFile
from millrace.log.generations.service import GenerationsService, open_deployment_log
from millrace.message.ids import EARLIEST, LogId
from millrace.message.log_entries import LogEntries
from millrace.message.tombstones import MAX_REASON_BYTES, MAX_TOMBSTONES, Tombstone, entry_sha256
from millrace.node.append.host import AppendHost
from millrace.node.append.server import AppendExtension, committed_state_loader
from millrace.node.append.tombstones import TombstonePlacer
from millrace.node.ingest.committer import WalCommitter
from millrace.node.ingest.ingester import IngestPlan, run_ingest
from millrace.tables.wal.log_replay import replay_totals
from millrace.tables.wal.table import WalTable, WalTotals
from millrace.wal.state import ChannelState
from tests.conformance.reading import read_all
from tests.node.log_samples import accepted, later_build, opening, poison

P = "p0"
WORDS = {"author": "ada", "reason": "a build of tomorrow wrote it"}


class Place:
    """A deployment with its log's service and append host in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wal = folder / "wal"
        self.open()

    def open(self) -> None:
        self.service: GenerationsService = open_deployment_log(self.folder / "log")
        self.host = AppendHost(self.service, committed_state_loader(self.wal, self.service))
        self.tombstones = TombstonePlacer(self.host, self.service, lambda: self.wal)

    def close(self) -> None:
        self.host.close()
        self.service.close()

    def append(self, *entries: bytes, pchannel: str = P) -> list[LogId]:
        """Past the host, which refuses what it cannot read."""
        with closing(self.service.open(pchannel)) as log:
            return list(log.append(entries))

    def place(self, entry: LogId, value: bytes | None = None, **words: str) -> Tombstone:
        return self.tombstones.place(
            P, entry, sha256=entry_sha256(poison() if value is None else value), **(WORDS | words)
        )

    def plan(self) -> IngestPlan:
        with closing(self.service.open(P)) as log:
            return IngestPlan(WalTable.create(self.wal).position(P), log.end(), 1 << 30)

    def run(self, plan: IngestPlan | None = None):  # type: ignore[no-untyped-def]
        with closing(self.service.open(P)) as log:
            return run_ingest(plan or self.plan(), log=log, table=self.wal)

    def commit(self) -> None:
        report = self.run()
        assert report.failure is None, report.failure
        assert WalCommitter(WalTable.open(self.wal)).commit([report]).committed

    def entries(self) -> list[tuple[LogId, bytes]]:
        with closing(self.service.open(P)) as log:
            return read_all(log, log.describe().begin)

    def parked(self) -> str | None:
        return self.host.describe(P)["parked"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    made.service.create(P)
    yield made
    made.close()


def test_the_pchannel_goes_on_and_the_wal_records_who_replaced_what(place: Place) -> None:
    before = place.append(opening(), accepted())
    (entry,) = place.append(poison())
    after = place.append(accepted())
    report = place.run()
    assert report.failure is not None
    assert report.failure.position == entry
    assert WalCommitter(WalTable.create(place.wal)).commit([report]).committed, "up to right before it"
    seen = place.tombstones.inspect(P, entry)
    assert seen["sha256"] == entry_sha256(poison())
    assert seen["bytes"] == len(poison())
    assert seen["judged"].startswith("UNSUPPORTED_VERSION")
    placed = place.place(entry)
    assert placed.placed
    assert [at for at, _ in place.entries()] == [*before, entry, *after]
    assert dict(place.entries())[entry] == placed.value
    assert place.parked(), "it goes on when a person says so"
    place.host.restart(P)
    assert place.host.append(P, accepted()).rejected == 0

    place.commit()
    table = WalTable.open(place.wal)
    rows = table.table.delta.to_pyarrow_table(filters=[("kind", "=", "rejection")]).to_pylist()
    assert [(LogId(row["ledger"], row["entry"]), row["reason"]) for row in rows] == [(entry, "MALFORMED")]
    record = rows[0]["payload"].split(b"\n", 1)[1]
    assert json.loads(record)["author"] == "ada"
    assert json.loads(record)["sha256"] == entry_sha256(poison())
    with closing(place.service.open(P)) as log:
        again = replay_totals(log, ChannelState.new(P), WalTotals(), until=log.end())
    assert again == (table.position(P).state, table.position(P).totals), "whoever computes it again gets the same"


def test_who_comes_with_a_token_is_the_author_whoever_it_says_it_was(place: Place) -> None:
    place.append(opening(), accepted())
    (entry,) = place.append(poison())
    asked = {"pchannel": P, "entry": entry, "sha256": entry_sha256(poison()), **WORDS}
    extension = AppendExtension(place.host, tombstones=place.tombstones)
    action = flight.Action("append/tombstone", json.dumps(asked).encode())
    (answer,) = extension.do_action(action, Caller(Principal.admin("grace")))
    assert json.loads(answer)["author"] == "grace"


def test_it_survives_a_restart_and_other_handles_see_it_at_once(place: Place) -> None:
    place.append(opening())
    (entry,) = place.append(poison())
    with closing(place.service.open(P)) as open_already:
        assert dict(read_all(open_already))[entry] == poison()
        placed = place.place(entry)
        assert dict(read_all(open_already))[entry] == placed.value
        with pytest.raises(UnsupportedVersion, match=r"wire form"):  # what the log holds is what it held
            place.host.append(P, accepted())
    place.close()
    place.open()
    assert dict(place.entries())[entry] == placed.value
    assert place.host.append(P, accepted()).rejected == 0


def test_a_build_that_knows_no_tombstones_does_not_open_such_a_log(place: Place) -> None:
    place.append(opening())
    (entry,) = place.append(poison())
    place.place(entry)
    path = place.folder / "log" / FILE
    assert json.loads(path.read_text())["version"] == 2
    with closing(place.service.open(P)) as log:
        log.truncate(log.end())
    assert json.loads(path.read_text())["version"] == 1, "what was truncated needs none"


# --- refused ----------------------------------------------------------------------------------------------------------


def refuse(place: Place, entry: LogId, words: str, value: bytes | None = None) -> None:
    path = place.folder / "log" / FILE
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(TombstoneRefused, match=words):
        place.place(entry, value)
    assert (path.read_bytes() if path.exists() else None) == before


def test_only_the_entry_that_parks_its_pchannel_is_replaced(place: Place) -> None:
    _, second = place.append(opening(), accepted())
    refuse(place, second, "not parked", accepted())
    (entry,) = place.append(poison())
    (behind,) = place.append(accepted())
    refuse(place, second, "not at", accepted())
    refuse(place, behind, "not at", accepted())
    refuse(place, entry, "sha256", accepted())
    with pytest.raises(InvalidArgument, match="no entry"):
        place.place(LogId(behind.ledger, behind.entry + 7))
    place.service.create("p1")
    (other,) = place.append(opening(), pchannel="p1")
    with pytest.raises(TombstoneRefused, match="not parked"):
        place.tombstones.inspect("p1", other)


def test_what_a_commit_covers_stands(place: Place) -> None:
    place.append(opening())
    (entry,) = place.append(poison())
    with pytest.raises(UnsupportedVersion):
        place.host.append(P, accepted())
    with later_build():
        place.commit()
    assert place.parked()
    refuse(place, entry, "committed")
    with pytest.raises(TombstoneRefused, match="committed"):
        place.tombstones.inspect(P, entry)


def test_where_the_log_or_memory_is_at_fault_the_entry_stands(place: Place) -> None:
    (first,) = place.append(opening())
    place.commit()
    (entry,) = place.append(accepted())
    with mock.patch("millrace.wal.chain.decode_columns", side_effect=MemoryError):
        refuse(place, entry, "more memory", accepted())
    place.host.restart(P)
    refuse(place, entry, "not parked", accepted())

    def another_state(pchannel: str) -> ChannelState:
        state = committed_state_loader(place.wal, place.service)(pchannel)
        state.last_entry, state.last_entry_crc = first, 1
        return state

    (entry,) = place.append(poison())
    with AppendHost(place.service, another_state) as host, pytest.raises(LogRegressed):
        TombstonePlacer(host, place.service, lambda: place.wal).place(P, entry, sha256=entry_sha256(poison()), **WORDS)
    assert not place.service.file.refresh().tombstones


def test_words_and_their_number_are_bounded(place: Place) -> None:
    place.append(opening())
    (entry,) = place.append(poison())
    for bad in (
        {"author": ""},
        {"author": "a" * 129},
        {"reason": " "},
        {"reason": "r" * (MAX_REASON_BYTES + 1)},
        {"reason": "a\nb"},
    ):
        with pytest.raises(InvalidArgument):
            place.place(entry, **bad)
    with pytest.raises(InvalidArgument):
        place.tombstones.place(P, entry, sha256="abc", **WORDS)
    many = [Tombstone(P, LogId(7, number), "0" * 64, "a", "b", "now") for number in range(MAX_TOMBSTONES)]
    for each in many:
        place.service.file.change(lambda list_, each=each: list_.with_tombstone(each))
    refuse(place, entry, "the maximum")
    place.service.file.change(lambda list_: list_.without_proposal(P, many[0].entry))
    place.place(entry)


# --- two at once, and deaths in between -------------------------------------------------------------------------------


def test_what_a_task_made_of_the_old_bytes_is_fenced(place: Place) -> None:
    for commits in range(2):
        if commits:
            place.host.restart(P)
            place.commit()
        else:
            place.append(opening())
        (entry,) = place.append(poison())
        place.tombstones.inspect(P, entry)  # the host, which shares the process, has met it
        with later_build():
            report = place.run()
        assert report.failure is None
        assert report.position > entry
        place.place(entry)
        result = WalCommitter(WalTable.open(place.wal)).commit([report])
        assert result.fenced == (report,)
        position = WalTable.open(place.wal).position(P)
        assert position.commits == 2 * commits + 1
        assert position.state is not None
        assert position.state.position <= entry, "the fence moves nothing"


def test_a_commit_that_is_first_wins_and_readers_see_nothing_of_the_tombstone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.append(opening())
    (entry,) = place.append(poison())
    with later_build():
        report = place.run()
    with pytest.raises(UnsupportedVersion):
        place.host.append(P, accepted())
    committed: list[bool] = []

    def come_first(name: str) -> None:
        if name == "tombstone.proposed":
            committed.append(bool(WalCommitter(WalTable.open(place.wal)).commit([report]).committed))

    monkeypatch.setattr("millrace.node.append.tombstones.hit", come_first)
    with pytest.raises(TombstoneRefused, match="committed"):
        place.place(entry)
    assert committed == [True]
    assert not place.service.file.refresh().tombstones
    assert dict(place.entries())[entry] == poison()


def test_nobody_reads_an_entry_that_is_being_replaced(place: Place) -> None:
    (first,) = place.append(opening())
    (entry,) = place.append(poison())
    place.append(accepted())
    proposal = Tombstone(P, entry, entry_sha256(poison()), "a", "b", "now")
    place.service.file.change(lambda list_: list_.with_tombstone(proposal))
    with closing(place.service.open(P)) as log:
        run = log.read(EARLIEST)
        assert (run.batch.num_rows, run.next) == (1, entry)
        assert read_all(log, first, end=entry) == [(first, opening())]
        with pytest.raises(LogUnavailable, match="being replaced"):
            log.read(entry)
        with pytest.raises(LogUnavailable):
            log.read(run.next, end=entry.following())
        assert len(read_all(log, entry.following())) == 1
    place.tombstones.resume()
    assert dict(place.entries())[entry] == proposal.value


def test_a_read_that_a_proposal_overtakes_does_not_give_the_entry_out(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes the fence enough: whoever got the old bytes had them, and so its plan, before the proposal."""
    (first,) = place.append(opening())
    (entry,) = place.append(poison())
    proposal = Tombstone(P, entry, entry_sha256(poison()), "a", "b", "now")
    with closing(place.service.open(P)) as log:
        backend = log.backend_log(0)
        read = backend.read

        def slow(*arguments: Any, **options: Any) -> LogEntries:
            found = read(*arguments, **options)
            GenerationFile(place.folder / "log", "").change(lambda list_: list_.with_tombstone(proposal))
            return found

        monkeypatch.setattr(backend, "read", slow)
        assert log.read(EARLIEST).next == entry
        place.service.file.change(lambda list_: list_.without_proposal(P, entry))
        assert read_all(log, first, end=entry) == [(first, opening())]


def test_a_server_that_takes_up_what_was_left_gives_way_to_who_asked_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look at the list and its turn the same call completed it, and a commit has come to cover it."""
    place.append(opening())
    (entry,) = place.append(poison())
    proposal = Tombstone(P, entry, entry_sha256(poison()), "a", "b", "now")
    place.service.file.change(lambda list_: list_.with_tombstone(proposal))
    hold = place.host.hold

    def late(pchannel: str, *, deadline: float) -> AbstractContextManager[Any]:
        monkeypatch.setattr(place.host, "hold", hold)
        place.place(entry)
        place.host.restart(P)
        place.commit()
        return hold(pchannel, deadline=deadline)

    monkeypatch.setattr(place.host, "hold", late)
    place.tombstones.resume()
    assert dict(place.entries())[entry] == proposal.value


def test_two_operators_at_once_place_one_tombstone(place: Place) -> None:
    place.append(opening())
    (entry,) = place.append(poison())
    names = [f"operator {number}" for number in range(4)]
    with ThreadPoolExecutor(len(names)) as pool:
        placed = list(pool.map(lambda name: place.place(entry, author=name), names))
    assert len(set(placed)) == 1
    assert place.place(entry, author="another") == placed[0], "the first one's words stand"
    assert dict(place.entries())[entry] == placed[0].value


def test_other_bytes_than_were_replaced_are_a_log_that_regressed(place: Place) -> None:
    place.append(opening())
    (entry,) = place.append(accepted())
    other = Tombstone(P, entry, entry_sha256(poison()), "a", "b", "now", True)
    place.service.file.change(lambda list_: list_.with_tombstone(other))
    with closing(place.service.open(P)) as log, pytest.raises(LogRegressed, match="not the one"):
        log.read(entry)


def test_a_log_that_is_made_anew_has_no_tombstones(place: Place) -> None:
    place.append(opening())
    (entry,) = place.append(poison())
    place.place(entry)
    place.service.drop(P)
    assert not GenerationFile(place.folder / "log", "").generations.tombstones
    place.service.create(P)
    assert place.entries() == []


def test_the_pchannel_is_not_followed_anew_while_it_is_replaced(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.append(opening())
    (entry,) = place.append(poison())
    restarting: list[threading.Thread] = []

    def restart(name: str) -> None:
        if name == "tombstone.proposed":
            restarting.append(threading.Thread(target=place.host.restart, args=(P,)))
            restarting[0].start()
            restarting[0].join(0.3)
            assert restarting[0].is_alive(), "it waits"

    monkeypatch.setattr("millrace.node.append.tombstones.hit", restart)
    place.place(entry)
    restarting[0].join(10)
    assert place.host.append(P, accepted()).rejected == 0

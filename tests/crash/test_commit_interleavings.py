"""Two committers of one table, phase-locked: every order in which their steps can fall, one by one.

A committer stops where it has checked the fence and before it commits. A step lets one of them run on to
its next stop, so that a schedule is a string such as "ABAB"; all schedules are enumerated, and the table
must look the same behind each.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from deltalake import DeltaTable

from millrace.base.errors import MillraceError
from millrace.node.ingest.committer import WalCommitter
from millrace.node.ingest.ingester import IngestReport
from millrace.node.range_loop.definition import CommitResult
from millrace.storage.table import table_at
from millrace.tables.wal.table import WalTable
from millrace.wal.digest import digest_rows
from tests.failpoints import at_failpoints
from tests.node.wal_samples import inserts, message, outcome, rejection, write_range

PATIENCE = 20.0


class Actor:
    """A committer in a thread that runs only while it is given a step."""

    def __init__(self, table: Path | str, ranges: Sequence[IngestReport]) -> None:
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.result: CommitResult[IngestReport] | None = None
        self.error: BaseException | None = None
        self.steps = 0
        # Each has a handle from before anybody committed: the stalest snapshot there can be.
        self._committer = WalCommitter(WalTable.open(table))
        self._thread = threading.Thread(target=self._run, args=(ranges,), daemon=True)
        self._thread.start()

    @property
    def finished(self) -> bool:
        return self.result is not None or self.error is not None

    def step(self) -> None:
        """Run to the next stop, or to the end."""
        self.steps += 1
        self._go.release()
        assert self._stopped.acquire(timeout=PATIENCE), "a committer waits for the other one"

    def _stop(self, name: str) -> None:
        if name == "commit.checked":
            self._stopped.release()
            assert self._go.acquire(timeout=PATIENCE)

    def _run(self, ranges: Sequence[IngestReport]) -> None:
        assert self._go.acquire(timeout=PATIENCE)
        try:
            with at_failpoints(self._stop):
                self.result = self._committer.commit(ranges)
        except BaseException as error:
            self.error = error
        self._stopped.release()


Ranges = Callable[[Path | str], tuple[list[IngestReport], list[IngestReport]]]


def same_first_range(path: Path | str) -> tuple[list[IngestReport], list[IngestReport]]:
    base = WalTable.open(path).position("p0")
    return [inserts(path, base, 1, 2)], [inserts(path, base, 1, 2)]


def ranges_of_different_length(path: Path | str) -> tuple[list[IngestReport], list[IngestReport]]:
    base = WalTable.open(path).position("p0")
    return [inserts(path, base, 1, 2, 3)], [inserts(path, base, 1, 2)]


def same_later_range(path: Path | str) -> tuple[list[IngestReport], list[IngestReport]]:
    table = WalTable.open(path)
    WalCommitter(WalTable.open(path)).commit([inserts(path, table.position("p0"), 1)])
    table.refresh()
    base = table.position("p0")
    return [inserts(path, base, 2, 3)], [inserts(path, base, 2, 3)]


def rejections_alone(path: Path | str) -> tuple[list[IngestReport], list[IngestReport]]:
    base = WalTable.open(path).position("p0")
    return [write_range(path, base, outcome(base, rejections=[rejection(1)]))], [
        write_range(path, base, outcome(base, rejections=[rejection(1)]))
    ]


def one_shares_a_pchannel_with_the_other(path: Path | str) -> tuple[list[IngestReport], list[IngestReport]]:
    bases = WalTable.open(path).positions(["p0", "p1", "p2"])
    return [inserts(path, bases["p0"], 1), inserts(path, bases["p1"], 1)], [
        inserts(path, bases["p1"], 1),
        inserts(path, bases["p2"], 1),
    ]


def both_share_all_pchannels(path: Path | str) -> tuple[list[IngestReport], list[IngestReport]]:
    bases = WalTable.open(path).positions(["p0", "p1"])
    return [inserts(path, base, 1) for base in bases.values()], [inserts(path, base, 1) for base in bases.values()]


def nothing_shared(path: Path | str) -> tuple[list[IngestReport], list[IngestReport]]:
    bases = WalTable.open(path).positions(["p0", "p1"])
    return [inserts(path, bases["p0"], 1)], [inserts(path, bases["p1"], 1)]


def drive(path: Path | str, ranges: Ranges, schedule: Sequence[int]) -> tuple[str, list[Actor]]:
    """Run both along `schedule`, then each to its end; the steps that were really taken, as letters."""
    actors = [Actor(path, part) for part in ranges(path)]
    taken = ""
    while not all(actor.finished for actor in actors):
        wanted = schedule[len(taken)] if len(taken) < len(schedule) else 0
        index = wanted if not actors[wanted].finished else 1 - wanted
        actors[index].step()
        taken += "AB"[index]
    return taken, actors


def check(path: Path | str, actors: Sequence[Actor]) -> None:
    """No row lost, none doubled.

    State, totals and live files agree; each PChannel went in through exactly one actor.
    """
    for actor in actors:
        assert actor.error is None
    results = [actor.result for actor in actors if actor.result is not None]
    winners = [item for result in results for item in result.committed]
    losers = [item for result in results for item in result.fenced]
    assert len({item.pchannel for item in winners}) == len(winners)
    assert {item.pchannel for item in losers} <= {item.pchannel for item in winners}
    table = WalTable.open(path)
    content = table_at(path).dataset().to_table()
    for item in winners:
        position = table.position(item.pchannel)
        assert (position.commits, position.last_tick) == (item.base_commits + 1, item.last_tick)
        rows = content.filter(_is(content, item.pchannel))
        kinds = rows.column("kind").to_pylist()
        assert kinds.count("state") == 1
        assert digest_rows(rows.filter([kind != "state" for kind in kinds])) == position.totals.digest
        entries = [
            entry for entry, kind in zip(rows.column("entry").to_pylist(), kinds, strict=True) if kind != "state"
        ]
        assert len(set(entries)) == len(entries)


def _is(content: object, pchannel: str) -> list[bool]:
    return [name == pchannel for name in content.column("pchannel").to_pylist()]  # type: ignore[attr-defined]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "ranges",
    [
        same_first_range,
        ranges_of_different_length,
        same_later_range,
        rejections_alone,
        one_shares_a_pchannel_with_the_other,
        both_share_all_pchannels,
        nothing_shared,
    ],
)
def test_two_committers_leave_no_lost_and_no_doubled_row_in_any_order(tmp_path: Path, ranges: Ranges) -> None:
    seen: set[str] = set()
    number = 0
    # A committer needs at most three steps here: check, lose the race and check again, commit or give up.
    for schedule in itertools.product((0, 1), repeat=5):
        if any(taken.startswith("".join("AB"[index] for index in schedule)) for taken in seen):
            continue
        path = Path(WalTable.create(tmp_path / f"wal{number}").uri)
        number += 1
        taken, actors = drive(path, ranges, schedule)
        check(path, actors)
        seen.add(taken)
    assert {taken[0] for taken in seen} == {"A", "B"}, "each of them was first"
    assert {taken[:2] for taken in seen} >= {"AB", "BA"}, "both had checked before either committed"


def test_a_zombie_that_wakes_up_after_its_successor_changes_nothing(tmp_path: Path) -> None:
    path = Path(WalTable.create(tmp_path / "wal").uri)
    base = WalTable.open(path).position("p0")
    zombie = Actor(path, [inserts(path, base, 1, 2)])
    zombie.step()  # it has checked, and now sleeps
    successor = WalCommitter(WalTable.open(path))
    for entries in ((1, 2), (3,), (4, 5)):
        assert successor.commit([inserts(path, successor.table.position("p0"), *entries)]).committed
    while not zombie.finished:
        zombie.step()
    assert zombie.result is not None
    assert zombie.result.fenced
    assert successor.table.position("p0").totals == WalTable.open(path).position("p0").totals
    check(path, [])
    rows = DeltaTable(str(path)).to_pyarrow_table(filters=[("kind", "=", "message")], columns=["entry"])
    assert sorted(rows.column("entry").to_pylist()) == [1, 2, 3, 4, 5]


def test_a_zombie_with_a_fresh_handle_and_an_old_base_changes_nothing(tmp_path: Path) -> None:
    path = Path(WalTable.create(tmp_path / "wal").uri)
    base = WalTable.open(path).position("p0")
    late = inserts(path, base, 1)
    WalCommitter(WalTable.open(path)).commit([inserts(path, base, 1, 2)])
    result = WalCommitter(WalTable.open(path)).commit([late])
    assert result.fenced == (late,)
    assert WalTable.open(path).position("p0").last_tick == message(2)["time_tick"], "a lower tick never goes over it"


def test_many_commits_of_two_committers_at_once_lose_none(tmp_path: Path) -> None:
    path = Path(WalTable.create(tmp_path / "wal").uri)
    rounds = 15
    errors: list[MillraceError] = []

    def work(pchannels: Sequence[str]) -> None:
        committer = WalCommitter(WalTable.open(path), checkpoint_commits=7)
        done = dict.fromkeys(pchannels, 0)
        while min(done.values()) < rounds:
            bases = committer.table.positions(pchannels)
            # Both write every entry of the shared PChannel; who is first decides.
            plans = [inserts(path, base, base.commits) for base in bases.values() if base.commits < rounds]
            try:
                committer.commit(plans)
            except MillraceError as error:
                errors.append(error)
                return
            committer.table.refresh()
            done = {name: committer.table.commits(name) for name in pchannels}

    threads = [threading.Thread(target=work, args=(names,)) for names in (["p0", "shared"], ["p1", "shared"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors
    content = DeltaTable(str(path)).to_pyarrow_table(filters=[("kind", "=", "message")], columns=["pchannel", "entry"])
    found = sorted((row["pchannel"], row["entry"]) for row in content.to_pylist())
    assert found == [(name, entry) for name in ("p0", "p1", "shared") for entry in range(rounds)]

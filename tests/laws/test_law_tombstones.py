"""Law 1 where an entry may be replaced.

Hosts that could judge it and hosts that could not, at any interleaving, agree in the end.

Two builds live side by side: today's, which an entry of a later wire form parks, and a later one, which judges that
entry. Tasks of either plan, read, run the chain and commit, each step whenever it likes; operators try to put a
tombstone in the entry's place, and may die in between; the append host (today's) is restarted. Whatever happens, either
a commit covers the entry as the later build judged it and no tombstone stands, or the tombstone stands and every row,
total and state is what the chain makes of the log with it.
"""

from __future__ import annotations

import tempfile
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import example, given
from hypothesis import strategies as st

from millrace.base.errors import LogUnavailable, TombstoneRefused
from millrace.log.generations.service import open_deployment_log
from millrace.message.ids import EARLIEST, LogId
from millrace.message.tombstones import entry_sha256
from millrace.node.append.host import AppendHost
from millrace.node.append.server import committed_state_loader
from millrace.node.append.tombstones import TombstonePlacer
from millrace.node.ingest.committer import WalCommitter
from millrace.node.ingest.ingester import IngestPlan, IngestReport, run_ingest
from millrace.tables.wal.log_replay import replay_totals
from millrace.tables.wal.table import WalTable, WalTotals
from millrace.wal.digest import digest_rows
from millrace.wal.state import ChannelState
from tests.conformance.reading import read_all
from tests.laws.profile import examples
from tests.node.log_samples import accepted, later_build, opening, poison, rejected, tick

P = "p0"
PLACES = ["tombstone.proposed", "tombstone.fenced", "tombstone.placed"]


class Died(BaseException):
    """The server's process came to its end there."""


class Hosts:
    """One PChannel, its log, its ``wal`` table, an append host of today's build, and tasks of both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wal = Path(WalTable.create(folder / "wal").uri)
        self.plans: list[IngestPlan] = []
        self.reports: list[IngestReport] = []
        self.poisons: list[LogId] = []
        self.judged: set[LogId] = set()
        """Entries that a commit covers as they were."""
        self.service = open_deployment_log(folder / "log")
        self.service.create(P)
        self.host: AppendHost | None = None
        self.append([opening(), accepted()])
        self.poison()

    def stop(self) -> None:
        """The log's server comes to its end."""
        self.rest()
        self.service.close()

    def rest(self) -> None:
        """No follower runs, which shares the process of a task."""
        if self.host is not None:
            self.host.close()
            self.host = None

    def tombstones(self) -> TombstonePlacer:
        if self.host is None:
            self.host = AppendHost(self.service, committed_state_loader(self.wal, self.service))
        return TombstonePlacer(self.host, self.service, lambda: self.wal)

    def append(self, values: list[bytes]) -> list[LogId]:
        with closing(self.service.open(P)) as log:
            return list(log.append(values))

    # --- what happens -------------------------------------------------------------------------------------------------

    def poison(self) -> None:
        self.poisons += self.append([poison()])

    def more(self) -> None:
        self.append([accepted(), rejected(b"x"), tick()])

    def plan(self) -> None:
        with closing(self.service.open(P)) as log:
            self.plans.append(IngestPlan(WalTable.open(self.wal).position(P), log.end(), 1 << 30))

    def run(self, *, later: bool, number: int = 0) -> None:
        """A task of either build does what was planned some time ago."""
        if self.plans:
            self.rest()
            plan = self.plans.pop(number % len(self.plans))
            with later_build() if later else nullcontext(), closing(self.service.open(P)) as log:
                self.reports.append(run_ingest(plan, log=log, table=self.wal))

    def commit(self, number: int) -> None:
        if self.reports:
            report = self.reports.pop(number % len(self.reports))
            WalCommitter(WalTable.open(self.wal)).commit([report])

    def replace(self, number: int, *, dies_at: str = "", beaten: bool = False) -> None:
        """An operator replaces an entry; `beaten`: what waits is committed while it is proposed, or a task runs.

        The server may die.
        """

        def come_by(place: str) -> None:
            if place == "tombstone.proposed" and beaten:
                self.commit(number)
            if place == "tombstone.fenced" and beaten:
                self.plan()
                self.run(later=True, number=-1)
            if place == dies_at:
                raise Died

        with mock.patch("millrace.node.append.tombstones.hit", come_by):
            try:
                self.place(self.poisons[number % len(self.poisons)])
            except (TombstoneRefused, LogUnavailable):
                pass
            except Died:
                self.stop()
                self.service = open_deployment_log(self.folder / "log")

    def place(self, entry: LogId) -> None:
        self.tombstones().place(P, entry, sha256=entry_sha256(poison()), author="ada", reason="INC-1")

    def resume(self) -> None:
        self.tombstones().resume()

    # --- what holds ---------------------------------------------------------------------------------------------------

    def committed_and_replaced_exclude_each_other(self) -> None:
        standing = self.service.file.refresh().tombstones.get(P, {})
        placed = {entry for entry, each in standing.items() if each.placed}
        position = WalTable.open(self.wal).position(P).position or EARLIEST
        self.judged |= {entry for entry in self.poisons if position > entry and entry not in placed}
        assert not self.judged & placed

    def the_table_is_what_the_log_gives(self) -> None:
        """By the build that judges all there is: rows, totals and state at the committed position."""
        table = WalTable.open(self.wal)
        position = table.position(P)
        if position.position is None:
            return
        with later_build(), closing(self.service.open(P)) as log:
            state, totals = replay_totals(log, ChannelState.new(P), WalTotals(), until=position.position)
        assert (state.to_bytes(), totals) == (position.state_bytes, position.totals)
        rows = table.table.delta.to_pyarrow_table(filters=[("kind", "!=", "state")])
        assert digest_rows(rows) == position.totals.digest
        ids = list(
            zip(*(rows.column(name).to_pylist() for name in ("ledger", "entry", "index", "ordinal")), strict=True)
        )
        assert len(set(ids)) == len(ids)

    def settle(self) -> None:
        """Operators replace what still parks.

        Then all reports that are left come in, and each host has the same in the end.
        """
        for entry in self.poisons:
            self.rest()
            try:
                self.place(entry)
            except TombstoneRefused:
                assert entry in self.judged, "it is refused where a commit was first, and nowhere else"
        while self.reports:
            self.commit(0)
            self.committed_and_replaced_exclude_each_other()
        while True:
            with closing(self.service.open(P)) as log:
                table = WalTable.open(self.wal)
                plan = IngestPlan(table.position(P), log.end(), 1 << 30)
                with later_build() if self.judged else nullcontext():
                    report = run_ingest(plan, log=log, table=self.wal)
            assert report.failure is None, report.failure
            if not report.actions:
                break
            assert WalCommitter(table).commit([report]).committed
        self.committed_and_replaced_exclude_each_other()
        self.the_table_is_what_the_log_gives()
        with closing(self.service.open(P)) as log:
            seen = dict(read_all(log))
        standing = self.service.file.refresh().tombstones.get(P, {})
        for entry in self.poisons:
            assert seen[entry] == (poison() if entry in self.judged else standing[entry].value)


NUMBERS = st.integers(0, 2)
TASK = st.builds(lambda later: ("plan, run", later), st.sampled_from([True, True, False]))
REPLACE = st.builds(
    lambda *given: ("replace", *given),
    NUMBERS,
    st.sampled_from(["", "", "", *PLACES]),
    st.sampled_from([True, True, False]),
)
STEPS = st.one_of(
    TASK,
    REPLACE,
    REPLACE,
    st.just(("plan",)),
    st.builds(lambda later, number: ("run", later, number), st.booleans(), NUMBERS),
    st.builds(lambda number: ("commit", number), NUMBERS),
    st.sampled_from([("more",), ("poison",), ("resume",), ("restart",)]),
)


@examples(40)
@example(first=[], steps=[("replace", 0, "", True)])
@example(first=[("plan, run", True)], steps=[("replace", 0, "", True)])
@example(first=[("plan, run", True)], steps=[("replace", 0, "tombstone.fenced", False), ("commit", 0)])
@given(first=st.lists(TASK, max_size=2), steps=st.lists(STEPS, min_size=4, max_size=10))
def test_every_host_judges_an_entry_alike_whoever_was_first(
    first: list[tuple[Any, ...]], steps: list[tuple[Any, ...]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(Path(folder))
        try:
            for step in [*first, *steps]:
                match step:
                    case ("plan, run", later):
                        hosts.plan()
                        hosts.run(later=later, number=-1)
                    case ("run", later, number):
                        hosts.run(later=later, number=number)
                    case ("commit", number):
                        hosts.commit(number)
                    case ("replace", number, dies_at, beaten):
                        hosts.replace(number, dies_at=dies_at, beaten=beaten)
                    case ("restart",):
                        hosts.rest()
                    case (name,):
                        getattr(hosts, name)()
                hosts.committed_and_replaced_exclude_each_other()
            hosts.resume()  # or an entry that was being replaced could not be read
            hosts.the_table_is_what_the_log_gives()
            hosts.settle()
        finally:
            hosts.stop()

"""Broadcasts of messages by coordinators that die at any step, on VChannels that refuse or are away for a while.

What is stored reaches every target once, whatever dies; what is not stored reaches none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import AppendRejected, LogUnavailable, MillraceError
from millrace.base.settings import Settings
from millrace.catalog.broadcast import MESSAGE_KIND
from millrace.client.produce.rows import conform, insert_message, split_rows
from millrace.coord.broadcast import kinds
from millrace.coord.broadcast.kinds import BroadcastKind, SubmittedBroadcast
from millrace.coord.broadcast.task import TaskState
from millrace.coord.coordinator import Coordinator
from millrace.message.ids import COORDINATOR_ID
from millrace.message.model import MutableMessage
from millrace.wal.reasons import Reason
from tests.coord.ddl.rig import SCHEMA, ChainLog, Killed
from tests.failpoints import at_failpoints

KIND = "noted"


@dataclass(frozen=True)
class Step:
    collections: tuple[str, ...]
    kind: str
    dies_at: int
    """The failpoint, counted over the broadcast, at which the coordinator dies; -1: nowhere."""
    away: int
    """The number of this broadcast's appends that get through before its PChannels are away; -1: all."""
    refuses: bool
    """Whether they refuse then, for good, instead of being away."""
    fails: int
    """How many times the callback fails."""
    resumes: bool
    """Whether another coordinator completes what is open, before the next broadcast."""


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from([("c",), ("d",), ("c", "d")]),
        st.sampled_from([MESSAGE_KIND, KIND]),
        st.integers(-1, 9),
        st.integers(-1, 4),
        st.booleans(),
        st.integers(0, 2),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


class FlakyLog(ChainLog):
    """A chain log whose PChannels go away after a number of appends."""

    left = -1
    refuses = False

    def append_one(self, pchannel: str, entry: bytes, *, principal: str = "") -> int:
        if self.left == 0:
            if self.refuses:
                raise AppendRejected(f"{pchannel} is full", reason=Reason.LIMIT_EXCEEDED)
            raise LogUnavailable(f"{pchannel} is away")
        self.left -= 1
        return super().append_one(pchannel, entry, principal=principal)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_broadcast_is_on_every_target_once_or_on_none_wherever_its_coordinator_dies(steps: list[Step]) -> None:
    log, called, fails = FlakyLog(), list[SubmittedBroadcast](), [0]

    def callback(broadcast: SubmittedBroadcast) -> None:
        if fails[0]:
            fails[0] -= 1
            raise RuntimeError("not now")
        called.append(broadcast)

    known = {KIND: BroadcastKind(KIND, on_acknowledged=callback)}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(kinds, "load_entry_points", lambda group, kind: list(known.values()))
        where = Settings(data_dir=Path(folder), cache_dir=Path(folder))

        @contextmanager
        def start(dies_at: int = -1) -> Iterator[tuple[Coordinator, list[str]]]:
            passed: list[str] = []

            def act(name: str) -> None:
                if name.startswith("ddl."):
                    passed.append(name)
                    if len(passed) == dies_at + 1:
                        raise Killed

            with Coordinator(where, log=log, append=log) as made, at_failpoints(act):  # type: ignore[arg-type]
                made._store._db.execute("pragma synchronous=off")  # no process dies here
                yield made, passed

        with start() as (first, _):
            first.ensure_pchannels(2)
            for name, count in (("c", 3), ("d", 2)):
                first.create_collection(name, SCHEMA, vchannels=count)
        for number, step in enumerate(steps):
            with start(step.dies_at) as (mortal, _):
                messages = messages_for(mortal, step.collections, number)
                log.left, log.refuses, fails[0] = step.away, step.refuses, step.fails
                try:
                    done = mortal.acting_for("ada").broadcast(messages, kind=step.kind, data={"n": number})
                    assert done.ticks.keys() == {each.vchannel for each in messages}
                    assert all(done.ticks.values())
                except (Killed, MillraceError):
                    pass
                log.left = -1
            if step.resumes:
                with start() as (next_one, _):
                    next_one.resume()
        with start() as (last, _):
            for _ in range(4):
                last.resume()
            assert last.open_broadcasts() == []
            tasks = [each.task for each in last._store.broadcasts.list_recent(limit=100)]

    tasks = sorted((each for each in tasks if "digest" in each.change), key=lambda each: each.id)
    assert not any("messages" in each.change for each in tasks), "a closed task keeps no payload"
    # Each target of what is done has it once, in the order in which it was stored, in the name of who asked. What was
    # abandoned is nowhere.
    rows = [row for _, row in log.accepted if row["producer_id"] == COORDINATOR_ID and row["type"] == "INSERT"]
    got: dict[str, list[int]] = {}
    for row in rows:
        assert row["principal"] == "ada"
        got.setdefault(row["vchannel"], []).append(row["epoch"])
    done_tasks = [each for each in tasks if each.state is TaskState.DONE]
    expected: dict[str, list[int]] = {}
    for task in done_tasks:
        for channel in task.targets:
            expected.setdefault(channel, []).append(task.id)
    assert got == expected
    ticks = {(row["vchannel"], row["epoch"]): row["time_tick"] for row in rows}
    assert all(task.targets == {name: ticks[name, task.id] for name in task.targets} for task in done_tasks)
    # The callback ran at least once for each, in order on each VChannel, with the ticks at which the messages are.
    for channel in expected:
        order = [each.id for each in called if channel in each.ticks]
        assert order == sorted(order)
    assert {each.id for each in called} == {task.id for task in done_tasks if task.kind == KIND}
    for each in called:
        assert each.ticks == {name: ticks[name, each.id] for name in each.ticks}
        assert each.principal == "ada"
        assert len(each.messages) == len(each.ticks)


def messages_for(coordinator: Coordinator, names: tuple[str, ...], number: int) -> list[MutableMessage]:
    """One insert for every VChannel of the collections."""
    made: list[MutableMessage] = []
    for name in names:
        there = coordinator.collection(name)
        rows = pa.table({"id": list(range(number * 100, number * 100 + 60)), "name": ["x"] * 60})
        shares = split_rows(conform(rows, there), there, None, None)
        made += [insert_message(part, there, vchannel=channel, partition_id=at) for channel, at, part in shares]
    return made

"""Appends that wait for each other share one write, one sync and one run of the chain, and each gets its own answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.errors import DeadlineExceeded, EntryTooLarge, LogUnavailable, MillraceError
from millrace.message import builders
from millrace.message.wire.encode import encode_entry
from millrace.node.append.follower import Follower
from millrace.node.append.host import AppendHost
from millrace.rpc.outcome import AppendOutcome
from millrace.wal.state import ChannelState
from tests.node.append.samples import PCHANNEL, VCHANNELS, insert, keys_of, open_log, opening
from tests.node.append.test_host import eventually

KEYS = keys_of(VCHANNELS[0], 40)


class Gate:
    """Holds the first write of a follower, and notes the number of entries of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes: list[int] = []
        self.entered, self.open = threading.Event(), threading.Event()
        self.fails: Callable[[pa.LargeBinaryArray], MillraceError | None] = lambda values: None
        plain = Follower._append

        def append(follower: Follower, values: pa.LargeBinaryArray) -> object:
            self.writes.append(len(values))
            self.entered.set()
            assert self.open.wait(20.0)
            error = self.fails(values)
            if error is not None:
                raise error
            return plain(follower, values)

        monkeypatch.setattr(Follower, "_append", append)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[AppendHost]:
    with open_log(tmp_path / "log", PCHANNEL) as service, AppendHost(service, ChannelState.new) as opened:
        opened.append(PCHANNEL, opening()).results()
        opened.append(PCHANNEL, encode_entry([insert(KEYS[0])])).results()
        yield opened


@pytest.fixture
def gate(host: AppendHost, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as threads:
        yield threads


def gathered(
    host: AppendHost, gate: Gate, pool: ThreadPoolExecutor, entries: list[list[bytes]]
) -> list[Future[AppendOutcome]]:
    """Append all `entries` while the first of them is being written; then let the writes go on."""
    follower = host._follower(PCHANNEL)
    calls = [pool.submit(host.append, PCHANNEL, entries[0], deadline=20.0)]
    assert gate.entered.wait(10.0)
    for place, each in enumerate(entries[1:]):
        calls.append(pool.submit(host.append, PCHANNEL, each, deadline=20.0))
        eventually(lambda wanted=place + 1: len(follower._inbox) == wanted)  # type: ignore[misc]
    gate.open.set()
    return calls


def test_what_gathers_during_a_write_is_the_next_one(host: AppendHost, gate: Gate, pool: ThreadPoolExecutor) -> None:
    entries = [[encode_entry([insert(key, producer=key + 1)])] for key in KEYS[:12]]
    answers = [call.result().result() for call in gathered(host, gate, pool, entries)]
    assert gate.writes == [1, 11]
    assert [each.message_id for each in answers] == sorted(each.message_id for each in answers)
    repeated = [host.append(PCHANNEL, each).result() for each in entries]
    assert [(each.message_id, each.time_tick) for each in repeated] == [
        (each.message_id, each.time_tick) for each in answers
    ]
    assert all(each.duplicate for each in repeated)


def test_each_call_gets_the_answer_about_its_own_messages(
    host: AppendHost, gate: Gate, pool: ThreadPoolExecutor
) -> None:
    good = [[encode_entry([insert(key) for key in KEYS[:count]])] for count in (1, 3, 2)]
    bad = [encode_entry([insert(KEYS[1], producer=9, sequence=4)]), encode_entry([insert(KEYS[2])])]
    calls = gathered(host, gate, pool, [good[0], good[1], bad, good[2]])
    found = [call.result() for call in calls]
    assert [len(each) for each in found] == [1, 3, 2, 2]
    assert [each.rejected for each in found] == [0, 0, 1, 0]


def test_time_ticks_that_become_no_row_have_answers_of_their_own(
    host: AppendHost, gate: Gate, pool: ThreadPoolExecutor
) -> None:
    tick = [encode_entry([builders.time_tick(term=1)])]
    calls = gathered(host, gate, pool, [[encode_entry([insert(KEYS[1])])], tick, tick, tick])
    ids = [call.result().result().message_id for call in calls]
    assert len(set(ids)) == 4
    assert ids == sorted(ids)


def test_an_append_that_the_log_refuses_fails_alone(host: AppendHost, gate: Gate, pool: ThreadPoolExecutor) -> None:
    large = encode_entry([insert(KEYS[3], body=b"large")])
    gate.fails = lambda values: EntryTooLarge("too large") if large in values.to_pylist() else None
    entries = [[encode_entry([insert(key)])] for key in KEYS[:3]]
    calls = gathered(host, gate, pool, [entries[0], entries[1], [large], entries[2]])
    assert isinstance(calls[2].exception(), EntryTooLarge)
    assert gate.writes[:2] == [1, 3]
    assert [call.result().rejected for call in (calls[0], calls[1], calls[3])] == [0, 0, 0]


def test_a_failed_write_is_the_answer_of_all_its_appends_and_of_no_other(
    host: AppendHost, gate: Gate, pool: ThreadPoolExecutor
) -> None:
    gate.fails = lambda values: LogUnavailable("a lost write") if len(gate.writes) == 2 else None
    calls = gathered(host, gate, pool, [[encode_entry([insert(key)])] for key in KEYS[:4]])
    assert calls[0].result().rejected == 0
    assert [type(call.exception()) for call in calls[1:]] == [LogUnavailable] * 3
    assert host.append(PCHANNEL, encode_entry([insert(KEYS[5])])).rejected == 0


def test_an_append_that_waits_too_long_for_its_turn_is_withdrawn(
    host: AppendHost, gate: Gate, pool: ThreadPoolExecutor
) -> None:
    first = pool.submit(host.append, PCHANNEL, encode_entry([insert(KEYS[0])]), deadline=20.0)
    assert gate.entered.wait(10.0)
    with pytest.raises(DeadlineExceeded, match="did not take the append"):
        host.append(PCHANNEL, encode_entry([insert(KEYS[1])]), deadline=0.1)
    gate.open.set()
    assert first.result().rejected == 0
    assert host.append(PCHANNEL, encode_entry([insert(KEYS[2])])).rejected == 0
    assert gate.writes == [1, 1]


def test_a_lone_append_needs_no_other_thread(host: AppendHost) -> None:
    follower = host._follower(PCHANNEL)
    judged: list[str] = []
    plain = follower._judge

    def judge(entries: object) -> None:
        judged.append(threading.current_thread().name)
        plain(entries)  # type: ignore[arg-type]

    follower._judge = judge  # type: ignore[method-assign]
    for key in KEYS[:30]:
        host.append(PCHANNEL, encode_entry([insert(key)])).results()
    own = threading.current_thread().name
    assert judged.count(own) > 20

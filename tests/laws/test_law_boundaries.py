"""Exactly at a limit, and one step before it: the places that random logs seldom meet.

The model says what is right there.
"""

from __future__ import annotations

from typing import Any

import pytest

from millrace.message.types import MessageType as T
from tests.laws.parts import DAY_MS, Msg, Row
from tests.laws.real import assert_same_rows, run
from tests.laws.scribe import COLLECTIONS, CONFIG, FIELDS, Scribe, body, keys_at, rows_payload

HERE, THERE = "p0_2v0", "p0_1v0"
"""What a timer is set on, and where messages come that move the ticks on."""


def insert(vchannel: str, rows: int = 1, **header: Any) -> Msg:
    collection_id = int(vchannel[3])
    names = COLLECTIONS[collection_id]
    payload, batch = rows_payload(FIELDS, keys_at(names.index(vchannel), len(names))[:rows])
    more = {"collection_id": collection_id, "partition_id": 1, "schema_version": 1, "rows": rows} | header
    return Msg(T.INSERT, vchannel, payload=payload, batch=batch, **more)


def begin(keepalive_ms: int) -> Msg:
    return Msg(T.BEGIN_TXN, HERE, collection_id=2, txn_id=5, payload=body(keepalive_ms=keepalive_ms))


def judged(scribe: Scribe) -> list[Row]:
    """The chain's rows, which are the model's however the log is cut."""
    written = scribe.written
    singly = run(written, range(len(written.entries)))
    assert_same_rows(written.flat(), singly.rows)
    assert run(written).rows == singly.rows
    return singly.rows


def lease(scribe: Scribe) -> tuple[int, str]:
    scribe.append([begin(50)], after_ms=3)
    return 50, "ROLLBACK_TXN"


def renewed_lease(scribe: Scribe) -> tuple[int, str]:
    scribe.append([begin(50)], after_ms=3)
    scribe.append([Msg(T.KEEP_ALIVE, HERE, collection_id=2, txn_id=5)], after_ms=49)
    return 50, "ROLLBACK_TXN"


def txn_lifetime(scribe: Scribe) -> tuple[int, str]:
    scribe.append([begin(200)], after_ms=3)
    for _ in range(2):
        scribe.append([Msg(T.KEEP_ALIVE, HERE, collection_id=2, txn_id=5)], after_ms=150)
    return CONFIG["max_txn_lifetime_ms"] - 300, "ROLLBACK_TXN"


def segment_idle(scribe: Scribe) -> tuple[int, str]:
    for _ in range(3):
        scribe.append([insert(HERE)], after_ms=7)
    (segment,) = [each for each in scribe.model.segments.values() if each.vchannel == HERE]
    assert segment.bytes >= CONFIG["segment_idle_bytes"]
    return CONFIG["segment_idle_ms"], "FLUSH"


def segment_lifetime(scribe: Scribe) -> tuple[int, str]:
    scribe.append([insert(HERE)], after_ms=3)
    (segment,) = [each for each in scribe.model.segments.values() if each.vchannel == HERE]
    assert segment.bytes < CONFIG["segment_idle_bytes"]
    return CONFIG["segment_lifetime_ms"], "FLUSH"


TIMERS = [lease, renewed_lease, txn_lifetime, segment_idle, segment_lifetime]


@pytest.mark.parametrize("timer", TIMERS)
@pytest.mark.parametrize("early", [0, 1])
def test_a_timer_fires_in_its_millisecond_and_not_the_one_before(timer: Any, early: int) -> None:
    scribe = Scribe()
    scribe.usual_opening()
    after_ms, fires = timer(scribe)
    before = len(judged(scribe))
    scribe.append([Msg(T.TIME_TICK)], after_ms=after_ms - early)
    assert [row["type"] for row in judged(scribe)[before:]] == [fires, "TIME_TICK"][early:]


@pytest.mark.parametrize("timer", TIMERS)
@pytest.mark.parametrize("behind", [1, 3])
def test_a_timer_fires_at_its_very_tick_among_messages_that_come_together(timer: Any, behind: int) -> None:
    scribe = Scribe()
    scribe.usual_opening()
    scribe.append([Msg(T.CONFIG, payload=body(segment_bytes=100_000))])  # so that nothing else seals a segment
    _, fires = timer(scribe)
    scribe.append([insert(THERE)], after_ms=1)  # its segment is there, and younger
    deadline = min(each[0] for each in scribe.model.timers())
    scribe.append([Msg(T.TIME_TICK, barrier_tick=deadline - 4)])
    assert scribe.model.last_tick == deadline - 3
    before = len(judged(scribe))
    scribe.append([insert(THERE)] * (2 + behind))
    rows = judged(scribe)[before:]
    assert [row["type"] for row in rows] == ["INSERT", "INSERT", fires, *["INSERT"] * behind]
    assert [row["time_tick"] for row in rows] == list(range(deadline - 2, deadline + 1 + behind))


@pytest.mark.parametrize("after_ms", [299, 300, 301])
def test_a_timer_that_messages_set_themselves_fires_among_them(after_ms: int) -> None:
    scribe = Scribe()
    scribe.usual_opening()
    scribe.append([insert(THERE), insert(HERE), insert(HERE)], after_ms=3)
    before = len(judged(scribe))
    scribe.append([insert(HERE)], after_ms=1)  # large enough to be idle from here on
    scribe.append([insert(THERE)], after_ms=after_ms)
    assert [row["type"] for row in judged(scribe)[before:]] == ["INSERT", *["FLUSH"] * (after_ms >= 300), "INSERT"]


@pytest.mark.parametrize(("ahead_ms", "reason"), [(DAY_MS, None), (DAY_MS + 1, "MALFORMED")])
@pytest.mark.parametrize("logical", [0, (1 << 18) - 1])
def test_a_barrier_lies_24_hours_ahead_at_most(ahead_ms: int, reason: str | None, logical: int) -> None:
    scribe = Scribe()
    scribe.usual_opening()
    ahead = (scribe.physical_ms + ahead_ms << 18) + logical
    scribe.append([insert(HERE, barrier_tick=ahead)])
    scribe.append([Msg(T.TIME_TICK, barrier_tick=ahead)])
    assert [row["reason"] for row in judged(scribe)[-2:]] == [reason] * 2


@pytest.mark.parametrize("over", [0, 1])
def test_sizes_are_allowed_up_to_their_limit(over: int) -> None:
    message = insert(HERE, 3)
    limits = {"max_message_bytes": len(message.payload) - over, "max_txn_bytes": 2 * len(message.payload) - over}
    for name, reason in (("max_message_bytes", "TOO_LARGE"), ("max_txn_bytes", "TXN_TOO_LARGE")):
        scribe = Scribe()
        scribe.usual_opening()
        scribe.append([Msg(T.CONFIG, payload=body(**{name: limits[name]})), begin(100)])
        before = len(judged(scribe))
        scribe.append([insert(HERE, 3, txn_id=5)] * 2)
        reasons = [row["reason"] for row in judged(scribe)[before:] if row["type"] == "INSERT"]
        refused = 0 if not over else 2 if name == "max_message_bytes" else 1
        assert reasons == [None] * (2 - refused) + [reason] * refused


@pytest.mark.parametrize(("keepalive_ms", "reason"), [(0, "MALFORMED"), (1, None), (200, None), (201, "MALFORMED")])
def test_a_lease_is_a_millisecond_at_least_and_the_limit_at_most(keepalive_ms: int, reason: str | None) -> None:
    scribe = Scribe()
    scribe.usual_opening()
    scribe.append([begin(keepalive_ms)])
    assert judged(scribe)[-1]["reason"] == reason

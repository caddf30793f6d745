"""Law 8: a retried sequence has one effect and gets the first one's result while that is remembered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from millrace.message.types import MessageType as T
from tests.laws.parts import Msg, Row
from tests.laws.profile import examples
from tests.laws.real import assert_same_rows, row_id, run
from tests.laws.scribe import COLLECTIONS, FIELDS, LOGS, Scribe, keys_at, rows_payload

AGAIN = ("DUPLICATE", "ALREADY_APPLIED")


@dataclass(frozen=True)
class Send:
    """One message of a producer, and how many of its last messages it sends again behind it, at once or in an entry."""

    producer: int
    vchannel: int
    rows: int
    partition: int  # 9 is unknown: a rejection is a result too
    again: int
    together: bool


SENDS = st.lists(
    st.builds(
        Send,
        producer=st.integers(1, 2),
        vchannel=st.integers(0, 1),
        rows=st.integers(1, 3),
        partition=st.sampled_from([1, 1, 2, 9]),
        again=st.sampled_from([0, 0, 1, 2, 5, 12]),
        together=st.booleans(),
    ),
    min_size=1,
    max_size=25,
)


def send_all(sends: list[Send], *, retrying: bool) -> Scribe:
    scribe = Scribe()
    scribe.usual_opening()
    sent: dict[tuple[int, int], list[Msg]] = {}
    for send in sends:
        before = sent.setdefault((send.producer, send.vchannel), [])
        payload, batch = rows_payload(FIELDS, keys_at(send.vchannel, 2)[: send.rows])
        header: dict[str, Any] = {"vchannel": COLLECTIONS[1][send.vchannel], "collection_id": 1, "schema_version": 1}
        header |= {"partition_id": send.partition, "producer_id": send.producer, "sequence": len(before)}
        before.append(Msg(T.INSERT, **header, rows=send.rows, payload=payload, batch=batch))
        retries = before[-send.again :] if retrying and send.again else []
        if send.together:
            scribe.append([before[-1], *retries])
        else:
            scribe.append([before[-1]])
            for retry in retries:
                scribe.append([retry])
    return scribe


def without_ids(rows: list[Row]) -> list[Row]:
    """The rows without where their entries are in the log, nor who appended those."""
    left_out = {"ledger", "entry", "index", "ordinal", "lc_ledger", "lc_entry", "lc_index", "lc_ordinal", "principal"}
    return [{name: value for name, value in row.items() if name not in left_out} for row in rows]


def key_of(row: Row) -> tuple[str, int, int, int]:
    return (row["vchannel"], row["producer_id"], row["epoch"], row["sequence"])


@examples(70)
@given(SENDS)
def test_retries_of_any_suffix_at_any_time_have_no_effect(sends: list[Send]) -> None:
    plain, retried = (run(send_all(sends, retrying=retrying).written) for retrying in (False, True))
    assert without_ids([row for row in retried.rows if row["reason"] not in AGAIN]) == without_ids(plain.rows)
    for name, channel in retried.state.vchannels.items():
        twin = plain.state.vchannels[name]
        assert (channel.mvcc, channel.growing, channel.sealed) == (twin.mvcc, twin.growing, twin.sealed)


@examples(60)
@given(st.one_of(LOGS, SENDS.map(lambda sends: send_all(sends, retrying=True))))
def test_a_duplicate_gets_the_first_result(log: Scribe) -> None:
    rows = run(log.written).rows
    by_id = {":".join(map(str, row_id(row))): row for row in rows}
    for row in rows:
        if row["reason"] == "DUPLICATE":
            where, _, why = row["detail"].partition(" ")
            first_id, _, tick = where.partition("@")
            original = by_id[first_id]
            assert key_of(original) == key_of(row)
            assert (original["time_tick"], original["reason"] or "") == (int(tick), why)
            assert row_id(original) < row_id(row)


@examples(60)
@given(SENDS)
def test_nothing_is_applied_twice(sends: list[Send]) -> None:
    rows = run(send_all(sends, retrying=True).written).rows
    applied = [key_of(row) for row in rows if row["producer_id"] and row["reason"] not in AGAIN]
    assert len(applied) == len(set(applied)) == len(sends)


@examples(30)
@given(SENDS)
def test_the_last_result_is_always_remembered(sends: list[Send]) -> None:
    last = replace(sends[-1], again=1, together=False)
    repeated = run(send_all([*sends[:-1], last], retrying=True).written).rows[-1]
    mine = [send for send in sends if (send.producer, send.vchannel) == (last.producer, last.vchannel)]
    assert (repeated["reason"], repeated["sequence"]) == ("DUPLICATE", len(mine) - 1)


FORGETTING = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 1), st.lists(st.integers(0, 40), max_size=3)), min_size=1, max_size=25
)
"""(producer, VChannel, which of all messages so far are sent again, by whoever sent them).

Two producers are remembered.
"""


@examples(80)
@given(FORGETTING)
@example([(1, 0, []), (2, 0, []), (3, 0, [0])])
def test_nothing_takes_effect_twice_even_where_its_producer_was_forgotten(
    sends: list[tuple[int, int, list[int]]],
) -> None:
    scribe = Scribe()
    scribe.usual_opening()
    numbers: dict[tuple[int, int], tuple[int, int]] = {}  # epoch and next sequence
    sent: list[Msg] = []
    rows: list[Row] = []

    def append(message: Msg) -> Row:
        rows.extend(scribe.append([message]))
        return rows[-1] if rows[-1]["producer_id"] else next(row for row in reversed(rows) if row["producer_id"])

    for number, (producer, place, again) in enumerate(sends):
        payload, batch = rows_payload(FIELDS, keys_at(place, 2)[:1])
        header: dict[str, Any] = {"vchannel": COLLECTIONS[1][place], "collection_id": 1, "schema_version": 1}
        header |= {"partition_id": 1, "producer_id": producer, "rows": 1, "payload": payload, "batch": batch}
        epoch, sequence = numbers.get((producer, place), (1, 0))
        barrier = 0 if sequence else 1
        while True:
            message = Msg(T.INSERT, **header, epoch=epoch, sequence=sequence, barrier_tick=barrier)
            sent.append(message)
            judged = append(message)
            if judged["reason"] != "UNKNOWN_PRODUCER":
                break
            # It was its first sending: a new epoch begins, above the tick of the verdict.
            epoch, sequence, barrier = epoch + 1, 0, judged["time_tick"]
        assert judged["reason"] is None, f"send {number}"
        numbers[producer, place] = (epoch, sequence + 1)
        for which in again:
            append(sent[which % len(sent)])
    applied = [key_of(row) for row in rows if row["producer_id"] and row["reason"] is None]
    assert len(applied) == len(set(applied)) == len(sends)
    assert_same_rows(scribe.written.flat(), run(scribe.written).rows)

"""Laws 5 and 6: terms fence, and every message of the log is accepted or rejected with a reason, exactly once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from millrace.message.types import MessageType
from millrace.message.wire.decode import decode_entries
from millrace.wal.reasons import Reason
from tests.laws.parts import Row
from tests.laws.profile import examples
from tests.laws.real import is_emitted, row_id, run
from tests.laws.scribe import LOGS, Scribe


def types_in_log(log: Scribe) -> dict[tuple[int, int], int]:
    """(entry, index) → type number of every message, as the wire form decodes it; 0 where it does not."""
    found = {}
    for place, (log_id, _, _) in enumerate(log.written.entries):
        batch = decode_entries(log.written.read(place, place + 1).batch)
        for row in batch.to_pylist():
            found[log_id.entry, row["index"]] = row["type"]
    return found


@examples(60)
@given(LOGS)
def test_every_message_is_accepted_or_rejected_exactly_once(log: Scribe) -> None:
    rows = run(log.written).rows
    own = Counter((row["entry"], row["index"]) for row in rows if not is_emitted(row))
    expected = {
        (log_id.entry, index)
        for (log_id, _, _), count in zip(log.written.entries, log.written.counts, strict=True)
        for index in range(count)
    }
    assert set(own) <= expected
    assert set(own.values()) <= {1}
    # A time tick behind nothing new is the one message that leaves no row.
    silent = expected - set(own)
    types = types_in_log(log)
    assert {types[place] for place in silent} <= {MessageType.TIME_TICK}


@examples(60)
@given(LOGS)
def test_ids_number_what_came_out_of_a_message_from_zero(log: Scribe) -> None:
    rows = run(log.written).rows
    assert rows == sorted(rows, key=row_id)
    ordinals: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        ordinals.setdefault((row["entry"], row["index"]), []).append(row["ordinal"])
    assert all(found == list(range(len(found))) for found in ordinals.values())


@examples(60)
@given(LOGS)
def test_a_rejection_says_why_and_where_it_came_from(log: Scribe) -> None:
    for row in run(log.written).rows:
        if row["reason"] is None:
            continue
        assert row["reason"] in set(Reason)
        assert row["detail"], f"{row['reason']} without words"
        assert (row["lc_ledger"], row["lc_entry"], row["lc_index"], row["lc_ordinal"]) == row_id(row)
        assert row["segment_id"] == 0


@examples(60)
@given(LOGS)
def test_a_message_stands_only_in_the_term_that_is_open_where_it_lies(log: Scribe) -> None:
    term = 0
    for row in run(log.written).rows:
        if row["reason"] is None:
            if row["type"] == "TERM_OPENING":
                assert row["term"] > term
                term = row["term"]
            assert row["term"] == term > 0
        elif row["reason"] == "TERM_FENCED":
            assert row["term"] <= term if row["type"] == "TERM_OPENING" else row["term"] < term
        elif row["reason"] == "TERM_NOT_OPENED":
            assert term == 0 or row["term"] > term
        elif row["reason"] not in ("MALFORMED", "UNSUPPORTED_TYPE"):
            assert row["term"] == term or row["type"] == "TERM_OPENING"


@examples(60)
@given(LOGS)
def test_appended_rows_are_visible_rolled_back_expired_pending_or_rejected(log: Scribe) -> None:
    ran = run(log.written)
    types, bring_rows = types_in_log(log), (MessageType.INSERT, MessageType.UPSERT, MessageType.IMPORT)
    fate: Counter[str] = Counter()
    bodies: dict[tuple[str, int], int] = {}
    for row in ran.rows:
        key = (row["vchannel"], row["txn_id"])
        if types[row["entry"], row["index"]] in bring_rows and not is_emitted(row):
            if row["reason"] is not None:
                fate["duplicate" if row["reason"] in ("DUPLICATE", "ALREADY_APPLIED") else "rejected"] += 1
            elif row["txn_id"] == 0:
                fate["visible"] += 1
            else:
                bodies[key] = bodies.get(key, 0) + 1
        elif row["type"] in ("COMMIT_TXN", "ROLLBACK_TXN") and row["reason"] is None:
            end = "visible" if row["type"] == "COMMIT_TXN" else row["detail"] or "rolled back"
            fate[end] += bodies.pop(key, 0)
    fate["pending"] = sum(bodies.values())
    assert set(bodies) <= {(name, txn_id) for name, channel in ran.state.vchannels.items() for txn_id in channel.txns}
    assert set(fate) <= {"visible", "rolled back", "expired", "barrier", "rejected", "duplicate", "pending"}
    assert fate.total() == sum(kind in bring_rows for kind in types.values())


@examples(60)
@given(LOGS, st.data())
def test_a_damaged_entry_is_one_malformed_row_and_harms_no_other(log: Scribe, data: st.DataObject) -> None:
    written = log.written
    place = data.draw(st.integers(0, len(written.entries) - 1))
    log_id, physical_ms, value = written.entries[place]
    damaged = bytearray(value or b"\0")
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    written.entries[place] = (log_id, physical_ms, bytes(damaged))
    rows: list[Row] = [row for row in run(written).rows if row["entry"] == log_id.entry and not is_emitted(row)]
    assert [row["reason"] for row in rows] == ["MALFORMED"]
    assert rows[0]["type"] == "UNDEFINED"

"""The chain is what docs/chain.md says: the same rows as the reference model, and the same state, on random logs."""

from __future__ import annotations

import pytest
from hypothesis import given

from millrace.base.errors import UnsupportedVersion
from millrace.message.types import MessageType as T
from tests.laws.ops import ENTRIES
from tests.laws.parts import Msg
from tests.laws.profile import examples
from tests.laws.real import assert_same_rows, run, snapshot_of
from tests.laws.scribe import COLLECTIONS, FIELDS, LOGS, Scribe, body, keys_at, rows_payload


@examples(220)
@given(LOGS)
def test_the_chain_gives_the_rows_of_the_model(log: Scribe) -> None:
    assert_same_rows(log.written.flat(), run(log.written).rows)


@examples(50)
@given(LOGS)
def test_the_chain_has_the_state_of_the_model_after_each_entry(log: Scribe) -> None:
    ran = run(log.written, range(len(log.written.entries)))
    for snapshot, outcome in zip(log.written.snapshots, ran.outcomes, strict=True):
        assert snapshot_of(outcome.state) == snapshot


@examples(30)
@given(ENTRIES)
def test_an_entry_before_the_first_opening_is_rejected_whole(
    entry: tuple[int, list[tuple[object, ...]] | bytes],
) -> None:
    scribe = Scribe()
    after_ms, ops = entry
    if isinstance(ops, bytes):
        scribe.append(ops, after_ms=after_ms)
    else:
        scribe.append_ops([op for op in ops if op[0] != "opening"] or [("tick", *ops[0][1:2])], after_ms=after_ms)
    ran = run(scribe.written)
    assert {row["reason"] for row in ran.rows} <= {"TERM_NOT_OPENED", "TERM_FENCED", "UNSUPPORTED_TYPE", "MALFORMED"}
    assert ran.state.last_tick == 0


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_an_upsert_is_a_number_without_behaviour_to_a_term_of_an_older_version(version: int) -> None:
    scribe = Scribe()
    scribe.usual_opening()
    scribe.append([Msg(T.TERM_OPENING, term=2, payload=body(chain_version=version, config={}))])
    header = {"term": 2, "collection_id": 1, "partition_id": 1, "schema_version": 1, "rows": 2}
    payload, batch = rows_payload(FIELDS, keys_at(0, 2)[:2])
    kinds = [T.INSERT, T.UPSERT, T.UPSERT, T.DELETE, T.UPSERT]
    keys, key_batch = rows_payload(FIELDS[:1], keys_at(0, 2)[:2])
    values = {kind: {"payload": payload, "batch": batch} for kind in (T.INSERT, T.UPSERT)}
    values[T.DELETE] = {"payload": keys, "batch": key_batch}
    rows = scribe.append([Msg(kind, "p0_1v0", **header, **values[kind]) for kind in kinds])
    found = [(row["type"], row["reason"]) for row in rows if row["type"] not in ("CREATE_SEGMENT", "FLUSH")]
    upsert = ("UPSERT", None) if version == 4 else ("UNDEFINED", "UNSUPPORTED_TYPE")
    assert found == [("INSERT", None), upsert, upsert, ("DELETE", None), upsert]
    assert_same_rows(scribe.written.flat(), run(scribe.written).rows)


def test_a_blocking_delete_cuts_the_run_for_the_other_vchannels_too() -> None:
    scribe = Scribe()
    scribe.usual_opening()
    for kind, fields, rows in ((T.INSERT, FIELDS, (1, 1)), (T.DELETE, FIELDS[:1], (5, 1))):
        messages = []
        for vchannel, place, count in (("p0_1v0", 0, rows[0]), ("p0_2v0", 0, rows[1])):
            collection_id = int(vchannel[3])
            keys = keys_at(place, len(COLLECTIONS[collection_id]))[:count]
            payload, batch = rows_payload(fields, keys)
            header = {"collection_id": collection_id, "partition_id": 1, "schema_version": 1, "rows": count}
            messages.append(Msg(kind, vchannel, payload=payload, batch=batch, **header))
        scribe.append(messages)
    assert_same_rows(scribe.written.flat(), run(scribe.written).rows)


def test_a_host_refuses_to_run_a_chain_version_that_it_lacks() -> None:
    scribe = Scribe()
    scribe.usual_opening()
    written = scribe.written
    newer = Msg(T.TERM_OPENING, term=2, payload=body(chain_version=99, config={}))
    scribe.end(scribe.begin(0), [newer])
    with pytest.raises(UnsupportedVersion):
        run(written)

"""The reference model on examples worked by hand from docs/chain.md: what the laws compare with is checked itself."""

from __future__ import annotations

import json

from millrace.message.ids import compose_tick
from millrace.message.types import MessageType as T
from tests.laws.parts import Msg, Row, home, splitmix64
from tests.laws.scribe import COLLECTIONS, FIELDS, START_MS, Scribe, body, create_body, keys_at, opening, rows_payload

V0 = "p0_1v0"


def tick(ms: int, logical: int = 0) -> int:
    return compose_tick(START_MS + ms, logical)


def opened(**config: int) -> Scribe:
    """A PChannel in term 1 with collection 1 on its VChannel 0; both messages are entry (0, 1)."""
    scribe = Scribe()
    create = Msg(T.CREATE_COLLECTION, V0, collection_id=1, payload=create_body(1, 2))
    scribe.append([opening(1, config), create])
    return scribe


def insert(rows: int = 1, **header: int) -> Msg:
    payload, batch = rows_payload(FIELDS, keys_at(0, 2)[:rows])
    header = {"collection_id": 1, "partition_id": 1, "schema_version": 1, "rows": rows} | header
    return Msg(T.INSERT, V0, payload=payload, batch=batch, **header)


def on_v0(kind: T, txn_id: int, **header: object) -> Msg:
    return Msg(kind, V0, collection_id=1, txn_id=txn_id, **header)  # type: ignore[arg-type]


def short(rows: list[Row]) -> list[tuple[str, int, int]]:
    """(type or reason, tick, ordinal) of each row."""
    return [(row["reason"] or row["type"], row["time_tick"], row["ordinal"]) for row in rows]


def test_splitmix64_and_the_key_hash_are_the_published_functions() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert home("", 1 << 64) == 0xCBF29CE484222325 ^ 0xCBF29CE4


def test_a_first_insert_has_its_segment_created_before_it() -> None:
    scribe = opened()
    rows = scribe.append([insert(), insert()], after_ms=5)
    assert short(rows) == [("CREATE_SEGMENT", tick(5), 0), ("INSERT", tick(5, 1), 1), ("INSERT", tick(5, 2), 0)]
    assert [row["segment_id"] for row in rows] == [tick(5)] * 3
    assert scribe.model.vchannels[V0].mvcc == tick(5, 2)


def test_a_transaction_expires_when_log_time_passes_its_lease() -> None:
    scribe = opened(default_txn_keepalive_ms=10)
    scribe.append([on_v0(T.BEGIN_TXN, 7), insert(txn_id=7)])
    assert short(scribe.append([on_v0(T.KEEP_ALIVE, 7)], after_ms=9)) == [("KEEP_ALIVE", tick(9), 0)]
    rows = scribe.append([on_v0(T.COMMIT_TXN, 7)], after_ms=10)
    assert short(rows) == [("ROLLBACK_TXN", tick(19), 0), ("TXN_EXPIRED", tick(19), 1)]
    assert rows[0]["detail"] == "expired"


def test_last_confirmed_is_the_oldest_open_begin() -> None:
    scribe = opened()
    rows = scribe.append([on_v0(T.BEGIN_TXN, 1), on_v0(T.BEGIN_TXN, 2), on_v0(T.COMMIT_TXN, 1), on_v0(T.COMMIT_TXN, 2)])
    assert [(row["lc_entry"], row["lc_index"]) for row in rows] == [(2, 0), (2, 0), (2, 1), (2, 3)]


def test_a_full_segment_waits_for_the_transaction_in_it() -> None:
    scribe = opened(segment_rows=2)
    rows = scribe.append([on_v0(T.BEGIN_TXN, 1), insert(2, txn_id=1), insert(), on_v0(T.COMMIT_TXN, 1)])
    kinds = [kind for kind, _, _ in short(rows)]
    assert kinds == ["BEGIN_TXN", "CREATE_SEGMENT", "INSERT", "CREATE_SEGMENT", "INSERT", "COMMIT_TXN", "FLUSH"]
    assert rows[-1]["segment_id"] == rows[1]["segment_id"]
    assert (rows[-1]["rows"], json.loads(rows[-1]["payload"])) == (2, {"policy": "rows"})


def test_an_exclusive_message_fails_open_transactions_then_flushes_then_takes_its_tick() -> None:
    scribe = opened()
    scribe.append([on_v0(T.BEGIN_TXN, 1), insert(txn_id=1)])
    change = body(add={"name": "more", "type": "int64", "nullable": True})
    rows = scribe.append([Msg(T.SCHEMA_CHANGE, V0, collection_id=1, schema_version=2, payload=change)], after_ms=1)
    assert short(rows) == [("ROLLBACK_TXN", tick(1), 0), ("FLUSH", tick(1, 1), 1), ("SCHEMA_CHANGE", tick(1, 2), 2)]


def test_a_retry_is_a_duplicate_then_too_old_and_a_gap_is_refused() -> None:
    scribe = opened(dedup_results=1)
    rows = []
    for sequence in (0, 0, 1, 0, 3):
        rows += scribe.append([insert(producer_id=1, sequence=sequence)])
    assert [kind for kind, _, _ in short(rows)][1:] == [
        "INSERT",
        "DUPLICATE",
        "INSERT",
        "ALREADY_APPLIED",
        "SEQUENCE_GAP",
    ]
    assert rows[2]["detail"] == f"0:2:0:1@{tick(0, 3)}"


def test_a_time_tick_is_a_row_only_behind_another_message() -> None:
    scribe = opened()
    assert [len(scribe.append([Msg(T.TIME_TICK)], after_ms=1)) for _ in range(3)] == [1, 0, 0]
    assert scribe.model.last_tick == tick(3)


def test_terms_fence_what_comes_late_and_what_comes_early() -> None:
    scribe = Scribe()
    rows = scribe.append(
        [insert(), opening(2), insert(), opening(2), Msg(T.TIME_TICK, term=3), Msg(T.TIME_TICK, term=2)]
    )
    found = [kind for kind, _, _ in short(rows)]
    assert found == ["TERM_NOT_OPENED", "TERM_OPENING", "TERM_FENCED", "TERM_FENCED", "TERM_NOT_OPENED", "TIME_TICK"]


def test_a_key_belongs_to_one_vchannel() -> None:
    payload, batch = rows_payload(FIELDS, keys_at(1, len(COLLECTIONS[1]))[:1])
    astray = Msg(T.INSERT, V0, collection_id=1, partition_id=1, schema_version=1, rows=1, payload=payload, batch=batch)
    assert [kind for kind, _, _ in short(opened().append([astray]))] == ["WRONG_VCHANNEL"]

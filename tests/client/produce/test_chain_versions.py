"""What a producer does where the chain is older than it, or has forgotten it; over the rig of test_lane.py."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

import pytest

from millrace.base.errors import AppendRejected, AppendUnresolved
from millrace.client.produce.upsert import CHAIN_RECHECK_SECONDS
from tests.client.produce.test_lane import Fault, Rig


def test_where_a_term_runs_an_older_chain_upserts_are_transactions_until_a_newer_one_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("millrace.coord.coordinator._chain_version", lambda settings: 3)
            rig.coordinator.open_term("dml_0")
        before = rig.host.tick("dml_0")
        with rig.producer() as producer:
            for _ in range(2):
                assert not producer.upsert(rig.collection, {"id": rig.keys(0, 2)}).rejections
            with producer.batch() as batch:
                future = batch.upsert({"id": rig.keys(0, 2)}, collection=rig.collection)
            assert future.result().rejected_by_reason == {"UNSUPPORTED_TYPE": 2}
            rig.coordinator.open_term("dml_0")
            assert producer.upsert(rig.collection, {"id": rig.keys(0, 2)}).messages == 4, "not looked for again yet"
            with monkeypatch.context() as patch:
                later = time.monotonic() + CHAIN_RECHECK_SECONDS
                patch.setattr("millrace.client.produce.upsert.time.monotonic", lambda: later)
                assert producer.upsert(rig.collection, {"id": rig.keys(0, 2)}).messages == 1
        rig.host.tick("dml_0")
        tailed = rig.host.tail("dml_0", before, timeout=5.0, max_bytes=1 << 30)
        kinds = [row["type"] for batch in tailed.batches for row in batch.to_pylist()]  # type: ignore[union-attr]
        transaction = ["BEGIN_TXN", "DELETE", "INSERT", "COMMIT_TXN"]
        own = [kind for kind in kinds if kind not in ("TIME_TICK", "TERM_OPENING", "CREATE_SEGMENT")]
        assert own == [*transaction * 3, "UPSERT"]
    finally:
        rig.close()


def test_a_first_message_without_an_answer_does_not_double_when_its_producer_was_forgotten(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    try:
        rig.coordinator.open_term("dml_0", config={"max_producers": 1})
        before = rig.host.tick("dml_0")
        keys = rig.keys(0, 3)
        with rig.producer() as first, rig.producer() as second, rig.producer() as third:
            rig.way.plan = deque([Fault.LOST_AFTER] * rig.settings.append_attempts)
            with pytest.raises(AppendUnresolved):
                first.delete(rig.collection, keys[:1])
            rig.way.plan.clear()
            second.delete(rig.collection, keys[1:2])
            with pytest.raises(AppendRejected, match="whether these messages took effect before, read"):
                first.settle().checked()
            assert not third.delete(rig.collection, keys[2:]).rejections
            assert not first.delete(rig.collection, keys[:1]).rejections, "it goes on, in a new epoch"
            found = [rig.accepted(each, before)[rig.collection.vchannels[0]] for each in (first, second, third)]
            assert found == [[keys[0]] * 2, [keys[1]], [keys[2]]]
    finally:
        rig.close()

"""The index of a declared stream: documents by the columns of its key, newer micro-batches over older ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.settings import Settings
from millrace.flows.batch import Batch
from millrace.flows.declare.stream import stream_of
from millrace.flows.records import Action
from millrace.flows.sinks.opensearch import sink as sinks
from millrace.flows.sinks.opensearch.bulk import Item, Verdict
from millrace.flows.spark_host.frames import sink_of


def test_rows_become_documents_of_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Action] = []

    def send(client: Any, path: str, actions: Sequence[Action], **_: Any) -> list[Item]:
        sent.extend(actions)
        return [Item(Verdict.DONE)] * len(actions)

    monkeypatch.setattr(sinks, "send", send)
    monkeypatch.setattr(sinks, "exists", lambda *_: True)
    monkeypatch.setattr(sinks, "target_of", lambda *_: sinks.Target())
    stream = stream_of(
        {
            "name": "into_index",
            "source": {"kafka": "h:1", "topics": ["t"], "columns": {"tail": "string", "at": "timestamp", "n": "int64"}},
            "sink": {"opensearch": {"hosts": ["http://h:1"], "index_base": "i", "requests": 1}, "key": "tail, at"},
        }
    )
    sink = sink_of(Settings(data_dir=tmp_path), stream, tmp_path / "sink")
    rows = pa.RecordBatch.from_pylist(
        [{"tail": "N1", "at": 0, "n": 1}, {"tail": "N2", "at": 60_000_000, "n": 2}],
        pa.schema([("tail", pa.utf8()), ("at", pa.timestamp("us", "UTC")), ("n", pa.int64())]),
    )
    sink.check(rows.schema)
    for number in (0, 1):
        verdicts = sink.write(Batch("query", number, number + 1, rows=[rows]))
        assert (verdicts.acknowledged, verdicts.failures) == (2, [])
    sink.close()
    ids = [each.id for each in sent]
    assert ids[:2] == ids[2:]
    assert len(set(ids)) == 2
    assert [json.loads(each.body or b"")["n"] for each in sent] == [1, 2, 1, 2]
    versions = [each.version for each in sent]
    assert versions[0] is not None
    assert versions == [versions[0], versions[0], versions[0] + 1, versions[0] + 1]

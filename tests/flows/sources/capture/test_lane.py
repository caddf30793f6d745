"""Captured changes as records, and those records as rows of a collection."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.flows.conversion import KeyedRow, row_of
from millrace.flows.records import Action, Record, is_truncation
from millrace.flows.sources.capture.lane import CapturedRows
from millrace.flows.sources.capture.spool import Mark, Spool
from millrace.flows.sources.source import Limits
from millrace.message.schema import CollectionSchema

PUT = b'{"o":"c","t":"d.t","k":{"id":1},"a":{"id":1}}'


def _records(folder: Path, *lines: bytes) -> list[list[Record]]:
    with Spool(folder, write=True) as spool:
        spool.begin_epoch()
        columns = {
            "key": ["r", "id"],
            "columns": [
                {"name": "raw", "type": "bytes", "meaning": None, "parameters": {}},
                {"name": "n", "type": "bytes", "meaning": "Decimal", "parameters": {}},
            ],
        }
        changes = [("d.t", each) for each in lines]
        described = [("d.t", columns, 0)]
        end = [Mark(len(lines), "", 1)]
        spool.append(changes, end, partition={}, offset={}, complete=True, columns=described)
        end = spool.standing().high
    rows, start, found = CapturedRows(folder, "d.t"), 0, []
    while start < end:
        for batch in rows.batches(start, end, Limits(100, 1 << 20, 0.0)):
            found.append(list(batch.records or ()))
            start = batch.end
    rows.close()
    return found


def test_a_truncation_is_the_first_record_of_its_batch(tmp_path: Path) -> None:
    found = _records(tmp_path, PUT, PUT, b'{"o":"t","t":"d.t"}', PUT, b'{"o":"t"}', b'{"o":"t"}', PUT)
    assert [[is_truncation(each) for each in batch] for batch in found] == [
        [False, False], [True, False], [True], [True, False],
    ]  # fmt: skip


def test_keys_and_bytes_of_a_record_are_those_of_a_row(tmp_path: Path) -> None:
    ((put, gone),) = _records(
        tmp_path,
        b'{"o":"c","t":"d.t","m":7,"g":"0-1-2","k":{"r":"eu","id":1},"a":{"r":"eu","id":1,"raw":"AP8=","note":"AP8="}}',
        b'{"o":"d","t":"d.t","m":8,"k":{"r":"eu","id":1},"b":{"r":"eu","id":1,"raw":null}}',
    )
    schema = _schema()
    assert (put.key, put.timestamp) == (b'["eu",1]', 7)
    assert put.headers == [("millrace.op", b"c"), ("millrace.transaction", b"0-1-2"), ("millrace.base64", b"raw")]
    assert row_of(Action(put, "", put.value, None), schema) == KeyedRow(
        ("eu", 1), {"r": "eu", "id": 1, "raw": b"\x00\xff", "note": "AP8="}
    )
    assert gone.key is not None
    assert row_of(Action(gone, gone.key.decode(), None, None), schema) == KeyedRow(("eu", 1), None)
    for key in ("eu", '["eu"]', '{"r":1}'):
        with pytest.raises(ValueError, match="must be a JSON list of r, id"):
            row_of(Action(gone, key, None, None), schema)


def _schema() -> CollectionSchema:
    from millrace.client.schemas import schema

    return schema({"r": "string", "id": "int64", "raw": "binary?", "note": "string?"}, key=["r", "id"])


@pytest.mark.parametrize("stored", [1, 7, 100], ids="parts of {} changes".format)
def test_a_batch_says_whether_it_ends_with_a_transaction(tmp_path: Path, stored: int) -> None:
    """Transactions of 1, 3, 30 and 4 changes of one table between those of another, in batches of 10."""
    lines: list[tuple[str, bytes]] = []
    ends: list[int] = []
    for size in (1, 3, 30, 4):
        lines += [each for _ in range(size) for each in (("d.t", PUT), ("d.other", PUT))]
        ends.append(len(lines))
    with Spool(tmp_path, write=True) as spool:
        spool.begin_epoch()
        for first in range(0, len(lines), stored):
            marks = [Mark(end - first, "", 1) for end in ends if first < end <= first + stored]
            spool.append(lines[first : first + stored], marks, partition={}, offset={}, complete=True)
        end = spool.end_of("d.t", spool.standing().high)

    def read(limits: Limits) -> list[tuple[int, bool]]:
        rows, start, found = CapturedRows(tmp_path, "d.t"), 0, []
        while start < end:
            (batch,) = rows.batches(start, end, limits)
            found.append((len(batch.records or ()), batch.atomic))
            start = batch.end
        rows.close()
        return found

    large = 30 * len(PUT) + 29 if stored == 1 else 1 << 20
    assert read(Limits(10, 1 << 20, 0.0, whole=large)) == [(4, True), (30, True), (4, True)]
    split = [(4, True), (10, False), (10, False), (10, True), (4, True)]
    assert read(Limits(10, 1 << 20, 0.0)) == split
    assert read(Limits(10, 1 << 20, 0.0, whole=100)) == split
    assert read(Limits(10, 4 * len(PUT), 0.0, whole=1 << 20)) == [(4, True), (30, True), (4, True)]
    assert read(Limits(100, 1 << 20, 0.0)) == [(38, True)]

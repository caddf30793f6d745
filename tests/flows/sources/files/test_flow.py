"""Files of a folder into a collection: made of their columns, altered for more, bad rows and files as dead letters."""

from __future__ import annotations

import threading
from datetime import date
from pathlib import Path

import pytest

import millrace.testing
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.host import run
from millrace.pipelines.declaration import pipeline_of


@pytest.mark.timeout(120)
def test_a_collection_is_made_of_files_and_follows_their_columns(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    with millrace.testing.deployment(tmp_path / "data") as db:
        flow = pipeline_of(
            {
                "id": "orders",
                "source": {"kind": "files", "folder": str(folder), "key": ["id"], "settle_seconds": 0},
                "sink": {"kind": "collection", "collection": "orders", "create": True, "on_schema_change": "alter"},
                "errors": {"collection": "orders_errors"},
            }
        )

        def to_the_end() -> None:
            run(FlowRun(db.settings, flow), stop=threading.Event(), until_end=True)

        (folder / "a.csv").write_text("id,day,amount\n1,2024-02-29,1.5\n2,2024-03-01,\n3\n")
        to_the_end()
        assert db["orders"].schema.key_names == ("id",)
        (folder / "b.jsonl").write_text('{"id": 2, "amount": 7, "note": "é"}\n{"id": 3}\nno\n')
        (folder / "c.parquet").write_bytes(b"nothing")
        to_the_end()
        to_the_end()
        assert db["orders"].read(order_by="id").select(["id", "day", "amount", "note"]).to_pylist() == [
            {"id": 1, "day": date(2024, 2, 29), "amount": 1.5, "note": None},
            {"id": 2, "day": None, "amount": 7.0, "note": "é"},
            {"id": 3, "day": None, "amount": None, "note": None},
        ]
        letters = db["orders_errors"].read().to_pylist()
        assert sorted(each["reason"].split(",")[0].split(" at ")[0].split(": ")[:2] for each in letters) == [
            ["a.csv:4", "it has 1 cells"],
            ["b.jsonl:3", "not JSON"],
            ["c.parquet:0", "the file was read only up to row 0"],
        ]

"""Positions that an earlier build wrote are read, and moved, by this one."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from millrace.base.settings import Settings
from millrace.flows.range_host.positions import (
    COLUMNS,
    Position,
    change_positions,
    commit_positions,
    ensure_positions,
    positions_of,
    positions_uri,
    read_positions,
)
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.file_sink import FileSink
from millrace.storage.table import create_table

NEW = {"records_stale", "topic_id"}
"""Columns that the first build had not."""


def test_a_table_of_the_first_build_gets_what_it_lacks_and_goes_on(settings: Settings) -> None:
    uri = positions_uri(settings, "flights")
    old = pa.schema([each for each in COLUMNS if each.name not in NEW])
    table = create_table(uri, pa.schema([*old, pa.field("task", pa.utf8())]), partition_by=["task"])
    sink = FileSink.at(uri, old, ())
    row = dict.fromkeys(old.names, 3) | {"position": 70, "commits": 4, "written_at": 0}
    sink.write(pa.Table.from_pylist([row], schema=old), {"task": "in-0"})
    commit_fenced(table, [CommitPart(adds=sink.finish(), app_transactions={"pipeline/in-0": AppTransaction(0, 4)})])
    known = positions_of(settings, "flights")["in-0"]
    assert (known.position, known.records_out, known.records_stale, known.topic_id) == (70, 3, 0, "")
    upgraded = ensure_positions(uri)
    assert set(upgraded.columns) >= NEW
    moved = replace(known.moved(90, records_stale=2), topic_id="one")
    assert not commit_positions(upgraded, [(known, moved)]).fenced
    found = read_positions(upgraded)["in-0"]
    assert (found.position, found.records_out, found.records_stale, found.topic_id) == (90, 3, 2, "one")
    assert change_positions(settings, "flights", {"in-0": 5})["in-0"].topic_id == "", "whoever sets it knows the topic"
    assert Position("in-0", 0).topic_id == ""

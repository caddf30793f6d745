"""A node that loses a PChannel in the midst of a flush commits nothing more of it, and the next
owner loses and doubles nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.node.flush.committer import FlushCommitter
from millrace.node.flush.definition import flush_to_end
from millrace.node.flush.flusher import run_flush
from millrace.storage.table import open_table
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.collections.flush_tables import read_checkpoints
from tests.node.flush.plans import plans_of
from tests.tables.wal_maker import Collection, WalMaker


def keys(settings: Settings) -> list[int]:
    table = open_table(rows_uri(settings, 1))
    return [] if table is None else sorted(table.dataset().to_table()["id"].to_pylist())


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("commits", range(5))
def test_what_is_not_owned_any_more_is_not_committed(settings: Settings, commits: int) -> None:
    """The PChannel p0 goes behind so many of the commits; p1 stays."""
    maker = WalMaker(settings)
    maker.open()
    collection = Collection(maker, collection_id=1, vchannels=2)
    collection.create()
    appended: list[int] = []
    for vchannel in collection.vchannels:
        found = collection.keys_of(vchannel, 3)
        appended += found
        rows: dict[str, list[object]] = {"id": list(found), "body": [str(key) for key in found]}
        collection.append(vchannel, collection.insert(rows, vchannel=vchannel))
    maker.commit()
    asked: list[str] = []

    def holds(channel: str) -> bool:
        if channel != "p0":
            return True
        asked.append(channel)
        return len(asked) <= commits

    reports = [run_flush(settings, plan) for plan in plans_of(settings)]
    assert {report.channel for report in reports} == {"p0", "p1"}
    result = FlushCommitter(settings, holds=holds).commit(reports)
    whole = not result.fenced
    assert {report.channel for report in result.committed} == ({"p0", "p1"} if whole else {"p1"})
    assert ("p0" in read_checkpoints(open_table(Path(settings.checkpoints_uri)))) is whole
    assert whole is (len(asked) <= commits)
    flush_to_end(settings)
    assert keys(settings) == sorted(appended)
    checkpoints = read_checkpoints(open_table(Path(settings.checkpoints_uri)))
    assert set(checkpoints) == {"p0", "p1"}

"""A published version is held against a read at its tick, by an engine that knows nothing of Millrace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from millrace.base.settings import Settings
from millrace.operations import published_verification
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.operations.published_verification import PublishedVerification, verify_published
from millrace.storage.published import PublishedChange
from tests.node.publish.published_maker import PublishedMaker


@pytest.fixture
def maker(settings: Settings) -> PublishedMaker:
    made = PublishedMaker(settings)
    made.write(range(40), "first")
    made.flush()
    made.write(range(10), "second")
    made.delete([20, 21])
    made.flush()
    made.publish()
    return made


@contextmanager
def complete(pchannels: set[str]) -> Iterator[None]:
    """The logs of these PChannels have nothing that the tables lack: this world has no log."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published_verification, "lacks_rows", lambda wal, log, name, *, up_to: name not in pchannels)
        yield


def verified(maker: PublishedMaker) -> PublishedVerification:
    log: Any = SimpleNamespace(open=lambda name: SimpleNamespace(close=lambda: None))
    with complete(set(maker.maker.pchannels)):
        return verify_published(maker.settings, log)[maker.collection.id]


def test_a_published_version_holds_what_a_read_gives(maker: PublishedMaker) -> None:
    found = verified(maker)
    assert (found.ok, found.rows, found.read_rows, found.problem) == (True, 38, 38, "")
    maker.write(range(5), "third")
    maker.flush()
    again = verified(maker)
    assert again.ok, "a version that is behind is held against its own tick"
    assert (again.tick, again.digest) == (found.tick, found.digest)
    maker.publish()
    assert verified(maker).tick > found.tick


@pytest.mark.parametrize("swapped", [False, True])
def test_a_wrong_vector_is_found(maker: PublishedMaker, swapped: bool) -> None:
    """A row that is masked too much; and another one in place of a masked one, which leaves the count as it is."""
    table = maker.table()
    assert table is not None
    path, masked = next((path, table.masked(path)) for path in table.files if len(table.masked(path)))
    shown = np.setdiff1d(np.arange(table.files[path].rows), masked)
    wrong = np.sort(np.append(masked[1:] if swapped else masked, shown[:1]))
    table.commit(PublishedChange(table.tick, table.schema_version, mask={path: wrong}))
    found = verified(maker)
    assert not found.ok
    assert (found.rows == found.read_rows) is swapped


def test_a_missing_vector_is_a_problem(maker: PublishedMaker) -> None:
    for path in (maker.folder / "_rows" / "_vectors").iterdir():
        path.unlink()
    found = verified(maker)
    assert not found.ok
    assert found.problem.startswith("TABLE_DAMAGED")


def test_a_tick_that_compaction_folded_is_not_compared(maker: PublishedMaker) -> None:
    maker.write(range(5), "third")
    maker.flush()
    tick = max(maker.maker.last_tick(name) for name in maker.maker.pchannels)
    params = CompactionParams(fold="always", keep_history_hours=0, vacuum=False, min_files=2)
    compact(maker.settings, params, history=tick)
    found = verified(maker)
    assert found.folded
    assert found.ok

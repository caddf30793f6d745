"""Files that compaction replaced stay for readers of published versions, and go once no version needs them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq

from millrace.base.settings import Settings
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.operations.compaction.vacuum import vacuum
from millrace.storage.local import local_path
from millrace.storage.published import PublishedTable
from millrace.storage.replaced_files import FileRemover
from millrace.storage.table import table_at
from millrace.tables.collections.data_tables import published_uri, rows_uri
from tests.node.publish.published_maker import PublishedMaker, rows_in
from tests.storage.published_world import ENGINES


@contextmanager
def allowed() -> Iterator[bool]:
    yield True


def remover(settings: Settings, later: float) -> FileRemover:
    """As it will be in so many seconds."""
    return FileRemover(
        retention=settings.file_retention,
        publish_retention=settings.publish_retention,
        oldest_pin=lambda: None,
        permit=allowed,
        now=lambda: time.time() + later,
    )


def files(settings: Settings) -> set[str]:
    folder = Path(rows_uri(settings, 1))
    return {str(path.relative_to(folder)) for path in folder.rglob("part-*.parquet")}


def test_an_erased_row_is_in_no_file_of_the_tables(settings: Settings) -> None:
    made = PublishedMaker(settings, pchannels=("p0",), vchannels=1)
    made.write(range(10), "kept")
    made.write([77], "secret")
    made.flush()
    made.publish()
    made.delete([77])
    made.flush()
    made.publish()

    def secrets() -> list[str]:
        found = (settings.data_dir / "tables").rglob("part-*.parquet")
        return [path.name for path in found if "secret:77" in pq.read_table(path)["body"].to_pylist()]

    assert secrets(), "hidden, and still there"
    compact(settings, CompactionParams(fold="always", keep_history_hours=0))
    made.publish()
    table = made.table()
    assert table is not None
    late = remover(settings, settings.file_retention + settings.publish_retention + 60)
    late.remove_published(table)
    late.remove(table_at(rows_uri(settings, 1)))
    assert secrets() == []
    made.check()


def test_a_compaction_takes_no_file_from_the_readers_of_published_versions(settings: Settings) -> None:
    made = PublishedMaker(settings, pchannels=("p0",), vchannels=1)
    for number in range(3):
        made.write(range(10 * number, 10 * number + 10), f"v{number}")
        made.flush()
    made.publish()
    first = made.table()
    assert first is not None
    folder = local_path(published_uri(settings, 1))
    before = {name: rows_in(read(folder, version=first.version)) for name, read in ENGINES.items()}
    made.write(range(15), "again")
    made.flush()
    compact(settings, CompactionParams(min_files=2, fold="always", keep_history_hours=0, vacuum=False))
    made.publish()
    replaced = files(settings) - set(table_at(rows_uri(settings, 1)).live_files())
    assert replaced

    shown = table_at(rows_uri(settings, 1))
    remover(settings, settings.file_retention + 60).remove(shown)
    assert remover(settings, settings.file_retention + 60).remove_published(made.table()) == 0  # type: ignore[arg-type]
    vacuum(settings, hours=24)
    for name, read in ENGINES.items():
        assert rows_in(read(folder, version=first.version)) == before[name], name

    late = remover(settings, settings.publish_retention + 60)
    table = PublishedTable.open(made.table().store)  # type: ignore[union-attr]
    assert table is not None
    late.remove_published(table)
    late.remove(shown)
    assert files(settings) == set(table_at(rows_uri(settings, 1)).live_files())
    made.check()

"""A deployment without a log whose collection is published, and what every engine must see of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.node.flush.definition import flush_to_end
from millrace.node.publish.definition import publish_to_end
from millrace.storage.local import local_path
from millrace.storage.published import PublishedTable
from millrace.storage.store import store_at
from millrace.storage.table import open_table, table_at
from millrace.tables.collections.data_tables import deletes_uri, earliest_readable_tick, published_uri, rows_uri
from millrace.tables.read.arrow import read_arrow
from millrace.tables.rewrite.fold import fold_files
from millrace.tables.rewrite.rewrite import merge_job
from tests.storage.published_world import ENGINES
from tests.tables.wal_maker import Collection, WalMaker


def rows_in(table: pa.Table) -> Counter[str]:
    """The rows of a table, by name, whatever their order."""
    return Counter(repr(sorted(row.items())) for row in table.to_pylist())


class PublishedMaker:
    """A maker with one collection."""

    def __init__(
        self,
        settings: Settings,
        *,
        pchannels: Sequence[str] = ("p0", "p1"),
        vchannels: int = 4,
        start_ms: int | None = None,
    ) -> None:
        """`start_ms`: log time of the first message, in Unix milliseconds."""
        self.settings = settings
        self.maker = WalMaker(settings, pchannels=pchannels)
        self.maker.ms = self.maker.ms if start_ms is None else start_ms
        self.maker.open()
        self.collection = Collection(self.maker, vchannels=vchannels)
        self.collection.create()
        self.maker.commit()

    def write(self, keys: Sequence[int], body: str, *, upsert: bool = True) -> None:
        """Write rows of `keys`, in the WAL at once."""
        for vchannel in self.collection.vchannels:
            mine = [key for key in keys if self.collection.home(key) == vchannel]
            if mine:
                rows: dict[str, list[object]] = {"id": list(mine), "body": [f"{body}:{key}" for key in mine]}
                self.collection.append(vchannel, self.collection.insert(rows, vchannel=vchannel, upsert=upsert))
        self.maker.commit()

    def delete(self, keys: Sequence[int]) -> None:
        """Delete rows of `keys`, in the WAL at once."""
        for vchannel in self.collection.vchannels:
            mine = [key for key in keys if self.collection.home(key) == vchannel]
            if mine:
                self.collection.append(vchannel, self.collection.delete(mine, vchannel=vchannel))
        self.maker.commit()

    def flush(self, *, percent: int = 100) -> None:
        """Flush up to a share of the ticks that are there."""
        flush_to_end(self.settings, up_to_tick=self.maker.tick_at(percent))

    def confirm(self, pchannels: Sequence[str]) -> Mapping[str, int]:
        """What the log would say: a PChannel without pending messages is whole up to the newest tick of any."""
        newest = max(self.maker.last_tick(name) for name in self.maker.pchannels)
        return {name: newest for name in pchannels if not self.maker.pending[name]}

    def publish(self, *, anew: bool = False, metrics: Metrics | None = None) -> int:
        """Publish, and return the published tick; 0 if nothing is published yet."""
        publish_to_end(self.settings, confirm=self.confirm, anew=anew, metrics=metrics)
        table = self.table()
        return 0 if table is None else table.tick

    def fold(self) -> None:
        """Join the small files of the inner tables."""
        for uri in (rows_uri(self.settings, self.collection.id), deletes_uri(self.settings, self.collection.id)):
            table = open_table(uri)
            if table is not None:
                fold_files(table, merge_job(table, ("id",)))

    def table(self) -> PublishedTable | None:
        return PublishedTable.open(store_at(published_uri(self.settings, self.collection.id)))

    @property
    def folder(self) -> Any:
        found = local_path(published_uri(self.settings, self.collection.id))
        assert found is not None
        return found

    def read(self, tick: int) -> pa.Table:
        """The collection at a tick, as Millrace reads it without a published version; one with it is the same."""
        confirmed = {name: max(tick, self.maker.last_tick(name)) for name in self.maker.pchannels}
        found = read_arrow(self.settings, self.collection.id, at=tick, confirmed=confirmed, use_published=False)
        assert rows_in(read_arrow(self.settings, self.collection.id, at=tick, confirmed=confirmed)) == rows_in(found)
        return found

    def check(self, *, engines: Sequence[str] = tuple(ENGINES), version: int | None = None) -> None:
        """Check that each engine sees what a read at the version's tick gives, if that can still be read."""
        store = store_at(published_uri(self.settings, self.collection.id))
        table = PublishedTable.open(store, version=version)
        assert table is not None
        if table.version == 0 or table.tick < earliest_readable_tick(table_at(rows_uri(self.settings, 1))):
            return
        wanted = self.read(table.tick)
        assert table.row_count == wanted.num_rows
        for name in engines:
            found = ENGINES[name](self.folder, version=version)
            assert found.column_names == wanted.column_names, name
            assert rows_in(found) == rows_in(wanted), f"{name} at version {table.version}, tick {table.tick}"

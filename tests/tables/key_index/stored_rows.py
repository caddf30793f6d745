"""A rows table made file by file, without a WAL, with the plain rule of which rows deletes hit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.stored_columns import key_schema
from millrace.storage.commit import CommitPart, commit_fenced
from millrace.storage.file_sink import FileSink
from millrace.storage.table import TableHandle, table_at
from millrace.tables.collections.data_tables import DATE, ensure_rows_table, stats_columns
from millrace.tables.key_index.index import KeyIndex
from millrace.tables.key_index.lookup import Hits, find_hits
from millrace.wal.visible.collection_rows import rows_file_schema


class Place(NamedTuple):
    """A row, or a delete (partition 0: of all)."""

    key: tuple[Any, ...]
    partition: int
    tick: int
    write: int


def schema_of(*kinds: str) -> CollectionSchema:
    """A collection whose key has fields of these types."""
    fields = tuple(FieldSpec(f"k{number}", kind, False) for number, kind in enumerate(kinds))
    names = tuple(each.name for each in fields)
    return CollectionSchema((*fields, FieldSpec("body", "string", True)), names if len(names) > 1 else names[0])


class StoredRows:
    """The rows table of one collection in `folder`, its files and its index."""

    def __init__(self, folder: Path, schema: CollectionSchema) -> None:
        self.uri = folder / "rows"
        self.index_folder = folder / "_index"
        self.schema = schema
        self.files: dict[str, list[Place]] = {}
        """The live files with their rows in order."""
        ensure_rows_table(self.uri, schema)

    def table(self) -> TableHandle:
        return table_at(self.uri)

    def index(self) -> KeyIndex:
        return KeyIndex.open(self.index_folder)

    def commit(self, *files: Sequence[Place], removes: Sequence[str] = ()) -> list[str]:
        """Add files of rows in place of others, in one commit. Returns their paths."""
        actions = []
        for rows in files:
            sink = FileSink.at(self.uri, rows_file_schema(self.schema), stats_columns(self.schema))
            sink.write(self.rows_table(rows), {DATE: "2026-11-26"})
            (action,) = sink.finish()
            actions.append(action)
            self.files[action.path] = list(rows)
        commit_fenced(self.table(), [CommitPart(actions, removes)]).raise_if_fenced()
        for path in removes:
            del self.files[path]
        return [each.path for each in actions]

    def catch_up(self) -> KeyIndex:
        index = self.index()
        index.catch_up(self.table(), self.schema)
        return index

    def rows_table(self, rows: Sequence[Place]) -> pa.Table:
        columns = self._keys(rows) | {
            "body": pa.array([str(each) for each in rows], pa.utf8()),
            "_partition": pa.array(["p"] * len(rows), pa.utf8()),
            "_partition_id": pa.array([each.partition for each in rows], pa.int64()),
            "_vchannel": pa.array(["v"] * len(rows), pa.utf8()),
            "_segment_id": pa.array([1] * len(rows), pa.int64()),
            "_time_tick": pa.array([each.tick for each in rows], pa.int64()),
            "_write_tick": pa.array([each.write for each in rows], pa.int64()),
        }
        wanted = rows_file_schema(self.schema)
        return pa.table([columns[name] for name in wanted.names], schema=wanted)

    def deletes(self, deletes: Sequence[Place]) -> pa.Table:
        """Deletes as the deletes table has them."""
        return pa.table(
            self._keys(deletes)
            | {
                "_partition_id": pa.array([each.partition for each in deletes], pa.int64()),
                "_time_tick": pa.array([each.tick for each in deletes], pa.int64()),
                "_write_tick": pa.array([each.write for each in deletes], pa.int64()),
            }
        )

    def _keys(self, places: Sequence[Place]) -> dict[str, pa.Array]:
        return {
            each.name: pa.array([place.key[number] for place in places], each.type)
            for number, each in enumerate(key_schema(self.schema))
        }

    def find(self, deletes: Sequence[Place], *, index: KeyIndex | None = None) -> Hits:
        return find_hits(index or self.index(), self.table(), self.schema, self.deletes(deletes))

    def expected(self, deletes: Sequence[Place]) -> dict[str, list[int]]:
        """What `deletes` hit, row by row."""
        found = {
            path: [
                position
                for position, row in enumerate(rows)
                if any(
                    each.key == row.key and each.partition in (0, row.partition) and each[2:] > row[2:]
                    for each in deletes
                )
            ]
            for path, rows in self.files.items()
        }
        return {path: positions for path, positions in found.items() if positions}


def plain(hits: Hits) -> dict[str, list[int]]:
    return {path: positions.tolist() for path, positions in hits.positions.items()}

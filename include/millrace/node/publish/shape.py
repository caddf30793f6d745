"""The columns of a published table, and the files whose values must move before its readers can see them.

A published table has the user's fields. Each is read from one column of the files, the newest that stores the field: a
renamed field is mapped to it, because its column keeps the first name. A field whose type was widened (or changed
inside) has older values in older columns, which no Delta reader joins. So a file with such values gets a *converted*
copy, in the order of its rows: positions stay the same. The copy belongs to the published table alone. The inner file
stays as it is, because reads at earlier ticks need the older columns.

The setting ``publish_partition`` adds the column ``_partition`` of the inner files: the name of a row's partition.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass
from typing import Final, Self

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.message.schema import CollectionSchema
from millrace.message.stored_columns import needed_columns, to_fields
from millrace.storage.file_sink import COMPRESSION
from millrace.storage.parquet_file import FileAction, ParquetFileWriter, open_file
from millrace.storage.published import CONVERTED
from millrace.storage.published_log import PHYSICAL_NAME
from millrace.storage.store import TableStore
from millrace.wal.visible.collection_rows import ROW_COLUMNS, align_to_schema

PARTITION: Final = "_partition"
BATCH_ROWS: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class PublishedShape:
    """The required form of a published table's files, for one schema."""

    schema: CollectionSchema
    columns: pa.Schema
    """The published columns. The metadata of a field names its column in the files, where that is another name."""
    older: frozenset[str]
    """Columns with values of before a field's type changed."""
    digest: str
    """Identifies the columns that converted files have their values in; empty if no field has older columns."""

    @classmethod
    def of(cls, schema: CollectionSchema, *, partition: bool = False) -> Self:
        """Return the shape of `schema`, with the column PARTITION if `partition`."""
        fields = []
        chains: dict[str, str] = {}
        older: set[str] = set()
        for field in schema.fields:
            column = field.stored_columns[-1]
            made = field.arrow()
            if column.name != field.name:
                made = made.with_metadata({PHYSICAL_NAME: column.name})
            fields.append(made)
            if len(field.stored_columns) > 1:
                chains[column.name] = column.type
                older |= {name for name, _ in field.stored_columns[:-1]}
        text = "\n".join(f"{name} {kind}" for name, kind in sorted(chains.items()))
        if partition:
            fields.append(ROW_COLUMNS.field(PARTITION))
            text = f"{text}\n{PARTITION}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:12] if chains else ""
        return cls(schema, pa.schema(fields), frozenset(older), digest)

    @property
    def stored_names(self) -> list[str]:
        """The published columns by their names in the files."""
        names = [field.stored_columns[-1].name for field in self.schema.fields]
        return [*names, PARTITION] if self.has_partition else names

    @property
    def has_partition(self) -> bool:
        """Whether the published columns have the name of a row's partition."""
        return PARTITION in self.columns.names

    def needs_conversion(self, footer: pq.FileMetaData) -> bool:
        """Return whether an inner file has values in a column that published readers do not see."""
        for place in range(footer.num_columns if self.older else 0):
            name, *inside = footer.schema.column(place).path.split(".")
            if name not in self.older:
                continue
            if inside:  # the parts of a struct may all be null where the struct is not
                return True
            for group in range(footer.num_row_groups):
                chunk = footer.row_group(group).column(place)
                found = chunk.statistics
                if found is None or not found.has_null_count or found.null_count < chunk.num_values:
                    return True
        return False

    def convert(self, inner: TableStore, path: str, target: TableStore) -> FileAction:
        """Write the converted copy of an inner file, durable, with all its rows in their order. Raises TableDamaged."""
        added = [ROW_COLUMNS.field(PARTITION)] if self.has_partition else []
        stored = pa.schema([each.with_nullable(True) for each in (*needed_columns(self.schema), *added)])
        names = self.stored_names
        columns = pa.schema(
            [each.with_name(name).remove_metadata() for each, name in zip(self.columns, names, strict=True)]
        )
        made = f"{CONVERTED}/{self.digest}-{uuid.uuid4().hex[:12]}/{path}"
        writer = ParquetFileWriter(target, made, columns, options={"compression": COMPRESSION})
        try:
            with open_file(inner, path) as file:
                there = [each for each in file.schema_arrow.names if each in stored.names]
                for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=there):
                    rows = align_to_schema(pa.Table.from_batches([batch]), stored)
                    found = to_fields(rows, self.schema).select(self.columns.names)
                    writer.write(pa.table(found.columns, columns))
        except BaseException:
            writer.discard()
            raise
        return writer.close({}, names)


def is_converted(path: str, shape: PublishedShape) -> bool:
    """Return whether a published file is a converted copy with the values where `shape` has them."""
    return bool(shape.digest) and path.startswith(f"{CONVERTED}/{shape.digest}-")

"""Views of collections, combined from the coordinator, the checkpoints' catalog and the Delta tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Self, get_args
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.catalog.collection import CollectionInfo
from millrace.message.ids import pchannel_of, tick_physical_ms
from millrace.observe.channels import tick_unix_seconds
from millrace.observe.models import (
    CollectionRow,
    CollectionView,
    FieldView,
    FilePage,
    FileView,
    PartitionView,
    SegmentPage,
    SegmentView,
    VChannelView,
)
from millrace.observe.table_cache import TableSnapshot
from millrace.tables.collections.data_tables import earliest_readable_tick
from millrace.tables.collections.flush_tables import PCHANNEL, SEGMENT_COLUMNS, Checkpoint
from millrace.wal.visible.catalog import SegmentState
from millrace.wal.visible.collection_rows import align_to_schema

MAX_PAGE_SIZE: Final = 500

SEGMENT_STATES: Final = get_args(SegmentState)
FILE_ORDERS: Final = ("tick", "bytes", "rows")


class SegmentTable(NamedTuple):
    """The newest row of every segment, as columns, newest first."""

    table: pa.Table

    def of_collection(self, collection_id: int) -> pa.Table:
        """Return the segments of one collection."""
        return self.table.filter(pa.array(self.table["collection_id"].to_numpy() == collection_id))


class FlushProgress(NamedTuple):
    """Progress of the flusher, and the rows in growing segments by collection."""

    checkpoints: Mapping[str, Checkpoint]
    growing_rows: Mapping[int, int]
    growing: Mapping[tuple[str, int], tuple[int, int]]
    """Rows and payload bytes so far, by VChannel and segment."""
    parts: Mapping[str, tuple[tuple[int, int, int, int, str], ...]]
    """Growing segments of each PChannel: collection, segment, rows, bytes, VChannel."""

    @classmethod
    def of(cls, checkpoints: Mapping[str, Checkpoint], *, known: Self | None = None) -> Self:
        """Compute the progress from the checkpoints.

        Decodes the catalogs of the PChannels that moved since `known`, an earlier answer.
        """
        parts: dict[str, tuple[tuple[int, int, int, int, str], ...]] = {}
        for pchannel, checkpoint in checkpoints.items():
            before = None if known is None else known.checkpoints.get(pchannel)
            if known is not None and before is not None and before.time_tick == checkpoint.time_tick:
                parts[pchannel] = known.parts[pchannel]
                continue
            parts[pchannel] = tuple(
                (channel.collection_id, number, info.rows, info.bytes, name)
                for name, channel in checkpoint.catalog.vchannels.items()
                for number, info in channel.growing.items()
            )
        rows: Counter[int] = Counter()
        growing: dict[tuple[str, int], tuple[int, int]] = {}
        for collection, number, count, size, name in (each for part in parts.values() for each in part):
            rows[collection] += count
            growing[name, number] = count, size
        return cls(checkpoints, rows, growing, parts)

    def flushed_tick(self, vchannel: str) -> int:
        """Return the tick up to which the tables are complete for a VChannel."""
        checkpoint = self.checkpoints.get(pchannel_of(vchannel))
        return checkpoint.time_tick if checkpoint is not None else 0


def read_segments(pinned: TableSnapshot | None) -> SegmentTable:
    """Return the newest row of each segment. Reads all files of the table, column by column."""
    schema = pa.schema([*SEGMENT_COLUMNS, pa.field(PCHANNEL, pa.utf8())])
    parts = [schema.empty_table()]
    if pinned is not None:
        for path, owner in zip(pinned.column("path"), pinned.column(f"partition.{PCHANNEL}"), strict=True):
            rows = align_to_schema(pinned.table.read(unquote(path)), SEGMENT_COLUMNS)
            parts.append(rows.append_column(PCHANNEL, pa.array([owner] * rows.num_rows, pa.utf8())).cast(schema))
    rows = pa.concat_tables(parts)
    if not rows.num_rows:
        return SegmentTable(rows)
    owner = rows[PCHANNEL].combine_chunks().dictionary_encode().indices.to_numpy()
    segment, tick = rows["segment_id"].to_numpy(), rows["time_tick"].to_numpy()
    order = np.lexsort((tick, segment, owner))
    last = np.ones(len(order), dtype=bool)
    last[:-1] = (owner[order][1:] != owner[order][:-1]) | (segment[order][1:] != segment[order][:-1])
    newest = order[last]
    return SegmentTable(rows.take(pa.array(newest[np.argsort(-tick[newest], kind="stable")])))


def count_by_state(segments: pa.Table) -> dict[str, int]:
    """Return the number of segments in each state."""
    counts = Counter(segments["state"].to_pylist())
    return {state: counts[state] for state in SEGMENT_STATES if counts[state]}


def collection_row(
    collection: CollectionInfo,
    rows: TableSnapshot | None,
    deletes: TableSnapshot | None,
    segments: pa.Table,
    flushed: FlushProgress,
) -> CollectionRow:
    """Return a collection's row in the list."""
    return CollectionRow(**_row(collection, rows, deletes, segments, flushed))


def _row(
    collection: CollectionInfo,
    rows: TableSnapshot | None,
    deletes: TableSnapshot | None,
    segments: pa.Table,
    flushed: FlushProgress,
) -> dict[str, Any]:
    tables = [each for each in (rows, deletes) if each is not None]
    ticks = [flushed.flushed_tick(each) for each in collection.vchannels]
    return {
        "id": str(collection.id),
        "name": collection.name,
        "state": collection.state,
        "fields": len(collection.schema.fields),
        "partitions": len(collection.partitions),
        "vchannels": len(collection.vchannels),
        "rows": rows.total("num_records") if rows is not None else 0,
        "deletes": deletes.total("num_records") if deletes is not None else 0,
        "bytes": sum(each.total("size_bytes") for each in tables),
        "files": sum(each.actions().num_rows for each in tables),
        "segments": count_by_state(segments),
        "growing_rows": flushed.growing_rows.get(collection.id, 0),
        "flushed_tick": str(min(ticks, default=0)),
    }


def collection_view(
    collection: CollectionInfo,
    rows: TableSnapshot | None,
    deletes: TableSnapshot | None,
    segments: pa.Table,
    flushed: FlushProgress,
    *,
    table_path: str,
) -> CollectionView:
    """Return a collection in full. `table_path`: its rows table, relative to the root of the tables."""
    schema = collection.schema
    first = {field.name: len(collection.schemas) for field in schema.fields}
    for version in range(len(collection.schemas), 0, -1):
        for field in collection.schemas[version - 1].fields:
            first[field.name] = version
    return CollectionView(
        **_row(collection, rows, deletes, segments, flushed),
        primary_key=schema.primary_key,
        event_time=schema.event_time,
        on_duplicate=schema.on_duplicate,
        schema_version=collection.schema_version,
        field_list=[
            FieldView(
                name=field.name,
                type=field.type,
                nullable=field.nullable,
                key=field.name in schema.key_names,
                event_time=field.name == schema.event_time,
                since_version=first[field.name],
            )
            for field in schema.fields
        ],
        partition_list=_partitions(collection, segments),
        vchannel_list=[
            VChannelView(
                name=each,
                pchannel=pchannel_of(each),
                flushed_tick=str(flushed.flushed_tick(each)),
                flushed_time=tick_unix_seconds(flushed.flushed_tick(each)),
            )
            for each in collection.vchannels
        ],
        table_path=table_path,
        table_version=rows.version if rows is not None else None,
        base_tick=str(earliest_readable_tick(rows.table if rows is not None else None)),
    )


def _partitions(collection: CollectionInfo, segments: pa.Table) -> list[PartitionView]:
    places: dict[int, list[int]] = defaultdict(list)
    for place, number in enumerate(segments["partition_id"].to_pylist()):
        places[number].append(place)
    found = []
    for name, number in collection.partitions.items():
        mine = segments.take(pa.array(places.get(number, []), pa.int64()))
        flushed = mine.filter(pa.array([state == "flushed" for state in mine["state"].to_pylist()], pa.bool_()))
        found.append(
            PartitionView(
                id=str(number),
                name=name,
                segments=count_by_state(mine),
                rows=sum(flushed["rows"].to_pylist()),
                bytes=sum(flushed["bytes"].to_pylist()),
            )
        )
    return found


def segment_page(
    collection: CollectionInfo, segments: pa.Table, flushed: FlushProgress, *, state: str, offset: int, limit: int
) -> SegmentPage:
    """Return segments of a collection, newest first, in one state or (state "") in any. Raises InvalidArgument."""
    if state and state not in SEGMENT_STATES:
        raise InvalidArgument(f"no segment state {state[:40]!r}: use one of {', '.join(SEGMENT_STATES)}")
    if state:
        segments = segments.filter(pa.array([each == state for each in segments["state"].to_pylist()], pa.bool_()))
    partitions = {number: name for name, number in collection.partitions.items()}
    return SegmentPage(
        total=segments.num_rows,
        offset=offset,
        limit=limit,
        items=[
            SegmentView(
                pchannel=each["pchannel"],
                vchannel=each["vchannel"],
                partition=partitions.get(each["partition_id"], str(each["partition_id"])),
                segment_id=str(each["segment_id"]),
                state=each["state"],
                rows=each["rows"] or flushed.growing.get((each["vchannel"], each["segment_id"]), (0, 0))[0],
                bytes=each["bytes"] or flushed.growing.get((each["vchannel"], each["segment_id"]), (0, 0))[1],
                policy=each["policy"],
                merged_into=str(each["merged_into"] or 0),
                created=tick_physical_ms(each["created_tick"]) / 1000,
                since=tick_physical_ms(each["time_tick"]) / 1000,
            )
            for each in segments.slice(offset, limit).to_pylist()
        ],
    )


def file_page(pinned: TableSnapshot | None, *, order: str, offset: int, limit: int) -> FilePage:
    """Return the live files of a table, ordered by newest tick, size or rows, descending. Raises InvalidArgument."""
    if order not in FILE_ORDERS:
        raise InvalidArgument(f"no order {order[:40]!r}: use one of {', '.join(FILE_ORDERS)}")
    if pinned is None:
        return FilePage(total=0, offset=offset, limit=limit, items=[])
    columns = {
        "path": pinned.column("path"),
        "bytes": pinned.column("size_bytes"),
        "rows": [each or 0 for each in pinned.column("num_records")],
        "min": [each or 0 for each in pinned.column("min._time_tick")],
        "tick": [each or 0 for each in pinned.column("max._time_tick")],
        "modified": pinned.column("modification_time"),
        "date": pinned.column("partition._date"),
    }
    places = sorted(range(len(columns["path"])), key=lambda place: columns[order][place], reverse=True)
    return FilePage(
        total=len(places),
        offset=offset,
        limit=limit,
        items=[
            FileView(
                path=unquote(columns["path"][place]),
                rows=columns["rows"][place],
                bytes=columns["bytes"][place],
                partition=str(columns["date"][place] or ""),
                min_tick=str(columns["min"][place]),
                max_tick=str(columns["tick"][place]),
                modified=_seconds(columns["modified"][place]),
            )
            for place in places[offset : offset + limit]
        ],
    )


def _seconds(value: Any) -> float:
    """Return Delta's modification time, given in Unix milliseconds or as a datetime, in Unix seconds."""
    return value.timestamp() if hasattr(value, "timestamp") else float(value or 0) / 1000

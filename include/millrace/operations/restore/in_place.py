"""A restore in place: stage the rows of a time tick, then append one Import per VChannel that replaces all rows.

A collection changes only through messages (law 10): reads before the Imports' ticks return the replaced rows, later
reads the restored ones. A record names the import. A killed run therefore continues with the same messages, and a
finished run is not repeated under its run id.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from millrace.base.errors import CollectionNotFound
from millrace.base.failpoint import hit
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from millrace.client.produce.rows import conform, split_rows
from millrace.message.schema import CollectionSchema
from millrace.message.stored_columns import convert_schema
from millrace.operations.backfill.importer import append_imports
from millrace.operations.backfill.staging_folder import StagingFolder, StagingManifest, staged_folder
from millrace.operations.restore.declaration import RestoreParams
from millrace.operations.restore.records import DONE, LOADING, read_record, write_record
from millrace.runtime.progress import Progress
from millrace.tables.read.plan import ReadPlan

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class ReplaceResult:
    """The Imports that replaced the collection's rows."""

    import_id: str
    ticks: dict[str, int]
    """Tick of its Import by VChannel."""


def record_name(collection: CollectionInfo) -> str:
    """Return the name of the record of a collection's newest restore in place. No collection can have such a name."""
    return f"in-place-{collection.id}"


def finished_restore(client: Database, collection: CollectionInfo, params: RestoreParams) -> ReplaceResult | None:
    """Return what a run with the same id has already done, or None."""
    record = read_record(client.settings, record_name(collection))
    if params.run_id and (record.get("run_id"), record.get("state")) == (params.run_id, DONE):
        return ReplaceResult(record["import_id"], record["ticks"])
    return None


def replace_rows(
    client: Database,
    collection: CollectionInfo,
    params: RestoreParams,
    plan: ReadPlan,
    parts: Iterable[pa.Table],
    progress: Progress,
) -> ReplaceResult:
    """Stage `parts` and append the Imports, or continue those of a killed run.

    `parts` holds the rows at the plan's tick, with the column ``_partition``.

    Raises CollectionNotFound if the collection is dropped, and what :func:`append_imports` raises.
    """
    if collection.state != "active":
        raise CollectionNotFound(f"{params.collection} was dropped: restore it into a new collection")
    settings, name = client.settings, record_name(collection)
    record: dict[str, Any] = {
        "collection": collection.name,
        "tick": plan.tick,
        "run_id": params.run_id,
        "state": LOADING,
    }
    before = read_record(settings, name)
    if {**before, "import_id": ""} == {**record, "import_id": ""}:
        record = before
    else:
        record["import_id"] = f"restore-{collection.id}-{uuid.uuid4().hex}"
        write_record(settings, name, record)
    hit("restore.recorded")
    manifest = StagingManifest.read(staged_folder(settings, record["import_id"]))
    if manifest is None:
        manifest = _stage(client, collection, record["import_id"], plan.schema, parts)
    done = append_imports(client, manifest, replace=True, all_vchannels=collection.vchannels, progress=progress)
    return ReplaceResult(manifest.import_id, {each.vchannel: each.time_tick for each in done})


def shared_fields(then: CollectionSchema, now: CollectionSchema) -> list[tuple[str, str]]:
    """Return the fields that a schema and a later one share with the same type, as (earlier name, later name)."""
    known = {field.stored_columns[0].name: field for field in now.fields}
    pairs = [(field, known.get(field.stored_columns[0].name)) for field in then.fields]
    return [(old.name, new.name) for old, new in pairs if new is not None and new.type == old.type]


def record_done(client: Database, collection: CollectionInfo, replaced: ReplaceResult) -> None:
    """Record that the result was compared and is correct."""
    name = record_name(collection)
    record = read_record(client.settings, name)
    write_record(client.settings, name, {**record, "state": DONE, "ticks": replaced.ticks})


def _stage(
    client: Database, collection: CollectionInfo, import_id: str, then: CollectionSchema, parts: Iterable[pa.Table]
) -> StagingManifest:
    """Stage rows of an earlier schema in the collection's current one: fields renamed, dropped or widened."""
    target = StagingFolder(client.settings, import_id, collection, slice_bytes=None)
    try:
        for part in parts:
            for name in part["_partition"].unique().to_pylist():
                if name not in collection.partitions:  # dropped since: create it again, under a new id
                    client.catalog.create_partition(collection.name, name, restored=True)
                    collection = client.definition(collection.name)
                chosen = part.filter(pc.equal(part["_partition"], name))
                now = convert_schema(chosen.select(then.arrow().names), then, collection.schema)
                rows = conform(now, collection, ruled=False)
                for vchannel, partition, batch in split_rows(rows, collection, name, None):
                    target.add(vchannel, partition, batch)
        return target.publish({})
    finally:
        target.discard()

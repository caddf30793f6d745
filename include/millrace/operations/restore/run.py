"""One restore: read at a tick, create a collection, insert, compare; or replace rows in place (:mod:`.in_place`).

The source is read at one pinned tick. The new collection gets the source's schema and partitions as of that tick, and
its rows through an ordinary producer. The run is done once count and content equal what was read. A killed run leaves a
record beside its partly filled collection. The next run of the same restore drops that collection and starts again, so
the result never holds a row twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import CollectionExists, CollectionNotFound, Malformed
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database, connect
from millrace.message.ids import resolve_tick, tick_physical_ms
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.entry import SessionFactory
from millrace.operations.operation import OperationReport, counted
from millrace.operations.restore import in_place
from millrace.operations.restore.declaration import RestoreParams
from millrace.operations.restore.records import DONE, LOADING, RestoreState, read_record, write_record
from millrace.operations.restore.row_reader import (
    MAX_BYTES_WITHOUT_SPARK,
    ContentDigest,
    RestoreRows,
    RowReader,
    reader_for,
)
from millrace.operations.restore.schema_rules import loadable_schema
from millrace.runtime.progress import Progress
from millrace.tables.read.freshness import confirm_ticks
from millrace.tables.read.plan import ReadPlan, plan_read


class CollectionRestoreReport(OperationReport):
    """The result of a restore."""

    collection: str
    into: str
    into_id: int | None
    tick: int
    at: str
    """Time of the tick, UTC."""
    rows: int
    digest: str
    """Row count and two hash sums, equal for source and copy. Spark's hashes differ from Arrow's."""
    ticks: dict[str, int]
    """Tick of the Import on each VChannel, for a restore in place."""
    dry_run: bool
    seconds: float

    @property
    def sentence(self) -> str:
        rows = f"{counted(self.rows, 'row')} of {self.collection} at {self.at}"
        if self.dry_run:
            return f"{rows} can be restored; nothing was changed."
        return f"{rows} are now in {self.into or self.collection}."


def restore(settings: Settings, params: RestoreParams, progress: Progress) -> CollectionRestoreReport:
    """Run the operation as its job does: with a Spark session if there is much to read."""
    from millrace.operations.entry import spark_session

    return run(settings, params, progress, session_factory=lambda: spark_session("restore", settings, progress))


def run(
    settings: Settings,
    params: RestoreParams,
    progress: Progress,
    *,
    session_factory: SessionFactory,
    max_bytes_without_spark: int = MAX_BYTES_WITHOUT_SPARK,
) -> CollectionRestoreReport:
    """Restore. `session_factory` is called if there is more to read than `max_bytes_without_spark`.

    Raises CollectionNotFound, CollectionExists, TickTooOld, TickNotReached, and Malformed if the copy differs.
    """
    started = time.monotonic()
    with connect(settings=settings) as db, ExitStack() as stack:
        source = _source(db, params.collection)
        _clear(settings, db, params)
        at = resolve_tick(params.at) if params.at else None
        confirmed = _confirmed(settings, db, source, at)
        plan = plan_read(settings, source.id, at=at, deadline=settings.read_deadline, confirmed=confirmed)
        read = reader_for(plan, stack, session_factory, max_bytes_without_spark=max_bytes_without_spark)
        rows = read(source.id, at=plan.tick, confirmed=confirmed)
        names = plan.schema.arrow().names
        made, replaced = None, None
        try:
            progress.update("reading the source", tick=plan.tick)
            wanted = rows.digest(names)
            parts = _parts(rows, plan, wanted, params, progress)
            if params.in_place and not params.dry_run:
                replaced = in_place.finished_restore(db, source, params)
                if replaced is None:
                    alike = in_place.shared_fields(plan.schema, source.schema)
                    then = rows.digest([old for old, _ in alike])
                    replaced = in_place.replace_rows(db, source, params, plan, parts, progress)
                    progress.update("comparing")
                    _compare_in_place(read, db, source, plan, replaced, then, [new for _, new in alike])
                    in_place.record_done(db, source, replaced)
            elif not params.dry_run:
                made = _load(settings, db, params, plan, parts)
                progress.update("comparing")
                reached = _confirmed(settings, db, made, None)
                _same(read(made.id, at=None, confirmed=reached).digest(names), wanted, params.into, plan)
                _record(settings, params, plan, made, DONE)
        finally:
            rows.release()
    return CollectionRestoreReport(
        collection=params.collection,
        into=params.into,
        into_id=source.id if replaced is not None else None if made is None else made.id,
        tick=plan.tick,
        at=datetime.fromtimestamp(tick_physical_ms(plan.tick) / 1000, UTC).isoformat(),
        rows=wanted.rows,
        digest=str(wanted),
        ticks={} if replaced is None else replaced.ticks,
        dry_run=params.dry_run,
        seconds=round(time.monotonic() - started, 3),
    )


def _same(found: ContentDigest, wanted: ContentDigest, name: str, plan: ReadPlan) -> None:
    if str(found) != str(wanted):
        raise Malformed(
            f"{name} holds {found}, but {wanted} was read at tick {plan.tick} (rows/digests). Another writer may have "
            f"changed it meanwhile: drop {name} and run the restore again."
        )


def _compare_in_place(
    read: RowReader,
    client: Database,
    collection: CollectionInfo,
    plan: ReadPlan,
    replaced: in_place.ReplaceResult,
    wanted: ContentDigest,
    names: list[str],
) -> None:
    """Check that each VChannel holds the restored rows at the tick of its Import, whatever is written later."""
    settings = client.settings
    reached = _confirmed(settings, client, collection, None)
    found = ContentDigest(0, 0, 0)
    for vchannel, tick in sorted(replaced.ticks.items()):
        rows = read(collection.id, at=tick, confirmed=reached)
        found = found.plus(rows.of_vchannel(vchannel).digest(names))
        rows.release()
    if str(found) != str(wanted):
        raise Malformed(
            f"{collection.name} holds {found} after the restore, but had {wanted} at tick {plan.tick} (rows/digests): "
            "run recovery, then the restore again. The replaced rows are readable before tick "
            f"{min(replaced.ticks.values())}"
        )


def _source(client: Database, name: str) -> CollectionInfo:
    for each in client.catalog.collections(dropped=True):
        if str(each.id) == name:
            return each
    try:
        return client.definition(name)
    except CollectionNotFound:
        dropped = [str(each.id) for each in client.catalog.collections(dropped=True) if each.name == name]
        hint = f"; dropped collections of that name have the ids {', '.join(dropped)}" if dropped else ""
        raise CollectionNotFound(f"no collection {name!r}{hint}") from None


def _confirmed(settings: Settings, client: Database, collection: CollectionInfo, at: int | None) -> dict[str, int]:
    """Return the tick up to which the WAL is complete, by PChannel: everything appended before this call, or `at`."""
    # Works without a running node. If one runs and commits first, this process is fenced.
    ingest_to_end(settings, client.log)
    return confirm_ticks(settings, collection.pchannels, client.connection, at=at, seconds=settings.read_deadline).ticks


def _clear(settings: Settings, client: Database, params: RestoreParams) -> None:
    """Drop what a killed run of this restore left. Any other collection of that name belongs to the user and stays."""
    standing = {each.name: each for each in client.catalog.collections()}.get(params.into)
    if standing is None or params.dry_run:
        return
    record = read_record(settings, params.into)
    if record.get("state") != LOADING or record.get("collection") != params.collection:
        raise CollectionExists(f"the collection {params.into!r} already exists: choose another name, or drop it")
    client.catalog.drop_collection(params.into)


def _parts(
    rows: RestoreRows, plan: ReadPlan, wanted: ContentDigest, params: RestoreParams, progress: Progress
) -> Iterator[pa.Table]:
    """Yield the rows in parts that fit into memory, and report progress after each."""
    slices, done = max(1, -(-wanted.rows // params.rows_per_slice)), 0
    for part in rows.chunks(slices, plan.schema.key_names, [*plan.schema.arrow().names, "_partition"]):
        yield part
        done += part.num_rows
        progress.update("writing", done=done / max(1, wanted.rows), rows=done)


def _load(
    settings: Settings, client: Database, params: RestoreParams, plan: ReadPlan, parts: Iterator[pa.Table]
) -> CollectionInfo:
    # Write the record before creating the collection. After a kill in between, the record names nothing, which is
    # harmless.
    _record(settings, params, plan, None, LOADING)
    hit("restore.recorded")
    channels = plan.vchannels.values()
    names = sorted({name for info in channels for number, name in info.partitions.items() if _existed(plan, number)})
    schema, later = loadable_schema(plan)
    made = client.catalog.create_collection(
        params.into,
        schema,
        partitions=names or ["_default"],
        vchannels=len(next(iter(channels)).vchannels),
        restored=True,
    )
    producer = client.new_producer()
    for part in parts:
        for name in part["_partition"].unique().to_pylist():
            chosen = part.filter(pc.equal(part["_partition"], name))
            producer.insert(made, chosen.drop_columns(["_partition"]), partition=name)
            hit("restore.inserted")
    if later:
        client.catalog.alter(made.name, later)
    return client.definition(made.name)


def _existed(plan: ReadPlan, number: int) -> bool:
    """Return whether a partition still existed at the tick."""
    return all(dropped != number for _, dropped, _ in plan.partition_drops)


def _record(
    settings: Settings, params: RestoreParams, plan: ReadPlan, made: CollectionInfo | None, state: RestoreState
) -> None:
    record = {
        "collection": params.collection,
        "into": params.into,
        "tick": plan.tick,
        "id": None if made is None else made.id,
        "state": state,
    }
    write_record(settings, params.into, record)

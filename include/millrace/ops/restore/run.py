"""One restore: read at a tick, create, insert, compare.

The source is read at one pinned tick. The new collection has the source's schema and partitions as of that tick, gets the
rows through a producer like any other, and is compared by count and content with what was read before the run counts as
done. A run that was killed leaves a record beside its half-filled collection; the next run of the same restore drops that and
starts anew, so the result never has a row twice.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
from pyspark.sql import functions as F

from millrace.client.client import Client
from millrace.client.freshness import confirm
from millrace.coord.store import Collection
from millrace.errors import CollectionExists, CollectionNotFound, Malformed
from millrace.failpoint import hit
from millrace.message.ids import tick_physical_ms
from millrace.node.node_run import catch_up
from millrace.ops.operation import OperationReport, Progress, write_json
from millrace.ops.restore.params import RestoreParams
from millrace.ops.restore.records import restores_path
from millrace.settings import Settings
from millrace.tables.read_plan import ReadPlan, plan_read, resolve_tick
from millrace.tables.reader import read

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOADING = "loading"
DONE = "done"


class RestoreReport(OperationReport):
    """What a restore did."""

    collection: str
    into: str
    into_id: int | None
    tick: int
    at: str
    """The tick's moment, UTC."""
    rows: int
    digest: str
    """Of the rows: a count and two sums of hashes, the same for the source and for what was made."""
    dry_run: bool
    seconds: float


def run(spark: SparkSession, settings: Settings, params: RestoreParams, progress: Progress) -> RestoreReport:
    """Restore. Raises CollectionNotFound, CollectionExists, TickTooOld, TickNotReached; Malformed where the copy differs."""
    started = time.monotonic()
    with Client.connect(settings) as client:
        source = _source(client, params.collection)
        _clear(settings, client, params)
        at = _moment(params.at)
        confirmed = _confirmed(settings, client, source, at)
        plan = plan_read(settings, source.id, at=at, deadline=settings.read_deadline, confirmed=confirmed)
        rows = read(spark, settings, source.id, at=plan.tick, confirmed=confirmed, with_ticks=True).persist()
        try:
            progress.say("reading the source", tick=plan.tick)
            wanted = _digest(rows, plan)
            made = None
            if not params.dry_run:
                made = _load(settings, client, params, plan, rows, int(wanted.partition("/")[0]), progress)
                progress.say("comparing")
                reached = _confirmed(settings, client, made, None)
                found = _digest(read(spark, settings, made.id, confirmed=reached), plan)
                if found != wanted:
                    raise Malformed(
                        f"{params.into} holds {found}, {params.collection} at tick {plan.tick} {wanted} (rows/digests): "
                        f"somebody wrote to it meanwhile? Drop {params.into} and run the restore again."
                    )
                _record(settings, params, plan, made, DONE)
        finally:
            rows.unpersist()
    return RestoreReport(
        collection=params.collection,
        into=params.into,
        into_id=None if made is None else made.id,
        tick=plan.tick,
        at=datetime.fromtimestamp(tick_physical_ms(plan.tick) / 1000, UTC).isoformat(),
        rows=int(wanted.partition("/")[0]),
        digest=wanted,
        dry_run=params.dry_run,
        seconds=round(time.monotonic() - started, 3),
    )


def _source(client: Client, name: str) -> Collection:
    for each in client.coordinator.collections(dropped=True):
        if str(each.id) == name:
            return each
    try:
        return client.collection(name)
    except CollectionNotFound:
        dropped = [str(each.id) for each in client.coordinator.collections(dropped=True) if each.name == name]
        hint = f"; dropped ones of that name have the ids {', '.join(dropped)}" if dropped else ""
        raise CollectionNotFound(f"there is no collection {name!r}{hint}") from None


def _moment(at: str) -> int | None:
    if not at:
        return None
    if at.isdigit():
        return int(at)
    moment = datetime.fromisoformat(at)
    return resolve_tick(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


def _confirmed(settings: Settings, client: Client, collection: Collection, at: int | None) -> dict[str, int]:
    """By PChannel the tick up to which the WAL is whole: all that was appended before this call, or up to `at`."""
    catch_up(settings, client.log)  # nobody need run beside it; what a running node commits first is fenced here
    return confirm(settings, collection, client.append, at=at, seconds=settings.read_deadline)[0]


def _clear(settings: Settings, client: Client, params: RestoreParams) -> None:
    """Drop what a killed run of this restore left; anything else of that name is the caller's, and stays."""
    standing = {each.name: each for each in client.coordinator.collections()}.get(params.into)
    if standing is None or params.dry_run:
        return
    try:
        record: dict[str, Any] = json.loads((restores_path(settings) / f"{params.into}.json").read_text())
    except FileNotFoundError:
        record = {}
    if record.get("state") != LOADING or record.get("collection") != params.collection:
        raise CollectionExists(f"there is a collection {params.into!r} already: choose another name, or drop it")
    client.coordinator.drop_collection(params.into)


def _load(
    settings: Settings,
    client: Client,
    params: RestoreParams,
    plan: ReadPlan,
    rows: DataFrame,
    count: int,
    progress: Progress,
) -> Collection:
    # Recorded before it is made: between the two a kill leaves a record of nothing, which harms nobody.
    _record(settings, params, plan, None, LOADING)
    hit("restore.recorded")
    channels = plan.vchannels.values()
    names = sorted({name for info in channels for number, name in info.partitions.items() if _stands(plan, number)})
    made = client.coordinator.create_collection(
        params.into,
        plan.schema,
        partitions=names or ["_default"],
        vchannels=len(next(iter(channels)).vchannels),
    )
    producer = client.producer()
    slices = max(1, -(-count // params.rows_per_slice))
    key = F.col("`" + plan.schema.primary_key.replace("`", "``") + "`")
    done = 0
    for number in range(slices):
        part = rows.where(F.pmod(F.xxhash64(key), F.lit(slices)) == number).toArrow()
        for name in part["_partition"].unique().to_pylist():
            chosen = part.filter(pc.equal(part["_partition"], name))
            producer.insert(made, chosen.select(plan.schema.arrow().names), partition=name)
            hit("restore.inserted")
        done += part.num_rows
        progress.say("inserting", done=done / max(1, count), rows=done)
    return made


def _stands(plan: ReadPlan, number: int) -> bool:
    """Whether a partition was not dropped by the tick."""
    return all(dropped != number for _, dropped, _ in plan.partition_drops)


def _digest(rows: DataFrame, plan: ReadPlan) -> str:
    """Count and content of the fields of `rows`, whatever their order."""
    names = ["`" + name.replace("`", "``") + "`" for name in plan.schema.arrow().names]
    hashed = F.xxhash64(*names)
    other = F.hash(*names).cast("long")
    [found] = rows.agg(
        F.count(F.lit(1)), F.coalesce(F.sum(hashed.cast("decimal(38,0)")), F.lit(0)), F.coalesce(F.sum(other), F.lit(0))
    ).collect()
    return f"{found[0]}/{int(found[1]) & (1 << 64) - 1:016x}/{int(found[2]) & (1 << 64) - 1:016x}"


def _record(settings: Settings, params: RestoreParams, plan: ReadPlan, made: Collection | None, state: str) -> None:
    record = {
        "collection": params.collection,
        "into": params.into,
        "tick": plan.tick,
        "id": None if made is None else made.id,
        "state": state,
    }
    write_json(restores_path(settings) / f"{params.into}.json", record)

"""Backfill, compaction and Z-order on a deployment in a bucket: python -m …rewrites_in_store_process <folder> <tables>.

Spark finds the store and the credentials in the environment, as the jobs do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.node.publish.definition import publish
from millrace.operations.backfill import run as backfills
from millrace.operations.backfill.derived import derived_uri
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import run as compact
from millrace.operations.published_verification import verify_published
from millrace.operations.verification import verify_collections
from millrace.runtime.progress import Progress
from millrace.runtime.spark.session import session
from millrace.storage.spark import spark_zorder
from millrace.storage.store import store_at
from millrace.storage.table import table_at
from millrace.tables.collections.data_tables import rows_uri
from tests.operations.backfill_rig import SCHEMA, Rig

COMPACTION = CompactionParams(min_files=2, fold="always", keep_history_hours=0, vacuum=False)


class Killed(BaseException):
    pass


@contextmanager
def running(settings: Settings, spark: SparkSession) -> Iterator[Rig]:
    with connect(settings=settings) as client:
        client.catalog.ensure_pchannels(2)
        collection = client.catalog.create_collection("trips", SCHEMA, vchannels=2)
        rig = Rig(settings, client, collection, spark)
        try:
            for turn in range(4):
                rig.insert(list(range(turn * 100, turn * 100 + 100)), seed=turn)
                rig.catch_up()
            rig.delete(list(range(50, 150)))
            rig.catch_up()
            yield rig
        finally:
            client.connection.service.shutdown()


def derived(rig: Rig, table: str) -> list[tuple[object, ...]]:
    found = table_at(derived_uri(rig.settings, table)).dataset().to_table()
    return sorted((tuple(row.values()) for row in found.to_pylist()), key=str)


def trips(rig: Rig) -> int:
    found = table_at(derived_uri(rig.settings, "trips_hourly")).dataset().to_table()
    return int(pc.sum(found["trips"]).as_py())


def verified(rig: Rig) -> None:
    assert all(each.ok for each in verify_collections(rig.settings).values())
    publish(rig.settings, rig.collection.id)
    assert all(each.ok for each in verify_published(rig.settings, rig.client.log).values())


def a_derived_table_is_rebuilt_in_slices_and_a_killed_slice_once(rig: Rig) -> None:
    whole = rig.rebuild(0, 72, table="trips_again", slice_hours=24 * 30)
    report = rig.rebuild(0, 72)
    assert [each.outcome for each in report.slices] == ["written"] * 3
    assert derived(rig, "trips_hourly") == derived(rig, "trips_again")
    assert report.rows == whole.rows > 0
    assert trips(rig) == 300
    rig.insert(list(range(1000, 1100)), seed=9)
    rig.catch_up()

    def die(name: str) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backfills, "hit", die)  # slices have threads of their own
        with pytest.raises(Killed):
            rig.rebuild(0, 72, run_id="second")
    assert rig.rebuild(0, 72, run_id="second").rows > 0
    assert trips(rig) == 400


def tasks_compact_a_collection_in_the_store_and_it_reads_the_same(rig: Rig) -> None:
    uri = rows_uri(rig.settings, rig.collection.id)
    before, files = rig.client["trips"].read(order_by="id"), len(table_at(uri).live_files())
    report = compact(
        rig.settings, COMPACTION, Progress(), session_factory=lambda: nullcontext(rig.spark), max_bytes_without_spark=0
    )
    assert report.collections[0].rows.rows_removed > 0
    assert len(table_at(uri).live_files()) < files
    assert rig.client["trips"].read(order_by="id").equals(before)
    verified(rig)


def a_collection_is_z_ordered_by_delta_rs_and_spark_is_refused(rig: Rig) -> None:
    uri = rows_uri(rig.settings, rig.collection.id)
    before = rig.client["trips"].read(order_by="id")
    params = COMPACTION.model_copy(update={"zorder_by": ("amount",), "files": False})
    report = compact(rig.settings, params, Progress(), session_factory=lambda: nullcontext(rig.spark))
    assert report.collections[0].zordered
    table = table_at(uri)
    ordered = [table.read(each)["amount"].drop_null() for each in table.live_files()]
    assert any(len(each) > 20 and each.equals(pc.take(each, pc.sort_indices(each))) for each in ordered)
    rig.insert(list(range(2000, 2050)), seed=3)
    rig.catch_up()
    assert rig.client["trips"].read(where="id < 2000", order_by="id").equals(before)
    verified(rig)
    with pytest.raises(InvalidSettings, match="Spark does not write"):
        spark_zorder(rig.spark, store_at(uri), ["amount"])


def main(folder: str, tables: str) -> None:
    settings = Settings(
        data_dir=Path(folder),
        tables=tables,
        spark_cores=2,
        read_deadline=20.0,
        derived_modules="tests.operations.backfill_rig",
    )
    spark = session("rewrites", settings=settings)
    try:
        with running(settings, spark) as rig:
            tasks_compact_a_collection_in_the_store_and_it_reads_the_same(rig)
            a_derived_table_is_rebuilt_in_slices_and_a_killed_slice_once(rig)
            a_collection_is_z_ordered_by_delta_rs_and_spark_is_refused(rig)
    finally:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])

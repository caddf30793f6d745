"""A collection's rows as DataFrames, batch and stream: the data source of `spark_source`, with options.

:func:`changes` and :func:`stream` determine the start once, in the driver.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pyspark.sql import DataFrame, SparkSession

from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.flows.sources.collection.rows import Kinds, Place, RowsOf
from millrace.flows.sources.collection.spark_source import FORMAT, RowsSource
from millrace.message.ids import Moment, resolve_tick
from millrace.tables.read.freshness import require_confirmed_ticks


def changes(
    spark: SparkSession,
    settings: Settings,
    name: str,
    *,
    after: Moment | None = None,
    until: Moment | None = None,
    channels: Sequence[str] = (),
    columns: Sequence[str] = (),
    kinds: Kinds = "all",
    deadline: float | None = None,
) -> DataFrame:
    """Return the changes of a collection after `after` and up to `until`.

    See :func:`millrace.spark.changes_between`.
    """
    rows = RowsOf.find(settings, name, channels=channels, columns=columns, kinds=kinds)
    end = _confirmed(rows, until, deadline)
    place = Place.behind(rows, 0 if after is None else resolve_tick(after))
    options = _options(rows, place) | {"until": json.dumps(end)}
    spark.dataSource.register(RowsSource)
    return spark.read.format(FORMAT).options(**options).load()


def stream(
    spark: SparkSession,
    settings: Settings,
    name: str,
    *,
    after: Moment | None = None,
    snapshot: Moment | None = None,
    ticks: Mapping[str, int] | None = None,
    channels: Sequence[str] = (),
    columns: Sequence[str] = (),
    kinds: Kinds = "all",
    max_bytes: int | None = None,
    aligned: bool = False,
    deadline: float | None = None,
) -> DataFrame:
    """Stream the changes of a collection. See :func:`millrace.spark.stream`. `ticks` are the start by PChannel."""
    rows = RowsOf.find(settings, name, channels=channels, columns=columns, kinds=kinds)
    if ticks is not None:
        place = Place.behind(rows, ticks)
    elif snapshot is not None:
        found = _confirmed(rows, None if snapshot == "now" else snapshot, deadline)
        place = Place.behind(rows, snapshot=min(found.values()))
    elif after == "now":
        place = Place.behind(rows, _confirmed(rows, None, deadline))
    else:
        place = Place.behind(rows, 0 if after is None else resolve_tick(after))
    options = _options(rows, place)
    if max_bytes is not None:
        options["max_bytes"] = str(max_bytes)
    if aligned:
        options["aligned"] = "true"
    spark.dataSource.register(RowsSource)
    return spark.readStream.format(FORMAT).options(**options).load()


def _confirmed(rows: RowsOf, at: Moment | None, deadline: float | None) -> dict[str, int]:
    """Return, by PChannel, a tick up to which the ``wal`` table is complete: `at`, or after everything decided so far.

    Raises TickNotReached if the deadline passes first.
    """
    settings = rows.settings
    tick = None if at is None else resolve_tick(at)
    seconds = settings.read_deadline if deadline is None else deadline
    with connect(settings=settings) as db:
        ticks = require_confirmed_ticks(settings, rows.name, rows.pchannels, db.connection, tick, seconds)
    return dict.fromkeys(rows.pchannels, tick) if tick is not None else {name: ticks[name] for name in rows.pchannels}


def _options(rows: RowsOf, place: Place) -> dict[str, str]:
    return {
        "collection": rows.name,
        "channels": ",".join(rows.vchannels),
        "columns": ",".join(rows.columns),
        "kinds": rows.kinds,
        "place": json.dumps(place.to_json()),
        "settings": json.dumps(rows.settings.environment()),
    }

"""Derived tables: their declaration, lookup and location.

A derived table is a function of a collection's rows, cut by time: its rows of a slice [start, end) depend only on the
source's rows of that slice. A slice can therefore be rebuilt by itself. To declare tables of your own, write a module
with ``TABLES = [DerivedTable(...)]`` and name it in the setting ``derived_modules``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from millrace.base.errors import CollectionNotFound, InvalidArgument, InvalidSettings
from millrace.base.package import HAS_DEMO
from millrace.base.settings import Settings
from millrace.storage.store import store_at

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from millrace.catalog.collection import CollectionInfo
    from millrace.flows.declare.flow import Flow

DATE: Final = "date"
"""The partition column of every derived table: the UTC day of its bucket."""

LOG_TIME: Final = "_log_time"
"""Value of `event_time` for the time at which a row became visible, by its time tick."""

SLICES: Final = "slices"
"""Name of the table of slices. No derived table can have it."""

DEMO_MODULES: Final = ("millrace.demo.flights_hourly",) if HAS_DEMO else ()

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedTable:
    """A table computed from a collection.

    `build` receives the source's rows of a slice and returns the table's rows, with the timestamp column `bucket`. The
    bucket must lie in that slice and be a multiple of `grain`. `build` must be deterministic and must not depend on row
    order. Increase `version` when `build` changes: slices are then rebuilt even if the source did not change.

    Raises InvalidArgument if the name cannot be a folder.
    """

    name: str
    source: str
    build: Callable[[DataFrame], DataFrame]
    bucket: str
    grain: Literal["hour", "day"] = "hour"
    event_time: str | None = None
    """Source column that holds a row's event time. None: the one that the schema declares."""
    version: int = 1
    words: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name == SLICES:
            raise InvalidArgument(
                "the name of a derived table consists of lower-case letters, digits and underscores, unlike "
                f"{self.name!r}"
            )
        if self.grain not in ("hour", "day"):
            raise InvalidArgument(f"{self.name}: the grain must be hour or day, not {self.grain!r}")

    @property
    def grain_hours(self) -> int:
        return 1 if self.grain == "hour" else 24

    def event_column(self, collection: CollectionInfo) -> Column:
        """Return the event time of a source row as a timestamp column. Needs a Spark session.

        Raises InvalidArgument if no event time is declared.
        """
        from pyspark.sql import functions as F

        name = self.event_field(collection)
        if name == LOG_TIME:
            return F.timestamp_millis(F.shiftright("_time_tick", 18))
        return F.col(f"`{name}`").cast("timestamp")

    def event_field(self, collection: CollectionInfo) -> str:
        """Return the field with the event time of a source row, or LOG_TIME.

        Raises InvalidArgument if no event time is declared.
        """
        name = self.event_time or collection.schema.event_time
        if name == LOG_TIME:
            return name
        if name is None:
            raise InvalidArgument(
                f"the event time of {collection.name!r} is unknown: declare the collection's event_time, or set "
                f"event_time of the derived table {self.name!r}"
            )
        kinds = {field.name: field.type for field in collection.schema.fields}
        if kinds.get(name) not in ("timestamp", "date"):
            raise InvalidArgument(
                f"{self.name}: the event time {name!r} is not a timestamp or date field of {collection.name!r}"
            )
        return name


def of_stream(stream: Flow, *, bucket: str, grain: Literal["hour", "day"] = "hour") -> DerivedTable:
    """Return a declared stream as a derived table: its source, its transform, and its watermark column as event time.

    One declaration thus runs both as a stream and as a batch, with equal rows.

    Raises InvalidArgument if the stream reads no collection, or has no transform or more than a transform.
    """
    from millrace.flows.sources.collection.model import CollectionSource

    if stream.transform.function is None:
        raise InvalidArgument(f"the stream {stream.name!r} has no transform: a derived table needs a function")
    if not isinstance(stream.row_source, CollectionSource):
        raise InvalidArgument(
            f"the stream {stream.name!r} reads {stream.row_source.target}: a table is of a collection"
        )
    if stream.transform.operator is not None or stream.transform.tables:
        raise InvalidArgument(
            f"the stream {stream.name!r} has an operator or tables: a slice of a derived table may depend only on the "
            "rows of that slice"
        )
    mark = stream.row_source.watermark

    def build(rows: DataFrame) -> DataFrame:
        from millrace.flows.declare.rows import function_of

        found: DataFrame = function_of(stream.transform.function)(rows)
        return found

    return DerivedTable(
        name=stream.name,
        source=stream.row_source.collection,
        build=build,
        bucket=bucket,
        grain=grain,
        event_time=None if mark is None else mark.column,
        version=stream.version,
        words=stream.description,
    )


def derived_tables(settings: Settings) -> dict[str, DerivedTable]:
    """Return all derived tables by name: built-in ones, then those of ``derived_modules``. Raises InvalidSettings."""
    found: dict[str, DerivedTable] = {}
    names = [name.strip() for name in settings.derived_modules.split(",") if name.strip()]
    for module in (*DEMO_MODULES, *names):
        try:
            tables = importlib.import_module(module).TABLES
        except (ImportError, AttributeError) as error:
            raise InvalidSettings(f"derived_modules: {module} cannot be imported, or has no TABLES: {error}") from error
        for table in tables:
            if not isinstance(table, DerivedTable) or table.name in found:
                raise InvalidSettings(
                    f"derived_modules: {module}: {table!r} is not a DerivedTable, or its name is already used"
                )
            found[table.name] = table
    return found


def derived_table(settings: Settings, name: str) -> DerivedTable:
    """Return the derived table `name`. Raises InvalidArgument, which lists the known ones, if there is none."""
    known = derived_tables(settings)
    if name not in known:
        raise InvalidArgument(
            f"unknown derived table {name!r}; the derived tables are {', '.join(sorted(known)) or 'none'}"
        )
    return known[name]


def derived_uri(settings: Settings, name: str) -> str:
    """Return the URI of the Delta table of the derived table `name`."""
    return settings.table_uri(f"derived/{name}")


def derived_names(settings: Settings) -> list[str]:
    """Return the names of the existing derived tables, including the table of slices."""
    return list(store_at(settings.table_uri("derived")).folders())


def source_collection(settings: Settings, table: DerivedTable) -> CollectionInfo:
    """Return the source collection of `table`. Raises CollectionNotFound."""
    from millrace.coord.catalog.store import CatalogStore

    store = CatalogStore.open_read_only(settings.data_dir)
    if store is None:
        raise CollectionNotFound(
            f"{settings.data_dir} has no collections yet: check that it is the deployment's data_dir"
        )
    with store:
        return store.collection(table.source)

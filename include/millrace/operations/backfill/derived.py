"""Derived tables: what one is, which there are, where they lie.

A derived table is a function of a collection's rows, cut by time: its rows of a slice [start, end) come from the source's
rows of that slice alone. That is what makes a slice rebuildable by itself. Tables of your own: a module with
``TABLES = [DerivedTable(...)]``, named in the setting ``derived_modules``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from millrace.base.errors import CollectionNotFound, InvalidArgument, InvalidSettings
from millrace.base.settings import Settings
from millrace.storage.store import store_at

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from millrace.catalog.collection import CollectionInfo
    from millrace.streams.declare.declaration import Stream

DATE: Final = "date"
"""The partition column that every derived table gets: the UTC day of its bucket."""

LOG_TIME: Final = "_log_time"
"""As `event_time`: when the row became visible, by its time tick."""

SLICES: Final = "slices"
"""The name of the table of slices; no derived table can have it."""

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedTable:
    """A table that is computed from a collection. Raises InvalidArgument for a name that cannot be a folder.

    `build` gets the source's rows of a slice and gives the table's, with the timestamp column `bucket`, which must lie in
    that slice and be a multiple of `grain`. It has to be deterministic, and equal for rows in any order. Raise `version` when
    `build` changes: slices are then rebuilt even where the source did not move.
    """

    name: str
    source: str
    build: Callable[[DataFrame], DataFrame]
    bucket: str
    grain: Literal["hour", "day"] = "hour"
    event_time: str | None = None
    """The source's column that places a row; None: the one its schema declares. `LOG_TIME`: when it became visible."""
    version: int = 1
    words: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name == SLICES:
            raise InvalidArgument(f"a derived table's name is lower case, digits and underscores, not {self.name!r}")
        if self.grain not in ("hour", "day"):
            raise InvalidArgument(f"{self.name}: the grain is hour or day, not {self.grain!r}")

    @property
    def grain_hours(self) -> int:
        return 1 if self.grain == "hour" else 24

    def event_column(self, collection: CollectionInfo) -> Column:
        """When a row of the source happened, as a timestamp; needs a session. Raises InvalidArgument where nothing says so."""
        from pyspark.sql import functions as F

        name = self.event_field(collection)
        if name == LOG_TIME:
            return F.timestamp_millis(F.shiftright("_time_tick", 18))
        return F.col(f"`{name}`").cast("timestamp")

    def event_field(self, collection: CollectionInfo) -> str:
        """The field that says when a row of the source happened, or LOG_TIME. Raises InvalidArgument where nothing says so."""
        name = self.event_time or collection.schema.event_time
        if name == LOG_TIME:
            return name
        if name is None:
            raise InvalidArgument(
                f"nothing says when a row of {collection.name!r} happened: declare the collection's event_time, or give "
                f"the derived table {self.name!r} one"
            )
        kinds = {field.name: field.type for field in collection.schema.fields}
        if kinds.get(name) not in ("timestamp", "date"):
            raise InvalidArgument(
                f"{self.name}: the event time {name!r} is no timestamp or date of {collection.name!r}"
            )
        return name


def of_stream(stream: Stream, *, bucket: str, grain: Literal["hour", "day"] = "hour") -> DerivedTable:
    """A declared stream as a table that is rebuilt in slices: its source, its transform, its watermark's column as the event time.

    What is declared once runs as a stream and as a batch, and both have equal rows. Raises InvalidArgument for a stream without
    a transform, or with more than that.
    """
    if stream.transform is None:
        raise InvalidArgument(f"the stream {stream.name!r} has no transform: a derived table is made by a function")
    if stream.operator is not None or stream.tables:
        raise InvalidArgument(
            f"the stream {stream.name!r} has an operator or tables: a slice of a derived table comes from the rows of that slice alone"
        )
    mark = stream.source.watermark

    def build(rows: DataFrame) -> DataFrame:
        from millrace.streams.declare.declaration import function_of

        found: DataFrame = function_of(stream.transform)(rows)
        return found

    return DerivedTable(
        name=stream.name,
        source=stream.source.collection,
        build=build,
        bucket=bucket,
        grain=grain,
        event_time=None if mark is None else mark.column,
        version=stream.version,
        words=stream.words,
    )


def derived_tables(settings: Settings) -> dict[str, DerivedTable]:
    """All derived tables by name: those shipped, then those of ``derived_modules``. Raises InvalidSettings."""
    found: dict[str, DerivedTable] = {}
    names = [name.strip() for name in settings.derived_modules.split(",") if name.strip()]
    for module in ("millrace.demo.flights_hourly", *names):
        try:
            tables = importlib.import_module(module).TABLES
        except (ImportError, AttributeError) as error:
            raise InvalidSettings(f"derived_modules: {module} cannot be had, or has no TABLES: {error}") from error
        for table in tables:
            if not isinstance(table, DerivedTable) or table.name in found:
                raise InvalidSettings(f"derived_modules: {module}: {table!r} is no DerivedTable, or its name is taken")
            found[table.name] = table
    return found


def derived_table(settings: Settings, name: str) -> DerivedTable:
    """The table `name`. Raises InvalidArgument that names those there are."""
    known = derived_tables(settings)
    if name not in known:
        raise InvalidArgument(f"there is no derived table {name!r}; there are: {', '.join(sorted(known))}")
    return known[name]


def derived_uri(settings: Settings, name: str) -> str:
    """The Delta table of the derived table `name`."""
    return settings.table_uri(f"derived/{name}")


def derived_names(settings: Settings) -> list[str]:
    """Those that are there, the table of slices among them."""
    return list(store_at(settings.table_uri("derived")).folders())


def source_collection(settings: Settings, table: DerivedTable) -> CollectionInfo:
    """The collection that `table` is made from. Raises CollectionNotFound."""
    from millrace.coord.catalog_store import CatalogStore

    store = CatalogStore.open_read_only(settings.data_dir)
    if store is None:
        raise CollectionNotFound(f"{settings.data_dir} has no collections yet: is this the deployment's data_dir?")
    with store:
        return store.collection(table.source)

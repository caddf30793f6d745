"""The end of the demo: one query over the published table by engines that know nothing of Millrace.

Spark, DuckDB, Polars and delta-rs open the table by its path. Their answers are compared with that of Millrace's own
read at the tick that the table was published at.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from millrace.node.publish.definition import publish
from millrace.storage.store import store_at
from millrace.tables.collections.data_tables import published_uri

QUERY: Final = (
    "SELECT origin, count(*) AS flights, sum(distance) AS miles, sum(arr_delay) AS minutes FROM flights"
    " GROUP BY origin ORDER BY origin"
)

Answer: TypeAlias = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """The answer of one engine, and the time it took."""

    engine: str
    rows: Answer
    seconds: float


ENGINES: Final = ("DuckDB", "Polars", "delta-rs", "Spark")


def ask_engines(
    settings: Settings, client: Database, collection: CollectionInfo, names: Sequence[str]
) -> tuple[int, list[EngineAnswer]]:
    """Publish the collection, and ask the engines of those names (of ENGINES).

    Return the published tick, and the answers; the first is Millrace's own. Spark runs in a JVM of its own, whose
    output goes to ``run/engines.log``.

    Raises what :func:`publish` raises.
    """
    tick = publish(settings, collection.id)
    folder = published_uri(settings, collection.id)
    rows = client.collection(collection.name).read(at=tick, columns=["origin", "distance", "arr_delay"])
    found = [_timed("Millrace, read(at=…)", partial(_by_duckdb, rows))]
    engines: Mapping[str, tuple[str, Callable[[str], Answer]]] = {
        "DuckDB": ("duckdb", _by_duckdb_extension),
        "Polars": ("polars", _by_polars),
        "delta-rs": ("deltalake", _by_delta_rs),
        "Spark": ("pyspark", partial(_by_spark, settings)),
    }
    for name in names:
        package, ask = engines[name]
        found.append(_timed(f"{name} {version(package)}", partial(ask, folder)))
    return tick, found


def print_answers(tick: int, answers: Sequence[EngineAnswer], console: Console) -> bool:
    """Print the answers. Return whether all are equal."""
    own = answers[0].rows
    table = Table("Engine", "Flights", "Miles", "Minutes late", "Seconds", "", title_justify="left")
    table.title = f"One query, {len(answers)} engines, at tick {tick}"
    for column in table.columns[1:5]:
        column.justify = "right"
    for each in answers:
        totals = [sum(row[place] or 0 for row in each.rows) for place in (1, 2, 3)]
        said = "[green]=[/]" if each.rows == own else "[bold red]differs[/]"
        table.add_row(each.engine, *(f"{total:,}" for total in totals), f"{each.seconds:.1f}", said)
    console.print(table)
    for origin, *figures in own:
        console.print(f"  {origin}  " + "  ".join(f"{figure or 0:>13,}" for figure in figures))
    return all(each.rows == own for each in answers)


def _timed(name: str, ask: Callable[[], Answer]) -> EngineAnswer:
    begun = time.perf_counter()
    rows = ask()
    return EngineAnswer(name, rows, time.perf_counter() - begun)


def _plain(table: pa.Table) -> Answer:
    columns = [table.column(0).to_pylist(), *(table.column(at).cast(pa.int64()).to_pylist() for at in (1, 2, 3))]
    return list(zip(*columns, strict=True))


def _by_duckdb(flights: pa.Table) -> Answer:
    import duckdb

    with duckdb.connect() as connection:
        connection.register("flights", flights)
        return _plain(connection.sql(QUERY).to_arrow_table())


def _by_duckdb_extension(uri: str) -> Answer:
    import duckdb
    import duckdb_extension_delta

    with duckdb.connect() as connection:
        connection.load_extension(_extension(duckdb_extension_delta))
        if uri.startswith("s3://"):
            import duckdb_extension_httpfs

            connection.load_extension(_extension(duckdb_extension_httpfs))
            connection.execute(f"CREATE SECRET (TYPE s3, {_s3_secret()})")
        connection.execute(f"CREATE VIEW flights AS FROM delta_scan('{uri}')")
        return _plain(connection.sql(QUERY).to_arrow_table())


def _extension(package: ModuleType) -> str:
    (found,) = Path(str(package.__file__)).parent.rglob("*.duckdb_extension")
    return str(found)


def _s3_secret() -> str:
    """Return the options of DuckDB's secret, from the variables by which the other engines reach the store."""
    said = {"KEY_ID": "AWS_ACCESS_KEY_ID", "SECRET": "AWS_SECRET_ACCESS_KEY", "REGION": "AWS_REGION"}
    found = {name: os.environ[variable] for name, variable in said.items() if variable in os.environ}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
        scheme, _, address = endpoint.partition("://")
        found |= {"ENDPOINT": address, "URL_STYLE": "path", "USE_SSL": str(scheme == "https").lower()}
    return ", ".join(f"{name} '{value}'" for name, value in found.items())


def _by_polars(uri: str) -> Answer:
    import polars as pl

    return _plain(pl.SQLContext(flights=pl.scan_delta(uri)).execute(QUERY, eager=True).to_arrow())


def _by_delta_rs(uri: str) -> Answer:
    from deltalake import DeltaTable, QueryBuilder

    return _plain(pa.table(QueryBuilder().register("flights", DeltaTable(uri)).execute(QUERY).read_all()))


def _by_spark(settings: Settings, uri: str) -> Answer:
    from millrace.runtime.spark.session import logged_session

    log_file = settings.run_path / "engines.log"
    with logged_session("millrace-demo-engines", settings, log_file, light_jvm=True) as spark:
        store = store_at(uri)  # on S3, Spark's address and options are others
        spark.read.format("delta").options(**store.spark_options).load(store.spark_uri).createOrReplaceTempView(
            "flights"
        )
        return [tuple(row) for row in spark.sql(QUERY).collect()]

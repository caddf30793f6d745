"""Clients against the disk: Arrow batches of a DataFrame through a producer to the embedded log, and small appends.

The baseline is the disk's own limit for a naive appender, measured in the same run: write + fdatasync of a growing
file, in entries of the producer's size. MB are 10**6 bytes of rows. The server is a separate process, as in a
deployment, and judges every row before the producer's call returns.
"""

from __future__ import annotations

import io
import time
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
from pyarrow.csv import write_csv

from bench.deployment import deployment, rows
from bench.log_bench import Ratio, pairs, plain_append
from millrace.client.produce.batch_appender import BatchLimits
from millrace.client.produce.files import csv_format
from millrace.client.produce.files.formats import CsvOptions, InputFormat
from millrace.client.produce.files.reader import read_batches
from millrace.client.produce.rows import ENTRY_BYTES
from millrace.demo.flights import data_file, flights_schema
from millrace.message.schema import CollectionSchema, FieldSpec

MIB = 1 << 20
FRAME_ROWS = 65_536


@dataclass(frozen=True)
class SmallAppends:
    """Calls of one row each, gathered: how many a second, and how many messages they became."""

    calls: int
    per_s: float
    messages: int


def arrow_batches(
    folder: Path, *, row_bytes: int = 1000, total: int = 1024 * MIB, count: int = 7, pchannels: int = 2
) -> Ratio:
    """Compare `insert` of a stream of Arrow batches over `pchannels` with the disk, in MB/s of interleaved pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    with deployment(folder / "data", pchannels=pchannels) as (_, client, collection):
        frame_rows = max(1, min(FRAME_ROWS, 64 * MIB // row_bytes))
        batches = rows(0, frame_rows, size=row_bytes).combine_chunks().to_batches()
        size = sum(batch.nbytes for batch in batches)
        times = max(1, total // size)
        producer = client.new_producer()

        def subject() -> float:
            stream = pa.RecordBatchReader.from_batches(batches[0].schema, iter(batches * times))
            start = time.perf_counter()
            written = producer.insert(collection, stream)
            assert written.rows == times * frame_rows
            return times * size / (time.perf_counter() - start) / 1e6

        subject()  # what the first append loads is loaded

        def baseline() -> float:
            return plain_append(folder, batch_bytes=ENTRY_BYTES, total=times * size)

        return pairs(
            f"DataFrame of {row_bytes} B rows to the log, {pchannels} PChannels", "MB/s", subject, baseline, count
        )


def csv_files(*, count: int = 5, narrow_rows: int = 1_000_000) -> list[Ratio]:
    """Compare reading CSV as a collection's columns with the csv module, in rows per second of CPU, in pairs.

    CPU time, because Arrow uses two threads: on an idle machine the rows take less time than that.
    """
    with zipfile.ZipFile(data_file("flights.csv.zip")) as archive, archive.open("flights.csv") as file:
        wide = file.read()
    fields = tuple(FieldSpec(name, kind, nullable) for name, kind, nullable in flights_schema() if name != "id")
    start = np.datetime64("2026-01-01T00:00:00", "us")
    made = pa.table(
        {
            "id": np.arange(narrow_rows),
            "at": pa.array(start + np.arange(narrow_rows) * np.timedelta64(1, "s")),
            "price": np.arange(narrow_rows) / 8,
        }
    )
    sink = io.BytesIO()
    write_csv(made, sink)
    narrow = CollectionSchema(
        (FieldSpec("id", "int64", False), FieldSpec("at", "timestamp", True), FieldSpec("price", "float64", True)), "id"
    )
    files = [
        ("flights, 19 columns", wide, CollectionSchema(fields, "time_hour")),
        ("3 columns", sink.getvalue(), narrow),
    ]
    return [
        pairs(
            f"CSV: {name}",
            "rows/s of CPU",
            partial(_csv_rate, data, schema),
            partial(_csv_rate, data, schema, True),
            count,
        )
        for name, data, schema in files
    ]


def _csv_rate(data: bytes, schema: CollectionSchema, row_by_row: bool = False) -> float:
    """Return the rows per second of CPU of one reading; `row_by_row`: of the first tenth, without Arrow."""
    if row_by_row:
        data = data[: data.rfind(b"\n", 0, len(data) // 10) + 1]
    form = CsvOptions(nulls=("", "NA"))
    by_arrow = csv_format.fits_arrow
    with mock.patch.object(csv_format, "fits_arrow", lambda form: by_arrow(form) and not row_by_row):
        start = time.process_time()
        read = read_batches(io.BufferedReader(io.BytesIO(data)), InputFormat.CSV, schema, batch_rows=50_000, form=form)
        rows = sum(batch.rows.num_rows for batch in read)
        return rows / (time.process_time() - start)


def small_appends(folder: Path, *, calls: int = 20_000) -> SmallAppends:
    """Measure calls of one row through a BatchAppender, each with a future."""
    with deployment(folder / "small") as (_, client, collection):
        pieces = [rows(number, 1, size=100) for number in range(calls)]
        with client.new_producer().batch(limits=BatchLimits()) as batch:
            start = time.perf_counter()
            futures = [batch.insert(piece, collection=collection) for piece in pieces]
            batch.flush()
            seconds = time.perf_counter() - start
        messages = {each.message_id for future in futures for each in future.result().results}
        return SmallAppends(calls, round(calls / seconds), len(messages))

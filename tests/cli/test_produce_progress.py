"""The progress of a load: the share of the files' bytes that was read, and the time that is left."""

from __future__ import annotations

import gzip
from functools import partial
from pathlib import Path

import pytest

from millrace.client.produce.files.formats import CsvOptions, InputFormat
from millrace.client.produce.files.reader import read_batches
from millrace.client.progress import progress_words
from millrace.commands.produce import BytesRead, _batches
from millrace.message.schema import CollectionSchema, FieldSpec

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False),), "id")


@pytest.mark.parametrize(
    ("done", "total", "seconds", "words"),
    [
        (0, 100, 5, "0 %"),
        (1, 100, 0.1, "1 %"),
        (43, 100, 60, "43 %, 1 min 20 s left"),
        (50, 100, 7500, "50 %, 2 h 5 min left"),
        (120, 100, 8, "100 %, 0 s left"),
        (5, 0, 8, ""),
    ],
)
def test_progress_in_words(done: float, total: float, seconds: float, words: str) -> None:
    assert progress_words(done, total, seconds) == words


def test_the_bytes_of_all_files_are_counted_packed_ones_as_they_are_stored(tmp_path: Path) -> None:
    text = b"id\n" + b"".join(b"%d\n" % (number * 7919) for number in range(400_000))
    plain, packed = tmp_path / "a.csv", tmp_path / "b.csv.gz"
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text, 1))
    files = [plain, packed]
    reading = BytesRead(files)
    assert reading.total == plain.stat().st_size + packed.stat().st_size
    read = partial(read_batches, schema=SCHEMA, batch_rows=50_000, form=CsvOptions())
    seen = [reading.done for _ in _batches(files, [InputFormat.CSV] * 2, None, read, reading)]
    assert seen == sorted(seen)
    assert len(set(seen)) > 8
    assert 0 < seen[0] < reading.total
    assert seen[-1] == reading.total


def test_stdin_has_no_total() -> None:
    assert BytesRead([Path("-")]).total == 0

"""Staging: input files checked row by row and kept as digested Parquet, cut into slices before anything is appended.

``<data_dir>/staged/<import id>/`` holds ``manifest.json`` and one Parquet file a slice. A slice is of one VChannel; each of
its row groups is one message. What is staged is whole or not there: the folder gets its name last, everything in it synced.
A load that restarts reads what was staged, so it sends the same messages again whatever became of the input files.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.client.rows import split_rows
from millrace.commands.rows_in import InputFormat, format_of, read_batches
from millrace.coord.store import Collection
from millrace.errors import InvalidArgument
from millrace.ops.backfill.params import LoadParams
from millrace.ops.operation import Progress
from millrace.settings import Settings
from millrace.tables.fsync import sync

BATCH_ROWS: Final = 50_000
MANIFEST: Final = "manifest.json"


@dataclass(frozen=True, slots=True)
class StagedSlice:
    """One staged file: rows of one VChannel."""

    file: str
    digest: str
    vchannel: str
    rows: int
    bytes: int
    """Of the rows in memory."""
    partitions: list[int]
    """The partition's id of each row group."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one load consists of."""

    import_id: str
    collection: str
    collection_id: int
    schema_version: int
    inputs: dict[str, str]
    """Input file -> sha256 of its bytes."""
    slices: list[StagedSlice]

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.slices)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The manifest of a staged load; None where there is none."""
        try:
            value: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        except FileNotFoundError:
            return None
        return cls(**{**value, "slices": [StagedSlice(**each) for each in value["slices"]]})


def staged_path(settings: Settings, import_id: str) -> Path:
    """The folder of a staged load."""
    return settings.staged_path / import_id


def inputs(params: LoadParams) -> list[Path]:
    """The input files, in order of the parameters, patterns in order of names. Raises InvalidArgument where one is not there."""
    found: list[Path] = []
    for text in params.files:
        if not Path(text).is_absolute():
            raise InvalidArgument(f"{text}: give an absolute path; the job does not run where you are")
        matches = [Path(name) for name in sorted(glob.glob(text))] if glob.has_magic(text) else [Path(text)]
        missing = [path for path in matches if not path.is_file()]
        if missing or not matches:
            raise InvalidArgument(f"{missing[0] if missing else text}: there is no such file")
        found += [path for path in matches if path not in found]
    return found


def check(params: LoadParams, collection: Collection) -> None:
    """Raises InvalidArgument where the partition, or the column that names it, does not fit the collection."""
    known = ", ".join(collection.partitions)
    if params.partition is not None and params.partition_by is not None:
        raise InvalidArgument("partition and partition_by: give one of them")
    if params.partition is not None and params.partition not in collection.partitions:
        raise InvalidArgument(f"{collection.name} has no partition {params.partition!r}; it has {known}")
    kinds = {each.name: each.type for each in collection.schema.fields}
    if params.partition_by is not None and kinds.get(params.partition_by) != "string":
        raise InvalidArgument(f"partition_by takes a string field, and {params.partition_by!r} is none")
    if params.partition is None and params.partition_by is None and len(collection.partitions) != 1:
        raise InvalidArgument(f"name the partition with partition or partition_by; {collection.name} has {known}")


def stage(settings: Settings, params: LoadParams, collection: Collection, progress: Progress) -> Manifest:
    """Check and stage the files; what is staged under that name already is taken as it is, if it is of the same files.

    Raises InvalidArgument, with file and line, for the first row that does not fit; nothing is kept then.
    """
    check(params, collection)
    paths = inputs(params)
    progress.say("reading the files' digests")
    digests = {str(path): digest_of(path) for path in paths}
    import_id = params.import_id or _name(params, collection, list(digests.values()))
    folder = staged_path(settings, import_id)
    known = Manifest.read(folder)
    if known is not None:
        if (known.collection_id, sorted(known.inputs.values())) != (collection.id, sorted(digests.values())):
            raise InvalidArgument(
                f"the import {import_id} was of other files or another collection: give it another name"
            )
        return known
    partial = folder.with_name(f".{import_id}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        slices = _write(params, collection, paths, partial, progress)
        manifest = Manifest(import_id, collection.name, collection.id, collection.schema_version, digests, slices)
        if not params.dry_run:
            _publish(partial, folder, manifest)
        return manifest
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def digest_of(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _name(params: LoadParams, collection: Collection, digests: Sequence[str]) -> str:
    facts = [collection.id, params.partition, params.partition_by, sorted(digests)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _publish(partial: Path, folder: Path, manifest: Manifest) -> None:
    text = partial / MANIFEST
    text.write_text(json.dumps(asdict(manifest)))
    for path in (text, partial):
        sync(path)
    with suppress(OSError):  # another load of the same name was as quick, and staged the same
        partial.rename(folder)
    sync(folder.parent)


@dataclass(slots=True)
class _OpenSlice:
    """A slice that takes rows."""

    path: Path
    vchannel: str
    writer: pq.ParquetWriter
    rows: int = 0
    bytes: int = 0
    partitions: list[int] = field(default_factory=list)

    def add(self, partition: int, rows: pa.RecordBatch) -> None:
        self.writer.write_batch(rows, row_group_size=max(1, rows.num_rows))
        self.partitions.append(partition)
        self.rows += rows.num_rows
        self.bytes += rows.nbytes

    def close(self) -> StagedSlice:
        self.writer.close()
        sync(self.path)
        digest = digest_of(self.path)
        return StagedSlice(self.path.name, digest, self.vchannel, self.rows, self.bytes, self.partitions)


def _write(
    params: LoadParams, collection: Collection, paths: Sequence[Path], folder: Path, progress: Progress
) -> list[StagedSlice]:
    """The rows of all files as slices, in the order in which these were begun."""
    slices: dict[str, StagedSlice] = {}
    filling: dict[str, _OpenSlice] = {}
    begun = rows = 0
    for number, path in enumerate(paths):
        for batch in _batches(params, collection, path):
            for vchannel, partition, part in split_rows(batch, collection, params.partition, params.partition_by):
                current = filling.get(vchannel)
                if current is None:
                    target = folder / f"{begun:06d}.parquet"
                    writer = pq.ParquetWriter(target, collection.schema.arrow(), compression="zstd")
                    current = filling[vchannel] = _OpenSlice(target, vchannel, writer)
                    begun += 1
                current.add(partition, part)
                if current.bytes >= params.slice_bytes:
                    slices[current.path.name] = filling.pop(vchannel).close()
            rows += batch.num_rows
            progress.say(f"checked {rows:,} rows of {number + 1} of {len(paths)} files", rows=rows)
    for current in filling.values():
        slices[current.path.name] = current.close()
    return [slices[name] for name in sorted(slices)]


def _batches(params: LoadParams, collection: Collection, path: Path) -> Iterator[pa.Table]:
    """The rows of one file. Raises InvalidArgument for the first that does not fit."""
    kind = format_of(path, None if params.format == "by suffix" else InputFormat(params.format))
    allowed = None if params.partition_by is None else (params.partition_by, list(collection.partitions))
    try:
        with path.open("rb") as source:
            for batch in read_batches(source, kind, collection.schema, batch_rows=BATCH_ROWS, allowed=allowed):
                if batch.bad:
                    raise InvalidArgument(f"line {batch.bad[0].line}: {batch.bad[0].why}")
                yield batch.rows
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}; nothing was loaded") from None

"""Staging of files: check every row before anything is appended, and keep the rows as Parquet with digests.

A load that restarts uses what it staged, so it refers to the same files again whatever happened to the input. See
millrace.operations.backfill.staging_folder.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.files.formats import InputFormat, format_of
from millrace.client.produce.files.reader import read_batches
from millrace.client.produce.rows import split_rows
from millrace.operations.backfill.declaration import LoadParams
from millrace.operations.backfill.staging_folder import StagingFolder, StagingManifest, staged_folder
from millrace.operations.backup.safe_paths import open_beneath
from millrace.operations.roots import check_within, containing_root, load_roots, started_by_launcher
from millrace.runtime.progress import Progress

BATCH_ROWS: Final = 50_000


def input_files(params: LoadParams, roots: Sequence[Path] | None = None) -> list[Path]:
    """Return the input files in the order of the parameters, the matches of a pattern in the order of names.

    Raises InvalidArgument if a file does not exist, or lies outside of `roots` (None: no restriction).
    """
    found: list[Path] = []
    for text in params.files:
        if not Path(text).is_absolute():
            raise InvalidArgument(f"{text}: give an absolute path; the job does not run in your working directory")
        if roots is not None:
            check_within(text, roots, setting="load_roots")
        matches = [Path(name) for name in sorted(glob.glob(text))] if glob.has_magic(text) else [Path(text)]
        missing = [path for path in matches if not path.is_file()]
        if missing or not matches:
            raise InvalidArgument(f"{missing[0] if missing else text}: no such file")
        if roots is not None:
            for path in matches:
                check_within(str(path), roots, setting="load_roots", asked=text)
        found += [path for path in matches if path not in found]
    return found


def check_partition(params: LoadParams, collection: CollectionInfo) -> None:
    """Check the partition, or the column that names it, against the collection.

    Raises InvalidArgument if it does not fit.
    """
    if collection.schema.replaces_duplicates:
        raise InvalidArgument(
            f"{collection.name} replaces the row of a repeated key, which an import cannot do: insert the rows of the "
            "files (millrace produce)"
        )
    known = ", ".join(collection.partitions)
    if params.partition is not None and params.partition_by is not None:
        raise InvalidArgument("give either partition or partition_by, not both")
    if params.partition is not None and params.partition not in collection.partitions:
        raise InvalidArgument(f"{collection.name} has no partition {params.partition!r}; it has {known}")
    kinds = {each.name: each.type for each in collection.schema.fields}
    if params.partition_by is not None and kinds.get(params.partition_by) != "string":
        raise InvalidArgument(f"partition_by must name a string field, and {params.partition_by!r} is not one")
    if params.partition is None and params.partition_by is None and collection.default_partition is None:
        raise InvalidArgument(f"give partition or partition_by; the partitions of {collection.name} are {known}")


def stage_files(
    settings: Settings, params: LoadParams, collection: CollectionInfo, progress: Progress
) -> StagingManifest:
    """Check and stage the files. Files that are already staged under the same import id are used as they are.

    Raises InvalidArgument, with file and line, for the first invalid row. Nothing is kept then.
    """
    check_partition(params, collection)
    roots = load_roots(settings) if started_by_launcher() else None
    paths = input_files(params, roots)
    progress.update("computing the files' digests")
    digests = {str(path): _digest(path, roots) for path in paths}
    import_id = params.import_id or _name(params, collection, list(digests.values()))
    known = StagingManifest.read(staged_folder(settings, import_id))
    if known is not None:
        if (known.collection_id, sorted(known.inputs.values())) != (collection.id, sorted(digests.values())):
            raise InvalidArgument(
                f"the import {import_id} was of other files or of another collection: choose another import_id"
            )
        return known
    target = StagingFolder(settings, import_id, collection, slice_bytes=params.slice_bytes)
    try:
        _write(params, collection, paths, roots, target, progress)
        return target.publish(digests, keep=not params.dry_run)
    finally:
        target.discard()


def _name(params: LoadParams, collection: CollectionInfo, digests: Sequence[str]) -> str:
    facts = [collection.id, params.partition, params.partition_by, sorted(digests)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _write(
    params: LoadParams,
    collection: CollectionInfo,
    paths: Sequence[Path],
    roots: Sequence[Path] | None,
    target: StagingFolder,
    progress: Progress,
) -> None:
    rows = 0
    for number, path in enumerate(paths):
        for batch in _batches(params, collection, path, roots):
            for vchannel, partition, part in split_rows(batch, collection, params.partition, params.partition_by):
                target.add(vchannel, partition, part)
            rows += batch.num_rows
            progress.update(f"checked {rows:,} rows in {number + 1} of {len(paths)} files", rows=rows)


def _open(path: Path, roots: Sequence[Path] | None) -> BinaryIO:
    """Open a file. With `roots`, follow no link that may have been put below its folder meanwhile."""
    if roots is None:
        return path.open("rb")
    root = containing_root(path, roots)
    try:
        if root is not None:
            return io.BufferedReader(open_beneath(root, str(path.resolve().relative_to(root))))
    except OSError:
        pass
    raise InvalidArgument(f"{path} is not a file in an allowed folder (load_roots)")


def _digest(path: Path, roots: Sequence[Path] | None) -> str:
    with _open(path, roots) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _batches(
    params: LoadParams, collection: CollectionInfo, path: Path, roots: Sequence[Path] | None
) -> Iterator[pa.Table]:
    """Yield the rows of one file.

    Raises InvalidArgument for the first invalid row. The message does not repeat the row's values.
    """
    kind = format_of(path, None if params.format == "by suffix" else InputFormat(params.format))
    allowed = None if params.partition_by is None else (params.partition_by, list(collection.partitions))
    try:
        with _open(path, roots) as source:
            read = read_batches(source, kind, collection.schema, batch_rows=BATCH_ROWS, allowed=allowed, quote=False)
            for batch in read:
                if batch.bad:
                    raise InvalidArgument(f"line {batch.bad[0].line}: {batch.bad[0].why}")
                yield batch.rows
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}; nothing was loaded") from None

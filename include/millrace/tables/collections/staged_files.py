"""Staged files: Parquet files in ``staged``, beside the tables, that Import messages name, verified when they are read.

Promises: no row is returned before the file has the size and sha256 that the message names. The rows have the count and
the schema version of the message, and keys of its VChannel. Memory is about BATCH_BYTES. So each reader of an Import
gets the same rows, or an error that names the file. A file must not change while the WAL has a message that names it;
afterwards :mod:`millrace.operations.checkpoint.staged_trim` removes it.

Functions take the place of the staged files as a path or a URI. Where the tables lie outside of the data folder,
earlier builds staged files in the data folder all the same; they are read there.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.base.errors import StagedFileDamaged, TableUnavailable
from millrace.base.files import sync
from millrace.base.settings import Settings
from millrace.message.bodies import ImportFile, VChannelImport
from millrace.message.keys import key_column, vchannel_index
from millrace.message.schema import CollectionSchema
from millrace.storage.local import LocalStore
from millrace.storage.store import StoreUnreachable, TableStore, store_at

BATCH_BYTES: Final = 32 << 20
"""Approximate size of decoded rows that are returned at once."""

_ROWS: Final = 4096
"""Maximum rows decoded at once: file sizes do not bound values that are stored once and repeated by many rows."""

_HASH_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class StagedFiles:
    """The rows of imports from their files (implements Imports of millrace.message.bodies)."""

    place: object
    earlier: object = None
    """Place to look for files that are not at `place`. None: nowhere."""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the staged files of a deployment."""
        remote = settings.staged_uri != str(settings.staged_path)
        return cls(settings.staged_uri, str(settings.staged_path) if remote else None)

    def rows(self, named: VChannelImport) -> Iterator[tuple[int, pa.RecordBatch]]:
        places = [self.place_of(file["path"]) for file in named.files]
        for place, file in zip(places, named.files, strict=True):
            check_staged_files(place, [file])
        for place, file in zip(places, named.files, strict=True):
            for rows in read_staged_file(place, file, named.schema, vchannel=named.vchannel, vchannels=named.vchannels):
                for batch in rows.to_batches():
                    yield file["partition_id"], batch

    def place_of(self, path: str) -> object:
        """Return the place of the file `path`, which need not exist."""
        if self.earlier is not None and store_at(self.earlier).size(path) is not None:
            return self.earlier
        return self.place


def sync_staged_files(staged: object, files: Iterable[ImportFile]) -> None:
    """Make staged files and their folders durable. Call before appending an Import that names them."""
    store = store_at(staged)
    if not isinstance(store, LocalStore):
        store.sync(file["path"] for file in files)
        return
    root = store.folder
    folders: set[Path] = {root.parent}
    for file in files:
        path = root / file["path"]
        sync(path)
        folders.update(each for each in path.parents if each == root or root in each.parents)
    for folder in sorted(folders, reverse=True):
        sync(folder)


def check_staged_files(staged: object, files: Iterable[ImportFile]) -> None:
    """Raise StagedFileDamaged if a file is missing or has another size. Cheap: reads no file."""
    store = store_at(staged)
    for file in files:
        try:
            size = store.size(file["path"])
        except StoreUnreachable as error:
            raise _unreachable(store.uri, error) from None
        except OSError as error:
            raise _damaged(store.uri, file, f"cannot be read ({error.strerror or error})") from None
        if size is None:
            raise _damaged(store.uri, file, "cannot be read (No such file or directory)")
        if size != file["bytes"]:
            raise _damaged(store.uri, file, f"has {size} bytes, not {file['bytes']}")


def read_staged_file(
    staged: object, file: ImportFile, schema: CollectionSchema, *, vchannel: str, vchannels: Sequence[str]
) -> Iterator[pa.Table]:
    """Yield the rows of one file as tables of ``schema.arrow()``.

    Raises StagedFileDamaged, if possible before any row.
    """
    store = store_at(staged)
    try:
        # One handle for both: what is read is what was hashed, even if the file is replaced meanwhile.
        with _opened(store, file["path"]) as handle:
            _check_digest(store.uri, file, handle)
            handle.seek(0)
            yield from _rows(store.uri, file, pq.ParquetFile(handle), schema, vchannel, vchannels)
    except StoreUnreachable as error:
        raise _unreachable(store.uri, error) from None
    except OSError as error:
        raise _damaged(store.uri, file, f"cannot be read ({error})") from None


def _unreachable(staged: str, error: StoreUnreachable) -> TableUnavailable:
    return TableUnavailable(f"cannot reach the staged files in {staged} ({error}): retry")


@contextmanager
def _opened(store: TableStore, name: str) -> Iterator[pa.NativeFile]:
    """Open a file of the store: the file itself on a disk, otherwise a copy of it, which costs each byte once."""
    if isinstance(store, LocalStore):
        with pa.OSFile(str(store.folder / name)) as handle:
            yield handle
        return
    with tempfile.SpooledTemporaryFile(BATCH_BYTES) as copy, store.filesystem.open_input_stream(name) as source:
        while block := source.read(_HASH_BYTES):
            copy.write(block)
        copy.seek(0)
        yield pa.PythonFile(copy, mode="r")


def staged_digest(staged: object, name: str) -> str | None:
    """Return the SHA-256 of a staged file as 64 lower-case hexadecimal digits; None if it does not exist."""
    found = hashlib.sha256()
    try:
        with store_at(staged).filesystem.open_input_stream(name) as source:
            while block := source.read(_HASH_BYTES):
                found.update(block)
    except FileNotFoundError:
        return None
    return found.hexdigest()


def _check_digest(staged: str, file: ImportFile, handle: pa.NativeFile) -> None:
    found = hashlib.sha256()
    while block := handle.read_buffer(_HASH_BYTES):
        found.update(block)
    if found.hexdigest() != file["digest"]:
        raise _damaged(staged, file, f"has the sha256 {found.hexdigest()}, not {file['digest']}")


def _rows(
    staged: str,
    file: ImportFile,
    parquet: pq.ParquetFile,
    schema: CollectionSchema,
    vchannel: str,
    vchannels: Sequence[str],
) -> Iterator[pa.Table]:
    target, metadata = schema.arrow(), parquet.metadata
    if [(each.name, each.type) for each in parquet.schema_arrow] != [(each.name, each.type) for each in target]:
        raise _unfit(staged, file, f"has the columns {_columns(parquet.schema_arrow)}, not {_columns(target)}")
    if metadata.num_rows != file["rows"]:
        raise _unfit(staged, file, f"has {metadata.num_rows} rows, not {file['rows']}")
    decoded = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    count = max(1, min(metadata.num_rows, _ROWS, BATCH_BYTES * metadata.num_rows // max(1, decoded)))
    held: list[pa.Table] = []
    size = 0
    for batch in parquet.iter_batches(batch_size=count):
        for field, column in zip(target, batch.columns, strict=True):
            if column.null_count and not field.nullable:
                raise _unfit(staged, file, f"has a null in {field.name!r}, which takes none")
        if len(vchannels) > 1:
            homes = vchannel_index(key_column(batch, schema.key_names), len(vchannels))
            if (homes != vchannels.index(vchannel)).any():
                raise _unfit(staged, file, f"has a primary key of another VChannel than {vchannel}")
        rows = pa.Table.from_batches([batch]).cast(target)
        step = max(1, rows.num_rows * BATCH_BYTES // max(1, rows.nbytes))
        for start in range(0, rows.num_rows, step):
            part = rows.slice(start, step)
            if held and size + part.nbytes > BATCH_BYTES:
                yield pa.concat_tables(held).combine_chunks()
                held, size = [], 0
            held.append(part)
            size += part.nbytes
    if held:
        yield pa.concat_tables(held).combine_chunks()


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _damaged(staged: str, file: ImportFile, words: str) -> StagedFileDamaged:
    return StagedFileDamaged(
        f"{staged}/{file['path']} {words}, but an Import in the WAL names it: put the file back as it was staged"
        f" (sha256 {file['digest']}), from a backup or by staging the same input again; reading then continues"
    )


def _unfit(staged: str, file: ImportFile, words: str) -> StagedFileDamaged:
    return StagedFileDamaged(
        f"{staged}/{file['path']} {words}: it is as its sender staged it, and does not fit the Import in the WAL that "
        "names it. Its collection can be read before that Import's tick alone; restore it from there into a new one"
    )

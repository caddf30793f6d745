"""Staged rows: Parquet files cut by VChannel and partition, and the manifest that describes them.

``staged/<import id>/``, beside the tables, holds ``manifest.json`` and the files. A slice belongs to one VChannel,
holds a limited number of bytes, and consists of files of one partition each. It becomes one Import message.

Staging is atomic. On a disk, the folder gets its final name last, after everything in it is synced. In a store without
renaming, the files have names of this attempt and are uploaded first; then the manifest is put if there is none. What a
killed attempt uploaded is named by its note in ``staged/.loading``, and a later load removes it after a day. From then
on the files do not change until the WAL is trimmed past their message.
"""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.base.errors import UnsupportedVersion
from millrace.base.failpoint import hit
from millrace.base.files import sha256_file, sync
from millrace.base.scratch_folder import ScratchFolder
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.message.bodies import ImportFile
from millrace.storage.local import LocalStore
from millrace.storage.store import TableStore, conditional, put_stream, store_at
from millrace.tables.collections.staged_files import StagedFiles

MANIFEST: Final = "manifest.json"
VERSION: Final = 1
"""Version of the manifest. A manifest without a version is from an earlier build and is read as version 1."""
_PARTIAL: Final = r"\..+\.([0-9a-f]{32}|[0-9]+)"
"""Names of unpublished folders. Those of earlier builds end with a process id."""
LOADING: Final = ".loading"
"""Folder of the notes of uploads under way, inside the staged folder."""
ABANDONED_SECONDS: Final = 86_400.0
"""Age from which on an upload without a manifest is removed. A load that wakes after it fails before it appends."""
_UPLOADS: Final = 4
OPEN_FILES: Final = 256
"""Files written at a time. Beyond that, the slice with the most open files continues in new ones."""


@dataclass(frozen=True, slots=True)
class StagedSlice:
    """Rows of one VChannel, named by one Import message."""

    vchannel: str
    rows: int
    files: list[ImportFile]


@dataclass(frozen=True, slots=True)
class StagingManifest:
    """The contents of one import."""

    import_id: str
    collection: str
    collection_id: int
    schema_version: int
    inputs: dict[str, str]
    """Input file to the sha256 of its bytes. Empty if the rows come from no file."""
    slices: list[StagedSlice]

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.slices)

    @classmethod
    def read(cls, folder: TableStore) -> Self | None:
        """Read the manifest of what is staged in `folder`, or return None if there is none."""
        text = folder.read(MANIFEST)
        if text is None:
            return None
        value: dict[str, Any] = json.loads(text)
        found = value.pop("version", VERSION)
        if found > VERSION:
            raise UnsupportedVersion(
                f"{folder.uri}/{MANIFEST} has version {found}, but this build knows {VERSION}: run the build that "
                "staged it, or a newer one"
            )
        return cls(**{**value, "slices": [StagedSlice(**each) for each in value["slices"]]})


def staged_folder(settings: Settings, import_id: str) -> TableStore:
    """Return the folder of a staged import."""
    place = StagedFiles.of(settings).place_of(f"{import_id}/{MANIFEST}")
    return store_at(f"{store_at(place).uri}/{import_id}")


@dataclass(slots=True)
class _OpenFile:
    path: Path
    partition: int
    writer: pq.ParquetWriter
    rows: int = 0

    def close(self, folder: str) -> ImportFile:
        self.writer.close()
        sync(self.path)
        return {
            "path": f"{folder}/{self.path.name}",
            "partition_id": self.partition,
            "rows": self.rows,
            "bytes": self.path.stat().st_size,
            "digest": sha256_file(self.path),
        }


@dataclass(slots=True)
class _OpenSlice:
    number: int
    vchannel: str
    bytes: int = 0
    files: dict[int, _OpenFile] = field(default_factory=dict)
    done: list[ImportFile] = field(default_factory=list)

    def close_files(self, folder: str) -> None:
        self.done += [self.files[partition].close(folder) for partition in sorted(self.files)]
        self.files.clear()


class StagingFolder:
    """Collects the rows of one import. :meth:`publish` stages them, :meth:`discard` drops them."""

    def __init__(
        self, settings: Settings, import_id: str, collection: CollectionInfo, *, slice_bytes: int | None
    ) -> None:
        """`slice_bytes` is the size of a slice in memory. None: one slice per VChannel."""
        self._import_id = import_id
        self._collection = collection
        self._slice_bytes = slice_bytes
        self._staged = store_at(settings.staged_uri)
        attempt = uuid.uuid4().hex
        if isinstance(self._staged, LocalStore):
            self._suffix = ""
            self._scratch = ScratchFolder(self._staged.folder / f".{import_id}.{attempt}", pattern=_PARTIAL)
        else:
            self._suffix = f"-{attempt[:12]}"
            self._scratch = ScratchFolder(settings.run_path / "staging" / attempt, pattern="[0-9a-f]{32}")
            _remove_abandoned(self._staged)
        self._partial = self._scratch.path
        self._open: dict[str, _OpenSlice] = {}
        self._slices: dict[int, StagedSlice] = {}
        self._begun = 0

    def add(self, vchannel: str, partition: int, rows: pa.RecordBatch) -> None:
        """Add rows with the collection's columns. Their keys must belong to `vchannel`."""
        current = self._open.get(vchannel)
        if current is None:
            current = self._open[vchannel] = _OpenSlice(self._begun, vchannel)
            self._begun += 1
        file = current.files.get(partition)
        if file is None:
            path = self._partial / f"{current.number:06d}-{partition}-{len(current.done)}{self._suffix}.parquet"
            writer = pq.ParquetWriter(path, self._collection.schema.arrow(), compression="zstd")
            file = current.files[partition] = _OpenFile(path, partition, writer)
        file.writer.write_batch(rows, row_group_size=max(1, rows.num_rows))
        file.rows += rows.num_rows
        current.bytes += rows.nbytes
        if self._slice_bytes is not None and current.bytes >= self._slice_bytes:
            self._close(current)
        elif sum(len(each.files) for each in self._open.values()) >= OPEN_FILES:
            max(self._open.values(), key=lambda each: len(each.files)).close_files(self._import_id)

    def publish(self, inputs: dict[str, str], *, keep: bool = True) -> StagingManifest:
        """Publish the folder durably and return its manifest, or that of another load of the same id that was faster.

        Without `keep`, discard it after computing the manifest.
        """
        for current in list(self._open.values()):
            self._close(current)
        slices = [self._slices[number] for number in sorted(self._slices)]
        collection = self._collection
        manifest = StagingManifest(
            self._import_id, collection.name, collection.id, collection.schema_version, inputs, slices
        )
        if keep:
            text = json.dumps({"version": VERSION, **asdict(manifest)}).encode()
            if isinstance(self._staged, LocalStore):
                self._rename(self._staged.folder, text)
            elif not self._upload(manifest, text):
                manifest = StagingManifest.read(store_at(f"{self._staged.uri}/{self._import_id}")) or manifest
        self.discard()
        return manifest

    def _rename(self, staged: Path, manifest: bytes) -> None:
        path = self._partial / MANIFEST
        path.write_bytes(manifest)
        for each in (path, self._partial):
            sync(each)
        with suppress(OSError):  # another load of the same id was faster, and staged the same rows
            self._partial.rename(staged / self._import_id)
        sync(staged)

    def _upload(self, manifest: StagingManifest, text: bytes) -> bool:
        """Upload the files, and then the manifest. Returns False if another load of the same id was faster."""
        store, paths = conditional(self._staged), [file["path"] for each in manifest.slices for file in each.files]
        note = f"{LOADING}/{uuid.uuid4().hex}.json"
        store.replace(note, json.dumps({"manifest": f"{self._import_id}/{MANIFEST}", "paths": paths}).encode())

        def upload(path: str) -> None:
            with (self._partial / path.rpartition("/")[2]).open("rb") as source:
                put_stream(store, path, source)

        with ThreadPoolExecutor(_UPLOADS, thread_name_prefix="staging") as pool:
            list(pool.map(upload, paths))
        hit("staging.uploaded")
        name = f"{self._import_id}/{MANIFEST}"
        with suppress(OSError):  # its answer may be lost: the stored file decides
            store.put_if_absent(name, text)
        found = store.read(name)
        if found is None:
            raise OSError(f"{store.uri}/{name} could not be written: run the load again")
        if found != text:
            store.delete(paths)
        store.delete([note])
        return found == text

    def discard(self) -> None:
        """Discard what is not published. Idempotent."""
        for current in self._open.values():
            for file in current.files.values():
                file.writer.close()
        self._open.clear()
        self._scratch.discard()

    def _close(self, current: _OpenSlice) -> None:
        del self._open[current.vchannel]
        current.close_files(self._import_id)
        rows = sum(each["rows"] for each in current.done)
        self._slices[current.number] = StagedSlice(current.vchannel, rows, current.done)


def _remove_abandoned(staged: TableStore) -> None:
    """Remove what loads uploaded that ended without a manifest, at least ABANDONED_SECONDS ago."""
    for name in staged.list(LOADING, age=ABANDONED_SECONDS):
        note = staged.read(f"{LOADING}/{name}")
        if note is None:
            continue
        value: dict[str, Any] = json.loads(note)
        manifest = staged.read(value["manifest"])
        named = set() if manifest is None else _named_files(json.loads(manifest))
        staged.delete([path for path in value["paths"] if path not in named])
        staged.delete([f"{LOADING}/{name}"])


def _named_files(manifest: dict[str, Any]) -> set[str]:
    return {file["path"] for each in manifest["slices"] for file in each["files"]}

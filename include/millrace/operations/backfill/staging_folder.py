"""Staged rows: Parquet files cut by VChannel and partition, and the manifest that describes them.

``<data_dir>/staged/<import id>/`` holds ``manifest.json`` and the files. A slice belongs to one VChannel, holds a
limited number of bytes, and consists of files of one partition each. It becomes one Import message.

Staging is atomic: the folder gets its final name last, after everything in it is synced. From then on its files do not
change until the WAL is trimmed past their message.
"""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.base.errors import UnsupportedVersion
from millrace.base.files import sha256_file, sync
from millrace.base.scratch_folder import ScratchFolder
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.message.bodies import ImportFile

MANIFEST: Final = "manifest.json"
VERSION: Final = 1
"""Version of the manifest. A manifest without a version is from an earlier build and is read as version 1."""
_PARTIAL: Final = r"\..+\.([0-9a-f]{32}|[0-9]+)"
"""Names of unpublished folders. Those of earlier builds end with a process id."""
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
    def read(cls, folder: Path) -> Self | None:
        """Read the manifest of what is staged in `folder`, or return None if there is none."""
        try:
            value: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        except FileNotFoundError:
            return None
        found = value.pop("version", VERSION)
        if found > VERSION:
            raise UnsupportedVersion(
                f"{folder / MANIFEST} has version {found}, but this build knows {VERSION}: run the build that staged "
                "it, or a newer one"
            )
        return cls(**{**value, "slices": [StagedSlice(**each) for each in value["slices"]]})


def staged_folder(settings: Settings, import_id: str) -> Path:
    """Return the folder of a staged import."""
    return settings.staged_path / import_id


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
        self._settings = settings
        self._import_id = import_id
        self._collection = collection
        self._slice_bytes = slice_bytes
        name = f".{import_id}.{uuid.uuid4().hex}"
        self._scratch = ScratchFolder(settings.staged_path / name, pattern=_PARTIAL)
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
            path = self._partial / f"{current.number:06d}-{partition}-{len(current.done)}.parquet"
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
        """Publish the folder durably and return its manifest.

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
            text = self._partial / MANIFEST
            text.write_text(json.dumps({"version": VERSION, **asdict(manifest)}))
            for path in (text, self._partial):
                sync(path)
            with suppress(OSError):  # another load of the same id was faster, and staged the same rows
                self._partial.rename(staged_folder(self._settings, self._import_id))
            sync(self._settings.staged_path)
        self.discard()
        return manifest

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

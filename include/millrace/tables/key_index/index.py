"""The runs of one rows table and their upkeep: which files they cover, adding files, merging, dropping.

The index is derived and local (``tables/<collection id>/_index`` in the data folder): `manifest.json`, replaced whole
and synced, names the runs. It is optional: a lookup scans the files that no run covers. So three
answers differ: a file that no run covers is *unknown* and scanned; entries of a covered file that is not live are
*gone* and skipped; rows that a rewrite *moved* are found in their new file once it is covered, and by a scan before.

:meth:`KeyIndex.catch_up` covers the live files that no run covers, whether that is a publish's new file or, after the
index was lost, all of them. It reads only these files. Runs merge by size tiers, so a row's entry is written again
about once for each factor of TIER_RUNS in the table's size, and a run may cover files that are rewritten at different
times: a merge takes every entry of each file that is live, and a run with more gone than live rows is written again.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from millrace.base.files import replace_json
from millrace.message.keys import key_column
from millrace.message.schema import CollectionSchema
from millrace.message.stored_columns import key_schema
from millrace.storage.table import TableHandle
from millrace.tables.key_index.hashes import KeyHashes, hash_keys
from millrace.tables.key_index.run_file import (
    BLOCK_ROWS,
    CoveredFile,
    Entries,
    Int64s,
    Run,
    RunDamaged,
    concatenated,
    merged,
    write_run,
)

MANIFEST_VERSION: Final = 1
MANIFEST_FILE: Final = "manifest.json"

TIER_RUNS: Final = 4
"""Runs of about one size that are merged into one."""
MAX_MERGED_ROWS: Final = 1 << 25
"""Rows of the largest run that a merge makes: 0.9 GiB. Bounds the duration of a merge."""
BUILD_ROWS: Final = 1 << 21
"""Rows from which on new entries become a run. Bounds the memory of a build, about 64 bytes a row."""
INDEX_FROM_ROWS: Final = 1 << 16
"""Rows that a publish has to read for its deletes, or a reader for its keys, from which on an index is worth its cost.
With keys that grow with time, bounds leave out nearly all files, and no index is needed."""
WANTED_FILE: Final = "wanted"
"""Present once a reader had to scan for want of an index: the next publish makes one."""
STRAY_SECONDS: Final = 3600.0
"""Age from which on a run that no manifest names is deleted: another process may be about to name a younger one."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class IndexWork:
    """The cost of an index's upkeep."""

    files_indexed: int = 0
    rows_indexed: int = 0
    rows_merged: int = 0
    """Entries that merges wrote again."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows whose key may be a looked-up one, each column shaped ``(rows,)``, by file, then in no order."""

    key: Int64s
    """Its place among the keys."""
    file: Int64s
    """Its place in `files`."""
    position: Int64s
    """The row's place in its file."""
    tick: Int64s
    """The tick from which on the row is visible."""
    files: tuple[str, ...]
    blocks: int
    """Blocks of runs that were read."""

    def filtered(self, keep: npt.NDArray[np.bool_]) -> Candidates:
        """Return those that the mask `keep` has."""
        columns = (self.key[keep], self.file[keep], self.position[keep], self.tick[keep])
        return Candidates(*columns, self.files, self.blocks)

    def by_file(self) -> Iterator[tuple[str, Int64s]]:
        """Yield each file that has some, and their places in the columns."""
        order = np.argsort(self.file, kind="stable")
        numbers, begins = np.unique(self.file[order], return_index=True)
        for number, begin, end in zip(numbers, begins, [*begins[1:], len(order)], strict=False):
            yield self.files[number], order[begin:end]


@dataclass(slots=True)
class KeyIndex:
    """An open index. Not thread-safe."""

    folder: Path
    table_version: int = -1
    """Version of the rows table that it was brought up to; -1: none."""
    runs: list[Run] = field(default_factory=list)
    _made: set[Path] = field(default_factory=set)
    """Runs that this catch-up wrote. Some are merged before the manifest names them."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the index in `folder`; without runs if it is not there. Damaged runs are left out."""
        last = None
        while True:
            try:
                text = (folder / MANIFEST_FILE).read_text()
                said = json.loads(text)
                if said["format"] != MANIFEST_VERSION:
                    raise ValueError(f"its format is {said['format']}")
                version, names = int(said["table_version"]), [str(each) for each in said["runs"]]
            except FileNotFoundError:
                return cls(folder)
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.warning("the key index in %s cannot be read (%s): it is rebuilt", folder, error)
                return cls(folder)
            runs, missing = [], False
            for name in names:
                try:
                    runs.append(Run.open(folder / name))
                except RunDamaged as error:
                    missing |= not (folder / name).exists()
                    if not missing:
                        _log.warning("%s", error)
            if not missing or text == last:
                return cls(folder, version, runs)
            last = text  # a merge replaced it: the manifest names another one now

    @property
    def is_wanted(self) -> bool:
        """Whether there is an index, or a reader asked for one."""
        return bool(self.runs) or (self.folder / WANTED_FILE).exists()

    def request(self) -> None:
        """Ask the publisher for an index. A hint: a reader may have no right to write here."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / WANTED_FILE).touch()

    def request_for(self, rows: int) -> None:
        """Ask for an index, if there is none, because `rows` had to be scanned without one."""
        if rows >= INDEX_FROM_ROWS and not self.is_wanted:
            self.request()

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.runs)

    @property
    def size(self) -> int:
        """Bytes of its runs."""
        return sum(each.size for each in self.runs)

    def covered(self, live: Mapping[str, int]) -> set[str]:
        """Return the files of `live` (path: rows) that a run covers."""
        return {each.path for run in self.runs for each in run.files if live.get(each.path) == each.rows}

    def find(self, hashes: KeyHashes, live: Mapping[str, int]) -> Candidates:
        """Return the rows of covered files among `live` whose keys have these hashes.

        A run that turns out to be damaged is dropped from this object: its files are no longer covered. Then raises
        RunDamaged.
        """
        order = np.argsort(hashes.high, kind="stable")
        ordered = KeyHashes(hashes.high[order], hashes.low[order])
        files = tuple(live)
        number = {path: place for place, path in enumerate(files)}
        taken: set[str] = set()
        blocks = 0
        parts: list[tuple[Int64s, Int64s, Int64s, Int64s]] = []
        for run in tuple(self.runs):
            mine = [
                number[each.path] if live.get(each.path) == each.rows and each.path not in taken else -1
                for each in run.files
            ]
            taken.update(each.path for each, place in zip(run.files, mine, strict=True) if place >= 0)
            if max(mine, default=-1) < 0:
                continue
            numbers = np.array(mine, dtype=np.int64)
            begins = run.ends - np.array([each.rows for each in run.files], dtype=np.int64)
            try:
                for found, read in run.find(ordered):
                    owner = np.searchsorted(run.ends, found.ordinal, "right")
                    here = np.flatnonzero(numbers[owner] >= 0)
                    owner = owner[here]
                    position = found.ordinal[here].astype(np.int64) - begins[owner]
                    parts.append((order[found.key[here]], numbers[owner], position, found.tick[here]))
                    blocks += read
            except RunDamaged:
                self.runs = [each for each in self.runs if each is not run]
                raise
        nothing = np.zeros(0, dtype=np.int64)
        key, file, position, tick = (np.concatenate([nothing, *(part[place] for part in parts)]) for place in range(4))
        return Candidates(key, file, position, tick, files, blocks)

    def catch_up(self, table: TableHandle, schema: CollectionSchema) -> IndexWork:
        """Cover the live files of the rows table at its version, and replace the manifest if anything changed.

        Call it after the commit that names the version as published. Reads the key columns of files that no run
        covers. Damaged runs are rebuilt. Raises TableDamaged if a data file is.
        """
        work = IndexWork()
        live = {each.path: each.rows for each in table.describe_files()}
        before = {each.path for each in self.runs}
        self._made = set()
        unknown = sorted(live.keys() - self.covered(live))
        self.runs.extend(self._built(table, schema, {path: live[path] for path in unknown}, work))
        self._tidy(live, work)
        after = {each.path for each in self.runs}
        if after == before and self.table_version == table.version:
            return work
        self.table_version = table.version
        said = {
            "format": MANIFEST_VERSION,
            "table_version": table.version,
            "runs": [each.name for each in sorted(after)],
        }
        replace_json(self.folder / MANIFEST_FILE, said, synced=True)
        self._delete_strays((before | self._made) - after)
        return work

    def _built(
        self, table: TableHandle, schema: CollectionSchema, files: Mapping[str, int], work: IndexWork
    ) -> Iterator[Run]:
        """Yield new runs that cover `files`."""
        held: list[Entries] = []
        names: list[CoveredFile] = []
        count = 0
        for path, rows in files.items():
            held.append(_entries(table, schema, path, count))
            names.append(CoveredFile(path, rows))
            count += rows
            work.files_indexed += 1
            work.rows_indexed += rows
            if count >= BUILD_ROWS:
                yield self._written(names, [concatenated(held).ordered()])
                held, names, count = [], [], 0
        if names:
            yield self._written(names, [concatenated(held).ordered()])

    def _written(self, files: list[CoveredFile], parts: Iterable[Entries]) -> Run:
        path = self.folder / f"{uuid.uuid4().hex}.run"
        self._made.add(path)
        try:
            write_run(path, files, parts)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return Run.open(path)

    def _tidy(self, live: Mapping[str, int], work: IndexWork) -> None:
        """Drop runs without live files, rewrite runs that are mostly gone, and merge full tiers."""
        living = {run.path: [each.rows for each in run.files if live.get(each.path) == each.rows] for run in self.runs}
        self.runs = [run for run in self.runs if living[run.path]]
        for run in [each for each in self.runs if 2 * sum(living[each.path]) < each.rows]:
            self._merge([run], live, work)
        while True:
            tiers: dict[int, list[Run]] = {}
            for run in self.runs:
                tiers.setdefault((run.rows // BLOCK_ROWS).bit_length() // 2, []).append(run)
            full = [
                runs
                for runs in tiers.values()
                if len(runs) >= TIER_RUNS and sum(run.rows for run in runs) <= MAX_MERGED_ROWS
            ]
            if not full:
                return
            self._merge(full[0], live, work)

    def _merge(self, runs: list[Run], live: Mapping[str, int], work: IndexWork) -> None:
        """Replace runs by one. A damaged one is dropped instead, and its files are covered by the next catch-up."""
        files, parts = merged(runs, live)
        try:
            made = self._written(files, parts)
        except RunDamaged as error:
            _log.warning("%s", error)
            self.runs = [run for run in self.runs if run.path != error.path]
            return
        self.runs = [run for run in self.runs if run not in runs] + [made]
        work.rows_merged += made.rows

    def _delete_strays(self, replaced: Iterable[Path]) -> None:
        """Delete runs that the manifest no longer names, and old ones that no manifest ever named."""
        for path in replaced:
            path.unlink(missing_ok=True)
        named = {each.path for each in self.runs}
        for path in self.folder.glob("*.run"):
            try:
                if path not in named and path.stat().st_mtime < time.time() - STRAY_SECONDS:
                    path.unlink()
            except FileNotFoundError:
                continue


def _entries(table: TableHandle, schema: CollectionSchema, path: str, first: int) -> Entries:
    """Return the entries of a data file, whose first row has the ordinal `first`. Raises TableDamaged."""
    keys = key_schema(schema)
    with table.open_file(path) as file:
        rows = file.read(columns=[*keys.names, "_time_tick"])
    hashes = hash_keys(key_column(rows.select(keys.names).cast(keys), keys.names))
    tick = rows["_time_tick"].to_numpy()
    ordinal = np.arange(first, first + rows.num_rows, dtype=np.uint32)
    return Entries(hashes.high, hashes.low, tick, ordinal)

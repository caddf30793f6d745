"""One run of the key index: an immutable, memory-mapped file with an entry for each row of the data files it covers.

An entry is 28 bytes: the 128-bit hash of the row's key, the tick from which on the row is visible, and the row's
ordinal in the covered files, one after the other. Entries are sorted by the upper half of the hash, in blocks of
BLOCK_ROWS, column by column inside a block. After the blocks come the first hash and the digest (XXH3-64) of each
block, a JSON text (format, hash, rows, files), and a trailer: the bytes and the digest of the part between blocks
and trailer, and MAGIC. So opening reads what follows the blocks, 1/900 of the file, and each block is checked when it
is read.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import xxhash

from millrace.base.files import make_folder, sync
from millrace.tables.key_index.hashes import HASH_NAME, KeyHashes, UInt64s

RUN_VERSION: Final = 1
MAGIC: Final = b"MLRKEYS1"
"""Its last byte is the digit of RUN_VERSION."""

BLOCK_ROWS: Final = 512
_BLOCK: Final = np.dtype(
    [
        ("high", "<u8", BLOCK_ROWS),
        ("low", "<u8", BLOCK_ROWS),
        ("tick", "<i8", BLOCK_ROWS),
        ("ordinal", "<u4", BLOCK_ROWS),
    ]
)
"""Entries after the last one are zero, but their hashes are the greatest."""

_TRAILER: Final = struct.Struct("<QQ8s")
_QUERIES: Final = 2048
"""Keys that are looked up at once. Memory: a block for each, 28 MiB."""
_LAST: Final = np.uint64(0xFFFFFFFFFFFFFFFF)

Int64s = npt.NDArray[np.int64]


class RunDamaged(Exception):
    """A run cannot be used: its files are scanned, and indexed again. Never leaves this folder."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"the run {path} of a key index cannot be used: {why}. It is made anew")
        self.path = path


class CoveredFile(NamedTuple):
    """A data file that a run covers."""

    path: str
    """Relative to the rows table."""
    rows: int


class Entries(NamedTuple):
    """Entries of a run as columns, each shaped ``(rows,)``, with the types of a block."""

    high: npt.NDArray[Any]
    low: npt.NDArray[Any]
    tick: npt.NDArray[Any]
    ordinal: npt.NDArray[Any]

    def taken(self, places: npt.NDArray[Any]) -> Entries:
        return Entries(*(each[places] for each in self))

    def ordered(self) -> Entries:
        """Return them by the upper half of the hash. Entries that are equal in it keep their order."""
        return self.taken(np.argsort(self.high, kind="stable"))


class Matches(NamedTuple):
    """Entries with the hash of a looked-up key, each shaped ``(matches,)``, in no order."""

    key: Int64s
    """Its place among the keys."""
    tick: Int64s
    ordinal: npt.NDArray[np.uint32]


def concatenated(parts: Sequence[Entries]) -> Entries:
    """Return the entries of all parts, one after the other."""
    return Entries(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def write_run(path: Path, files: Sequence[CoveredFile], parts: Iterable[Entries]) -> int:
    """Write the file of a run, durably, from entries that are sorted within and across `parts`. Returns their number.

    Memory: one part.
    """
    rows, firsts, digests = 0, [], []
    rest: list[Entries] = []
    make_folder(path.parent)
    with path.open("xb") as file:

        def put(entries: Entries) -> None:
            count = -(-len(entries.high) // BLOCK_ROWS)
            blocks = np.zeros(count, dtype=_BLOCK)
            for name, values in zip(Entries._fields, entries, strict=True):
                whole = np.zeros(count * BLOCK_ROWS, dtype=values.dtype)
                if name in ("high", "low"):
                    whole[len(values) :] = _LAST
                whole[: len(values)] = values
                blocks[name] = whole.reshape(count, BLOCK_ROWS)
            firsts.append(blocks["high"][:, 0].copy())
            digests.extend(_digests(blocks))
            file.write(blocks.tobytes())

        for part in parts:
            rows += len(part.high)
            rest.append(part)
            held = concatenated(rest)
            cut = len(held.high) // BLOCK_ROWS * BLOCK_ROWS
            if cut:
                put(Entries(*(each[:cut] for each in held)))
            rest = [Entries(*(each[cut:] for each in held))]
        if rest and len(rest[0].high):
            put(rest[0])
        said = {"format": RUN_VERSION, "hash": HASH_NAME, "rows": rows, "files": files}
        tail = np.concatenate([np.zeros(0, "<u8"), *firsts]).astype("<u8").tobytes()
        tail += np.array(digests, dtype="<u8").tobytes() + json.dumps(said).encode()
        file.write(tail + _TRAILER.pack(len(tail), xxhash.xxh3_64_intdigest(tail), MAGIC))
        file.flush()
        sync(file.fileno())
    sync(path.parent)
    return rows


def _digests(blocks: npt.NDArray[Any]) -> list[int]:
    whole = blocks.view(np.uint8).reshape(len(blocks), _BLOCK.itemsize)
    return [xxhash.xxh3_64_intdigest(whole[place]) for place in range(len(blocks))]


@dataclass(frozen=True, slots=True)
class Run:
    """An open run. Thread-safe. Its file may be deleted while it is open."""

    path: Path
    rows: int
    files: tuple[CoveredFile, ...]
    ends: Int64s
    """The ordinal after the last row of each file."""
    _blocks: npt.NDArray[Any]
    _firsts: UInt64s
    _digests: UInt64s

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the run at `path`. Raises RunDamaged."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - _TRAILER.size))
                length, digest, magic = _TRAILER.unpack(file.read())
                if magic != MAGIC:
                    raise RunDamaged(path, "it has another format")
                begin = size - _TRAILER.size - length
                file.seek(max(0, begin))
                tail = file.read(length)
                if begin < 0 or begin % _BLOCK.itemsize or xxhash.xxh3_64_intdigest(tail) != digest:
                    raise RunDamaged(path, "its end does not have its digest")
                count = begin // _BLOCK.itemsize
                said = json.loads(tail[16 * count :])
                blocks = np.memmap(file, dtype=_BLOCK, mode="r", shape=(count,)) if count else np.zeros(0, _BLOCK)
        except (OSError, struct.error, ValueError) as error:
            raise RunDamaged(path, str(error)) from error
        if said["hash"] != HASH_NAME:
            raise RunDamaged(path, f"its hash is {said['hash']}")
        firsts = np.frombuffer(tail, "<u8", count=count)
        digests = np.frombuffer(tail, "<u8", count=count, offset=8 * count)
        files = tuple(CoveredFile(*each) for each in said["files"])
        ends = np.cumsum(np.array([each.rows for each in files], dtype=np.int64))
        return cls(path, said["rows"], files, ends, blocks, firsts, digests)

    @property
    def size(self) -> int:
        """Bytes of its blocks."""
        return len(self._blocks) * _BLOCK.itemsize

    def find(self, hashes: KeyHashes) -> Iterator[tuple[Matches, int]]:
        """Yield the entries with these hashes, of which `high` ascends, and the number of blocks that were read.

        Raises RunDamaged.
        """
        for start in range(0, len(hashes.high), _QUERIES):
            high, low = (each[start : start + _QUERIES] for each in hashes[:2])
            # Entries of a hash may begin in the block before the first one that begins with it.
            begins = np.maximum(np.searchsorted(self._firsts, high, "left") - 1, 0)
            ends = np.searchsorted(self._firsts, high, "right")
            wanted = np.unique(_ranges(begins, np.maximum(ends - begins, 0)))
            if not len(wanted):
                continue
            entries, places = self._read(wanted)
            first = np.searchsorted(entries.high, high, "left")
            counts = np.searchsorted(entries.high, high, "right") - first
            found = _ranges(first, counts)
            key = np.repeat(np.arange(len(high)), counts)
            same = (entries.low[found] == low[key]) & (places[found] < self.rows)
            found = found[same]
            yield Matches(key[same] + start, entries.tick[found], entries.ordinal[found]), len(wanted)

    def between(self, low: int, high: int) -> Entries:
        """Return the entries with low <= upper half of the hash < high (2**64: no bound). Raises RunDamaged."""
        begin = max(int(np.searchsorted(self._firsts, np.uint64(low), "left")) - 1, 0)
        end = len(self._firsts) if high > int(_LAST) else int(np.searchsorted(self._firsts, np.uint64(high), "left"))
        entries, places = self._read(np.arange(begin, max(begin, end)))
        inside = (entries.high >= np.uint64(low)) & (places < self.rows)
        if high <= int(_LAST):
            inside &= entries.high < np.uint64(high)
        return entries.taken(np.flatnonzero(inside))

    def _read(self, wanted: Int64s) -> tuple[Entries, Int64s]:
        """Return the entries of these blocks and their places in the run. Raises RunDamaged."""
        blocks = self._blocks[wanted]
        if _digests(blocks) != self._digests[wanted].tolist():
            raise RunDamaged(self.path, "a block does not have its digest")
        places = (wanted[:, None] * BLOCK_ROWS + np.arange(BLOCK_ROWS)).reshape(-1)
        return Entries(*(blocks[name].reshape(-1) for name in Entries._fields)), places


def _ranges(starts: npt.NDArray[Any], counts: npt.NDArray[Any]) -> Int64s:
    """Return start, start + 1, ... (count numbers) for each pair, one after the other."""
    total = int(counts.sum())
    offsets = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return (np.arange(total) + offsets).astype(np.int64)


def merged(
    runs: Sequence[Run], live: Mapping[str, int], most_rows: int = 1 << 20
) -> tuple[list[CoveredFile], Iterator[Entries]]:
    """Return the files of `runs` among `live` (path: rows), and their entries in order, in parts of about `most_rows`.

    Every entry of a live file is taken, however many a key has. Raises RunDamaged while iterating.
    """
    files: list[CoveredFile] = []
    taken: list[npt.NDArray[np.bool_]] = []
    moved: list[Int64s] = []
    end = 0
    for run in runs:
        keep = np.array([live.get(each.path) == each.rows for each in run.files], dtype=bool)
        shift = np.zeros(len(run.files), dtype=np.int64)
        for place, each in enumerate(run.files):
            if keep[place]:
                shift[place] = end - (int(run.ends[place]) - each.rows)
                end += each.rows
                files.append(each)
        taken.append(keep)
        moved.append(shift)

    def parts() -> Iterator[Entries]:
        count = max(1, -(-sum(run.rows for run in runs) // most_rows))
        bounds = [(1 << 64) * number // count for number in range(count + 1)]
        for low, high in pairwise(bounds):
            found = []
            for run, keep, shift in zip(runs, taken, moved, strict=True):
                entries = run.between(low, high)
                owner = np.searchsorted(run.ends, entries.ordinal, "right")
                if not keep.all():
                    retained = np.flatnonzero(keep[owner])
                    entries, owner = entries.taken(retained), owner[retained]
                ordinal = (entries.ordinal.astype(np.int64) + shift[owner]).astype(np.uint32)
                found.append(entries._replace(ordinal=ordinal))
            yield concatenated(found).ordered()

    return files, parts()

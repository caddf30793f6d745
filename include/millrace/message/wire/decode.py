"""Decode log entries: any bytes become rows of MESSAGE_SCHEMA, in bounded time and memory.

All entries of a run are decoded at once, column by column. Python touches an entry only for its checksum and its
dictionary (cached), and never a single message. An invalid entry becomes one UNDEFINED row with the cause.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.base.errors import UnsupportedVersion
from millrace.message.columns import MessageColumns
from millrace.message.wire.crc import combine_crc32c
from millrace.message.wire.layout import (
    ABSENT,
    ARRAY,
    ASSERTED,
    ASSERTED_PREFIX,
    BYTES_PER_MESSAGE,
    COLUMNS,
    COLUMNS_START,
    CONSTANT,
    CRC_START,
    MAGIC,
    MAX_MESSAGES,
    MAX_NAME_BYTES,
    MAX_STAMP_BYTES,
    PREFIX,
    RAMP,
    STAMPED,
    TAGS_START,
    UNDECODED_PAYLOAD_BYTES,
    UNSTAMPED,
    VERSIONS,
    WIDTHS,
    HeaderColumn,
)

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_JOIN_FROM: Final = 256 << 10
"""Bytes from which combining checksums is cheaper than computing one."""

TOO_SHORT: Final = "it is shorter than the fixed part of an entry"
NO_MAGIC: Final = "it does not begin with the magic bytes"
_WRONG_CHECKSUM: Final = "its checksum does not match"
WRONG_VERSION: Final = "its version is 0, or its flags or reserved bytes are set"
WRONG_STAMP: Final = "its stamp is not a name of 1 to 255 bytes of UTF-8, or its flags are unknown"
WRONG_COUNT: Final = "its message count is 0, above 65,536, or too great for its length"
WRONG_SECTIONS: Final = "its sections do not fill it exactly"
UNKNOWN_TAG: Final = "a header column has an unknown tag"
_NO_NAME: Final = "a VChannel index is outside its dictionary"
WRONG_COLUMNS: Final = "its header columns do not fill their section exactly"

_MAGIC: Final = int.from_bytes(MAGIC, "little")
_COUNT_AT: Final = struct.calcsize("<4sIBBH")
_COUNT_END: Final = _COUNT_AT + 4
"""The position of the message count in the prefix ends here."""
_PREFIX_PLACES: Final = np.arange(TAGS_START)
_TAG_PLACES: Final = np.arange(TAGS_START, COLUMNS_START)
_DTYPES: Final = tuple(column.dtype for column in COLUMNS)
_TYPE, _VCHANNEL, _PAYLOAD_LENGTH = 0, 1, len(COLUMNS) - 1
_PLAIN: Final = tuple(place for place in range(len(COLUMNS)) if place not in (_VCHANNEL, _PAYLOAD_LENGTH))
"""Indexes of the columns that become columns of MESSAGE_SCHEMA unchanged."""


def entry_crc(value: bytes | memoryview | pa.Buffer, *, verified: bool = False) -> int:
    """Return the crc32c of a whole entry; the channel state keeps the last one, to detect a regressed log.

    `verified` says that :func:`decode_entries` accepted it: its own checksum then holds, and a large entry is not read
    again.
    """
    size = len(value)
    if not verified or size < _JOIN_FROM:
        return int(crc32c.crc32c(value))
    head = bytes(memoryview(value)[:CRC_START])
    own = int.from_bytes(head[len(MAGIC) :], "little")
    return combine_crc32c(crc32c.crc32c(head), own, size - CRC_START)


def framed_counts(values: pa.LargeBinaryArray) -> Int64s:
    """Return how many messages each entry frames, by its header; 1 if the count is invalid or too large for the
    entry.
    """
    if len(values) == 1:
        return np.array([_framed_count(values[0].as_buffer())])
    offsets = np.frombuffer(values.buffers()[1], np.int64, len(values) + 1, values.offset * 8)
    lengths = np.diff(offsets)
    counts = np.ones(len(values), dtype=np.int64)
    whole = np.flatnonzero(lengths >= COLUMNS_START)
    if len(whole):
        counts[whole] = unaligned_view(np.frombuffer(values.buffers()[2], np.uint8), np.dtype("<u4"))[
            offsets[whole] + _COUNT_AT
        ]
        counts[(counts < 1) | (counts > MAX_MESSAGES) | (counts * BYTES_PER_MESSAGE > lengths)] = 1
    return counts


def _framed_count(entry: pa.Buffer) -> int:
    """Return :func:`framed_counts` for one entry. A lone append has just one."""
    count = int.from_bytes(memoryview(entry)[_COUNT_AT:_COUNT_END], "little")
    whole = 1 <= count <= MAX_MESSAGES and len(entry) >= max(COLUMNS_START, count * BYTES_PER_MESSAGE)
    return count if whole else 1


def unaligned_view(data: Bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a view with a value at every byte offset: values are unaligned, and numpy reads them this way."""
    return np.ndarray(shape=(len(data) - dtype.itemsize + 1,), dtype=dtype, buffer=data, strides=(1,))


def decode_entries(entries: pa.RecordBatch) -> pa.RecordBatch:
    """Return the messages of a run of log entries (ENTRY_SCHEMA), in order, as MESSAGE_SCHEMA.

    Never raises for an entry's content: an invalid one becomes one row of type 0 (UNDEFINED), index 0, with its first
    64 KiB as payload and the cause in ``detail``.
    Raises UnsupportedVersion for a complete entry (magic and checksum are valid) of a newer version.
    Allocates at most 16 bytes per byte of `entries`, plus a kilobyte per entry.
    """
    return decode_columns(entries).batch()


def decode_columns(entries: pa.RecordBatch) -> MessageColumns:
    """Return the messages of :func:`decode_entries` as numpy columns."""
    return _Run(entries).decode()


def is_stamped(word: Int64s) -> npt.NDArray[np.bool_]:
    """Return which entries have a valid stamp, by the word of version, flags and the stamp's length."""
    flags, stamp = word >> 8 & 0xFF, word >> 16
    return (word & 0xFF == STAMPED) & (flags <= ASSERTED) & (stamp >= 1) & (stamp <= MAX_STAMP_BYTES)


def principal_of(stamp: bytes, flags: int) -> str | None:
    """Return the principal that a stamp names; None if it is not UTF-8."""
    try:
        name = stamp.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return ASSERTED_PREFIX + name if flags & ASSERTED else name


class HeaderSummary(NamedTuple):
    """Types and VChannels of the messages of some entries, in order."""

    types: npt.NDArray[np.uint16]
    vchannels: npt.NDArray[np.int32]
    """Indexes into `names`."""
    names: list[str]


def decode_header_summary(values: pa.LargeBinaryArray) -> HeaderSummary | str:
    """Return types and VChannels as :func:`decode_entries` finds them, at a fraction of its cost, or why an entry is
    invalid.

    Other faults are not checked: such an entry becomes UNDEFINED regardless of this result.
    Raises UnsupportedVersion.
    """
    places = pa.array(np.arange(len(values)))
    return _Run(
        pa.RecordBatch.from_arrays([pa.nulls(len(values)), places, values], ["ledger", "entry", "value"])
    ).heads()


def declared_rows(values: pa.LargeBinaryArray) -> int:
    """Return the rows that the headers of entries declare, without looking at their payloads; of faulty ones none.

    Raises UnsupportedVersion.
    """
    places = pa.array(np.arange(len(values)))
    run = _Run(pa.RecordBatch.from_arrays([pa.nulls(len(values)), places, values], ["ledger", "entry", "value"]))
    return run.declared_rows()


@dataclass(slots=True)
class _Names:
    """The VChannel names of a run: one index for all its entries; each distinct dictionary is parsed once."""

    index: dict[str, int]
    parsed: dict[bytes, tuple[int, int] | str]
    flat: list[int]

    def add(self, section: bytes) -> tuple[int, int] | str:
        """Return the position of a dictionary's indices in `flat` and their number, or why it is invalid."""
        known = self.parsed.get(section)
        if known is None:
            known = self.parsed[section] = self._parse(section)
        return known

    def _parse(self, section: bytes) -> tuple[int, int] | str:
        names = parse_names(section)
        if isinstance(names, str):
            return names
        base = len(self.flat)
        self.flat.extend(self.index.setdefault(name, len(self.index)) for name in names)
        return base, len(names)


def parse_names(section: bytes) -> tuple[str, ...] | str:
    """Return the names of an entry's VChannel dictionary, or why it is invalid."""
    count = int.from_bytes(section[:2], "little")
    names: dict[str, None] = {}
    place = 2
    for _ in range(count):
        length = int.from_bytes(section[place : place + 2], "little")
        place += 2
        if length > MAX_NAME_BYTES or place + length > len(section):
            return "its VChannel dictionary is cut short or holds a name above 255 bytes"
        try:
            names[section[place : place + length].decode("utf-8")] = None
        except UnicodeDecodeError:
            return "a VChannel name is not UTF-8"
        place += length
    if place != len(section) or count == 0 or len(names) != count:
        return "its VChannel dictionary is empty, has a name twice, or bytes behind its names"
    return tuple(names)


def _out_of_range(column: HeaderColumn) -> str:
    return f"a value of {column.name} is negative or runs over its width"


class _Run:
    """The entries of one call, as arrays with one value per entry."""

    def __init__(self, entries: pa.RecordBatch) -> None:
        self.entries = entries
        value = entries.column("value")
        _, offsets_buffer, self.buffer = value.buffers()
        count = len(value)
        self.data: Bytes = (
            np.frombuffer(self.buffer, dtype=np.uint8) if self.buffer is not None else np.zeros(0, dtype=np.uint8)
        )
        offsets: Int64s = (
            np.frombuffer(offsets_buffer, dtype=np.int64, count=count + 1, offset=value.offset * 8)
            if count
            else np.zeros(1, dtype=np.int64)
        )
        self.starts = offsets[:-1]
        self.ends = offsets[1:]
        self.lengths = self.ends - self.starts
        self.errors: dict[int, str] = {}
        self.counts = np.ones(count, dtype=np.int64)
        self.bodies = np.zeros(count, dtype=np.int64)
        self.tags = np.zeros((count, len(COLUMNS)), dtype=np.uint8)
        self.places = np.zeros((count, len(COLUMNS)), dtype=np.int64)
        self.name_bases = np.zeros(count, dtype=np.int64)
        self.name_counts = np.ones(count, dtype=np.int64)
        self.names = _Names({}, {}, [])
        self.stamps = np.zeros(count, dtype=np.int64)
        """The length of each entry's stamp."""
        self.principal = np.full(count, -1, dtype=np.int32)
        """Each entry's index in `principals`; -1: no stamp."""
        self.principals: dict[str, int] = {}

    def decode(self) -> MessageColumns:
        self._read()
        # If a pass marks entries with values out of range, one more pass follows; it marks none.
        while (columns := self._columns()) is None:
            pass
        return self._assemble(columns)

    def _read(self) -> None:
        if self.lengths.size == 1:
            self._read_prefix_of_one()
        elif self.lengths.size:
            self._read_prefixes()

    def heads(self) -> HeaderSummary | str:
        self._read()
        if not self.errors:
            types, vchannels = (self._column(place, COLUMNS[place]) for place in (_TYPE, _VCHANNEL))
            if not self.errors:
                if (vchannels >= np.repeat(self.name_counts, self.counts)).any():
                    return _NO_NAME
                return HeaderSummary(types, self._indices(vchannels), list(self.names.index))
        return next(iter(self.errors.values()))

    def declared_rows(self) -> int:
        self._read()
        place = next(place for place, column in enumerate(COLUMNS) if column.name == "rows")
        return int(self._column(place, COLUMNS[place]).sum())

    def _indices(self, vchannels: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Convert indexes in each entry's dictionary to indexes in the run's names."""
        flat = np.array(self.names.flat or [0], dtype=np.int32)
        return flat[vchannels.astype(np.int64) + np.repeat(self.name_bases, self.counts)]

    def _mark(self, entries: Int64s, wrong: npt.NDArray[np.bool_], cause: str) -> None:
        for entry in entries[wrong].tolist():
            self.errors.setdefault(entry, cause)

    def _read_prefixes(self) -> None:
        everything = np.arange(len(self.lengths))
        self._mark(everything, self.lengths < COLUMNS_START, TOO_SHORT)
        entries = everything[self.lengths >= COLUMNS_START]
        prefix = self.data[self.starts[entries, None] + _PREFIX_PLACES].view("<u4").astype(np.int64)
        self._mark(entries, prefix[:, 0] != _MAGIC, NO_MAGIC)
        right = prefix[:, 0] == _MAGIC
        entries, prefix = entries[right], prefix[right]

        whole = self.data.data
        starts, ends = (self.starts[entries] + CRC_START).tolist(), self.ends[entries].tolist()
        crcs = np.array(
            [crc32c.crc32c(whole[start:end]) for start, end in zip(starts, ends, strict=True)], dtype=np.int64
        )
        self._mark(entries, crcs != prefix[:, 1], _WRONG_CHECKSUM)
        right = crcs == prefix[:, 1]
        entries, prefix = entries[right], prefix[right]
        self._check_versions(entries, prefix[:, 2])

        counts, lengths = prefix[:, 3], prefix[:, 4:7]
        tags = self.data[self.starts[entries, None] + _TAG_PLACES]
        sizes = np.where(tags == ARRAY, WIDTHS * counts[:, None], WIDTHS) * (tags != ABSENT)
        wrong_count = (counts < 1) | (counts > MAX_MESSAGES) | (counts * BYTES_PER_MESSAGE > self.lengths[entries])
        word = prefix[:, 2]
        stamps, stamped = word >> 16, word & 0xFF == STAMPED
        self._mark(entries, ~stamped & (word != UNSTAMPED), WRONG_VERSION)
        self._mark(entries, stamped & ~is_stamped(word), WRONG_STAMP)
        self._mark(entries, wrong_count, WRONG_COUNT)
        self._mark(entries, COLUMNS_START + lengths.sum(axis=1) + stamps != self.lengths[entries], WRONG_SECTIONS)
        self._mark(entries, (tags > RAMP).any(axis=1), UNKNOWN_TAG)
        self._mark(entries, sizes.sum(axis=1) != lengths[:, 0], WRONG_COLUMNS)
        if self.errors:
            right = np.array([entry not in self.errors for entry in entries.tolist()], dtype=bool)
            entries, word, counts, lengths, tags, sizes = (
                entries[right],
                word[right],
                counts[right],
                lengths[right],
                tags[right],
                sizes[right],
            )

        columns_start = self.starts[entries] + COLUMNS_START
        self.places[entries] = columns_start[:, None] + np.cumsum(sizes, axis=1) - sizes
        self.tags[entries] = tags
        self.counts[entries] = counts
        self.bodies[entries] = lengths[:, 2]
        for place in np.flatnonzero(word & 0xFF == STAMPED).tolist():
            self._read_stamp(int(entries[place]), int(word[place]))
        self._read_names(entries, columns_start + lengths[:, 0], columns_start + lengths[:, 0] + lengths[:, 1])

    def _read_prefix_of_one(self) -> None:
        """Read the prefix of the only entry, by the rules of :meth:`_read_prefixes` in the same order.

        tests/message/wire/test_hostile.py checks that entries decode alone as in a run.
        """
        start, end = int(self.starts[0]), int(self.ends[0])
        if end - start < COLUMNS_START:
            self.errors[0] = TOO_SHORT
            return
        whole = self.data.data
        magic, crc, version, flags, stamp, count, *sections = PREFIX.unpack_from(whole, start)
        if magic != MAGIC:
            self.errors[0] = NO_MAGIC
            return
        if crc != crc32c.crc32c(whole[start + CRC_START : end]):
            self.errors[0] = _WRONG_CHECKSUM
            return
        self._check_versions(np.zeros(1, dtype=np.int64), np.array([version]))
        tags = self.data[start + TAGS_START : start + COLUMNS_START]
        sizes = np.where(tags == ARRAY, WIDTHS * count, WIDTHS) * (tags != ABSENT)
        if version != STAMPED and (version != UNSTAMPED or flags or stamp):
            self.errors[0] = WRONG_VERSION
        elif version == STAMPED and not (flags <= ASSERTED and 1 <= stamp <= MAX_STAMP_BYTES):
            self.errors[0] = WRONG_STAMP
        elif not 1 <= count <= MAX_MESSAGES or count * BYTES_PER_MESSAGE > end - start:
            self.errors[0] = WRONG_COUNT
        elif COLUMNS_START + sum(sections) + stamp != end - start:
            self.errors[0] = WRONG_SECTIONS
        elif tags.max() > RAMP:
            self.errors[0] = UNKNOWN_TAG
        elif sizes.sum() != sections[0]:
            self.errors[0] = WRONG_COLUMNS
        else:
            columns_start = start + COLUMNS_START
            self.places[0] = columns_start + np.cumsum(sizes) - sizes
            self.tags[0] = tags
            self.counts[0] = count
            self.bodies[0] = sections[2]
            if version == STAMPED:
                self._read_stamp(0, version | flags << 8 | stamp << 16)
            names_start = columns_start + sections[0]
            self._read_names(np.zeros(1, dtype=np.int64), *np.array([[names_start], [names_start + sections[1]]]))

    def _check_versions(self, entries: Int64s, word: Int64s) -> None:
        later = np.flatnonzero((word & 0xFF) > VERSIONS[-1])
        if later.size:
            place = int(entries[later[0]])
            ledger, entry = (self.entries.column(name)[place].as_py() for name in ("ledger", "entry"))
            where = entry if ledger is None else f"{ledger}:{entry}"
            raise UnsupportedVersion(
                f"entry {where} has wire form {int(word[later[0]]) & 0xFF}; this build reads up to {VERSIONS[-1]}: "
                "run the build that wrote it, or a newer one"
            )

    def _read_stamp(self, entry: int, word: int) -> None:
        length = self.stamps[entry] = word >> 16
        name = principal_of(bytes(self.data.data[self.ends[entry] - length : self.ends[entry]]), word >> 8 & 0xFF)
        if name is None:
            self.errors[entry] = WRONG_STAMP
        else:
            self.principal[entry] = self.principals.setdefault(name, len(self.principals))

    def _read_names(self, entries: Int64s, starts: Int64s, ends: Int64s) -> None:
        whole, add = self.data.data, self.names.add
        found = [add(bytes(whole[start:end])) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        for entry, names in zip(entries.tolist(), found, strict=True):
            if isinstance(names, str):
                self.errors[entry] = names
        pairs = [(0, 1) if isinstance(names, str) else names for names in found]
        self.name_bases[entries], self.name_counts[entries] = np.array(pairs, dtype=np.int64).reshape(-1, 2).T

    def _columns(self) -> list[npt.NDArray[Any]] | None:
        """Return each header column over all messages; None if entries were marked invalid for their content."""
        for entry in self.errors:
            self.tags[entry] = ABSENT
            self.counts[entry] = 1
            self.bodies[entry] = min(int(self.lengths[entry]), UNDECODED_PAYLOAD_BYTES)
        before = len(self.errors)
        columns = [self._column(place, column) for place, column in enumerate(COLUMNS)]
        if self.lengths.size:
            first = np.cumsum(self.counts) - self.counts
            sums = np.add.reduceat(columns[_PAYLOAD_LENGTH].astype(np.int64), first)
            good = np.ones(len(self.counts), dtype=bool)
            good[list(self.errors)] = False
            self._mark(
                np.arange(len(good)), good & (sums != self.bodies), "its payload lengths do not sum up to its body"
            )
            types = np.minimum.reduceat(columns[_TYPE], first)
            self._mark(np.arange(len(good)), good & (types == 0), "a message has type 0")
            greatest = np.maximum.reduceat(columns[_VCHANNEL], first)
            self._mark(
                np.arange(len(good)),
                good & (greatest >= self.name_counts),
                _NO_NAME,
            )
        return columns if len(self.errors) == before else None

    def _column(self, place: int, column: HeaderColumn) -> npt.NDArray[Any]:
        if len(self.lengths) == 1:
            return self._column_of_one(place, column)
        tags, dtype = self.tags[:, place], _DTYPES[place]
        total = int(self.counts.sum())
        if not tags.any():
            return np.zeros(total, dtype=dtype)
        values = unaligned_view(self.data, dtype)
        present = tags != ABSENT
        base = np.where(present, self.places[:, place], 0)
        if (tags <= 1).all():
            wide = np.where(present, values[base], 0).astype(np.int64)
            self._mark(np.arange(len(tags)), (wide < 0) | (wide > column.max_value), _out_of_range(column))
            return np.repeat(wide.astype(dtype), self.counts)
        owner = np.repeat(np.arange(len(tags)), self.counts)
        index = np.arange(total) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        wide = values[base[owner] + np.where(tags == ARRAY, column.width, 0)[owner] * index].astype(np.int64)
        wide += (tags == RAMP)[owner] * index
        wide *= present[owner]
        wrong = (wide < 0) | (wide > column.max_value)
        if wrong.any():
            entries = np.unique(owner[wrong])
            self._mark(entries, np.ones(len(entries), dtype=bool), _out_of_range(column))
        return wide.astype(dtype, copy=False)

    def _column_of_one(self, place: int, column: HeaderColumn) -> npt.NDArray[Any]:
        """Return :meth:`_column` for the only entry, without arrays with a value per entry."""
        tag, count, dtype = int(self.tags[0, place]), int(self.counts[0]), _DTYPES[place]
        if tag == ABSENT:
            return np.zeros(count, dtype=dtype)
        given = np.frombuffer(self.data, dtype, count=count if tag == ARRAY else 1, offset=int(self.places[0, place]))
        if tag == CONSTANT:
            value = int(given[0])
            right = 0 <= value <= column.max_value
            values = np.full(count, value, dtype=dtype)
        else:
            wide = given.astype(np.int64) if tag == ARRAY else given[0].astype(np.int64) + np.arange(count)
            right = int(wide.min()) >= 0 and int(wide.max()) <= column.max_value
            values = wide.astype(dtype)
        if not right:
            self.errors.setdefault(0, _out_of_range(column))
        return values

    def _assemble(self, columns: list[npt.NDArray[Any]]) -> MessageColumns:
        counts, errors = self.counts, sorted(self.errors)
        first = np.cumsum(counts) - counts
        total = int(counts.sum())
        lengths = columns[_PAYLOAD_LENGTH].astype(np.int64)
        body_starts = self.ends - self.stamps - self.bodies
        indices = self._indices(columns[_VCHANNEL])
        details: dict[int, str] = {}
        if errors:
            rows = first[errors]
            lengths[rows] = self.bodies[errors]
            body_starts[errors] = self.starts[errors]
            indices[rows] = self.names.index.setdefault("", len(self.names.index))
            details = {row: self.errors[entry] for row, entry in zip(rows.tolist(), errors, strict=True)}
        ids = {
            name: np.repeat(self.entries.column(name).to_numpy(), counts) for name in ("ledger", "entry", "physical_ms")
        }
        plain = {COLUMNS[place].name: columns[place] for place in _PLAIN}
        return MessageColumns(
            **ids,
            **plain,
            index=(np.arange(total) - np.repeat(first, counts)).astype(np.int32),
            vchannel=indices,
            names=list(self.names.index) or [""],
            principal=np.repeat(self.principal, counts) if self.principals else None,
            principals=list(self.principals),
            size=lengths,
            payloads=self._payloads(body_starts, lengths),
            details=details,
        )

    def _payloads(self, body_starts: Int64s, lengths: Int64s) -> pa.LargeBinaryArray:
        """Return the payloads over the entry's own bytes if there is one entry, else with one copy."""
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        data = self.buffer
        if len(self.counts) == 1:
            offsets += body_starts[0]
        elif len(self.counts):
            # Bodies and gaps alternate as elements of one array; taking every other element is the copy.
            bounds = np.empty(2 * len(body_starts), dtype=np.int64)
            bounds[::2] = body_starts
            bounds[1::2] = body_starts + self.bodies
            pieces = pa.LargeBinaryArray.from_buffers(
                pa.large_binary(), len(bounds) - 1, [None, pa.py_buffer(bounds), self.buffer]
            )
            data = pieces.take(pa.array(np.arange(0, len(bounds), 2))).buffers()[2]
        return pa.LargeBinaryArray.from_buffers(
            pa.large_binary(),
            len(lengths),
            [None, pa.py_buffer(offsets), data if data is not None else pa.py_buffer(b"")],
        )

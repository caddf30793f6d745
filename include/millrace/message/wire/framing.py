"""Check by its header whether bytes are an entry, before they are appended to a log.

The check is cheap and decodes nothing: lengths, the magic, the version, and that counts and sections fill the entry
exactly. Checksums, dictionaries, columns and payloads are left to :mod:`millrace.message.wire.decode`, which reads
entries from a log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.message.wire.decode import (
    NO_MAGIC,
    TOO_SHORT,
    UNKNOWN_TAG,
    WRONG_COLUMNS,
    WRONG_COUNT,
    WRONG_SECTIONS,
    WRONG_STAMP,
    WRONG_VERSION,
    Bytes,
    Int64s,
    is_stamped,
    unaligned_view,
)
from millrace.message.wire.layout import (
    ABSENT,
    ARRAY,
    ASSERTED,
    BYTES_PER_MESSAGE,
    COLUMNS_START,
    MAGIC,
    MAX_MESSAGES,
    MAX_STAMP_BYTES,
    PREFIX,
    RAMP,
    STAMPED,
    TAGS_START,
    UNSTAMPED,
    VERSIONS,
    WIDTHS,
)

LATER: Final = f"its wire form is later than {VERSIONS[-1]}: append it through a newer build"

_HEAD: Final = np.dtype([("prefix", "<u4", TAGS_START // 4), ("tags", "u1", COLUMNS_START - TAGS_START)])
_MAGIC: Final = int.from_bytes(MAGIC, "little")
_WIDTHS: Final = tuple(WIDTHS.tolist())


@dataclass(frozen=True, slots=True)
class FramingFault:
    """Invalid entries of an append: the index and cause of the first one, and their number."""

    index: int
    cause: str
    count: int

    @property
    def is_newer_version(self) -> bool:
        """Whether the first one is an entry of a newer version."""
        return self.cause is LATER


def check_framing(values: pa.LargeBinaryArray) -> FramingFault | None:
    """Return what is wrong with the framing of an append's entries (docs/wire-form.md); None if all are valid."""
    if len(values) == 1:
        cause = _cause(values[0].as_buffer())
        return None if cause is None else FramingFault(0, cause, 1)
    offsets = np.frombuffer(values.buffers()[1], np.int64, len(values) + 1, values.offset * 8)
    lengths = np.diff(offsets)
    whole = lengths >= COLUMNS_START
    if values.null_count:
        whole &= values.is_valid().to_numpy(zero_copy_only=False)
    right = whole.copy()
    if whole.any():
        heads = unaligned_view(np.frombuffer(values.buffers()[2], np.uint8), _HEAD)[offsets[:-1][whole]]
        right[whole] = _right(heads["prefix"].astype(np.int64), heads["tags"], lengths[whole])
    if right.all():
        return None
    place = int(np.argmin(right))
    cause = _cause(values[place].as_buffer())
    assert cause is not None
    return FramingFault(place, cause, int((~right).sum()))


def _right(prefix: Int64s, tags: Bytes, lengths: Int64s) -> npt.NDArray[np.bool_]:
    """Return, for entries that are long enough, whether each one's framing is valid, by their fixed parts."""
    word, counts, sections = prefix[:, 2], prefix[:, 3], prefix[:, 4:7]
    stamps = word >> 16
    columns = (tags != ABSENT) @ WIDTHS + (tags == ARRAY) @ WIDTHS * (counts - 1)
    right = (prefix[:, 0] == _MAGIC) & ((word == UNSTAMPED) | is_stamped(word))
    right &= (counts >= 1) & (counts <= MAX_MESSAGES) & (counts * BYTES_PER_MESSAGE <= lengths)
    right &= (COLUMNS_START + sections.sum(axis=1) + stamps == lengths) & (columns == sections[:, 0])
    return right & (tags.max(axis=1) <= RAMP)


def _cause(entry: pa.Buffer | None) -> str | None:
    """Return what is wrong with one entry, in the order of :mod:`millrace.message.wire.decode`."""
    if entry is None or len(entry) < COLUMNS_START:
        return TOO_SHORT
    magic, _, version, flags, stamp, count, columns, names, bodies = PREFIX.unpack_from(entry)
    tags = bytes(memoryview(entry)[TAGS_START:COLUMNS_START])
    if magic != MAGIC:
        return NO_MAGIC
    if version > VERSIONS[-1]:
        return LATER
    if version == STAMPED and not (flags <= ASSERTED and 1 <= stamp <= MAX_STAMP_BYTES):
        return WRONG_STAMP
    if version == 0 or (version == UNSTAMPED and (flags or stamp)):
        return WRONG_VERSION
    if not 1 <= count <= MAX_MESSAGES or count * BYTES_PER_MESSAGE > len(entry):
        return WRONG_COUNT
    if COLUMNS_START + columns + names + bodies + stamp != len(entry):
        return WRONG_SECTIONS
    if max(tags) > RAMP:
        return UNKNOWN_TAG
    filled = sum(width * (count if tag == ARRAY else 1) for tag, width in zip(tags, _WIDTHS, strict=True) if tag)
    return None if filled == columns else WRONG_COLUMNS

"""A content digest of WAL rows that depends neither on their order nor on batch boundaries.

Each row is hashed over all its columns but ``detail`` (an explanation, not content). The digest of a set of rows is the
sum of their hashes in two lanes modulo 2**64. So digests of ranges add up: the digest of the whole WAL is known without
reading it again, and a missing, duplicated or altered row shows. It protects against faults, not against an adversary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from millrace.base.errors import Malformed

U64 = npt.NDArray[np.uint64]

_MASK: Final = (1 << 64) - 1
"""Sums are taken modulo 2**64, so that the digest does not depend on the order of rows or on batch boundaries."""
_INTEGERS: Final = (
    "time_tick",
    "ledger",
    "entry",
    "index",
    "ordinal",
    "physical_ms",
    "term",
    "lc_ledger",
    "lc_entry",
    "lc_index",
    "lc_ordinal",
    "collection_id",
    "partition_id",
    "segment_id",
    "schema_version",
    "rows",
    "txn_id",
    "producer_id",
    "epoch",
    "sequence",
)
_STRINGS: Final = ("type", "vchannel", "reason")
_PRINCIPAL: Final = "principal"
"""A row without one has the digest that it had before there was this column."""
_PAYLOAD_SEED: Final = 0x6D696C6C72616365  # a null payload counts as empty
_MAX_ROWS: Final = 1 << 14  # a block of columns stays in the CPU's cache


def _constants(lane: int) -> dict[str, np.uint64]:
    """Return an odd multiplier for each column, derived from its name. Stored digests depend on it."""
    names = (*_INTEGERS, *_STRINGS, "payload", _PRINCIPAL)
    return {name: np.uint64(xxhash.xxh3_64_intdigest(name.encode(), seed=lane) | 1) for name in names}


_LANES: Final = (_constants(1), _constants(2))


@dataclass(frozen=True, slots=True)
class WalDigest:
    """The digest of a multiset of rows: two sums modulo 2**64 and the row count. ``+`` is the union."""

    low: int = 0
    high: int = 0
    rows: int = 0

    def __add__(self, other: WalDigest) -> WalDigest:
        return WalDigest((self.low + other.low) & _MASK, (self.high + other.high) & _MASK, self.rows + other.rows)

    def __sub__(self, other: WalDigest) -> WalDigest:
        return WalDigest((self.low - other.low) & _MASK, (self.high - other.high) & _MASK, self.rows - other.rows)

    def __str__(self) -> str:
        return f"{self.high:016x}{self.low:016x}-{self.rows}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of a digest. Raises Malformed."""
        sums, _, rows = text.partition("-")
        try:
            if len(sums) != 32:
                raise ValueError
            return cls(int(sums[16:], 16), int(sums[:16], 16), int(rows))
        except ValueError:
            raise Malformed(f"{text!r} is not a digest of WAL rows") from None


def payload_hashes(column: pa.Array) -> U64:
    """Return the XXH3-64 of each value of a (large) binary or string array. A null counts as empty."""
    if not pa.types.is_large_binary(column.type):
        column = column.cast(pa.large_binary())
    size = len(column)
    if size == 0:
        return np.zeros(0, dtype=np.uint64)
    if column.null_count:
        column = column.fill_null(b"")
    _, offset_buffer, data = column.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int64)[column.offset : column.offset + size + 1].tolist()
    # Slices of the Arrow buffer are hashed in place: no Python bytes object per value.
    view = memoryview(data if data is not None else b"")
    values = map(view.__getitem__, map(slice, offsets, offsets[1:]))
    return np.fromiter(map(xxhash.xxh3_64_intdigest, values, [_PAYLOAD_SEED] * size), dtype=np.uint64, count=size)


def digest_rows(rows: pa.RecordBatch | pa.Table) -> WalDigest:
    """Return the digest of rows with the columns of :data:`millrace.wal.schema.ROW_SCHEMA` (strings plain or
    dictionary).

    Takes about 0.4 µs per row of 1 KB on one core.
    """
    total = WalDigest()
    batches = rows.to_batches() if isinstance(rows, pa.Table) else [rows]
    for batch in batches:
        for start in range(0, batch.num_rows, _MAX_ROWS):
            total += _digest(batch.slice(start, _MAX_ROWS))
    return total


def _digest(batch: pa.RecordBatch) -> WalDigest:
    columns: dict[str, U64] = {}
    for name in _INTEGERS:
        # Widen to int64 first: the digest must not depend on a column's stored width.
        columns[name] = batch.column(name).to_numpy(zero_copy_only=False).astype(np.int64, copy=False).view(np.uint64)
    for name in _STRINGS:
        columns[name] = _string_hashes(batch.column(name))
    if _PRINCIPAL in batch.schema.names and batch.column(_PRINCIPAL).null_count < batch.num_rows:
        columns[_PRINCIPAL] = _string_hashes(batch.column(_PRINCIPAL))
    columns["payload"] = payload_hashes(batch.column("payload"))
    sums = []
    for constants in _LANES:
        mixed = np.zeros(batch.num_rows, dtype=np.uint64)
        product = np.empty_like(mixed)
        # One product buffer for all columns: temporary arrays would leave the CPU's cache.
        for name, values in columns.items():
            np.multiply(values, constants[name], out=product)
            np.add(mixed, product, out=mixed)
        # Finalise each row before the sum. Without that, exchanging values between two rows would leave the sum
        # unchanged.
        sums.append(int(_finish(mixed).sum(dtype=np.uint64)))
    return WalDigest(sums[0], sums[1], batch.num_rows)


def _string_hashes(column: pa.Array) -> U64:
    """Hash strings through their dictionary. Null hashes to 0, which no string of the WAL does."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    words = [xxhash.xxh3_64_intdigest(word.encode()) for word in encoded.dictionary.to_pylist()]
    table = np.array([*words, 0], dtype=np.uint64)
    indices = encoded.indices.fill_null(len(words)) if encoded.null_count else encoded.indices
    return table[indices.to_numpy(zero_copy_only=False)]


def _finish(mixed: U64) -> U64:
    """Apply the finaliser of MurmurHash3: every input bit reaches every output bit."""
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(multiplier)
    return mixed ^ (mixed >> np.uint64(33))

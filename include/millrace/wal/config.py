"""Settings of the chain's decisions. They are part of the channel state and change only by a message (law 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Final, Self

from millrace.base.errors import Malformed

_MIB: Final = 1 << 20
_DAY_MS: Final = 86_400_000

BOUNDS: Final[Mapping[str, tuple[int, int]]] = {
    "max_message_bytes": (1, 1 << 30),
    "segment_bytes": (1, 1 << 40),
    "segment_rows": (1, 1 << 50),
    "segment_lifetime_ms": (1, 366 * _DAY_MS),
    "segment_idle_bytes": (1, 1 << 40),
    "segment_idle_ms": (1, 366 * _DAY_MS),
    "blocking_delete_rows": (1, 1 << 50),
    "max_txn_keepalive_ms": (1, _DAY_MS),
    "default_txn_keepalive_ms": (1, _DAY_MS),
    "max_txn_lifetime_ms": (1, 30 * _DAY_MS),
    "max_txn_bytes": (1, 1 << 40),
    "max_open_txns": (1, 1 << 16),
    "dedup_results": (1, 1024),
    "max_producers": (1, 1 << 16),
    "max_vchannels": (1, 1 << 16),
    "max_partitions": (1, 1 << 16),
}
"""Minimum and maximum of each key."""


@dataclass(frozen=True, slots=True)
class ChainConfig:
    """Thresholds of one PChannel in bytes, rows, milliseconds of log time, and counts. Defaults follow Milvus where it
    has them.
    """

    max_message_bytes: int = 16 * _MIB
    segment_bytes: int = 123 * _MIB
    segment_rows: int = 1 << 40
    segment_lifetime_ms: int = _DAY_MS
    segment_idle_bytes: int = 16 * _MIB
    segment_idle_ms: int = 600_000
    blocking_delete_rows: int = 5_000_000
    max_txn_keepalive_ms: int = 600_000
    default_txn_keepalive_ms: int = 10_000
    max_txn_lifetime_ms: int = 3_600_000
    max_txn_bytes: int = 256 * _MIB
    max_open_txns: int = 1024
    dedup_results: int = 16
    max_producers: int = 1024
    max_vchannels: int = 1024
    max_partitions: int = 4096

    def with_changes(self, values: Mapping[str, int]) -> Self:
        """Return this config with `values` set. Raises Malformed for an unknown key or a value out of bounds."""
        for key, value in values.items():
            if key not in BOUNDS:
                raise Malformed(f"{key!r} is not a key of the chain's config; its keys are {', '.join(sorted(BOUNDS))}")
            low, high = BOUNDS[key]
            if type(value) is not int or not low <= value <= high:
                raise Malformed(f"{key} must be an integer from {low} to {high}, not {value!r}")
        return replace(self, **values)

    def to_json(self) -> dict[str, int]:
        return asdict(self)


KEYS: Final = tuple(field.name for field in fields(ChainConfig))

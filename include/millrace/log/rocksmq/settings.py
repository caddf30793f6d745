"""Settings of the embedded log, validated before use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

from millrace.base.errors import InvalidSettings
from millrace.log.rocksmq.stamp_clock import MAX_LEAP_SECONDS
from millrace.message.log_entries import DEFAULT_MAX_ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class RocksMQSettings:
    """Sizes in bytes, times in seconds (``retention_ms`` in milliseconds). Every host of one data folder uses the same
    settings.
    """

    segment_bytes: int = 64 << 20
    """Size of a preallocated segment file."""
    spare_files: int = 8
    """Files freed by truncation that each channel keeps for reuse."""
    max_entry_bytes: int = DEFAULT_MAX_ENTRY_BYTES
    group_bytes: int = 8 << 20
    """Bytes that a group commit collects before it writes. A batch is never split."""
    recent_bytes: int = 32 << 20
    """Bytes of a channel's newest entries kept in memory, for readers that follow closely: about what a pipelined
    producer has in flight. 0: none.
    """
    lock_wait: float = 5.0
    """Time that opening waits for the lock of a process that was just killed."""
    retention_bytes: int = 0
    """Size limit of a channel, as far as the checkpoint allows; 0: no limit."""
    retention_ms: int = 0
    """Age limit of entries, as far as the checkpoint allows; 0: no limit."""
    clock_leap: float = MAX_LEAP_SECONDS
    """Largest leap ahead of the wall clock, relative to the steady clock, that is accepted; 0: any."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
                raise InvalidSettings(f"rocksmq.{field.name} must be a number of at least 0, not {value!r}")
        if self.segment_bytes < 4096:
            raise InvalidSettings("rocksmq.segment_bytes must be at least 4096")
        if not 1 <= self.max_entry_bytes < 1 << 31:
            raise InvalidSettings("rocksmq.max_entry_bytes must be between 1 and 2147483647")

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Self:
        """Return settings from a mapping by name.

        Raises InvalidSettings for unknown names and invalid values.
        """
        known = {field.name: field.type for field in fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise InvalidSettings(f"unknown rocksmq setting {unknown[0]!r}; known are {', '.join(sorted(known))}")
        parsed: dict[str, object] = {}
        for name, value in values.items():
            try:
                parsed[name] = float(str(value)) if known[name] == "float" else int(str(value))
            except ValueError:
                raise InvalidSettings(f"rocksmq.{name} must be a number, not {value!r}") from None
        return cls(**parsed)  # type: ignore[arg-type]

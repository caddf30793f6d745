"""Leases of a log's consumer groups: of several consumers of a group, one reads a channel; the others are refused.

The process that serves a log to all consumers of its groups has the leases in memory. After it restarts, a consumer
gets its lease back with its next renewal, or an error if another consumer has taken it in between.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from millrace.base.errors import GroupBusy, InvalidArgument

MAX_SECONDS: Final = 600.0
MAX_LEASES: Final = 65_536
"""Leases at one time; more are refused until some end."""
_MAX_HOLDER: Final = 255


@dataclass(slots=True)
class _Lease:
    holder: str
    until: float
    renewals: int


class GroupLeases:
    """The leases of one process, by group and channel. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], _Lease] = {}

    def hold(self, group: str, channel: str, holder: str, *, seconds: float) -> None:
        """Take or renew the lease of `holder` for `seconds`; 0 gives it back. See LogService.hold_group."""
        if not 0 <= seconds <= MAX_SECONDS:
            raise InvalidArgument(f"a group is held for 0 to {MAX_SECONDS:g} seconds, not {seconds}")
        if not 1 <= len(holder) <= _MAX_HOLDER:
            raise InvalidArgument(f"the holder of a group has a name of 1 to {_MAX_HOLDER} characters")
        with self._lock:
            now, key = self._clock(), (group, channel)
            lease = self._held.get(key)
            if lease is not None and lease.holder != holder and lease.until > now:
                if seconds == 0:
                    return
                raise GroupBusy(
                    f"another consumer of the group {group!r} reads {channel!r}, with a lease for another "
                    f"{lease.until - now:.1f} s: close it, or use another group",
                    renewals=lease.renewals,
                )
            if seconds == 0:
                self._held.pop(key, None)
                return
            if lease is None or lease.holder != holder:
                self._make_room(now)
                lease = self._held[key] = _Lease(holder, 0.0, 0)
            lease.until, lease.renewals = now + seconds, lease.renewals + 1

    def _make_room(self, now: float) -> None:
        if len(self._held) < MAX_LEASES:
            return
        self._held = {key: lease for key, lease in self._held.items() if lease.until > now}
        if len(self._held) >= MAX_LEASES:
            raise GroupBusy(f"{MAX_LEASES} channels of groups are held, the limit: close some consumers")


class LeasesInProcess:
    """A log service whose groups have leases among the consumers of this process."""

    @cached_property
    def _group_leases(self) -> GroupLeases:
        return GroupLeases()

    def hold_group(self, group: str, pchannel: str, holder: str, *, seconds: float) -> None:
        """See :meth:`millrace.log.protocol.LogService.hold_group`."""
        self._group_leases.hold(group, pchannel, holder, seconds=seconds)

"""The list of created channels and their owners, used by millrace.msgstream.channels.

Without a meta store it is a log of its own, ``_channels``, beside the channels: as durable as they are, on any
backend, written by any number of processes. The log is compacted now and then: live creations are appended again and
everything before them is truncated, so it has about two entries for each creation with remaining channels. If a meta
store is configured, the list is there (millrace.msgstream.meta_registry), and the log says so.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Protocol

from millrace.base.errors import (
    ChannelExists,
    InvalidArgument,
    InvalidSettings,
    Malformed,
    MillraceError,
    PositionTruncated,
    UnsupportedVersion,
)
from millrace.log.protocol import Log, LogService
from millrace.message.ids import LogId

REGISTRY: Final = "_channels"
MAX_EVENT_BYTES: Final = 256 << 10
MIN_EVENTS: Final = 256
"""Events since the last compaction before the next one."""

_VERSION: Final = 1
_MOVED_VERSION: Final = 2
"""Version of the event that ends the log. Builds that know no other storage refuse it."""
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChannelCreation:
    """Channels that were created in one call and still exist."""

    channels: tuple[str, ...]
    owner: Mapping[str, str]
    attributes: Mapping[str, str]

    def encode(self, *, again: bool = False) -> bytes:
        """Return the creation as an event; `again` marks events of a compaction.

        Raises InvalidArgument.
        """
        event = {"version": _VERSION, "op": "create", **asdict(self), **({"again": True} if again else {})}
        try:
            data = json.dumps(event, sort_keys=True).encode()
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"a channel's description must be text ({error})") from None
        if len(data) > MAX_EVENT_BYTES:
            raise InvalidArgument(
                f"a channel's description has at most {MAX_EVENT_BYTES} bytes, not {len(data)}: shorten it"
            )
        return data

    @classmethod
    def decode(cls, value: bytes) -> ChannelCreation:
        """Raises Malformed, UnsupportedVersion."""
        event = _event(value)
        if isinstance(event, dict) and (created := _creation(event)) is not None:
            return created
        raise Malformed(f"not a creation of channels: {value[:80]!r}")

    def without(self, names: Collection[str]) -> ChannelCreation:
        return replace(self, channels=tuple(name for name in self.channels if name not in names))


class Registry(Protocol):
    """Storage of creations, for any number of processes. A failed write may have been made, and may be repeated."""

    def known(self) -> list[ChannelCreation]:
        """Return creations with remaining channels, in order of creation."""
        ...

    def add(self, creation: ChannelCreation) -> None:
        """Store a creation, durably."""
        ...

    def remove(self, names: Collection[str]) -> None:
        """Remove these channels, durably. Unknown ones are ignored."""
        ...


class LogRegistry:
    """The registry in the log itself. Raises the log's errors, and InvalidSettings if the registry is in a
    meta store.
    """

    def __init__(self, service: LogService) -> None:
        self._service = service

    def known(self) -> list[ChannelCreation]:
        if REGISTRY not in self._service.names():
            return []
        with open_registry_log(self._service) as log:
            events = RegistryEvents.of(log)
        if events.moved is not None:
            raise _moved()
        return events.creations()

    def add(self, creation: ChannelCreation) -> None:
        self._write(creation.encode())

    def remove(self, names: Collection[str]) -> None:
        self._write(json.dumps({"version": _VERSION, "op": "destroy", "channels": sorted(names)}).encode())

    def _write(self, event: bytes) -> None:
        with open_registry_log(self._service, make=True) as log:
            (written,) = log.append([event])
            events = RegistryEvents.of(log)
            if events.moved is not None and events.moved < written:
                raise _moved()
            if events.count > max(MIN_EVENTS, len(events.by_name)):
                try:
                    _compact(log, events)
                except MillraceError as error:  # the event is written; the next write can compact
                    _log.warning("could not compact the log %s: %s: %s", REGISTRY, error.code, error)


class RegistryEvents:
    """The state that the registry's log describes."""

    def __init__(self, position: LogId) -> None:
        self.next = position
        """Position after the last event."""
        self.by_name: dict[str, ChannelCreation] = {}
        self.count = 0
        """Number of events since the last compaction."""
        self.moved: LogId | None = None
        """Id of the event after which the registry is in a meta store; later events do not count."""
        self.space = ""
        """Space of the registry in the meta store."""

    @classmethod
    def of(cls, log: Log) -> RegistryEvents:
        while True:
            found = cls(log.describe().begin)
            try:
                while (run := log.read(found.next)).batch.num_rows:
                    for ledger, entry, _, value in zip(*(column.to_pylist() for column in run.batch), strict=True):
                        found._apply(LogId(ledger, entry), value)
                    found.next = run.next
                return found
            except PositionTruncated:
                pass  # another process has just compacted it

    def creations(self) -> list[ChannelCreation]:
        """Return the creations, in order."""
        names: dict[int, list[str]] = {}
        for name, creation in self.by_name.items():
            names.setdefault(id(creation), []).append(name)
        return [replace(self.by_name[each[0]], channels=tuple(each)) for each in names.values()]

    def _apply(self, at: LogId, value: bytes) -> None:
        if self.moved is not None:
            return
        event = _event(value)
        match event:
            case {"op": "moved", "space": str(space)}:
                self.moved, self.space = at, space
            case {"op": "create"} if (created := _creation(event)) is not None:
                self.by_name.update(dict.fromkeys(created.channels, created))
                self.count = 0 if "again" in event else self.count + 1
            case {"op": "destroy", "channels": [*names]}:
                self.count += 1
                for name in names:
                    self.by_name.pop(str(name), None)
            case _:
                raise Malformed(f"the log {REGISTRY} has an entry that is not a channel event: {event!r:.80}")


def moved_event(space: str) -> bytes:
    """Return the event that ends the log."""
    return json.dumps({"version": _MOVED_VERSION, "op": "moved", "space": space}).encode()


@contextmanager
def open_registry_log(service: LogService, *, make: bool = False) -> Iterator[Log]:
    """Open the registry's log."""
    if make and REGISTRY not in service.names():
        try:
            service.create(REGISTRY)
        except ChannelExists:
            pass  # another process created it concurrently
    log = service.open(REGISTRY)
    try:
        yield log
    finally:
        log.close()


def _compact(log: Log, events: RegistryEvents) -> None:
    """Compact the log: append live creations again and truncate earlier events. Concurrent events of others stay."""
    again = [creation.encode(again=True) for creation in events.creations()]
    written = log.append(again) if again else ()
    moved = RegistryEvents.of(log).moved
    # otherwise the process that moves it must still read the old events
    if moved is None or not written or moved > written[-1]:
        log.truncate(events.next)


def _event(value: bytes) -> Any:
    try:
        event = json.loads(value)
    except (ValueError, RecursionError):
        return value
    match event:
        case {"version": int(version), "op": op} if version not in (_VERSION, _MOVED_VERSION) or (
            version == _MOVED_VERSION
        ) != (op == "moved"):
            raise UnsupportedVersion(
                f"the registry of channels has an event of version {version}; this build knows {_VERSION}"
            )
    return event


def _creation(event: Mapping[str, Any]) -> ChannelCreation | None:
    match event:
        case {
            "channels": [*names],
            "owner": {"role": str(role), "address": str(address), "description_text": str(text)},
            "attributes": dict(attributes),
        }:
            owner = {"role": role, "address": address, "description_text": text}
            return ChannelCreation(tuple(map(str, names)), owner, attributes)
    return None


def _moved() -> InvalidSettings:
    return InvalidSettings(
        f"the channel registry of this log is in a meta store, as its log {REGISTRY} says: set MILLRACE_META_STORE"
        " to that store"
    )

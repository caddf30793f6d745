"""Which channels were created, and for whom: what stands behind millrace.msgstream.channels.

Without a meta store it is a log of its own, ``_channels``, beside the channels: as durable as they are, on any backend, and any
number of processes write it at once. What was created is written anew now and then, and what stands before that is given up, so that it has
about two entries for each creation that has channels still. Where a meta store is named it lies there (millrace.msgstream.meta_registry),
and the log says so.
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
"""Events since the log was written anew, before that is done again."""

_VERSION: Final = 1
_MOVED_VERSION: Final = 2
"""The version of the event that ends the log: builds that know no other place refuse it."""
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChannelCreation:
    """Channels that were created together, those that are not destroyed."""

    channels: tuple[str, ...]
    owner: Mapping[str, str]
    attributes: Mapping[str, str]

    def encode(self, *, again: bool = False) -> bytes:
        """As an event; `again`: as the first ones of a log that is written anew. Raises InvalidArgument."""
        event = {"version": _VERSION, "op": "create", **asdict(self), **({"again": True} if again else {})}
        try:
            data = json.dumps(event, sort_keys=True).encode()
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"a channel's description is text ({error})") from None
        if len(data) > MAX_EVENT_BYTES:
            raise InvalidArgument(
                f"a description has at most {MAX_EVENT_BYTES} bytes, not {len(data)}: shorten its texts"
            )
        return data

    @classmethod
    def decode(cls, value: bytes) -> ChannelCreation:
        """Raises Malformed, UnsupportedVersion."""
        event = _event(value)
        if isinstance(event, dict) and (created := _creation(event)) is not None:
            return created
        raise Malformed(f"this is no creation of channels: {value[:80]!r}")

    def without(self, names: Collection[str]) -> ChannelCreation:
        return replace(self, channels=tuple(name for name in self.channels if name not in names))


class Registry(Protocol):
    """Any number of processes. What a call that failed was to write may stand all the same, and may be written again."""

    def known(self) -> list[ChannelCreation]:
        """What was created and has channels that were not removed, in the order that it came."""
        ...

    def add(self, creation: ChannelCreation) -> None:
        """Keep a creation, durably."""
        ...

    def remove(self, names: Collection[str]) -> None:
        """Forget these channels, durably; nothing where they are not known."""
        ...


class LogRegistry:
    """The registry in the log itself (the protocol Registry). Raises what the log does, InvalidSettings where it lies in a meta store."""

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
                    _write_anew(log, events)
                except MillraceError as error:  # what was asked for stands; the next one is as good
                    _log.warning("the log %s is not shortened now: %s: %s", REGISTRY, error.code, error)


class RegistryEvents:
    """What the log of the registry says."""

    def __init__(self, position: LogId) -> None:
        self.next = position
        """Behind the last event."""
        self.by_name: dict[str, ChannelCreation] = {}
        self.count = 0
        """Of the events since the log was written anew."""
        self.moved: LogId | None = None
        """Where it says that what stands before it moved; nothing counts behind that."""
        self.space = ""
        """Where to in the meta store."""

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
                pass  # another process has written it anew just now

    def creations(self) -> list[ChannelCreation]:
        """What is known, in the order that it came."""
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
                raise Malformed(f"the log {REGISTRY} has an entry that is no event of a channel: {event!r:.80}")


def moved_event(space: str) -> bytes:
    """The event that ends the log."""
    return json.dumps({"version": _MOVED_VERSION, "op": "moved", "space": space}).encode()


@contextmanager
def open_registry_log(service: LogService, *, make: bool = False) -> Iterator[Log]:
    """The log of the registry."""
    if make and REGISTRY not in service.names():
        try:
            service.create(REGISTRY)
        except ChannelExists:
            pass  # another process made it in this moment
    log = service.open(REGISTRY)
    try:
        yield log
    finally:
        log.close()


def _write_anew(log: Log, events: RegistryEvents) -> None:
    """Have what is known once more at the end, and give up what stands before. What others wrote meanwhile stays."""
    again = [creation.encode(again=True) for creation in events.creations()]
    written = log.append(again) if again else ()
    moved = RegistryEvents.of(log).moved
    if moved is None or not written or moved > written[-1]:  # else who moved it has to read the old ones
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
        f"the channels of this log stand in a meta store, as its log {REGISTRY} says: set MILLRACE_META_STORE as those have it who use it"
    )
